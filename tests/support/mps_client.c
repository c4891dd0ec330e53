/* What a client of MPS does first: it connects to the daemon's socket and sends something. Prints what comes back. */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int main(int argc, char **argv) {
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/tmp/nvidia-mps/control"};
    char answer[256];
    int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    ssize_t length;
    if (argc != 2 || connect(connection, (struct sockaddr *)&address, sizeof address) ||
        send(connection, argv[1], strlen(argv[1]), 0) < 0 || (length = recv(connection, answer, sizeof answer, 0)) < 0) {
        perror("mps_client");
        return 1;
    }
    return fwrite(answer, 1, length, stdout) != (size_t)length;
}

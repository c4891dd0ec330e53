/* A program whose threads come and go: SIGUSR2 starts one, SIGUSR1 ends the one that takes it, the first one, too. */
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

static void *rest(void *unused)
{
	for (;;)
		pause();
	return unused;
}

static void start(int number)
{
	pthread_t thread;

	(void)number;
	pthread_create(&thread, 0, rest, 0);
}

static void end(int number)
{
	(void)number;
	syscall(SYS_exit, 0); /* of this thread alone; exit_group(2) is another */
}

int main(void)
{
	struct sigaction on = {.sa_flags = SA_NODEFER};

	on.sa_handler = end;
	sigaction(SIGUSR1, &on, 0);
	on.sa_handler = start;
	sigaction(SIGUSR2, &on, 0);
	rest(0);
}

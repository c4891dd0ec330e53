/* A stand-in for nvidia-smi: loads the management library as the real one does, then lists the device nodes. */
#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <sys/stat.h>

int main(void) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "nvidia-smi: %s\n", dlerror());
        return 12;
    }
    const char *(*version)(void) = (const char *(*)(void))dlsym(library, "stub_version");
    printf("nvidia-smi: SIMULATION of driver %s, no GPU behind it\n", version());
    glob_t nodes;
    if (glob("/dev/nvidia*", 0, NULL, &nodes)) return 0;
    for (size_t i = 0; i < nodes.gl_pathc; i++) {
        struct stat found;
        if (!stat(nodes.gl_pathv[i], &found) && S_ISCHR(found.st_mode)) puts(nodes.gl_pathv[i]);
    }
    return 0;
}

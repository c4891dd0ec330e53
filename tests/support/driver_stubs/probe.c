/* Loads each library named on the command line the way CUDA programs do, calls into it, and says where it came from. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

static int call(void *library) {
    int (*version)(int *) = (int (*)(int *))dlsym(library, "cuDriverGetVersion");
    int (*compiler)(void) = (int (*)(void))dlsym(library, "stub_open_compiler");
    const char *(*name)(void) = (const char *(*)(void))dlsym(library, "stub_version");
    int answer = 0;
    if (version && (version(&answer) || answer != 13000)) return 1;
    if (compiler && (answer = compiler())) return 10 + answer;
    return name && !strlen(name());
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        void *library = dlopen(argv[i], RTLD_NOW);
        if (!library) {
            printf("%s: %s\n", argv[i], dlerror());
            continue;
        }
        struct link_map *map;
        dlinfo(library, RTLD_DI_LINKMAP, &map);
        int failed = call(library);
        if (failed) return failed;
        printf("%s -> %s\n", argv[i], map->l_name);
    }
    return 0;
}

/* Loads libcuda the way CUDA programs do and says which build it is: where it lies, and which CUDA it speaks. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "libcuda.so.1";
    void *library = dlopen(name, RTLD_NOW);
    if (!library) {
        printf("%s: %s\n", name, dlerror());
        return 1;
    }
    struct link_map *map;
    dlinfo(library, RTLD_DI_LINKMAP, &map);
    int (*version)(int *) = (int (*)(int *))dlsym(library, "cuDriverGetVersion");
    int answer = 0;
    if (version && version(&answer)) return 2;
    printf("%s CUDA %d\n", map->l_name, answer);
    return 0;
}

/* Starts CUDA with the libcuda that the loader finds, and says where that was, which CUDA it is and what cuInit said. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>

int main(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("%s\n", dlerror());
        return 1;
    }
    int (*version)(int *) = (int (*)(int *))dlsym(library, "cuDriverGetVersion");
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
    struct link_map *map;
    int cuda = 0;
    dlinfo(library, RTLD_DI_LINKMAP, &map);
    version(&cuda);
    printf("%s CUDA %d, cuInit %d\n", map->l_name, cuda, init(0));
    return 0;
}

/* Takes so many GiB of GPU 0's memory and keeps them until its standard input ends: a client of MPS to be limited.
 *
 * libcuda.so.1 is opened by name and nothing else of CUDA is needed. Prototypes are those of the CUDA Driver API.
 * Prints "allocated N GiB" or "cuMemAlloc_v2: CUDA error E"; exits 0, 1 when the driver said no, 2 without libcuda.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef void *CUcontext;

static void *library;

static void *symbol(const char *name)
{
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "libcuda has no %s\n", name);
        exit(2);
    }
    return found;
}

static void check(CUresult result, const char *call)
{
    if (result) {
        printf("%s: CUDA error %d\n", call, result);
        exit(1);
    }
}

#define CALL(name, types, ...) check(((CUresult(*) types)symbol(name))(__VA_ARGS__), name)

int main(int argc, char **argv)
{
    CUdevice device;
    CUcontext context;
    CUdeviceptr memory;
    size_t gib = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;

    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    CALL("cuInit", (unsigned), 0);
    CALL("cuDeviceGet", (CUdevice *, int), &device, 0);
    CALL("cuCtxCreate_v2", (CUcontext *, unsigned, CUdevice), &context, 0, device);
    CALL("cuMemAlloc_v2", (CUdeviceptr *, size_t), &memory, gib << 30);
    printf("allocated %zu GiB\n", gib);
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}

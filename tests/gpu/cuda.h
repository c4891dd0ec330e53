/* What the CUDA programs here share. libcuda.so.1 is opened by name, as every CUDA program's runtime does, and nothing else
 * of CUDA is needed. Types and constants are those of the CUDA Driver API.
 *
 * A program says on SAYS (stderr by default) what failed, and exits with 1, or with 2 without libcuda.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#ifndef SAYS
#define SAYS stderr
#endif

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef void *CUcontext, *CUmodule, *CUfunction, *CUstream;

static void *library;

static void open_library(void)
{
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
}

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
        fprintf(SAYS, "%s: CUDA error %d\n", call, result);
        exit(1);
    }
}

/* Calls NAME with the given prototype and arguments, and ends the program when it fails. */
#define CALL(name, types, ...) check(((CUresult(*) types)symbol(name))(__VA_ARGS__), name)

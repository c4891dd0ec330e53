/* A CUDA program that stores to an address which is nobody's, on GPU 0: the driver ends its context and logs an XID.
 *
 * The error is this program's alone: other programs on the GPU go on. libcuda.so.1 is opened by name and nothing else of
 * CUDA is needed. Prototypes and constants are those of the CUDA Driver API.
 *
 * Prints "cuCtxSynchronize: CUDA error 700" (or another code) and exits 0 when the kernel failed; exits 1 when the driver
 * said no before, or when nothing failed; 2 without libcuda.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext, *CUmodule, *CUfunction, *CUstream;

static const char *const PTX =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry store()\n{\n"
    ".reg .b32 %r<2>;\n.reg .b64 %d<2>;\n"
    "mov.u64 %d1, 4096;\nmov.u32 %r1, 1;\nst.global.u32 [%d1], %r1;\nret;\n}\n";

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
        fprintf(stderr, "%s: CUDA error %d\n", call, result);
        exit(1);
    }
}

/* Calls NAME with the given prototype and arguments, and ends the program when it fails. */
#define CALL(name, types, ...) check(((CUresult(*) types)symbol(name))(__VA_ARGS__), name)

int main(void)
{
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction function;
    CUresult result;

    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    CALL("cuInit", (unsigned), 0);
    CALL("cuDeviceGet", (CUdevice *, int), &device, 0);
    CALL("cuDevicePrimaryCtxRetain", (CUcontext *, CUdevice), &context, device);
    CALL("cuCtxSetCurrent", (CUcontext), context);
    CALL("cuModuleLoadData", (CUmodule *, const void *), &module, PTX);
    CALL("cuModuleGetFunction", (CUfunction *, CUmodule, const char *), &function, module, "store");
    CALL("cuLaunchKernel",
         (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **),
         function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    result = ((CUresult(*)(void))symbol("cuCtxSynchronize"))();
    printf("cuCtxSynchronize: CUDA error %d\n", result);
    return result ? 0 : 1;
}

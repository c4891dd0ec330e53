/* A CUDA program that stores to an address which is nobody's, on GPU 0: the driver ends its context and logs an XID.
 *
 * The error is this program's alone: other programs on the GPU go on.
 *
 * Prints "cuCtxSynchronize: CUDA error 700" (or another code) and exits 0 when the kernel failed; exits 1 when the driver
 * said no before, or when nothing failed; 2 without libcuda.
 */
#include "cuda.h"

static const char *const PTX =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry store()\n{\n"
    ".reg .b32 %r<2>;\n.reg .b64 %d<2>;\n"
    "mov.u64 %d1, 4096;\nmov.u32 %r1, 1;\nst.global.u32 [%d1], %r1;\nret;\n}\n";

int main(void)
{
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction function;
    CUresult result;

    open_library();
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

/* A CUDA program with nothing but libcuda: adds two vectors on GPU 0 and checks the sum.
 *
 * It is linked to no CUDA library and needs no toolkit: libcuda.so.1 is opened by name, as every CUDA program's runtime
 * does, so that finding it is part of the test; the kernel is PTX, so that the driver's JIT compiler is as well.
 * Prototypes and constants are those of the CUDA Driver API.
 *
 * Prints "GPUs N" and "vector add ok on <name>"; exits 0 when both worked, 1 when the driver said no, 2 without libcuda.
 */
#include "cuda.h"

#define N 4096

static const char *const PTX =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry add(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u32 pn)\n{\n"
    ".reg .pred %p;\n.reg .f32 %f<4>;\n.reg .b32 %r<6>;\n.reg .b64 %d<8>;\n"
    "ld.param.u64 %d1, [pa];\nld.param.u64 %d2, [pb];\nld.param.u64 %d3, [pc];\nld.param.u32 %r1, [pn];\n"
    "mov.u32 %r2, %ctaid.x;\nmov.u32 %r3, %ntid.x;\nmov.u32 %r4, %tid.x;\nmad.lo.s32 %r5, %r2, %r3, %r4;\n"
    "setp.ge.u32 %p, %r5, %r1;\n@%p bra DONE;\n"
    "cvta.to.global.u64 %d1, %d1;\ncvta.to.global.u64 %d2, %d2;\ncvta.to.global.u64 %d3, %d3;\n"
    "mul.wide.u32 %d4, %r5, 4;\nadd.s64 %d5, %d1, %d4;\nadd.s64 %d6, %d2, %d4;\nadd.s64 %d7, %d3, %d4;\n"
    "ld.global.f32 %f1, [%d5];\nld.global.f32 %f2, [%d6];\nadd.f32 %f3, %f1, %f2;\nst.global.f32 [%d7], %f3;\n"
    "DONE:\nret;\n}\n";

int main(void)
{
    static float a[N], b[N], c[N];
    char name[128] = "";
    int count = 0;
    unsigned n = N;
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction function;
    CUdeviceptr on_gpu[3];

    open_library();
    CALL("cuInit", (unsigned), 0);
    CALL("cuDeviceGetCount", (int *), &count);
    printf("GPUs %d\n", count);
    CALL("cuDeviceGet", (CUdevice *, int), &device, 0);
    CALL("cuDeviceGetName", (char *, int, CUdevice), name, (int)sizeof name, device);
    CALL("cuDevicePrimaryCtxRetain", (CUcontext *, CUdevice), &context, device);
    CALL("cuCtxSetCurrent", (CUcontext), context);
    CALL("cuModuleLoadData", (CUmodule *, const void *), &module, PTX);
    CALL("cuModuleGetFunction", (CUfunction *, CUmodule, const char *), &function, module, "add");
    for (int i = 0; i < N; i++) {
        a[i] = (float)i;
        b[i] = 2.0f * (float)i;
    }
    for (int i = 0; i < 3; i++)
        CALL("cuMemAlloc_v2", (CUdeviceptr *, size_t), &on_gpu[i], sizeof a);
    CALL("cuMemcpyHtoD_v2", (CUdeviceptr, const void *, size_t), on_gpu[0], a, sizeof a);
    CALL("cuMemcpyHtoD_v2", (CUdeviceptr, const void *, size_t), on_gpu[1], b, sizeof b);
    void *arguments[] = {&on_gpu[0], &on_gpu[1], &on_gpu[2], &n};
    CALL("cuLaunchKernel",
         (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **),
         function, N / 256, 1, 1, 256, 1, 1, 0, NULL, arguments, NULL);
    CALL("cuCtxSynchronize", (void), );
    CALL("cuMemcpyDtoH_v2", (void *, CUdeviceptr, size_t), c, on_gpu[2], sizeof c);
    for (int i = 0; i < N; i++)
        if (c[i] != 3.0f * (float)i) {
            fprintf(stderr, "element %d is %f\n", i, (double)c[i]);
            return 1;
        }
    printf("vector add ok on %s\n", name);
    return 0;
}

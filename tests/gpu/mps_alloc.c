/* Takes so many GiB of GPU 0's memory and keeps them until its standard input ends: a client of MPS to be limited.
 *
 * Prints "allocated N GiB" or "cuMemAlloc_v2: CUDA error E"; exits 0, 1 when the driver said no, 2 without libcuda.
 */
#define SAYS stdout
#include "cuda.h"

int main(int argc, char **argv)
{
    CUdevice device;
    CUcontext context;
    CUdeviceptr memory;
    size_t gib = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;

    open_library();
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

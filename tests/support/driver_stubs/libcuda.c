/* A stand-in for libcuda.so.1: answers two calls, and opens its compiler the way the real one does. */
#include <dlfcn.h>

/* A driver is built for every glibc there is; the compiler would ask for one as new as this machine's. */
#ifdef __x86_64__
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
#endif

int cuInit(unsigned int flags) { return flags != 0; }

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

/* 0 when the libraries that are opened at run time are found: one by its SONAME, one by its full file name. */
int stub_open_compiler(void) {
    if (!dlopen("libnvidia-ptxjitcompiler.so.1", RTLD_NOW)) return 1;
    return dlopen("libnvidia-gpucomp.so." STUB_VERSION, RTLD_NOW) ? 0 : 2;
}

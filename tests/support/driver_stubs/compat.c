/* A library of a compatibility package. With STUB_CUDA it is a libcuda and says which CUDA it speaks; STUB_NOTE names a
 * file whose content becomes its note, as NVIDIA's own libraries carry one. */
#ifdef STUB_CUDA
int cuInit(unsigned int flags) { return flags != 0; }

int cuDriverGetVersion(int *version) {
    *version = STUB_CUDA;
    return 0;
}
#endif

const char *stub_name(void) { return STUB_VERSION; }

#ifdef STUB_NOTE
__asm__(".pushsection .note.cuda.fwd_compatibility, \"a\", %note\n"
        ".balign 4\n"
        ".long 2f - 1f, 4f - 3f, 1\n"
        "1: .asciz \"NVIDIA Corporation\"\n"
        "2: .balign 4\n"
        "3: .incbin \"" STUB_NOTE "\"\n"
        "4: .balign 4\n"
        ".popsection\n");
#endif

/* A program of a musl image: loads the libraries named on its command line, and says which. Needs no musl headers. */
extern void *dlopen(const char *, int);
extern int printf(const char *, ...);
extern void exit(int);

__attribute__((used)) static void run(long *stack) {
    char **arguments = (char **)(stack + 1);
    for (long i = 1; i < stack[0]; i++) printf("%s %s\n", arguments[i], dlopen(arguments[i], 2) ? "loaded" : "not there");
    exit(0);
}

__attribute__((naked)) void _start(void) { __asm__("movq %rsp, %rdi\n andq $-16, %rsp\n call run"); }

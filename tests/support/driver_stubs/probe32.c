/* The probe for 32-bit libraries, on a machine whose compiler has no 32-bit headers: declares what it calls. */
extern void *dlopen(const char *, int);
extern int printf(const char *, ...);
extern int fflush(void *);
extern void _exit(int);

__attribute__((used)) static void run(int *stack) {
    int count = stack[0];
    char **arguments = (char **)(stack + 1);
    for (int i = 1; i < count; i++) {
        if (dlopen(arguments[i], 2)) printf("%s\n", arguments[i]);
    }
    fflush(0);
    _exit(0);
}

__attribute__((naked)) void _start(void) {
    __asm__("movl %esp, %eax\n andl $-16, %esp\n subl $12, %esp\n pushl %eax\n call run");
}

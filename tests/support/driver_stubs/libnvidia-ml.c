/* A stand-in for libnvidia-ml.so.1 that only says which driver it is of. */
const char *stub_version(void) { return STUB_VERSION; }

/* Any other library of the driver: there to be found and loaded. */
const char *stub_name(void) { return STUB_NAME; }

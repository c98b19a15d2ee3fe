/* A stand-in for libnuma on machines without it: the functions that vLLM's CPU kernels are linked to.
 *
 * numa_available() returns -1, as the real library does on a kernel without NUMA. vLLM then skips memory binding and calls
 * none of the others. Build (the result is committed):
 *
 *     cc -shared -fPIC -Os -s -nostdlib -Wl,-soname,libnuma.so.1 -Wl,--version-script=libnuma.map -Wl,-z,noseparate-code \
 *         -Wl,--build-id=none -o libnuma.so.1 libnuma.c
 */
int numa_available(void) { return -1; }
int numa_migrate_pages(int pid, void *from, void *to) { return -1; }
void numa_set_strict(int strict) {}
void numa_bitmask_free(void *mask) {}
void *numa_get_mems_allowed(void) { return 0; }
void *numa_parse_nodestring(const char *text) { return 0; }
void numa_set_interleave_mask(void *mask) {}
void numa_set_membind(void *mask) {}

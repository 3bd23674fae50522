/* libcuda.so.1 over the memory of the host, for DEVICES devices: as many functions as gateway/measuring/inside/by_driver.py calls.
   A copy takes as long as at 100 GB/s. WRONG: copies between devices arrive wrong. CRASH: they end the process. STUCK: it never begins. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MOST (1 << 22) /* more than that is never looked at */

static void copy(void *to, const void *from, size_t size) {
    memmove(to, from, size < MOST ? size : MOST);
    struct timespec pause = {0, (long)(size / 100)};
    if (pause.tv_nsec > 1000) nanosleep(&pause, 0);
}

int cuInit(unsigned flags) { return STUCK ? pause() : flags; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuGetErrorString(int code, const char **text) { return *text = code == 101 ? "invalid device ordinal" : "error", 0; }
int cuDeviceGet(int *device, int index) { return *device = index, index < DEVICES ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(intptr_t)(device + 1), 0; }
int cuCtxSetCurrent(void *context) { return context ? 0 : 201; }
int cuCtxSynchronize(void) { return 0; }
int cuMemAlloc_v2(uint64_t *memory, size_t size) { return *memory = (uint64_t)malloc(size), *memory ? 0 : 2; }
int cuMemFree_v2(uint64_t memory) { return free((void *)memory), 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) { return copy((void *)to, from, size), 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) { return copy(to, (void *)from, size), 0; }
int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t size) { return copy((void *)to, (void *)from, size), 0; }
int cuDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer, 0; }
int cuCtxEnablePeerAccess(void *context, unsigned flags) { return context ? flags : 201; }
int cuMemcpyPeerAsync(uint64_t to, void *there, uint64_t from, void *here, size_t size, void *stream) {
    if (CRASH) abort();
    copy((void *)to, (void *)from, size);
    if (WRONG) *(char *)to ^= 1;
    return here == there || stream;
}

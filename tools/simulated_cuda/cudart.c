/* Some of CUDA's runtime, with the memory of one device in the host's memory.  It starts no kernel: run.py computes on the CPU instead.
 *
 * run.py compiles this file, adds functions that do nothing for the rest of the runtime that PyTorch calls, and preloads the library.
 */
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return 0; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return 0; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "simulated");
    p->major = 9;
    p->totalGlobalMem = 8ull << 30;
    p->multiProcessorCount = 8;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxGridSize[0] = p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->sharedMemPerBlock = p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    return 0;
}

cudaError_t cudaMalloc(void **p, size_t bytes) { *p = aligned_alloc(512, (bytes + 511) / 512 * 512); return 0; }
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) { return cudaMalloc(p, bytes); }
cudaError_t cudaFree(void *p) { free(p); return 0; }
cudaError_t cudaFreeHost(void *p) { free(p); return 0; }
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) { *unused = 4ull << 30; *total = 8ull << 30; return 0; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    memmove(to, from, bytes);
    return 0;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) { memmove(to, from, bytes); return 0; }
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream) { memset(p, value, bytes); return 0; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { *stream = malloc(8); return 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { *status = 0; return 0; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { *event = malloc(8); return 0; }
const char *cudaGetErrorString(cudaError_t error) { return "an error of the simulated device"; }
const char *cudaGetErrorName(cudaError_t error) { return "simulated"; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *p) { memset(found, 0, sizeof *found); return 0; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *f) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    return 0;
}

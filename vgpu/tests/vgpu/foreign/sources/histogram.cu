// Counting, by atomics and by votes.

extern "C" __global__ void histogram_shared(const unsigned char *in, unsigned *bins, int n) {
    __shared__ unsigned local[256];
    for (int b = threadIdx.x; b < 256; b += blockDim.x) local[b] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[in[i]], 1);
    __syncthreads();
    for (int b = threadIdx.x; b < 256; b += blockDim.x)
        if (local[b]) atomicAdd(&bins[b], local[b]);
}

extern "C" __global__ void histogram_global(const unsigned *in, unsigned long long *bins, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&bins[in[i] % 61], (unsigned long long)in[i]);
}

// How often each digit occurs in a block: lanes with the same digit find each other, and the first counts for all.
extern "C" __global__ void radix_count(const unsigned *in, unsigned *counts, int shift) {
    __shared__ unsigned digits[16];
    if (threadIdx.x < 16) digits[threadIdx.x] = 0;
    __syncthreads();
    unsigned digit = in[blockIdx.x * blockDim.x + threadIdx.x] >> shift & 15;
    unsigned peers = __match_any_sync(~0u, digit);
    if (threadIdx.x % 32 == __ffs(peers) - 1) atomicAdd(&digits[digit], __popc(peers));
    __syncthreads();
    if (threadIdx.x < 16) counts[blockIdx.x * 16 + threadIdx.x] = digits[threadIdx.x];
}

// Keeps the odd elements, in any order. A warp takes its places with one atomic.
extern "C" __global__ void compact(const unsigned *in, unsigned *out, unsigned *count, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
    unsigned v = i < n ? in[i] : 0;
    unsigned keep = __ballot_sync(~0u, v & 1);
    unsigned base = 0;
    if (lane == 0 && keep) base = atomicAdd(count, __popc(keep));
    base = __shfl_sync(~0u, base, 0);
    if (v & 1) out[base + __popc(keep & ((1u << lane) - 1))] = v;
}

// The largest of many doubles: compare and swap until nothing larger is left to write.
extern "C" __global__ void atomic_max_double(const double *in, double *top, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double v = in[i];
    unsigned long long *at = (unsigned long long *)top, old = atomicAdd(at, 0ull);
    while (__longlong_as_double(old) < v) {
        unsigned long long seen = atomicCAS(at, old, __double_as_longlong(v));
        if (seen == old) break;
        old = seen;
    }
}

// All the other atomics, each on a word of its own.
extern "C" __global__ void atomic_zoo(const unsigned *in, unsigned *out, float *sum, unsigned limit) {
    unsigned v = in[blockIdx.x * blockDim.x + threadIdx.x];
    atomicMin(&out[0], v);
    atomicMax(&out[1], v);
    atomicMin((int *)&out[2], (int)v);
    atomicMax((int *)&out[3], (int)v);
    atomicAnd(&out[4], v | 0xffff);
    atomicOr(&out[5], v & 0xffff);
    atomicXor(&out[6], v);
    atomicSub(&out[7], v);
    atomicInc(&out[8], limit);
    atomicDec(&out[9], limit);
    // Small whole numbers, so that the order of the sum does not matter.
    atomicAdd(sum, (float)(v % 16));
}

// One element of a linked list per thread, put at its head; then the order is whatever it was, and nothing is lost.
extern "C" __global__ void push_list(unsigned *head, unsigned *next, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) next[i] = atomicExch(head, i);
}

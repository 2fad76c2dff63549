// Running sums.
#include <cuda/atomic>

__device__ unsigned scan_warp(unsigned v) {
    for (int d = 1; d < 32; d *= 2) {
        unsigned u = __shfl_up_sync(~0u, v, d);
        if (threadIdx.x % 32 >= d) v += u;
    }
    return v;
}

extern "C" __global__ void warp_scan(const unsigned *in, unsigned *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = scan_warp(in[i]);
}

// Inclusive, log n steps between two buffers.
extern "C" __global__ void scan_hillis_steele(const unsigned *in, unsigned *out) {
    __shared__ unsigned buffer[2][256];
    int t = threadIdx.x, from = 0;
    buffer[0][t] = in[blockIdx.x * 256 + t];
    __syncthreads();
    for (int d = 1; d < 256; d *= 2) {
        buffer[1 - from][t] = buffer[from][t] + (t >= d ? buffer[from][t - d] : 0);
        from = 1 - from;
        __syncthreads();
    }
    out[blockIdx.x * 256 + t] = buffer[from][t];
}

// Exclusive, up and down a tree.
extern "C" __global__ void scan_blelloch(const unsigned *in, unsigned *out) {
    __shared__ unsigned tree[512];
    int t = threadIdx.x;
    tree[2 * t] = in[blockIdx.x * 512 + 2 * t];
    tree[2 * t + 1] = in[blockIdx.x * 512 + 2 * t + 1];
    int step = 1;
    for (int d = 256; d; d /= 2) {
        __syncthreads();
        if (t < d) tree[step * (2 * t + 2) - 1] += tree[step * (2 * t + 1) - 1];
        step *= 2;
    }
    __syncthreads();
    if (t == 0) tree[511] = 0;
    for (int d = 1; d < 512; d *= 2) {
        step /= 2;
        __syncthreads();
        if (t < d) {
            int a = step * (2 * t + 1) - 1, b = step * (2 * t + 2) - 1;
            unsigned v = tree[a];
            tree[a] = tree[b];
            tree[b] += v;
        }
    }
    __syncthreads();
    out[blockIdx.x * 512 + 2 * t] = tree[2 * t];
    out[blockIdx.x * 512 + 2 * t + 1] = tree[2 * t + 1];
}

// A scan over all blocks in one pass. A block publishes its own sum, then reads the words of the blocks before it until
// it finds one with a running sum. State and value are one word, so that they are read together. Blocks are numbered
// by a ticket, so that a block waits only for blocks that run.
extern "C" __global__ void scan_look_back(const unsigned *in, unsigned *out, unsigned long long *states,
                                          unsigned *ticket, int n) {
    constexpr unsigned long long SUM = 1, RUNNING = 2;
    __shared__ unsigned warps[4], me, before;
    int t = threadIdx.x;
    if (t == 0) me = atomicAdd(ticket, 1);
    __syncthreads();
    int i = me * 128 + t;
    unsigned v = scan_warp(i < n ? in[i] : 0);
    if (t % 32 == 31) warps[t / 32] = v;
    __syncthreads();
    for (int w = 0; w < t / 32; w++) v += warps[w];
    if (t == 127) {
        using Flag = cuda::atomic_ref<unsigned long long, cuda::thread_scope_device>;
        unsigned sum = 0;
        if (me == 0) {
            Flag(states[0]).store(RUNNING << 32 | v, cuda::memory_order_release);
        } else {
            Flag(states[me]).store(SUM << 32 | v, cuda::memory_order_release);
            for (int b = me - 1; b >= 0; b--) {
                unsigned long long s;
                do s = Flag(states[b]).load(cuda::memory_order_acquire);
                while (s == 0);
                sum += (unsigned)s;
                if (s >> 32 == RUNNING) break;
            }
            Flag(states[me]).store(RUNNING << 32 | (sum + v), cuda::memory_order_release);
        }
        before = sum;
    }
    __syncthreads();
    if (i < n) out[i] = before + v;
}

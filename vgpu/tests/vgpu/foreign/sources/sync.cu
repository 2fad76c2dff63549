// Threads that wait for one another.
#include <cuda/atomic>

using Word = cuda::atomic_ref<unsigned, cuda::thread_scope_device>;

// All blocks meet: the last to arrive opens the next round.
__device__ void meet(unsigned *arrived, unsigned *round) {
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned now = Word(*round).load(cuda::memory_order_relaxed);
        if (Word(*arrived).fetch_add(1, cuda::memory_order_acq_rel) == gridDim.x - 1) {
            Word(*arrived).store(0, cuda::memory_order_relaxed);
            Word(*round).store(now + 1, cuda::memory_order_release);
        } else {
            while (Word(*round).load(cuda::memory_order_acquire) == now) __nanosleep(50);
        }
    }
    __syncthreads();
}

// A ring of cells, each block with some of them, in many steps. `cells` holds two states.
extern "C" __global__ void grid_barrier(unsigned *cells, unsigned *arrived, unsigned *round, int steps) {
    unsigned n = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;
    for (int s = 0; s < steps; s++) {
        unsigned *from = cells + s % 2 * n, *to = cells + (1 - s % 2) * n;
        to[i] = from[(i + n - 1) % n] ^ (from[i] * 5 + from[(i + 1) % n]);
        meet(arrived, round);
    }
}

// Every thread takes the same lock. Lanes of a warp do so too: each must make progress by itself.
extern "C" __global__ void spin_lock(unsigned *lock, unsigned *value) {
    for (;;) {
        if (Word(*lock).exchange(1, cuda::memory_order_acquire) == 0) {
            *value = *value * 3 + 1;
            Word(*lock).store(0, cuda::memory_order_release);
            break;
        }
    }
}

// Two pairs of warps pass data on by barriers of their own: the first of a pair only arrives.
extern "C" __global__ void named_barriers(const unsigned *in, unsigned *out) {
    __shared__ unsigned box[2][32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = warp / 2;
    if (warp % 2 == 0) {
        box[pair][lane] = in[blockIdx.x * 64 + pair * 32 + lane];
        asm volatile("barrier.cta.arrive %0, 64;" ::"r"(pair + 1) : "memory");
    } else {
        asm volatile("barrier.cta.sync %0, 64;" ::"r"(pair + 1) : "memory");
        out[blockIdx.x * 64 + pair * 32 + lane] = box[pair][31 - lane] + 1;
    }
}

// Votes of all threads of a block on their elements: how many, all, any.
extern "C" __global__ void block_votes(const int *in, int4 *out) {
    int v = in[blockIdx.x * blockDim.x + threadIdx.x];
    int odd = __syncthreads_count(v & 1), positive = __syncthreads_and(v > 0), zero = __syncthreads_or(v == 0);
    if (threadIdx.x == 0) out[blockIdx.x] = make_int4(odd, positive, zero, blockDim.x);
}

// Lanes exchange words of shared memory within their warp, without a barrier of the block.
extern "C" __global__ void warp_mailbox(const unsigned *in, unsigned *out) {
    __shared__ unsigned box[4][32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = blockIdx.x * 128 + threadIdx.x;
    unsigned v = in[i];
    for (int r = 0; r < 4; r++) {
        box[warp][lane] = v;
        __syncwarp();
        unsigned u = box[warp][(lane * 5 + r) % 32];
        // Half of the lanes take a longer way.
        if (u & 1) u = __popc(u) * 0x9e3779b9u + u;
        __syncwarp();
        v ^= u;
    }
    out[i] = v;
}

// Sums of many elements.

__device__ unsigned warp_sum(unsigned v) {
    for (int d = 16; d; d /= 2) v += __shfl_down_sync(~0u, v, d);
    return v;
}

// One sum per block: shuffles in every warp, then the first warp over the warps' sums.
extern "C" __global__ void reduce_shuffle(const unsigned *in, unsigned *out, int n) {
    __shared__ unsigned part[32];
    unsigned v = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += in[i];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x < 32) {
        v = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0;
        v = warp_sum(v);
        if (threadIdx.x == 0) out[blockIdx.x] = v;
    }
}

// One sum per block by a tree in shared memory of a size given at the launch.
extern "C" __global__ void reduce_tree(const float *in, float *out) {
    extern __shared__ float tree[];
    tree[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    for (int d = blockDim.x / 2; d; d /= 2) {
        if (threadIdx.x < d) tree[threadIdx.x] += tree[threadIdx.x + d];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = tree[0];
}

// The block that takes the last ticket adds up what all blocks have left: one launch for the whole sum.
extern "C" __global__ void reduce_last_block(const unsigned *in, unsigned *parts, unsigned *ticket, unsigned *out,
                                             int n) {
    __shared__ unsigned warps[8];
    __shared__ bool last;
    unsigned v = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += in[i];
    v = __reduce_add_sync(~0u, v);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        v = 0;
        for (int w = 0; w < 8; w++) v += warps[w];
        parts[blockIdx.x] = v;
        __threadfence();
        last = atomicAdd(ticket, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (last && threadIdx.x < 32) {
        v = 0;
        for (int i = threadIdx.x; i < gridDim.x; i += 32) v += parts[i];
        v = __reduce_add_sync(~0u, v);
        if (threadIdx.x == 0) *out = v;
    }
}

// Smallest, largest, common and any bits of each warp's elements, by the instruction for it.
extern "C" __global__ void reduce_redux(const int *in, int *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int v = in[i];
    int lo = __reduce_min_sync(~0u, v), hi = __reduce_max_sync(~0u, v);
    unsigned all = __reduce_and_sync(~0u, (unsigned)v), any = __reduce_or_sync(~0u, (unsigned)v);
    if (i % 32 == 0) ((int4 *)out)[i / 32] = make_int4(lo, hi, all, any);
}

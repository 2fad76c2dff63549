// Sorting.

// 32 keys, one per lane of a warp.
extern "C" __global__ void sort_warp(unsigned *keys) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
    unsigned v = keys[i];
    for (int size = 2; size <= 32; size *= 2)
        for (int d = size / 2; d; d /= 2) {
            unsigned u = __shfl_xor_sync(~0u, v, d);
            bool up = (lane & size) == 0, lower = (lane & d) == 0;
            v = up == lower ? min(u, v) : max(u, v);
        }
    keys[i] = v;
}

// 1024 keys with their values in shared memory.
extern "C" __global__ void sort_block(unsigned *keys, unsigned *values) {
    __shared__ unsigned k[1024], v[1024];
    int t = threadIdx.x, base = blockIdx.x * 1024;
    for (int i = t; i < 1024; i += blockDim.x) k[i] = keys[base + i], v[i] = values[base + i];
    for (int size = 2; size <= 1024; size *= 2)
        for (int d = size / 2; d; d /= 2) {
            __syncthreads();
            for (int p = t; p < 512; p += blockDim.x) {
                int i = 2 * p - (p & (d - 1)), j = i + d;
                bool up = (i & size) == 0;
                if ((k[i] > k[j]) == up) {
                    unsigned a = k[i], b = v[i];
                    k[i] = k[j], v[i] = v[j];
                    k[j] = a, v[j] = b;
                }
            }
        }
    __syncthreads();
    for (int i = t; i < 1024; i += blockDim.x) keys[base + i] = k[i], values[base + i] = v[i];
}

// 256 keys by their bits from the lowest on; equal keys keep their order, which the values show.
extern "C" __global__ void sort_radix(unsigned *keys, unsigned *values) {
    __shared__ unsigned k[256], v[256], ones[8];
    int t = threadIdx.x, lane = t % 32, warp = t / 32, base = blockIdx.x * 256;
    unsigned key = keys[base + t], value = values[base + t];
    for (int bit = 0; bit < 16; bit++) {
        bool one = key >> bit & 1;
        unsigned votes = __ballot_sync(~0u, one);
        if (lane == 0) ones[warp] = __popc(votes);
        __syncthreads();
        int before = __popc(votes & ((1u << lane) - 1)), total = 0;
        for (int w = 0; w < 8; w++) {
            if (w < warp) before += ones[w];
            total += ones[w];
        }
        int to = one ? 256 - total + before : t - before;
        k[to] = key, v[to] = value;
        __syncthreads();
        key = k[t], value = v[t];
    }
    keys[base + t] = key, values[base + t] = value;
}

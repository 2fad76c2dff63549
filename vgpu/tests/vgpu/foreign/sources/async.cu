// Copies that run beside the threads, and waits for their completion.
#include <cuda/barrier>
#include <cuda/ptx>
#include <cuda_pipeline.h>

namespace ptx = cuda::ptx;

// Warp 4 fetches tiles by bulk copies, warps 0 to 3 add them up, with two tiles under way.
extern "C" __global__ void __launch_bounds__(160) produce_consume(const unsigned *in, unsigned *out, int tiles) {
    __shared__ alignas(128) unsigned stage[2][512];
    __shared__ uint64_t full[2], empty[2];
    int t = threadIdx.x;
    in += blockIdx.x * tiles * 512;
    if (t == 0) {
        for (int s = 0; s < 2; s++) {
            ptx::mbarrier_init(&full[s], 1);
            ptx::mbarrier_init(&empty[s], 128);
        }
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    __syncthreads();
    if (t == 128) {
        for (int k = 0; k < tiles; k++) {
            int s = k % 2;
            if (k >= 2)
                while (!ptx::mbarrier_try_wait_parity(&empty[s], (k / 2 - 1) % 2)) {}
            ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full[s], 2048);
            ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, stage[s], in + k * 512, 2048, &full[s]);
        }
    } else if (t < 128) {
        unsigned sum = 0;
        for (int k = 0; k < tiles; k++) {
            int s = k % 2;
            while (!ptx::mbarrier_try_wait_parity(&full[s], k / 2 % 2)) {}
            uint4 v = ((const uint4 *)stage[s])[t];
            sum = sum * 31 + (v.x ^ v.y) + (v.z ^ v.w);
            // The next copy into this stage comes after the read in the other proxy as well.
            ptx::fence_proxy_async(ptx::space_shared);
            ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &empty[s]);
        }
        out[blockIdx.x * 128 + t] = sum;
    }
}

// Tiles are computed in shared memory and leave by bulk copies, while the next one is computed beside.
extern "C" __global__ void bulk_store(const float *in, float *out, float scale, int tiles) {
    __shared__ alignas(128) float buffer[2][128];
    int t = threadIdx.x, base = blockIdx.x * tiles * 128;
    for (int k = 0; k < tiles; k++) {
        float *tile = buffer[k % 2];
        // The copy before the last has read this buffer.
        if (t == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>());
        __syncthreads();
        tile[t] = in[base + k * 128 + t] * scale;
        ptx::fence_proxy_async(ptx::space_shared);
        __syncthreads();
        if (t == 0) {
            ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, out + base + k * 128, tile, 512);
            ptx::cp_async_bulk_commit_group();
        }
    }
    if (t == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>());
}

// The older copies, of 16 bytes per thread, one tile ahead.
extern "C" __global__ void copy_pipeline(const uint4 *in, unsigned *out, int tiles) {
    __shared__ uint4 stage[2][64];
    int t = threadIdx.x;
    in += blockIdx.x * tiles * 64;
    __pipeline_memcpy_async(&stage[0][t], in + t, 16);
    __pipeline_commit();
    unsigned sum = 0;
    for (int k = 0; k < tiles; k++) {
        if (k + 1 < tiles) __pipeline_memcpy_async(&stage[(k + 1) % 2][t], in + (k + 1) * 64 + t, 16);
        __pipeline_commit();
        __pipeline_wait_prior(1);
        __syncthreads();
        // An element that another thread has fetched.
        uint4 v = stage[k % 2][63 - t];
        sum = sum * 31 + (v.x ^ v.y) + (v.z ^ v.w);
        __syncthreads();
    }
    out[blockIdx.x * 64 + t] = sum;
}

// The barrier of the C++ library, with the token of each arrival, as the only synchronisation of a stencil in shared
// memory; and a bulk copy that counts on it.
extern "C" __global__ void library_barrier(const unsigned *in, unsigned *out, int rounds) {
    using Barrier = cuda::barrier<cuda::thread_scope_block>;
    __shared__ alignas(128) unsigned ring[2][128];
    __shared__ alignas(Barrier) unsigned char bytes[sizeof(Barrier)];
    Barrier *barrier = (Barrier *)bytes;
    int t = threadIdx.x;
    if (t == 0) init(barrier, 128);
    __syncthreads();
    Barrier::arrival_token token;
    if (t == 0) {
        cuda::device::memcpy_async_tx(ring[0], in + blockIdx.x * 128, cuda::aligned_size_t<16>(512), *barrier);
        token = cuda::device::barrier_arrive_tx(*barrier, 1, 512);
    } else {
        token = barrier->arrive();
    }
    barrier->wait(std::move(token));
    for (int r = 0; r < rounds; r++) {
        unsigned *from = ring[r % 2], *to = ring[1 - r % 2];
        to[t] = from[t] + 3 * from[(t + 1) % 128];
        barrier->arrive_and_wait();
    }
    out[blockIdx.x * 128 + t] = ring[rounds % 2][t];
}

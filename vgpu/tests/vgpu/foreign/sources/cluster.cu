// Kernels in clusters of several blocks, by cooperative groups.
#include <cooperative_groups.h>
namespace cg = cooperative_groups;

// Counts values. The bins are divided among the blocks of a cluster, each of which has its part in
// shared memory.
extern "C" __global__ void cluster_histogram(const unsigned* values, unsigned* bins, int n, int bins_per_block) {
    extern __shared__ unsigned own[];
    cg::cluster_group cluster = cg::this_cluster();
    for (int i = threadIdx.x; i < bins_per_block; i += blockDim.x) own[i] = 0;
    cluster.sync();
    int most = bins_per_block * cluster.num_blocks();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        int bin = values[i] < most ? values[i] : most - 1;
        unsigned* there = cluster.map_shared_rank(own, bin / bins_per_block);
        atomicAdd(there + bin % bins_per_block, 1);
    }
    cluster.sync();
    unsigned* mine = bins + cluster.block_rank() * bins_per_block;
    for (int i = threadIdx.x; i < bins_per_block; i += blockDim.x) atomicAdd(&mine[i], own[i]);
}

// The same without the barrier behind the counts.
extern "C" __global__ void cluster_histogram_early(const unsigned* values, unsigned* bins, int n, int bins_per_block) {
    extern __shared__ unsigned own[];
    cg::cluster_group cluster = cg::this_cluster();
    for (int i = threadIdx.x; i < bins_per_block; i += blockDim.x) own[i] = 0;
    cluster.sync();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        unsigned* there = cluster.map_shared_rank(own, values[i] / bins_per_block);
        atomicAdd(there + values[i] % bins_per_block, 1);
    }
    unsigned* mine = bins + cluster.block_rank() * bins_per_block;
    for (int i = threadIdx.x; i < bins_per_block; i += blockDim.x) atomicAdd(&mine[i], own[i]);
}

// Normalises rows that are longer than a block has shared memory for: each block of a cluster has a
// part of the row, and all of them exchange sums.
extern "C" __global__ void __cluster_dims__(4, 1, 1) cluster_rms_norm(const float* x, float* y, int part) {
    extern __shared__ float row[];
    __shared__ float sums[32];
    __shared__ float total;
    cg::cluster_group cluster = cg::this_cluster();
    size_t first = size_t(blockIdx.x) * part;
    float sum = 0;
    for (int i = threadIdx.x; i < part; i += blockDim.x) {
        row[i] = x[first + i];
        sum += row[i] * row[i];
    }
    for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(0xffffffff, sum, half);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        float all = 0;
        for (int warp = 0; warp < blockDim.x / 32; warp++) all += sums[warp];
        total = all;
    }
    cluster.sync();
    float all = 0;
    for (int rank = 0; rank < cluster.num_blocks(); rank++) all += *cluster.map_shared_rank(&total, rank);
    cluster.barrier_arrive();
    float scale = rsqrtf(all / (part * cluster.num_blocks()));
    for (int i = threadIdx.x; i < part; i += blockDim.x) y[first + i] = row[i] * scale;
    cluster.barrier_wait();
}

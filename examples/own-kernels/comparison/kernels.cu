// The template's softmax and BF16 matrix product in CUDA C++: algorithms, tiles, launch shapes and
// arguments are the same. `examples/times.rs` loads them beside the Rust ones.
//
//     nvcc -O3 -std=c++17 -arch=native -cubin -o kernels.cubin kernels.cu

#include <cmath>
#include <cstdint>

// Softmax: a block takes a row and keeps it in shared memory.

template <typename Combine> __device__ float warp_reduce(float v, Combine combine) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        v = combine(v, __shfl_xor_sync(0xffffffff, v, mask));
    }
    return v;
}

template <typename Combine>
__device__ float block_reduce(float v, float neutral, float *scratch, Combine combine) {
    unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
    float of_warp = warp_reduce(v, combine);
    if (lane == 0) {
        scratch[threadIdx.x / 32] = of_warp;
    }
    __syncthreads();
    float total = warp_reduce(lane < warps ? scratch[lane] : neutral, combine);
    __syncthreads();
    return total;
}

__device__ float power_of_two(float v) {
    float r;
    asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

constexpr unsigned SCRATCH = 32;

struct Softmax {
    const float *x;
    float *out;
    unsigned rows, columns;
};

extern "C" __global__ void __launch_bounds__(256) softmax(const __grid_constant__ Softmax args) {
    const float *__restrict__ x = args.x;
    float *__restrict__ out = args.out;
    const unsigned columns = args.columns;
    extern __shared__ __align__(128) float shared[];
    float4 *row = reinterpret_cast<float4 *>(shared + SCRATCH);
    const float4 *from = reinterpret_cast<const float4 *>(x + size_t(blockIdx.x) * columns);
    float4 *to = reinterpret_cast<float4 *>(out + size_t(blockIdx.x) * columns);
    unsigned vectors = columns / 4;

    float largest = -INFINITY;
    for (unsigned first = threadIdx.x; first < vectors; first += 4 * blockDim.x) {
        float4 v[4];
#pragma unroll
        for (unsigned n = 0; n < 4; ++n) {
            v[n] = from[min(first + n * blockDim.x, vectors - 1)];
        }
#pragma unroll
        for (unsigned n = 0; n < 4; ++n) {
            unsigned at = first + n * blockDim.x;
            if (at < vectors) {
                row[at] = v[n];
            }
            largest = fmaxf(largest, fmaxf(fmaxf(v[n].x, v[n].y), fmaxf(v[n].z, v[n].w)));
        }
    }
    largest = block_reduce(largest, -INFINITY, shared, [](float a, float b) { return fmaxf(a, b); });

    constexpr float LOG2_E = 1.44269504f;
    float sum = 0;
    for (unsigned at = threadIdx.x; at < vectors; at += blockDim.x) {
        float4 v = row[at];
        v.x = power_of_two((v.x - largest) * LOG2_E);
        v.y = power_of_two((v.y - largest) * LOG2_E);
        v.z = power_of_two((v.z - largest) * LOG2_E);
        v.w = power_of_two((v.w - largest) * LOG2_E);
        sum += v.x + v.y + v.z + v.w;
        row[at] = v;
    }
    float scale = 1 / block_reduce(sum, 0, shared, [](float a, float b) { return a + b; });

    for (unsigned at = threadIdx.x; at < vectors; at += blockDim.x) {
        float4 v = row[at];
        to[at] = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
    }
}

// Matrix product of BF16 numbers: 128 x 128 sums of a block, tiles of depth 32 in a ring of three stages,
// cp.async, ldmatrix with swizzled rows, mma.sync.

constexpr unsigned STAGES = 3, STAGE_BYTES = 2 * 128 * 32 * 2, TILE_BYTES = 128 * 32 * 2;

__device__ void copy_16(unsigned to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING> __device__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ void load_matrices(unsigned (&r)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

__device__ void load_matrices_transposed(unsigned (&r)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

__device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct MatrixProduct {
    const uint16_t *a, *b;
    float *c;
    unsigned m, n, k;
};

extern "C" __global__ void __launch_bounds__(256, 2) matrix_product_bf16(const __grid_constant__ MatrixProduct args) {
    const uint16_t *__restrict__ a = args.a, *__restrict__ b = args.b;
    float *__restrict__ c = args.c;
    const unsigned n = args.n, k = args.k;
    extern __shared__ __align__(128) char ring[];
    unsigned stages = static_cast<unsigned>(__cvta_generic_to_shared(ring));
    unsigned tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    unsigned tiles_across = n / 128;
    unsigned row = blockIdx.x / tiles_across * 128, column = blockIdx.x % tiles_across * 128;

    unsigned a_row = tid / 4, a_piece = tid % 4, b_row = tid / 16, b_piece = tid % 16;
    const uint16_t *from_a = a + size_t(row + a_row) * k + a_piece * 8;
    const uint16_t *from_b = b + size_t(b_row) * n + column + b_piece * 8;
    unsigned a_at = a_row * 64 + (a_piece ^ (a_row / 2 % 4)) * 16;
    unsigned b_at = b_row * 256 + (b_piece ^ (b_row % 8)) * 16;
    auto start = [&](unsigned slot, unsigned tile) {
        unsigned to_a = stages + slot * STAGE_BYTES + a_at, to_b = stages + slot * STAGE_BYTES + TILE_BYTES + b_at;
        const uint16_t *tile_a = from_a + tile * 32, *tile_b = from_b + size_t(tile) * 32 * n;
        copy_16(to_a, tile_a);
        copy_16(to_a + 64 * 64, tile_a + size_t(64) * k);
        copy_16(to_b, tile_b);
        copy_16(to_b + 16 * 256, tile_b + size_t(16) * n);
    };

    unsigned warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    unsigned matrix = lane / 8, r = lane % 8, down = matrix % 2 * 8 + r;
    unsigned left_at = (warp_row + down) * 64 + ((matrix / 2) ^ (r / 2)) * 16;
    unsigned right_at = down * 256 + ((warp_column / 8 + matrix / 2) ^ r) * 16;

    unsigned tiles = k / 32;
#pragma unroll
    for (unsigned tile = 0; tile < 2; ++tile) {
        if (tile < tiles) {
            start(tile, tile);
        }
        commit();
    }
    float sums[4][4][4] = {};
    unsigned full = 0, free = 2;
    for (unsigned tile = 0; tile < tiles; ++tile) {
        wait<1>();
        __syncthreads();
        if (tile + 2 < tiles) {
            start(free, tile + 2);
        }
        commit();
        unsigned stage_a = stages + full * STAGE_BYTES, stage_b = stage_a + TILE_BYTES;
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
            unsigned left[4][4], right[2][4];
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) {
                load_matrices(left[i], stage_a + (left_at ^ half * 32) + i * 16 * 64);
            }
#pragma unroll
            for (unsigned j = 0; j < 2; ++j) {
                load_matrices_transposed(right[j], stage_b + (right_at ^ j * 32) + half * 16 * 256);
            }
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) {
#pragma unroll
                for (unsigned j = 0; j < 4; ++j) {
                    multiply_add(sums[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
        full = full == STAGES - 1 ? 0 : full + 1;
        free = free == STAGES - 1 ? 0 : free + 1;
    }

    unsigned i0 = row + warp_row + lane / 4, j0 = column + warp_column + lane % 4 * 2;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) {
            float *at = c + size_t(i0 + i * 16) * n + j0 + j * 8;
            *reinterpret_cast<float2 *>(at) = make_float2(sums[i][j][0], sums[i][j][1]);
            *reinterpret_cast<float2 *>(at + size_t(8) * n) = make_float2(sums[i][j][2], sums[i][j][3]);
        }
    }
}

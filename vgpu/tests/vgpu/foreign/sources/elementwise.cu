// Kernels in which every element is computed by itself or from its neighbours.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void vector_add(const float *__restrict__ a, const float *__restrict__ b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

// A grid-stride loop, four elements at a time.
extern "C" __global__ void saxpy(float a, const float4 *__restrict__ x, float4 *y, int n4) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n4; i += gridDim.x * blockDim.x) {
        float4 u = x[i], v = y[i];
        v.x = fmaf(a, u.x, v.x);
        v.y = fmaf(a, u.y, v.y);
        v.z = fmaf(a, u.z, v.z);
        v.w = fmaf(a, u.w, v.w);
        y[i] = v;
    }
}

// Five points of a plane, tiles with their halo in shared memory. The border is copied.
extern "C" __global__ void stencil(const float *in, float *out, int width, int height) {
    constexpr int T = 16;
    __shared__ float tile[T + 2][T + 2];
    int x0 = blockIdx.x * T - 1, y0 = blockIdx.y * T - 1;
    for (int k = threadIdx.y * T + threadIdx.x; k < (T + 2) * (T + 2); k += T * T) {
        int x = min(max(x0 + k % (T + 2), 0), width - 1);
        int y = min(max(y0 + k / (T + 2), 0), height - 1);
        tile[k / (T + 2)][k % (T + 2)] = in[y * width + x];
    }
    __syncthreads();
    int x = x0 + 1 + threadIdx.x, y = y0 + 1 + threadIdx.y;
    if (x >= width || y >= height) return;
    int i = threadIdx.x + 1, j = threadIdx.y + 1;
    float v = tile[j][i];
    if (x > 0 && y > 0 && x < width - 1 && y < height - 1) {
        float sum = __fadd_rn(__fadd_rn(tile[j - 1][i], tile[j + 1][i]), __fadd_rn(tile[j][i - 1], tile[j][i + 1]));
        v = fmaf(0.25f, sum, -v);
    }
    out[y * width + x] = v;
}

// The column of padding keeps the reads of a column out of one bank.
extern "C" __global__ void transpose(const unsigned *in, unsigned *out, int width, int height) {
    __shared__ unsigned tile[32][33];
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8)
        if (x < width && y + j < height) tile[threadIdx.y + j][threadIdx.x] = in[(y + j) * width + x];
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x, y = blockIdx.x * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8)
        if (x < height && y + j < width) out[(y + j) * height + x] = tile[threadIdx.x][threadIdx.y + j];
}

// Every thread of a grid in three dimensions stores its indices.
extern "C" __global__ void grid_3d(uint4 *out) {
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    unsigned size = blockDim.x * blockDim.y * blockDim.z;
    out[block * size + thread] = make_uint4(block, thread, blockIdx.x | blockIdx.y << 8 | blockIdx.z << 16,
                                            threadIdx.x | threadIdx.y << 8 | threadIdx.z << 16);
}

// One block of 128 threads per row: two block reductions and an exponential.
extern "C" __global__ void softmax(const float *in, float *out, int columns) {
    __shared__ float part[4];
    const float *row = in + blockIdx.x * columns;
    float top = -INFINITY;
    for (int i = threadIdx.x; i < columns; i += 128) top = fmaxf(top, row[i]);
    for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = top;
    __syncthreads();
    top = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
    __syncthreads();
    float sum = 0;
    for (int i = threadIdx.x; i < columns; i += 128) sum += expf(row[i] - top);
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = (part[0] + part[1]) + (part[2] + part[3]);
    for (int i = threadIdx.x; i < columns; i += 128) out[blockIdx.x * columns + i] = expf(row[i] - top) / sum;
}

// Quotients and remainders, by variables and by constants, of all the widths.
extern "C" __global__ void divide(const long long *a, const long long *b, long long *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    long long x = a[i], y = b[i];
    int xi = (int)x, yi = (int)y | 1;
    unsigned xu = (unsigned)x, yu = (unsigned)y | 1;
    unsigned long long xl = x, yl = (unsigned long long)y | 1;
    long long ys = y == -1 || y == 0 ? 3 : y;
    if (yi == -1) yi = 5;
    long long *o = out + 12 * i;
    o[0] = xi / yi, o[1] = xi % yi, o[2] = xu / yu, o[3] = xu % yu;
    o[4] = x / ys, o[5] = x % ys, o[6] = (long long)(xl / yl), o[7] = (long long)(xl % yl);
    o[8] = xi / 7, o[9] = xu % 1000, o[10] = x / 1000003, o[11] = (short)x / 11;
}

// y = a * x + y, then the larger of that and x, in pairs of halves.
extern "C" __global__ void half_pairs(__half2 a, const __half2 *x, __half2 *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __hmax2(__hfma2(a, x[i], y[i]), __hmul2(x[i], x[i]));
}

// bf16 in and out, f32 between.
extern "C" __global__ void bf16_scale(const __nv_bfloat16 *x, float s, __nv_bfloat16 *y, int n) {
    int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 1 < n) {
        float2 v = __bfloat1622float2(*(const __nv_bfloat162 *)(x + i));
        *(__nv_bfloat162 *)(y + i) = __floats2bfloat162_rn(__fmul_rn(v.x, s), __fmul_rn(v.y, s));
    } else if (i < n) {
        y[i] = __float2bfloat16_rn(__fmul_rn(__bfloat162float(x[i]), s));
    }
}

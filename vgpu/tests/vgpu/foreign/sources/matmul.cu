// Products of matrices.

// C = A * B in tiles of 16 x 16; any sizes.
extern "C" __global__ void sgemm_tiled(const float *a, const float *b, float *c, int m, int n, int k) {
    __shared__ float as[16][16], bs[16][16];
    int tx = threadIdx.x, ty = threadIdx.y;
    int row = blockIdx.y * 16 + ty, col = blockIdx.x * 16 + tx;
    float sum = 0;
    for (int k0 = 0; k0 < k; k0 += 16) {
        as[ty][tx] = row < m && k0 + tx < k ? a[row * k + k0 + tx] : 0;
        bs[ty][tx] = col < n && k0 + ty < k ? b[(k0 + ty) * n + col] : 0;
        __syncthreads();
        for (int i = 0; i < 16; i++) sum = fmaf(as[ty][i], bs[i][tx], sum);
        __syncthreads();
    }
    if (row < m && col < n) c[row * n + col] = sum;
}

// The same with 4 x 4 sums in the registers of each thread, vector loads, and dynamic shared memory that holds two
// kinds of tiles. Sizes are multiples of 64 and, for k, of 16.
extern "C" __global__ void __launch_bounds__(256) sgemm_registers(const float *a, const float *b, float *c, int n,
                                                                  int k) {
    extern __shared__ __align__(16) float tiles[];
    float *as = tiles, *bs = tiles + 16 * 64;
    int t = threadIdx.x, tx = t % 16, ty = t / 16;
    const float *arow = a + (blockIdx.y * 64 + t / 4) * k + t % 4 * 4;
    const float *brow = b + t / 16 * n + blockIdx.x * 64 + t % 16 * 4;
    float sum[4][4] = {};
    for (int k0 = 0; k0 < k; k0 += 16) {
        float4 av = *(const float4 *)(arow + k0);
        float4 bv = *(const float4 *)(brow + k0 * n);
        as[(t % 4 * 4 + 0) * 64 + t / 4] = av.x;
        as[(t % 4 * 4 + 1) * 64 + t / 4] = av.y;
        as[(t % 4 * 4 + 2) * 64 + t / 4] = av.z;
        as[(t % 4 * 4 + 3) * 64 + t / 4] = av.w;
        *(float4 *)(bs + t / 16 * 64 + t % 16 * 4) = bv;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float4 x = *(float4 *)(as + i * 64 + ty * 4), y = *(float4 *)(bs + i * 64 + tx * 4);
            float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int s = 0; s < 4; s++) sum[r][s] = fmaf(xs[r], ys[s], sum[r][s]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
        *(float4 *)(c + (blockIdx.y * 64 + ty * 4 + r) * n + blockIdx.x * 64 + tx * 4) =
            make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}

// 8-bit integers, four products per instruction; B is given by its columns.
extern "C" __global__ void igemm_dp4a(const int *a, const int *b, int *c, int n, int k4) {
    int row = blockIdx.y * blockDim.y + threadIdx.y, col = blockIdx.x * blockDim.x + threadIdx.x;
    int sum = 0;
    for (int i = 0; i < k4; i++) sum = __dp4a(a[row * k4 + i], b[col * k4 + i], sum);
    c[row * n + col] = sum;
}

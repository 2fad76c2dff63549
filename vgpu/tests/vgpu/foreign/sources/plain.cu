// Compiled by clang as CUDA, with no header of CUDA at hand: what it takes of the language is declared here.
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __noinline__ __attribute__((noinline))

typedef unsigned long long u64;

static __device__ inline int thread() { return __nvvm_read_ptx_sreg_tid_x(); }
static __device__ inline int block() { return __nvvm_read_ptx_sreg_ctaid_x(); }
static __device__ inline int threads() { return __nvvm_read_ptx_sreg_ntid_x(); }
static __device__ inline int index() { return block() * threads() + thread(); }

extern "C" __global__ void triad(const double *a, const double *b, double *c, double s, int n) {
    int i = index();
    if (i < n) c[i] = __builtin_fma(s, b[i], a[i]);
}

// A product of vectors per block; the tree fixes the order of the sum.
extern "C" __global__ void dot(const double *a, const double *b, double *out) {
    __shared__ double part[128];
    int t = thread();
    part[t] = a[index()] * b[index()];
    __syncthreads();
    for (int d = 64; d; d /= 2) {
        if (t < d) part[t] += part[t + d];
        __syncthreads();
    }
    if (t == 0) out[block()] = part[0];
}

static __device__ __noinline__ u64 power_mod(u64 base, u64 exponent, u64 modulus) {
    u64 r = 1;
    for (base %= modulus; exponent; exponent >>= 1) {
        if (exponent & 1) r = r * base % modulus;
        base = base * base % modulus;
    }
    return r;
}

// Whether a number is prime, by Fermat and by trial; a function that is called from two places.
extern "C" __global__ void primes(const unsigned *in, unsigned char *out) {
    unsigned n = in[index()];
    bool prime = n > 1 && (n < 4 || (power_mod(2, n - 1, n) == 1 && (n % 3 == 0 || power_mod(3, n - 1, n) == 1)));
    for (unsigned d = 2; prime && d * d <= n; d++) prime = n % d != 0;
    out[index()] = prime;
}

// Running maximum within each warp.
extern "C" __global__ void warp_maximum(const int *in, int *out) {
    int v = in[index()];
    for (int d = 1; d < 32; d *= 2) {
        int u = __nvvm_shfl_sync_up_i32(0xffffffff, v, d, 0);
        if (thread() % 32 >= d && u > v) v = u;
    }
    out[index()] = v;
}

__constant__ const short weights[9] = {1, 2, 1, 2, 4, 2, 1, 2, 1};

// A blur of bytes with weights from constant memory.
extern "C" __global__ void blur(const unsigned char *in, unsigned char *out, int width, int height) {
    int x = index() % width, y = index() / width;
    if (y >= height) return;
    int sum = 0;
    for (int j = -1; j <= 1; j++)
        for (int i = -1; i <= 1; i++) {
            int u = x + i, v = y + j;
            u = u < 0 ? 0 : u >= width ? width - 1 : u;
            v = v < 0 ? 0 : v >= height ? height - 1 : v;
            sum += weights[(j + 1) * 3 + i + 1] * in[v * width + u];
        }
    out[y * width + x] = (sum + 8) >> 4;
}

// A generation of the game of life on a torus of 64 columns, one row of bits per thread.
extern "C" __global__ void life(u64 *rows, int generations) {
    __shared__ u64 board[128];
    int t = thread(), n = threads();
    board[t] = rows[t];
    __syncthreads();
    for (int g = 0; g < generations; g++) {
        u64 next = 0, r[3] = {board[(t + n - 1) % n], board[t], board[(t + 1) % n]};
        for (int x = 0; x < 64; x++) {
            int count = 0;
            for (int j = 0; j < 3; j++)
                for (int i = 63; i <= 65; i++) count += r[j] >> ((x + i) % 64) & 1;
            u64 alive = r[1] >> x & 1;
            next |= (u64)(count == 3 || (count == 4 && alive)) << x;
        }
        __syncthreads();
        board[t] = next;
        __syncthreads();
    }
    rows[t] = board[t];
}

// Sums by keys into global memory: integers, and floats that are whole numbers.
extern "C" __global__ void group_by(const unsigned char *keys, const int *values, int *sums, float *floats, int *least) {
    int k = keys[index()], v = values[index()];
    __nvvm_atom_add_gen_i(&sums[k], v);
    __nvvm_atom_add_gen_f(&floats[k], v % 64);
    __nvvm_atom_min_gen_i(&least[k], v);
}

// Branches, calls, local memory, constants, and the longer functions of the mathematical library.
#include <cassert>

// Sorts 16 elements per thread in an array that no register can hold, since it is indexed by variables.
extern "C" __global__ void local_array(const int *in, int *out) {
    int a[16];
    int base = (blockIdx.x * blockDim.x + threadIdx.x) * 16;
#pragma unroll 1
    for (int i = 0; i < 16; i++) {
        int v = in[base + i], j = i;
#pragma unroll 1
        for (; j > 0 && a[j - 1] > v; j--) a[j] = a[j - 1];
        a[j] = v;
    }
#pragma unroll 1
    for (int i = 0; i < 16; i++) out[base + i] = a[i];
}

// A little machine: each thread runs a program of its own through one switch.
extern "C" __global__ void interpreter(const unsigned char *program, int length, unsigned *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned a = i, b = 1;
    for (int pc = 0; pc < length; pc++) {
        switch (program[i * length + pc]) {
            case 0: a += b; break;
            case 1: b ^= a << 3; break;
            case 2: a = a * 2654435761u; break;
            case 3: a = __popc(a) + b; break;
            case 4: b = __brev(b); break;
            case 5: a = __byte_perm(a, b, 0x3175); break;
            case 6: b -= a >> 5; break;
            case 7: if (a & 1) pc++; break;
            case 8: a = __funnelshift_l(a, b, a & 31); break;
            case 9: b = __clz(b | 1) * a; break;
            case 10: a = ~a; break;
            case 11: pc = length; break;
            default: a ^= b; break;
        }
    }
    out[2 * i] = a, out[2 * i + 1] = b;
}

struct Fraction {
    long long top;
    int bottom;
    short tag;
};

__device__ __noinline__ int common_divisor(int a, int b) {
    while (b) {
        int r = a % b;
        a = b, b = r;
    }
    return a;
}

__device__ __noinline__ Fraction reduced(Fraction f, int *divisor) {
    int d = common_divisor((int)f.top, f.bottom);
    *divisor = d;
    if (d == 1) return f;
    return {f.top / d, f.bottom / d, (short)(f.tag + 1)};
}

// Functions that are called, one from within another, with structures by value and a pointer to a local variable.
extern "C" __global__ void calls(const int2 *in, long long *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int divisor;
    Fraction f = reduced({in[i].x, in[i].y, (short)i}, &divisor);
    out[4 * i] = f.top, out[4 * i + 1] = f.bottom, out[4 * i + 2] = f.tag, out[4 * i + 3] = divisor;
}

// Stops the kernel at an element that is out of range.
extern "C" __global__ void checked(const unsigned *in, unsigned *out, unsigned limit) {
    int i = threadIdx.x;
    assert(in[i] < limit);
    out[i] = in[i] + 1;
}

struct Table {
    unsigned word[256];
    constexpr Table() : word() {
        for (unsigned i = 0; i < 256; i++) {
            unsigned c = i;
            for (int k = 0; k < 8; k++) c = c & 1 ? c >> 1 ^ 0xedb88320u : c >> 1;
            word[i] = c;
        }
    }
};
__constant__ Table crc_table = Table();
__device__ unsigned total = 0x1234;

// The check sum of each thread's 64 bytes by a table of constants, and a variable of the module that sums them up.
extern "C" __global__ void crc32(const unsigned char *in, unsigned *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned c = ~0u;
    for (int k = 0; k < 64; k++) c = crc_table.word[(c ^ in[i * 64 + k]) & 255] ^ c >> 8;
    out[i] = ~c;
    atomicAdd(&total, ~c);
    __threadfence();
}

extern "C" __global__ void read_total(unsigned *out) { *out = total; }

// Each thread loops as often as its number needs.
extern "C" __global__ void collatz(const unsigned *in, unsigned *steps, unsigned long long *peak, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned long long v = in[i], top = v;
    unsigned count = 0;
    while (v != 1) {
        if (v % 2 == 0) {
            v /= 2;
            count++;
            continue;
        }
        v = 3 * v + 1;
        if (v > top) top = v;
        count++;
    }
    steps[i] = count, peak[i] = top;
}

// Products of 128 bits: carries and high halves.
extern "C" __global__ void multiply_128(const ulonglong2 *a, const ulonglong2 *b, ulonglong2 *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned __int128 x = (unsigned __int128)a[i].y << 64 | a[i].x, y = (unsigned __int128)b[i].y << 64 | b[i].x;
    unsigned __int128 p = x * y + (x >> 3) - y;
    out[i] = make_ulonglong2((unsigned long long)p, (unsigned long long)(p >> 64));
}

// Functions of the library in f32.
extern "C" __global__ void functions_f32(const float *in, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float x = in[i];
    out[8 * i] = sinf(x), out[8 * i + 1] = cosf(x), out[8 * i + 2] = logf(fabsf(x)), out[8 * i + 3] = expf(x / 8);
    out[8 * i + 4] = powf(fabsf(x), 0.7f), out[8 * i + 5] = tanhf(x), out[8 * i + 6] = atanf(x);
    out[8 * i + 7] = erff(x / 16);
}

// And in f64.
extern "C" __global__ void functions_f64(const double *in, double *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    double x = in[i];
    out[6 * i] = exp(x / 8), out[6 * i + 1] = log(fabs(x)), out[6 * i + 2] = sqrt(fabs(x)), out[6 * i + 3] = sin(x);
    out[6 * i + 4] = 1 / x, out[6 * i + 5] = cbrt(x);
}

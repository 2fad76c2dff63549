// Services of the system that a kernel can use: printf, a barrier of the whole grid, variables.
#include <cooperative_groups.h>
#include <cstdio>

namespace cg = cooperative_groups;

__device__ unsigned counter = 5;
__device__ float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};
__constant__ int limits[2] = {7, 9};

// Each block hands its numbers to the next one, `rounds` times. Half of the lanes of a warp take
// another way to the barrier.
extern "C" __global__ void hand_on(unsigned *a, unsigned *b, int rounds) {
    cg::grid_group grid = cg::this_grid();
    unsigned i = grid.thread_rank(), n = grid.size();
    for (int r = 0; r < rounds; r++) {
        unsigned *from = r % 2 ? b : a, *to = r % 2 ? a : b;
        unsigned value = from[(i + blockDim.x) % n];
        if (i % 2) {
            value += 1;
            to[i] = value;
        } else {
            to[i] = value * 3;
        }
        grid.sync();
    }
}

extern "C" __global__ void print(int n, double x, long long wide, const char *text, int *counts) {
    counts[0] = printf("plain\n");
    counts[1] = printf("%d|%5d|%-5d|%05d|%+d|% d|%.3d|%*d|%u|%hd\n", n, n, n, n, n, n, n, 6, n, n, n);
    counts[2] = printf("%x|%X|%#x|%o|%#o|%llx|%lld|%lu\n", n, n, n, n, n, wide, -wide, (unsigned long)wide);
    counts[3] = printf("%f|%.2f|%10.3f|%-10.1f|%e|%.3E|%g|%g|%G|%a\n", x, x, x, x, x, x, x, x * 1e9, x / 1e9, x);
    counts[4] = printf("%s|%10s|%-10s|%.3s|%c|%p|100%%|%y\n", text, "text", "text", "text", 'c', (void *)0);
}

extern "C" __global__ void print_lanes() {
    if (threadIdx.x % 8 == 3) {
        printf("lane %d of block %d\n", threadIdx.x, blockIdx.x);
    }
}

extern "C" __global__ void use_variables(float *out) {
    unsigned i = threadIdx.x;
    out[i] = table[i % 4] + limits[i % 2];
    if (i == 0) {
        counter += 1;
    }
}

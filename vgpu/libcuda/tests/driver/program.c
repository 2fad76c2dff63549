/* A CUDA driver program, which links libcuda and declares the functions of the API itself.
   `add` checks a result; `race` launches a kernel whose blocks store to one word, and prints the
   code of the wait behind it; `exit` copies and frees in an exit handler, and prints the codes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef void *CUhandle;

CUresult cuInit(unsigned flags);
CUresult cuDeviceGet(int *device, int ordinal);
CUresult cuDevicePrimaryCtxRetain(CUhandle *context, int device);
CUresult cuCtxSetCurrent(CUhandle context);
CUresult cuCtxSynchronize(void);
CUresult cuModuleLoad(CUhandle *module, const char *path);
CUresult cuModuleGetFunction(CUhandle *function, CUhandle module, const char *name);
CUresult cuMemAlloc_v2(CUdeviceptr *addr, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr addr);
CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t bytes);
CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t bytes);
CUresult cuLaunchKernel(CUhandle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUhandle stream, void **params, void **extra);

#define CHECK(call)                                       \
    do {                                                  \
        CUresult code = (call);                           \
        if (code != 0) {                                  \
            printf("%s: %d\n", #call, code);              \
            return 1;                                     \
        }                                                 \
    } while (0)

static CUdeviceptr kept;

static void copy_and_free(void) {
    unsigned word = 0;
    int copied = cuMemcpyDtoH_v2(&word, kept + 4, sizeof word);
    printf("%d %u %d\n", copied, word, cuMemFree_v2(kept));
}

int main(int argc, char **argv) {
    CUhandle context, module, function;
    CUdeviceptr addr;
    unsigned words[64], value = 100;
    void *params[] = {&addr, &value};
    int device, add = argc == 3 && strcmp(argv[2], "add") == 0;

    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoad(&module, argv[1]));
    CHECK(cuModuleGetFunction(&function, module, add ? "add" : "race"));
    CHECK(cuMemAlloc_v2(&addr, sizeof words));
    for (unsigned i = 0; i < 64; i++) words[i] = i;
    CHECK(cuMemcpyHtoD_v2(addr, words, sizeof words));
    if (argc == 3 && strcmp(argv[2], "exit") == 0) {
        kept = addr;
        return atexit(copy_and_free);
    }
    CHECK(cuLaunchKernel(function, 2, 1, 1, 32, 1, 1, 0, NULL, params, NULL));
    if (!add) {
        printf("%d\n", cuCtxSynchronize());
        return 0;
    }
    CHECK(cuMemcpyDtoH_v2(words, addr, sizeof words));
    for (unsigned i = 0; i < 64; i++)
        if (words[i] != i + 100) return 2;
    CHECK(cuMemFree_v2(addr));
    puts("ok");
    return 0;
}

// A warp-specialised GEMM of CUTLASS for sm_90 in clusters of two blocks, whose loads are multicasts:
// C = A * B^T in bf16 with sums in f32. Runs on any libcuda.so.1 by the driver API, and compares with
// the host.
//
//   cutlass KERNELS.ptx
//
// cutlass.sh compiles it, with CLUSTER_M and CLUSTER_N as the blocks of a cluster.
#include <cuda.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

using namespace cute;

using Element = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
using BlockTile = Shape<_64, _64, _64>;
using ClusterShape = Shape<Int<CLUSTER_M>, Int<CLUSTER_N>, _1>;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, BlockTile, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, float, ColumnMajor, 4, float, ColumnMajor, 4,
    cutlass::epilogue::collective::EpilogueScheduleAuto>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, 8, Element, ColumnMajor, 8, float, BlockTile,
    ClusterShape, cutlass::gemm::collective::StageCount<3>, cutlass::gemm::KernelTmaWarpSpecialized>::CollectiveOp;
using Gemm = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue>;

template __global__ void cutlass::device_kernel<Gemm>(CUTLASS_GRID_CONSTANT typename Gemm::Params const);

#ifndef __CUDA_ARCH__
static void must(CUresult result, const char* what) {
    if (result != CUDA_SUCCESS) {
        const char* text = "unknown";
        cuGetErrorString(result, &text);
        fprintf(stderr, "%s: %s (%d)\n", what, text, result);
        exit(1);
    }
}
#define MUST(call) must(call, #call)

int main(int argc, char** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: cutlass KERNELS.ptx\n");
        return 2;
    }
    std::stringstream text;
    text << std::ifstream(argv[1]).rdbuf();
    std::string ptx = text.str();
    size_t at = ptx.find(".entry ") + 7;
    std::string name = ptx.substr(at, ptx.find('(', at) - at);

    const int m = 192, n = 256, k = 320;
    std::vector<uint16_t> a(m * k), b(n * k);
    std::vector<float> fa(a.size()), fb(b.size()), expected(m * n), got(m * n);
    uint32_t state = 1;
    auto fill = [&](std::vector<uint16_t>& bits, std::vector<float>& values) {
        for (size_t i = 0; i < bits.size(); i++) {
            state = state * 1664525 + 1013904223;
            values[i] = float(int(state >> 29) - 4);
            uint32_t word;
            memcpy(&word, &values[i], 4);
            bits[i] = word >> 16;
        }
    };
    fill(a, fa);
    fill(b, fb);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int l = 0; l < k; l++) sum += fa[i * k + l] * fb[j * k + l];
            expected[j * m + i] = sum;
        }

    MUST(cuInit(0));
    CUdevice device;
    CUcontext context;
    MUST(cuDeviceGet(&device, 0));
    MUST(cuDevicePrimaryCtxRetain(&context, device));
    MUST(cuCtxSetCurrent(context));
    CUmodule module;
    CUfunction kernel;
    MUST(cuModuleLoadData(&module, ptx.c_str()));
    MUST(cuModuleGetFunction(&kernel, module, name.c_str()));
    CUdeviceptr da, db, dc;
    MUST(cuMemAlloc(&da, a.size() * 2));
    MUST(cuMemAlloc(&db, b.size() * 2));
    MUST(cuMemAlloc(&dc, got.size() * 4));
    MUST(cuMemcpyHtoD(da, a.data(), a.size() * 2));
    MUST(cuMemcpyHtoD(db, b.data(), b.size() * 2));

    auto stride_a = make_stride(int64_t(k), _1{}, int64_t(0));
    auto stride_b = make_stride(int64_t(k), _1{}, int64_t(0));
    auto stride_c = make_stride(_1{}, int64_t(m), int64_t(0));
    cutlass::KernelHardwareInfo hardware;
    hardware.device_id = 0;
    hardware.sm_count = 132;
    typename Gemm::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                                       {m, n, k, 1},
                                       {reinterpret_cast<Element*>(da), stride_a, reinterpret_cast<Element*>(db), stride_b},
                                       {{1.0f, 0.0f}, nullptr, stride_c, reinterpret_cast<float*>(dc), stride_c},
                                       hardware};
    if (Gemm::can_implement(arguments) == false) {
        fprintf(stderr, "the kernel does not take this problem\n");
        return 1;
    }
    typename Gemm::Params params = Gemm::to_underlying_arguments(arguments, nullptr);
    dim3 grid = Gemm::get_grid_shape(params), block = Gemm::get_block_shape();
    MUST(cuFuncSetAttribute(kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, Gemm::SharedStorageSize));
    CUlaunchAttribute cluster = {};
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim = {CLUSTER_M, CLUSTER_N, 1};
    CUlaunchConfig config = {};
    config.gridDimX = grid.x, config.gridDimY = grid.y, config.gridDimZ = grid.z;
    config.blockDimX = block.x, config.blockDimY = block.y, config.blockDimZ = block.z;
    config.sharedMemBytes = Gemm::SharedStorageSize;
    config.attrs = &cluster;
    config.numAttrs = 1;
    void* args[] = {&params};
    printf("grid %u x %u x %u, %u threads, %d bytes of shared memory\n", grid.x, grid.y, grid.z, block.x, Gemm::SharedStorageSize);
    MUST(cuLaunchKernelEx(&config, kernel, args, nullptr));
    MUST(cuCtxSynchronize());
    MUST(cuMemcpyDtoH(got.data(), dc, got.size() * 4));
    for (size_t i = 0; i < got.size(); i++)
        if (got[i] != expected[i]) {
            fprintf(stderr, "C[%zu] is %g and not %g\n", i, got[i], expected[i]);
            return 1;
        }
    printf("all %d sums are right\n", m * n);
    return 0;
}
#endif

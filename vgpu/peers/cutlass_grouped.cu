// A grouped GEMM of CUTLASS for sm_90, whose blocks write the tensor maps of each group by
// tensormap.replace: C = A * B^T for groups of different sizes, in bf16 with sums in f32. Runs on any
// libcuda.so.1, and compares with the host.
//
//   cutlass_grouped KERNELS.ptx
//
// cutlass.sh compiles it.
#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
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
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

using namespace cute;

using Element = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
using BlockTile = Shape<_64, _64, _64>;
using ClusterShape = Shape<_1, _1, _1>;
using Problem = cutlass::gemm::GroupProblemShape<Shape<int, int, int>>;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, BlockTile, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, float, ColumnMajor*, 4, float, ColumnMajor*, 4,
    cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor*, 8, Element, ColumnMajor*, 8, float,
    BlockTile, ClusterShape, cutlass::gemm::collective::StageCount<3>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong>::CollectiveOp;
using Gemm = cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>;

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

// Device memory with these contents.
template <class T>
static T* upload(const std::vector<T>& values) {
    CUdeviceptr at;
    MUST(cuMemAlloc(&at, values.size() * sizeof(T)));
    MUST(cuMemcpyHtoD(at, values.data(), values.size() * sizeof(T)));
    return reinterpret_cast<T*>(at);
}

int main(int argc, char** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: cutlass_grouped KERNELS.ptx\n");
        return 2;
    }
    std::stringstream text;
    text << std::ifstream(argv[1]).rdbuf();
    std::string ptx = text.str();
    size_t at = ptx.find(".entry ") + 7;
    std::string name = ptx.substr(at, ptx.find('(', at) - at);

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

    // Rows and columns of C, and the length of the sums.
    const std::vector<std::array<int, 3>> sizes = {{64, 128, 64}, {100, 72, 192}, {8, 200, 320}, {192, 64, 72}};
    using Stride = cute::remove_pointer_t<typename Gemm::StrideA>;
    using StrideC = cute::remove_pointer_t<typename Gemm::StrideD>;
    std::vector<typename Problem::UnderlyingProblemShape> problems;
    std::vector<const Element*> as, bs;
    std::vector<float*> cs;
    std::vector<const float*> inputs;
    std::vector<Stride> strides;
    std::vector<StrideC> strides_c;
    std::vector<std::vector<float>> expected;
    uint32_t state = 1;
    auto fill = [&](std::vector<Element>& elements, std::vector<float>& values) {
        for (size_t i = 0; i < values.size(); i++) {
            state = state * 1664525 + 1013904223;
            values[i] = float(int(state >> 29) - 4);
            elements[i] = Element(values[i]);
        }
    };
    for (auto [m, n, k] : sizes) {
        std::vector<Element> a(m * k), b(n * k);
        std::vector<float> fa(a.size()), fb(b.size()), c(m * n);
        fill(a, fa);
        fill(b, fb);
        for (int i = 0; i < m; i++)
            for (int j = 0; j < n; j++) {
                float sum = 0;
                for (int l = 0; l < k; l++) sum += fa[i * k + l] * fb[j * k + l];
                c[j * m + i] = sum;
            }
        problems.push_back({m, n, k});
        as.push_back(upload(a));
        bs.push_back(upload(b));
        cs.push_back(upload(std::vector<float>(c.size(), -1)));
        inputs.push_back(cs.back());
        strides.push_back(make_stride(int64_t(k), _1{}, _0{}));
        strides_c.push_back(make_stride(_1{}, int64_t(m), _0{}));
        expected.push_back(c);
    }

    cutlass::KernelHardwareInfo hardware;
    hardware.device_id = 0;
    hardware.sm_count = 3;
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGrouped,
        {int(sizes.size()), upload(problems), problems.data()},
        {upload(as), upload(strides), upload(bs), upload(strides)},
        {{}, upload(inputs), upload(strides_c), upload(cs), upload(strides_c)},
        hardware};
    arguments.epilogue.thread.alpha = 1;
    arguments.epilogue.thread.beta = 0;
    if (!Gemm::can_implement(arguments)) {
        fprintf(stderr, "the kernel does not take this problem\n");
        return 1;
    }
    void* workspace = upload(std::vector<uint8_t>(Gemm::get_workspace_size(arguments) + 1));
    typename Gemm::Params params = Gemm::to_underlying_arguments(arguments, workspace);
    if (Gemm::initialize_workspace(arguments, workspace, nullptr) != cutlass::Status::kSuccess) {
        fprintf(stderr, "the workspace cannot be initialised\n");
        return 1;
    }
    dim3 grid = Gemm::get_grid_shape(params), block = Gemm::get_block_shape();
    MUST(cuFuncSetAttribute(kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, Gemm::SharedStorageSize));
    void* args[] = {&params};
    printf("grid %u x %u x %u, %u threads, %d bytes of shared memory\n", grid.x, grid.y, grid.z, block.x,
           Gemm::SharedStorageSize);
    MUST(cuLaunchKernel(kernel, grid.x, grid.y, grid.z, block.x, 1, 1, Gemm::SharedStorageSize, nullptr, args, nullptr));
    MUST(cuCtxSynchronize());
    size_t sums = 0;
    for (size_t group = 0; group < sizes.size(); group++) {
        std::vector<float> got(expected[group].size());
        MUST(cuMemcpyDtoH(got.data(), reinterpret_cast<CUdeviceptr>(cs[group]), got.size() * 4));
        for (size_t i = 0; i < got.size(); i++)
            if (got[i] != expected[group][i]) {
                fprintf(stderr, "C[%zu] of group %zu is %g and not %g\n", i, group, got[i], expected[group][i]);
                return 1;
            }
        sums += got.size();
    }
    printf("all %zu sums are right\n", sums);
    return 0;
}
#endif

// Products by CUTLASS's kernels for sm_80, each behind a kernel that takes plain numbers: CUTLASS
// makes the arguments of its own kernels on the host.
#include "cutlass/gemm/device/gemm.h"
#include "cutlass/gemm/device/gemm_sparse.h"

namespace {
using cutlass::bfloat16_t;
using cutlass::half_t;
using cutlass::tfloat32_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
template <int M, int N, int K>
using Shape = cutlass::gemm::GemmShape<M, N, K>;

// D = alpha A B + beta C, packed, by the block's tile of D.
template <class Gemm>
__device__ void product(void* a, void* b, void* c, void* d, int m, int n, int k) {
    extern __shared__ int4 shared[];
    using Kernel = typename Gemm::GemmKernel;
    using Scalar = typename Gemm::EpilogueOutputOp::ElementCompute;
    typename Gemm::LayoutA layout_a = Gemm::LayoutA::packed({m, k});
    typename Gemm::LayoutB layout_b = Gemm::LayoutB::packed({k, n});
    typename Gemm::LayoutC layout_c = Gemm::LayoutC::packed({m, n});
    using Tile = typename Gemm::ThreadblockShape;
    cutlass::gemm::GemmCoord tiles((m + Tile::kM - 1) / Tile::kM, (n + Tile::kN - 1) / Tile::kN, 1);
    typename Kernel::Params params(
        {m, n, k}, tiles, {static_cast<typename Gemm::ElementA*>(a), layout_a},
        {static_cast<typename Gemm::ElementB*>(b), layout_b},
        {static_cast<typename Gemm::ElementC*>(c), layout_c},
        {static_cast<typename Gemm::ElementC*>(d), layout_c}, {Scalar(2), Scalar(1)});
    Kernel()(params, *reinterpret_cast<typename Kernel::SharedStorage*>(shared));
}

// The same with a sparse A, of which half is stored, and its metadata.
template <class Gemm>
__device__ void sparse_product(void* a, void* b, void* c, void* d, void* e, int m, int n, int k) {
    extern __shared__ int4 shared[];
    using Kernel = typename Gemm::GemmKernel;
    using Scalar = typename Gemm::EpilogueOutputOp::ElementCompute;
    using Tile = typename Gemm::ThreadblockShape;
    typename Gemm::LayoutA layout_a = Gemm::LayoutA::packed({m, k / Gemm::kSparse});
    typename Gemm::LayoutB layout_b = Gemm::LayoutB::packed({k, n});
    typename Gemm::LayoutC layout_c = Gemm::LayoutC::packed({m, n});
    typename Gemm::LayoutE layout_e = Gemm::LayoutE::packed({m, k / Gemm::kSparse / Gemm::kElementsPerElementE});
    cutlass::gemm::GemmCoord tiles((m + Tile::kM - 1) / Tile::kM, (n + Tile::kN - 1) / Tile::kN, 1);
    typename Kernel::Params params(
        {m, n, k}, tiles, {static_cast<typename Gemm::ElementA*>(a), layout_a},
        {static_cast<typename Gemm::ElementB*>(b), layout_b},
        {static_cast<typename Gemm::ElementC*>(c), layout_c},
        {static_cast<typename Gemm::ElementC*>(d), layout_c},
        {static_cast<typename Gemm::ElementE*>(e), layout_e}, {Scalar(2), Scalar(1)});
    Kernel()(params, *reinterpret_cast<typename Kernel::SharedStorage*>(shared));
}
}  // namespace

// A kernel, and what its launch needs: threads, bytes of shared memory, and the tile of a block.
#define GEMM(NAME, A, LAYOUT_A, B, LAYOUT_B, C, SUM, TILE, WARP, INSTRUCTION)                       \
    using Gemm_##NAME = cutlass::gemm::device::Gemm<A, LAYOUT_A, B, LAYOUT_B, C, Row, SUM,          \
        cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, TILE, WARP, INSTRUCTION>;              \
    extern "C" __device__ int NAME##_launch[4] = {Gemm_##NAME::GemmKernel::kThreadCount,            \
        sizeof(Gemm_##NAME::GemmKernel::SharedStorage), Gemm_##NAME::ThreadblockShape::kM,          \
        Gemm_##NAME::ThreadblockShape::kN};                                                         \
    extern "C" __global__ void NAME(void* a, void* b, void* c, void* d, int m, int n, int k) {      \
        product<Gemm_##NAME>(a, b, c, d, m, n, k);                                                  \
    }

#define SPARSE(NAME, A, B, C, SUM, TILE, WARP, INSTRUCTION)                                         \
    using Gemm_##NAME = cutlass::gemm::device::SparseGemm<A, Row, B, Column, C, Row, SUM,           \
        cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, TILE, WARP, INSTRUCTION>;              \
    extern "C" __device__ int NAME##_launch[4] = {Gemm_##NAME::GemmKernel::kThreadCount,            \
        sizeof(Gemm_##NAME::GemmKernel::SharedStorage), Gemm_##NAME::ThreadblockShape::kM,          \
        Gemm_##NAME::ThreadblockShape::kN};                                                         \
    extern "C" __global__ void NAME(                                                                \
        void* a, void* b, void* c, void* d, void* e, int m, int n, int k) {                         \
        sparse_product<Gemm_##NAME>(a, b, c, d, e, m, n, k);                                        \
    }

using Small = Shape<64, 64, 32>;
using SmallWarp = Shape<32, 32, 32>;
using Deep = Shape<64, 64, 64>;
using DeepWarp = Shape<32, 32, 64>;
using Wide = Shape<64, 128, 32>;
using WideWarp = Shape<32, 64, 32>;
using K4 = Shape<8, 8, 4>;
using K8 = Shape<16, 8, 8>;
using K16 = Shape<16, 8, 16>;
using K32 = Shape<16, 8, 32>;
using K64 = Shape<16, 8, 64>;
using Long = Shape<64, 64, 128>;
using LongWarp = Shape<32, 32, 128>;
using Double = Shape<64, 64, 16>;
using DoubleWarp = Shape<32, 32, 16>;

GEMM(f16_row_column, half_t, Row, half_t, Column, float, float, Small, SmallWarp, K16)
GEMM(f16_row_row, half_t, Row, half_t, Row, float, float, Small, SmallWarp, K16)
GEMM(f16_column_row, half_t, Column, half_t, Row, float, float, Small, SmallWarp, K16)
GEMM(f16_column_column, half_t, Column, half_t, Column, float, float, Deep, DeepWarp, K16)
GEMM(f16_wide, half_t, Row, half_t, Column, half_t, float, Wide, WideWarp, K16)
GEMM(f16_sums_of_f16, half_t, Row, half_t, Column, half_t, half_t, Small, SmallWarp, K16)
GEMM(f16_k8, half_t, Row, half_t, Column, float, float, Small, SmallWarp, K8)
GEMM(bf16_row_column, bfloat16_t, Row, bfloat16_t, Column, float, float, Small, SmallWarp, K16)
GEMM(bf16_column_row, bfloat16_t, Column, bfloat16_t, Row, bfloat16_t, float, Deep, DeepWarp, K16)
GEMM(tf32_row_column, tfloat32_t, Row, tfloat32_t, Column, float, float, Small, SmallWarp, K8)
GEMM(tf32_column_row, tfloat32_t, Column, tfloat32_t, Row, float, float, Small, SmallWarp, K8)
GEMM(s8_row_column, int8_t, Row, int8_t, Column, int32_t, int32_t, Deep, DeepWarp, K32)
GEMM(u8_row_column, uint8_t, Row, uint8_t, Column, int32_t, int32_t, Deep, DeepWarp, K32)
GEMM(s4_row_column, cutlass::int4b_t, Row, cutlass::int4b_t, Column, int32_t, int32_t, Long, LongWarp, K64)
GEMM(f64_row_column, double, Row, double, Column, double, double, Double, DoubleWarp, K4)
SPARSE(sparse_f16, half_t, half_t, float, float, Long, LongWarp, K32)
SPARSE(sparse_tf32, tfloat32_t, tfloat32_t, float, float, Deep, DeepWarp, K16)
SPARSE(sparse_s8, int8_t, int8_t, int32_t, int32_t, Long, LongWarp, K64)

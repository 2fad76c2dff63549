"""Writes the sources of each step of `deepep-ll`: usage `deepep_ll.py SOURCE FOLDER`.

SOURCE is the folder `csrc/kernels` of DeepEP V1. Prints the steps in order. Within a node the kernels
reach peers by `nvshmemi_get_p2p_ptr`, and call RDMA only where it returns null. This file has that
function and traps in the calls.
"""

import sys

import steps

FILE = "internode_ll.cu"
# In place of `ibgda_device.cuh`. The host writes `peer_heaps`: the heaps of all ranks, as this one
# addresses them.
STUB = """#pragma once
#include <cooperative_groups.h>
#include "configs.cuh"
#include "exception.cuh"
#include "utils.cuh"
namespace cg = cooperative_groups;
extern "C" __device__ uint64_t peer_heaps[8];
namespace deep_ep {
struct State { int num_rc_per_pe, num_devices_initialized; };
__device__ inline const State* ibgda_get_state() { static __device__ State state = {1024, 0}; return &state; }
__device__ inline uint64_t nvshmemi_get_p2p_ptr(uint64_t ptr, int rank, int to) {
    return ptr - peer_heaps[rank] + peer_heaps[to];
}
template <class... T> __device__ void nvshmemi_ibgda_quiet(T...) { trap(); }
template <class... T> __device__ void nvshmemi_ibgda_rma_p(T...) { trap(); }
template <class... T> __device__ void nvshmemi_ibgda_put_nbi_warp(T...) { trap(); }
template <class... T> __device__ void nvshmemi_ibgda_amo_nonfetch_add(T...) { trap(); }
__device__ inline void nvshmemx_barrier_all_block() { trap(); }
}  // namespace deep_ep
__device__ uint64_t peer_heaps[8];
"""
REPAIRS = [
    # Three words of a message that nothing uses.
    (
        "reserved-words-written",
        [
            (
                FILE,
                "thread_id == 0 ? (*rdma_x_src_idx = token_idx) : 0;",
                "thread_id == 0 ? (rdma_x_src_idx[1] = rdma_x_src_idx[2] = rdma_x_src_idx[3] = 0, *rdma_x_src_idx = token_idx) : 0;",
                None,
            )
        ],
    ),
    # The project's own switch, `DISABLE_AGGRESSIVE_PTX_INSTRS`.
    ("no-read-only-loads", [("utils.cuh", "#ifndef DISABLE_AGGRESSIVE_PTX_INSTRS", "#if 0", 0)]),
    # Not `.read`: the flag publishes the rows to the peer.
    (
        "rows-complete-before-the-flag",
        [
            (
                FILE,
                "// Flush all stores\n                    tma_store_wait<0>();",
                '// Flush all stores\n                    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");',
                None,
            )
        ],
    ),
    # Issue 642 of the project.
    (
        "fence-behind-the-reads-of-a-stage",
        [
            (
                FILE,
                "if (elect_one_sync())\n                        mbarrier_arrive(empty",
                "tma_store_fence(); __syncwarp(); if (elect_one_sync())\n                        mbarrier_arrive(empty",
                None,
            )
        ],
    ),
    (
        "fence-behind-invalidated-mbarriers",
        [(FILE, "mbarrier_inval(full_barriers[lane_id]);", "mbarrier_inval(full_barriers[lane_id]); tma_store_fence();", None)],
    ),
    # `elect.sync` orders no memory.
    (
        "lanes-meet-before-the-store",
        [
            (
                FILE,
                "tma_store_fence();\n                if (elect_one_sync()) {\n                    tma_store_1d(tma_st",
                "tma_store_fence(); __syncwarp();\n                if (elect_one_sync()) {\n                    tma_store_1d(tma_st",
                None,
            )
        ],
    ),
    (
        "lanes-meet-behind-the-wait",
        [
            (
                FILE,
                "tma_store_wait<0>();\n\n                #pragma unroll\n                for (int k = 0; k < kNumRecvUnrolls",
                "tma_store_wait<0>(); __syncwarp();\n\n                #pragma unroll\n                for (int k = 0; k < kNumRecvUnrolls",
                None,
            )
        ],
    ),
    (
        "block-waits-for-its-last-store",
        [
            (
                FILE,
                "                __syncwarp();\n            }\n        }\n    }\n}\n\nvoid combine(",
                "                __syncwarp();\n            } tma_store_wait<0>();\n        }\n    }\n}\n\nvoid combine(",
                None,
            )
        ],
    ),
]


# The mend of issue 642 as the project has it since commit d4f41e4: no warp barrier behind the fence.
OWN_MEND = (
    "own-mend",
    [
        (
            FILE,
            "if (elect_one_sync())\n                        mbarrier_arrive(empty",
            "tma_store_fence(); if (elect_one_sync())\n                        mbarrier_arrive(empty",
            None,
        )
    ],
)


def main():
    source, folder = sys.argv[1:]
    added = [("ibgda_device.cuh", STUB)]
    steps.with_and_without(source, folder, REPAIRS, added)
    # Issue 642 mended alone: by the project, the same where lanes in step are ordered, and by the manual.
    steps.write(source, folder, "with-own-mend", [OWN_MEND], added)
    steps.write(source, folder, "with-own-mend-in-step", [OWN_MEND], added)
    mend = [repair for repair in REPAIRS if repair[0] == "fence-behind-the-reads-of-a-stage"]
    steps.write(source, folder, f"with-{mend[0][0]}", mend, added)


main()

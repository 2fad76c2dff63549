"""Writes the sources of each step of `nccl-ep`: usage `nccl_ep.py SOURCE FOLDER`.

SOURCE is NCCL's repository. Prints the steps in order. The kernels find peers by NCCL's own windows,
with the layout of its headers. This file adds what NCCL's host side and its build do: `peers.cu` has
a kernel that fills `ncclDevComm` and a window, and names the kernels to compile; `nccl.h` is made of
`nccl.h.in`.
"""

import pathlib
import re
import sys

import steps

LL = "contrib/nccl_ep/device/low_latency.cu"
PRIMITIVES = "contrib/nccl_ep/device/device_primitives.cuh"
WRAPPER = """#include "device/low_latency.cu"
// As the host side of NCCL fills them for ranks that all reach each other's memory.
extern "C" {
__device__ ncclDevComm dev_comm;
__device__ ncclWindow_vidmem window;
__device__ ncclWindow_t windows[1];
__global__ void make_comm(char* flat, int rank, int ranks) {
    dev_comm.rank = dev_comm.lsaRank = window.worldRank = window.lsaRank = rank;
    dev_comm.nRanks = dev_comm.lsaSize = ranks;
    window.lsaFlatBase = flat;
    window.stride4G = 1;
    windows[0] = &window;
}
}
using namespace nccl_ep::internode_ll;
void* const kernels[] = {
    (void*)&dispatch<false, false, 2048, NCCL_EP_LAYOUT_EXPERT_MAJOR, true>,
    (void*)&dispatch<false, false, 2048, NCCL_EP_LAYOUT_RANK_MAJOR, true>,
    (void*)&combine<false, 2048, kCombineMaxTopk, kCombineMaxUnrolls, NCCL_EP_LAYOUT_EXPERT_MAJOR>,
    (void*)&combine<false, 2048, kCombineMaxTopk, kCombineMaxUnrolls, NCCL_EP_LAYOUT_RANK_MAJOR>,
};
"""
# The launchers instantiate their kernels for each size; `peers.cu` names those that run.
SIZES = [(2048, ""), (2560, ""), (4096, ""), (5120, ""), (6144, " /* For qwen3 coder */"), (7168, ""), (8192, "")]
CUTS = [
    (
        "launchers-without-sizes",
        [("contrib/nccl_ep/device/macros.cuh", f"case {hidden}: case_macro({hidden});{behind} \\", "\\", None) for hidden, behind in SIZES],
    )
]
REPAIRS = [
    (
        "lanes-meet-before-the-count",
        [
            (
                LL,
                "                    if (laneId == 0) {\n                        // Mark that one more",
                "                    __syncwarp(); if (laneId == 0) {\n                        // Mark that one more",
                None,
            )
        ],
    ),
    (
        "lanes-meet-behind-the-sums",
        [(LL, "sharedNumTokensSentPerRank, laneId);", "sharedNumTokensSentPerRank, laneId); __syncwarp();", None)],
    ),
    # The number of rows, and then the counter that other warps of the group poll.
    (
        "number-shared-before-the-counter",
        [
            (
                LL,
                "atomic_add_release_global(rankArrivedCnt + srcRank, 1);\n            sharedNumRecvTokens[warpGroupId] = numRecvTokens;",
                "sharedNumRecvTokens[warpGroupId] = numRecvTokens;\n            atomic_add_release_global(rankArrivedCnt + srcRank, 1);",
                None,
            )
        ],
    ),
    # DeepEP's own switch, `DISABLE_AGGRESSIVE_PTX_INSTRS`.
    ("no-read-only-loads", [(PRIMITIVES, "#ifndef DISABLE_AGGRESSIVE_PTX_INSTRS", "#if 0", 0)]),
    # Not `.read`: the flag publishes the rows to the peer.
    (
        "rows-complete-before-the-flag",
        [
            (
                LL,
                "// Flush all stores\n        tma_store_wait<0>();",
                '// Flush all stores\n        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");',
                None,
            )
        ],
    ),
    # Issue 642 of DeepEP.
    (
        "fence-behind-the-reads-of-a-stage",
        [
            (
                LL,
                "if (elect_one_sync())\n                        mbarrier_arrive(empty",
                "tma_store_fence(); __syncwarp(); if (elect_one_sync())\n                        mbarrier_arrive(empty",
                None,
            )
        ],
    ),
    (
        "fence-behind-invalidated-mbarriers",
        [(LL, "mbarrier_inval(fullBarriers[laneId]);", "mbarrier_inval(fullBarriers[laneId]); tma_store_fence();", None)],
    ),
    # `elect.sync` orders no memory.
    (
        "lanes-meet-before-the-store",
        [
            (
                LL,
                "tma_store_fence();\n                if (elect_one_sync()) {\n                    tma_store_1d(tmaSt",
                "tma_store_fence(); __syncwarp();\n                if (elect_one_sync()) {\n                    tma_store_1d(tmaSt",
                None,
            )
        ],
    ),
    (
        "lanes-meet-behind-the-wait",
        [
            (
                LL,
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
                LL,
                "                __syncwarp();\n            }\n        }\n    }\n}\n\n// Constants for",
                "                __syncwarp();\n            } tma_store_wait<0>();\n        }\n    }\n}\n\n// Constants for",
                None,
            )
        ],
    ),
]


def nccl_h(source):
    """`nccl.h` as `src/Makefile` makes it."""
    version = (source / "makefiles/version.mk").read_text()
    number = {name: re.search(rf"NCCL_{name.upper()} *:= *(\d+)", version)[1] for name in ("Major", "Minor", "Patch")}
    values = {**number, "Suffix": "", "Version": f"{number['Major']}{number['Minor']:0>2}{number['Patch']:0>2}"}
    text = (source / "src/nccl.h.in").read_text()
    return re.sub(r"\$\{nccl:(\w+)\}", lambda found: values[found[1]], text)


def main():
    source, folder = pathlib.Path(sys.argv[1]), sys.argv[2]
    added = [("contrib/nccl_ep/peers.cu", WRAPPER), ("src/include/nccl.h", nccl_h(source))]
    steps.with_and_without(source, folder, REPAIRS, added, CUTS)


if __name__ == "__main__":
    main()

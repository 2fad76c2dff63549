"""Writes the sources of each step of `deepep`: usage `deepep.py SOURCE FOLDER`.

SOURCE is the folder `csrc/kernels` of DeepEP V1. Prints the steps in order.
"""

import sys

import steps

FILE = "intranode.cu"
REPAIRS = [
    # Threads fence, then meet, then one of them adds: only its own fence makes that a release.
    (
        "release-at-the-barrier",
        [("utils.cuh", "atomicAdd_system(barrier_signal_ptrs", "memory_fence(); atomicAdd_system(barrier_signal_ptrs", None)],
    ),
    (
        "acquire-at-the-barrier",
        [("utils.cuh", "ld_volatile_global(barrier_signal_ptrs", "ld_acquire_sys_global(barrier_signal_ptrs", None)],
    ),
    # By the comment above these lines, every element is written.
    (
        "counts-in-all-columns",
        [
            (
                FILE,
                "per_rank_buffer[rank * kNumRanks + thread_id] = num_tokens_per_rank[thread_id];",
                "for (int j = 0; j < kNumRanks; ++j) per_rank_buffer[rank * kNumRanks + j] = num_tokens_per_rank[j];",
                None,
            )
        ],
    ),
    (
        "fence-before-the-bulk-load",
        [(FILE, "tma_load_1d(tma_buffer, shifted", 'asm volatile("fence.proxy.async;"); tma_load_1d(tma_buffer, shifted', None)],
    ),
    # The project's own switch, `DISABLE_AGGRESSIVE_PTX_INSTRS`.
    ("no-read-only-loads-of-slots", [("utils.cuh", "#ifndef DISABLE_AGGRESSIVE_PTX_INSTRS", "#if 0", 0)]),
    ("no-read-only-load-of-heads", [(FILE, "__ldg(send_head + token_idx", "*(send_head + token_idx", None)]),
    (
        "dispatch-releases-heads",
        [(FILE, "st_relaxed_sys_global(channel_head_idx.buffer()", "st_release_sys_global(channel_head_idx.buffer()", None)],
    ),
    (
        "dispatch-acquires-heads",
        [
            (
                FILE,
                "cached_channel_tail_idx - ld_volatile_global(channel_head_idx.buffer())",
                "cached_channel_tail_idx - ld_acquire_sys_global(channel_head_idx.buffer())",
                None,
            )
        ],
    ),
    (
        "dispatch-waits-for-its-last-store",
        [(FILE, "num_tokens_to_recv -= num_recv_tokens;", "num_tokens_to_recv -= num_recv_tokens; tma_store_wait<0>();", None)],
    ),
    (
        "combine-acquires-heads",
        [
            (
                FILE,
                "current_channel_tail_idx - ld_volatile_global(channel_head_idx.buffer())",
                "current_channel_tail_idx - ld_acquire_sys_global(channel_head_idx.buffer())",
                None,
            )
        ],
    ),
    # Volatile words of shared memory hand the tail on to the warps that read the slots.
    (
        "combine-hands-the-tail-on",
        [
            (
                FILE,
                "channel_tail_idx[lane_id] = ld_acquire_sys_global(channel_tail_idx_ptr);",
                "int tail = ld_acquire_sys_global(channel_tail_idx_ptr); memory_fence_cta(); channel_tail_idx[lane_id] = tail;",
                None,
            ),
            (
                FILE,
                "                __syncwarp();\n\n                // Broadcast current heads",
                "                memory_fence_cta(); __syncwarp();\n\n                // Broadcast current heads",
                None,
            ),
        ],
    ),
    # And others hand the heads back.
    (
        "combine-hands-heads-back",
        [
            (
                FILE,
                "                if (lane_id < kNumRanks)\n                    warp_channel_head_idx[recv_warp_id][lane_id] = (",
                "                __syncwarp(); memory_fence_cta(); if (lane_id < kNumRanks)\n                    warp_channel_head_idx[recv_warp_id][lane_id] = (",
                None,
            ),
            (
                FILE,
                "            __syncwarp();\n            if (elect_one_sync())\n                warp_retired[",
                "            __syncwarp(); memory_fence_cta();\n            if (elect_one_sync())\n                warp_retired[",
                None,
            ),
            (
                FILE,
                "st_relaxed_sys_global(channel_head_idx_ptr,",
                "memory_fence(), st_relaxed_sys_global(channel_head_idx_ptr,",
                None,
            ),
        ],
    ),
    # Lanes beyond the ranks have no tail.
    (
        "no-tails-of-lanes-without-ranks",
        [
            (
                FILE,
                "channel_tail_idx[lane_id] <= expected_head and expected_head >= 0",
                "expected_head >= 0 and channel_tail_idx[lane_id] <= expected_head",
                None,
            )
        ],
    ),
    (
        "combine-waits-for-its-last-store",
        [
            (
                FILE,
                "            // Retired\n            __syncwarp();",
                "            // Retired\n            tma_store_wait<0>(); __syncwarp();",
                None,
            )
        ],
    ),
]


def main():
    source, folder = sys.argv[1:]
    steps.with_and_without(source, folder, REPAIRS)
    # A run of the repaired source with rings of 8 slots.
    steps.write(source, folder, "repaired-ring-of-8", REPAIRS)


main()

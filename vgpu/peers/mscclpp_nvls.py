"""Writes the sources of each step of `mscclpp-nvls`: usage `mscclpp_nvls.py SOURCE FOLDER`.

SOURCE is a folder with `include` and `src` of MSCCL++. One file includes the kernels, and the
launchers keep one operation and one type of 28. Prints the steps in order.
"""

import sys

import steps

ALL = "src/ext/collectives/allreduce/"
KERNELS = "".join(
    f'#include "allreduce_nvls_{name}.cu"\n' for name in ["packet", "zero_copy", "warp_pipeline"]
)
COMMON = "src/ext/collectives/include/allreduce/common.hpp"
MIN = "if (op == MIN) return dispatchByDtype<MIN, Adapter>(dtype, accumDtype);"
CUT = (
    "one-operation-and-type",
    [
        (COMMON, "dispatchByDtype<SUM, Adapter>(dtype, accumDtype);", "Adapter<SUM, float, float>::call;", None),
        (COMMON, MIN, "", None),
    ],
)
ZERO_COPY = ALL + "allreduce_nvls_zero_copy.cu"
PIPELINE = ALL + "allreduce_nvls_warp_pipeline.cu"
PACKET = ALL + "allreduce_nvls_packet.cu"


def ordered(which):
    """Edits that make one of the two barriers of the all-reduce without copies order memory."""
    return [
        (ZERO_COPY, f"channels[threadIdx.x].relaxed{call}();", f"channels[threadIdx.x].{call.lower()}();", which)
        for call in ["Signal", "Wait"]
    ]


REPAIRS = [
    # Neither of the two meetings of the ranks orders memory.
    ("first-barrier-ordered", ordered(0)),
    ("last-barrier-ordered", ordered(1)),
    # Every warp stores all channels into the same shared memory.
    (
        "zero-copy-channels-stored-once",
        [
            (
                ZERO_COPY,
                "i = lid; i < nRanksPerIpcDomain - 1; i += WARP_SIZE",
                "i = threadIdx.x; i < nRanksPerIpcDomain - 1; i += blockDim.x",
                None,
            ),
            (ZERO_COPY, "__syncwarp();", "__syncthreads();", None),
        ],
    ),
    (
        "pipeline-channels-stored-once",
        [
            (PIPELINE, "i = lid; i < nPeers * 2; i += WARP_SIZE", "i = threadIdx.x; i < nPeers * 2; i += blockDim.x", None),
            (PIPELINE, "__syncwarp();", "__syncthreads();", None),
        ],
    ),
    # A vector access is one access for each element. Number and flag of 4 bytes become one of 8.
    (
        "packets-of-one-element",
        [
            (
                PACKET,
                "mscclpp::SwitchChannelDeviceHandle::multimemStore(*(mscclpp::f32x2*)(&pkt), multiPkt + i);",
                'asm volatile("multimem.st.relaxed.sys.global.b64 [%0], %1;" ::"l"(multiPkt + i), "l"(pkt.raw_));',
                None,
            ),
            (
                "include/mscclpp/packet_device.hpp",
                '"ld.volatile.global.v2.u32 {%0,%1}, [%2];"',
                '"{.reg .b64 a; ld.volatile.global.u64 a, [%2]; mov.b64 {%0,%1}, a;}"',
                None,
            ),
        ],
    ),
]


def main():
    source, folder = sys.argv[1:]
    # CMake writes the version, which no kernel reads.
    added = [(ALL + "kernels.cu", KERNELS), ("include/mscclpp/version.hpp", "")]
    steps.with_and_without(source, folder, REPAIRS, added, [CUT])


main()

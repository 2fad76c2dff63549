"""Writes the sources of each step of `mscclpp`: usage `mscclpp.py SOURCE FOLDER`.

SOURCE is a folder with `include` and `src` of MSCCL++. One file includes the kernels, and the
launchers keep one operation and one type of 28. Prints the steps in order.
"""

import sys

import steps

ALL = "src/ext/collectives/allreduce/"
# The order matters: the last file redefines a macro of the log.
KERNELS = "".join(
    f'#include "allreduce_{name}.cu"\n' for name in ["packet", "rsag", "rsag_pipeline", "fullmesh"]
)
CUT = (
    "one-operation-and-type",
    [
        (
            "src/ext/collectives/include/allreduce/common.hpp",
            "dispatchByDtype<SUM, Adapter>(dtype, accumDtype);",
            "Adapter<SUM, int, int>::call;",
            None,
        ),
        (
            "src/ext/collectives/include/allreduce/common.hpp",
            "if (op == MIN) return dispatchByDtype<MIN, Adapter>(dtype, accumDtype);",
            "",
            None,
        ),
    ],
)
PACKET = ALL + "allreduce_packet.cu"
RSAG = ALL + "allreduce_rsag.cu"
FULLMESH = ALL + "allreduce_fullmesh.cu"
PACKETS = "include/mscclpp/packet_device.hpp"
REPAIRS = [
    # A vector access is one access for each element. Flag and data of 4 bytes each become one of 8.
    (
        "packets-of-two-elements",
        [
            (
                PACKETS,
                '"st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};"',
                '"{.reg .b64 a, b; mov.b64 a, {%1,%2}; mov.b64 b, {%3,%4}; st.volatile.global.v2.u64 [%0], {a,b};}"',
                None,
            ),
            (
                PACKETS,
                '"ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"',
                '"{.reg .b64 a, b; ld.volatile.global.v2.u64 {a,b}, [%4]; mov.b64 {%0,%1}, a; mov.b64 {%2,%3}, b;}"',
                None,
            ),
        ],
    ),
    # `write` is an ordinary store, and the peer polls it as a packet.
    (
        "result-packets-stored-as-packets",
        [
            (
                PACKET,
                "channels[index].write(offset, packet);",
                "((mscclpp::LLPacket*)channels[index].dst_)[offset].write(data.x, data.y, flag);",
                None,
            )
        ],
    ),
    # Every warp stores all channels into the same shared memory.
    (
        "packet-channels-stored-once",
        [
            (PACKET, "i = lid; i < nPeers; i += WARP_SIZE", "i = threadIdx.x; i < nPeers; i += blockDim.x", None),
            (PACKET, "__syncwarp();\n  // step 1", "__syncthreads();\n  // step 1", None),
        ],
    ),
    (
        "fullmesh-channels-stored-once",
        [(FULLMESH, "i = lid; i < nPeer; i += WARP_SIZE", "i = threadIdx.x; i < nPeer; i += blockDim.x", None), (FULLMESH, "__syncwarp();", "__syncthreads();", None)],
    ),
    (
        "remainder-filled-up",
        [
            (
                RSAG,
                "i < remainder; i++) {\n        ((T*)&scratch4[offsetIdx])[i] = ((T*)&buff4[offsetIdx])[i];",
                "i < nelemsPerInt4; i++) {\n        ((T*)&scratch4[offsetIdx])[i] = i < remainder ? ((T*)&buff4[offsetIdx])[i] : T(0);",
                None,
            )
        ],
    ),
    # One unit of 16 bytes behind the end where the number of units is no multiple of the ranks.
    (
        "last-unit-in-bounds",
        [(RSAG, "lastInt4Index = nelems / nelemsPerInt4;", "lastInt4Index = (nelems - 1) / nelemsPerInt4;", None)],
    ),
]


def main():
    source, folder = sys.argv[1:]
    # CMake writes the version, which no kernel reads.
    added = [(ALL + "kernels.cu", KERNELS), ("include/mscclpp/version.hpp", "")]
    steps.with_and_without(source, folder, REPAIRS, added, [CUT])
    # Runs of other sources with 604 numbers in place of 602.
    steps.write(source, folder, "repaired-604", [CUT, *REPAIRS], added)
    others = [repair for repair in REPAIRS if repair[0] != "last-unit-in-bounds"]
    steps.write(source, folder, "without-last-unit-in-bounds-604", [CUT, *others], added)


main()

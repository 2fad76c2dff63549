"""Writes the sources of each step of `nccl-allreduce`: usage `nccl_allreduce.py SOURCE FOLDER`.

SOURCE is NCCL's repository. Prints the steps in order. The kernels find multicast addresses by NCCL's
own windows, with the layout of its headers. `peers.cu` has a kernel that fills `ncclDevComm` and the
windows as NCCL's host side does.
"""

import pathlib
import sys

import nccl_ep
import steps

WRAPPER = """#include "oneshot_mc_allreduce_kernel.cuh"
#include "twoshot_mc_simple_allreduce_kernel.cuh"
#include "twoshot_mc_poison_allreduce_kernel.cuh"
extern "C" {
__device__ ncclDevComm dev_comm;
__device__ ncclWindow_vidmem windows[3];
// Windows and resources lie behind each other, `pages` pages each, at `flat` of rank 0 and at
// `all`.
__global__ void make_comm(char* flat, char* all, int rank, int ranks, unsigned pages) {
    dev_comm.rank = dev_comm.lsaRank = rank;
    dev_comm.nRanks = dev_comm.lsaSize = ranks;
    dev_comm.lsaMultimem.mcBasePtr = all;
    for (int i = 0; i < 3; i++) {
        windows[i].lsaFlatBase = flat + size_t(i) * pages * 4096;
        windows[i].lsaRank = windows[i].worldRank = rank;
        windows[i].stride4G = 1;
        windows[i].mcOffset4K = i * pages;
    }
    dev_comm.resourceWindow_inlined.lsaFlatBase = flat + size_t(3) * pages * 4096;
    dev_comm.resourceWindow_inlined.stride4G = 1;
    dev_comm.resourceWindow_inlined.mcOffset4K = 3 * pages;
    dev_comm.lsaBarrier.nBarriers = 8;
}
}
"""
FOLDER = "contrib/custom_algos/allreduce/"
SIMPLE = FOLDER + "twoshot_mc_simple_allreduce_kernel.cuh"
BARRIER = "devComm.lsaBarrier, (uint32_t)blockIdx.x"


def main():
    source, folder = pathlib.Path(sys.argv[1]), sys.argv[2]
    added = [(FOLDER + "peers.cu", WRAPPER), ("src/include/nccl.h", nccl_ep.nccl_h(source))]
    # NCCL's barrier has a variant over multicast addresses, which its symmetric kernels use.
    multimem = ("multimem", [(SIMPLE, BARRIER, BARRIER + ", true, devComm.lsaMultimem", None)])
    relaxed = ("relaxed", [(SIMPLE, "cuda::memory_order_release", "cuda::memory_order_relaxed", None)])
    steps.write(source, folder, "as-shipped", [], added)
    steps.write(source, folder, "multimem-barrier", [multimem], added)
    steps.write(source, folder, "multimem-barrier-relaxed", [multimem, relaxed], added)
    # The kernel without a barrier behind its stores, in a run of its own.
    steps.write(source, folder, "poison", [], added)


if __name__ == "__main__":
    main()

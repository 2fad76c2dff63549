"""The operations of benches/groups.rs with PyTorch's Gloo: 8 processes of one host. Prints one line."""

import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 8


def measure(rounds, operation):
    for _ in range(rounds // 10 + 1):
        operation()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(rounds):
        operation()
    return (time.perf_counter() - start) / rounds


def rank_main(rank, store):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    small = torch.full((1024,), 7, dtype=torch.uint8)
    gathered = [torch.empty_like(small) for _ in range(RANKS)]
    large = torch.ones(1 << 18)
    times = [
        measure(2000, dist.barrier),
        measure(1000, lambda: dist.all_gather(gathered, small)),
        measure(50, lambda: dist.all_reduce(large.fill_(1.0))),
    ]
    if rank == 0:
        names = ["barrier", "all_gather of 1 KiB", "all_reduce of 1 MiB"]
        text = ", ".join(f"{name} {seconds * 1e6:.1f}µs" for name, seconds in zip(names, times))
        print(f"gloo, PyTorch {torch.__version__}, {RANKS} ranks: {text}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(os.path.join(folder, "store"),), nprocs=RANKS)

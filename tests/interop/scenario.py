"""One rank's part in the scenario of scenario.rs, on PyTorch's store."""

import sys
from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(seconds=60)


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def equal(have, expected, what):
    check(have == expected, f"{what}: {have!r}, expected {expected!r}")


def play(store, rank, size):
    def barrier(name):
        store.barrier(f"barrier/{name}", size, PATIENCE)

    neighbour = (rank + 1) % size

    # Values: text, bytes, nothing, much.
    store.set(f"k/{rank}", f"value {rank}")
    store.wait([f"k/{peer}" for peer in range(size)], PATIENCE)
    equal(
        store.multi_get([f"k/{peer}" for peer in range(size)]),
        [f"value {peer}".encode() for peer in range(size)],
        "multi_get",
    )
    store.multi_set([f"bytes/{rank}", f"empty/{rank}"], [b"\x00\xff\x80", b""])
    store.set(f"large/{rank}", chr(97 + rank) * (4 << 20))
    equal(store.get(f"large/{neighbour}"), bytes([97 + neighbour]) * (4 << 20), "large")
    barrier("values")
    equal(store.get(f"bytes/{neighbour}"), b"\x00\xff\x80", "bytes")
    equal(store.get(f"empty/{neighbour}"), b"", "empty")

    # Counters.
    store.add("sum", rank + 1)
    barrier("sum")
    equal(store.get("sum"), str(size * (size + 1) // 2).encode(), "sum")
    equal(store.add("sum", 0), size * (size + 1) // 2, "add 0")

    # Compare and set, append.
    leader = store.compare_set("leader", "", f"rank {rank}")
    equal(store.get("leader"), leader, "leader")
    equal(store.compare_set(f"none/{rank}", "x", "y"), b"x", "compare_set of a missing key")
    check(not store.check([f"none/{rank}"]), "compare_set must not have set it")
    equal(store.compare_set(f"k/{rank}", f"value {rank}", "new"), b"new", "compare_set")
    store.append("log", f"<{rank}>")
    barrier("log")
    log = store.get("log").decode()
    check(all(f"<{peer}>" in log for peer in range(size)) and len(log) == 3 * size, log)

    # Queues: to the neighbour, in order; one common, every entry to somebody.
    for index in range(3):
        store.queue_push(f"q/{neighbour}", f"{rank}:{index}")
    previous = (rank - 1) % size
    for index in range(3):
        equal(store.queue_pop(f"q/{rank}", True), f"{previous}:{index}".encode(), "queue_pop")
    equal(store.queue_len(f"q/{rank}"), 0, "queue_len")
    try:
        value = store.queue_pop(f"q/{rank}", False)
    except dist.QueueEmptyError:
        pass
    else:
        raise AssertionError(f"an empty queue gave {value!r}")

    # What is there.
    check(store.check([f"k/{rank}", "sum"]), "check")
    check(not store.check([f"k/{rank}", "never"]), "check of a missing key")
    check(store.delete_key(f"k/{rank}"), "delete")
    check(not store.delete_key(f"k/{rank}"), "delete twice")
    barrier("deleted")
    if rank == 0:
        keys = store.list_keys()
        check("sum" in keys and "k/0" not in keys, keys)
        # The count of arrivals is one more.
        equal(store.num_keys(), len(keys) + 1, "num_keys")
        store.set("counted", "")
    store.wait(["counted"], PATIENCE)

    # Waits in vain; the store is usable afterwards.
    try:
        store.wait(["sum", "never"], timedelta(milliseconds=200))
    except dist.DistStoreError:
        pass
    else:
        raise AssertionError("a wait for a missing key returned")
    equal(store.get("counted"), b"", "get after a wait in vain")
    barrier("end")


def gloo(store, rank, size):
    """A process group of PyTorch's over the store."""
    import torch

    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=size)
    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor)
    equal(tensor.item(), size * (size + 1) // 2, "all_reduce")
    dist.barrier()
    dist.destroy_process_group()


def main():
    role, host, port, rank, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    # With the world size the client counts itself in, and a server waits for all.
    server = role == "server"
    store = dist.TCPStore(host, port, size, server, PATIENCE, wait_for_workers=False)
    if server:
        check(store.libuvBackend, "not the libuv server")
        print(f"port {store.port}", flush=True)
    store.add("here", 1)
    if role == "gloo":
        gloo(store, rank, size)
    else:
        play(store, rank, size)
    if server:
        # The others leave first.
        sys.stdin.read()
    print(f"rank {rank} is done", flush=True)


if __name__ == "__main__":
    main()

"""Writes the sources of each step of `deepep`: usage `deepep.py SOURCE FOLDER`.

SOURCE is `csrc/kernels/intranode.cu` of DeepEP V1. Steps replace within lines, so the numbers of all
lines stay. Prints the steps in order.
"""

import pathlib
import sys

# Each step repairs one place, and keeps the repairs in front of it.
STEPS = [
    ("as-shipped", None, None),
    (
        "fence-before-the-bulk-load",
        "tma_load_1d(tma_buffer, shifted_buffer_x_int4 + i * half_hidden_int4,",
        'asm volatile("fence.proxy.async;"); tma_load_1d(tma_buffer, shifted_buffer_x_int4 + i * half_hidden_int4,',
    ),
    # The project's own switch, `DISABLE_AGGRESSIVE_PTX_INSTRS`, for this file.
    ("no-read-only-loads", "", "#define DISABLE_AGGRESSIVE_PTX_INSTRS\n#line 1\n"),
    (
        "heads-release",
        "st_relaxed_sys_global(channel_head_idx.buffer(), cached_channel_head_idx);",
        "st_release_sys_global(channel_head_idx.buffer(), cached_channel_head_idx);",
    ),
    (
        "senders-acquire-heads",
        "cached_channel_tail_idx - ld_volatile_global(channel_head_idx.buffer());",
        "cached_channel_tail_idx - ld_acquire_sys_global(channel_head_idx.buffer());",
    ),
    (
        "block-waits-for-its-last-store",
        "num_tokens_to_recv -= num_recv_tokens;",
        "num_tokens_to_recv -= num_recv_tokens; tma_store_wait<0>();",
    ),
]


def main():
    source, folder = map(pathlib.Path, sys.argv[1:])
    text = source.read_text()
    for name, old, new in STEPS:
        if old == "":
            text = new + text
        elif old:
            assert old in text, f"{source} has no {old!r}: another version?"
            # Dispatch comes before combine, which has some of the same lines.
            text = text.replace(old, new, 1)
        to = folder / name
        to.mkdir(parents=True, exist_ok=True)
        (to / source.name).write_text(text)
        print(name)


main()

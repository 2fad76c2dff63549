"""Writes the sources of each step of `one-sided`: usage `one_sided.py SOURCE FOLDER`.

SOURCE is `moeAlltoAllKernels.cu`. Its launchers instantiate every kernel for 11 numbers of choices,
4 types, 4 quantisations and 3 layouts, which is 56 MB of PTX. The copies keep one case of each
switch. Kernels stay as they are, and so do the numbers of all lines. Prints the steps in order.
"""

import pathlib
import re
import sys

KEPT = {
    "SWITCH_TOP_K": "4",
    "SWITCH_DTYPE": "nvinfer1::DataType::kBF16",
    "SWITCH_QUANT_MODE": "MoeA2ACombineQuantMode::NONE",
    "SWITCH_SWIZZLE_MODE": "MoeA2ACombineSwizzleSFMode::LINEAR",
}

# Each step repairs one place, and keeps the repairs in front of it.
STEPS = [
    ("as-shipped", None, None),
    # Removes the first report, so that later ones are found.
    ("counters-read-as-volatile", "= ptrs.send_counters[", "= *(int volatile const*)&ptrs.send_counters["),
    # In the source as a comment.
    ("dispatch-acquires", '// asm volatile("fence.acquire.sys;");', 'asm volatile("fence.acquire.sys;");'),
    (
        "blocks-fence-at-their-counter",
        "int cnt = atomicAdd(ptrs.local_token_counter, 1);",
        "__threadfence(); int cnt = atomicAdd(ptrs.local_token_counter, 1); __threadfence();",
    ),
    (
        "last-warp-synchronizes",
        "is_last_token = __shfl_sync(0xffffffff, is_last_token, 0);",
        "__syncwarp(); is_last_token = __shfl_sync(0xffffffff, is_last_token, 0);",
    ),
    # In the source as a comment.
    ("combine-releases", '// asm volatile("fence.release.sys;");', 'asm volatile("fence.release.sys;");'),
]


def cut(text, macro, case):
    begin = text.index(f"#define {macro}(")
    end = text.index("default: {", begin)
    head, *cases = re.split(r"(?=    case )", text[begin:end])
    # An empty line of a macro.
    gone = [part if part.startswith(f"    case {case}:") else "\\\n" * part.count("\n") for part in cases]
    return text[:begin] + head + "".join(gone) + text[end:]


def main():
    source, folder = map(pathlib.Path, sys.argv[1:])
    text = source.read_text()
    for macro, case in KEPT.items():
        text = cut(text, macro, case)
    for name, old, new in STEPS:
        if old:
            count = text.count(old)
            assert count == 1, f"{source} has {count} times {old!r}: another version?"
            text = text.replace(old, new)
        to = folder / name
        to.mkdir(parents=True, exist_ok=True)
        (to / source.name).write_text(text)
        print(name)


main()

"""Kernels for Triton, and their compilation to PTX for sm_90 without a GPU.

Usage: kernels.py FOLDER
"""

import os
import pathlib
import sys

# Line information would carry the path of this file into the PTX.
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def t_vector_add(a, b, c, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(c + i, tl.load(a + i, mask=i < n) + tl.load(b + i, mask=i < n), mask=i < n)


@triton.jit
def t_softmax(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + i, mask=i < columns, other=-float("inf"))
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(y + row * columns + i, e / tl.sum(e, axis=0), mask=i < columns)


@triton.jit
def t_layer_norm(x, weight, bias, y, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + i, mask=i < columns, other=0.0)
    mean = tl.sum(v, axis=0) / columns
    d = tl.where(i < columns, v - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(d * d, axis=0) / columns + eps)
    w = tl.load(weight + i, mask=i < columns, other=0.0)
    b = tl.load(bias + i, mask=i < columns, other=0.0)
    tl.store(y + row * columns + i, d * scale * w + b, mask=i < columns)


@triton.jit
def t_matmul(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for k0 in range(0, k, K):
        at = k0 + inner
        x = tl.load(a + rows[:, None] * k + at[None, :], mask=(rows[:, None] < m) & (at[None, :] < k), other=0.0)
        y = tl.load(b + at[:, None] * n + columns[None, :], mask=(at[:, None] < k) & (columns[None, :] < n), other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    tl.store(c + rows[:, None] * n + columns[None, :], total, mask=(rows[:, None] < m) & (columns[None, :] < n))


@triton.jit
def t_column_sum(x, y, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.int32)
    for r in range(0, rows, ROWS):
        i = r + tl.arange(0, ROWS)
        total += tl.sum(tl.load(x + i[:, None] * columns + j[None, :], mask=i[:, None] < rows, other=0), axis=0)
    tl.store(y + j, total)


@triton.jit
def t_cumsum(x, y, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.cumsum(tl.load(x + i), axis=0))


@triton.jit
def t_histogram(x, y, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.histogram(tl.load(x + i, mask=i < n, other=0), BINS, mask=i < n)
    tl.atomic_add(y + tl.arange(0, BINS), h)


@triton.jit
def t_argmax(x, value, index, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v, at = tl.max(tl.load(x + row * columns + i, mask=i < columns, other=-(2**31)), axis=0, return_indices=True)
    tl.store(value + row, v)
    tl.store(index + row, at)


@triton.jit
def t_gather(table, index, y, width, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    at = tl.load(index + i)
    j = tl.arange(0, BLOCK)
    tl.store(y + i * width + j, tl.load(table + at * width + j, mask=j < width), mask=j < width)


@triton.jit
def t_sort(x, y, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.sort(tl.load(x + i)))


@triton.jit
def t_transpose_half(x, y, m, n, M: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * M + tl.arange(0, M)
    j = tl.program_id(1) * N + tl.arange(0, N)
    v = tl.load(x + i[:, None] * n + j[None, :], mask=(i[:, None] < m) & (j[None, :] < n))
    tl.store(y + j[:, None] * m + i[None, :], tl.trans(v * 2), mask=(j[:, None] < n) & (i[None, :] < m))


@triton.jit
def t_philox(y, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.randint(seed, i))


@triton.jit
def t_dot(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TYPE: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    total = tl.zeros((M, N), dtype=TYPE)
    for k0 in range(0, k, K):
        at = k0 + inner
        x = tl.load(a + rows[:, None] * k + at[None, :], mask=(rows[:, None] < m) & (at[None, :] < k), other=0)
        y = tl.load(b + at[:, None] * n + columns[None, :], mask=(at[:, None] < k) & (columns[None, :] < n), other=0)
        total = tl.dot(x, y, total)
    tl.store(c + rows[:, None] * n + columns[None, :], total, mask=(rows[:, None] < m) & (columns[None, :] < n))


@triton.jit
def t_wgmma_chain(a, b, c, d, blocks, M: tl.constexpr, K: tl.constexpr):
    # The sum of (a b) c over blocks of b and c: the product of a product, as in attention.
    rows = tl.arange(0, M)
    inner = tl.arange(0, K)
    x = tl.load(a + rows[:, None] * K + inner[None, :])
    total = tl.zeros((M, K), dtype=tl.float32)
    for block in range(0, blocks):
        y = tl.load(b + block * K * M + inner[:, None] * M + rows[None, :])
        z = tl.load(c + block * M * K + rows[:, None] * K + inner[None, :])
        first = tl.dot(x, y).to(tl.bfloat16)
        total = tl.dot(first, z, total)
    tl.store(d + rows[:, None] * K + inner[None, :], total)


@triton.jit
def t_tensor_maps(a, b, c, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0) * M
    column = tl.program_id(1) * N
    total = tl.zeros((M, N), dtype=tl.float32)
    for k0 in range(0, k, K):
        total = tl.dot(a.load([row, k0]), b.load([k0, column]), total)
    c.store([row, column], total)


F, I, H, B = "*fp32", "*i32", "*fp16", "*bf16"
KERNELS = [
    (t_vector_add, {"a": F, "b": F, "c": F, "n": "i32"}, {"BLOCK": 1024}),
    (t_softmax, {"x": F, "y": F, "columns": "i32"}, {"BLOCK": 1024}),
    (t_layer_norm, {"x": F, "weight": F, "bias": F, "y": F, "columns": "i32", "eps": "fp32"}, {"BLOCK": 512}),
    (t_matmul, {"a": F, "b": F, "c": F, "m": "i32", "n": "i32", "k": "i32"}, {"M": 32, "N": 32, "K": 16}),
    (t_column_sum, {"x": I, "y": I, "rows": "i32", "columns": "i32"}, {"ROWS": 32, "COLUMNS": 64}),
    (t_cumsum, {"x": I, "y": I}, {"BLOCK": 1024}),
    (t_histogram, {"x": I, "y": I, "n": "i32"}, {"BLOCK": 512, "BINS": 64}),
    (t_argmax, {"x": I, "value": I, "index": I, "columns": "i32"}, {"BLOCK": 512}),
    (t_gather, {"table": F, "index": I, "y": F, "width": "i32"}, {"BLOCK": 128}),
    (t_sort, {"x": I, "y": I}, {"BLOCK": 256}),
    (t_transpose_half, {"x": H, "y": H, "m": "i32", "n": "i32"}, {"M": 32, "N": 64}),
    (t_philox, {"y": I, "seed": "i32"}, {"BLOCK": 256}),
    (
        t_tensor_maps,
        {"a": "tensordesc<bf16[64,32]>", "b": "tensordesc<bf16[32,64]>", "c": "tensordesc<fp32[64,64]>", "k": "i32"},
        {"M": 64, "N": 64, "K": 32},
    ),
    (t_wgmma_chain, {"a": B, "b": B, "c": B, "d": F, "blocks": "i32"}, {"M": 64, "K": 32}),
]

folder = pathlib.Path(sys.argv[1])
for function, types, constants in KERNELS:
    signature = types | {name: "constexpr" for name in constants}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True})
    name = function.__name__
    (folder / f"{name}.ptx").write_text(f"// Triton {triton.__version__}\n{compiled.asm['ptx']}")

# Products on the tensor cores of sm_80, which sm_90 has as well: mma.sync. And on those of sm_90: wgmma.
SIZES = {"m": "i32", "n": "i32", "k": "i32"}
for kind, pointer, total in [
    ("bf16", "*bf16", tl.float32),
    ("f16", "*fp16", tl.float32),
    ("tf32", "*fp32", tl.float32),
    ("s8", "*i8", tl.int32),
]:
    for capability, name, rows in [(80, "t_dot", 32), (90, "t_wgmma", 64)]:
        constants = {"M": rows, "N": 64, "K": 32, "TYPE": total}
        types = {"a": pointer, "b": pointer, "c": "*i32" if kind == "s8" else "*fp32", **SIZES}
        signature = types | {name: "constexpr" for name in constants}
        source = ASTSource(fn=t_dot, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        assert compiled.metadata.shared <= 48 << 10, "the tests give 48 KiB"
        (folder / f"{name}_{kind}.ptx").write_text(f"// Triton {triton.__version__}\n{compiled.asm['ptx']}")

"""Runs kernels of other projects that use tensor cores, and compares each with numpy.

Usage: tensor_cores.py LIBCUDA WORK LIST, which wheels.py describes.

Kernels of Triton are compiled for sm_80 (`mma.sync`) and sm_90 (`wgmma`). Numbers are whole and small
where a kernel computes sums of products alone, so that results are exact.
"""

import ctypes
import re

import numpy as np

from wheels import TENSOR_CORES, WORK, Tensor, differing, jit_functions, main, softmax, triton_verdicts, verdict, whole


def flashinfer_products():
    """`C = alpha A B + beta C`, by blocks and by a persistent kernel."""
    module = jit_functions("flashinfer/flashinfer/triton/kernels/sm_constraint_gemm.py")
    m, n, k = 96, 112, 80
    sizes = dict(M=m, N=n, K=k, alpha=2.0, beta=1.0)
    strides = dict(stride_am=k, stride_ak=1, stride_bk=n, stride_bn=1, stride_cm=n, stride_cn=1)
    blocks = dict(BLOCK_SIZE_M=64, BLOCK_SIZE_N=64, BLOCK_SIZE_K=32, GROUP_SIZE_M=8)
    for kind, total in [("fp16", "fp16"), ("bf16", "fp32"), ("fp32", "fp32"), ("fp8e4nv", "fp16")]:
        for name in ["gemm_kernel", "gemm_kernel_persistent"]:
            a, b, c = whole((m, k), 1, 1), whole((k, n), 1, 2), whole((m, n), 3, 3)
            args = dict(a_ptr=Tensor(a, kind), b_ptr=Tensor(b, kind), c_ptr=Tensor(c, total), **sizes, **strides, **blocks)
            grid = (4, 1, 1)
            if "persistent" in name:
                args["NUM_SMS"], grid = 3, (3, 1, 1)
            want = {"c_ptr": (2 * (a @ b) + c, 0)}
            archs = [90] if kind == "fp8e4nv" else [80, 90]
            yield f"flashinfer.{name}.{kind}", archs, (getattr(module, name), grid, args, want, 4, 3)
    a, b, c = whole((64, 64), 1, 1), whole((64, 64), 1, 2), whole((64, 64), 3, 3)
    args = dict(a_ptr=Tensor(a, "fp16"), b_ptr=Tensor(b, "fp16"), c_ptr=Tensor(c, "fp16"), NUM_SMS=1)
    args |= dict(M=64, N=64, K=64, alpha=1.0, beta=0.0, EPILOGUE_SUBTILE=False) | blocks
    want = {"c_ptr": (a @ b.T, 0)}
    kernel = module.gemm_kernel_descriptor_persistent
    yield "flashinfer.gemm_kernel_descriptor_persistent.fp16", [90], (kernel, (1, 1, 1), args, want, 4, 3)


def fla_kernels():
    """Chunks of linear attention: products, states, and inverses of triangular matrices."""
    op = "fla/fla/ops/utils/op.py"
    both = [80, 90]
    matmul = jit_functions(op, "fla/fla/ops/utils/matmul.py").matmul_kernel
    m, n, k = 80, 96, 64
    for kind in ["fp16", "bf16"]:
        a, b, bias = whole((2, m, k), 1, 1), whole((k, n), 1, 2), whole(n, 3, 3)
        args = dict(a=Tensor(a, kind), b=Tensor(b, kind), c=Tensor(np.zeros((2, m, n)), "fp32"))
        args |= dict(input=Tensor(bias, kind), alpha=Tensor([3.0], "fp32"), M=m, N=n, K=k)
        args |= dict(stride_ab=m * k, stride_am=k, stride_ak=1, stride_bk=n, stride_bn=1)
        args |= dict(stride_cb=m * n, stride_cm=n, stride_cn=1, BM=64, BK=32, BN=64, G=4, ACTIVATION=None)
        args |= dict(HAS_INPUT=True, HAS_ALPHA=True, HAS_BETA=False, ALLOW_TF32=True)
        want = {"c": (3 * (a @ b) + bias, 0)}
        yield f"fla.matmul_kernel.{kind}", both, (matmul, (2, 2, 2), args, want, 4, 3)

    # One sequence of two chunks, with two heads; [time, head, number].
    t, h, d, chunk = 128, 2, 64, 64
    constants = dict(T=t, H=h, HV=h, K=d, V=d, BT=chunk, BK=64, BV=64, USE_G=False, IS_VARLEN=False)
    q, k, v = whole((t, h, d), 1, 1), whole((t, h, d), 1, 2), whole((t, h, d), 1, 3)
    beta = whole((t, h), 2, 4)
    lower = np.tril(np.ones((chunk, chunk)))
    chunks = [slice(0, 64), slice(64, 128)]

    def by_head(f):
        """`f` of each chunk and head, as [time, head, number]."""
        return np.concatenate([np.stack([f(c, i) for i in range(h)], 1) for c in chunks])

    kkt = jit_functions(op, "fla/fla/ops/common/chunk_scaled_dot_kkt.py").chunk_scaled_dot_kkt_fwd_kernel
    strict = lower - np.eye(chunk)
    want = by_head(lambda c, i: beta[c, i, None] * (k[c, i] @ k[c, i].T) * strict)
    args = dict(k=Tensor(k, "bf16"), beta=Tensor(beta, "fp32"), A=Tensor(np.zeros((t, h, chunk)), "fp32"))
    yield "fla.chunk_scaled_dot_kkt_fwd_kernel", both, (kkt, (2, h, 1), args | constants, {"A": (want, 0)}, 4, 3)

    states = [np.stack([np.zeros((d, d))] * h), np.stack([k[chunks[0], i].T @ v[chunks[0], i] for i in range(h)])]
    out = jit_functions(op, "fla/fla/ops/common/chunk_o.py").chunk_fwd_kernel_o

    def attended(c, i):
        state = states[c.start // 64][i]
        return q[c, i] @ state + (q[c, i] @ k[c, i].T * lower) @ v[c, i]

    args = dict(q=Tensor(q, "bf16"), k=Tensor(k, "bf16"), v=Tensor(v, "bf16"), h=Tensor(np.stack(states), "bf16"))
    args |= dict(o=Tensor(np.zeros((t, h, d)), "fp32"), scale=1.0, USE_G_GAMMA=False, STATE_V_FIRST=False)
    yield "fla.chunk_fwd_kernel_o", both, (out, (2, h, 1), args | constants, {"o": (by_head(attended), 0)}, 4, 3)

    state = jit_functions(op, "fla/fla/ops/common/chunk_h.py").chunk_fwd_kernel_h
    last = np.stack([k[:, i].T @ v[:, i] for i in range(h)])
    args = dict(k=Tensor(k, "fp16"), v=Tensor(v, "fp16"), h=Tensor(np.zeros((2, h, d, d)), "fp32"))
    args |= dict(ht=Tensor(np.zeros((h, d, d)), "fp32"), BS=chunk, USE_G_GAMMA=False, USE_GK=False, USE_GV=False)
    args |= dict(USE_INITIAL_STATE=False, STORE_FINAL_STATE=True, STATE_V_FIRST=False)
    want = {"h": (np.stack(states), 0), "ht": (last, 0)}
    yield "fla.chunk_fwd_kernel_h", both, (state, (h, 1, 1), args | constants, want, 4, 3)

    w_u = jit_functions(op, "fla/fla/ops/gated_delta_rule/wy_fast.py").recompute_w_u_fwd_kernel
    a = whole((t, h, chunk), 1, 5)
    args = dict(k=Tensor(k, "bf16"), v=Tensor(v, "bf16"), beta=Tensor(beta, "fp32"), A=Tensor(a, "bf16"))
    args |= dict(w=Tensor(np.zeros((t, h, d)), "fp32"), u=Tensor(np.zeros((t, h, d)), "fp32"))
    want = {
        name: (by_head(lambda c, i, x=x: a[c, i] @ (beta[c, i, None] * x[c, i])), 0) for name, x in [("w", k), ("u", v)]
    }
    yield "fla.recompute_w_u_fwd_kernel", both, (w_u, (2, h, 1), args | constants, want, 4, 3)

    solve = jit_functions(op, "fla/fla/ops/utils/solve_tril.py")
    for name, size in [("merge_16x16_to_32x32_inverse_kernel", 32), ("merge_16x16_to_64x64_inverse_kernel", 64)]:
        # Few numbers, so that those of the inverse are whole and small.
        few = np.random.default_rng(6).random((t, h, size)) < 0.06
        given = np.concatenate([np.tril(few[at : at + size].transpose(1, 0, 2), -1).transpose(1, 0, 2) for at in range(0, t, size)])
        want = np.concatenate([
            np.stack([np.linalg.inv(given[at : at + size, i] + np.eye(size)) for i in range(h)], 1)
            for at in range(0, t, size)
        ])
        args = dict(A=Tensor(given, "fp32"), Ai=Tensor(np.zeros((t, h, size)), "fp32"), T=t, H=h, BT=size)
        args |= dict(USE_TMA=False, IS_VARLEN=False, DOT_PRECISION="tf32")
        yield f"fla.{name}", both, (getattr(solve, name), (t // size, h, 1), args, {"Ai": (want.round(), 1e-6)}, 4, 3)

    attention = jit_functions(op, "fla/fla/ops/attn/parallel.py").parallel_attn_fwd_kernel
    q, k, v = (np.random.default_rng(seed).normal(size=(t, h, d)) for seed in (7, 8, 9))
    tensors = {name: Tensor(x, "bf16") for name, x in [("q", q), ("k", k), ("v", v)]}
    x = {name: tensor.numbers() for name, tensor in tensors.items()}
    args = tensors | dict(o=Tensor(np.zeros((t, h, d)), "fp32"), lse=Tensor(np.zeros((t, h)), "fp32"), scale=0.125)
    args |= dict(T=t, B=1, H=h, HQ=h, G=1, K=d, V=d, BT=64, BS=32, BK=64, BV=64)
    args |= dict(USE_G=False, USE_SINK_BIAS=False, USE_WINDOW=False, IS_VARLEN=False)
    causal = np.tril(np.ones((t, t))) > 0
    want = np.stack([softmax(np.where(causal, x["q"][:, i] @ x["k"][:, i].T / 8, -np.inf)) @ x["v"][:, i] for i in range(h)], 1)
    yield "fla.parallel_attn_fwd_kernel", both, (attention, (2, h, 1), args, {"o": (want, 2e-2)}, 4, 3)


def sage_attention():
    """Attention with queries and keys of 8 bits, and the logarithm of 2 in the scale."""
    h, t, d = 2, 128, 64
    rng = np.random.default_rng(10)
    q, k = (rng.integers(-127, 128, (h, t, d)).astype(np.float64) for _ in range(2))
    v = Tensor(rng.normal(size=(h, t, d)), "fp16")
    scale, unit = 0.0004, 2.5
    strides = {f"stride_{x}{y}": n for x in "qkvo" for y, n in [("z", h * t * d), ("h", t * d), ("n", d)]}
    for name, causal in [("attn_qk_int8_per_block", False), ("attn_qk_int8_per_block_causal", True)]:
        kernel = jit_functions(f"sageattention/sageattention/{name}.py")._attn_fwd
        args = dict(Q=Tensor(q, "i8"), K=Tensor(k, "i8"), V=v, Out=Tensor(np.zeros((h, t, d)), "fp16"))
        args |= dict(Q_scale=Tensor(np.full((h, 1), scale), "fp32"), K_scale=Tensor(np.full((h, 2), unit), "fp32"))
        args |= strides | dict(qo_len=t, kv_len=t, H=h, num_kv_groups=1, HEAD_DIM=d, BLOCK_M=128, BLOCK_N=64)
        args["STAGE"] = 3 if causal else 1
        mask = np.tril(np.ones((t, t))) > 0 if causal else np.ones((t, t)) > 0
        products = q @ k.transpose(0, 2, 1) * scale * unit * np.log(2)
        want = np.stack([softmax(np.where(mask, x, -np.inf)) @ y for x, y in zip(products, v.numbers())])
        yield f"sageattention.{name}", [80, 90], (kernel, (1, h, 1), args, {"Out": (want, 2e-2)}, 4, 3)


def sparse(shape, chunk, seed):
    """A matrix with half of its elements, those elements, and the metadata of each chunk of a row."""
    m, k = shape
    rng = np.random.default_rng(seed)
    dense, stored, metadata = np.zeros(shape), [], np.zeros((m, k // chunk), np.uint32)
    # A chunk of two elements counts as four halves of one.
    pairs = [(0, 1), (2, 3)] if chunk == 2 else [(i, j) for i in range(4) for j in range(i + 1, 4)]
    for row in range(m):
        for at in range(k // chunk):
            first, second = pairs[rng.integers(len(pairs))]
            metadata[row, at] = first | second << 2
            for element in [first // 2] if chunk == 2 else [first, second]:
                dense[row, at * chunk + element] = rng.integers(-2, 3)
                stored.append(dense[row, at * chunk + element])
    return dense, np.reshape(stored, (m, k // 2)), metadata


def in_order_of_cutlass(metadata, bits):
    """The words of metadata where CUTLASS's kernels for sm_80 load them: its `reorder_meta`, and then
    pairs of columns, row by row."""
    each = bits // 4
    words = sum(metadata[:, i::each] << (4 * i) for i in range(each))
    rows, columns = words.shape
    group, weave = (32, 4) if bits == 16 else (16, 2)
    to = np.zeros_like(words)
    for m in range(rows):
        row = m // group * group + m % 8 * weave + m % group // 8
        for k in range(columns):
            # Blocks of two by two: the row's parity and the column's trade places.
            to[row // 2 * 2 + k % 2, k // 2 * 2 + row % 2] = words[m, k]
    return np.ascontiguousarray(to.reshape(rows, columns // 2, 2).transpose(1, 0, 2)).astype(f"u{bits // 8}")


def cutlass_sparse(gpu, module, name):
    """Runs a product with a sparse A of cutlass_gemm.cu. Returns what is wrong."""
    threads, shared, tile_m, tile_n = gpu.ints(module, f"{name}_launch", 4)
    kind, total = {"sparse_f16": ("fp16", "fp32"), "sparse_tf32": ("fp32", "fp32"), "sparse_s8": ("i8", "i32")}[name]
    # Rows behind the end of the matrix have metadata of zeros.
    m, n, k = 96, 160, 256
    dense, stored, metadata = sparse((m, k), 2 if kind == "fp32" else 4, 1)
    b, c = whole((k, n), 1, 2), whole((m, n), 3, 3)
    d = Tensor(np.zeros((m, n)), total)
    given = [Tensor(stored, kind), Tensor(b.T, kind), Tensor(c, total), d]
    arrays = [tensor.array for tensor in given] + [in_order_of_cutlass(metadata, 32 if kind == "i8" else 16)]
    grid = (-(-m // tile_m), -(-n // tile_n), 1)
    gpu.run(module, name, grid, threads, shared, arrays + [ctypes.c_int(x) for x in (m, n, k)])
    return differing("D", d.numbers(), 2 * (dense @ b) + c, 0)


def cutlass(gpu, module, name):
    """Runs a product of cutlass_gemm.cu. Returns what is wrong."""
    if name.startswith("sparse"):
        return cutlass_sparse(gpu, module, name)
    threads, shared, tile_m, tile_n = gpu.ints(module, f"{name}_launch", 4)
    kind, layouts = name.split("_", 1)
    kind = {"f16": "fp16", "tf32": "fp32", "f64": "fp64", "s8": "i8", "u8": "i8", "s4": "i4"}.get(kind, kind)
    total = {"f16_wide": "fp16", "f16_sums_of_f16": "fp16", "bf16_column_row": "bf16"}.get(name, "fp32")
    total = "i32" if kind in ("i8", "i4") else "fp64" if kind == "fp64" else total
    columns = {"row_row": (False, False), "column_row": (True, False), "column_column": (True, True)}
    columns_a, columns_b = columns.get(layouts, (False, True))
    m, n, k = 96, 160, 96
    a, b, c = whole((m, k), 1, 1), whole((k, n), 1, 2), whole((m, n), 3, 3)
    if name.startswith("u8"):
        a, b = abs(a), abs(b)
    d = Tensor(np.zeros((m, n)), total)
    given = [Tensor(a.T if columns_a else a, kind), Tensor(b.T if columns_b else b, kind), Tensor(c, total), d]
    sizes = [ctypes.c_int(x) for x in (m, n, k)]
    grid = (-(-m // tile_m), -(-n // tile_n), 1)
    gpu.run(module, name, grid, threads, shared, [tensor.array for tensor in given] + sizes)
    return differing("D", d.numbers(), 2 * (a @ b) + c, 0)


def has_tensor_cores(ptx):
    assert TENSOR_CORES.search(ptx), "no tensor cores in it"


def verdicts(gpu):
    """The name and verdict of each kernel."""
    for cases in [flashinfer_products(), fla_kernels(), sage_attention()]:
        yield from triton_verdicts(gpu, cases, has_tensor_cores)
    ptx = (WORK / "cutlass.ptx").read_text()
    for name in re.findall(r"\.visible \.entry (\w+)\(", ptx):
        # A module for each kernel, since a fault ends the context of the one before.
        yield f"cutlass.{name}.sm_80", verdict(gpu, lambda: [cutlass(gpu, gpu.load(ptx), name)])


main(verdicts, "with tensor cores")

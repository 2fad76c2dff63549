"""Runs kernels of other projects without tensor cores, and compares each with numpy.

Usage: cuda_cores.py LIBCUDA WORK LIST, which wheels.py describes.

Results are exact where a kernel moves numbers, or adds and multiplies whole ones. The others have a
bound by `rounded`. Outputs hold 77 before the launch, and where no result belongs they must keep it.
"""

import numpy as np

from wheels import TENSOR_CORES, Tensor, jit_functions, main, softmax, triton_verdicts, whole

OP = "fla/fla/ops/utils/op.py"
# Half a unit in the last place, as a part of the number.
HALF_UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
# Half of the least positive number.
HALF_LEAST = {"bf16": 2.0**-134, "fp16": 2.0**-25, "fp32": 2.0**-150}


def rounded(want, kind, size):
    """A result with its bound: computed in f32 from numbers up to `size`, and stored in `kind`.

    A number passes at most 32 roundings of 2^-24 and eight approximations (`ex2`, `lg2`, `rsqrt`,
    `div.full`) of 2^-22, which sum up to 2^-18. Sums are trees, so their roundings grow with the
    logarithm of the length.
    """
    error = size * 2.0**-18
    return want, error + np.maximum((np.abs(want) + error) * HALF_UNIT[kind], HALF_LEAST[kind])


def normal(shape, kind, seed):
    return Tensor(np.random.default_rng(seed).normal(size=shape), kind)


def output(shape, kind="fp32"):
    return Tensor(np.full(shape, 77), kind)


def flashinfer_kernels():
    """Activations, norms, positions in pages, merged states of attention, sums and packed rows."""
    folder = "flashinfer/flashinfer/triton"
    kernels = f"{folder}/kernels"
    quant = f"{kernels}/quant.py"

    # Three rows of 300 numbers in blocks of 128, between scales.
    n, rows = 300, 3
    silu = jit_functions(quant, f"{kernels}/activation.py").silu_and_mul_kernel
    x = normal((rows, 2 * n), "bf16", 1)
    a, b = x.numbers()[:, :n] / 2, x.numbers()[:, n:] / 2
    want = 3 * a / (1 + np.exp(-a)) * b
    args = dict(o_ptr=output((rows, n), "bf16"), o_stride=n, o_scale_ptr=Tensor([3], "fp32"), x_ptr=x, x_stride=2 * n)
    args |= dict(x_scale_ptr=Tensor([0.5], "fp32"), d=n, BLOCK_SIZE=128, HAS_X_SCALE=True, HAS_O_SCALE=True)
    case = silu, (rows, 3, 1), args, {"o_ptr": rounded(want, "bf16", np.abs(want))}, 4, 3
    yield "flashinfer.silu_and_mul_kernel", [90], case

    norm = jit_functions(quant, f"{kernels}/norm.py").rms_norm_kernel
    x, r, w = normal((rows, n), "fp16", 2), normal((rows, n), "fp32", 3), normal(n, "bf16", 4)
    total = x.numbers() + r.numbers()
    want = total / np.sqrt((total**2).mean(1, keepdims=True) + 1e-6) * w.numbers()
    args = dict(n=n, b=rows, x_ptr=x, x_stride=n, r_ptr=r, r_stride=n, w_ptr=w, o_ptr=output((rows, n), "fp16"), o_stride=n)
    args |= dict(EPS=1e-6, BLOCK_SIZE=128, HAS_IN_SCALE=False, HAS_OUT_SCALE=False, HAS_OUTPUT=True, HAS_RESIDUAL=True)
    results = {"r_ptr": rounded(total, "fp32", 0), "o_ptr": rounded(want, "fp16", np.abs(want))}
    yield "flashinfer.rms_norm_kernel", [90], (norm, (rows, 1, 1), args, results, 4, 3)

    # Request i appends rows first[i] .. first[i + 1], which end at its length.
    positions = jit_functions(f"{folder}/page.py").get_batch_indices_positions_kernel
    first, lengths = np.array([0, 5, 5, 140, 300]), np.array([9, 4, 135, 1000])
    request = np.repeat(np.arange(4), np.diff(first))
    place = np.concatenate([np.arange(end - n, end) for n, end in zip(np.diff(first), lengths)])
    args = dict(append_indptr=Tensor(first, "i32"), seq_lens_ptr=Tensor(lengths, "i32"), num_stages=1)
    args |= dict(batch_indices_ptr=output(310, "i32"), positions_ptr=output(310, "i32"))
    results = {
        name: (np.concatenate([numbers, np.full(10, 77)]), 0)
        for name, numbers in [("batch_indices_ptr", request), ("positions_ptr", place)]
    }
    yield "flashinfer.get_batch_indices_positions_kernel", [90], (positions, (4, 1, 1), args, results, 4, 1)

    # States of attention with logarithms to base 2, merged in groups of two, three and one.
    merge = jit_functions(f"{kernels}/cascade.py").variable_length_merge_states_kernel
    first, heads, d = [0, 2, 5, 6], 2, 32
    v, s = normal((6, heads, d), "fp16", 5), normal((6, heads), "fp32", 6)
    groups = [slice(*pair) for pair in zip(first, first[1:])]
    weights = [2 ** s.numbers()[group] for group in groups]
    merged = np.stack([(w[:, :, None] * v.numbers()[g]).sum(0) / w.sum(0)[:, None] for g, w in zip(groups, weights)])
    args = dict(v_ptr=v, s_ptr=s, indptr=Tensor(first, "i32"), num_heads=heads, head_dim=d, bdx=d, bdy=heads)
    args |= dict(v_merged_ptr=output((3, heads, d)), s_merged_ptr=output((3, heads)))
    results = {
        "v_merged_ptr": rounded(merged, "fp32", np.abs(v.numbers()).max()),
        "s_merged_ptr": rounded(np.stack([np.log2(w.sum(0)) for w in weights]), "fp32", np.abs(s.numbers()).max()),
    }
    yield "flashinfer.variable_length_merge_states_kernel", [90], (merge, (3, 1, 1), args, results, 4, 3)

    # 100 steps of six heads in chunks of 64: the second is filled up with steps of length zero.
    cumsum = jit_functions(f"{kernels}/ssd_chunk_state.py")._chunk_cumsum_fwd_kernel
    batch, t, heads, chunk = 2, 100, 6, 64
    dt, bias, a = whole((batch, t, heads), 4, 7), whole(heads, 2, 8), whole(heads, 3, 9)
    steps = np.zeros((batch, heads, 2 * chunk))
    steps[:, :, :t] = np.clip(dt + bias, 0, 5).transpose(0, 2, 1)
    steps = steps.reshape(batch, heads, 2, chunk)
    args = dict(dt_ptr=Tensor(dt, "bf16"), A_ptr=Tensor(a, "fp32"), dt_bias_ptr=Tensor(bias, "fp32"))
    args |= dict(batch=batch, seqlen=t, nheads=heads, chunk_size=chunk, dt_min=0.0, dt_max=5.0)
    args |= dict(stride_dt_batch=t * heads, stride_dt_seqlen=heads, stride_dt_head=1, stride_A_head=1)
    args |= dict(stride_dt_bias_head=1, DT_SOFTPLUS=False, HAS_DT_BIAS=True, BLOCK_SIZE_H=4, BLOCK_SIZE_CHUNK=chunk)
    strides = dict(batch=heads * 2 * chunk, chunk=chunk, head=2 * chunk, csize=1)
    for name, prefix in [("dt_out_ptr", "stride_dt_out_"), ("dA_cumsum_ptr", "stride_dA_cs_")]:
        args |= {name: output(steps.shape)} | {prefix + key: stride for key, stride in strides.items()}
    results = {"dt_out_ptr": (steps, 0), "dA_cumsum_ptr": (np.cumsum(steps * a[:, None, None], 3), 0)}
    yield "flashinfer._chunk_cumsum_fwd_kernel", [90], (cumsum, (batch, 2, 2), args, results, 4, 3)

    # Two of three heads for each of two ranks, from [batch, sequence, head, number] and, of the
    # keys, [batch, head, sequence, number].
    pack = jit_functions(f"{folder}/ulysses.py")._pack_ulysses_qkv_head_chunk_kernel
    batch, t, ranks, local, chosen, first, d = 2, 5, 2, 3, 2, 1, 16
    q, k, v = (whole((batch, t, ranks * local, d), 100, seed) for seed in (10, 11, 12))
    rows = np.concatenate([q, k, v], 3).reshape(batch, t, ranks, local, 3 * d)
    want = rows[:, :, :, first : first + chosen].transpose(2, 0, 1, 3, 4)
    args = dict(output=output(want.shape, "fp16"), total=want.size // 3, batch=batch, seq_len=t, world_size=ranks)
    args |= dict(query=Tensor(q, "fp16"), key=Tensor(k.transpose(0, 2, 1, 3), "fp16"), value=Tensor(v, "fp16"))
    args |= dict(local_heads=local, chunk_heads=chosen, head_offset=first, head_dim=d, nccl_layout=True, BLOCK=256)
    row = ranks * local * d
    for name, strides in [("q", (t * row, row, d, 1)), ("k", (t * row, d, t * d, 1)), ("v", (t * row, row, d, 1))]:
        args |= {f"{name}_{axis}_stride": n for axis, n in zip(["batch", "seq", "head", "dim"], strides)}
    blocks = -(-want.size // 3 // 256)
    yield "flashinfer._pack_ulysses_qkv_head_chunk_kernel", [90], (pack, (blocks, 1, 1), args, {"output": (want, 0)}, 4, 3)


def fla_rows():
    """Softmax, norms and losses: reductions over rows."""
    ops, modules = "fla/fla/ops/utils", "fla/fla/modules"

    rows, n = 4, 300
    x = normal((rows, n), "fp32", 20)
    want = softmax(x.numbers())
    args = dict(x=x, p=output((rows, n)), D=n, B=512)
    case = jit_functions(OP, f"{ops}/softmax.py").softmax_fwd_kernel, (rows, 1, 1), args
    yield "fla.softmax_fwd_kernel", [90], (*case, {"p": rounded(want, "fp32", want)}, 4, 3)

    # Rows of two groups by turns, each with weights of its own.
    t, d, eps = 20, 96, 1e-5
    norm = jit_functions(OP, f"{modules}/norm/layernorm.py").layer_norm_fwd_kernel
    x, res, w, b = (normal(shape, "bf16", seed) for seed, shape in [(21, (t, d)), (22, (t, d)), (23, (2, d)), (24, (2, d))])
    total = x.numbers() + res.numbers()
    mean = total.mean(1)
    rstd = 1 / np.sqrt(total.var(1) + eps)
    w_rows, b_rows = np.tile(w.numbers(), (t // 2, 1)), np.tile(b.numbers(), (t // 2, 1))
    want = (total - mean[:, None]) * rstd[:, None] * w_rows + b_rows
    largest = np.abs(total).max()
    args = dict(x=x, y=output((t, d), "bf16"), w=w, b=b, res=res, res_out=output((t, d)), mean=output(t), rstd=output(t))
    args |= dict(eps=eps, T=t, G=2, D=d, BT=8, BD=128, NB=1, IS_RMS_NORM=False, HAS_RESIDUAL=True)
    args |= dict(STORE_RESIDUAL_OUT=True, HAS_WEIGHT=True, HAS_BIAS=True)
    size = largest * rstd[:, None] * np.abs(w_rows) + np.abs(b_rows)
    results = {"res_out": rounded(total, "fp32", 0), "mean": rounded(mean, "fp32", largest)}
    results |= {"rstd": rounded(rstd, "fp32", rstd), "y": rounded(want, "bf16", size)}
    yield "fla.layer_norm_fwd_kernel", [90], (norm, (3, 1, 1), args, results, 4, 3)

    # Logits under a cap, smoothed labels, the square of the normalizer, and a row that is ignored.
    rows, n, scale, cap, smooth, square = 6, 200, 0.5, 3.0, 0.1, 1e-3
    loss = jit_functions(OP, f"{modules}/fused_cross_entropy/ops.py").cross_entropy_fwd_kernel
    x = Tensor(np.random.default_rng(25).normal(size=(rows, n)) * 4, "bf16")
    target = np.array([0, 199, -100, 57, 128, 31])
    capped = cap * np.tanh(x.numbers() * scale / cap)
    lse = np.log(np.exp(capped).sum(1))
    z_loss = np.where(target < 0, 0, square * lse**2)
    label = (1 - smooth) * capped[np.arange(rows), target % n] + smooth * capped.mean(1)
    want = np.where(target < 0, 0, lse - label + z_loss)
    args = dict(logits=x, target=Tensor(target, "i64"), loss=output(rows), z_loss=output(rows), lse=output(rows))
    args |= dict(s_logits=n, label_smoothing=smooth, logit_scale=scale, lse_square_scale=square, logit_softcapping=cap)
    args |= dict(ignore_index=-100, N=rows, V=n, V_TOTAL=n, V_START=0, BV=256, SPLIT=False)
    # The square doubles the part by which lse is off.
    results = {"lse": rounded(lse, "fp32", cap + lse), "z_loss": rounded(z_loss, "fp32", 2 * z_loss * (cap / lse + 1))}
    results["loss"] = rounded(want, "fp32", 2 * (cap + lse))
    yield "fla.cross_entropy_fwd_kernel", [90], (loss, (rows, 1, 1), args, results, 4, 3)


def fla_sequences():
    """Scans, shifts, convolutions, rotations and triangular inverses: along time."""
    ops, modules = "fla/fla/ops/utils", "fla/fla/modules"

    # Two sequences of 70 and 30 steps in chunks of 64, summed from behind.
    h, s = 2, 40
    cumsum = jit_functions(OP, f"{ops}/cumsum.py").chunk_local_cumsum_vector_kernel
    x = whole((100, h, s), 3, 30)
    want = np.concatenate([np.cumsum(x[c][::-1], 0)[::-1] / 2 for c in [slice(0, 64), slice(64, 70), slice(70, 100)]])
    args = dict(s=Tensor(x, "fp16"), o=output((100, h, s)), scale=0.5, cu_seqlens=Tensor([0, 70, 100], "i64"))
    args |= dict(chunk_indices=Tensor([[0, 0], [0, 1], [1, 0]], "i64"), T=100, B=1, H=h, S=s, BT=64, BS=32)
    args |= dict(REVERSE=True, HAS_SCALE=True, IS_VARLEN=True)
    yield "fla.chunk_local_cumsum_vector_kernel", [90], (cumsum, (6, h, 1), args, {"o": (want, 0)}, 4, 3)

    # A product of f32 matrices, which Triton makes of `fma`.
    b, t, s = 2, 40, 32
    logcumsumexp = jit_functions(OP, f"{ops}/logcumsumexp.py").logcumsumexp_fwd_kernel
    x = normal((b, t, s), "fp32", 31)
    want = np.logaddexp.accumulate(x.numbers(), 1)
    args = dict(s=x, z=output((b, t, s)), T=t, S=s, BT=16)
    results = {"z": rounded(want, "fp32", np.abs(want).max())}
    yield "fla.logcumsumexp_fwd_kernel", [90], (logcumsumexp, (b, 1, 1), args, results, 4, 3)

    # k and g of gated slot attention, behind a running log-sum-exp z with an initial state.
    s = 24
    gate = jit_functions(OP, "fla/fla/ops/gsa/gate.py").fused_additive_gate_fwd_kernel
    x, state = normal((b, t, s), "fp32", 32), normal((b, s), "fp32", 33)
    z = np.logaddexp.accumulate(np.concatenate([state.numbers()[:, None], x.numbers()], 1), 1)
    args = dict(x=x, z=output((b, t, s)), k=output((b, t, s)), g=output((b, t, s)), initial_state=state)
    args |= dict(final_state=output((b, s)), T=t, S=s, BT=16, BS=32, IS_VARLEN=False, USE_INITIAL_STATE=True, STORE_Z=True)
    size = max(np.abs(x.numbers()).max(), np.abs(z).max())
    wanted = dict(z=z[:, 1:], k=np.exp(x.numbers() - z[:, 1:]), g=z[:, :-1] - z[:, 1:], final_state=z[:, -1])
    results = {name: rounded(want, "fp32", size) for name, want in wanted.items()}
    yield "fla.fused_additive_gate_fwd_kernel", [90], (gate, (b, 1, 1), args, results, 4, 3)

    # Pairs of neighbours, 48 of 64 numbers, in two sequences of which one starts at step 3.
    b, t, h, d, r, table = 2, 50, 3, 64, 24, 60
    rotary = jit_functions(OP, f"{modules}/rotary/ops.py").rotary_embedding_kernel
    x, start = normal((b, t, h, d), "bf16", 34), np.array([3, 0])
    angles = np.arange(table)[:, None] / 100.0 ** (np.arange(r) / r)
    cos, sin = Tensor(np.cos(angles), "fp32"), Tensor(np.sin(angles), "fp32")
    at = start[:, None] + np.arange(t)
    unit = (cos.numbers() + 1j * sin.numbers())[at][:, :, None]
    pairs = x.numbers()[..., : 2 * r]
    turned = (pairs[..., ::2] + 1j * pairs[..., 1::2]) * unit
    want = np.full((b, t, h, d), 77.0)
    want[..., : 2 * r : 2], want[..., 1 : 2 * r : 2] = turned.real, turned.imag
    args = dict(x=x, cos=cos, sin=sin, y=output((b, t, h, d)), seq_offsets=Tensor(start, "i64"), T=t, B=b, H=h, D=d, R=r)
    args |= dict(TR=table, BT=16, BD=64, IS_SEQLEN_OFFSETS_TENSOR=True, IS_VARLEN=False, INTERLEAVED=True, CONJUGATE=False)
    results = {"y": rounded(want, "fp32", np.where(want == 77, 0, 2 * np.abs(x.numbers()).max()))}
    yield "fla.rotary_embedding_kernel", [90], (rotary, (4, b, h), args, results, 4, 3)

    # Three sequences, of which one has a single step, behind the steps of a cache.
    d, first = 40, [0, 7, 8, 20]
    shift = jit_functions(OP, f"{modules}/token_shift.py").token_shift_fwd_kernel_short
    x, cache = whole((20, d), 100, 35), whole((3, d), 100, 36)
    before = np.concatenate([[cache[0]], x[0:6], [cache[1]], [cache[2]], x[8:19]])
    args = dict(x=Tensor(x, "fp16"), y=output((20, d), "fp16"), cu_seqlens=Tensor(first, "i64"), cache=Tensor(cache, "fp16"))
    args |= dict(cache_out=output((3, d), "fp16"), T=20, D=d, BD=64, IS_VARLEN=True, USE_INITIAL_STATE=True)
    args |= dict(STORE_FINAL_STATE=True, IS_DECODE=False)
    results = {"y": (before - x, 0), "cache_out": (x[[6, 7, 19]], 0)}
    yield "fla.token_shift_fwd_kernel_short", [90], (shift, (3, 12, 1), args, results, 2, 3)

    # Four steps of each channel, the first three of the initial state, and SiLU behind the bias.
    b, t, d, w = 2, 40, 48, 4
    conv = jit_functions(OP, f"{modules}/causal_conv1d/ops.py").causal_conv1d_fwd_kernel
    x, res, state = (normal(shape, "fp16", 37 + i) for i, shape in enumerate([(b, t, d), (b, t, d), (b, d, w)]))
    weight, bias = normal((d, w), "fp16", 40), normal(d, "fp16", 41)
    steps = np.concatenate([state.numbers().transpose(0, 2, 1), x.numbers()], 1)
    parts = [steps[:, i + 1 : i + 1 + t] * weight.numbers()[:, i] for i in range(w)]
    total = sum(parts) + bias.numbers()
    want = total / (1 + np.exp(-total)) + res.numbers()
    args = dict(x=x, y=output((b, t, d)), weight=weight, bias=bias, residual=res, initial_state=state, B=b, T=t)
    args |= dict(stride_x_n=t * d, stride_x_t=d, stride_x_d=1, D=d, W=w, BT=16, BW=4, BD=32, ACTIVATION="silu")
    args |= dict(HAS_WEIGHT=True, HAS_BIAS=True, HAS_RESIDUAL=True, USE_INITIAL_STATE=True, IS_VARLEN=False)
    # The slope of SiLU is at most 1.1.
    size = 1.1 * (sum(map(np.abs, parts)) + np.abs(bias.numbers())) + np.abs(res.numbers())
    yield "fla.causal_conv1d_fwd_kernel", [90], (conv, (2, 3, b), args, {"y": rounded(want, "fp32", size)}, 4, 3)

    # Blocks of 16 on the diagonal of chunks of 32 steps; the last block has eight rows. Few numbers
    # keep the inverse small and whole.
    t, h, chunk = 40, 2, 32
    solve = jit_functions(OP, f"{ops}/solve_tril.py").solve_tril_16x16_kernel
    given = (np.random.default_rng(42).random((t, h, chunk)) < 0.2).astype(float)
    want = np.zeros((t, h, 16))
    for at in range(0, t, 16):
        rows = min(16, t - at)
        for i in range(h):
            block = np.tril(given[at : at + rows, i, at % chunk : at % chunk + rows], -1)
            want[at : at + rows, i, :rows] = np.linalg.inv(block + np.eye(rows)).round()
    args = dict(A=Tensor(given, "fp32"), Ai=output((t, h, 16)), T=t, H=h, BT=chunk, USE_TMA=False, IS_VARLEN=False)
    args["DOT_PRECISION"] = "ieee"
    yield "fla.solve_tril_16x16_kernel", [90], (solve, (3, h, 1), args, {"Ai": (want, 0)}, 1, 3)


def fla_blocks():
    """A counting sort by atomics: which steps of a sequence have chosen each block of keys."""
    t, h, s, size, blocks = 60, 2, 4, 16, 4
    kernel = jit_functions(OP, "fla/fla/ops/utils/csr.py").prepare_block_csr_kernel
    rng = np.random.default_rng(50)
    chosen, counts = rng.integers(-1, blocks + 2, (t, h, s)), rng.integers(0, s + 1, (t, h))
    # A step chooses the first `counts` entries, without blocks that begin behind it or do not exist.
    lists = [[] for _ in range(h * blocks)]
    for step, head, entry in np.ndindex(t, h, s):
        block = chosen[step, head, entry]
        if entry < counts[step, head] and 0 <= block < blocks and block * size <= step:
            lists[head * blocks + block].append(step)
    lengths = [len(steps) for steps in lists]
    total = sum(lengths)
    offsets = np.cumsum([0, *lengths])
    args = dict(block_indices=Tensor(chosen, "i64"), block_counts=Tensor(counts, "i64"), N=0, T=t, H=h, S=s, BT=32)
    args |= dict(BS=size, TC=blocks, USE_BLOCK_COUNTS=True, IS_VARLEN=False, csr_indices=output(t * h * s, "i32"))
    zeros = np.zeros(h * blocks)

    def sorted_lists(got):
        """The list of each block in order, since the order of the atomics decides."""
        return np.concatenate([*(np.sort(part) for part in np.split(got[:total], offsets[1:-1])), got[total:]])

    count = args | dict(cursor=Tensor(zeros, "i32"), csr_offsets=Tensor([0, *zeros], "i32"), COUNT_ONLY=True)
    results = {"csr_offsets": (np.array([0, *lengths]), 0), "cursor": (zeros, 0)}
    yield "fla.prepare_block_csr_kernel.count", [90], (kernel, (2, h, 1), count, results, 4, 3)
    scatter = args | dict(cursor=Tensor(zeros, "i32"), csr_offsets=Tensor(offsets, "i32"), COUNT_ONLY=False)
    want = np.concatenate([*lists, np.full(t * h * s - total, 77)])
    results = {"csr_indices": (want, 0, sorted_lists), "cursor": (np.array(lengths), 0)}
    yield "fla.prepare_block_csr_kernel.scatter", [90], (kernel, (2, h, 1), scatter, results, 4, 3)


def sage_quantization():
    """Whole numbers of 8 bits with a scale for each block of 64 rows; the second has 36."""
    h, t, d, block, scale = 2, 100, 64, 64, 0.125 * 1.44269504
    kernel = jit_functions("sageattention/sageattention/quant_per_block.py").quant_per_block_int8_kernel
    x = normal((1, h, t, d), "fp16", 60)
    scaled = x.numbers()[0] * scale
    unit = np.stack([np.abs(scaled[:, at : at + block]).max((1, 2)) / 127 for at in range(0, t, block)], 1)
    parts = scaled / np.repeat(unit, block, 1)[:, :t, None]
    want = np.sign(parts) * np.floor(np.abs(parts) + 0.5)
    # Roundings in f32, at most 2^-18 of up to 127, decide near a half.
    near = np.abs(np.abs(parts) % 1 - 0.5) <= 127 * 2.0**-18
    args = dict(Input=x, Output=output((h, t, d), "i8"), Scale=output((h, 2)), L=t, sm_scale=scale, C=d, BLK=block)
    args |= {f"stride_{x}{y}": n for x in "io" for y, n in [("z", h * t * d), ("h", t * d), ("n", d)]}
    args |= dict(stride_sz=2 * h, stride_sh=2)
    results = {"Output": (want, near.astype(float)), "Scale": rounded(unit, "fp32", unit)}
    yield "sageattention.quant_per_block_int8_kernel", [90], (kernel, (2, h, 1), args, results, 4, 3)


def has_no_tensor_cores(ptx):
    assert not TENSOR_CORES.search(ptx), "tensor cores in it"


def verdicts(gpu):
    """The name and verdict of each kernel."""
    for cases in [flashinfer_kernels(), fla_rows(), fla_sequences(), fla_blocks(), sage_quantization()]:
        yield from triton_verdicts(gpu, cases, has_no_tensor_cores)


main(verdicts, "without tensor cores")

"""Runs kernels in PTX on a virtual GPU, with checks: no GPU is needed.

>>> import array, epoxide_vgpu
>>> words = array.array("I", range(64))
>>> epoxide_vgpu.run(ptx, "add", grid=2, block=32, args=[words, epoxide_vgpu.u32(5)], check=True)

An argument of a kernel is one of these:

* a writable buffer (`array.array`, `bytearray`, an array of numpy): the kernel gets the address of
  a copy, which is copied back;
* `bytes` or another read-only buffer: the kernel gets the address of a copy;
* `out(buffer)`: as a writable buffer, but the kernel finds it unwritten;
* `u8`, `i8`, `u16`, `i16`, `u32`, `i32`, `u64`, `i64`, `f32`, `f64` of a number, or `value` of the
  bytes of a number or struct: the kernel gets the bytes themselves.

Buffers are C-contiguous and have at least one dimension.

A writable buffer that is given for several parameters is one array for the kernel. Buffers that
share only a part of their memory are an error where the kernel may write one of them.
"""

import ctypes
import operator
import os
import struct

__all__ = ["run", "out", "value", "VgpuError"] + [f"{k}{n}" for k in "ui" for n in (8, 16, 32, 64)] + ["f32", "f64"]

_VALUE, _IN, _OUT, _IN_OUT = range(4)
_RESULTS = {1: "bad argument", 2: "bad PTX", 3: "bad launch", 4: "fault"}
_REPORT_BYTES = 1 << 16


class VgpuError(Exception):
    """The kernel was not run, or not to its end. `kind` is one of `_RESULTS`."""

    def __init__(self, result, report):
        super().__init__(report)
        self.kind = _RESULTS.get(result, str(result))


class _Arg(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("kind", ctypes.c_int)]


class _Options(ctypes.Structure):
    _fields_ = [("seed", ctypes.c_uint64), ("max_warp_instructions", ctypes.c_uint64), ("check", ctypes.c_int)]


class value:
    """An argument whose bytes the kernel gets."""

    def __init__(self, data):
        # `bytes` makes zeros of a number.
        self.data = memoryview(data).tobytes()


class out:
    """A writable buffer that the kernel finds unwritten."""

    def __init__(self, buffer):
        self.buffer = buffer


def _number(code):
    return lambda number: value(struct.pack("=" + code, number))


u8, i8, u16, i16, u32, i32 = map(_number, "BbHhIi")
u64, i64, f32, f64 = map(_number, "Qqfd")

_library = None


def _load():
    global _library
    if _library is None:
        folder = os.path.dirname(os.path.abspath(__file__))
        _library = ctypes.CDLL(os.path.join(folder, "libepoxide_vgpu_cuda.so"))
        _library.vgpu_run.restype = ctypes.c_int
    return _library


def _argument(arg):
    """The struct, and what must stay alive."""
    kind = _IN_OUT
    if isinstance(arg, value):
        kind, arg = _VALUE, arg.data
    elif isinstance(arg, out):
        kind, arg = _OUT, arg.buffer
    try:
        view = memoryview(arg)
    except TypeError:
        raise TypeError(f"{arg!r} is no buffer; a number needs its type, as in i64(1)") from None
    if view.ndim == 0 and kind != _VALUE:
        raise TypeError(f"{arg!r} has no dimension; a number needs its type, as in i64(1)")
    if not view.c_contiguous:
        raise TypeError(f"a buffer of shape {view.shape} is not C-contiguous; give a C-contiguous copy")
    if view.readonly and kind == _OUT:
        raise TypeError("out() needs a writable buffer")
    if view.readonly:
        kind = _IN if kind == _IN_OUT else kind
    if view.readonly or view.nbytes == 0:
        memory = ctypes.create_string_buffer(view.tobytes())
    else:
        memory = (ctypes.c_char * view.nbytes).from_buffer(view.cast("B"))
    return _Arg(ctypes.addressof(memory), view.nbytes, kind), memory


def _unsigned(name, number, bits):
    """The number as C gets it; ctypes would cut it to its low bits."""
    number = operator.index(number)
    if not 0 <= number < 1 << bits:
        raise ValueError(f"{name} is {number}: it must be from 0 to {(1 << bits) - 1}")
    return number


def _extents(name, size):
    try:
        sizes = (operator.index(size),)
    except TypeError:
        sizes = tuple(size)
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"{name} is {size}: it must be a number or up to three")
    return (ctypes.c_uint * 3)(*(_unsigned(name, extent, 32) for extent in sizes + (1,) * (3 - len(sizes))))


def run(ptx, entry, grid, block, args, *, dynamic_shared=0, check=False, seed=0, max_warp_instructions=0):
    """Runs the kernel `entry` of `ptx`, a text or its bytes, over `grid` blocks of `block` threads: a number or up to three.

    `entry` is the name of a kernel, or a part of a mangled name that no other kernel has.

    With `check`, data races and reads of unwritten memory are faults. A `seed` draws the order of
    warps. A kernel that runs `max_warp_instructions` without progress is stopped; 0 is 2^28. Raises
    VgpuError with a report; no buffer is changed then. A size that does not fit raises
    ValueError.
    """
    made = [_argument(arg) for arg in args]
    structs = (_Arg * max(len(made), 1))(*(struct for struct, _ in made))
    limit = _unsigned("max_warp_instructions", max_warp_instructions, 64)
    options = _Options(_unsigned("seed", seed, 64), limit, bool(check))
    report = ctypes.create_string_buffer(_REPORT_BYTES)
    result = _load().vgpu_run(
        ctypes.c_char_p(ptx if isinstance(ptx, bytes) else ptx.encode()),
        ctypes.c_char_p(entry.encode()),
        _extents("grid", grid),
        _extents("block", block),
        ctypes.c_uint(_unsigned("dynamic_shared", dynamic_shared, 32)),
        structs,
        ctypes.c_size_t(len(made)),
        ctypes.byref(options),
        report,
        ctypes.c_size_t(_REPORT_BYTES),
    )
    if result != 0:
        raise VgpuError(result, report.value.decode(errors="replace"))

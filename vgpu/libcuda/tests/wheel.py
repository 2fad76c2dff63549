"""Runs kernels through the Python module. The argument is a file with the kernels of the tests."""

import array
import ctypes
import sys

import epoxide_vgpu as vgpu

ptx = open(sys.argv[1]).read()

words = array.array("I", range(64))
vgpu.run(ptx, "add", 2, 32, [words, vgpu.u32(5)])
assert list(words) == list(range(5, 69)), words

data = bytearray(4)
vgpu.run(ptx, "add", (1, 1, 1), [1], [data, vgpu.value(b"\x01\x02\x03\x04")], check=True, seed=7)
assert data == b"\x01\x02\x03\x04", data

# A buffer that is given twice is one array.
twice = """.version 7.8
.target sm_90
.address_size 64
.visible .entry twice(.param .u64 to, .param .u64 from)
{
.reg .b64 %a<4>;
.reg .b32 %r<2>;
ld.param.u64 %a1, [to];
ld.param.u64 %a2, [from];
mov.u32 %r1, %tid.x;
mul.wide.u32 %a3, %r1, 4;
add.u64 %a1, %a1, %a3;
add.u64 %a2, %a2, %a3;
ld.global.u32 %r1, [%a2];
add.u32 %r1, %r1, %r1;
st.global.u32 [%a1], %r1;
ret;
}
"""
for given in (lambda x: [x, x], lambda x: [vgpu.out(x), x], lambda x: [x, vgpu.out(x)]):
    for check in (False, True):
        four = array.array("I", range(4))
        vgpu.run(twice, "twice", 1, 4, given(four), check=check)
        assert list(four) == [0, 2, 4, 6], four


def error(kind, text, *args, **options):
    try:
        vgpu.run(*args, **options)
    except vgpu.VgpuError as error:
        assert error.kind == kind and text in str(error), (error.kind, str(error))
    else:
        raise AssertionError(f"no error: {text}")


error("fault", "data race", ptx, "race", 2, 32, [words], check=True)
error("fault", "unwritten", ptx, "add", 2, 32, [vgpu.out(words), vgpu.u32(1)], check=True)
register = twice.replace("mov.u32 %r1, %tid.x;", "")
error("fault", "read of register '%r1'", register, "twice", 1, 1, [words, words], check=True)
error("fault", "outside of every region", ptx, "add", 4, 512, [words, vgpu.u32(1)])
error("bad argument", "takes 2 arguments, 1 were given", ptx, "add", 1, 1, [words])
error("bad argument", "has 4 bytes, its argument has 8", ptx, "add", 1, 1, [words, vgpu.f64(1)])
error("bad argument", "no kernel 'sub'", ptx, "sub", 1, 1, [])
halves = memoryview(bytearray(24))
error("bad argument", "parameters 0 and 1 overlap", twice, "twice", 1, 4, [halves[8:], halves[:16]])
error("bad PTX", "nonsense", "nonsense", "add", 1, 1, [])
error("bad launch", "block is [2048, 1, 1]", ptx, "add", 1, 2048, [words, vgpu.u32(1)])

# A number without its type, or one in a buffer without dimensions.
for number in (5, ctypes.c_int64(5)):
    try:
        vgpu.run(ptx, "add", 2, 32, [words, number])
    except TypeError as error:
        assert "a number needs its type, as in i64(1)" in str(error), error
    else:
        raise AssertionError(f"no error: {number}")
try:
    vgpu.value(4)
except TypeError:
    pass
else:
    raise AssertionError("no error: value(4)")
try:
    vgpu.run(ptx, "add", 2, 32, [memoryview(words)[::2], vgpu.u32(1)])
except TypeError as error:
    assert "shape (32,) is not C-contiguous" in str(error), error
else:
    raise AssertionError("no error: every second word")
assert list(words) == list(range(5, 69)), words


class Index:
    """A number as numpy has them: no int, but as good as one."""

    def __init__(self, number):
        self.number = number

    def __index__(self):
        return self.number


# Text as bytes, a number in a buffer, and numbers that are no int.
vgpu.run(ptx.encode(), "add", Index(2), [Index(32)], [words, vgpu.value(ctypes.c_uint32(1))], seed=Index(1))
assert list(words) == list(range(6, 70)), words
vgpu.run(ptx, "add", 2, 32, [words, vgpu.i32(-1)])
# Without elements.
stores_nothing = ".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry none(.param .u64 at) { ret; }"
for none in (array.array("I"), (ctypes.c_uint * 3 * 0)(), b""):
    vgpu.run(stores_nothing, "none", 1, 1, [none], check=True)

# Sizes that C would cut to their low bits.
for name, wrong, options in [
    ("grid", (1, 1, 1, 2), {}),
    ("grid", (), {}),
    ("grid", (1 << 32) + 2, {}),
    ("block", -1, {}),
    ("dynamic_shared", 1 << 32, {"dynamic_shared": 1 << 32}),
    ("seed", -1, {"seed": -1}),
    ("max_warp_instructions", 1 << 64, {"max_warp_instructions": 1 << 64}),
]:
    shape = {"grid": 2, "block": 32, **({} if options else {name: wrong})}
    try:
        vgpu.run(ptx, "add", args=[words, vgpu.u32(1)], **shape, **options)
    except ValueError as error:
        assert str(error).startswith(f"{name} is {wrong}: "), error
    else:
        raise AssertionError(f"no error: {name} {wrong}")
assert list(words) == list(range(5, 69)), words
print("ok")

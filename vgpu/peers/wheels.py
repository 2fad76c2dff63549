"""Compiles and runs kernels from the wheels of other projects, and compares each with numpy.

tensor_cores.py and cuda_cores.py have the kernels. Both take LIBCUDA WORK LIST. LIBCUDA is the
driver: `libepoxide_vgpu_cuda.so`, or `libcuda.so.1` of a machine with a GPU. WORK has the folders
that check.sh makes: `fla`, `sageattention` and `flashinfer` with the wheels' files, and `cutlass.ptx`.
LIST has a line for each kernel: its name and `right`, or `refused:` and why.

The `@triton.jit` functions of a file go to a file of their own, without the imports and decorators
that need PyTorch, and Triton compiles them for sm_80 or sm_90.
"""

import ast
import ctypes
import importlib.util
import os
import pathlib
import re
import sys

import numpy as np

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LIBCUDA, WORK, LIST = map(pathlib.Path, sys.argv[1:4])
os.environ["TRITON_CACHE_DIR"] = str(WORK / "triton-cache")
TENSOR_CORES = re.compile(r"\b(mma|wmma|wgmma|tcgen05)\.")


class Refused(Exception):
    """The driver rejects the module, with a reason."""


class Gpu:
    """A context of the driver API."""

    def __init__(self, path):
        self.cuda = ctypes.CDLL(str(path))
        self.call("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.open()

    def call(self, name, *args):
        code = getattr(self.cuda, name)(*args)
        if code != 0:
            raise RuntimeError(f"{name} returned {code}")

    def open(self):
        self.call("cuCtxCreate_v2", ctypes.byref(self.context), 0, 0)

    def anew(self):
        """A context after a fault, which makes the one before unusable."""
        self.cuda.cuCtxDestroy_v2(self.context)
        self.open()

    def load(self, ptx):
        log, module = ctypes.create_string_buffer(4096), ctypes.c_void_p()
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER, and its size
        values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), len(log))
        image = ctypes.c_char_p(ptx.encode())
        if self.cuda.cuModuleLoadDataEx(ctypes.byref(module), image, 2, options, values) != 0:
            raise Refused(log.value.decode().strip().splitlines()[0])
        return module

    def ints(self, module, name, count):
        """The first numbers of a variable."""
        at, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuModuleGetGlobal_v2", ctypes.byref(at), ctypes.byref(size), module, name.encode())
        numbers = (ctypes.c_int * count)()
        self.call("cuMemcpyDtoH_v2", numbers, at, ctypes.sizeof(numbers))
        return list(numbers)

    def run(self, module, name, grid, threads, shared, args):
        """Runs a kernel on ctypes numbers and numpy arrays, which it changes."""
        function, buffers, values = ctypes.c_void_p(), [], []
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        for arg in args:
            if isinstance(arg, np.ndarray):
                at = ctypes.c_uint64()
                self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(arg.nbytes))
                self.call("cuMemcpyHtoD_v2", at, arg.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(arg.nbytes))
                buffers.append((at, arg))
                arg = at
            values.append(arg)
        if shared > 48 << 10:
            self.call("cuFuncSetAttribute", function, 8, shared)  # the most dynamic shared memory
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        shape = [ctypes.c_uint(n) for n in (*grid, threads, 1, 1, shared)]
        self.call("cuLaunchKernel", function, *shape, None, pointers, None)
        self.call("cuCtxSynchronize")
        for at, array in buffers:
            self.call("cuMemcpyDtoH_v2", array.ctypes.data_as(ctypes.c_void_p), at, ctypes.c_size_t(array.nbytes))
            self.call("cuMemFree_v2", at)


class Tensor:
    """An array in a format of Triton that numpy may lack."""

    def __init__(self, numbers, kind):
        numbers = np.ascontiguousarray(numbers, dtype=np.float64)
        self.kind, self.shape = kind, numbers.shape
        if kind == "bf16":
            # To nearest, ties to even.
            bits = numbers.astype(np.float32).view(np.uint32)
            self.array = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        elif kind == "fp8e4nv":
            self.array = np.vectorize(lambda x: E4M3[x], otypes=[np.uint8])(numbers)
        elif kind == "i4":
            # Two in a byte, the first in the lower half.
            pairs = numbers.astype(np.int64).reshape(*numbers.shape[:-1], -1, 2) & 15
            self.array = (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)
        else:
            self.array = numbers.astype(PLAIN[kind])

    def numbers(self):
        if self.kind == "bf16":
            return (self.array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return self.array.astype(np.float64)


PLAIN = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "i8": np.int8, "i32": np.int32, "i64": np.int64}
# The bits of the whole numbers that tests use.
E4M3 = {0.0: 0x00, 1.0: 0x38, -1.0: 0xB8, 2.0: 0x40, -2.0: 0xC0}


def whole(shape, most=1, seed=0):
    """Small whole numbers."""
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(np.float64)


def jit_functions(*files):
    """A module of the `@triton.jit` functions of these files, later ones in place of earlier."""
    found = {}
    for file in files:
        for node in ast.walk(ast.parse((WORK / file).read_text())):
            decorators = getattr(node, "decorator_list", [])
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in decorators):
                node.decorator_list = [ast.parse("triton.jit", mode="eval").body]
                found[node.name] = ast.unparse(node)
    head = "import triton\nimport triton.language as tl\nimport triton.language.extra.libdevice as tldevice\n"
    path = WORK / "jit" / (re.sub(r"\W", "_", files[-1]) + ".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(head + "\n\n".join(found.values()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(kernel, args, arch, warps, stages):
    """The kernel as Triton compiles it for these arguments. None and constants are compiled in."""
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        name = parameter.name
        value = args.get(name, parameter.default if parameter.has_default else None)
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = f"*{value.kind}" if isinstance(value, Tensor) else {int: "i32", float: "fp32"}[type(value)]
        if isinstance(value, Tensor) or isinstance(value, int) and value % 16 == 0 and name != "T":
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": stages}
    ), [name for name, kind in signature.items() if kind != "constexpr"]


def run_triton(gpu, case, arch, check_ptx):
    """Runs a kernel of Triton. Returns the results that are wrong. `check_ptx` checks its PTX.

    A result is its right numbers, the bound of differences, and, where a kernel chooses their order,
    a function that gives them one.
    """
    kernel, grid, args, results, warps, stages = case
    binary, names = compiled(kernel, args, arch, warps, stages)
    ptx = binary.asm["ptx"]
    check_ptx(ptx)
    entry = ptx[ptx.index(".entry") :]
    parameters = entry[: entry.index(")")].count(".param")
    values = []
    for name in names:
        value = args[name]
        plain = {int: ctypes.c_int, float: ctypes.c_float}
        values.append(value.array if isinstance(value, Tensor) else plain[type(value)](value))
    # Memory for the tensor maps that the blocks make, and for a profiler, which is absent.
    scratch = binary.metadata.global_scratch_size * grid[0] * grid[1] * grid[2]
    values.append(np.zeros(scratch, np.uint8) if scratch else ctypes.c_uint64(0))
    values += [ctypes.c_uint64(0)] * (parameters - len(values))
    module = gpu.load(ptx)
    gpu.run(module, binary.metadata.name, grid, 32 * binary.metadata.num_warps, binary.metadata.shared, values)
    wrong = []
    for name, (want, bound, *order) in results.items():
        got = args[name].numbers()
        wrong.append(differing(name, order[0](got) if order else got, want, bound))
    return wrong


def differing(name, got, want, bound):
    """What is wrong with a result; an empty text if nothing is."""
    wrong = ~(np.abs(got - want) <= bound)
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{name}: {wrong.sum()} of {wrong.size} wrong, {at} is {got[at]}, not {want[at]}"


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def verdict(gpu, run):
    """`right`, or what is wrong with the results of `run`, or why it has none."""
    try:
        wrong = [text for text in run() if text]
        return "wrong: " + "; ".join(wrong) if wrong else "right"
    except Refused as refused:
        return f"refused: {refused}"
    except RuntimeError as error:
        gpu.anew()
        return f"failed: {error}"


def triton_verdicts(gpu, cases, check_ptx):
    """The name and verdict of each kernel of Triton, for each architecture."""
    for name, archs, case in cases:
        for arch in archs:
            # Results of one architecture are not those that the other finds.
            before = {key: value.array.copy() for key, value in case[2].items() if isinstance(value, Tensor)}
            yield f"{name}.sm_{arch}", verdict(gpu, lambda: run_triton(gpu, case, arch, check_ptx))
            for key, array in before.items():
                case[2][key].array[...] = array


def main(verdicts, kind):
    """Compares the verdicts of kernels of this kind with the list."""
    text = LIST.read_text() if LIST.exists() else ""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    listed = dict(line.split(maxsplit=1) for line in lines)
    seen, other = {}, 0
    for name, found in verdicts(Gpu(LIBCUDA)):
        seen[name] = found
        same = listed.get(name) == found
        other += not same
        print(f"{name} {found}" + ("" if same else f"   <- the list has {listed.get(name, 'nothing')}"), flush=True)
    for name in listed.keys() - seen.keys():
        other += 1
        print(f"{name} is in the list and was not run")
    right = sum(found == "right" for found in seen.values())
    print(f"{len(seen)} kernels {kind}: {right} right; {other} unlike the list")
    sys.exit(1 if other else 0)

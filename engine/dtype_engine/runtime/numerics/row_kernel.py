"""Machine code that goes once over rows of two outputs and takes all sums that their figures need.

torch has no such operation, and what it has goes over the rows some twenty times: five times as long, and where other programs
want the processors fifty times, since its threads wait for each other after each operation. LLVM, by way of llvmlite, makes the
code for the processor that is there, in some 50 ms for two dtypes.

`LANES` values are worked on at a time. A sum of each lane is in float32 over `_BLOCK` values, then in float64.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from dtype_engine.runtime.chunks import parallel_map

LANES = 16
FARTHEST = 30.0
"""The largest |x| of which e^x is taken."""
_BLOCK = 2048
_VALUES_AT_ONCE = 1 << 16
_AHEAD = 2048
_SUMS = ("absolute", "noise", "moved")
_SUMS_OF_DISTRIBUTION = ("first", "rest")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_EXP_TERMS, _REST_TERMS = 8, 9
"""Terms of Taylor's series: of e^t for |t| <= ln 2 / 2, and of (e^x - 1 - x) / x² for |x| <= 1; those left out are below 2^-24."""
_SMALLEST_EXPONENT = -87.0
"""e^y is the smallest normal float32 or so, and less counts for nothing."""
_LOCK = threading.Lock()


@dataclass(frozen=True)
class RowSums:
    """Of each row, float64 [rows] where nothing else is said, with δ = c - r, p = e^(r - largest r), x = δ - shift.

    absolute: Σ|δ|. noise: Σδ²; not finite where r or c is not. moved: Σrδ. largest: the largest |δ|. Of logits also first: Σpx;
    rest: Σp(e^x - 1 - x), if no |x| is above `FARTHEST`; top: the first of the likeliest classes of c, int64.
    """

    absolute: np.ndarray
    noise: np.ndarray
    moved: np.ndarray
    first: np.ndarray
    rest: np.ndarray
    largest: np.ndarray
    top: np.ndarray


class RowKernel:
    """Takes the sums of rows of two outputs of two dtypes on the CPU. Threads may call it side by side."""

    def __init__(self, reference: torch.dtype, candidate: torch.dtype, distribution: bool) -> None:
        self._names = _SUMS + _SUMS_OF_DISTRIBUTION if distribution else _SUMS
        code = _Code(reference, candidate, self._names)
        self._compiled = _compile(code.text)  # keeps the code in memory
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        kinds = (*(pointer,) * 4, *(integer,) * 5, *(pointer,) * 3)
        self._call = ctypes.CFUNCTYPE(None, *kinds)(self._compiled.get_function_address(_Code.NAME))

    @staticmethod
    def is_available(*dtypes: torch.dtype) -> bool:
        """Whether there is code for these dtypes on this machine."""
        return set(dtypes) <= set(_DTYPES) and _target() is not None

    @staticmethod
    def of(reference: torch.dtype, candidate: torch.dtype, distribution: bool) -> RowKernel:
        """The kernel for outputs of these dtypes, for which it `is_available`. Made once."""
        with _LOCK:
            return _kernel(reference, candidate, distribution)

    @staticmethod
    def prepare() -> None:
        """Have the compiler in memory, and the code that is asked for most: the first takes three times as long as others."""
        if RowKernel.is_available():
            RowKernel.of(torch.float32, torch.bfloat16, True)

    def sums(
        self, reference: torch.Tensor, candidate: torch.Tensor, largest: torch.Tensor, shift: torch.Tensor
    ) -> RowSums:
        """Of rows of outputs [rows, width]; `largest` r and `shift` of each are float32 [rows], and mean nothing where the outputs
        are no distributions. All of torch's threads work at it.
        """
        count, width = reference.shape
        reference, candidate = (each if each.stride(1) == 1 else each.contiguous() for each in (reference, candidate))
        sums = torch.empty(count, len(self._names), LANES, dtype=torch.float64)
        extremes, classes = torch.empty(count, 2, LANES), torch.empty(count, LANES, dtype=torch.int32)
        read = [each.data_ptr() for each in (reference, candidate, largest, shift)]
        written = [each.data_ptr() for each in (sums, extremes, classes)]
        block = max(1, _VALUES_AT_ONCE // width)

        def take(blocks: range) -> None:
            for rows in (range(number * block, min((number + 1) * block, count)) for number in blocks):
                self._call(*read, reference.stride(0), candidate.stride(0), width, rows.start, rows.stop, *written)

        parallel_map(take, -(-count // block))
        of_names = dict(zip(self._names, sums.sum(-1).unbind(1), strict=True))
        zeros = torch.zeros(count, dtype=torch.float64)
        largest_logit, largest_difference = extremes.unbind(1)
        is_largest = largest_logit == largest_logit.amax(-1, keepdim=True)
        top = torch.where(is_largest, classes, torch.iinfo(torch.int32).max).amin(-1).long()
        return RowSums(
            **{name: of_names.get(name, zeros).numpy() for name in _SUMS + _SUMS_OF_DISTRIBUTION},
            largest=largest_difference.amax(-1).double().numpy(),
            top=top.numpy(),
        )


@cache
def _kernel(reference: torch.dtype, candidate: torch.dtype, distribution: bool) -> RowKernel:
    return RowKernel(reference, candidate, distribution)


# -- the code --------------------------------------------------------------------------------------------------------


class _Code:
    """The kernel in LLVM's language, `text`: for rows from one to before another, `sums` [rows, names, LANES], `extremes` [rows, 2,
    LANES] (the largest c and |δ| of each lane) and `classes` [rows, LANES] (where that c is first) are written.
    """

    NAME = "take_sums"

    def __init__(self, reference: torch.dtype, candidate: torch.dtype, names: tuple[str, ...]) -> None:
        from llvmlite import ir

        self._ir = ir
        self._float, self._double = ir.FloatType(), ir.DoubleType()
        self._int, self._index = ir.IntType(32), ir.IntType(64)
        self._floats, self._doubles, self._ints = (
            ir.VectorType(kind, LANES) for kind in (self._float, self._double, self._int)
        )
        self._names = names
        self._module = ir.Module()
        pointers = [kind.as_pointer() for kind in (self._double, self._float, self._int)]
        raw, singles = ir.IntType(8).as_pointer(), self._float.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [raw, raw, singles, singles, *[self._index] * 5, *pointers])
        function = ir.Function(self._module, kind, self.NAME)
        self._b = ir.IRBuilder(function.append_basic_block())
        self._write(function.args, reference, candidate)
        self.text = str(self._module)

    def _write(self, arguments: Any, reference: torch.dtype, candidate: torch.dtype) -> None:
        b = self._b
        of_r, of_c, largest, shift, r_stride, c_stride, width, first, end, sums, extremes, classes = arguments
        self._totals = {name: self._variable(self._doubles) for name in self._names}
        self._partial = {name: self._variable(self._floats) for name in self._names}
        self._largest, self._difference = self._variable(self._floats), self._variable(self._floats)
        self._class = self._variable(self._ints)
        last = [self._variable(self._vector_of(dtype)) for dtype in (reference, candidate)]
        with self._counting(first, end, 1) as row:
            for total in self._totals.values():
                b.store(self._ir.Constant(self._doubles, None), total)
            b.store(self._all(-math.inf), self._largest)
            b.store(self._all(0.0), self._difference)
            b.store(self._ir.Constant(self._ints, None), self._class)
            self._top, self._shift = (self._spread(b.load(b.gep(each, [row]))) for each in (largest, shift))
            r_row, c_row = (
                b.gep(b.bitcast(each, self._scalar_of(dtype).as_pointer()), [b.mul(row, stride)])
                for each, dtype, stride in ((of_r, reference, r_stride), (of_c, candidate, c_stride))
            )
            whole = b.and_(width, self._ir.Constant(self._index, -LANES))
            with self._counting(self._ir.Constant(self._index, 0), whole, _BLOCK) as block:
                self._clear_partial()
                after = b.add(block, self._ir.Constant(self._index, _BLOCK))
                stop = b.select(b.icmp_signed("<", after, whole), after, whole)
                with self._counting(block, stop, LANES) as at:
                    self._take(self._load(r_row, at, reference), self._load(c_row, at, candidate), at, None)
                self._add_partial()
            with b.if_then(b.icmp_signed("<", whole, width)):
                # What is left of a row is copied to where there is room for a whole vector.
                for source, copy in ((r_row, last[0]), (c_row, last[1])):
                    b.store(self._ir.Constant(copy.type.pointee, None), copy)
                    cells = b.bitcast(copy, source.type)
                    with self._counting(whole, width, 1) as at:
                        b.store(b.load(b.gep(source, [at])), b.gep(cells, [b.sub(at, whole)]))
                left = self._spread(b.trunc(b.sub(width, whole), self._int))
                valid = b.icmp_signed("<", self._lanes(), left)
                self._clear_partial()
                r, c = (self._widened(b.load(copy), d) for copy, d in zip(last, (reference, candidate), strict=True))
                self._take(r, c, whole, valid)
                self._add_partial()
            for number, total in enumerate(self._totals.values()):
                self._keep(b.load(total), sums, row, len(self._names), number)
            self._keep(b.load(self._largest), extremes, row, 2, 0)
            self._keep(b.load(self._difference), extremes, row, 2, 1)
            self._keep(b.add(b.load(self._class), self._lanes()), classes, row, 1, 0)
        b.ret_void()

    def _take(self, r: Any, c: Any, at: Any, valid: Any) -> None:
        """Add values of a row, the first of them number `at`; of the lanes that are `valid`, or of all."""
        b = self._b
        delta = b.fsub(c, r)
        absolute = self._call("fabs", delta)
        self._add("absolute", absolute)
        self._add("noise", delta, delta)
        self._add("moved", r, delta)
        b.store(self._larger(absolute, b.load(self._difference)), self._difference)
        if "first" not in self._names:
            return
        is_larger = b.fcmp_ordered(">", c, b.load(self._largest))
        if valid is not None:
            is_larger = b.and_(is_larger, valid)
        b.store(b.select(is_larger, c, b.load(self._largest)), self._largest)
        b.store(b.select(is_larger, self._spread(b.trunc(at, self._int)), b.load(self._class)), self._class)
        p = self._exp(self._larger(b.fsub(r, self._top), self._all(_SMALLEST_EXPONENT)))
        if valid is not None:
            p = b.select(valid, p, self._all(0.0))
        x = b.fsub(delta, self._shift)
        px = b.fmul(p, x)
        self._add("first", px)
        rest = self._variable(self._floats)
        b.store(b.fmul(px, b.fmul(x, self._series(x, _REST_TERMS, 2))), rest)
        is_far = b.fcmp_ordered(">", self._call("fabs", x), self._all(1.0))
        bits = self._ir.IntType(LANES)
        with b.if_then(b.icmp_unsigned("!=", b.bitcast(is_far, bits), self._ir.Constant(bits, 0)), likely=False):
            near = self._larger(self._smaller(x, self._all(FARTHEST)), self._all(-FARTHEST))
            far = b.fsub(b.fsub(self._exp(near), self._all(1.0)), x)
            b.store(b.select(is_far, b.fmul(p, far), b.load(rest)), rest)
        self._add("rest", b.load(rest))

    def _exp(self, y: Any) -> Any:
        """e^y as 2^n e^t, n the integer that is nearest to y / ln 2, in two steps so that t is exact to float32."""
        b = self._b
        n = self._call("rint", b.fmul(y, self._all(1 / math.log(2))))
        coarse = 355 / 512  # ln 2 in ten bits: its product with n is exact
        t = self._call("fma", n, self._all(-coarse), y)
        t = self._call("fma", n, self._all(coarse - math.log(2)), t)
        power = b.shl(b.add(b.fptosi(n, self._ints), self._all_of(self._int, 127)), self._all_of(self._int, 23))
        return b.fmul(self._series(t, _EXP_TERMS, 0), b.bitcast(power, self._floats))

    def _series(self, t: Any, terms: int, first: int) -> Any:
        """Σ t^k / (k + first)! for k below `terms`."""
        found = self._all(1 / math.factorial(first + terms - 1))
        for order in reversed(range(first, first + terms - 1)):
            found = self._call("fma", found, t, self._all(1 / math.factorial(order)))
        return found

    def _add(self, name: str, value: Any, times: Any = None) -> None:
        total = self._b.load(self._partial[name])
        total = self._b.fadd(total, value) if times is None else self._call("fma", value, times, total)
        self._b.store(total, self._partial[name])

    def _clear_partial(self) -> None:
        for partial in self._partial.values():
            self._b.store(self._all(0.0), partial)

    def _add_partial(self) -> None:
        for name, total in self._totals.items():
            partial = self._b.fpext(self._b.load(self._partial[name]), self._doubles)
            self._b.store(self._b.fadd(self._b.load(total), partial), total)

    def _keep(self, vector: Any, array: Any, row: Any, of_row: int, number: int) -> None:
        """Write a vector to its place in an array [rows, of_row, LANES]."""
        b, index = self._b, self._index
        place = b.add(b.mul(row, self._ir.Constant(index, of_row * LANES)), self._ir.Constant(index, number * LANES))
        b.store(vector, b.bitcast(b.gep(array, [place]), vector.type.as_pointer()), align=4)

    def _load(self, row: Any, at: Any, dtype: torch.dtype) -> Any:
        """`LANES` values of a row from number `at`, in float32."""
        self._prefetch(self._b.gep(row, [at]))
        place = self._b.bitcast(self._b.gep(row, [at]), self._vector_of(dtype).as_pointer())
        return self._widened(self._b.load(place, align=dtype.itemsize), dtype)

    def _prefetch(self, place: Any) -> None:
        """Have what comes `_AHEAD` bytes later brought into the cache. Processors do it by themselves, but not from one page of
        memory to the next, and from two arrays of two dtypes late: it halves the time.
        """
        b, byte = self._b, self._ir.IntType(8).as_pointer()
        kind = self._ir.FunctionType(self._ir.VoidType(), [byte, *[self._int] * 3])
        full = "llvm.prefetch.p0"
        function = self._module.globals.get(full) or self._ir.Function(self._module, kind, full)
        later = b.gep(b.bitcast(place, byte), [self._ir.Constant(self._index, _AHEAD)])
        b.call(function, [later, *(self._ir.Constant(self._int, each) for each in (0, 3, 1))])  # read, keep, data

    def _widened(self, values: Any, dtype: torch.dtype) -> Any:
        if dtype == torch.float32:
            return values
        if dtype == torch.float16:
            return self._b.fpext(values, self._floats)
        upper = self._b.shl(self._b.zext(values, self._ints), self._all_of(self._int, 16))
        return self._b.bitcast(upper, self._floats)

    def _scalar_of(self, dtype: torch.dtype) -> Any:
        """What LLVM loads: bfloat16 as its bits."""
        return {torch.float32: self._float, torch.float16: self._ir.HalfType()}.get(dtype, self._ir.IntType(16))

    def _vector_of(self, dtype: torch.dtype) -> Any:
        return self._ir.VectorType(self._scalar_of(dtype), LANES)

    def _variable(self, kind: Any) -> Any:
        with self._b.goto_entry_block():
            return self._b.alloca(kind)

    @contextmanager
    def _counting(self, start: Any, stop: Any, step: int) -> Iterator[Any]:
        """A loop from `start` to before `stop`, whose body is written inside; gives the number it is at."""
        b = self._b
        variable = self._variable(self._index)
        b.store(start, variable)
        head, body, after = (b.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        number = b.load(variable)
        b.cbranch(b.icmp_signed("<", number, stop), body, after)
        b.position_at_end(body)
        yield number
        b.store(b.add(number, self._ir.Constant(self._index, step)), variable)
        b.branch(head)
        b.position_at_end(after)

    def _call(self, name: str, *values: Any) -> Any:
        """An operation on vectors of float32 that LLVM has under a name."""
        kind = self._ir.FunctionType(self._floats, [self._floats] * len(values))
        full = f"llvm.{name}.v{LANES}f32"
        function = self._module.globals.get(full) or self._ir.Function(self._module, kind, full)
        return self._b.call(function, values)

    def _larger(self, one: Any, other: Any) -> Any:
        """The larger in each lane, the other where one is not a number."""
        return self._b.select(self._b.fcmp_ordered(">", one, other), one, other)

    def _smaller(self, one: Any, other: Any) -> Any:
        return self._b.select(self._b.fcmp_ordered("<", one, other), one, other)

    def _all(self, value: float) -> Any:
        return self._all_of(self._float, value)

    def _all_of(self, kind: Any, value: float) -> Any:
        return self._ir.Constant(self._ir.VectorType(kind, LANES), [self._ir.Constant(kind, value)] * LANES)

    def _lanes(self) -> Any:
        return self._ir.Constant(self._ints, list(range(LANES)))

    def _spread(self, scalar: Any) -> Any:
        """A vector with one value in all lanes."""
        kind, zero = self._ir.VectorType(scalar.type, LANES), self._ir.Constant(self._int, 0)
        undefined = self._ir.Constant(kind, self._ir.Undefined)
        one = self._b.insert_element(undefined, scalar, zero)
        return self._b.shuffle_vector(one, undefined, self._ir.Constant(self._ints, None))


# -- the compiler ----------------------------------------------------------------------------------------------------


@cache
def _target() -> Any:
    """What makes code for this processor; None where llvmlite is missing, the system lets nobody make code, or the processor
    would do one of these operations by a call for each value.
    """
    try:
        from llvmlite import binding

        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except (ImportError, OSError, AttributeError):
        return None
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    name, features = binding.get_host_cpu_name(), binding.get_host_cpu_features()
    triple = binding.get_default_triple()
    if not triple.startswith(("aarch64", "arm64")):
        if not (features.get("fma") and features.get("f16c") and features.get("avx2")):
            return None
        features["prefer-256-bit"] = False
    return binding.Target.from_triple(triple).create_target_machine(cpu=name, features=features.flatten(), opt=2)


def _compile(text: str) -> Any:
    """The engine that has the code of a module in memory."""
    from llvmlite import binding

    target = _target()
    module = binding.parse_assembly(text)
    module.verify()
    passes = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, target)
    engine.finalize_object()
    return engine

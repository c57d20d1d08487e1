"""Machine code that goes over rows of outputs on the CPU, written with llvmlite and made by LLVM for the processor that is there.

torch has no operations that take several sums at once. With those that it has, what `row_kernel` does takes four times as long, and
next to another program that computes twenty times and more: torch's threads wait for each other after every operation.

`LANES` values are worked on at a time. A sum of each lane is in float32 over `_BLOCK` values, then in float64.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from dtype_engine.runtime.chunks import parallel_map

LANES = 16
FEWEST_VALUES = 4096
"""Of fewer values in a row the roundings of float32 do not even out."""
SMALLEST_EXPONENT = -87.0
"""e^y is the smallest normal float32 or so, and less counts for nothing."""
_BLOCK = 2048
_AHEAD = 2048
_VALUES_AT_ONCE = 1 << 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_EXP_TERMS = 8
"""Terms of Taylor's series of e^t for |t| <= ln 2 / 2; those left out are below 2^-24."""
_NAME = "take"

Take = Callable[[list[Any], Any, Any], None]


def is_available(*dtypes: torch.dtype) -> bool:
    """Whether code that reads these dtypes can be made on this machine."""
    return set(dtypes) <= set(_DTYPES) and _target() is not None


class RowFunction:
    """What was written in `code`, compiled. Threads may call it side by side."""

    def __init__(self, code: Code) -> None:
        self._engine = _compile(code.finish())  # keeps the code in memory
        kinds = (
            *(ctypes.c_void_p for _ in code.read), *(ctypes.c_int64 for _ in code.sizes),
            *(ctypes.c_int64,) * 2, *(ctypes.c_void_p for _ in code.written),
        )  # fmt: skip
        self._call = ctypes.CFUNCTYPE(None, *kinds)(self._engine.get_function_address(_NAME))

    def __call__(self, read: Sequence[torch.Tensor], sizes: Sequence[int], written: Sequence[torch.Tensor]) -> None:
        """Go over all rows of the first that is read, [rows, width], with all of torch's threads."""
        count, width = read[0].shape
        before, after = [each.data_ptr() for each in read], [each.data_ptr() for each in written]
        block = max(1, _VALUES_AT_ONCE // max(1, width))

        def take(blocks: range) -> None:
            for number in blocks:
                first, end = number * block, min((number + 1) * block, count)
                self._call(*before, *sizes, first, end, *after)

        parallel_map(take, -(-count // block))


def place_of_largest(largest: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Where the largest value of each row is first, int64 [rows], of what `Code.keep_largest` wrote, [rows, LANES] both."""
    is_largest = largest == largest.amax(-1, keepdim=True)
    return torch.where(is_largest, places, torch.iinfo(torch.int32).max).amin(-1).long()


class Code:
    """A function in LLVM's language, as it is written: of arrays that are `read`, `sizes`, rows from `first` to before `end`, and
    arrays that are `written`. `b` writes the next instruction; vectors are of float32, `LANES` long.
    """

    def __init__(self, read: int, sizes: int, written: int) -> None:
        from llvmlite import ir

        self.ir = ir
        self._float, self._double = ir.FloatType(), ir.DoubleType()
        self._int, self._index = ir.IntType(32), ir.IntType(64)
        self._floats, self._doubles, self._ints = (
            ir.VectorType(kind, LANES) for kind in (self._float, self._double, self._int)
        )
        self._module = ir.Module()
        array = ir.IntType(8).as_pointer()
        kinds = [*[array] * read, *[self._index] * (sizes + 2), *[array] * written]
        function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), kinds), _NAME)
        self.read, self.sizes = function.args[:read], function.args[read : read + sizes]
        self.first, self.end = function.args[read + sizes : read + sizes + 2]
        self.written = function.args[read + sizes + 2 :]
        self.b = ir.IRBuilder(function.append_basic_block())
        self._totals: dict[str, tuple[Any, Any]] = {}

    def finish(self) -> str:
        """All of it."""
        self.b.ret_void()
        return str(self._module)

    # -- loops -------------------------------------------------------------------------------------------------------

    @contextmanager
    def counting(self, start: Any, stop: Any, step: int) -> Iterator[Any]:
        """A loop from `start` to before `stop`, whose body is written inside; gives the number it is at."""
        b, place = self.b, self.variable(self._index)
        b.store(start, place)
        head, body, after = (b.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        number = b.load(place)
        b.cbranch(b.icmp_signed("<", number, stop), body, after)
        b.position_at_end(body)
        yield number
        b.store(b.add(number, self.index(step)), place)
        b.branch(head)
        b.position_at_end(after)

    def go_over(self, rows: Sequence[tuple[Any, torch.dtype]], width: Any, take: Take) -> None:
        """Have `take(values, at, valid)` write what is done with the next values of each of some rows, from number `at`: of all
        lanes where `valid` is None, or of those. What it adds to sums is added to their totals.
        """
        b = self.b
        whole = b.and_(width, self.index(-LANES))
        with self.counting(self.index(0), whole, _BLOCK) as block:
            after = b.add(block, self.index(_BLOCK))
            stop = b.select(b.icmp_signed("<", after, whole), after, whole)
            with self._adding(), self.counting(block, stop, LANES) as at:
                take([self._load(row, at, dtype) for row, dtype in rows], at, None)
        with b.if_then(b.icmp_signed("<", whole, width)):
            # What is left of a row is copied to where there is room for a whole vector.
            values = []
            for row, dtype in rows:
                kind = self._vector_of(dtype)
                copy = self.variable(kind)
                b.store(self.ir.Constant(kind, None), copy)
                cells = b.bitcast(copy, row.type)
                with self.counting(whole, width, 1) as at:
                    b.store(b.load(b.gep(row, [at])), b.gep(cells, [b.sub(at, whole)]))
                values.append(self._widened(b.load(copy), dtype))
            left = self.spread(b.trunc(b.sub(width, whole), self._int))
            with self._adding():
                take(values, whole, b.icmp_signed("<", self._lanes(), left))

    # -- sums and largest values ---------------------------------------------------------------------------------------

    def begin_sums(self, *names: str) -> None:
        """Sums that are zero, for the row that follows."""
        for name in names:
            if name not in self._totals:
                self._totals[name] = self.variable(self._doubles), self.variable(self._floats)
            self.b.store(self.ir.Constant(self._doubles, None), self._totals[name][0])

    def add(self, name: str, value: Any, times: Any = None) -> None:
        """Add a vector, or its product with another, to a sum."""
        partial = self._totals[name][1]
        before = self.b.load(partial)
        self.b.store(self.b.fadd(before, value) if times is None else self.call("fma", value, times, before), partial)

    @contextmanager
    def _adding(self) -> Iterator[None]:
        b = self.b
        for _, partial in self._totals.values():
            b.store(self.all(0.0), partial)
        yield
        for total, partial in self._totals.values():
            b.store(b.fadd(b.load(total), b.fpext(b.load(partial), self._doubles)), total)

    def keep_sums(self, row: Any, into: Any) -> None:
        """Write the sums of a row to a float64 array [rows, sums, LANES]."""
        for number, (total, _) in enumerate(self._totals.values()):
            self._keep(self.b.load(total), into, row, len(self._totals), number)

    def begin_largest(self) -> tuple[Any, Any]:
        """The largest value of each lane, and the number in the row of the vector that it was in."""
        largest, place = self.variable(self._floats), self.variable(self._ints)
        self.b.store(self.all(-math.inf), largest)
        self.b.store(self.ir.Constant(self._ints, None), place)
        return largest, place

    def note_largest(self, found: tuple[Any, Any], values: Any, at: Any, valid: Any) -> None:
        """Take in values from number `at` of a row, of lanes that are valid."""
        b, (largest, place) = self.b, found
        is_larger = b.fcmp_ordered(">", values, b.load(largest))
        if valid is not None:
            is_larger = b.and_(is_larger, valid)
        b.store(b.select(is_larger, values, b.load(largest)), largest)
        b.store(b.select(is_larger, self.spread(b.trunc(at, self._int)), b.load(place)), place)

    def keep_largest(self, found: tuple[Any, Any], row: Any, values: Any, places: Any) -> None:
        """Write the largest of each lane of a row to a float32 array, and where it is in the row to an int32 one, [rows, LANES]."""
        self.keep(self.b.load(found[0]), row, values)
        self.keep(self.b.add(self.b.load(found[1]), self._lanes()), row, places)

    def keep(self, vector: Any, row: Any, into: Any) -> None:
        """Write a vector to its place in an array [rows, LANES]."""
        self._keep(vector, into, row, 1, 0)

    def _keep(self, vector: Any, array: Any, row: Any, of_row: int, number: int) -> None:
        b, kind = self.b, vector.type
        place = b.add(b.mul(row, self.index(of_row * LANES)), self.index(number * LANES))
        cells = b.bitcast(array, kind.element.as_pointer())
        b.store(vector, b.bitcast(b.gep(cells, [place]), kind.as_pointer()), align=4)

    # -- operations on vectors -----------------------------------------------------------------------------------------

    def exp(self, y: Any) -> Any:
        """e^y as 2^n e^t, n the integer that is nearest to y / ln 2, in two steps so that t is exact to float32."""
        b = self.b
        n = self.call("rint", b.fmul(y, self.all(1 / math.log(2))))
        coarse = 355 / 512  # ln 2 in nine bits: its product with n is exact
        t = self.call("fma", n, self.all(-coarse), y)
        t = self.call("fma", n, self.all(coarse - math.log(2)), t)
        power = b.shl(b.add(b.fptosi(n, self._ints), self._all_of(self._int, 127)), self._all_of(self._int, 23))
        return b.fmul(self.series(t, _EXP_TERMS, 0), b.bitcast(power, self._floats))

    def series(self, t: Any, terms: int, first: int) -> Any:
        """Σ t^k / (k + first)! for k below `terms`."""
        found = self.all(1 / math.factorial(first + terms - 1))
        for order in reversed(range(first, first + terms - 1)):
            found = self.call("fma", found, t, self.all(1 / math.factorial(order)))
        return found

    def larger(self, one: Any, other: Any) -> Any:
        """The larger in each lane, the other where one is not a number."""
        return self.b.select(self.b.fcmp_ordered(">", one, other), one, other)

    def smaller(self, one: Any, other: Any) -> Any:
        """The smaller in each lane, the other where one is not a number."""
        return self.b.select(self.b.fcmp_ordered("<", one, other), one, other)

    def any_of(self, lanes: Any) -> Any:
        """Whether a condition is true in one lane at least."""
        bits = self.ir.IntType(LANES)
        return self.b.icmp_unsigned("!=", self.b.bitcast(lanes, bits), self.ir.Constant(bits, 0))

    def call(self, name: str, *values: Any) -> Any:
        """An operation that LLVM has under a name."""
        kind = self.ir.FunctionType(self._floats, [self._floats] * len(values))
        return self.b.call(self._function(f"llvm.{name}.v{LANES}f32", kind), values)

    def largest_lane(self, vector: Any) -> Any:
        """The largest of all lanes, in all lanes."""
        kind = self.ir.FunctionType(self._float, [self._floats])
        return self.spread(self.b.call(self._function(f"llvm.vector.reduce.fmax.v{LANES}f32", kind), [vector]))

    def all(self, value: float) -> Any:
        """A vector with a constant in all lanes."""
        return self._all_of(self._float, value)

    def spread(self, scalar: Any) -> Any:
        """A vector with one value in all lanes."""
        kind, zero = self.ir.VectorType(scalar.type, LANES), self.ir.Constant(self._int, 0)
        undefined = self.ir.Constant(kind, self.ir.Undefined)
        one = self.b.insert_element(undefined, scalar, zero)
        return self.b.shuffle_vector(one, undefined, self.ir.Constant(self._ints, None))

    # -- memory --------------------------------------------------------------------------------------------------------

    def variable(self, kind: Any = None) -> Any:
        """Where a value is kept: a vector, if nothing else is said."""
        with self.b.goto_entry_block():
            return self.b.alloca(self._floats if kind is None else kind)

    def index(self, value: int) -> Any:
        return self.ir.Constant(self._index, value)

    def row_of(self, array: Any, row: Any, stride: Any, dtype: torch.dtype) -> Any:
        """Where a row of an array begins, the next of which is `stride` values later."""
        return self.b.gep(self.b.bitcast(array, self._scalar_of(dtype).as_pointer()), [self.b.mul(row, stride)])

    def of_row(self, array: Any, row: Any) -> Any:
        """A row's value of a float32 array [rows], in all lanes."""
        return self.spread(self.b.load(self.row_of(array, row, self.index(1), torch.float32)))

    def _load(self, row: Any, at: Any, dtype: torch.dtype) -> Any:
        """`LANES` values of a row from number `at`."""
        place = self.b.gep(row, [at])
        self._prefetch(place)
        vector = self.b.bitcast(place, self._vector_of(dtype).as_pointer())
        return self._widened(self.b.load(vector, align=dtype.itemsize), dtype)

    def _prefetch(self, place: Any) -> None:
        """Have what comes `_AHEAD` bytes later brought into the cache. Processors do it by themselves, but not from one page of
        memory to the next, and from two arrays of two dtypes late: it halves the time.
        """
        b, byte = self.b, self.ir.IntType(8).as_pointer()
        kind = self.ir.FunctionType(self.ir.VoidType(), [byte, *[self._int] * 3])
        later = b.gep(b.bitcast(place, byte), [self.index(_AHEAD)])
        how = (self.ir.Constant(self._int, each) for each in (0, 3, 1))  # read, keep, data
        b.call(self._function("llvm.prefetch.p0", kind), [later, *how])

    def _widened(self, values: Any, dtype: torch.dtype) -> Any:
        if dtype == torch.float32:
            return values
        if dtype == torch.float16:
            return self.b.fpext(values, self._floats)
        upper = self.b.shl(self.b.zext(values, self._ints), self._all_of(self._int, 16))
        return self.b.bitcast(upper, self._floats)

    def _scalar_of(self, dtype: torch.dtype) -> Any:
        """What LLVM loads: bfloat16 as its bits."""
        return {torch.float32: self._float, torch.float16: self.ir.HalfType()}.get(dtype, self.ir.IntType(16))

    def _vector_of(self, dtype: torch.dtype) -> Any:
        return self.ir.VectorType(self._scalar_of(dtype), LANES)

    def _function(self, name: str, kind: Any) -> Any:
        return self._module.globals.get(name) or self.ir.Function(self._module, kind, name)

    def _all_of(self, kind: Any, value: float) -> Any:
        return self.ir.Constant(self.ir.VectorType(kind, LANES), [self.ir.Constant(kind, value)] * LANES)

    def _lanes(self) -> Any:
        return self.ir.Constant(self._ints, list(range(LANES)))


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
    try:
        features = dict(binding.get_host_cpu_features())
    except RuntimeError:  # LLVM does not know them: those that every processor of this name has are taken
        features = {}
    triple = binding.get_default_triple()
    if not triple.startswith(("aarch64", "arm64")):
        if not all(features.get(name) for name in ("avx2", "fma", "f16c")):
            return None
        features["prefer-256-bit"] = False
    told = ",".join(f"{'+' if there else '-'}{name}" for name, there in features.items())
    return binding.Target.from_triple(triple).create_target_machine(
        cpu=binding.get_host_cpu_name(), features=told, opt=2
    )


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

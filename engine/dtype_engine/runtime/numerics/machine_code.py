"""Code that goes over rows of outputs on the CPU, written with llvmlite; `row_function` makes it machine code.

torch has no operations that take several sums at once. With those that it has, what `row_kernel` does takes four times as long, and
next to another program that computes twenty times and more: torch's threads wait for each other after every operation.

`LANES` values are worked on at a time. A sum of each lane is in float32 over `_BLOCK` values, then in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

LANES = 16
FEWEST_VALUES = 4096
"""Of fewer values in a row the roundings of float32 do not even out."""
SMALLEST_EXPONENT = -87.0
"""e^y is the smallest normal float32 or so, and less counts for nothing."""
_BLOCK = 2048
_AHEAD = 2048
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Those that it reads."""
_EXP_TERMS = 8
"""Terms of Taylor's series of e^t for |t| <= ln 2 / 2; those left out are below 2^-24."""
_ROWS, TEAM = "rows", "team"

Take = Callable[[list[Any], Any, Any], None]


class Code:
    """A function in LLVM's language, as it is written: of arrays that are `read`, `sizes`, arrays that are `written`, and rows from
    `first` to before `end`. `b` writes the next instruction; vectors are of float32, `LANES` long.
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
        kinds = [*[array] * read, *[self._index] * sizes, *[array] * written, self._index, self._index]
        self._rows = self.ir.Function(self._module, ir.FunctionType(ir.VoidType(), kinds), _ROWS)
        self._rows.linkage = "internal"
        *given, self.first, self.end = self._rows.args
        self.read, self.sizes, self.written = given[:read], given[read : read + sizes], given[read + sizes :]
        self.b = ir.IRBuilder(self._rows.append_basic_block())
        self._totals: dict[str, tuple[Any, Any]] = {}

    def finish(self) -> str:
        """All of it, and a function for every thread of a team: of an array of the number of the next block of rows, the rows of a
        block, all rows, and what the first function is given. It takes blocks as long as there are any.
        """
        self.b.ret_void()
        array = self.ir.IntType(8).as_pointer()
        team = self.ir.Function(self._module, self.ir.FunctionType(self.ir.VoidType(), [array]), TEAM)
        b = self.b = self.ir.IRBuilder(team.append_basic_block())
        task = b.bitcast(team.args[0], self._index.as_pointer())
        block, count, *given = (b.load(b.gep(task, [self.index(1 + number)])) for number in range(len(self._rows.args)))
        given = [
            b.inttoptr(each, wanted.type) if wanted.type == array else each
            for each, wanted in zip(given, self._rows.args, strict=False)
        ]
        head, body, after = (team.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        first = b.mul(b.atomic_rmw("add", task, self.index(1), "monotonic"), block)
        b.cbranch(b.icmp_signed("<", first, count), body, after)
        b.position_at_end(body)
        last = b.add(first, block)
        b.call(self._rows, [*given, first, b.select(b.icmp_signed("<", last, count), last, count)])
        b.branch(head)
        b.position_at_end(after)
        b.ret_void()
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
        """Write the sums of a row to a float64 array [rows, sums]."""
        for number, (total, _) in enumerate(self._totals.values()):
            kind = self.ir.FunctionType(self._double, [self._double, self._doubles])
            add = self._function(f"llvm.vector.reduce.fadd.v{LANES}f64", kind)
            value = self.b.call(add, [self.ir.Constant(self._double, -0.0), self.b.load(total)])
            self._keep(value, into, row, len(self._totals), number)

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
        """Write the largest value of a row to a float32 array, and where it is in the row first to an int32 one, [rows] both."""
        b = self.b
        lanes, place = b.load(found[0]), b.add(b.load(found[1]), self._lanes())
        largest = self.largest_lane(lanes)
        place = b.select(b.fcmp_ordered("==", lanes, largest), place, self._all_of(self._int, 2**31 - 1))
        kind = self.ir.FunctionType(self._int, [self._ints])
        first = b.call(self._function(f"llvm.vector.reduce.smin.v{LANES}i32", kind), [place])
        self._keep(self._lane(largest), values, row, 1, 0)
        self._keep(first, places, row, 1, 0)

    def keep_largest_lane(self, vector: Any, row: Any, into: Any) -> None:
        """Write the largest of all lanes to a float32 array [rows]."""
        self._keep(self._lane(self.largest_lane(vector)), into, row, 1, 0)

    def _lane(self, vector: Any) -> Any:
        """The first one."""
        return self.b.extract_element(vector, self.ir.Constant(self._int, 0))

    def _keep(self, value: Any, array: Any, row: Any, of_row: int, number: int) -> None:
        b = self.b
        cells = b.bitcast(array, value.type.as_pointer())
        b.store(value, b.gep(cells, [b.add(b.mul(row, self.index(of_row)), self.index(number))]))

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

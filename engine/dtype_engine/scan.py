"""The scan: how much every weight matters in every dtype, from a few backward passes.

KL divergence is, to second order, half the square of the change of the logits weighed by their Fisher information
F = diag(p) - ppᵀ, p the reference's softmax. For each sequence, directions v = (diag(√p) - p√pᵀ) ξ are drawn at the logits, ξ
random signs, so that E[vvᵀ] = F, and carried back: g is the gradient of v·logits with respect to a weighted operation's
output. Its product with the local error Δ of running just that operation in a candidate dtype, summed over the sequence and
over all uses of the weight, is squared: ½ E[(Σ g·Δ)²] is the KL divergence. (Labels drawn from p give the same mean, since
their log-likelihood has the same Fisher information; where p is nearly certain it hangs on the few unlikely ones.) Where the
output is no distribution, v is drawn from a Gaussian, and E[(Σ g·Δ)²] over the output's energy is the relative squared error.

Sequences go by one at a time; after each there is an estimate with its standard error. Local errors are computed inside the
backward pass, one operation's at a time, and nothing of them is kept but their products with the gradients.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from . import dtypes
from .drift import is_distribution
from .errors import Cancelled, NoForward, UserError
from .forward import Passes, main_output, reference_name
from .inputs import Batch, Inputs
from .model.live import LiveModel, Weight
from .options import RunSettings
from .readings import NATS, NATS_PER_EXAMPLE, SQUARED, ScanReport, WeightScore
from .recipe import tensor_bytes
from .storage import torch_dtype
from .weighted import LocalErrors, Operation, WeightedOperations

DEFAULT_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
FEWEST_DRAWS, SAMPLES = 4, 24
_VERSION = 1
_SAMPLED = 1024

OnProgress = Callable[[str, int, int | None], None]
OnEstimate = Callable[[ScanReport], None]


def default_draws(sequences: int) -> int:
    """Backward passes a sequence: enough for `SAMPLES` over all of them, an error of about 15 % for six dtypes."""
    return max(FEWEST_DRAWS, math.ceil(SAMPLES / max(1, sequences)))


def scanned_dtypes(weight: Weight, asked: Sequence[str]) -> tuple[str, ...]:
    """The dtypes in which a weight is scored: those asked for, and its own, since the reference computes in float32."""
    return tuple(dict.fromkeys((weight.info.dtype, *asked)))


def is_free(stored: str, dtype: str) -> bool:
    """Whether a weight costs nothing in `dtype`: it computes as the reference does, or wider."""
    reference = "float64" if stored == "float64" else "float32"
    return dtype in dtypes.COMPUTED and dtypes.BY_NAME[dtype].bits >= dtypes.BY_NAME[reference].bits


@dataclass(frozen=True)
class Fingerprint:
    """What a saved scan was made of."""

    model: str
    inputs: str
    dtypes: tuple[str, ...]
    settings: str

    @classmethod
    def of(cls, model: LiveModel, inputs: Inputs, asked: Sequence[str], settings: RunSettings) -> Fingerprint:
        """Names, shapes and a sample of the values of every weight; every input."""
        weights, calls = hashlib.sha256(), hashlib.sha256()
        for name, weight in model.weights.items():
            weights.update(f"{name} {weight.info.shape} {weight.info.dtype}\n".encode())
            flat = weight.original.reshape(-1)
            _digest(flat[:: max(1, flat.numel() // _SAMPLED)], weights)
        for batch in inputs.batches:
            _digest((batch.args, batch.kwargs), calls)
        return cls(weights.hexdigest(), calls.hexdigest(), tuple(asked), str(settings))


def _digest(value: Any, into: Any) -> None:
    """Add a value, and the tensors in it, to a hash."""
    if isinstance(value, torch.Tensor):
        into.update(f"{value.dtype} {tuple(value.shape)}".encode())
        into.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            into.update(str(key).encode())
            _digest(value[key], into)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _digest(item, into)
    else:
        into.update(repr(value).encode())


@dataclass
class OneSequence:
    """What one sequence gave: its mass (positions, or energy of the output) and, by weight and dtype, the sum over its
    positions with the standard error of that sum over draws; and the same sum if the errors of an operation's output
    elements were independent, Σ g²Δ², which varies far less from draw to draw."""

    mass: float
    sums: dict[tuple[str, str], float]
    independent: dict[tuple[str, str], float] = field(default_factory=dict)
    errors: dict[tuple[str, str], float] = field(default_factory=dict)
    complete: bool = False


@dataclass
class Scan:
    """A scan under way, or finished. `run` goes on from where it is.

    draws: backward passes a sequence, None for `default_draws`. room: bytes for gradients and cast weights; by default a
    quarter of the memory that was free. save: a file that is written after every sequence, and read at the start.
    """

    model: LiveModel
    inputs: Inputs
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    settings: RunSettings = field(default_factory=RunSettings)
    draws: int | None = None
    room: int = field(default_factory=lambda: psutil.virtual_memory().available // 4)
    save: Path | None = None
    done: list[OneSequence] = field(default_factory=list)
    unit: str = ""
    forward_seconds: float = 0.0
    scan_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.backward_passes = self.draws or default_draws(len(self.inputs.batches))
        self.fingerprint = Fingerprint.of(self.model, self.inputs, self.dtypes, self.settings)
        self.wanted = {
            name: scanned_dtypes(weight, self.dtypes)
            for name, weight in self.model.weights.items()
            if weight.info.castable and weight.info.persistent
        }
        self._copies: dict[int, frozenset[int]] = {}
        self._operations = 0
        if self.save is not None and self.save.exists():
            self._resume(self.save)

    @property
    def finished(self) -> bool:
        """Whether every sequence has gone by."""
        return len(self.done) == len(self.inputs.batches)

    def run(
        self,
        on_progress: OnProgress = lambda what, done, total: None,
        on_estimate: OnEstimate = lambda report: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> ScanReport:
        """Let the remaining sequences go by. `on_progress` hears (what, operations done, of how many, None while unknown),
        `on_estimate` the report after every sequence.

        Raises NoForward, KernelError, and Cancelled: what is done is kept, and `run` goes on after it.
        """
        settings = RunSettings(compute=self.settings.compute)
        local = LocalErrors(self.model.weights, torch_dtype(settings.compute), self.model.device, self.room // 2)
        with Passes(self.model, settings, cancelled, watch=False) as passes:
            for index in range(len(self.done), len(self.inputs.batches)):
                batch = passes.reference_batch(self.inputs.batches[index])
                started = time.perf_counter()
                _, seconds = passes.as_reference(lambda batch=batch: self.model.module(*batch.args, **batch.kwargs))  # type: ignore[misc]
                one = _UnderWay(self, local, on_progress, cancelled)
                self.done.append(one.run(batch, index))
                self.unit, self._operations = one.unit, one.operations
                self.forward_seconds += seconds
                self.scan_seconds += time.perf_counter() - started
                if self.save is not None:
                    self._write(self.save)
                on_estimate(self.report())
        return self.report()

    def report(self) -> ScanReport:
        """The estimate so far."""
        if not self.done:
            raise UserError("the scan has no estimate yet: no sequence has gone by")
        found = self._scores()
        return ScanReport(
            model=self.model.title,
            device=str(self.model.device),
            reference=reference_name(self.model),
            inputs=self.inputs.description,
            unit=self.unit,
            exact=False,
            draws=self.backward_passes,
            sequences=len(self.done),
            all_sequences=len(self.inputs.batches),
            dtypes=self.dtypes,
            forward_seconds=self.forward_seconds,
            scan_seconds=self.scan_seconds,
            weights=tuple(
                WeightScore(name, dtype, tensor_bytes(self.model.weights[name].info, dtype), *found[name, dtype])
                for name, asked in self.wanted.items()
                for dtype in asked
            ),
            notices=self.model.notices,
        )

    def _scores(self) -> dict[tuple[str, str], tuple[float, float | None]]:
        """Every score and its standard error. Sampled ones are drawn towards what the weight's dtypes have in common.

        A sample (Σ g·Δ)² has a relative standard error of √2, and that is independent from dtype to dtype while its
        ratio to Σ g²Δ², how much an operation's errors reinforce each other, is nearly the same. So each ratio is
        moved to the mean of its weight's, as far as the spread between dtypes is not more than sampling explains.
        """
        found = {(name, dtype): self._score((name, dtype)) for name, asked in self.wanted.items() for dtype in asked}
        if all(sequence.complete for sequence in self.done):
            return found
        variance = 2.0 / (self.backward_passes * sum(not sequence.complete for sequence in self.done))
        groups: list[dict[tuple[str, str], float]] = []
        for name, asked in self.wanted.items():
            ratios = {}
            for dtype in asked:
                key = (name, dtype)
                apart = math.fsum(sequence.independent.get(key, 0.0) for sequence in self.done)
                whole = math.fsum(sequence.sums.get(key, 0.0) for sequence in self.done)
                if 0 < apart < math.inf and math.isfinite(whole):
                    ratios[key] = whole / apart
            if len(ratios) > 1:
                groups.append(ratios)
        # The variance of the ratios within a weight, relative to its mean, beyond that of the sampling.
        spreads = [statistics.variance(ratios.values()) / statistics.fmean(ratios.values()) ** 2 for ratios in groups]
        beyond = max(0.0, statistics.median(spreads) - variance) if spreads else 0.0
        own = beyond / (beyond + variance)
        for ratios in groups:
            mean = statistics.fmean(ratios.values())
            for key, ratio in ratios.items():
                score, error = found[key]
                if ratio > 0:
                    found[key] = (
                        score * (own + (1 - own) * mean / ratio),
                        None if error is None else error * math.sqrt(own + (1 - own) / len(ratios)),
                    )
        return found

    def _score(self, key: tuple[str, str]) -> tuple[float, float | None]:
        """Sum over mass of all sequences, and its standard error: that of a ratio estimator."""
        if is_free(self.model.weights[key[0]].info.dtype, key[1]):
            return 0.0, 0.0
        sums = [sequence.sums.get(key, 0.0) for sequence in self.done]
        masses = [sequence.mass for sequence in self.done]
        mass, count = sum(masses), len(sums)
        score = sum(sums) / mass if mass else math.inf
        if not math.isfinite(score):
            return math.inf, None
        if count == 1:
            error = self.done[0].errors.get(key)
            return score, error / mass if error is not None and mass else None
        spread = sum((part - score * share) ** 2 for part, share in zip(sums, masses, strict=True))
        return score, math.sqrt(count / (count - 1) * spread) / mass

    def _write(self, path: Path) -> None:
        """Save what is done, whole or not at all."""
        places = [(name, dtype) for name, asked in self.wanted.items() for dtype in asked]
        data = {
            "version": _VERSION,
            "fingerprint": asdict(self.fingerprint),
            "draws": self.backward_passes,
            "unit": self.unit,
            "forward_seconds": self.forward_seconds,
            "scan_seconds": self.scan_seconds,
            "weights": [list(place) for place in places],
            "sequences": [
                {
                    "mass": sequence.mass,
                    "sums": [sequence.sums.get(place, 0.0) for place in places],
                    "independent": [sequence.independent.get(place, 0.0) for place in places],
                    "complete": sequence.complete,
                    "errors": [sequence.errors.get(place) for place in places],
                }
                for sequence in self.done
            ],
        }
        beside = path.with_name(path.name + ".part")
        try:
            beside.write_text(json.dumps(data), encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            raise UserError(f"can't save the scan to {path}: {error.strerror}") from None

    def _resume(self, path: Path) -> None:
        """Take over what a saved scan has. Raises UserError when it is of another model, other inputs or dtypes."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            saved = data["fingerprint"] | {"dtypes": tuple(data["fingerprint"]["dtypes"])}
            places = [(str(name), str(dtype)) for name, dtype in data["weights"]]
            done = [
                OneSequence(
                    float(entry["mass"]),
                    dict(zip(places, map(float, entry["sums"]), strict=True)),
                    dict(zip(places, map(float, entry["independent"]), strict=True)),
                    {place: error for place, error in zip(places, entry["errors"], strict=True) if error is not None},
                    bool(entry["complete"]),
                )
                for entry in data["sequences"]
            ]
            times = float(data["forward_seconds"]), float(data["scan_seconds"])
            unit, draws, version = str(data["unit"]), int(data["draws"]), data["version"]
        except OSError as error:
            raise UserError(f"can't read the saved scan {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is not a saved scan; remove it or give another file") from None
        if version != _VERSION:
            raise UserError(f"{path}: saved scan version {version!r} is unknown; this program reads version {_VERSION}")
        differing = [key for key, value in asdict(self.fingerprint).items() if saved.get(key) != value]
        if self.draws is not None and draws != self.draws:
            differing.append("number of draws")
        if differing:
            raise UserError(
                f"the saved scan {path} was made with another {' and '.join(differing)}; remove it or give another file"
            )
        self.done, self.unit, self.backward_passes = done, unit, draws
        self.forward_seconds, self.scan_seconds = times


class _UnderWay:
    """One sequence of a scan: the pass with a graph, the backward passes, and the sums of g·Δ."""

    def __init__(self, scan: Scan, local: LocalErrors, on_progress: OnProgress, cancelled: Callable[[], bool]) -> None:
        self.scan = scan
        self.local = local
        self.on_progress = on_progress
        self.cancelled = cancelled
        self.unit = ""
        self.operations = 0
        self._sums: dict[tuple[str, str], torch.Tensor] = {}
        self._independent: dict[tuple[str, str], float] = {}
        self._last = False
        self._from = 0
        self._measured = 0

    def run(self, batch: Batch, index: int) -> OneSequence:
        output, operations = self._forward(batch, index)
        self.operations = len(operations)
        name, main = main_output(output)
        if not main.requires_grad:
            raise NoForward("the output does not depend on any weight through operations that have a gradient")
        distribution = is_distribution(name, main)
        drawn = _Directions(main.detach(), distribution, self.scan.backward_passes, seed=index)
        self.unit = (NATS if main.ndim > 2 else NATS_PER_EXAMPLE) if distribution else SQUARED
        self._backward(main, drawn, operations)
        half = 0.5 if distribution else 1.0
        sums: dict[tuple[str, str], float] = {}
        errors: dict[tuple[str, str], float] = {}
        for key, products in self._sums.items():
            squares = [half * product * product for product in products.tolist()]
            whole = math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf
            sums[key] = whole if drawn.complete else whole / len(squares)
            if not drawn.complete and len(squares) > 1 and math.isfinite(whole):
                errors[key] = math.sqrt(
                    sum((square - sums[key]) ** 2 for square in squares) / (len(squares) - 1) / len(squares)
                )
        independent = {key: half * value for key, value in self._independent.items()}
        return OneSequence(drawn.mass, sums, independent, errors, drawn.complete)

    def _forward(self, batch: Batch, index: int) -> tuple[Any, list[Operation]]:
        """Run the reference with a graph; once more when an operation's tensors were written to after it."""
        copies = self.scan._copies.get(index, frozenset())
        while True:
            mode = WeightedOperations(
                self.scan.model.by_id, self.scan.model.device, frozenset(self.scan.wanted), self._heard, copies
            )
            try:
                with torch.enable_grad(), mode:
                    output = self.scan.model.module(*batch.args, **batch.kwargs)
            except (Cancelled, UserError):
                raise
            except Exception as error:
                text = " ".join(str(error).split())[:300]
                raise NoForward(f"the scan's forward pass failed: {type(error).__name__}: {text}") from error
            overwritten = mode.overwritten
            if not overwritten:
                return output, mode.operations
            copies = self.scan._copies[index] = copies | overwritten

    def _backward(self, main: torch.Tensor, drawn: _Directions, operations: list[Operation]) -> None:
        held = sum(output.nbytes for operation in operations for output in operation.outputs)
        group = max(1, min(drawn.count, 1 + self.scan.room // 2 // max(1, held)))
        for place, direction in enumerate(drawn):
            self._last = place % group == group - 1 or place == drawn.count - 1
            if place % group == 0:
                self._from, self._count = place, drawn.count
            try:
                torch.autograd.backward(main, direction, retain_graph=place < drawn.count - 1)
            except (Cancelled, UserError):
                raise
            except (RuntimeError, NotImplementedError) as error:
                text = " ".join(str(error).split())[:300]
                raise NoForward(f"the scan's backward pass failed: {text}") from error
            if self._last:
                for operation in operations:
                    if any(operation.gradients):
                        self._measure(operation)

    def _heard(self, operation: Operation, index: int, gradient: torch.Tensor) -> None:
        operation.gradients[index].append(gradient.detach().reshape(-1))
        if self._last and len(operation.outputs) == 1:
            self._measure(operation)

    def _measure(self, operation: Operation) -> None:
        """Products of an operation's local errors with the gradients heard; these are forgotten."""
        if self.cancelled():
            raise Cancelled
        gradients = [torch.stack(heard) if heard else None for heard in operation.gradients]
        for heard in operation.gradients:
            heard.clear()
        squares = [None if gradient is None else gradient.square().sum(0) for gradient in gradients]
        for weight in operation.weights:
            stored = self.scan.model.weights[weight].info.dtype
            costly = [dtype for dtype in self.scan.wanted.get(weight, ()) if not is_free(stored, dtype)]
            errors = [self.local.of(operation, weight, dtype) for dtype in costly]
            for place, (gradient, square) in enumerate(zip(gradients, squares, strict=True)):
                if gradient is None or square is None or not costly:
                    continue
                deltas = torch.stack([error[place].reshape(-1) for error in errors]).to(gradient.dtype)
                products = torch.mm(deltas, gradient.T).double().cpu()
                apart = torch.mv(deltas.square_(), square).tolist()
                for row, dtype in enumerate(costly):
                    self._add((weight, dtype), products[row], apart[row] / self._count)
        self._measured += 1
        done = len(self.scan.done) * self.operations + self._measured
        self.on_progress("scan", done, self.operations * len(self.scan.inputs.batches))

    def _add(self, key: tuple[str, str], products: torch.Tensor, apart: float) -> None:
        if key not in self._sums:
            self._sums[key] = torch.zeros(self._count, dtype=torch.float64)
        self._independent[key] = self._independent.get(key, 0.0) + apart
        self._sums[key][self._from : self._from + len(products)] += products


class _Directions:
    """Gradients at the main output whose mean outer product is what the drift's second order weighs errors by.

    For a distribution of C classes over P positions that is the Fisher information of the softmax, for any other output
    the identity. `mass` is what sums are divided by: positions, or the output's energy. Where few directions span it
    they are all taken, and the result is exact (`complete`): their outer products then sum up to it.
    """

    def __init__(self, output: torch.Tensor, distribution: bool, draws: int, seed: int) -> None:
        self.output = output
        self.generator = torch.Generator(device="cpu").manual_seed(seed)
        self.distribution = distribution
        rows = output.reshape(-1, output.shape[-1]) if distribution else output.reshape(1, -1)
        rank = len(rows) * (rows.shape[1] - 1) if distribution else rows.shape[1]
        self.complete = rank <= draws
        self.count = max(1, rank) if self.complete else draws
        self.mass = float(len(rows)) if distribution else float(output.double().square().sum())
        self._rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in self._spanning() if self.complete else self._drawn():
            yield row.reshape(self.output.shape).to(self.output)

    def _drawn(self) -> Iterator[torch.Tensor]:
        if not self.distribution:
            for _ in range(self.count):
                yield torch.randn(self._rows.shape, generator=self.generator)
            return
        p = torch.softmax(self._rows.float(), -1)
        root = p.sqrt()
        for _ in range(self.count):
            signs = torch.empty(p.shape).bernoulli_(0.5, generator=self.generator).mul_(2).sub_(1)
            part = root * signs.to(p.device)
            yield part - p * part.sum(-1, keepdim=True)

    def _spanning(self) -> Iterator[torch.Tensor]:
        if not self.distribution:
            yield from torch.eye(self._rows.shape[1])
            return
        p = torch.softmax(self._rows.double(), -1)
        for position, row in enumerate(p):
            values, vectors = torch.linalg.eigh(torch.diag(row) - row[:, None] * row)
            for value, vector in zip(values[1:], vectors.T[1:], strict=True):
                direction = torch.zeros_like(p)
                direction[position] = value.clamp(min=0).sqrt() * vector
                yield direction

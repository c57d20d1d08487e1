"""Collects the results of a running measurement, sequence by sequence, and computes metrics from them on request."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from dtype_engine.core.errors import UserError
from dtype_engine.core.number_ranges import Amount, Count, Dimension, Dimensions, Positive
from dtype_engine.core.units import plural
from dtype_engine.results.drift import NATS, Extent, ModuleDrift, OutputDrift, PartialDrift, Seconds, unit_for
from dtype_engine.results.pictures import MOST_PICTURES, PicturePair
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.measure.embeddings import Embedding, neighbors_notice
from dtype_engine.runtime.measure.modules.module_sums import ModuleSums
from dtype_engine.runtime.measure.sampling_error import batch_means_error, relative_error
from dtype_engine.runtime.numerics.compare.element_sums import ElementSums
from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics
from dtype_engine.runtime.numerics.compare.pictures import small_picture
from dtype_engine.runtime.numerics.compare.sequence_figures import PositionFigures, SequenceFigures
from dtype_engine.runtime.passes.kept_positions import AttendedPositions
from dtype_engine.runtime.passes.one_pass import PassResult


@dataclass(slots=True)
class ReferenceRecord:
    """The outputs of the reference run for one sequence, with which the candidate's outputs are compared."""

    output_name: str
    output: torch.Tensor
    seconds: float
    attended: AttendedPositions
    """The padding masks that the model passed to torch's attention modules (`nn.MultiheadAttention`)."""
    modules: dict[tuple[str, int], torch.Tensor] | None
    """Outputs by (module, number of its call), or None if modules are not compared. A module's output may be `output` itself."""
    left_out: frozenset[str] = frozenset()
    """The names of modules with an output that was not recorded, because it did not fit into memory."""
    choices: Mapping[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    """The experts that routers chose, as integers, by (name of the router, number of its call)."""
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        held = (self.output, *(self.modules or {}).values(), *self.choices.values())
        self.nbytes = sum({id(tensor): tensor.nbytes for tensor in held}.values())


class SavedVectors(msgspec.Struct):
    """The vectors of a sequence's inputs by the reference and by the candidate, as float32 in the machine's byte order."""

    width: Positive
    reference: bytes
    candidate: bytes

    @property
    def fits(self) -> bool:
        """Whether both sides have equally many whole vectors, at least one."""
        return (
            bool(self.reference)
            and len(self.reference) == len(self.candidate)
            and not len(self.reference) % (4 * self.width)
        )

    @classmethod
    def of(cls, vectors: tuple[torch.Tensor, torch.Tensor]) -> SavedVectors:
        return cls(vectors[0].shape[1], *(each.contiguous().numpy().tobytes() for each in vectors))

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the vectors of both sides, float32 [inputs, width]."""
        reference, candidate = (
            torch.frombuffer(bytearray(each), dtype=torch.float32).reshape(-1, self.width)
            for each in (self.reference, self.candidate)
        )
        return reference, candidate


class SavedSequence(msgspec.Struct):
    """The results of one sequence, as they are written to a file. `SequenceFigures` describes the fields."""

    number: Count
    """The index of the sequence among the inputs."""
    rows: Count
    left_out: Count
    sums: ElementSums
    positions: tuple[list[float], list[bool], list[float], list[float]] | None
    """The fields `kl`, `same_top`, `log_p` and `log_q` of `PositionFigures` as lists, or None if the output is no distribution."""
    modules: dict[str, ModuleSums] | None
    confidence: list[float] | None = None
    """As in `PositionFigures`, one number for each position. Missing in files of older versions, as is the next field."""
    position: list[Positive] | None = None
    accepted: list[float] | None = None
    """As in `PositionFigures`, if the acceptance was asked for."""
    vectors: SavedVectors | None = None

    def fits(self, classes_dim: int | None, acceptance: bool) -> bool:
        """Return whether there are figures of as many positions as there are rows, and only if the output is a distribution.
        acceptance: whether there must be an acceptance at each position.
        """
        if self.vectors is not None and not self.vectors.fits:
            return False
        further = {len(values) for values in (self.confidence, self.position, self.accepted) if values is not None}
        if self.positions is None:
            return classes_dim is None and not further
        kl, same, log_p, log_q = (len(values) for values in self.positions)
        whole = {self.rows} == {kl, same} | further and log_p == log_q
        return classes_dim is not None and whole and acceptance == (self.accepted is not None)


class SavedTotals(msgspec.Struct):
    """The content of a `RunningTotals`, as it is written to a file, without pictures."""

    output_name: str
    dimensions: Dimensions
    """The number of dimensions of the output."""
    classes_dim: Dimension | None
    seconds: tuple[Amount, Amount]
    """The durations of all reference runs and of all candidate runs, in seconds."""
    modules_left_out: list[str]
    left_wide: list[str]
    sequences: list[SavedSequence]
    unseen: list[str] = []
    acceptance: bool = False
    """Whether the acceptance of distributions is computed."""


class RunningTotals:
    """The results of the sequences that a measurement has run so far. Metrics do not depend on the order of the sequences.

    output_name, output: the name of the main output, and its value for the first sequence. comparison: what compares the main
    outputs, without sequences. total: the number of all sequences. routed: whether the model routes tokens to experts. If so, no
    sampling error is given before all sequences are done (`sampling_error`). embedding: how `comparison` makes vectors of inputs.
    """

    def __init__(
        self,
        output_name: str,
        output: torch.Tensor,
        comparison: OutputMetrics,
        total: int,
        routed: bool = False,
        embedding: Embedding | None = None,
    ) -> None:
        self.output_name = output_name
        self.dimensions = output.ndim
        """The number of dimensions of the main output: 3 if each token has a distribution, 2 if each example has one."""
        self.numbers: list[int] = []
        """The indexes, among the inputs, of the sequences that were added, in the order in which they were added."""
        self._total = total
        self._routed = routed
        self._comparison = comparison
        self._embedding = embedding
        if embedding is not None and not embedding.why_not:
            comparison.vectors_of = embedding.vectors
        self._pictures: dict[int, PicturePair] = {}
        self._kl_means: list[float] = []
        self._kl_within = 0.0
        self._modules: dict[int, dict[str, ModuleSums]] = {}
        self._left_out: set[str] = set()
        self._left_wide: set[str] = set()
        self._unseen: set[str] | None = None
        self._reference_seconds = 0.0
        self._candidate_seconds = 0.0
        self._reused = False

    def add(
        self,
        number: int,
        batch: Batch,
        reference: ReferenceRecord,
        ran: PassResult[Any],
        output: torch.Tensor,
        kept: torch.Tensor | None = None,
    ) -> None:
        """Add the results of one sequence, except those of its modules, which `set_modules` adds. If the sequence was added before,
        its main output is not added again.

        number: the index of the sequence among the inputs. ran, output: the candidate's pass, and its main output. kept: a mask of
        the positions to compare, bool [batch, positions]; if None, all.
        """
        self._left_wide |= ran.left_wide
        self._left_out |= reference.left_out
        self._unseen = set(ran.unseen) if self._unseen is None else self._unseen & ran.unseen
        if number in self.numbers:
            return
        self._comparison.add(reference.output, output, batch.next_tokens, number, kept)
        self._refuse_other_width(number)
        self._count(number)
        if self._comparison.picture_range is not None and output.ndim >= 4 and number < MOST_PICTURES:
            low, high = self._comparison.picture_range
            self._pictures[number] = PicturePair(
                *(small_picture(each, low, high) for each in (reference.output, output))
            )
        self._reference_seconds += reference.seconds
        self._candidate_seconds += ran.seconds
        self._reused = self._reused or ran.reused

    def _refuse_other_width(self, number: int) -> None:
        """Raise UserError if the vectors of a sequence have another width than those that were saved, which somebody changed."""
        vectors = [self._comparison.sequences[each].vectors for each in (*self.numbers[:1], number)]
        if len({of_both[0].shape[1] for of_both in vectors if of_both is not None}) > 1:
            raise UserError(
                "the saved drift has vectors of another width than the model's; remove it or give another file"
            )

    def add_figures(self, number: int, figures: SequenceFigures) -> None:
        """Add the figures of one sequence that was not added before. number: its index among the inputs."""
        self._comparison.sequences[number] = figures
        self._count(number)

    def _count(self, number: int) -> None:
        self.numbers.append(number)
        positions = self._comparison.sequences[number].positions
        if positions is not None:
            self._kl_within = self._kl_within if self._kl_means else batch_means_error(positions.kl)
            self._kl_means.append(float(positions.kl.mean()))

    def has(self, number: int, with_modules: bool) -> bool:
        """Return whether the results of a sequence were added. with_modules: whether those of its modules are needed, too."""
        return number in self.numbers and (not with_modules or number in self._modules)

    def saved(self) -> SavedTotals:
        """Return the results so far as plain data. `restored` makes equal totals from them."""
        sequences = []
        for number in self.numbers:
            one, modules = self._comparison.sequences[number], self._modules.get(number)
            row = SavedSequence(number, one.rows, one.left_out, one.sums, None, modules)
            if (at := one.positions) is not None:
                row.positions = at.kl.tolist(), at.same_top.tolist(), at.log_p.tolist(), at.log_q.tolist()
                row.confidence = None if at.confidence is None else at.confidence.tolist()
                row.position = None if at.position is None else at.position.tolist()
                row.accepted = None if at.accepted is None else at.accepted.tolist()
            row.vectors = None if one.vectors is None else SavedVectors.of(one.vectors)
            sequences.append(row)
        return SavedTotals(
            self.output_name,
            self.dimensions,
            self._comparison.classes_dim,
            (self._reference_seconds, self._candidate_seconds),
            sorted(self._left_out),
            sorted(self._left_wide),
            sequences,
            sorted(self._unseen or ()),
            self._comparison.acceptance,
        )

    @classmethod
    def restored(
        cls, saved: SavedTotals, total: int, routed: bool, embedding: Embedding | None = None
    ) -> RunningTotals:
        """Return totals with the results of `saved`. total: the number of all sequences. routed: whether the model routes tokens to
        experts. embedding: how vectors are made of the sequences that are still to run.
        """
        output = torch.empty((0,) * saved.dimensions)
        comparison = OutputMetrics(saved.classes_dim, acceptance=saved.acceptance)
        totals = cls(saved.output_name, output, comparison, total, routed, embedding)
        totals._reference_seconds, totals._candidate_seconds = saved.seconds
        totals._left_out, totals._left_wide = set(saved.modules_left_out), set(saved.left_wide)
        totals._unseen = set(saved.unseen)
        for one in saved.sequences:
            positions = None
            if one.positions is not None:
                kl, same, log_p, log_q = (torch.tensor(values, dtype=torch.float64) for values in one.positions)
                further = (
                    None if values is None else torch.tensor(values, dtype=kind)
                    for values, kind in (
                        (one.confidence, torch.float64),
                        (one.position, torch.int64),
                        (one.accepted, torch.float64),
                    )
                )
                positions = PositionFigures(kl, same.bool(), log_p, log_q, *further)
            vectors = None if one.vectors is None else one.vectors.tensors()
            totals.add_figures(one.number, SequenceFigures(one.rows, one.sums, positions, one.left_out, vectors))
            if one.modules is not None:
                totals.set_modules(one.number, one.modules)
        return totals

    def set_modules(self, number: int, modules: dict[str, ModuleSums]) -> None:
        """Store the results of the modules, by name, for a sequence, which must have been added before."""
        self._modules[number] = modules

    @property
    def modules_numbers(self) -> Collection[int]:
        """The indexes, among the inputs, of the sequences in which modules were compared."""
        return self._modules.keys()

    @property
    def modules(self) -> tuple[ModuleDrift, ...]:
        """The drift of every module whose outputs fitted into memory, in the order in which they were first called."""
        names = dict.fromkeys(name for number in sorted(self._modules) for name in self._modules[number])
        return tuple(self._module(name, self._modules) for name in names if name not in self._left_out)

    def modules_with(self, number: int, modules: Mapping[str, ModuleSums]) -> tuple[ModuleDrift, ...]:
        """Return the drift of each module in `modules`, over the sequences added so far and the sequence `number`, which is still
        running. modules: the results of this sequence, by module name.
        """
        sequences = {**self._modules, number: modules}
        return tuple(self._module(name, sequences) for name in modules)

    def _module(self, name: str, sequences: Mapping[int, Mapping[str, ModuleSums]]) -> ModuleDrift:
        sums = ModuleSums()
        for number in sorted(sequences):
            if name in sequences[number]:
                sums.add(sequences[number][name])
        return sums.drift(name)

    @property
    def output(self) -> OutputDrift:
        """The drift metrics of the main output over the sequences added so far."""
        return self._comparison.result()

    @property
    def pictures(self) -> tuple[PicturePair, ...]:
        """The pictures that were made of the first inputs."""
        return tuple(pair for _, pair in sorted(self._pictures.items()))

    @property
    def unit(self) -> str:
        """The unit of the drift metric by which recipes are ranked, such as nats per token."""
        return unit_for(self._comparison.classes_dim, self.dimensions)

    @property
    def extent(self) -> Extent:
        """How many sequences were compared, and an estimate of each metric's distance from its value over all sequences."""
        sequences = [self._comparison.sequences[number] for number in self.numbers]
        errors = (None, None) if self._routed and len(sequences) < self._total else self._errors(sequences)
        return Extent(
            done=len(sequences),
            total=self._total,
            positions=sum(sequence.rows for sequence in sequences),
            of_tokens=self.unit == NATS,
            left_out=sum(sequence.left_out for sequence in sequences),
            rel_l2_error=errors[0],
            kl_error=errors[1],
        )

    def _errors(self, sequences: Sequence[SequenceFigures]) -> tuple[float | None, float | None]:
        """Return the relative standard errors of (the relative L2 error, the mean KL) over the sequences run so far, each None if
        unknown.
        """
        # The squared relative L2 error is also a mean: that of each sequence's squared error, weighted by its energy.
        energies = [sequence.sums.energy for sequence in sequences]
        squares = [each.sums.noise / each.sums.energy if each.sums.energy else 0.0 for each in sequences]
        square_error = relative_error(energies, squares, self._total)
        kl_error = None
        if self._kl_means:
            rows = [sequence.rows for sequence in sequences]
            kl_error = relative_error(rows, self._kl_means, self._total, self._kl_within)
        return None if square_error is None else square_error / 2, kl_error

    @property
    def seconds(self) -> Seconds:
        """The total wall times of the passes of the reference and of the candidate."""
        return Seconds(self._reference_seconds, self._candidate_seconds, self._reused)

    def partial(self) -> PartialDrift:
        """Return the drift of the main output over the sequences added so far, without the recall, which takes long to compute."""
        return PartialDrift(self._comparison.result(with_neighbors=False), self.extent)

    def notices(self, output: OutputDrift) -> tuple[str, ...]:
        """Return notices about the metrics, such as modules that could not be compared. output: the metrics of the main output."""
        notices = list[str]()
        if output.nonfinite_reference:
            of_others = "the metrics cover the other values"
            if output.nonfinite_reference >= output.elements:
                of_others = "nothing is left to compare"
            of_others += ", and KL is undefined" if self._comparison.classes_dim is not None else ""
            notices.append(
                f"the reference itself is not finite in {output.nonfinite_reference:,} of the {output.elements:,} values of "
                f"{self.output_name}: {of_others}"
            )
        if self._comparison.acceptance and output.acceptance is None:
            why = "the output is no distribution"
            if self._comparison.classes_dim is not None:
                why = "the probabilities of some tokens are not known one by one"
            notices.append(f"acceptance is not measured: {why}")
        if self._embedding is not None:
            notices.append(neighbors_notice(self._embedding, self._comparison.inputs))
        if output.kl_mean is not None and not output.nonfinite_reference and "confidence" not in output.groups:
            notices.append(
                "there are no groups of positions: an earlier version of the program saved a part of the measurement"
            )
        if self._left_out:
            notices.append(
                f"{len(self._left_out)} modules are not compared: the reference's outputs do not fit into free memory"
            )
        shifted = {name for sums in self._modules.values() for name, each in sums.items() if not each.comparable}
        if shifted:
            notices.append(
                f"{plural(len(shifted), 'module')} ({min(shifted)}{', ...' if len(shifted) > 1 else ''}) can't be compared element "
                "by element: they got other tokens than in the reference, or their outputs have other shapes"
            )
        if self._left_wide:
            names = ", ".join(sorted(self._left_wide))
            notices.append(f"inputs of {names} are not quantized: runtimes quantize only inputs of matrix products")
        if self._unseen:
            count = len(self._unseen)
            notices.append(
                f"{plural(count, 'cast weight')} ({min(self._unseen)}{', ...' if count > 1 else ''}) in no call of the pass: "
                "no input reaches them, or the model uses them in another thread, where casts have no effect"
            )
        return tuple(notices)

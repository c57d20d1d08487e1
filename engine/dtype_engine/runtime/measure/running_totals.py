"""What a measurement has so far: sums of every sequence, from which the figures are worked out when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dtype_engine.results.drift import Extent, ModuleDrift, OutputDrift, PartialDrift
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.measure.modules.comparison import is_distribution
from dtype_engine.runtime.measure.modules.module_rows import KeptRows
from dtype_engine.runtime.measure.modules.module_totals import ModuleTotal, module_drifts
from dtype_engine.runtime.measure.modules.row_comparison import ModuleSums
from dtype_engine.runtime.measure.sampling_error import batch_means_error, relative_error
from dtype_engine.runtime.numerics.compare.element_sums import ElementSums
from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics
from dtype_engine.runtime.numerics.compare.sequence_figures import SequenceFigures
from dtype_engine.runtime.passes.runner import CandidateRun


@dataclass(slots=True)
class ReferenceRecord:
    """What the reference gave for one batch. modules: what is kept of their outputs, by (name, call). compared: that is of every
    module; in_full: and all of each.
    """

    output_name: str
    output: torch.Tensor
    modules: dict[tuple[str, int], KeptRows]
    left_out: set[str]
    seconds: float
    calls: int
    in_full: bool
    compared: bool
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        held = {kept.rows.data_ptr(): kept.rows.nbytes for kept in self.modules.values()}
        self.nbytes = sum({**held, self.output.data_ptr(): self.output.nbytes}.values())


@dataclass(slots=True)
class Measurement:
    """What a measurement gave, over all inputs or those that were run so far (`extent`).

    modules: in the order in which they were first called. Seconds are of all passes; `reused`: outputs of an earlier pass stood
    in for some calls. dimensions: of the main output: 3 for a distribution at every token, 2 for one an example.
    """

    output_name: str
    output: OutputDrift
    modules: tuple[ModuleDrift, ...]
    reference_seconds: float
    candidate_seconds: float
    reused: bool
    extent: Extent
    notices: tuple[str, ...] = ()
    dimensions: int = 0


class Reading:
    """What the sequences that were run so far gave. It grows with the next one: take its `measurement` before that.

    Figures are worked out when they are asked for, since percentiles need every position sorted, and are the same in
    whatever order the sequences were run.

    numbers: of the sequences, in the order in which they were run. modules: their totals, in that order. routed: the model sends
    tokens to experts. A token that goes elsewhere moves the output a hundred times as far as others do, and is rare: sequences
    without one say nothing of those to come, so how far they may be is not known.
    """

    def __init__(self, output_name: str, output: torch.Tensor, total: int, routed: bool = False) -> None:
        self.numbers: list[int] = []
        self.modules: dict[str, ModuleTotal] = {}
        self._output_name = output_name
        self._dimensions = output.ndim
        self._total = total
        self._routed = routed
        self._comparison = OutputMetrics(is_distribution(output_name, output))
        self._kl_means: list[float] = []
        self._kl_within = 0.0
        self._modules: dict[int, dict[str, ModuleSums]] = {}
        self._compared: set[int] = set()
        self._left_out: set[str] = set()
        self._reference_seconds = 0.0
        self._candidate_seconds = 0.0
        self._reused = False

    def add(
        self,
        number: int,
        batch: Batch,
        record: ReferenceRecord,
        ran: CandidateRun,
        candidate: torch.Tensor,
    ) -> None:
        """Take in the sequence of this number: its main output as the candidate has it. `set_modules` has the rest."""
        self._comparison.add(record.output, candidate, batch.next_tokens, number)
        self.numbers.append(number)
        positions = self._comparison.sequences[number].positions
        if positions is not None:
            self._kl_within = self._kl_within if self._kl_means else batch_means_error(positions.kl)
            self._kl_means.append(float(positions.kl.mean()))
        self._left_out |= record.left_out
        self._reference_seconds += record.seconds
        self._candidate_seconds += ran.seconds
        self._reused = self._reused or ran.reused

    def sums_of(self, number: int) -> ElementSums:
        """Of the main output of a sequence that was taken in."""
        return self._comparison.sequences[number].sums

    def set_modules(self, number: int, modules: dict[str, ModuleSums], compared: bool) -> None:
        """The sums of the modules of a sequence that was taken in, in place of those it had. compared: they are all in it."""
        again = number in self._modules
        self._modules[number] = modules
        if compared:
            self._compared.add(number)
        if again:
            self.modules = self._all_modules()
            return
        for module, sums in modules.items():
            self.modules.setdefault(module, ModuleTotal()).add(sums, compared)

    @property
    def has_modules(self) -> bool:
        """Whether modules were compared in one of the sequences so far."""
        return bool(self._compared)

    @property
    def left(self) -> int:
        """In how many of all sequences not every module was compared."""
        return self._total - len(self._compared)

    def _all_modules(self) -> dict[str, ModuleTotal]:
        """In the order of the inputs, those first in which all modules were compared: their first calls have an order. Without
        those that are said to be left out.
        """
        totals: dict[str, ModuleTotal] = {}
        for number in sorted(self._modules, key=lambda number: (number not in self._compared, number)):
            for module, sums in self._modules[number].items():
                if module not in self._left_out:
                    totals.setdefault(module, ModuleTotal()).add(sums, number in self._compared)
        return totals

    def extent(self) -> Extent:
        """How much of the inputs the figures are over, and how far they may be from those over all."""
        sequences = [self._comparison.sequences[number] for number in self.numbers]
        errors = (None, None) if self._routed and len(sequences) < self._total else self._errors(sequences)
        return Extent(
            done=len(sequences),
            total=self._total,
            positions=sum(sequence.rows for sequence in sequences),
            of_tokens=self._comparison.distribution and self._dimensions > 2,
            rel_l2_error=errors[0],
            kl_error=errors[1],
        )

    def _errors(self, sequences: Sequence[SequenceFigures]) -> tuple[float | None, float | None]:
        """Of the relative L2 error and the mean KL over these, relative to themselves."""
        # The square of the relative L2 error is a mean too: of each sequence's own, weighted by its energy.
        energies = [sequence.sums.energy for sequence in sequences]
        squares = [each.sums.noise / each.sums.energy if each.sums.energy else 0.0 for each in sequences]
        square_error = relative_error(energies, squares, self._total)
        kl_error = None
        if self._kl_means:
            rows = [sequence.rows for sequence in sequences]
            kl_error = relative_error(rows, self._kl_means, self._total, self._kl_within)
        return None if square_error is None else square_error / 2, kl_error

    def partial(self) -> PartialDrift:
        """The main output's figures over the sequences so far, without those of modules."""
        return PartialDrift(self._comparison.result(), self.extent())

    def measurement(self) -> Measurement:
        """The figures over the sequences so far."""
        notices, output = list[str](), self._comparison.result()
        if output.nonfinite_reference:
            of_others = "figures are of the others" + (", KL has none" if self._comparison.distribution else "")
            notices.append(
                f"the reference is not finite itself in {output.nonfinite_reference:,} of the {output.elements:,} values of "
                f"{self._output_name}: {of_others}"
            )
        if self._left_out:
            notices.append(
                f"{len(self._left_out)} modules are not compared: the reference's outputs do not fit the memory that is free"
            )
        return Measurement(
            self._output_name,
            output,
            module_drifts(self._all_modules(), self.left, self._routed),
            self._reference_seconds,
            self._candidate_seconds,
            self._reused,
            self.extent(),
            tuple(notices),
            self._dimensions,
        )

"""Forward passes of a live model, observed module by module, and stopped between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled, KernelError, NoForward, UserError
from dtype_engine.core.exits import exits_as_errors
from dtype_engine.core.options import RunSettings
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.activations import ActivationRounding
from dtype_engine.runtime.modes.autocast import AutocastCastRecorder
from dtype_engine.runtime.modes.mixed import ImplicitCast, MixedDtypeMode
from dtype_engine.runtime.modes.partial import PartialCastMode
from dtype_engine.runtime.modes.reference import FirstUseRecorder, ReferenceMode, reference_dtype
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.modes.widening_buffer import WidenedWeights
from dtype_engine.runtime.numerics.quantize import torch_dtype
from dtype_engine.runtime.passes.call_interception import ModuleCalls
from dtype_engine.runtime.passes.forward_pass import ForwardPass, ModuleObserver, NullObserver
from dtype_engine.runtime.passes.output_cache import ForwardTrace
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.side_effects import SideEffects
from dtype_engine.runtime.passes.state_restore import as_every_pass, stored_values

Result = TypeVar("Result")


class RunAgain(Exception):
    """A run does not count: forget what the observer got, and run once more, with no outputs of an earlier one.

    A plain run failed halfway, and the next is under the rules; or a cast weight was used before the outputs that were reused.
    """


class ForwardRunner:
    """Runs a live model, observed and stoppable between two modules, while it is open.

    left_wide: operations with a quantised weight whose input was not rounded, where activations are quantised.
    first_use: by the order of a reference pass's calls, how many had finished when each weight was first used.
    watch: without it a pass can be stopped, but nothing is observed.
    watched: the modules whose outputs the next passes observe; None: all. kept: of those the ones that traces keep; None: all.
    widened: what reference passes leave for the next.
    """

    def __init__(self, model: LiveModel, settings: RunSettings, cancelled: IsCancelled, watch: bool = True) -> None:
        self.model = model
        self.settings = settings
        self.compute = torch_dtype(settings.compute)
        self.autocast = torch_dtype(settings.autocast) if settings.autocast else None
        self.watch = watch
        self.cancelled = cancelled
        self.first_use, self.left_wide = dict[int, dict[str, int]](), set[str]()
        self.watched: frozenset[str] | None = None
        self.kept: frozenset[str] | None = None
        self.widened = WidenedWeights(reference_dtype)
        self.finished, self.spans = list[str](), list[int]()
        """Of the pass that ended last, as a `ForwardPass` has them."""
        self._order, self._uses = 0, dict[str, int]()
        """Of the same: a hash of the order of its calls, and the first uses that its mode noted."""
        self._calls = ModuleCalls(model.module, cancelled, model.device.type if settings.autocast else None)

    def __enter__(self) -> ForwardRunner:
        (self._calls.watch if self.watch else self._calls.only_stop)()
        return self

    def __exit__(self, *exception: object) -> None:
        self._calls.remove()

    def without_settings(self) -> ForwardRunner:
        """The same passes with none of the candidate's settings, for use while this one is open."""
        return ForwardRunner(self.model, RunSettings(), self.cancelled, self.watch)

    def candidate(
        self, batch: Batch, observer: ModuleObserver, budget: int, earlier: ForwardTrace | None = None, whole: int = 0
    ) -> CandidateRun:
        """Run the model as it is cast now; outputs of `earlier` are reused for what is the same; if none are, it is released. Keeps
        up to `budget` bytes of outputs in the trace that it returns, and none from within modules of up to `whole` calls.

        Where every weight has one computed dtype the module runs plainly, with no mode in between; see `settle_kind`. Raises
        NoForward, KernelError, Cancelled, and `RunAgain`.
        """
        model = self.model
        batch = self.candidate_batch(batch)
        uniform = model.uniform_dtype()
        now = {name: weight.form for name, weight in model.weights.items()}
        if uniform is None or (uniform, self.settings) in model.requires_mixed_mode:
            trace = ForwardTrace(now, self._kind_of_rules, budget, whole, self.kept)
            return self._candidate(batch, self._rules(), observer, trace, earlier)
        trace = ForwardTrace(now, f"plain {uniform}, {self.settings}", budget, whole, self.kept)
        return self._candidate(batch, None, observer, trace, earlier)

    def settle_kind(self, batch: Batch, ran: CandidateRun) -> None:
        """Find out, once for a dtype and an order of calls, whether a plain pass and one under the rules are the same, by the batch
        of a plain one run once more: if the rules have nothing to do and give the same, outputs of a plain pass whose calls have
        that order may be reused in a mixed one and the other way round. For when nobody waits for figures. Raises Cancelled.
        """
        model, kind = self.model, (ran.trace.kind, ran.trace.order)
        if ran.reused or kind[0] == self._kind_of_rules or kind in model.mixed_mode_is_noop | model.mixed_mode_differs:
            return
        rules = self._rules()
        call = self._module_on(self.candidate_batch(batch))
        try:
            under_rules, _ = self._run(call, rules, NullObserver(), None, {}, autocast=self.autocast)
            same = not rules.acted and torch.equal(main_output(under_rules)[1], main_output(ran.output)[1])
        except (NoForward, KernelError):
            same = False  # the figures stand
        (model.mixed_mode_is_noop if same else model.mixed_mode_differs).add(kind)

    def _is_of_a_kind(self, earlier: ForwardTrace, trace: ForwardTrace) -> bool:
        """Whether both keep outputs of the same modules, of kinds of runs that are the same where calls have this order."""
        same = self.model.mixed_mode_is_noop
        kinds = {self._kind_of_rules if (each.kind, earlier.order) in same else each.kind for each in (earlier, trace)}
        return len(kinds) == 1 and earlier.only == trace.only

    def _reusable(self, earlier: ForwardTrace, prefix: int) -> dict[tuple[str, int], int]:
        """What of the first `prefix` calls of an earlier pass is reused."""
        if self.model.stateful or not prefix:
            return {}
        return earlier.reusable_calls(prefix, self._calls.with_hooks(), self.model.writers)

    @property
    def _kind_of_rules(self) -> str:
        """What a trace of a pass under the rules is called."""
        return f"rules, {self.settings}"

    def _rules(self, record: Callable[[ImplicitCast], None] | None = None) -> MixedDtypeMode:
        autocast = self.autocast is not None
        return MixedDtypeMode(self.model.by_id, self.compute, self.model.device, record, autocast, self._rounding())

    def _rounding(self) -> ActivationRounding | None:
        """What rounds activations in one pass, where the settings ask for it."""
        return ActivationRounding(self.left_wide) if self.settings.quantize_activations == "weights" else None

    def _input_dtype(self) -> torch.dtype | None:
        """What floating inputs of the candidate are cast to; None to leave them as given."""
        if self.settings.float_inputs == "given":
            return None
        first = next((weight.dtype for weight in self.model.weights.values() if weight.info.castable), "float32")
        return torch_dtype(first) if first in dtypes.COMPUTE_DTYPES else self.compute

    def _module_on(self, batch: Batch) -> Callable[[], Any]:
        return lambda: batch.run(self.model.module)

    def _candidate(
        self,
        batch: Batch,
        mode: MixedDtypeMode | None,
        observer: ModuleObserver,
        trace: ForwardTrace,
        earlier: ForwardTrace | None,
    ) -> CandidateRun:
        known: Mapping[str, int] = {}
        prefix, changed, reusable_calls = 0, set[str](), dict[tuple[str, int], int]()
        if earlier is not None and self._is_of_a_kind(earlier, trace):
            known, changed = earlier.uses(self.first_use), earlier.changed(trace.dtypes)
            prefix = min((known.get(name, 0) for name in changed), default=0)
            reusable_calls = self._reusable(earlier, prefix)
        if earlier is not None and not reusable_calls:
            earlier.release()
        try:
            output, seconds = self._run(
                self._module_on(batch), mode, observer, trace, reusable_calls, earlier, autocast=self.autocast
            )
        except (Cancelled, UserError):
            raise
        except Exception:
            if mode is not None:
                raise
            self.model.requires_mixed_mode.add((self.model.uniform_dtype(), self.settings))
            raise RunAgain from None
        if reusable_calls and any(self._uses.get(name, prefix) < prefix for name in changed):
            raise RunAgain  # in the reference pass that its first use is known from it was not
        trace.order = self._order
        if mode is not None:
            # What was not run again noted nothing: what was known of it holds.
            trace.first_use = _least(known, self._uses) if reusable_calls else self._uses
        return CandidateRun(output, seconds, trace, bool(reusable_calls))

    def run_candidate(self, call: Callable[[], Result]) -> tuple[Result, float, bool]:
        """Call anything that calls the module, as it is cast now: the result, seconds, and whether it needed the rules.

        Raises NoForward, KernelError, Cancelled.
        """
        key = (self.model.uniform_dtype(), self.settings)
        if key[0] is not None and key not in self.model.requires_mixed_mode:
            try:
                return (*self._run(call, None, NullObserver(), None, {}, autocast=self.autocast), False)
            except (Cancelled, UserError):
                raise
            except Exception:
                self.model.requires_mixed_mode.add(key)
        return (*self._run(call, self._rules(), NullObserver(), None, {}, autocast=self.autocast), True)

    def run_reference(self, call: Callable[[], Result]) -> tuple[Result, float]:
        """The same for the reference: the weights as stored, in float32. Raises as `run_candidate` does."""
        if self._plain_reference():
            try:
                with stored_values(self.model):
                    return self._run(call, None, NullObserver(), None, {})
            except (Cancelled, UserError):
                raise
            except Exception:
                self.model.requires_mixed_mode.add("reference")
        return self._run(call, ReferenceMode(self.model.by_id, self.model.device), NullObserver(), None, {})

    def dry_run(self, batch: Batch) -> None:
        """Run the reference on one batch, only to see that the model takes it. Raises as `run_candidate` does."""
        self.run_reference(self._module_on(self.reference_batch(batch)))

    def candidate_batch(self, batch: Batch) -> Batch:
        """A batch as the candidate gets it."""
        return batch.on(self.model.device, self._input_dtype())

    def reference_batch(self, batch: Batch) -> Batch:
        """A batch as the reference gets it: floating inputs in float32 (float64 where the weights are stored in it)."""
        return batch.on(self.model.device, torch.float64 if self._stored() == {"float64"} else torch.float32)

    def _stored(self) -> set[str]:
        return {weight.info.dtype for weight in self.model.weights.values() if weight.info.castable}

    def _plain_reference(self) -> bool:
        """Whether the reference is the stored tensors, run plainly."""
        model = self.model
        in_place = model.device.type == "cpu" or not any(weight.changed for weight in model.weights.values())
        return self._stored() <= {"float32"} and in_place and "reference" not in model.requires_mixed_mode

    def implicit_casts(self, batch: Batch) -> list[ImplicitCast]:
        """Run the model as it is cast now under the four rules; every implicit cast, in order. Raises as `candidate` does."""
        casts: list[ImplicitCast] = []
        rules = self._rules(casts.append)
        run = self._module_on(self.candidate_batch(batch))
        self._run(run, rules, NullObserver(), None, {}, autocast=self.autocast, within=AutocastCastRecorder(rules))
        return casts

    def reference(self, batch: Batch, observer: ModuleObserver) -> tuple[Any, float]:
        """Run the weights as stored, in float32 (float64 where they are stored in it). Returns output and seconds.

        A model stored in float32 runs plainly on its stored tensors; any other under `ReferenceMode`. Neither makes a second
        set of weights. Notes when each weight is first used. Raises as `candidate` does.
        """
        model = self.model
        call = self._module_on(self.reference_batch(batch))
        if self._plain_reference():
            try:
                with stored_values(model):
                    ran = self._run(call, None, observer, None, {})
                    if self._order not in self.first_use:
                        # A pass of its own: torch takes other paths when any mode is there.
                        uses = FirstUseRecorder(model.by_id, model.device)
                        self._run(call, uses, NullObserver(), None, {}, watched=True)
                        self._keep_uses()
                    return ran
            except (Cancelled, UserError):
                raise
            except Exception:
                model.requires_mixed_mode.add("reference")
                raise RunAgain from None
        mode = ReferenceMode(model.by_id, model.device, self.widened)
        ran = self._run(call, mode, observer, None, {}, watched=True)
        self._keep_uses()
        return ran

    def _keep_uses(self) -> None:
        """Keep the first uses of the pass that ended last for every pass whose calls have the same order."""
        self.first_use[self._order] = _least(self.first_use.get(self._order, {}), self._uses)

    def run_partial(
        self,
        batch: Batch,
        drifting: frozenset[int],
        inside: Callable[[str], bool],
        observer: ModuleObserver,
        trace: ForwardTrace | None = None,
        earlier: ForwardTrace | None = None,
        prefix: int = 0,
    ) -> tuple[Any, PartialCastMode]:
        """The reference, with the weighted operations of the modules that `inside` takes as cast; see `PartialCastMode`.

        The first `prefix` calls of `earlier`, a trace of the same run with nothing inside, are reused. Returns
        the output and the mode. Raises as `candidate` does.
        """
        mode = PartialCastMode(self.model.by_id, self.model.device, self.compute, drifting, inside, self._rounding())
        call = self._module_on(self.reference_batch(batch))
        reusable_calls = self._reusable(earlier, prefix) if earlier is not None else {}
        watched = trace is not None
        return self._run(call, mode, observer, trace, reusable_calls, earlier, watched=watched)[0], mode

    def run_observed(
        self,
        batch: Batch,
        observe: Callable[[WeightMode], AbstractContextManager[object]],
        observer: ModuleObserver,
        reference: bool = False,
    ) -> Any:
        """One pass as it is cast now, under the rules (or the reference's, widened), inside the context that `observe` makes for
        the pass's mode: a mode that sees every operation in the dtype in which it is computed. Raises as `candidate` does.
        """
        mode = ReferenceMode(self.model.by_id, self.model.device) if reference else self._rules()
        given = self.reference_batch(batch) if reference else self.candidate_batch(batch)
        autocast = None if reference else self.autocast
        with observe(mode):
            return self._run(self._module_on(given), mode, observer, None, {}, autocast=autocast)[0]

    def _run(
        self,
        call: Callable[[], Result],
        mode: WeightMode | None,
        observer: ModuleObserver,
        trace: ForwardTrace | None,
        reusable_calls: dict[tuple[str, int], int],
        earlier: ForwardTrace | None = None,
        autocast: torch.dtype | None = None,
        within: AutocastCastRecorder | None = None,
        watched: bool = False,
    ) -> tuple[Result, float]:
        """watched: what calls do beside returning their outputs is noted on the model."""
        model, modules = self.model, self._calls.modules
        run = ForwardPass(mode, observer, trace, reusable_calls, earlier, model.by_id, self.watched)
        try:
            # A model that changes what it holds was seen to by the reference, and in sequences that are watched in full.
            trusted = trace is not None and self.watched is not None and not model.stateful
            with as_every_pass(model, modules, trusted):
                if watched:
                    run.effects = SideEffects(modules, model.device)
                self._calls.under_way = run
                started = time.perf_counter()
                with ExitStack() as contexts:
                    contexts.enter_context(torch.no_grad())
                    if autocast is not None:
                        contexts.enter_context(torch.autocast(model.device.type, autocast))
                        if within is not None:
                            contexts.enter_context(within)
                    if mode is not None:
                        contexts.enter_context(mode)
                    contexts.enter_context(exits_as_errors())
                    output = call()
                if model.device.type == "cuda":
                    torch.cuda.synchronize(model.device)
                seconds = time.perf_counter() - started - run.observing_seconds
                if run.effects is not None:
                    self._note(run.effects)
            if run.effects is not None:
                model.going_on = list(dict.fromkeys([*model.going_on, *run.effects.going_on()]))
        except (Cancelled, UserError):
            raise
        except torch.OutOfMemoryError as error:
            reason = str(error).split(". ")[0]
            raise NoForward(f"{_where(run.inside)}: not enough memory on {model.device} ({reason})") from error
        except Exception as error:
            if mode is None or isinstance(mode, FirstUseRecorder):
                raise
            raise NoForward(f"the forward pass failed in {_where(run.inside)}: {_one_line(error)}") from error
        finally:
            self._calls.under_way = None
        self.finished, self.spans, self._order = run.finished, run.spans, hash(tuple(run.finished))
        noted = mode.first_use.items() if mode is not None else ()
        self._uses = {model.by_id[key].info.name: finished for key, finished in noted}
        return output, seconds

    def _note(self, effects: SideEffects) -> None:
        """Keep what a pass was seen to do beside returning its output."""
        model = self.model
        model.writers |= effects.writers
        model.stateful |= effects.is_stateful()
        names = (model.by_id[id(tensor)].info.name for tensor in effects.overwritten() if id(tensor) in model.by_id)
        model.overwritten = list(dict.fromkeys([*model.overwritten, *names]))


def _least(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The smaller of both counts where a weight has two."""
    return {**one, **{name: min(count, one.get(name, count)) for name, count in other.items()}}


@dataclass(slots=True)
class CandidateRun:
    """What a candidate's pass gave. `reused`: some outputs are those of an earlier pass, whose time `seconds` lacks."""

    output: Any
    seconds: float
    trace: ForwardTrace
    reused: bool


def _where(inside: list[str]) -> str:
    return inside[-1] if inside else "the model"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

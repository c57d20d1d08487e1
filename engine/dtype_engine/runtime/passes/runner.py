"""Runs forward passes of a model, lets its modules be observed, and stops before the next module call if cancelled."""

from __future__ import annotations

import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled, NoForward, UserError
from dtype_engine.core.foreign_code import foreign_code, with_type
from dtype_engine.core.kv_cache import KV_CACHE
from dtype_engine.core.kv_formats import KV_FORMATS, QUERIES
from dtype_engine.core.options import STORED, RunSettings
from dtype_engine.core.text import printable
from dtype_engine.recipe.loader_facts import loaded_dtype
from dtype_engine.runtime.device import enough_memory, exact_float32, random_states, set_random_states, synchronize
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.activations import ActivationRounding
from dtype_engine.runtime.modes.candidate import CandidateMode, candidate_dtype
from dtype_engine.runtime.modes.kv_cache import (
    CacheAmax,
    CacheRounding,
    CacheWatcher,
    watched_caches,
    watched_queries,
    watching_caches,
)
from dtype_engine.runtime.modes.partial import PartialCastMode
from dtype_engine.runtime.modes.reference import ReferenceMode, WidenedWeights
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.passes.call_interception import ModuleCalls
from dtype_engine.runtime.passes.execution import executed
from dtype_engine.runtime.passes.forward_pass import ForwardPass, ModuleObserver
from dtype_engine.runtime.passes.kept_positions import AttendedPositions, KeptPositions
from dtype_engine.runtime.passes.model_behavior import Calibration, ModelBehavior, Run
from dtype_engine.runtime.passes.one_pass import PassOptions, PassResult
from dtype_engine.runtime.passes.output_cache import OutputCache
from dtype_engine.runtime.passes.side_by_side import NotIndependent, SideBySide
from dtype_engine.runtime.passes.side_effects import SideEffects
from dtype_engine.runtime.passes.state_restore import SavedState, as_every_pass, stored_values
from dtype_engine.runtime.passes.stepwise import STATES, stepwise

Output = TypeVar("Output")
T = TypeVar("T")
_NOTHING = PassOptions()
_IGNORES = ModuleObserver()
_NO_FUTURE_WARNINGS = partial(warnings.catch_warnings, action="ignore", category=FutureWarning)
"""Hides what libraries announce to the authors of a model's code."""


class ForwardRunner:
    """Runs forward passes of a model. It is a context manager: passes are observed and can be cancelled only inside its `with`
    block.

    Each method that runs a pass takes a function that calls the model on one batch, as returned by `reference_call` or
    `candidate_call`, and raises NoForward, KernelError and Cancelled.

    watch: if False, passes can be cancelled but are not observed, and KV caches are not rounded, because only an observed pass
    knows which module writes one. behavior: what earlier passes have shown about the model, shared by all runners of the model; if
    None, nothing is known yet.
    """

    def __init__(
        self,
        model: LiveModel,
        settings: RunSettings,
        cancelled: IsCancelled,
        watch: bool = True,
        behavior: ModelBehavior | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.cancelled = cancelled
        self._watch = watch
        self.behavior = ModelBehavior() if behavior is None else behavior
        self._compute = torch_dtype(settings.compute)
        self._autocast = torch_dtype(settings.autocast) if settings.autocast else None
        self._together: SideBySide | None = None
        self._state: SavedState | None = None
        """The state of the model that was saved before the last pass."""
        model.memory.cancelled = cancelled
        autocast_on = model.device.type if settings.autocast else None
        self._calls = ModuleCalls(model.module, cancelled, autocast_on, model.memory.blocks, self.enter_block)

    def __enter__(self) -> ForwardRunner:
        self._calls.intercept(reports=self._watch)
        return self

    def __exit__(self, *exception: object) -> None:
        self._calls.remove()

    @property
    def takes_turns(self) -> bool:
        """Whether `side_by_side` lets several passes take turns, as far as earlier passes have shown."""
        return self.model.memory.limited and not self.behavior.stateful and not self.model.side_settings

    def side_by_side(self, works: Sequence[Callable[[], T]], ended: Callable[[], object] | None = None) -> list[T]:
        """Call all functions in `works`, each of which runs one forward pass by this runner, and return their results.

        If the model is larger than memory, the passes take turns, so that each block of weights is read once for all of them. They
        still run one after the other if one pass changes state on which another depends, or if reference and candidate have
        different settings (`LiveModel.side_settings`).

        ended: called when all passes have run a block, while the values that it has read are still kept. It is not called if the
        passes run one after the other.
        """
        one = (len(works) < 2 and ended is None) or self._together is not None
        if one or not self.takes_turns:
            return [work() for work in works]
        together = self._together = SideBySide(self.model.memory, self._suspended, ended or ignore)
        try:
            results = together.run(works)
        except NotIndependent:
            results = []
        finally:
            self._together = None
        return [work() for work in works] if self.behavior.stateful else results

    def _suspended(self) -> Callable[[], None]:
        """Save what other passes change about the running pass, such as random states. Returns a function that restores it."""
        run, states = self._calls.under_way, random_states(self.model.device)

        def resume() -> None:
            self._calls.under_way = run
            set_random_states(self.model.device, states)

        return resume

    def enter_block(self, name: str) -> None:
        """Begin to use the weights of a block, if the model is larger than memory. If passes take turns, first wait for this pass's
        turn.
        """
        run = self._calls.under_way
        if self._together is None:
            self.model.memory.enter(name)
            return
        waited = self._together.enter(name)
        if run is not None:
            run.observing_seconds += waited

    def reference_call(self, batch: Batch) -> Callable[[], Any]:
        """Return a function that runs the model on a batch, with inputs in the dtypes of a reference run."""
        return partial(self.reference_batch(batch).run, self.model.module)

    def candidate_call(self, batch: Batch) -> Callable[[], Any]:
        """Return a function that runs the model on a batch, with inputs in the dtypes of a candidate run: token by token, if the
        states of recurrent layers have a format. Raises UserError if the batch can't be run so.
        """
        if self.model.state_formats:
            return stepwise(self.candidate_batch(batch), self.model.module, why=STATES)
        return self._whole_candidate(batch)

    def _whole_candidate(self, batch: Batch) -> Callable[[], Any]:
        return partial(self.candidate_batch(batch).run, self.model.module)

    def reference_batch(self, batch: Batch) -> Batch:
        """Return a batch for a reference run: float inputs in float32, or in float64 if all weights are stored in float64. If drift
        is measured from the model as stored, the inputs are those of a candidate run.
        """
        if self.model.reference == STORED:
            return self.candidate_batch(batch)
        stored = {weight.info.dtype for weight in self.model.weights.values() if weight.info.castable}
        return self._batch(batch, torch.float64 if stored == {"float64"} else torch.float32)

    def candidate_batch(self, batch: Batch) -> Batch:
        """Return a batch for a candidate run, with float inputs as the run setting `float_inputs` says: as they are, or in the
        dtype of the first weight that the model's code does not keep in float32.
        """
        dtype = None
        if self.settings.float_inputs != "given":
            castable = [weight for weight in self.model.weights.values() if weight.info.castable]
            tree = self.model.tree
            own = (each for each in castable if loaded_dtype(tree, each.info, "bfloat16", True) == "bfloat16")
            first = next(own, castable[0] if castable else None)
            dtype = torch.float32 if first is None else candidate_dtype(first, self._compute)
        return self._batch(batch, dtype)

    def _batch(self, batch: Batch, dtype: torch.dtype | None) -> Batch:
        with enough_memory("the inputs", self.model.device):
            moved = batch.on(self.model.device, dtype)
            return keeping_cache(moved) if self.model.cache_formats else moved

    def calibrate_caches(
        self, batches: Iterable[Batch], formats: Collection[str] | None = None, run: Run = "candidate"
    ) -> None:
        """Find the largest |value| of each head in the KV caches of a run, if one of `formats` has calibrated scales. Candidate
        runs compute the scales of their caches from the values of the candidate. `partial` runs without `PassOptions.amax` compute
        them from those of the reference.

        This runs the model on all batches, unless the values are known. Raises NoForward, KernelError and Cancelled. formats: names
        in `KV_FORMATS`; if None, the formats of the recipe.
        """
        wanted = self.model.cache_formats.values() if formats is None else formats
        if self._calibrated(run) is not None or not any(KV_FORMATS[form].calibrated for form in wanted):
            return
        if run == "reference":
            amax = self._amax_of(batches, self.reference_call, self.reference)
        else:
            amax = self._amax_of(batches, self._whole_candidate, self.candidate)
        self.behavior.calibrations[run] = Calibration(self._calibration_state(run), amax)

    def partial_amax(
        self, batches: Iterable[Batch], drifting: frozenset[int], inside: Callable[[str], bool]
    ) -> dict[str, torch.Tensor] | None:
        """Return `PassOptions.amax` for `partial` runs over all batches. Returns None if no cache that these runs round has
        calibrated scales. drifting, inside: as for `partial`.
        """
        rounded = (form for name, form in self.model.cache_formats.items() if inside(name))
        if not any(KV_FORMATS[form].calibrated for form in rounded):
            return None

        def run(call: Callable[[], Any], options: PassOptions) -> object:
            return self.partial(call, drifting, inside, options)

        return self._amax_of(batches, self.reference_call, run)

    def amax_of(self, run: Run) -> Mapping[str, torch.Tensor]:
        """Return `PassOptions.amax` of a run. It is empty if the run was not calibrated in the model's current state."""
        return self._calibrated(run) or {}

    def _calibrated(self, run: Run) -> Mapping[str, torch.Tensor] | None:
        known = self.behavior.calibrations.get(run)
        return known.amax if known is not None and known.state == self._calibration_state(run) else None

    def _calibration_state(self, run: Run) -> object:
        return self.settings, self._forms() if run == "candidate" else None

    def _forms(self) -> dict[str, str]:
        return {name: weight.form for name, weight in self.model.weights.items()}

    def _form_of_cache(self, name: str, amax: Mapping[str, torch.Tensor]) -> str:
        """Return a text that identifies how a cache tensor is rounded: its format and, if they are calibrated, its scales."""
        form = self.model.cache_formats.get(name, "")
        calibrated = form and KV_FORMATS[form].calibrated and name in amax
        return f"{form} {amax[name].tolist()}" if calibrated else form

    def _amax_of(
        self,
        batches: Iterable[Batch],
        call_of: Callable[[Batch], Callable[[], Any]],
        run: Callable[[Callable[[], Any], PassOptions], object],
    ) -> dict[str, torch.Tensor]:
        """Return the largest |value| of each head in the unrounded KV caches of runs over all batches. Padding does not count.
        call_of: returns the function that calls the model on a batch. run: does a run with this function.
        """
        of_decoder = {tensor.name: tensor.source == "decoder" for tensor in self.model.tree.kv_cache.tensors}

        def observe(batch: Batch) -> dict[str, torch.Tensor]:
            kept = KeptPositions.of(self.model.module, batch, self.model.device, AttendedPositions())
            amax = CacheAmax(self.model.cache_names)
            if kept is not None:
                amax.kept_of = lambda name, states: kept.of_cache(of_decoder[name], states)
            run(call_of(keeping_cache(batch)), PassOptions(caches=amax))
            return amax.found

        found = dict[str, torch.Tensor]()
        for of_batch in self.side_by_side([partial(observe, batch) for batch in batches]):
            found |= {name: torch.maximum(amax, found.get(name, amax)) for name, amax in of_batch.items()}
        return found

    def reference(
        self, call: Callable[[], Output], options: PassOptions = _NOTHING, observer: ModuleObserver = _IGNORES
    ) -> PassResult[Output]:
        """Do a reference run: the stored weights in float32 (or float64 if stored so), without a second copy of all weights."""
        # A mode around this one may keep tensors that it sees, so every widened weight then needs its own memory.
        new = WidenedWeights() if options.around is None else None
        on_cpu = self.model.device.type == "cpu"  # another device may lack memory for all of them
        stored = self._for_all("stored", partial(stored_values, self.model)) if on_cpu else nullcontext()
        with stored, self._for_all("widened", lambda: nullcontext(new)) as widened:
            mode = ReferenceMode(self.model.by_id, self.model.device, widened, self._compute)
            return self._run(call, mode, options, observer, caches=options.caches)

    def candidate(
        self, call: Callable[[], Output], options: PassOptions = _NOTHING, observer: ModuleObserver = _IGNORES
    ) -> PassResult[Output]:
        """Do a candidate run: the model as it is currently cast. Module outputs of `options.earlier` that can't have changed are
        reused. Raises NoForward if the model does not write to a KV cache that has a format.
        """
        forms, amax = self._forms(), self.amax_of("candidate")
        forms |= {name: self._form_of_cache(name, amax) for name in self.model.tree.caches}
        cache, earlier = _new_cache(forms, options), options.earlier
        prefix, reused = 0, dict[tuple[str, int], int]()
        if earlier is not None and earlier.only == options.cached:
            changed = (name for name, form in forms.items() if earlier.dtypes[name] != form)
            prefix = min((earlier.first_use.get(name, 0) for name in changed), default=0)
            reused = self._reusable(earlier, prefix)
        if earlier is not None and not reused:
            earlier.release()
        mode = CandidateMode(self.model.by_id, self._compute, self.model.device, self._rounding())
        caches = options.caches or self._cache_rounding(amax, lambda name: True)
        result = self._run(call, mode, options, observer, cache, reused, self._autocast, caches)
        # Reused calls recorded no first uses, so those of the earlier pass still hold.
        known = earlier.first_use if earlier is not None and reused else {}
        result.first_use |= {name: min(count, result.first_use.get(name, count)) for name, count in known.items()}
        missing = [name for name in self.model.cache_formats if name not in result.first_use]
        if missing and options.caches is None:
            raise NoForward(
                f"{missing[0]} was not written in the pass, so its format can't be measured: the model does not keep it in "
                "transformers' Cache"
            )
        result.unseen = _unseen_casts(self.model, result.first_use, result.finished)
        if cache is not None:
            cache.first_use = result.first_use
        return result

    def partial(
        self,
        call: Callable[[], Output],
        drifting: frozenset[int],
        inside: Callable[[str], bool],
        options: PassOptions = _NOTHING,
        observer: ModuleObserver = _IGNORES,
    ) -> tuple[PassResult[Output], dict[str, int]]:
        """Do a reference run, but with cast weights in the modules for which `inside(name)` is True. drifting: the `id`s of the
        weights whose casts change results. The second result maps the name of each module that uses one of these weights to the
        number of module calls that had ended before its first such use.
        """
        mode = PartialCastMode(self.model.by_id, self.model.device, self._compute, drifting, inside, self._rounding())
        cache = _new_cache({}, options)
        earlier = options.earlier
        reused = self._reusable(earlier, options.prefix) if earlier is not None else {}
        rounding = self._cache_rounding(self.amax_of("reference") if options.amax is None else options.amax, inside)
        result = self._run(call, mode, options, observer, cache, reused, caches=options.caches or rounding)
        return result, mode.uses | ({} if rounding is None else rounding.first_use)

    def under(
        self, mode: WeightMode, call: Callable[[], Output], caches: CacheWatcher | None = None
    ) -> PassResult[Output]:
        """Run the model under any mode. `call` may enable gradients. caches: intercepts the KV caches that the model writes."""
        return self._run(call, mode, PassOptions(graph=True), _IGNORES, caches=caches)

    def plain(self, call: Callable[[], Output], options: PassOptions) -> PassResult[Output]:
        """Run the model as it is, without a mode that intercepts operations and without intercepted calls of modules, as a compiled
        model needs. All weights must be plain tensors. The pass is not observed, and can't be cancelled.
        """
        device = self.model.device
        self._calls.remove()
        try:
            with ExitStack() as contexts:
                contexts.enter_context(torch.no_grad())
                contexts.enter_context(_NO_FUTURE_WARNINGS())
                if self._autocast is not None:
                    contexts.enter_context(torch.autocast(device.type, self._autocast))
                contexts.enter_context(exact_float32(device))
                contexts.enter_context(executed(self.model.module, options.execution))
                contexts.enter_context(foreign_code())
                started = time.perf_counter()
                output = call()
                synchronize(device)
                seconds = time.perf_counter() - started
        except (Cancelled, UserError):
            raise
        except Exception as error:
            raise NoForward(f"the pass failed as plain torch runs it: {with_type(error)}") from error
        finally:
            self._calls.intercept(reports=self._watch)
        return PassResult(output, seconds, [], [], {}, AttendedPositions(), added=False)

    def _for_all(self, name: str, context: Callable[[], AbstractContextManager[T]]) -> AbstractContextManager[T]:
        """Return a context for a pass. Passes that take turns share one context for each `name`, which the first pass enters and
        which ends with the last pass. context: creates it.
        """
        return context() if self._together is None else nullcontext(self._together.share(name, context))

    def _reusable(self, earlier: OutputCache, prefix: int) -> dict[tuple[str, int], int]:
        if self.behavior.stateful or not self.behavior.observed or not prefix:
            return {}
        return earlier.reusable_calls(prefix, self._calls.with_hooks(), self.behavior.writers)

    def _rounding(self) -> ActivationRounding | None:
        return ActivationRounding() if self.settings.quantize_activations == "weights" else None

    def _cache_rounding(self, amax: Mapping[str, torch.Tensor], inside: Callable[[str], bool]) -> CacheRounding | None:
        model = self.model
        if not model.cache_formats:
            return None
        states = model.tree.kv_cache.states if model.state_formats else ()
        return CacheRounding(model.cache_names, model.cache_formats, amax, inside, model.keys_read, states=states)

    @contextmanager
    def _same_state(self, mode: WeightMode) -> Iterator[None]:
        """Return a context for a pass in which the model has the state from which every pass starts."""
        model, together = self.model, self._together
        for settings in model.side_settings:
            settings.use(mode.like_reference(settings.module))
        watching = mode if together is None else together
        as_every = partial(as_every_pass, model, self.behavior, self._calls.modules, watching, self._state)
        with self._for_all("state", as_every) as (self._state, restored):
            if together is not None:
                together.changed = restored
                together.begin(mode)
                seeded = together.share("seed", lambda: nullcontext(random_states(model.device)))
                set_random_states(model.device, seeded)
            yield

    @contextmanager
    def _under(
        self, mode: WeightMode, options: PassOptions, autocast: torch.dtype | None, caches: CacheWatcher | None
    ) -> Iterator[None]:
        """Return the context in which the model's code runs: `mode`, autocast, and the contexts that `options` and `caches`
        require.
        """
        device = self.model.device
        with ExitStack() as contexts:
            contexts.enter_context(torch.no_grad())
            contexts.enter_context(self._for_all("warnings", _NO_FUTURE_WARNINGS))
            mode.requiring_grad = not options.graph
            if mode.requiring_grad:
                contexts.enter_context(self._for_all("flags", self.model.requiring_grad))
            if autocast is not None:
                contexts.enter_context(torch.autocast(device.type, autocast))
            if options.around is not None:
                contexts.enter_context(options.around(mode))
            contexts.enter_context(mode)
            contexts.enter_context(self._for_all("float32", partial(exact_float32, device)))
            contexts.enter_context(self._for_all("execution", partial(executed, self.model.module, options.execution)))
            if caches is not None:
                contexts.enter_context(self._for_all("caches", watched_caches))
                if caches.takes_queries:
                    contexts.enter_context(self._for_all("queries", watched_queries))
                contexts.enter_context(watching_caches(caches, mode))
                contexts.enter_context(caches.around(self.model.module))
            contexts.enter_context(foreign_code())
            yield

    def _run(
        self,
        call: Callable[[], Output],
        mode: WeightMode,
        options: PassOptions,
        observer: ModuleObserver,
        cache: OutputCache | None = None,
        reused: dict[tuple[str, int], int] | None = None,
        autocast: torch.dtype | None = None,
        caches: CacheWatcher | None = None,
    ) -> PassResult[Output]:
        """Run one forward pass under a torch-function mode. cache: keeps outputs of modules for later passes. reused: the calls to
        skip, as `ForwardPass.reusable_calls`. autocast: the dtype of torch's autocast, or None without autocast. caches: intercepts
        the KV caches that the pass writes, or None.
        """
        model = self.model
        run = ForwardPass(mode, observer, cache, reused or {}, options.earlier, model.by_id, options.watched)
        try:
            with _failures_as_no_forward(run, model.device), self._same_state(mode):
                if options.learns:
                    run.effects = SideEffects(model.device)
                self._calls.under_way = run
                started = time.perf_counter()
                with self._under(mode, options, autocast, caches):
                    output = call()
                if run.refused:
                    raise NoForward(run.refused)
                _refuse_unseen_queries(caches)
                synchronize(model.device)
                seconds = time.perf_counter() - started - run.observing_seconds
                if run.effects is not None:
                    self.behavior.add_effects(run.effects)
        finally:
            self._calls.under_way = None
            for settings in model.side_settings:
                settings.use(False)
            if self._together is None:
                model.memory.leave()
        return PassResult(
            output=output,
            seconds=seconds,
            finished=run.finished,
            spans=run.spans,
            first_use={model.by_id[key].info.name: finished for key, finished in mode.first_use.items()}
            | (caches.first_use if isinstance(caches, CacheRounding) else {}),
            attended=run.attended,
            added=mode.added,
            reused=bool(reused),
            cache=cache,
            left_wide=frozenset(mode.rounding.left_wide) if mode.rounding is not None else frozenset(),
            overflowing=frozenset(caches.overflowing) if isinstance(caches, CacheRounding) else frozenset(),
        )


def _refuse_unseen_queries(caches: CacheWatcher | None) -> None:
    if caches is not None and (unseen := caches.unseen):
        attention = printable(unseen[0].rpartition(f".{KV_CACHE}")[0])
        raise NoForward(
            f"the queries of {attention} can't be rounded, because the model does not call its attention by transformers' "
            f"AttentionInterface: measure a format without {QUERIES} at its end"
        )


@contextmanager
def _failures_as_no_forward(run: ForwardPass, device: torch.device) -> Iterator[None]:
    """Convert any error of the model's code, and lack of memory, to NoForward, which names the module that was running."""
    try:
        yield
    except (Cancelled, UserError):
        raise
    except torch.OutOfMemoryError:
        with enough_memory(_where(run.inside), device, NoForward):
            raise
    except Exception as error:
        if run.refused:
            raise NoForward(run.refused) from None
        raise NoForward(f"the forward pass failed in {_where(run.inside)}: {with_type(error)}") from error


def keeping_cache(batch: Batch) -> Batch:
    """Return a copy of a batch with which the model keeps a KV cache."""
    return dataclasses.replace(batch, kwargs=batch.kwargs | {"use_cache": True})


def _new_cache(forms: dict[str, str], options: PassOptions) -> OutputCache | None:
    return OutputCache(forms, options.cache_bytes, options.cached) if options.cache_bytes else None


def _where(inside: list[str]) -> str:
    return inside[-1] if inside else "the model"


def _unseen_casts(model: LiveModel, used: Collection[str], called: Collection[str]) -> frozenset[str]:
    """Return the names of the cast weights that a forward pass did not use in an intercepted call. used: the names of the weights
    that it used in such calls. called: the names of the submodules that it called. Raises NoForward if the model has functions of
    TorchScript, and a called module has an unseen weight.
    """
    unseen = frozenset(name for name, weight in model.weights.items() if weight.cast and name not in used)
    owned = [name for name in sorted(unseen) if "." not in name or name.rpartition(".")[0] in called]
    if owned and (function := _scripted(model.module)) is not None:
        raise NoForward(
            f"casts have no effect in functions of TorchScript such as {function}, and the pass uses {owned[0]} in no other call: "
            f"leave {owned[0]} as stored, or let the model call {function} as a plain Python function"
        )
    return unseen


def _scripted(module: nn.Module) -> str | None:
    """Return the name of a function of TorchScript that a module or the Python module of its class holds, or None."""
    parts = list(module.modules())
    namespaces = {name: vars(sys.modules[name]) for part in parts if (name := type(part).__module__) in sys.modules}
    held = (value for holder in (*map(vars, parts), *namespaces.values()) for value in list(holder.values()))
    return next((str(value.name) for value in held if isinstance(value, torch.jit.ScriptFunction)), None)

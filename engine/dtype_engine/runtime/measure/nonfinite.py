"""Explains infinite and NaN values: finds the first module and operation, the values beyond the dtype's range, and a rule that
helps.

One more pass runs inside a mode that sees every operation in its actual dtype. An operation is the culprit if it returns non-finite
values for finite arguments, and more of them than in the reference run. An attention mask that becomes -infinity is no error by
itself. If NaN comes of it, as from a softmax of nothing but -infinity, the operation that made the -infinity is the culprit. Then
the sets of rules of `nonfinite_scopes.py` are tried until the output is finite. If the output is finite from the start, because the
model's code clamps or saturates, they are tried until all modules are finite.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from dtype_engine.core import dtypes
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import KernelError, NoForward
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.results.attribution import NonFiniteDiagnosis
from dtype_engine.results.drift import ModuleDrift, OutputDrift, drifts_less
from dtype_engine.runtime.formats.dequantize import dtype_name
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.libraries.torch_private import WeakIdKeyDictionary
from dtype_engine.runtime.measure.drift import DriftMeter
from dtype_engine.runtime.measure.nonfinite_scopes import Magnitudes, Scope, scopes
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.modes.op_tables import METADATA, Arguments, tensors_in
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.passes.forward_pass import ModuleObserver
from dtype_engine.runtime.passes.one_pass import PassOptions
from dtype_engine.runtime.passes.runner import ForwardRunner

_MOST_WEIGHTS = 8


@dataclass(slots=True)
class _NonFiniteOp:
    """An operation in which non-finite values arise: its result or its weight is not finite, but its other arguments are."""

    module: str
    operation: str
    dtype: str
    largest: float
    """The largest |value| of the operation's weights or, if these are finite, of its arguments."""
    weights: tuple[str, ...]
    """The operation's weights that are not finite."""
    constant: float | None = None
    """A number in the model's code that becomes infinite or zero in the operation's dtype."""
    sources: tuple[str, ...] = ()
    """If it has no weights: those of the last operations with weights from whose results its arguments are computed."""


_Call = tuple[str, str, int]
"""A call in a pass: (module, operation, how many calls of the operation the module has made before)."""


class _OpObserver(TorchFunctionMode):
    """A torch-function mode that checks the result of every operation in a pass. It must be entered before the pass's own mode.

    reference: the `counts` that were observed in the reference run, or None to observe the reference run itself.
    """

    def __init__(self, weights: Mapping[int, Weight], reference: Mapping[_Call, tuple[int, int]] | None = None) -> None:
        super().__init__()
        self.weights = weights
        self.counts: dict[_Call, tuple[int, int]] = {}
        """How many values of a call's results are not finite, and how many of them are not -infinity, where there are any."""
        self.masks: list[_NonFiniteOp] = []
        """The operations in which masks became -infinity, in the order of the pass."""
        self._reference = reference or {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._mask_of: MutableMapping[torch.Tensor, _NonFiniteOp] = WeakIdKeyDictionary()
        self._sources: MutableMapping[torch.Tensor, frozenset[str]] = WeakIdKeyDictionary()
        self.observed: WeightMode | None = None
        """The mode under which the pass runs its operations, which knows the running module."""
        self.events: list[_NonFiniteOp | str] = []
        """The non-finite operations and the names of the finished modules, in the order of the pass."""
        self.largest: dict[tuple[str, str], float] = {}
        """The largest finite |value| of the results, by (module, operation)."""
        self.reached: dict[str, float] = {}
        """By weight name, the largest finite |value| of results and other arguments of the operations that use the weight."""
        self._vanished: dict[str, float] = {}

    def observing(self, mode: WeightMode) -> _OpObserver:
        """Observe a pass under `mode`. Returns this observer, which is the context that `PassOptions.around` has to return."""
        self.observed = mode
        return self

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, operation = kwargs or {}, func.__name__
        if operation in METADATA or operation.startswith(("__get__", "__set__", "is_", "empty", "new_empty")):
            result = func(*args, **kwargs)
            if operation == "__get__" and isinstance(result, torch.Tensor):  # such as `scores.T`
                self._pass_on(*self._origins(tensors_in(args, {})), [result])
            return result
        given = [tensor for tensor in tensors_in(args, kwargs) if tensor.is_floating_point() and tensor.numel()]
        weights = [(weight, tensor) for tensor in given if (weight := self.weights.get(id(tensor))) is not None]
        bad_weights = [weight for weight, tensor in weights if not _finite(tensor.data)]
        others = [tensor for tensor in given if id(tensor) not in self.weights]
        sound = not bad_weights and all(map(_finite, others))
        masked = not bad_weights and (sound or all(map(_only_masked, others)))
        before = max((_largest(tensor) for tensor in others), default=0.0) if masked else 0.0
        floor = min((float(_wide(tensor).min()) for tensor in others), default=0.0) if masked else 0.0
        mask, sources = self._origins(others)
        result = func(*args, **kwargs)
        outputs = [tensor for tensor in tensors_in((result,), {}) if tensor.is_floating_point() and tensor.numel()]
        module = self.observed.module if self.observed is not None else ""
        key = module, operation
        for tensor in outputs:
            self.largest[key] = max(self.largest.get(key, 0.0), _largest(tensor))
        for weight, _ in weights:
            name = weight.info.name
            self.reached[name] = max(self.reached.get(name, 0.0), before if sound else 0.0, *map(_largest, outputs))
        is_new = self._counted(key, outputs)
        if bad_weights:
            largest = max(_largest(weight.reference.read()) for weight in bad_weights)
            names = tuple(weight.info.name for weight in bad_weights)
            self.events.append(_NonFiniteOp(module, operation, dtype_name(given[-1].dtype), largest, names))
        elif masked and not _constant(args, kwargs):
            for tensor in outputs:
                constant = self._unheld_constant(module, tensor.dtype, _numbers(func, args, kwargs))
                if not is_new or _finite(tensor):
                    continue
                fed_by = () if weights else tuple(sorted(sources))
                event = mask or _NonFiniteOp(module, operation, dtype_name(tensor.dtype), before, (), constant, fed_by)
                mask = event if _only_masked(tensor) else mask
                if not _masks(tensor, floor):
                    self.events += [event] if event not in self.events else []
                    break
                self.masks.append(event)
        self._pass_on(mask, frozenset(weight.info.name for weight, _ in weights) or sources, outputs)
        return result

    def _counted(self, key: tuple[str, str], outputs: Iterable[torch.Tensor]) -> bool:
        """Count the values that are not finite in a call's results, and return whether the reference's call has fewer."""
        call = (*key, self._calls[key])
        self._calls[key] += 1
        odd = [tensor[~torch.isfinite(tensor)] for tensor in map(_wide, outputs)]
        counts = sum(map(len, odd)), sum(int((~torch.isneginf(values)).sum()) for values in odd)
        if counts[0]:
            self.counts[call] = counts
        return any(here > there for here, there in zip(counts, self._reference.get(call, (0, 0)), strict=True))

    def _origins(self, given: Iterable[torch.Tensor]) -> tuple[_NonFiniteOp | None, frozenset[str]]:
        """Return (the operation in which one of the tensors became -infinity, or None; the names of the weights they come from)."""
        given = list(given)
        mask = next((self._mask_of[tensor] for tensor in given if tensor in self._mask_of), None)
        return mask, frozenset[str]().union(*(self._sources.get(tensor, ()) for tensor in given))

    def _pass_on(self, mask: _NonFiniteOp | None, sources: frozenset[str], outputs: Iterable[torch.Tensor]) -> None:
        """Store the origin of a call's results, which is mostly that of its arguments. mask: the operation in which the arguments
        or the results became -infinity, or None. sources: the names of the weights from which the results are computed.
        """
        for tensor in outputs:
            self._sources[tensor] = sources
            self._mask_of.pop(tensor, None)  # in-place operations return their argument
            if mask is not None and not _finite(tensor):
                self._mask_of[tensor] = mask

    def magnitudes(self) -> Magnitudes:
        """Return the largest |values| seen in the pass, by weight and by module."""
        modules: dict[str, float] = {}
        for (module, _), largest in self.largest.items():
            modules[module] = max(modules.get(module, 0.0), largest)
        return Magnitudes(self.reached, modules)

    def _unheld_constant(self, module: str, dtype: torch.dtype, numbers: Iterable[float]) -> float | None:
        """Return a number in the model's code that `dtype` can't represent, or None. This is the first of `numbers` that becomes
        infinite. If there is none, it is the last number that became zero in an operation of `module`, now or earlier, such as an
        epsilon of 1e-12 in float16. numbers: the float arguments of the running operation.
        """
        for number in numbers:
            held = torch.tensor(number, dtype=torch.float64).to(dtype)
            if not bool(torch.isfinite(held)):
                return number
            if number and not bool(held):
                self._vanished[module] = number
        return self._vanished.get(module)


@dataclass
class _FinishedModules(ModuleObserver):
    """Appends the modules that finish in a pass to `operations.events`, and adds those with non-finite outputs to `names`."""

    operations: _OpObserver
    names: set[str] = field(default_factory=set)

    def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
        self.operations.events.append(module)
        if not _finite(output):
            self.names.add(module)


def diagnose_nonfinite(
    meter: DriftMeter,
    tree: Tree,
    recipe: Recipe,
    modules: Iterable[ModuleDrift],
    output: OutputDrift,
    on_trial: Callable[[int, int], None] = ignore,
    cancelled: IsCancelled = never,
) -> NonFiniteDiagnosis:
    """Find the operation that causes non-finite values in a model measured under `recipe`, and rules that avoid them.

    modules, output: the results of that measurement, with modules in the order of the pass. If the output is finite but modules are
    not, the rules make every module finite. `on_trial(done, total)` is called before each trial, with the numbers of tried and of
    all sets of rules. The model stays cast as in the last trial. Raises NoForward, KernelError, Cancelled.
    """
    reference_bad = bool(output.nonfinite_reference and not output.nonfinite)
    modules = list(modules)
    first = next((each.name for each in modules if each.nonfinite), "")
    with ForwardRunner(meter.model, meter.settings, cancelled, behavior=meter.behavior) as runner:
        origin = _find_origin(runner, meter.inputs, first, reference_bad)
    if reference_bad:
        stored = tuple(
            name for name, weight in meter.model.weights.items()
            if weight.reference.dtype.is_floating_point and not _finite(weight.reference.read())
        )  # fmt: skip
        why = (
            f"{stored[0]} is stored with values that are not finite"
            if stored
            else "its own float32 values overflow or are NaN"
        )
        reason = f"the reference itself is not finite ({why}), so no dtype helps"
        diagnosis = _diagnosis("reference", origin, (), reason)
        return dataclasses.replace(diagnosis, weights=stored[:_MOST_WEIGHTS])
    remedy: Scope = ()
    reason, after = "", None
    culprit = origin.culprit or _NonFiniteOp("", "", "", 0.0, ())
    tried = scopes(
        tree, recipe, culprit.module, culprit.weights, culprit.sources, culprit.largest, culprit.dtype, origin.reached
    )
    what: Literal["output", "modules"] = "output" if output.nonfinite else "modules"
    for done, make_rules in enumerate(tried):
        on_trial(done, len(tried))
        rules = make_rules()
        after = _finite_output_under(meter, tree, recipe.then(*rules), what, cancelled)
        if after is not None:
            if what == "modules":
                rules, after = _better_in_float32(meter, tree, recipe, rules, after, cancelled)
            remedy = rules
            reason = "the reference itself has other values that are not finite" if after.nonfinite_reference else ""
            break
    if not remedy:
        reason = f"no rule was found that makes {'the output' if what == 'output' else 'every module'} finite"
        if meter.settings.autocast is not None:
            reason = f"torch.autocast computes in {meter.settings.autocast}, whatever the weights' dtypes: turn it off"
    kind: Literal["weight", "activation", "unknown"] = "unknown"
    if origin.culprit is not None:
        kind = "weight" if origin.culprit.weights else "activation"
    diagnosis = _diagnosis(kind, origin, remedy, reason)
    return dataclasses.replace(diagnosis, before=output, after=after)


def _diagnosis(
    kind: Literal["weight", "activation", "reference", "unknown"], origin: _Origin, remedy: Scope, reason: str
) -> NonFiniteDiagnosis:
    first, culprit, rules = origin.first_module, origin.culprit, tuple(map(str, remedy))
    if culprit is None:
        return NonFiniteDiagnosis(kind, first, first, "", "", None, (), None, None, rules, reason)
    row = dtypes.BY_NAME.get(culprit.dtype)
    limit = row.max if row is not None else None
    constant, largest_reference = culprit.constant, origin.largest_reference
    if constant is not None and limit is not None and abs(constant) < 1 and (largest_reference or 0.0) > limit:
        constant = None  # the reference's result is out of range anyway, so the constant is not the cause
    return NonFiniteDiagnosis(
        kind=kind,
        first_module=first,
        module=culprit.module,
        operation=culprit.operation,
        dtype=culprit.dtype,
        limit=limit,
        weights=culprit.weights[:_MOST_WEIGHTS],
        largest=culprit.largest,
        largest_reference=largest_reference,
        remedy=rules,
        reason=reason,
        constant=constant,
    )


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where in a pass non-finite values arise first."""

    culprit: _NonFiniteOp | None
    """The operation in which non-finite values arise, or None if it was not found."""
    first_module: str
    """The first module whose output is not finite, or "" if there is none."""
    largest_reference: float | None = None
    """The largest |value| that the culprit returns in the reference run, or None if it is unknown."""
    reached: Magnitudes = field(default_factory=lambda: Magnitudes({}, {}))
    """The largest |values| in the reference run, by weight and by module."""


def _find_origin(runner: ForwardRunner, inputs: Inputs, first: str, reference_bad: bool) -> _Origin:
    """Find where non-finite values arise. first: the first module in whose output the measurement found such values, or "".
    reference_bad: whether to search in the reference run, because only the reference has such values in its main output.
    """
    for batch in inputs.batches:
        plain = _OpObserver(runner.model.by_id)
        came_out = _FinishedModules(plain)
        runner.reference(runner.reference_call(batch), PassOptions(around=plain.observing), came_out)
        if reference_bad:
            events = [event for event in plain.events if isinstance(event, _NonFiniteOp)]
            if events or came_out.names:
                order = [event for event in plain.events if isinstance(event, str) and event in came_out.names]
                return _Origin(events[0] if events else None, order[0] if order else "")
            continue
        anyway = {
            (event.module, event.operation) for event in plain.events if not isinstance(event, str) and event.weights
        }
        always = came_out.names
        operations = _OpObserver(runner.model.by_id, plain.counts)
        came_out = _FinishedModules(operations)
        runner.candidate(runner.candidate_call(batch), PassOptions(around=operations.observing), came_out)
        # The measurement may have missed the first module if it compared modules only in some sequences.
        lost = {first, *(came_out.names - always)} - {""}
        first = next((event for event in operations.events if isinstance(event, str) and event in lost), first)
        before: _NonFiniteOp | None = None
        inside: _NonFiniteOp | None = None
        for event in operations.events:
            if isinstance(event, _NonFiniteOp) and not (event.weights and (event.module, event.operation) in anyway):
                before = event
                if inside is None and event.module == first:
                    inside = event
            elif event == first and first:
                break
        # Inside the module, the first event is the cause; otherwise, the last event before the module, or else a mask.
        culprit = inside or before or next(iter(operations.masks), None)
        if culprit is not None:
            return _Origin(culprit, first, plain.largest.get((culprit.module, culprit.operation)), plain.magnitudes())
    return _Origin(None, first)


def _finite_output_under(
    meter: DriftMeter, tree: Tree, recipe: Recipe, what: Literal["output", "modules"], cancelled: IsCancelled
) -> OutputDrift | None:
    """Return the drift under a recipe, or None if the model can't run or if values are not finite. what: "output" if only the
    values of the main output have to be finite, "modules" if also those of every module.
    """
    plan = make_plan(tree, recipe)
    meter.model.apply(plan.dtypes, cancelled=cancelled, caches=plan.caches)
    try:
        totals = meter.measure(cancelled=cancelled)
    except (KernelError, NoForward):
        return None
    bad = totals.output.nonfinite or (what == "modules" and any(each.nonfinite for each in totals.modules))
    return None if bad else totals.output


def _better_in_float32(
    meter: DriftMeter, tree: Tree, recipe: Recipe, rules: Scope, output: OutputDrift, cancelled: IsCancelled
) -> tuple[Scope, OutputDrift]:
    """Try float32 instead of bfloat16 in `rules`. Returns the better rules, and their drift. output: the drift under `rules`."""
    wider = tuple(Rule.make(rule.pattern, "float32") for rule in rules)
    after = _finite_output_under(meter, tree, recipe.then(*wider), "modules", cancelled)
    return (wider, after) if after is not None and drifts_less(after, output) else (rules, output)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(_wide(tensor)).all())


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    magnitudes = _wide(tensor.detach()).abs()
    largest = float(magnitudes.max())
    return largest if math.isfinite(largest) else float(torch.nan_to_num(magnitudes, 0.0, 0.0, 0.0).max())


def _constant(args: Arguments, kwargs: dict[str, Any]) -> bool:
    """Return whether an argument of a torch call is infinity or NaN. The model's code then intends non-finite values."""
    return any(isinstance(value, float) and not math.isfinite(value) for value in (*args, *kwargs.values()))


def _numbers(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Iterator[float]:
    """Yield the float arguments of a call, and the default values of omitted arguments, since an epsilon is usually a default."""
    yield from (value for value in (*args, *kwargs.values()) if isinstance(value, float))
    code, names = getattr(func, "__code__", None), getattr(func, "__defaults__", None) or ()
    if code is not None:
        named = code.co_varnames[: code.co_argcount]
        by_default = dict(zip(named[len(named) - len(names) :], names, strict=True))
        given = {*named[: len(args)], *kwargs}
        yield from (value for name, value in by_default.items() if isinstance(value, float) and name not in given)


def _only_masked(tensor: torch.Tensor) -> bool:
    return not bool((torch.isnan(wide := _wide(tensor)) | torch.isposinf(wide)).any())


def _masks(result: torch.Tensor, smallest_given: float) -> bool:
    """Return whether the non-finite values of a result are an attention mask, which is no error: all are -infinity, and the
    smallest number among the arguments (`smallest_given`) was already close to the dtype's lowest value.
    """
    lowest = torch.finfo(result.dtype).min
    odd = result[~torch.isfinite(result)]
    return smallest_given <= 0.99 * lowest and bool(torch.isneginf(odd).all())

"""Measures how many drafts of a checkpoint's own draft head (multi-token prediction, MTP) the model accepts.

At position t, the first draft layer gets the model's last hidden state and the embedding of token t+1, and predicts token t+2: the
distribution q (DeepSeek-V3 technical report, arXiv:2412.19437, equations 21 to 23). p is the model's own distribution of token t+2
after token t+1. The acceptance is Σ min(p, q), as `numerics/compare/sequence_figures.py` computes it.

transformers builds the head (`transformers.modeling_layers.MtpModel`) from a file that holds its values in float32: the
stored ones for the reference, and those that the rules give for the candidate. The draft layer computes in float32. The embedding
and the output layer are those of the model, and compute as in its own run.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.draft_heads import LAYOUTS, WORDS
from dtype_engine.core.errors import Cancelled, UserError, exhausted
from dtype_engine.core.execution import Execution
from dtype_engine.core.foreign_code import with_type
from dtype_engine.core.fused import scale_groups
from dtype_engine.core.options import STORED, RunSettings
from dtype_engine.core.text import printable
from dtype_engine.results.draft_head import DraftAcceptance
from dtype_engine.runtime.formats.row_blocks import finite_amax
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.libraries.hf_private import as_published, draft_logits
from dtype_engine.runtime.libraries.silence_libraries import quiet
from dtype_engine.runtime.measure.listener import OnProgress
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.compare.sequence_figures import sequence_figures
from dtype_engine.runtime.numerics.quantize import values_in
from dtype_engine.runtime.passes.forward_pass import ModuleObserver
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.one_pass import PassOptions
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.weights.checkpoint_weights import source_of
from dtype_engine.runtime.weights.temporary_file import temporary_folder

Side = Literal["reference", "candidate"]
_ARGUMENTS = {"input_ids", "attention_mask", "use_cache"}
_OF_THE_MODEL = ("shared_head.head.weight", "embed_tokens.weight")
"""The ends of the names of tensors that published heads repeat from the model. transformers uses the model's."""


def asks_for_drafts(model: LiveModel, settings: RunSettings) -> bool:
    """Return whether the settings ask for the acceptance, and the model has a draft head, if only by its config.json."""
    return settings.acceptance and bool(model.tree.draft or model.tree.draft.declared)


def not_measured(why: str) -> str:
    """Return a notice for the user. why: the reason, a part of a sentence."""
    return f"acceptance of the {WORDS} is not measured: {why}"


@dataclass
class DraftMeter:
    """Measures the acceptance of a model's draft head. What the reference accepts is measured once and kept."""

    model: LiveModel
    behavior: ModelBehavior
    _reference: dict[int, torch.Tensor] = field(default_factory=dict)
    """Σ min(p, q) of the reference at each position, float64 [positions], by the number of the sequence."""
    _settings: RunSettings | None = None
    """The settings with which the reference ran."""

    def measure(
        self,
        batches: Mapping[int, Batch],
        planned: Mapping[str, str],
        settings: RunSettings,
        on_progress: OnProgress,
        cancelled: IsCancelled,
    ) -> DraftAcceptance:
        """Run the reference and the candidate once more over sequences, each with the head.

        batches: the sequences, by number. planned: the dtype of each tensor, by name; the model is cast to these. Raises UserError,
        with the reason, where the acceptance can't be measured, and NoForward, KernelError, Cancelled.
        """
        self._refuse(batches, settings)
        batches = {number: batch for number, batch in batches.items() if _drafts_of(batch)}
        if self._settings != settings:
            self._settings, self._reference = settings, {}
        missing = {number: batch for number, batch in batches.items() if number not in self._reference}
        if missing:
            self._reference |= self._side("reference", missing, {}, settings, on_progress, cancelled)
        candidate = self._side("candidate", batches, planned, settings, on_progress, cancelled)
        reference = {number: self._reference[number] for number in batches}
        (p, p_se), (q, q_se) = _mean(reference), _mean(candidate)
        positions = sum(map(len, candidate.values()))
        return DraftAcceptance(reference=p, candidate=q, reference_se=p_se, candidate_se=q_se, positions=positions)

    def _refuse(self, batches: Mapping[int, Batch], settings: RunSettings) -> None:
        """Raise UserError if the head can't be measured, as far as this is known before transformers builds it."""
        model, draft = self.model, self.model.tree.draft
        if not draft:
            raise UserError(f"config.json declares one by {draft.entry}, and no file has its tensors")
        if lost := draft.missing(model.tree.of_draft):
            raise UserError(f"its files lack {printable(lost[0])}")
        if model.reference not in ("", STORED):
            raise UserError("the reference is another checkpoint")
        if model.state_formats or settings.execution.regroups or settings.reference_execution.regroups:
            raise UserError("it needs passes over one whole sequence each")
        if any(not _is_plain(batch) for batch in batches.values()):
            raise UserError("the inputs are not sequences of tokens alone, without padding")
        if not any(_drafts_of(batch) for batch in batches.values()):
            raise UserError("no sequence has two tokens")

    def _side(
        self,
        side: Side,
        batches: Mapping[int, Batch],
        planned: Mapping[str, str],
        settings: RunSettings,
        on_progress: OnProgress,
        cancelled: IsCancelled,
    ) -> dict[int, torch.Tensor]:
        """Return Σ min(p, q) at each position of each sequence, float64 [positions] on the CPU, by number."""
        head = built_head(self.model, planned)
        execution, found = settings.execution if side == "candidate" else settings.reference_execution, {}
        with ForwardRunner(self.model, settings, cancelled, behavior=self.behavior) as runner:
            if side == "candidate":
                runner.calibrate_caches(batches.values())
            for done, (number, batch) in enumerate(batches.items()):
                on_progress(f"{side}, draft head", done, len(batches))
                found[number] = _accepted(runner, side, head, batch, execution)
        return found


class _LastStates(ModuleObserver):
    """Keeps the last hidden states of a pass, after the model's last norm: the output of the decoder."""

    states: torch.Tensor | None = None

    def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
        self.states = output


def _accepted(runner: ForwardRunner, side: Side, head: Any, batch: Batch, execution: Execution) -> torch.Tensor:
    """Return Σ min(p, q) at all but the last position of each sequence of a batch, float64 [positions] on the CPU."""
    model, seen = runner.model, _LastStates()
    module: Any = model.module
    decoder = module.get_decoder()
    ids = batch.kwargs["input_ids"].to(model.device)
    call = runner.reference_call(batch) if side == "reference" else runner.candidate_call(batch)

    def with_drafts() -> tuple[torch.Tensor, torch.Tensor]:
        logits, states = main_output(call())[1], seen.states
        if states is None or states.shape[:2] != ids.shape or logits.shape[:2] != ids.shape:
            raise UserError("the model does not return a hidden state and logits for each token")
        # Each draft layer computes in float32. Only its weights have other dtypes.
        embedded = head.embed_tokens(ids[:, 1:]).float()
        positions = torch.arange(1, ids.shape[1], device=ids.device).expand(len(ids), -1)
        drafted = head.forward_layer(0, states[:, :-1].float(), positions, None, inputs_embeds=embedded)
        return logits[:, 1:], draft_logits(head, drafted)

    names = frozenset(name for name, each in module.named_modules() if each is decoder)
    run = runner.reference if side == "reference" else runner.candidate
    logits, drafts = run(with_drafts, PassOptions(watched=names, execution=execution), seen).output
    if logits.shape != drafts.shape:
        raise UserError(f"the model has {logits.shape[-1]:,} logits for a token, and the head {drafts.shape[-1]:,}")
    rows = sequence_figures(logits.flatten(0, 1), drafts.flatten(0, 1), distribution=True, acceptance=True).positions
    assert rows is not None
    assert rows.accepted is not None
    return rows.accepted


def built_head(model: LiveModel, planned: Mapping[str, str]) -> Any:
    """Return transformers' `MtpModel` of a model, with the first draft layer in float32, on the model's device. Its embedding and
    its output layer are the modules of the model.

    planned: the dtypes to which tensors of the head are cast first, by name; all others have the stored values. Raises UserError if
    the installed transformers can't build the head.
    """
    import transformers  # a model of the user's own code does not need it

    module: Any = model.module
    version, name = transformers.__version__, type(module).__name__
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise UserError(f"transformers {version} has no MtpModel, which runs draft heads") from None
    config = getattr(module, "config", None)
    if config is None or getattr(config.get_text_config(decoder=True), "num_mtp_layers", None) is None:
        raise UserError(f"transformers {version} can't run that of {name}")
    # What is changed below belongs to a copy, which shares all modules with the model.
    view = copy.copy(module)
    as_published(view)
    view.config = copy.deepcopy(config)
    view.config.dtype = torch.float32
    view.config.get_text_config(decoder=True).num_mtp_layers = 1
    folder = ""
    try:
        with tempfile.TemporaryDirectory(prefix="dtype-engine-", dir=temporary_folder()) as folder, quiet():
            known = MtpModel.get_mtp_weights_regex(view)
            tensors = _first_layer(model, planned)
            if not all(map(known.search, tensors)):
                raise UserError(
                    f"transformers {version} knows that of {name} by other names than {printable(min(tensors))}"
                )
            save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
            del tensors
            view.config.name_or_path = folder
            return MtpModel.from_pretrained(view, device_map={"": model.device}).eval()
    except (UserError, Cancelled):
        raise
    except Exception as error:
        why = exhausted(error) or with_type(error)
        why = why.replace(folder, "its file") if folder else why
        raise UserError(f"transformers {version} can't build that of {name}: {why}") from error


def _first_layer(model: LiveModel, planned: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the values of the first draft layer by their names in the files, float32 on the CPU. Tensors that the model has, too,
    are left out. planned: as for `built_head`; no rounding is fitted to a head, so it gets the nearest values.
    """
    checkpoint, draft, held = model.checkpoint, model.tree.draft, model.tree.of_draft
    assert checkpoint is not None  # a head is known from the names of a checkpoint
    later = [
        f"{module}."
        for module in (draft.modules if LAYOUTS[draft.layout].numbered else ())
        if module.rpartition(".")[2] != str(draft.first)
    ]
    cast = {
        name: dtypes.unrounded(planned[name])
        for name, info in held.items()
        if planned.get(name, info.dtype) != info.dtype
    }
    groups, found = scale_groups(cast), {}
    for name in held:
        if name.startswith(tuple(later)) or name.endswith(_OF_THE_MODEL):
            continue
        values = source_of(checkpoint, name).read()
        if name in cast:
            sharing = (source_of(checkpoint, member).read() for member in groups.get(name, ()))
            amax = max(map(finite_amax, sharing), default=None)
            values = values_in(values, cast[name], torch.float32, amax)
        found[name] = values.to(torch.float32, copy=True).contiguous()
    return found


def _is_plain(batch: Batch) -> bool:
    ids, mask = batch.kwargs.get("input_ids"), batch.kwargs.get("attention_mask")
    padded = isinstance(mask, torch.Tensor) and not bool(mask.bool().all())
    plain = not batch.args and _ARGUMENTS.issuperset(batch.kwargs) and not padded
    return plain and isinstance(ids, torch.Tensor) and ids.ndim == 2


def _drafts_of(batch: Batch) -> int:
    """Return how many tokens are drafted for each sequence of a batch."""
    drafts: int = batch.kwargs["input_ids"].shape[1] - 1
    return drafts


def _mean(accepted: Mapping[int, torch.Tensor]) -> tuple[float, float | None]:
    """Return (the mean over all positions, its standard error or None for a single position). Raises UserError if it is NaN."""
    values = torch.cat([*accepted.values()])
    mean = float(values.mean())
    if not math.isfinite(mean):
        raise UserError("not all logits are finite")
    return mean, float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None

"""Describes a model for all commands, mostly by the headers of its files and the architecture built without data. Only a model from
Python code, or a pickle that holds a whole module, has to be loaded. Also compares a checkpoint with its architecture.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from dtype_engine.checkpoint import Checkpoint, read_json
from dtype_engine.checkpoint.check import architecture_findings, check
from dtype_engine.checkpoint.components import component_names
from dtype_engine.checkpoint.kv_cache import CACHE_SCALES
from dtype_engine.checkpoint.plausible import ImpossibleConfig
from dtype_engine.checkpoint.source import Source
from dtype_engine.checkpoint.weight_files import PIPELINE_INDEX, NoWeights
from dtype_engine.core.errors import NoForward
from dtype_engine.core.options import ModelOptions
from dtype_engine.core.tree import Tree
from dtype_engine.results.check import CheckReport, Finding
from dtype_engine.results.coverage import Coverage
from dtype_engine.runtime.building.architecture import Misfit
from dtype_engine.runtime.building.load import build_on_meta, load
from dtype_engine.runtime.building.shapes import integers, misshapen
from dtype_engine.runtime.model.module_tree import collect_tensors, tree_of
from dtype_engine.runtime.model.name_mapping import Placement, map_names
from dtype_engine.runtime.model.stored_tree import NOT_USED, stored_tree


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The tree of a model's modules and tensors, and facts from its configuration."""

    tree: Tree
    kinds: dict[str, frozenset[str]]
    """The names of the base classes of each module class in the tree, by the class's name."""
    model_type: str | None
    placements: Mapping[str, Placement] = field(default_factory=dict)
    """Where each tensor of the files is loaded in the model. A tensor without an entry has the same name in both."""
    class_name: str = ""
    """The name of the model class that the configuration names, or "" if no class is known."""
    coverage: Coverage | None = None
    """Which of the model's tensors the files have. None if this is unknown, or if the module had to be loaded."""
    unknown: NoForward | None = None
    """Why the architecture is unknown or can't be built, or None if the tree has module classes."""


def describe(source: Source, options: ModelOptions, checkpoint: Checkpoint | None = None) -> ModelDescription:
    """Return a description of the model in `source`. If the architecture is unknown, only the files are described.

    checkpoint: the headers of `source`, if they were read already. Raises UserError if the source can't be read or opened.
    """
    options = dataclasses.replace(options, device="cpu")
    if checkpoint is None:
        checkpoint = source.open()
    if checkpoint is None:
        module = load(source, options).module
        return ModelDescription(tree_of(module), _kinds(module), None)
    model_type = (checkpoint.config or {}).get("model_type")
    named = model_type if isinstance(model_type, str) else None
    alone = {name: Placement(name, False) for name in checkpoint.weights}
    try:
        module_without_data, placements = build_on_meta(checkpoint, options)
    except Misfit as misfit:
        return ModelDescription(checkpoint.tree(), {}, named, alone, misfit.class_name, misfit.coverage, misfit)
    except NoForward as error:
        try:
            live = load(source, options)
        except NoForward as of_loading:
            why = error if checkpoint.form in ("safetensors", "pickle") else of_loading
            return ModelDescription(checkpoint.tree(), {}, named, alone, unknown=why)
        return ModelDescription(live.tree, _kinds(live.module), named, map_names(live.module, checkpoint.weights))
    wrong = misshapen(module_without_data, checkpoint, placements)
    tree = stored_tree(module_without_data, checkpoint, placements, wrong)
    whole = integers(module_without_data, checkpoint, placements)
    found = dataclasses.replace(_coverage(module_without_data, tree), misshapen=wrong, integers=whole)
    return ModelDescription(
        tree, _kinds(module_without_data), named, placements, type(module_without_data).__name__, found
    )


def _coverage(module: nn.Module, tree: Tree) -> Coverage:
    """Return how many tensors a module has, and the names of those that only the module or only the files have. Differences that
    the module's class declares to be harmless are left out.
    """
    spared, left_over = (
        [re.compile(pattern) for pattern in getattr(module, f"_keys_to_ignore_on_load_{kind}", None) or ()]
        for kind in ("missing", "unexpected")
    )
    left_over += map(re.compile, _harmless(module))
    missing = [
        tensor.name
        for tensor in tree.tensors.values()
        if tensor.made_on_load and tensor.kind == "parameter" and not any(each.search(tensor.name) for each in spared)
    ]
    unused = [
        tensor.name
        for tensor in tree.tensors.values()
        if (tensor.uncastable_reason or "").startswith(NOT_USED)
        and not any(each.search(tensor.name) for each in left_over)
        and not tensor.name.endswith(CACHE_SCALES)
    ]
    expected = sum(info.persistent for info in collect_tensors(module)[0])
    return Coverage(expected, tuple(missing), tuple(unused))


def _harmless(module: nn.Module) -> Iterator[str]:
    """Yield patterns for tensors in the files that the module rightly ignores, although its class does not declare it."""
    if any(name.endswith("rotary_emb.inv_freq") for name, _ in module.named_buffers()):
        yield r"rotary_emb\.inv_freq$"  # old checkpoints have them; transformers computes them


def _kinds(module: nn.Module) -> dict[str, frozenset[str]]:
    classes = {type(child) for child in module.modules()}
    return {
        module_class.__name__: frozenset(
            base.__name__ for base in module_class.__mro__[1:] if issubclass(base, nn.Module) and base is not nn.Module
        )
        for module_class in classes
    }


def with_architecture(
    report: CheckReport, source: Source, options: ModelOptions, checkpoint: Checkpoint
) -> CheckReport:
    """Return `report` with the findings of a comparison with the architecture: one for each tensor that only the checkpoint or
    only the architecture has, or whose shapes in the two differ. If no model can be made of config.json, there is only one new
    finding, which says so. If the architecture is unknown, the reason is added to `unchecked` instead.

    Raises UserError if transformers does not have the architecture that `options` name.
    """
    if checkpoint.form == "diffusers" and not checkpoint.headers_alone:
        return _with_components(report, source, options, checkpoint)
    known = describe(source, options, checkpoint)
    if known.coverage is None:
        if known.unknown is not None and _contradicts(known.unknown, options):
            finding = Finding("configuration", "config.json", f"makes no model: {known.unknown}", "config.json")
            return dataclasses.replace(report, findings=(*report.findings, finding))
        why = known.unknown or "the files hold a whole module, which was loaded as it is"
        return dataclasses.replace(report, unchecked=(*report.unchecked, f"the architecture: {why}"))
    reported = {finding.tensor for finding in report.findings}
    more = architecture_findings(known.coverage, known.class_name, checkpoint)
    by_names = [finding for finding in report.findings if finding.kind != "declared-size"]  # the architecture is exact
    findings = (*by_names, *(finding for finding in more if finding.tensor not in reported))
    return dataclasses.replace(report, findings=findings, coverage=known.coverage)


def _with_components(report: CheckReport, source: Source, options: ModelOptions, checkpoint: Checkpoint) -> CheckReport:
    """Return the report of a diffusers pipeline with what is found in its components, each checked as a model of its own."""
    findings, unchecked = {(each.kind, each.tensor): each for each in report.findings}, dict.fromkeys(report.unchecked)
    for name in component_names(read_json(checkpoint.path / PIPELINE_INDEX)):
        folder = checkpoint.path / name
        if not folder.is_dir():
            what = f"is a component by {PIPELINE_INDEX}, and there is no such folder"
            findings["missing-tensor", name] = Finding("missing-tensor", name, what, PIPELINE_INDEX)
        if not (folder / "config.json").is_file():
            continue  # a scheduler or tokenizer
        part = dataclasses.replace(source, title=name, path=folder)
        try:
            opened = part.open(absent_shards=True)
        except NoWeights:
            what = "is a component that has a config.json and no weights"
            findings["missing-tensor", name] = Finding("missing-tensor", name, what, f"{name}/config.json")
            continue
        assert opened is not None
        found = with_architecture(check(opened, name), part, options, opened)
        for each in found.findings:
            full = Finding(each.kind, f"{name}.{each.tensor}", each.what, f"{name}/{each.file or 'config.json'}")
            findings.setdefault((full.kind, full.tensor), full)
        unchecked |= {f"{name}: {sentence}": None for sentence in found.unchecked if sentence not in unchecked}
    return dataclasses.replace(report, findings=tuple(findings.values()), unchecked=tuple(unchecked))


def _contradicts(error: NoForward, options: ModelOptions) -> bool:
    """Return whether an error is the fault of config.json, and not of a missing package, the machine or a model's own code."""
    outside = (ImportError, OSError, MemoryError)
    of_machine = isinstance(error.__cause__, outside) or isinstance(error.__context__, outside)
    return isinstance(error, ImpossibleConfig) and not of_machine and not options.trust_remote_code

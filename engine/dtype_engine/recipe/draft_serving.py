"""Predicts how a runtime builds the draft head of an export: with which formats, and which of them the files do not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import WORDS, Runtime
from dtype_engine.core.tree import Tree
from dtype_engine.recipe.schemes import layout


@dataclass(frozen=True, slots=True)
class DraftProblem:
    """Layers of a draft head that a runtime builds in another format than the files have, so that it can't load them."""

    why: str
    short: str
    source: str
    tensors: tuple[str, ...]


def draft_problems(tree: Tree, runtime: Runtime, quantised: Mapping[str, str]) -> Iterator[DraftProblem]:
    """Yield the layers of a draft head that a runtime can't load.

    A runtime builds the head with the quantization settings of the model, and looks up each layer by a name. Where this name is not
    that of the files, it finds the settings of another layer or none. quantised: the format of each weight with scales, by name.
    """
    build = tree.draft.build(runtime)
    if build is None or not quantised:
        return
    planned = {
        stored: dtype
        for name, dtype in quantised.items()
        for stored in (tree.tensors[name].stored_as or tree.tensors[name].names)
    }
    # Settings for DeepSeek's fp8 list the layers without scales, those of compressed-tensors and GPTQ the layers with them.
    default = next((dtype for dtype in quantised.values() if layout(dtype) == "fp8"), "")
    found: dict[tuple[str, str], list[str]] = {}
    stems = tree.draft.stems(runtime)
    for name in tree.of_draft:
        module, _, local = name.rpartition(".")
        if local != "weight" or tree.modules[module].class_name != "Linear":
            continue
        stem = next((each for each in stems if module.startswith(f"{each}.")), "")
        named = stems.get(stem, "") + module.removeprefix(stem)
        wide = next((each for each in build.wide if f".{module}".endswith(f".{each}")), "")
        built, has = "" if wide else planned.get(f"{named}.weight", default), quantised.get(name, "")
        if built == has:
            continue
        if wide:
            why, short = f"it builds {wide} of the {WORDS} without scales", f"{wide} has scales"
        else:
            found_there = f"those of a layer in {dtypes.short_name(built)}" if built else "none"
            why = f"it looks up the settings of {stem} as those of {stems[stem]}, and finds {found_there}"
            short = f"looked up as {stems[stem]}"
        found.setdefault((why, short), []).append(name)
    for (why, short), names in found.items():
        yield DraftProblem(why, f"{WORDS}: {short}", build.source, tuple(names))


def draft_notes(tree: Tree, runtime: Runtime, planned: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for the user on the formats of a draft head and on how a runtime builds it, or () without one. planned: the
    dtypes of all tensors, by name.
    """
    if not tree.of_draft:
        return ()
    counts: dict[str, int] = {}
    for name in tree.of_draft:
        counts[planned[name]] = counts.get(planned[name], 0) + 1
    formats = ", ".join(f"{count} in {dtypes.short_name(dtype)}" for dtype, count in counts.items())
    build = tree.draft.build(runtime)
    if build is None:
        return (f"{WORDS}, tensors: {formats}; how {runtime} builds a head with these names is not known",)
    return (f"{WORDS}, tensors: {formats}; {runtime} builds it with the settings of the model ({build.source})",)

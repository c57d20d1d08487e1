"""Formats a model's modules, dtypes, parameters and bytes as text for a terminal: as a tree, as the largest modules, or by kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest

from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import WORDS
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Module, TensorInfo, Totals, Tree
from dtype_engine.core.units import human_bytes, human_count, percent, plural
from dtype_engine.recipe import Plan, tensor_bytes
from dtype_engine.reports.alike import AlikeModules
from dtype_engine.reports.layer_kinds import totals_by_kind
from dtype_engine.reports.text import mix_text
from dtype_engine.reports.text_table import table_lines

_HEAD = ("module", "dtype, % of bytes", "parameters", "bytes")


@dataclass(frozen=True, slots=True)
class TreeView:
    """The settings of `tree_text`: the levels and the order of modules."""

    depth: int | None = None
    """How many levels below the model are shown; None shows all."""
    fold: bool = False
    """Whether neighboring layers that are alike are folded: the first layer is shown, and all others as one line."""
    by_bytes: bool = False
    """Whether the largest children of a module come first. Otherwise they are in the model's order."""


def tree_text(tree: Tree, plan: Plan, title: str, view: TreeView) -> str:
    """Return the modules and their tensors with dtypes, parameters and bytes as an indented tree."""
    rows = [_HEAD, *_Rows(tree, plan, title, view).below(tree.root, 0)]
    lines = table_lines([(printable(label), *cells) for label, *cells in rows], (2, 3))
    return "\n".join([*lines, *_unknown_counts(tree)])


class _Rows:
    """Makes the rows of the table that shows a module tree. Each row is (label, dtypes, parameters, bytes)."""

    def __init__(self, tree: Tree, plan: Plan, title: str, view: TreeView) -> None:
        self._tree, self._plan, self._title, self._view = tree, plan, title, view
        self._totals = tree.totals(plan.dtypes)
        self._alike = AlikeModules(tree, plan.dtypes, plan.caches) if view.fold else None

    def below(self, module: Module, level: int) -> Iterator[tuple[str, str, str, str]]:
        """Yield the row of a module, and the rows of its tensors and children. level: the number of modules above the module."""
        about = f"  {module.class_name}" if module.class_name else ""
        about += f"  {WORDS}" if module.name in self._tree.draft.modules else ""
        yield _module_row("  " * level + (module.label or self._title) + about, self._totals[module.name])
        if self._view.depth is not None and level >= self._view.depth:
            return
        for local, tensor in module.tensors.items():
            yield self._tensor_row(module, local, tensor, level + 1)
        children = list(module.children.values())
        runs = self._alike.runs(children) if self._alike is not None else ([child] for child in children)
        ordered = list(runs)
        if self._view.by_bytes:
            ordered.sort(key=lambda run: -sum(self._totals[child.name].total_bytes for child in run))
        for first, *others in ordered:
            yield from self.below(first, level + 1)
            if len(others) == 1:
                yield from self.below(others[0], level + 1)
            elif others:
                words = f"{others[0].label} … {others[-1].label}  {len(others)} like {first.label}"
                yield _module_row(
                    "  " * (level + 1) + words, Totals.sum_of(self._totals[child.name] for child in others)
                )

    def _tensor_row(self, module: Module, local: str, tensor: TensorInfo, level: int) -> tuple[str, str, str, str]:
        name = f"{module.name}.{local}" if module.name else local
        indent = "  " * level
        if name != tensor.name:
            return f"{indent}{local} = {tensor.name}", "", "", ""
        planned = self._plan.dtypes[tensor.name]
        dtype = dtypes.short_name(planned)
        if planned != tensor.dtype:
            dtype = f"{dtypes.short_name(tensor.dtype)}→{dtype}"
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        kind = "" if tensor.kind == "parameter" else f"  {tensor.kind}"
        count = "" if kind else "unknown" if tensor.logical_numel == "unknown" else human_count(tensor.parameters)
        return f"{indent}{local}  [{shape}]{kind}", dtype, count, human_bytes(tensor_bytes(tensor, planned))


def _module_row(label: str, totals: Totals) -> tuple[str, str, str, str]:
    size = "-" if totals.tied and not totals.nbytes else human_bytes(totals.total_bytes)
    return label, mix_text(totals), totals.parameters_text, size


def _unknown_counts(tree: Tree) -> list[str]:
    unknown = [tensor for tensor in tree.tensors.values() if tensor.logical_numel == "unknown"]
    if not unknown:
        return []
    elements = human_count(sum(tensor.numel for tensor in unknown))
    return [
        f"> leaves out {plural(len(unknown), 'tensor')} of packed codes, whose packing is not known: {elements} stored "
        f"elements, first {printable(unknown[0].name)}"
    ]


def largest_text(tree: Tree, plan: Plan, number: int) -> str:
    """Return a table of the `number` modules whose own tensors take the most bytes, with their share of the model."""
    own = {module.name: _own_totals(module, plan.dtypes) for module in tree.walk()}
    whole = sum(totals.total_bytes for totals in own.values())
    largest = nlargest(number, own.items(), key=lambda row: row[1].total_bytes)
    shown = ((printable(name) or "the model itself", totals) for name, totals in largest if totals.total_bytes)
    rows = [_share_row(label, totals, whole) for label, totals in shown]
    rest = whole - sum(totals.total_bytes for _, totals in largest)
    lines = table_lines([(*_HEAD, "of the model"), *rows], (2, 3, 4))
    if rest:
        lines.append(
            f"{human_bytes(rest)} more in {plural(sum(bool(t.nbytes) for t in own.values()) - len(rows), 'module')}"
        )
    return "\n".join(lines)


def _own_totals(module: Module, planned: Mapping[str, str]) -> Totals:
    totals = Totals()
    prefix = f"{module.name}." if module.name else ""
    for local, tensor in module.tensors.items():
        if tensor.counted and tensor.name == prefix + local:
            totals.add_tensor(tensor, planned.get(tensor.name, tensor.dtype))
    return totals


def kinds_text(tree: Tree, plan: Plan) -> str:
    """Return a table with the dtypes, parameters, bytes and share of each kind of layer, such as attention, MLP and norms."""
    found = totals_by_kind(tree, plan.dtypes)
    whole = sum(totals.total_bytes for totals in found.values())
    rows = [_share_row(kind, totals, whole) for kind, totals in found.items()]
    return "\n".join(table_lines([("kind of layer", *_HEAD[1:], "of the model"), *rows], (2, 3, 4)))


def _share_row(label: str, totals: Totals, whole: int) -> tuple[str, ...]:
    share = percent(totals.total_bytes / whole if whole else 0.0)
    return label, mix_text(totals), totals.parameters_text, human_bytes(totals.total_bytes), f"{share} %"

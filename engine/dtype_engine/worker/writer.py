"""Fulfilling wishes: a checkpoint, a recipe file, a report, a recipe for another tool are written. torch comes when needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dtype_engine.core.atomic_write import check_target, write_text_atomic
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.core.units import human_bytes, seconds_text
from dtype_engine.recipe import Plan, Recipe, make_plan, require_matches
from dtype_engine.results.drift import DriftReport
from dtype_engine.worker.planned_losses import MOST_UNASKED, PlannedLosses
from dtype_engine.worker.save_requests import (
    ConvertRequest,
    ExportPlan,
    ExportRequest,
    RecipeRequest,
    ReportRequest,
    SaveRequest,
)

if TYPE_CHECKING:
    from dtype_engine.checkpoint import Checkpoint
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.core.options import Options
    from dtype_engine.results.losses import ValueLoss
    from dtype_engine.runtime.export import Contents
    from dtype_engine.runtime.session import Session

OnBytes = Callable[[int, int], None]


@dataclass(frozen=True)
class Workshop:
    """What there is to fulfil a wish with: the live session, or the checkpoint's headers alone."""

    source: Source
    options: Options
    settings: RunSettings
    recipe: Recipe
    session: Session | None
    checkpoint: Checkpoint | None
    on_bytes: OnBytes
    cancelled: IsCancelled
    counting: PlannedLosses = field(default_factory=PlannedLosses)
    """What was counted before, without a live model."""
    known_tree: Tree | None = None
    """Of a model without a session, where its architecture is known."""
    why_closed: str = ""
    """Why there is no session."""

    def plan_export(self, max_shard_size: str = "5GB") -> ExportPlan:
        """Raises UserError where this recipe can't be exported."""
        from dtype_engine.runtime.export.export import names_of, shards
        from dtype_engine.runtime.export.readme import by_dtype, loading_text

        contents = self._contents()
        sums = by_dtype(contents)
        return ExportPlan(
            contents.nbytes,
            len(names_of(shards(contents, max_shard_size))),
            tuple((name, found.tensors, found.nbytes) for name, found in sums.items()),
            loading_text(contents),
            contents.notices,
            self._known_lost(),
        )

    def fulfil(self, wish: SaveRequest) -> tuple[str, tuple[str, ...]]:
        """Do it; a sentence that says what was written, and notices. Raises UserError, Cancelled."""
        if isinstance(wish, ExportRequest):
            return self._export(wish)
        check_target(wish.file, wish.replace)
        if isinstance(wish, ConvertRequest):
            return self._convert(wish)
        text, notices = self._recipe_text(wish) if isinstance(wish, RecipeRequest) else self._report_text(wish)
        return f"wrote {printable(str(write_text_atomic(wish.file, text, wish.replace)), 300)}", notices

    def _tree(self) -> Tree:
        if self.session is not None:
            return self.session.tree
        if self.checkpoint is None:
            raise UserError("the model is not open")
        return self.known_tree or self.checkpoint.tree()

    def _known_lost(self) -> tuple[ValueLoss, ...] | None:
        """The weights whose cast loses values, where that was counted before; else None."""
        plan = _plan(self._tree(), self.recipe)
        if self.session is not None:
            return self.session.model.known_losses(plan.dtypes)
        return self._lost(0)

    def _lost(self, most_read: int = MOST_UNASKED) -> tuple[ValueLoss, ...] | None:
        """The weights whose cast loses values. Without a live model what was not looked at before is read from the files, as far
        as it is at most `most_read` bytes; else None.
        """
        if self.session is not None:
            return self.session.lost_values(self.cancelled, _plan(self.session.tree, self.recipe))
        if self.checkpoint is None:
            return None
        from dtype_engine.runtime.measure.stored_losses import losses_in_files

        tree = self._tree()
        plan = _plan(tree, self.recipe)
        if self.counting.waiting_bytes(self.checkpoint, tree, plan) > most_read:
            return None
        return losses_in_files(self.checkpoint, tree, plan.dtypes, self.counting.counted, cancelled=self.cancelled)

    def _contents(self) -> Contents:
        from dtype_engine.runtime.export import of_checkpoint, of_live

        if self.session is not None:
            require_matches(self.session.tree, self.recipe)
            return of_live(self.session.model, self.recipe, make_plan(self.session.tree, self.recipe).dtypes)
        if self.checkpoint is None:
            raise UserError("the model is not open")
        return of_checkpoint(self.checkpoint, self.source.title, self.recipe, self.options)

    def _export(self, wish: ExportRequest) -> tuple[str, tuple[str, ...]]:
        from dtype_engine.runtime.export import export
        from dtype_engine.runtime.export.staging import check_folder

        check_folder(wish.folder, wish.replace, [self.source.path] if self.source.path is not None else [])
        lost = self._lost(0)  # without a live model, what is not known is counted while it is written
        report = export(
            self._contents(),
            wish.folder,
            wish.max_shard_size,
            self.on_bytes,
            self.cancelled,
            wish.replace,
            lost,
        )
        rate = f", {human_bytes(report.nbytes / report.seconds)}/s" if report.seconds else ""
        size = f"{human_bytes(report.nbytes)} in {seconds_text(report.seconds)}{rate}"
        return f"exported to {printable(report.folder, 300)}: {size}", report.notices

    def _recipe_text(self, wish: RecipeRequest) -> tuple[str, tuple[str, ...]]:
        from dtype_engine.recipe.provenance import recipe_text
        from dtype_engine.reports import versions

        tree = self._tree()
        require_matches(tree, self.recipe)
        plan = make_plan(tree, self.recipe)
        notices = () if wish.drift is not None else ("the recipe was not measured: the file has no drift",)
        lost = self._lost()
        return recipe_text(tree, plan, self.source.title, self.settings, wish.drift, versions(), lost), notices

    def _report_text(self, wish: ReportRequest) -> tuple[str, tuple[str, ...]]:
        from dtype_engine.reports import check_name, gather, render, versions

        check_name(wish.file)
        drift, reason = wish.drift, ""
        if drift is None:
            drift, reason = self._measured()
        tree = self._tree()
        plan = _plan(tree, self.recipe)
        lost = self._lost()
        made = gather(tree, plan, self.source.title, self.settings, drift, versions(), reason, lost=lost)
        return render(made, wish.file), (f"without drift: {reason}",) if reason else ()

    def _measured(self) -> tuple[DriftReport | None, str]:
        if self.session is None:
            return None, self.why_closed or "the model is not open"
        self.session.use_recipe(self.recipe, cancelled=self.cancelled)
        try:
            return self.session.drift(cancelled=self.cancelled), ""
        except NoForward as error:
            return None, str(error)

    def _convert(self, wish: ConvertRequest) -> tuple[str, tuple[str, ...]]:
        from dtype_engine.recipe.targets import Context, target_named
        from dtype_engine.runtime.model.describe import describe

        found = describe(self.source, self.options)
        require_matches(found.tree, self.recipe)
        plan = _plan(found.tree, self.recipe)
        written = target_named(wish.target).convert(
            Context(found.tree, plan, self.source.title, found.model_type, found.kinds)
        )
        path = write_text_atomic(wish.file, written.text, wish.replace)
        left_out = sum(len(entry.tensors) for entry in written.left_out)
        notices: tuple[str, ...] = written.notes
        if left_out:
            first = written.left_out[0]
            notices += (
                f"{wish.target} can't express {left_out} tensors as planned, first {printable(first.tensors[0])}: {first.why}",
            )
        return f"wrote {printable(str(path), 300)}", notices


def progress(tell: Callable[[str, int, int], Any], clock: Callable[[], float]) -> OnBytes:
    """Progress in bytes as `tell("exporting, 310.00 MiB/s", done, total)`, ten times a second at most."""
    started, told = clock(), -1.0

    def on_bytes(done: int, total: int) -> None:
        nonlocal told
        now = clock()
        if told < 0 or now - told >= 0.1 or done == total:
            told = now
            speed = f", {human_bytes(done / (now - started))}/s" if done and now > started else ""
            tell(f"exporting{speed}", done, total)

    return on_bytes


def _plan(tree: Tree, recipe: Recipe) -> Plan:
    """What is written must be what the rules say. Raises TooSlow for a pattern that takes too long to match."""
    plan = make_plan(tree, recipe)
    plan.refuse_too_slow()
    return plan

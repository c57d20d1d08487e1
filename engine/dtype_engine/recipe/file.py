"""Reads and writes recipe files: YAML that people can read, edit and compare.

    version: 1
    model: all-MiniLM-L6-v2           # the model for which the recipe was made
    rules:                            # the last rule that matches wins
      - {pattern: "*", dtype: float16}
      - {pattern: "type:LayerNorm", dtype: float32}
    settings: {autocast: bfloat16}    # how the candidate is run
    calibration: {inputs: pod.txt, fingerprint: 9f2c...}    # what roundings such as int4@g32:gptq were fitted to
    measured:                         # metrics of a run, only for the reader
      kl_mean: 0.0013
      lost: [{tensor: norm.weight, dtype: float16, overflowed: 1, vanished: 0}]    # values that a cast made infinite or zero

Only `version` and `rules` are required.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.execution import execution_of
from dtype_engine.core.number_ranges import Count, Positive
from dtype_engine.core.options import ClassesDim, RunSettings
from dtype_engine.core.plain_yaml import load_yaml
from dtype_engine.core.regexes import time_limit
from dtype_engine.core.regular_files import read_regular, reading
from dtype_engine.core.text import printable
from dtype_engine.core.typed_data import as_plain, as_type
from dtype_engine.recipe.plan import MATCHING_S
from dtype_engine.recipe.rules import Recipe, Rule
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.rounding import FittedTo

VERSION = 1
_LARGEST = 1_000_000
_MOST_RULES = 5_000
"""Each rule is compiled, and matched with the names of a model: this many may take 12 s."""
_KEYS = {"version", "model", "rules", "settings", "calibration", "measured"}

Figure = str | int | float | bool | None
LOST = "lost"
"""The key in `measured` for tensors of which the cast made values infinite or zero. All other keys hold single metrics."""
MEASURED = "measured:  # figures of a run; nothing depends on them"
"""The line of a recipe file that begins its entry of this name."""
MOST_LOSSES = 1000
"""Maximum number of tensors that a recipe file lists under `lost`."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecipeFile:
    """The content of a recipe file."""

    recipe: Recipe
    model: str | None = None
    """The model for which the recipe was made, or None if the file names none."""
    settings: RunSettings | None = None
    """How the candidate is run, or None if the file does not say."""
    measured: Mapping[str, Figure] = dataclasses.field(default_factory=dict)
    """Metrics of an earlier run, by name, without the entry `lost`."""
    lost: tuple[ValueLoss, ...] = ()
    """The tensors of which the cast made values infinite or zero in that run."""
    fitted_to: FittedTo | None = None
    """The calibration inputs to which its roundings were fitted, or None if the file does not say."""


def read_recipe_file(path: Path) -> RecipeFile:
    """Return the content of a recipe file. Raises UserError, which names the file and the rule or entry that is wrong."""
    try:
        with reading(f"the recipe {path}"):
            text = read_regular(path, _LARGEST).decode()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a recipe: it is not text") from None
    return read_recipe(text, str(path))


def read_recipe(text: str, where: str) -> RecipeFile:
    """Return the content of a recipe file from its text. where: what the text is, which begins the message of a UserError."""
    with _errors_in(f"{where} is not a recipe"):
        data = load_yaml(text)
    if not isinstance(data, dict) or not isinstance(data.get("rules"), list):
        raise UserError(f"{where} is not a recipe: it needs 'version: {VERSION}' and a list of 'rules'")
    with _errors_in(where):
        return _recipe_file(data)


def _recipe_file(data: dict[Any, Any]) -> RecipeFile:
    if (version := data.get("version")) != VERSION:
        raise UserError(f"recipe version {_shown(version)} is unknown; this program reads version {VERSION}")
    if unknown := set(map(str, data)) - _KEYS:
        raise UserError(f"unknown entry {_shown(min(unknown))}; a recipe has {', '.join(sorted(_KEYS))}")
    if (rules_given := len(data["rules"])) > _MOST_RULES:
        raise UserError(
            f"it has {rules_given:,} rules, over the limit of {_MOST_RULES:,}: use patterns that name several "
            "tensors, such as '*.mlp'"
        )
    model, settings, measured = data.get("model"), data.get("settings"), data.get("measured")
    if model is not None and not isinstance(model, str):
        raise UserError("'model' must be a string")
    with time_limit(MATCHING_S):
        rules = tuple(_rule(number, entry) for number, entry in enumerate(data["rules"], 1))
    if measured is not None and not isinstance(measured, dict):
        raise UserError("'measured' must be a mapping of names to figures")
    figures = dict(measured or {})
    lost = figures.pop(LOST, None)
    run_settings = _settings(settings) if settings is not None else None
    with _errors_in("measured"):
        named = as_type(figures, dict[str, Figure])
    with _errors_in("calibration"):
        given = data.get("calibration")
        fitted_to = None if given is None else as_type(given, FittedTo)
    return RecipeFile(Recipe(rules), model, run_settings, named, _losses(lost), fitted_to)


def _rule(number: int, entry: object) -> Rule:
    if not isinstance(entry, dict) or set(entry) != {"pattern", "dtype"}:
        raise UserError(f"rule {number} must have exactly 'pattern' and 'dtype'")
    if not all(isinstance(value, str | int) for value in entry.values()):
        raise UserError(f"rule {number}: 'pattern' and 'dtype' must be strings")
    with _errors_in(f"rule {number}"):
        return Rule.make(str(entry["pattern"]), str(entry["dtype"]))


class _Settings(msgspec.Struct):
    """The run settings as a recipe file has them. Dtypes may have any spelling that a rule allows, such as `bf16`."""

    compute: str | None = None
    autocast: str | None = None
    float_inputs: Literal["given", "model"] | None = None
    quantize_activations: Literal["none", "weights"] | None = None
    classes_dim: ClassesDim | None = None
    execution: dict[str, Any] = {}
    reference_execution: dict[str, Any] = {}
    acceptance: bool = False


class _Loss(msgspec.Struct):
    tensor: str
    dtype: str
    overflowed: Count
    vanished: Count
    elements: Positive
    channels: Count = 0


@contextmanager
def _errors_in(where: str) -> Iterator[None]:
    """A context manager that puts `where` before the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _settings(entry: object) -> RunSettings:
    with _errors_in("settings"):
        settings = as_type(entry, _Settings)
    if isinstance(entry, dict) and (unknown := set(map(str, entry)) - set(_Settings.__struct_fields__)):
        raise UserError(f"unknown setting {min(unknown)!r}; there are {', '.join(_Settings.__struct_fields__)}")
    compute = _dtype("compute", settings.compute or RunSettings().compute)
    if compute not in dtypes.COMPUTE_DTYPES:
        raise UserError(f"setting compute: choose one of {', '.join(dtypes.COMPUTE_DTYPES)}")
    autocast: Any = settings.autocast and _dtype("autocast", settings.autocast)
    if autocast not in (None, "bfloat16", "float16"):
        raise UserError("setting autocast: torch.autocast supports bfloat16 and float16")
    with _errors_in("settings"):
        execution, of_reference = map(execution_of, (settings.execution, settings.reference_execution))
    return RunSettings(
        compute,
        autocast,
        settings.float_inputs or "given",
        settings.quantize_activations or "none",
        "auto" if settings.classes_dim is None else settings.classes_dim,
        execution,
        of_reference,
        settings.acceptance,
    )


def _dtype(setting: str, value: str) -> str:
    with _errors_in(f"setting {setting}"):
        return dtypes.parse_target(value)


def _losses(entries: object) -> tuple[ValueLoss, ...]:
    with _errors_in("measured.lost"):
        listed = as_type(entries or [], list[_Loss])
    losses = []
    for loss in listed:
        dtype = _dtype(LOST, loss.dtype)
        if dtype == dtypes.STORED:
            raise UserError(f"measured.lost: {dtype} is not a dtype in which values can be lost")
        losses.append(ValueLoss(loss.tensor, dtype, loss.overflowed, loss.vanished, loss.elements, loss.channels))
    return tuple(losses)


def _shown(value: object) -> str:
    return printable(repr(value), 60)


def write_recipe(
    recipe: Recipe,
    model: str | None = None,
    settings: RunSettings | None = None,
    measured: Mapping[str, Figure] | None = None,
    comments: Sequence[str] | None = None,
    units: Mapping[str, str] | None = None,
    lost: Sequence[ValueLoss] = (),
    fitted_to: FittedTo | None = None,
) -> str:
    """Return the text of a recipe file, without the entries whose argument is None. model: the model for which the recipe was made.
    comments: one for each rule. units: comments for the metrics in `measured`, by name. lost: the tensors to list under `lost`.
    fitted_to: the calibration inputs to which roundings were fitted.
    """
    lines = [f"version: {VERSION}"]
    if model:
        lines.append(f"model: {_scalar(model)}  # what it was made for")
    lines.append("rules:  # the last rule that matches wins" if recipe.rules else "rules: []")
    for index, rule in enumerate(recipe.rules):
        comment = f"  # {comments[index]}" if comments else ""
        lines.append(f"  - {{pattern: {_scalar(rule.pattern)}, dtype: {rule.dtype}}}{comment}")
    if settings is not None:
        lines.append("settings:  # how the candidate is run")
        entries = as_plain(settings)
        # Earlier versions behave as the defaults of these say, but refuse an entry that they do not know.
        for name in ("quantize_activations", "classes_dim", "execution", "reference_execution", "acceptance"):
            if getattr(settings, name) == getattr(RunSettings(), name):
                del entries[name]
        lines += [f"  {name}: {_figure(value)}" for name, value in entries.items()]
    if fitted_to is not None:
        lines.append("calibration:  # what the roundings were fitted to")
        lines += [f"  {name}: {_scalar(value)}" for name, value in msgspec.structs.asdict(fitted_to).items()]
    if measured or lost:
        lines.append(MEASURED)
        for name, value in (measured or {}).items():
            unit = f"  # {units[name]}" if units and name in units else ""
            lines.append(f"  {_figure(name)}: {_figure(value)}{unit}")
    if lost:
        lines.append(f"  {LOST}:  # values that their cast made infinite (overflowed) or zero (vanished)")
        lines += [
            f"    - {{tensor: {_scalar(loss.tensor)}, dtype: {_scalar(loss.dtype) if '@' in loss.dtype else loss.dtype}, "
            f"overflowed: {loss.overflowed}, vanished: {loss.vanished}, elements: {loss.elements}"
            + (f", channels: {loss.channels}}}" if loss.channels else "}")
            for loss in lost[:MOST_LOSSES]
        ]
        if len(lost) > MOST_LOSSES:
            lines.append(f"    # and {len(lost) - MOST_LOSSES:,} more tensors")
    return "\n".join(lines) + "\n"


def _scalar(text: str) -> str:
    """Return a string as YAML, always in double quotes, because patterns contain characters that are special in YAML."""
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=1 << 20).strip()


def _figure(value: Figure) -> str:
    if isinstance(value, str):
        return value if value.isidentifier() and yaml.safe_load(value) == value else _scalar(value)
    return yaml.safe_dump(value, width=1 << 20, default_flow_style=True).removesuffix("...\n").strip()

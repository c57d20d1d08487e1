"""Formats findings of checks and lints as SARIF 2.1.0 (OASIS), which code hosts and editors show next to files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dtype_engine.core.text import printable
from dtype_engine.core.version import __version__
from dtype_engine.recipe.lint import Lint
from dtype_engine.recipe.serving import ServingLint

_MOST_TENSORS = 1_000
"""Maximum number of SARIF results for one finding. Each affected tensor is a result."""
_EFFECTS: Mapping[str, tuple[str, str]] = {
    "refused": ("the runtime refuses to load weights", "error"),
    "other values": ("the runtime computes with other values", "error"),
    "stays wide": ("the runtime leaves weights unquantized", "warning"),
    "slower": ("the runtime is slower with these weights", "note"),
}


def result(
    rule: str, message: str, tensor: str, file: str = "", line: int | None = None, level: str = "error"
) -> dict[str, Any]:
    """Return a SARIF result. rule: the id of the rule that describes this kind of finding. tensor: its name, or "" for a file.
    file: its URI. line: counted from 1, or None.
    """
    based = {} if file.startswith("file:") else {"uriBaseId": "%SRCROOT%"}
    place: dict[str, Any] = {"artifactLocation": {"uri": file, **based}}
    if line is not None:
        place["region"] = {"startLine": line}
    location: dict[str, Any] = {"physicalLocation": place} if file else {}
    if tensor:
        location["logicalLocations"] = [{"fullyQualifiedName": tensor, "kind": "member"}]
    return {"ruleId": rule, "level": level, "message": {"text": _without_links(message)}, "locations": [location]}


def uri_of(path: Path) -> str:
    """Return the URI of a file. It is relative to the git repository that contains the current folder or, without a repository, to
    the current folder itself, which consumers of SARIF call %SRCROOT%. It is absolute if the file is outside of these.
    """
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
    whole = Path(os.path.abspath(path))  # a link is a file of the folder that holds it
    return quote(os.fsencode(whole.relative_to(root))) if whole.is_relative_to(root) else whole.as_uri()


def failure(sentence: str, command: str = "", file: Path | None = None) -> dict[str, Any]:
    """Return the SARIF log of a command that ended with an error, which `sentence` describes. file: the file that can't be read, or
    None. The error is then also a result, since code hosts show nothing else, and take a log without results for a success.
    """
    rules = {"unreadable": ("a model that can't be read", "Nothing else was checked, and loaders stop here as well.")}
    results = [] if file is None else [result("unreadable", sentence, "", uri_of(file))]
    log = sarif(command, rules if results else {}, results)
    notification = {"level": "error", "message": {"text": _without_links(sentence)}}
    ended = {"executionSuccessful": False, "exitCode": 2, "toolExecutionNotifications": [notification]}
    log["runs"][0]["invocations"] = [ended]
    return log


def _without_links(text: str) -> str:
    """Return a message with escapes, so that `[text](link)` in it is plain text and not a link (SARIF 2.1.0, 3.11.6)."""
    return re.sub(r"[\\\[\]]", r"\\\g<0>", text) if "](" in text else text


def sarif(command: str, rules: Mapping[str, tuple[str, str]], results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a SARIF log, as an object for JSON. command: the subcommand of `dtype-engine`, such as "check". rules: for each id,
    (title, why such findings matter). results: made by `result`.
    """
    ids = list(rules)
    listed = [
        {"id": rule, "shortDescription": {"text": title}, "fullDescription": {"text": why}}
        for rule, (title, why) in rules.items()
    ]
    indexed = [{"ruleId": each["ruleId"], "ruleIndex": ids.index(each["ruleId"])} | each for each in results]
    driver = {"name": f"dtype-engine {command}".strip(), "version": __version__, "rules": listed}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": indexed}],
    }


def lint_sarif(file: Path, lint: Lint) -> dict[str, Any]:
    """Return SARIF on how another tool would apply a recipe file differently from this program. There is a result for each tensor
    that a pattern matches in only one of the two, for which another rule wins, or whose KV cache gets another format.
    """
    rules = {
        "pattern-differs": (
            f"a pattern matches other tensors in {lint.target}",
            f"{lint.matcher}. `recipe convert` writes patterns that match the same tensors.",
        ),
        "rule-overruled": (
            f"another rule decides in {lint.target}",
            "The same rules match the tensor, but the tool gives precedence to another one.",
        ),
        "kv-cache": (f"a KV cache has another format in {lint.target}", "No option gives it the recipe's format."),
    }
    uri = uri_of(file)
    results = [
        result("pattern-differs", f"{printable(name)} is matched by {printable(rule.pattern)} {where}", name, uri, line)
        for rule in lint.rules
        for line in [_line_of(file, rule.pattern)]
        for where, names in (
            (f"in dtype-engine, and not in {lint.target}", rule.only_here),
            (f"in {lint.target} alone", rule.only_there),
        )
        for name in names[:_MOST_TENSORS]
    ]
    results += [
        result("rule-overruled", f"{printable(name)}: {decide}", name, uri, _line_of(file, here))
        for name, here, there in lint.overruled[:_MOST_TENSORS]
        for decide in [f"{printable(here)} decides in dtype-engine, {printable(there)} in {lint.target}"]
    ]
    results += [
        result("kv-cache", f"{printable(name)}: {problem.why}", name, uri)
        for problem in lint.caches.problems
        for name in problem.tensors[:_MOST_TENSORS]
    ]
    return sarif("recipe lint", rules, results)


def serving_sarif(file: Path, lint: ServingLint) -> dict[str, Any]:
    """Return SARIF on how a runtime would treat an export of a recipe file, with a result for each affected tensor."""
    rules = {
        effect.replace(" ", "-"): (title, f"Predicted for {lint.runtime} from its source code.")
        for effect, (title, _) in _EFFECTS.items()
    }
    results = [
        result(
            found.effect.replace(" ", "-"),
            f"{printable(name)}: {printable(found.why, 1000)} ({found.source})",
            name,
            uri_of(file),
            level=_EFFECTS[found.effect][1],
        )
        for found in lint.findings
        for name in found.tensors[:_MOST_TENSORS]
    ]
    return sarif("recipe lint", rules, results)


def _line_of(file: Path, pattern: str) -> int | None:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((number for number, line in enumerate(lines, 1) if pattern in line), None)

"""Reads the part of YAML that this program's files use: strings, numbers, lists and mappings. Anchors, aliases, merge keys and
deep nesting are refused, because a small file could exhaust the memory through them, and so is a key that occurs twice.
"""

from __future__ import annotations

from typing import Any

import yaml

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable

_DEEPEST = 40
_LONGEST_NUMBER = 100


class _PlainLoader(yaml.SafeLoader):
    """A `SafeLoader` that refuses anchors, aliases, merge and duplicate keys, deep nesting and numbers with too many digits."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases (& and *) are not read", problem_mark=event.start_mark
            )
        if self._depth >= _DEEPEST:
            raise yaml.MarkedYAMLError(problem="it is nested too deep", problem_mark=event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem="merge keys (<<) are not read", problem_mark=key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    problem = f"the key {printable(key.value, 40)} occurs twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if node.tag == "tag:yaml.org,2002:int" and len(str(node.value)) > _LONGEST_NUMBER:
                raise ValueError("so many digits")
            return super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
            kind = node.tag.rpartition(":")[2]
            value = printable(str(node.value), 40) if isinstance(node, yaml.ScalarNode) else "this"
            raise yaml.MarkedYAMLError(problem=f"{value} is not a valid {kind}", problem_mark=node.start_mark) from None


def load_yaml(text: str) -> Any:
    """Return the content of a YAML text. Raises UserError, which names the reason and the line."""
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None)
        raise UserError(f"not valid YAML{where}" + (f": {printable(str(problem), 120)}" if problem else "")) from None
    except RecursionError:
        raise UserError("not valid YAML: it is nested too deep") from None

"""Converts recipes for transformers: Python code that loads the model and casts it in place, exactly as planned.

`from_pretrained` loads all weights in one dtype. The code loads them in the widest stored dtype, which rounds nothing, and then
casts every tensor to its planned dtype. The patterns in the code must match full names, and no tensor matches two of them.
"""

from __future__ import annotations

import json

from dtype_engine.core import dtypes
from dtype_engine.recipe.targets.base import Context, Conversion, Match, Target, UnsupportedList, as_comment, tool_regex
from dtype_engine.recipe.targets.name_patterns import regexes


class Transformers(Target):
    name = "transformers"
    matcher = "re.match up to the end of a part of the name, or an ending"

    def write(self, context: Context) -> Conversion:
        losses = UnsupportedList()
        groups: dict[str, list[str]] = {}
        for tensor in context.in_scope():
            planned = context.plan.dtypes[tensor.name]
            if planned in dtypes.STORAGE_DTYPES:
                why = "transformers has no weights with scales without a quantizer"
                losses.add(tensor.name, planned, tensor.dtype, why)
                planned = tensor.dtype
            if tensor.persistent or planned != tensor.dtype:
                groups.setdefault(planned, []).extend(tensor.names)
        universe = context.all_names()
        patterns = [(regex, dtype) for dtype, names in groups.items() for regex in regexes(names, universe)]
        load_in = dtypes.widest({tensor.dtype for tensor in context.in_scope()})
        notes = [f"casts {context.title} as planned; call it with the class and the folder to load from"]
        if len(groups) > 1:
            notes.append(
                "weights of several dtypes: PyTorch does not promote in matrix products, so run it under autocast"
            )
        return Conversion(_snippet(patterns, load_in, notes), tuple(patterns), None, losses.result(), tuple(notes))

    def matchable(self, context: Context) -> frozenset[str]:
        return frozenset(tensor.name for tensor in context.in_scope())

    def match(self, context: Context, pattern: str) -> Match:
        """Return the tensors that transformers would match if the pattern were in its option `modules_to_not_convert`. A name
        matches if it ends with the pattern as plain text, or if its first dot-separated parts match it as a regular expression. For
        example, `model.layers.1` matches `model.layers.1.mlp` but not `model.layers.10`.
        """
        if pattern.startswith("type:"):
            return Match(problem="classes are not known")
        key = pattern.removeprefix("re:")
        matches = tool_regex(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", pattern, "match")
        return Match(
            frozenset(
                tensor.name
                for tensor in context.in_scope()
                if any(matches(name) or name.endswith(key) for name in tensor.names)
            )
        )


def _snippet(patterns: list[tuple[str, str]], load_in: str, notes: list[str]) -> str:
    listed = "".join(f"    ({_raw(pattern)}, torch.{dtype}),\n" for pattern, dtype in patterns)
    return (
        as_comment(notes)
        + "import itertools\nimport re\n\nimport torch\nimport transformers\n\n"
        + f"DTYPES = [\n{listed}]\n\n\n"
        + "def load(folder, model_class=transformers.AutoModelForCausalLM):\n"
        + f"    return cast(model_class.from_pretrained(folder, dtype=torch.{load_in}))\n\n\n"
        + "def cast(model):\n"
        + "    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):\n"
        + "        for pattern, dtype in DTYPES:\n"
        + "            if re.fullmatch(pattern, name):\n"
        + "                tensor.data = tensor.data.to(dtype)\n"
        + "                break\n"
        + "    return model\n"
    )


def _raw(pattern: str) -> str:
    is_plain = '"' not in pattern and "\n" not in pattern and pattern[-1] != "\\"
    return f'r"{pattern}"' if is_plain else json.dumps(pattern)


TARGET = Transformers()

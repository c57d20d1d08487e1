"""Text in the README of an export about loading it with diffusers or PEFT.

Each statement was tried with diffusers 0.42 and peft 0.21, and the tests check each of them if these packages are installed.
"""

from __future__ import annotations

import json

from dtype_engine.core.dtypes import COMPUTE_DTYPES
from dtype_engine.core.text import printable
from dtype_engine.reports.markdown import code_span, escaped
from dtype_engine.runtime.export.contents import Contents


def short(contents: Contents) -> str:
    """Return one or two sentences on the dtypes that the user gets by loading the export with diffusers or PEFT."""
    class_name = contents.layout.class_name
    if _dtypes_of_torchao(contents):
        return (
            f"{class_name}.from_pretrained(folder, {_dtype_argument(contents)}) of diffusers loads it, with the torchao package: "
            "its weights with scales are in torchao's layout. dtype_engine.load_pretrained decodes them."
        )
    if contents.layout.kind == "pipeline":
        return (
            f"{class_name}.from_pretrained of diffusers loads it: models of diffusers in float32 or a given dtype, those of "
            "transformers in the dtype of their config.json. dtype_engine.load_pretrained of one of its folders keeps these dtypes."
        )
    if contents.layout.kind == "adapter":
        return (
            "PeftModel.from_pretrained(base, folder) of PEFT loads it and casts it to float32, unless the base model is in 16 bits "
            "and autocast_adapter_dtype is False."
        )
    if _is_mixed(contents):
        return (
            f"{class_name}.from_pretrained(folder).float() of diffusers loads it in float32; without float() it raises where two "
            "dtypes meet. dtype_engine.load_pretrained(folder, module=...) gives these dtypes."
        )
    return (
        f"{class_name}.from_pretrained of diffusers loads it in float32 or a given dtype. "
        "dtype_engine.load_pretrained(folder, module=...) gives these dtypes."
    )


_UNIFORM = (
    "gives the model in float32, or in the `dtype` that you pass (`torch_dtype` in older versions of diffusers). This gives every",
    "weight in the dtype of the table:",
)
_MIXED = (
    "gives the model in float32. Without `float()`, diffusers leaves some weights in the dtypes of the table, and the forward pass",
    "raises an error where two of them meet. This gives every weight in the dtype of the table:",
)

_PASSED = (
    "gives every weight in the dtype of the table (`torch_dtype` in older versions of diffusers): what is in float32 there is what",
    "the model's code keeps so. So does this:",
)


def _dtypes_of_torchao(contents: Contents) -> dict[str, str]:
    """Return the dtypes with which to load the models that have weights in torchao's layout, by their folders."""
    return {part.folder: part.loaded for part in contents.layout.parts if part.loaded}


def _dtype_argument(contents: Contents) -> str:
    """Return the argument with which diffusers loads these models in these dtypes."""
    by_folder = _dtypes_of_torchao(contents)
    if len(set(by_folder.values())) == 1:
        return f"dtype=torch.{next(iter(by_folder.values()))}"
    return f"dtype={{{', '.join(f'{quoted(folder)}: torch.{dtype}' for folder, dtype in by_folder.items())}}}"


_TORCHAO = (
    "needs the torchao package (tried: diffusers 0.42 with torchao 0.18): the weights with scales are in torchao's layout. They",
    "keep their codes and scales, and torchao computes with their values in the `dtype` that you pass (`torch_dtype` in older",
    "versions). With another one, or none, a layer with a weight in fp8 may raise an error.",
)
_DECODED = ("This gives the weights with scales as decoded values, and all others in the dtype of the table:",)


def _is_mixed(contents: Contents) -> bool:
    return len({item.dtype for item in contents.items if item.dtype in COMPUTE_DTYPES}) > 1


def section(contents: Contents, name: str) -> list[str]:
    """Return the lines of the README's section on loading with diffusers or PEFT. name: the name of the export's folder."""
    if contents.layout.kind == "pipeline":
        return _pipeline(contents, name) + _otherwise(contents)
    if contents.layout.kind == "adapter":
        return _adapter(contents.layout.base, name)
    class_name = contents.layout.class_name
    given = ".float()" if _is_mixed(contents) else ""
    words: tuple[str, ...] = _MIXED if _is_mixed(contents) else _UNIFORM
    arguments = quoted(name)
    if _dtypes_of_torchao(contents):
        arguments, given, words = f"{arguments}, {_dtype_argument(contents)}", "", (*_TORCHAO, "", *_DECODED)
    elif contents.passed:
        arguments, given, words = f"{arguments}, dtype=torch.{contents.passed}", "", _PASSED
    return [
        *python_lines(
            *(["import torch"] if "torch." in arguments else []),
            f"from diffusers import {class_name}",
            "",
            f"model = {class_name}.from_pretrained({arguments}){given}",
        ),
        "",
        *words,
        "",
        *python_lines(
            "import dtype_engine as de",
            "",
            f"model = de.load_pretrained({quoted(name)}, module={class_name}.from_config(...))",
        ),
        *_otherwise(contents),
    ]


def _otherwise(contents: Contents) -> list[str]:
    return [line for each in contents.otherwise for line in ("", f"{escaped(each)}.")]


def _pipeline(contents: Contents, name: str) -> list[str]:
    class_name, of_torchao = contents.layout.class_name, _dtypes_of_torchao(contents)
    arguments = f"{quoted(name)}, {_dtype_argument(contents)}" if of_torchao else quoted(name)
    return [
        *python_lines(
            *(["import torch"] if of_torchao else []),
            f"from diffusers import {class_name}",
            "",
            f"pipeline = {class_name}.from_pretrained({arguments})",
        ),
        "",
        *([*_TORCHAO, ""] if of_torchao else []),
        "It is a diffusers pipeline in the layout of its source: every component is in its folder, with its configuration.",
        "diffusers loads each of its own models in one dtype: float32, or the `dtype` that you pass (`torch_dtype` in older",
        "versions), which may be a dict by component, and keeps in float32 what the code of some models requires. Components of",
        "transformers are loaded in the dtype that their `config.json` names, which holds all their values exactly.",
        "",
        "This gives every weight in the dtype of the table, for a component of transformers and one of diffusers"
        + (", and decodes those with scales:" if of_torchao else ":"),
        "",
        *python_lines(
            "import dtype_engine as de",
            "",
            f"text_encoder = de.load_pretrained({quoted(f'{name}/text_encoder')})",
            f"unet = de.load_pretrained({quoted(f'{name}/unet')}, module=UNet2DConditionModel.from_config(...))",
            f"pipeline = {class_name}.from_pretrained({quoted(name)}, text_encoder=text_encoder, unet=unet)",
        ),
        "",
        "`de.open` runs the pipeline, or the folder of a component, if diffusers is installed.",
    ]


def _adapter(base: str, name: str) -> list[str]:
    return [
        *python_lines("from peft import PeftModel", "", f"model = PeftModel.from_pretrained(base, {quoted(name)})"),
        "",
        f"`base` is the model that the adapter was made for ({code_span(base) if base else 'not named'}).",
        "PEFT loads the adapter in float32. If the base model is in bfloat16 or float16 and you pass",
        "`autocast_adapter_dtype=False`, the adapter has the dtype of the base model instead. `de.open` and",
        "`de.load_pretrained` merge the adapter into its base, which `Options(base=...)` names.",
    ]


def quoted(name: str) -> str:
    return json.dumps(printable(name), ensure_ascii=False)


def python_lines(*lines: str) -> list[str]:
    return ["```python", *lines, "```"]

"""Puts the planned contents of an export into another layout of files than that of compressed-tensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dtype_engine.checkpoint import read_json
from dtype_engine.core.errors import UserError
from dtype_engine.core.file_layouts import COMPRESSED_TENSORS, FILE_LAYOUTS, FileLayout
from dtype_engine.core.text import printable
from dtype_engine.runtime.export.contents import Contents, ExportTensor
from dtype_engine.runtime.export.experts import experts_notices
from dtype_engine.runtime.export.gptq_settings import why_not_transformers


def in_layout(contents: Contents, name: str) -> Contents:
    """Return the contents of an export with its weights with scales in the layout `name`, such as "gptq". Contents without such
    weights are returned unchanged. Raises UserError for an unknown layout, and for the first weight that the layout can't hold.
    """
    if name == COMPRESSED_TENSORS:
        return contents
    layout = FILE_LAYOUTS.get(name)
    if layout is None:
        known = ", ".join((COMPRESSED_TENSORS, *FILE_LAYOUTS))
        raise UserError(f"there is no layout {printable(name)!r}; the layouts are {known}")
    if not any(item.has_scales for item in contents.items):
        return contents
    if contents.layout.kind != "model":
        raise UserError(f"diffusers, which loads this, does not read the layout {name}: leave the layout out")
    if contents.cache_scheme is not None or contents.has_cache_formats:
        raise UserError(f"the layout {name} holds no scales of KV caches: leave out the rules for them, or this layout")
    if contents.config is None:
        raise UserError(f"the layout {name} needs a config.json that says so, and {contents.title} has none")
    items = tuple(_in_layout(item, layout) if item.has_scales else item for item in contents.items)
    others = experts_notices(contents.items)  # they are about the layout of compressed-tensors
    notices = [notice for notice in contents.notices if notice not in others]
    if why := why_not_transformers(items):
        notices.append(f"from_pretrained of transformers will not load this, since {why}; GPTQModel and vLLM do")
    return dataclasses.replace(contents, items=items, notices=tuple(notices))


def _in_layout(item: ExportTensor, layout: FileLayout) -> ExportTensor:
    if not item.portable:
        why = "it holds only weights of linear layers that are not tied, in rows of whole groups"
    elif item.source_bytes:
        why = "its codes are stored already, and export copies them only into the layout that they have"
    else:
        why = layout.refusal(item.shape, item.dtype)
    if why:
        name = printable(item.name)
        raise UserError(
            f"{name} in {item.dtype} can't be exported in the layout {layout.name}: {why}; give it another dtype, as in --cast "
            f"'{name.removesuffix('.weight')}=stored', or export it in the layout {COMPRESSED_TENSORS}"
        )
    return dataclasses.replace(item, file_layout=layout)


def layout_in(folder: Path) -> str:
    """Return the name of the layout in which an exported folder has its weights with scales."""
    file = folder / "config.json"
    settings = read_json(file).get("quantization_config") if file.is_file() else None
    named = settings.get("checkpoint_format") if isinstance(settings, dict) else None
    return named if named in FILE_LAYOUTS else COMPRESSED_TENSORS

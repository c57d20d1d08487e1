"""What GGUF calls a tensor, by the gguf package."""

from __future__ import annotations

from collections.abc import Callable

from dtype_engine.core.errors import UserError

# Names of config.json's model_type that gguf spells otherwise.
_ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "deepseek_v3": "deepseek2", "deepseek_v2": "deepseek2", "gpt_neox": "gptneox",
}  # fmt: skip


def name_map(model_type: str | None, blocks: int) -> Callable[[str], str | None]:
    """A function from a module's name in transformers to GGUF's, without `.weight`. Raises UserError."""
    import gguf

    if model_type is None:
        raise UserError("GGUF names depend on the architecture, and there is no model_type in a config.json")
    spelled = model_type.removesuffix("_text")
    wanted = {_ARCHITECTURES.get(spelled, spelled), spelled.replace("_", ""), spelled.replace("_", "-")}
    for architecture, name in gguf.MODEL_ARCH_NAMES.items():
        if name in wanted:
            return gguf.get_tensor_name_map(architecture, blocks).get_name
    raise UserError(f"no GGUF names are known for model type {model_type!r}; a newer gguf package may have them")

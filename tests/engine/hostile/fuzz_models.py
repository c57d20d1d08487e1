"""The kinds of `fuzz.py` that are a configuration in the folder of a model or of a pipeline of diffusers: config.json,
model_index.json, and the configurations of schedulers and tokenizers. `dtype-engine drift` opens the folder with the changed file
and runs the model.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.helpers.mutations import STRANGE, changed

KINDS = ("model", "pipeline") if find_spec("diffusers") else ("model",)
_MODELS = ("llama", "bert", "clip", "vit", "whisper", "t5", "mamba", "mixtral", "gpt2", "wav2vec2")
_PIPELINES = ("sd15", "sd3", "flux", "wan")
_NUMBERS: tuple[Any, ...] = (
    *range(-1, 9), 16, 100, 1000, 4096, 65_536, 10**6, 10**9, 2**31, 2**63, 2**64, 10**400, 0.5, -0.5, 1e-320, 1e308, float("nan"),
    float("inf"), -float("inf"), "8", "1e9", [10**9], [2, 10**9], [[10**9, 2]], [], [8, 8], [8] * 500, {}, None, True, False,
)  # fmt: skip
_ADDED: dict[str, tuple[Any, ...]] = {
    "rope_scaling": ({"rope_type": "yarn", "factor": 10**9, "original_max_position_embeddings": 8},
                     {"rope_type": "longrope", "short_factor": [1.0] * 10**5, "long_factor": [0.0], "factor": -1},
                     {"rope_type": "dynamic", "factor": 0.0}, {"type": "linear", "factor": "8"}),
    "quantization_config": ({"quant_method": "gptq", "bits": 2**64, "group_size": 0}, {"quant_method": "gone"}, {"bits": 4}, []),
    "torch_dtype": ("float8_e4m3fn", "complex64", "os.system", 5), "id2label": ({str(at): "x" for at in range(10**5)}, {}, []),
    "layer_types": (["full_attention"] * 10**5, ["gone"], []), "pruned_heads": ({"0": [0]}, {"x": [10**9]}, 5),
    "architectures": (["LlamaForCausalLM"], ["BertModel", "x"], [], 5), "num_labels": _NUMBERS, "image_size": _NUMBERS,
    "patch_size": _NUMBERS, "sample_size": _NUMBERS, "max_position_embeddings": _NUMBERS, "vocab_size": _NUMBERS,
    "num_train_timesteps": _NUMBERS, "trained_betas": ([0.1] * 10, [float("nan")], [], 5), "timestep_spacing": ("gone", "trailing"),
    "beta_schedule": ("gone", "squaredcos_cap_v2", 5), "use_karras_sigmas": (True,), "solver_order": _NUMBERS,
    "prediction_type": ("v_prediction", "gone"), "_class_name": ("DDPMScheduler", "UNet2DModel", "gone", "os", 5),
    "model_max_length": _NUMBERS, "auto_map": ({"AutoModel": "evil.M"},), "_diffusers_version": ("999", 5),
}  # fmt: skip
_places: dict[str, list[tuple[Path, str]]] = {}
"""The files of the kind that `make_good` made in this process: (folder of the model, name in it)."""


def make_good(kind: str, folder: Path) -> list[bytes]:
    """Return the configurations of small models or pipelines, which are written to `folder`."""
    with contextlib.redirect_stderr(io.StringIO()):
        _places[kind] = list(_models(folder) if kind == "model" else _pipelines(folder))
    return [(folder / name).read_bytes() for folder, name in _places[kind]]


def _models(folder: Path) -> Iterator[tuple[Path, str]]:
    from tests.helpers import checkpoint_folders

    for name in _MODELS:
        checkpoint_folders.save(name, folder / name)
        yield folder / name, "config.json"


def _pipelines(folder: Path) -> Iterator[tuple[Path, str]]:
    from tests.helpers.pipelines import save_pipeline

    for family in _PIPELINES:
        (folder / family).mkdir()
        place = save_pipeline(family, folder / family)
        for file in sorted(place.rglob("*.json")):
            if "config" in file.name or file.name == "model_index.json":
                yield place, str(file.relative_to(place))


def mutated(kind: str, content: bytes, chooser: random.Random) -> bytes | None:
    """A configuration with other values or further entries, or None for whatever `fuzz.py` does to bytes."""
    if chooser.random() < 0.1:
        return None
    value = json.loads(content)
    for _ in range(chooser.choice((1, 1, 2, 3))):
        value = _with_another_value(value, chooser)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _with_another_value(value: Any, chooser: random.Random) -> Any:
    """The same JSON with one of its innermost values replaced, mostly by a number, or with one more entry."""
    if chooser.random() < 0.1:
        return changed(value, chooser)
    if isinstance(value, dict) and value:
        if chooser.random() < 0.1:
            name = chooser.choice(list(_ADDED))
            return value | {name: chooser.choice(_ADDED[name])}
        key = chooser.choice(list(value))
        return value | {key: _with_another_value(value[key], chooser)}
    if isinstance(value, list) and value and chooser.random() < 0.6:
        place = chooser.randrange(len(value))
        return [*value[:place], _with_another_value(value[place], chooser), *value[place + 1 :]]
    return chooser.choice((*_NUMBERS, *_NUMBERS, *STRANGE))


def command(kind: str, content: bytes, seed: int) -> list[str]:
    """Write the file of a case, and return what is run on it. The other files are as they were."""
    for folder, name in _places[kind]:
        path = folder / name
        kept = path.with_suffix(".kept")
        if not kept.exists():
            path.rename(kept)
        path.write_bytes(kept.read_bytes())
    folder, name = _places[kind][seed % len(_places[kind])]
    (folder / name).write_bytes(content)
    component = folder / Path(name).parts[0]
    whole = kind == "model" or seed // len(_places[kind]) % 2 == 0 or not any(component.glob("*.safetensors"))
    return ["drift", str(folder if whole else component), "--cast", "*=bf16", "--sequences", "1"]

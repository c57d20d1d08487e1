"""Model folders and input files of a few kilobytes that ask for gigabytes, under a limit on the addresses of the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from tests.engine.hostile.test_pickles import CODE
from tests.helpers import checkpoint_folders, preloaded

GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 60}
ASKED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "picture": ("vit", "preprocessor_config.json", {"size": {"shortest_edge": 12_000}}, "432,000,000 values"),
    "rate": ("wav2vec2", "preprocessor_config.json", {"sampling_rate": 10**9}, "the highest rate"),
    "window": ("whisper", "preprocessor_config.json", {"n_fft": 10**7}, "n_fft times feature_size"),
    "text": (
        "llama",
        "tokenizer.json",
        {"normalizer": {"type": "Sequence", "normalizers": [GROWING] * 5}},
        "tokenizer",
    ),
    "sound": ("wav2vec2", "config.json", {}, "1,600 seconds"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ASKED)
def test_model_configs_and_inputs_that_need_too_much_memory_are_refused(tmp_path: Path, what: str) -> None:
    name, file, changes, says = ASKED[what]
    folder = checkpoint_folders.save(name, tmp_path / "model")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
    if what == "text":  # not the class that writes its own normalizer
        config = folder / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    soundfile.write(tmp_path / "slow.wav", np.zeros(1600, np.float32), 1, subtype="PCM_16")
    done = preloaded.run(
        CODE, "drift", str(folder), *(["--audio", str(tmp_path / "slow.wav")] if what == "sound" else [])
    )
    said, most = done.stderr.splitlines()[-2:]
    assert done.returncode == 2
    assert says in said
    assert int(most) < 1_000_000  # KiB

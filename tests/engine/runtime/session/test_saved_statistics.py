"""Statistics of roundings are saved, and a later session takes them instead of running its calibration inputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from tests.helpers import preloaded
from tests.helpers.exporting import engine
from tests.helpers.file_edits import change_config, change_tensors
from tests.helpers.paths import DEMO

import dtype_engine as de
from dtype_engine.core.user_folders import state_folder
from dtype_engine.runtime.building import module_sources
from dtype_engine.runtime.measure import input_statistics
from dtype_engine.runtime.session.saved_statistics import SavedStatistics

RULES = "model.layers.0.*_proj"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Use a state folder of the test's own. Returns a list that gets an entry for each calibration run over a sequence."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made, begin = list[int](), input_statistics._StatisticsMode.__init__
    monkeypatch.setattr(input_statistics._StatisticsMode, "__init__", lambda *args: (made.append(1), begin(*args))[1])
    return made


@pytest.fixture
def llama(make_llama: Callable[..., Path]) -> Path:
    return make_llama(num_hidden_layers=1, tie_word_embeddings=False)


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path / "experts")
    return tmp_path / "experts"


def opened(model: Path, seed: int = 5, **options: Any) -> de.Session:
    """Open a model whose calibration inputs are 2 sequences of 18 random tokens."""
    inputs = model.parent / f"ids{seed}.npz"
    ids = torch.randint(3, 64, (2, 18), generator=torch.Generator().manual_seed(seed))
    np.savez(inputs, input_ids=ids.numpy())
    return de.open(str(model), options=de.Options(device="cpu", tensors=inputs, **options))


def rounded(session: de.Session, dtype: str, pattern: str = "*") -> dict[str, torch.Tensor]:
    """Cast weights, and return the codes and scales of those that have a rounding, by name."""
    session.apply(de.Recipe.of([de.Rule.make(pattern, dtype)]))
    found = {}
    for name, weight in session.model.weights.items():
        if weight.rounded is not None and weight.scale is not None:
            found[name] = weight.tensor.data.view(torch.uint8)
            found[f"{name} scale"] = weight.scale
    return found


def saved_files() -> list[Path]:
    return sorted((state_folder() / "statistics").glob("*"))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(map(torch.equal, one.values(), other.values()))


def statistics(session: de.Session) -> SavedStatistics:
    found = session.model.rounder.calibration
    assert isinstance(found, SavedStatistics)
    return found


def test_later_session_runs_nothing_and_has_the_same_codes(llama: Path, runs: list[int]) -> None:
    first = rounded(opened(llama), "int4@g32:gptq")
    assert len(runs) == 1
    (file,) = saved_files()
    assert file.stat().st_mode & 0o777 == 0o600
    session, steps = opened(llama), list[int]()
    session.apply(de.Recipe.of([de.Rule.make("*", "int4@g32:gptq")]), lambda done, total: steps.append(total))
    assert set(steps) == {sum(weight.cast for weight in session.model.weights.values())}
    assert same(first, rounded(session, "int4@g32:gptq"))
    assert len(runs) == 1
    notices = [notice for notice in session.drift().notices if "reused" in notice]
    assert notices == [f"calibration statistics of {session.calibration.inputs.description} reused from {file}"]  # type: ignore[union-attr]
    by_squares = rounded(opened(llama), "nvfp4:imatrix")
    assert len(runs) == 1
    file.unlink()
    assert same(by_squares, rounded(opened(llama), "nvfp4:imatrix"))
    assert len(runs) == 2


def test_shared_inputs_are_stored_once_in_float32(llama: Path, runs: list[int]) -> None:
    rounded(opened(llama), "int4@g32:gptq")
    (file,) = saved_files()
    with safe_open(file, framework="pt") as tensors:
        held = [tensors.get_tensor(name) for name in tensors.keys()]  # noqa: SIM118, it is no mapping
    assert {tensor.dtype for tensor in held} == {torch.float32}
    # of q, k and v; of o; of gate and up; of down; of lm_head
    assert sorted(tuple(tensor.shape) for tensor in held) == sorted([(32,), (32, 32)] * 4 + [(48,), (48, 48)])


def test_file_grows_by_the_weights_that_it_lacks(llama: Path, runs: list[int]) -> None:
    whole = rounded(opened(llama), "int8:gptq")
    saved_files()[0].unlink()
    sizes = list[int]()
    for pattern, dtype in ((RULES, "int8:imatrix"), (RULES, "int8:gptq"), ("*", "int8:gptq")):
        part = rounded(opened(llama), dtype, pattern)
        sizes.append(saved_files()[0].stat().st_size)
    assert sizes == sorted(set(sizes))
    assert len(runs) == 4
    assert same(part, whole)
    assert same(rounded(opened(llama), "int8:gptq"), whole)
    assert len(runs) == 4


def test_other_process_reuses_what_the_command_line_saved(tmp_path: Path, runs: list[int]) -> None:
    cast = ["--device", "cpu", "--prompt", "one short prompt", "--cast", "*.0.*_proj=int8:gptq", "--sequences", "1"]
    assert engine("drift", DEMO, *cast) == 0
    assert len(runs) == 1
    done = preloaded.run(preloaded.COMMAND, "export", str(DEMO), *cast, "-o", str(tmp_path / "out"))
    assert "note: calibration statistics of 1 sequence of your prompts" in done.stderr


def change_one_value(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] += 0.25

    change_tensors(folder, change)


@pytest.mark.parametrize("what", ["weight", "settings", "inputs", "reference"])
def test_other_models_inputs_and_references_are_run(what: str, llama: Path, runs: list[int]) -> None:
    rounded(opened(llama), "int8:imatrix")
    seed, options = 5, dict[str, str]()
    if what == "weight":
        change_one_value(llama)
    elif what == "settings":
        change_config(llama, rms_norm_eps=0.1)
    elif what == "inputs":
        seed = 6
    else:
        options = {"reference": "stored"}
    session = opened(llama, seed, **options)
    rounded(session, "int8:imatrix")
    assert len(runs) == 2
    assert statistics(session).notices == ()
    assert len(saved_files()) == 2


def test_model_run_from_the_disk_is_known_by_its_files(
    llama: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_sources, "SMALLEST", 1)  # otherwise these weights stay in memory
    files = list[bytes]()
    for change in (None, None, change_one_value):
        if change is not None:
            change(llama)
        files.append(opened(llama, over_memory=True, max_memory={"cpu": 1 << 12}).imatrix())
    assert len(runs) == 4  # before the statistics are collected, a run finds out which weights are used more than once
    assert files[0] == files[1] != files[2]


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def garble(file: Path) -> None:
    file.write_bytes(b"no safetensors file")


def of_another_model(file: Path) -> None:
    content = file.read_bytes()
    at = content.index(b"fingerprint") + 20
    file.write_bytes(
        content[:at] + (b"00000000" if content[at : at + 8] != b"00000000" else b"1" * 8) + content[at + 8 :]
    )


def other_tensors(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"F32"', b'"I32"'))


@pytest.mark.parametrize("damage", [cut, garble, of_another_model, other_tensors])
def test_damaged_file_is_not_used_and_replaced(damage: Callable[[Path], None], llama: Path, runs: list[int]) -> None:
    first = rounded(opened(llama), "int8:gptq")
    (file,) = saved_files()
    damage(file)
    session = opened(llama)
    assert same(rounded(session, "int8:gptq"), first)
    assert len(runs) == 2
    (notice,) = statistics(session).notices
    assert notice.startswith(f"{file} can't be used, so the calibration inputs are run again: ")
    rounded(opened(llama), "int8:gptq")
    assert len(runs) == 2


def test_experts_with_few_tokens_keep_the_nearest_values(experts: Path, runs: list[int]) -> None:
    sessions = [opened(experts) for _ in range(2)]
    first, second = (rounded(session, "int8:gptq") for session in sessions)
    assert len(runs) == 1
    assert same(first, second)
    nearest = [
        {name: each.rounded.nearest for name, each in session.model.weights.items() if each.rounded is not None}
        for session in sessions
    ]
    assert nearest[0] == nearest[1]
    assert any(nearest[0].values())
    assert sessions[0].imatrix() == sessions[1].imatrix()
    assert len(runs) == 1


def test_cancelled_cast_has_saved_what_was_collected(llama: Path, runs: list[int]) -> None:
    session, casts, recipe = opened(llama), list[int](), de.Recipe.of([de.Rule.make(RULES, "int8:gptq")])
    with pytest.raises(de.Cancelled):
        session.apply(recipe, lambda done, _: casts.append(done), lambda: len(casts) > 4)
    assert same(rounded(opened(llama), "int8:gptq", RULES), rounded(session, "int8:gptq", RULES))
    assert len(runs) == 1


def test_runs_that_are_cancelled_save_nothing(llama: Path, runs: list[int]) -> None:
    session, recipe = opened(llama), de.Recipe.of([de.Rule.make(RULES, "int8:gptq")])
    with pytest.raises(de.Cancelled):
        session.apply(recipe, cancelled=lambda: bool(runs))
    assert (saved_files(), statistics(session).notices) == ([], ())


def test_products_over_the_limit_are_not_saved_and_older_files_are_removed(llama: Path, runs: list[int]) -> None:
    rounded(opened(llama, seed=7), "int8:gptq")
    session = opened(llama)
    statistics(session).most = 12_000
    first = rounded(session, "int8:gptq")
    unsaved, removed = statistics(session).notices
    assert unsaved.startswith("calibration statistics not saved: those of ")
    assert removed.startswith("1 file of older calibration statistics removed")
    (file,) = saved_files()
    assert file.stat().st_size < 12_000
    rounded(opened(llama), "int8:imatrix")
    assert len(runs) == 2
    assert same(rounded(opened(llama), "int8:gptq"), first)
    assert len(runs) == 3


def test_read_only_session_uses_files_and_writes_none(llama: Path, runs: list[int]) -> None:
    rounded(opened(llama, read_only=True), "int8:gptq")
    assert saved_files() == []
    rounded(opened(llama), "int8:gptq")
    rounded(opened(llama, read_only=True), "int8:gptq")
    assert len(runs) == 2


def test_folder_that_can_t_be_written_is_a_notice(
    llama: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    session = opened(llama)
    rounded(session, "int8:gptq")
    (notice,) = statistics(session).notices
    assert notice == "calibration statistics not saved: can't write to /dev/null/dtype-tui/statistics: Not a directory"


MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x):
        return self.two(self.one(x).{function}())

def example_inputs():
    return torch.linspace(-1, 1, 1024).view(32, 32)
"""


def test_changed_code_of_a_model_is_run(tmp_path: Path, runs: list[int]) -> None:
    for function in ("relu", "relu", "tanh"):
        (tmp_path / "net.py").write_text(MODULE.format(function=function))
        rounded(de.open(f"{tmp_path / 'net.py'}:Net", options=de.Options(device="cpu")), "int8:gptq")
    assert len(runs) == 2


def test_sparse_tensors_are_compared(runs: list[int]) -> None:
    for value in (1.0, 1.0, 2.0):
        torch.manual_seed(0)
        module, inputs = torch.nn.Linear(32, 32), torch.randn(32, 32)
        module.register_buffer("sparse", torch.eye(4).mul(value).to_sparse())
        rounded(de.open(module, inputs=inputs), "int8:gptq", "weight")
    assert len(runs) == 2


def test_class_without_a_file_is_run_again(runs: list[int]) -> None:
    made: dict[str, type[torch.nn.Module]] = {"__name__": "notebook"}  # type: ignore[dict-item]
    exec(MODULE.format(function="relu"), made)
    for _ in range(2):
        torch.manual_seed(0)
        rounded(de.open(made["Net"](), inputs=torch.randn(32, 32)), "int8:gptq")
    assert len(runs) == 2
    assert saved_files() == []

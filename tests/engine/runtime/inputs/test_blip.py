"""A captioner with a picture file, against plain transformers: drift of the logits, both captions, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from tests.helpers import checkpoint_folders

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run

PROMPT = "a picture of"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_folders.save("blip", tmp_path_factory.mktemp("blip") / "model")


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_folders.write_picture(tmp_path_factory.mktemp("pictures") / "noise.png")


def plain(folder: Path, dtype: torch.dtype) -> Any:
    return transformers.BlipForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()


def prepared(folder: Path, picture: Path) -> dict[str, torch.Tensor]:
    processor = transformers.AutoProcessor.from_pretrained(folder)
    return dict(processor(images=Image.open(picture), text=PROMPT, return_tensors="pt"))


SETTINGS = pytest.mark.parametrize(
    ("candidate", "autocast"), [("bfloat16", None), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)


@SETTINGS
def test_logit_drift_of_blip_equals_that_of_plain_transformers(
    folder: Path, picture: Path, candidate: str, autocast: Any
) -> None:
    options = de.Options(images=(picture,), prompts=(PROMPT,), settings=de.RunSettings(autocast=autocast))
    session = de.open(str(folder), options=options)
    session.cast("*", candidate)
    report = session.drift()

    kwargs, dtype = prepared(folder, picture), getattr(torch, candidate)
    with torch.no_grad():
        reference = plain(folder, torch.float32)(**kwargs).logits.double()
        cast = kwargs | {"pixel_values": kwargs["pixel_values"].to(dtype)}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
            logits = plain(folder, dtype)(**cast).logits.double()
    delta = logits - reference
    assert report.output_name == "logits"
    assert report.output.max_abs == pytest.approx(delta.abs().max().item(), rel=1e-9)
    assert report.output.mean_abs == pytest.approx(delta.abs().mean().item(), rel=1e-9)
    assert report.output.max_abs > 1e-4
    assert report.output.positions == kwargs["input_ids"].numel()
    kl = torch.nn.functional.kl_div(
        logits.log_softmax(-1), reference.log_softmax(-1), log_target=True, reduction="none"
    )
    assert report.output.kl_mean == pytest.approx(kl.sum(-1).mean().item(), rel=1e-6)


def test_description_of_inputs_says_that_text_or_pictures_are_the_users(folder: Path, picture: Path) -> None:
    session = de.open(str(folder), options=de.Options(images=(picture,), prompts=(PROMPT,)))
    assert session.drift().inputs.endswith(", and your text")
    session.use_inputs(de.Options(prompts=(PROMPT, "two")))
    assert session.drift().inputs == "a synthetic picture, 32 x 32, and 2 of your texts"


@SETTINGS
def test_captions_generated_by_blip_equal_those_of_plain_transformers(
    folder: Path, picture: Path, candidate: str, autocast: Any
) -> None:
    options = de.Options(images=(picture,), prompts=(PROMPT,), settings=de.RunSettings(autocast=autocast))
    session = de.open(str(folder), options=options)
    session.cast("*", candidate)
    (text,) = session.generate(12)
    again = session.generate(12)[0]
    assert (text.reference.ids, text.candidate.ids) == (again.reference.ids, again.candidate.ids)

    kwargs = prepared(folder, picture)
    wanted = getattr(torch, candidate)
    cast = kwargs | {"pixel_values": kwargs["pixel_values"].to(wanted)}
    for written, dtype, given, under in (
        (text.reference, torch.float32, kwargs, False),
        (text.candidate, wanted, cast, autocast is not None),
    ):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=under):
            copies = {name: value.clone() for name, value in given.items()}
            made = plain(folder, dtype).generate(**copies, max_new_tokens=12, do_sample=False, num_beams=1)
        ids = made[0].tolist()
        assert len(written.ids) >= 1
        assert list(written.ids) == ids[-len(written.ids) :]
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert written.text.split() == tokenizer.decode(ids[-len(written.ids) :]).split()


def test_reported_memory_is_the_footprint_of_the_cast_model(folder: Path, picture: Path) -> None:
    session = de.open(str(folder), options=de.Options(images=(picture,)))
    assert session.drift().memory.resident_bytes == plain(folder, torch.float32).get_memory_footprint()
    session.cast("*", "bfloat16")
    memory = session.drift().memory
    assert memory.resident_bytes == plain(folder, torch.bfloat16).get_memory_footprint()
    assert memory.planned_bytes is not None
    assert memory.stored_bytes == 2 * memory.planned_bytes


def test_drift_json_describes_the_picture_and_text_it_was_measured_on(
    folder: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["drift", str(folder), "--image", str(picture), "--prompt", PROMPT, "--cast", "*=bf16", "--json"]
    assert run(cli, "dtype-engine", [*arguments, "--generate", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["inputs"] == "your picture noise.png, 48 x 40, and your text"
    (batch,) = found["calibration"]["batches"]
    assert batch["what"] == f"noise.png, 48 x 40: {PROMPT}"
    assert {tensor["name"]: tensor["shape"] for tensor in batch["tensors"]}["pixel_values"] == [1, 3, 32, 32]
    assert found["calibration"]["made_of"][0].removesuffix("Pil").endswith("BlipImageProcessor")
    assert found["output"]["max_abs"] > 0
    assert len(found["generated"]) == 1

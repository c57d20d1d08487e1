"""Metrics of the user on models that they could be of, against plain torch on the tensors cast by hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.helpers.transformers_caches import cache_argument, cache_of

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.cancellation import never
from dtype_engine.core.errors import UserError
from dtype_engine.recipe.file import read_recipe_file
from dtype_engine.results.metrics import MetricChange
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner

MODELS = '''
import torch
import transformers
from tests.helpers.transformers_caches import cache_argument, cache_of
from torch import nn


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Digits(nn.Module):
    """Tells a digit of 8 x 8 pixels by the prototype that it resembles most."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(64, 10)
        self.classes.weight = nn.Parameter(drawn(10, 64))
        self.classes.bias = nn.Parameter(-self.classes.weight.detach().square().sum(1) / 2)

    def forward(self, pixels):
        return self.classes(pixels.flatten(1))


class Tagger(nn.Module):
    """Gives each word the tag of its neighbourhood."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding.from_pretrained(drawn(50, 16, seed=1))
        self.tags = nn.Conv1d(16, 4, 3, padding=1, bias=False)
        self.tags.weight = nn.Parameter(drawn(4, 16, 3, seed=2))

    def forward(self, ids):
        return self.tags(self.words(ids).movedim(-1, 1)).movedim(1, -1)


class Speech(nn.Module):
    """Hears a letter in each frame of 32 samples by its tone, and the blank in silence."""

    def __init__(self):
        super().__init__()
        tones = torch.stack([torch.sin(torch.arange(32) * (k + 1) * 0.19) for k in range(5)])
        self.frames = nn.Conv1d(1, 6, 32, stride=32)
        self.frames.weight = nn.Parameter(torch.cat([torch.zeros(1, 32), tones])[:, None])
        self.frames.bias = nn.Parameter(torch.tensor([6.0, 0, 0, 0, 0, 0]))

    def forward(self, samples):
        return self.frames(samples[:, None]).movedim(1, -1)
'''
METRICS = """
import torch
import transformers
from tests.helpers.transformers_caches import cache_argument, cache_of

LETTERS = "-abcde"


def accuracy(output, inputs):
    return (output.argmax(-1) == inputs["labels"]).tolist()


def margin(output, inputs):
    top = output.topk(2).values
    return (top[:, 0] - top[:, 1]).numpy()


def macro_f1(output, inputs):
    return list(zip(output.argmax(-1), inputs["labels"]))


def f1_of_all(states):
    pairs = [pair for found, wanted in states for pair in zip(found, wanted)]
    scores = []
    for tag in range(4):
        hits = sum(one == other == tag for one, other in pairs)
        scores.append(2 * hits / max(1, sum(one == tag for one, _ in pairs) + sum(other == tag for _, other in pairs)))
    return sum(scores) / 4


macro_f1.aggregate = f1_of_all


def heard(frames):
    collapsed = [one for one, before in zip(frames, [0, *frames]) if one != before]
    return "".join(LETTERS[one] for one in collapsed if one)


def distance(one, other):
    row = list(range(len(other) + 1))
    for at, letter in enumerate(one, 1):
        before, row[0] = row[0], at
        for to, wanted in enumerate(other, 1):
            before, row[to] = row[to], min(row[to] + 1, row[to - 1] + 1, before + (letter != wanted))
    return row[-1]


def character_errors(output, inputs):
    said = ["".join(LETTERS[one] for one in row if one) for row in inputs["labels"].tolist()]
    return [(distance(heard(row), text), len(text)) for row, text in zip(output.argmax(-1).tolist(), said)]


character_errors.aggregate = lambda states: sum(wrong for wrong, _ in states) / sum(length for _, length in states)


def of_the_model(model, inputs):
    return [float(model(batch["pixels"][row : row + 1]).max()) for batch in inputs for row in range(len(batch["pixels"]))]


def of_the_model_alone(model):
    return model(torch.ones(1, 8, 8, device=next(model.parameters()).device)).max()


def fails(output, inputs):
    return inputs["no such labels"]


def leaves(output, inputs):
    raise SystemExit(3)


def words(output, inputs):
    return ["right"]


def takes_three(one, two, three):
    return 0.0


number = 3
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    Path("metrics.py").write_text(METRICS)
    rng = np.random.default_rng(0)
    prototypes = torch.randn(10, 64, generator=torch.Generator().manual_seed(0)).numpy()
    labels = rng.integers(0, 10, (2, 100))
    pixels = (prototypes[labels] + 2.5 * rng.standard_normal((2, 100, 64))).astype("float32").reshape(2, 100, 8, 8)
    calls = {
        f"{call}.{name}": value[call] for call in range(2) for name, value in (("pixels", pixels), ("labels", labels))
    }
    np.savez("digits.npz", **calls)
    np.savez("words.npz", ids=rng.integers(0, 50, (30, 12)), labels=rng.integers(0, 4, (30, 12)))
    said = rng.integers(0, 6, (20, 9))
    tones = np.stack([np.zeros(32), *(np.sin(np.arange(32) * (k + 1) * 0.19) for k in range(5))])
    samples = (tones[said].reshape(20, -1) + 0.7 * rng.standard_normal((20, 288))).astype("float32")
    spoken = np.where(np.concatenate([np.zeros((20, 1), int), said[:, :-1]], 1) == said, 0, said)
    np.savez("speech.npz", samples=samples, labels=spoken)
    return tmp_path


def measured(model: str, data: str, *metrics: str, file: str = "metrics.py") -> dict[str, MetricChange]:
    """Return the metrics of a model in bfloat16. Its floating-point inputs are cast, too."""
    settings = de.RunSettings(float_inputs="model")
    options = de.Options(metrics=tuple(f"{file}:{name}" for name in metrics), tensors=Path(data), settings=settings)
    session = de.open(f"models.py:{model}", options=options)
    session.cast("*", "bfloat16")
    first = session.drift()
    assert session.drift().metrics == first.metrics, "what the reference gave is kept"
    return {change.name: change for change in first.metrics}


def in_torch(model: str, data: str, argument: str) -> list[tuple[torch.Tensor, np.ndarray]]:
    """Return (the outputs of plain torch over all calls, the labels) in float32, and the same in bfloat16."""
    space: dict[str, Any] = {}
    exec(MODELS, space)
    with np.load(data) as arrays, torch.no_grad():
        inputs = np.concatenate([arrays[name] for name in arrays if name.endswith(argument)])
        labels = np.concatenate([arrays[name] for name in arrays if name.endswith("labels")])
        ids = torch.from_numpy(inputs)
        return [
            (space[model]().to(dtype)(ids.to(dtype) if ids.is_floating_point() else ids).float(), labels)
            for dtype in (torch.float32, torch.bfloat16)
        ]


def test_user_metric_of_a_digit_classifier_equals_that_of_plain_torch(lab: Path) -> None:
    changes = measured("Digits", "digits.npz", "accuracy", "margin", "of_the_model", "of_the_model_alone")
    sides = in_torch("Digits", "digits.npz", "pixels")
    right = [(output.numpy().argmax(-1) == labels).astype(float) for output, labels in sides]
    ordered = [np.sort(output.numpy().astype(float), -1) for output, _ in sides]
    margins = [scores[:, -1] - scores[:, -2] for scores in ordered]
    expected = {"accuracy": right, "margin": margins, "of_the_model": [scores[:, -1] for scores in ordered]}
    for name, (reference, candidate) in expected.items():
        found = changes[name]
        assert (found.reference, found.candidate) == pytest.approx((reference.mean(), candidate.mean()), rel=1e-6)
        assert found.error == pytest.approx((candidate - reference).std(ddof=1) / math.sqrt(200), rel=1e-4)
        assert (found.examples, found.resampled) == (200, False)
        assert found.changed == int((candidate != reference).sum())
    assert 0.5 < changes["accuracy"].reference < 1
    assert (changes["of_the_model_alone"].examples, changes["of_the_model_alone"].error) == (1, None)


def test_user_metric_of_a_tagger_equals_that_of_plain_torch(lab: Path) -> None:
    found = measured("Tagger", "words.npz", "macro_f1")["macro_f1"]
    expected = []
    for output, labels in in_torch("Tagger", "words.npz", "ids"):
        table = np.zeros((4, 4))
        np.add.at(table, (output.numpy().argmax(-1).ravel(), labels.ravel()), 1)
        expected.append((2 * table.diagonal() / (table.sum(0) + table.sum(1))).mean())
    assert (found.reference, found.candidate) == pytest.approx(expected, rel=1e-6)
    assert found.resampled
    assert found.error is not None
    assert 0 < found.error < 0.05
    assert 0 < found.changed < found.examples == 30


def test_character_error_rate_as_a_user_metric_equals_that_of_plain_torch(lab: Path) -> None:
    found = measured("Speech", "speech.npz", "character_errors")["character_errors"]
    expected = []
    for output, labels in in_torch("Speech", "speech.npz", "samples"):
        wrong = length = 0
        for frames, said in zip(output.numpy().argmax(-1), labels, strict=True):
            heard = [one for one, before in zip(frames, [0, *frames[:-1]], strict=True) if one and one != before]
            wanted = said[said > 0].tolist()
            table = np.zeros((len(heard) + 1, len(wanted) + 1), int)
            table[:, 0], table[0] = range(len(heard) + 1), range(len(wanted) + 1)
            for i, j in np.ndindex(len(heard), len(wanted)):
                table[i + 1, j + 1] = min(
                    table[i, j + 1] + 1, table[i + 1, j] + 1, table[i, j] + (heard[i] != wanted[j])
                )
            wrong, length = wrong + table[-1, -1], length + len(wanted)
        expected.append(wrong / length)
    assert (found.reference, found.candidate) == pytest.approx(expected, rel=1e-6)
    assert 0 < found.reference < 0.5


def test_user_metric_gets_the_labels_of_a_jsonl_file(lab: Path) -> None:
    texts = ["a b c", "b a", "c c c c", "a"]
    Path("texts.jsonl").write_text("\n".join(json.dumps({"text": text, "label": at}) for at, text in enumerate(texts)))
    Path("seen.py").write_text(
        "def label(output, inputs):\n    return inputs['label'] + 10 * inputs['input_ids'].shape[1]"
    )
    options = de.Options(metrics=("seen.py:label",), data=(Path("texts.jsonl"),), prompts=("a b",))
    session = de.open(options=options)
    report = session.drift()
    lengths = [len(session.need_inputs().tokenizer(text)["input_ids"]) for text in texts]
    assert report.metrics[0].reference == np.mean([at + 10 * length for at, length in enumerate(lengths)])
    assert report.inputs.startswith("1 sequence of your prompts"), "the drift is that of the inputs"


def test_user_metric_is_computed_with_rounded_kv_caches(lab: Path) -> None:
    Path("seen.py").write_text("def largest(output, inputs):\n    return float(output.logits.max())")
    Path("texts.txt").write_text("a b c a")
    session = de.open(options=de.Options(metrics=("seen.py:largest",), data=(Path("texts.txt"),), prompts=("a b c a",)))
    session.cast("*.kv_cache", "int4@token")
    (found,) = session.drift().metrics
    with ForwardRunner(session.model, session.settings, never) as runner:
        output = runner.candidate(runner.candidate_call(session.need_inputs().batches[0])).output
    assert found.candidate == pytest.approx(main_output(output)[1].max().item(), rel=1e-6) != found.reference


def test_user_metric_is_computed_token_by_token_with_rounded_recurrent_states(lab: Path) -> None:
    """Its value is that of a loop of plain transformers that rounds by hand. A metric that runs the model by itself is refused."""
    Path("seen.py").write_text(
        "def largest(output, inputs):\n    return float(output.logits.max())\n\n\ndef own(model):\n    return 1.0"
    )
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=4, head_dim=16, n_groups=1, chunk_size=8,
        initializer_range=0.3,
    )  # fmt: skip
    transformers.Mamba2ForCausalLM(config).save_pretrained("mamba")
    ids = torch.arange(3, 40)[None]
    np.savez("ids.npz", input_ids=ids.numpy())
    session = de.open("mamba", options=de.Options(metrics=("seen.py:largest",), tensors=Path("ids.npz"), device="cpu"))
    session.cast("*.ssm_state", "f16")
    (found,) = session.drift().metrics
    module: Any = transformers.Mamba2ForCausalLM.from_pretrained("mamba").eval()
    cache, largest = None, -np.inf
    with torch.no_grad():
        for at in range(ids.shape[1]):
            given = {} if cache is None else {cache_argument(module): cache}
            output = module(ids[:, at : at + 1], use_cache=True, **given)
            cache, largest = cache_of(output), max(largest, float(output.logits.max()))
            for layer in cache.layers:
                for state in layer.recurrent_states.values():
                    state.copy_(state.half())
    assert found.candidate == pytest.approx(largest, abs=1e-12)
    session = de.open("mamba", options=de.Options(metrics=("seen.py:own",), tensors=Path("ids.npz"), device="cpu"))
    session.cast("*.ssm_state", "f16")
    with pytest.raises(
        UserError, match="own runs the model by itself, on whole texts, where recurrent states are not rounded"
    ):
        session.drift()


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (["metrics.py:missing"], "there is no 'missing' in metrics.py"),
        (["nowhere.py:accuracy"], "there is no file nowhere.py"),
        (["metrics.py:number"], "is a int, and a metric is a function"),
        (["metrics.py:takes_three"], "takes (one, two, three): a metric takes (output, inputs), (model)"),
        (["metrics.py:accuracy", "metrics.py:accuracy"], "2 metrics have the name accuracy"),
        (["metrics.py:fails"], "fails failed: KeyError: 'no such labels', in line "),
        (["metrics.py:leaves"], "leaves failed: ExitCalled: the code called sys.exit("),
        (["metrics.py:words"], "words returned 'right' for an example, which is no number"),
        (["digits.npz"], "is no metric: write file.py:function"),
    ],
)
def test_invalid_user_metric_is_refused_in_one_sentence(lab: Path, metrics: list[str], reason: str) -> None:
    session = de.open("models.py:Digits", options=de.Options(metrics=tuple(metrics), tensors=Path("digits.npz")))
    with pytest.raises(UserError, match=re.escape(reason)):
        session.drift()


def drift(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(cli, "dtype-engine", ["drift", "models.py:Digits", "--inputs", "digits.npz", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_limits_on_user_metrics_decide_the_exit_status(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metric = ("--metric", "metrics.py:accuracy", "--cast", "*=fp8e5")
    status, out, err = drift(
        capsys, *metric, "--min", "accuracy=-20%", "--max", "accuracy=1", "--min", "accuracy=99.9%"
    )
    assert status == 1
    assert err.count("missed") == 1
    assert "--min accuracy is missed: accuracy 0." in err
    assert re.search(
        r"^metric     accuracy 0\.\d+ → 0\.\d+, [+-]0\.\d+ ± 0\.\d+; \d+ of 200 examples changed$", out, re.M
    )
    assert re.search(r"^pass       change of accuracy -0\.\d+: at least -0\.2$", out, re.M)
    for arguments, reason in (
        ([*metric, "--min", "acuracy=1"], "no figure, --metric or --eval has this name; there is accuracy"),
        ([*metric, "--min", "accuracy"], "give METRIC=NUMBER"),
        ([*metric, "--max", "accuracy=much"], "give METRIC=NUMBER"),
        (["--data", "digits.npz"], "--data has the examples of a --metric"),
        (["--eval", "helm:mmlu"], "write lm-eval:TASK, such as lm-eval:arc_easy, or queries:FILE.jsonl"),
    ):
        status, _, err = drift(capsys, *arguments)
        assert (status, err.count("\n")) == (2, 1)
        assert reason in err


def test_code_of_a_user_metric_runs_only_if_the_option_names_it(lab: Path) -> None:
    """Neither a recipe nor the inputs name one, and opening a model with one runs nothing of it."""
    Path("marks.py").write_text("open('ran', 'w').close()\ndef accuracy(output, inputs):\n    return 0.0")
    session = de.open(
        "models.py:Digits", options=de.Options(metrics=("marks.py:accuracy",), tensors=Path("digits.npz"))
    )
    assert not Path("ran").exists()
    session.drift()
    assert Path("ran").exists()
    Path("recipe.yaml").write_text("version: 1\nrules: []\nmetrics: [marks.py:accuracy]")
    with pytest.raises(UserError, match="metrics"):
        read_recipe_file(Path("recipe.yaml"))


def test_search_chooses_the_smallest_recipe_within_the_metric_limit(
    lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "search",
        "models.py:Digits",
        "--inputs",
        "digits.npz",
        "--metric",
        "metrics.py:accuracy",
        "--draws",
        "2",
    ]
    arguments += ["--dtypes", "fp8e5,int8,bf16", "--verify", "8", "--json"]
    assert run(cli, "dtype-engine", [*arguments, "--min", "accuracy=-1%"]) == 0
    found = json.loads(capsys.readouterr().out)
    candidates = [(each["metrics"][0], each["planned_bytes"]) for each in found["candidates"]]
    kept = [(metric, size) for metric, size in candidates if metric["candidate"] >= metric["reference"] - 0.01]
    assert found["planned_bytes"] == min(size for _, size in kept)
    assert found["metrics"][0] in [metric for metric, _ in kept]
    assert run(cli, "dtype-engine", [*arguments, "--min", "accuracy=2"]) == 1
    assert "meets the limits" in capsys.readouterr().err


def test_torchmetrics_objects_are_metrics(lab: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    Path("ours.py").write_text(
        "from torchmetrics.classification import MulticlassF1Score, MulticlassAccuracy, MulticlassCalibrationError\n"
        "digits = MulticlassAccuracy(10, average='micro')\n"
        "f1 = MulticlassF1Score(4, average='macro')\n"
        "calibration = MulticlassCalibrationError(10)\n"
    )
    for model, data, argument, names in (
        ("Digits", "digits.npz", "pixels", ("digits", "calibration")),
        ("Tagger", "words.npz", "ids", ("f1",)),
    ):
        sides = in_torch(model, data, argument)
        whole = {
            "digits": torchmetrics.classification.MulticlassAccuracy(10, average="micro"),
            "calibration": torchmetrics.classification.MulticlassCalibrationError(10),
            "f1": torchmetrics.classification.MulticlassF1Score(4, average="macro"),
        }
        for name, change in measured(model, data, *names, file="ours.py").items():
            expected = [
                whole[name](output.movedim(-1, 1) if output.ndim > 2 else output, torch.from_numpy(labels)).item()
                for output, labels in sides
            ]
            assert (change.reference, change.candidate) == pytest.approx(expected, rel=1e-5)
            assert change.error is not None
            assert change.resampled


def test_error_in_a_user_metric_is_reported_with_its_line(lab: Path) -> None:
    Path("wrong.py").write_text(
        "def nothing(output, inputs):\n    return None\n\n\ndef parts(output, inputs):\n    return [('a', 1)] * 100\n\n\n"
        "def divides(output, inputs):\n    return [1.0] * 100\n\n\nparts.aggregate = lambda values: None\n"
        "divides.aggregate = lambda values: 1 / 0\n\n\ndef of_model(model):\n    raise ValueError('no luck')\n"
    )
    for name, reason in (
        ("nothing", "nothing returned None for an example, which is no number"),
        ("parts", "the aggregate of parts returned None, which is no number"),
        ("divides", "divides: computing it failed: ZeroDivisionError: division by zero, in line 14 of wrong.py"),
        ("of_model", "of_model failed: ValueError: no luck, in line 18 of wrong.py"),
    ):
        options = de.Options(metrics=(f"wrong.py:{name}",), tensors=Path("digits.npz"))
        with pytest.raises(UserError, match=re.escape(reason)):
            de.open("models.py:Digits", options=options).drift()

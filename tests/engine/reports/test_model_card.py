"""The text of a model card: what hubs read of it, what stays of a README, and what a hostile one can't do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from tests.helpers.mutations import STRANGE

from dtype_engine.core.errors import UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.recipe.file import RecipeFile
from dtype_engine.recipe.model_card import Conditions, ModelCard, measured_entries
from dtype_engine.reports.model_card import card_block, metadata_differences, read_card, read_readme, with_card
from dtype_engine.results.attribution import NoiseFloor
from dtype_engine.results.model_card import CardFigure, repeated_figures

CONDITIONS = Conditions(
    "acme/base",
    "1" * 64,
    "wiki.txt: 3 sequences, 1,024 tokens",
    "0123456789" * 6 + "1e23",
    "cpu",
    "2" * 64,
    512,
    None,
    True,
)
FIGURES = (
    CardFigure("kl_mean", 0.00324965, 0.00018),
    CardFigure("top1_agreement", 0.957895, 0.0069),
    CardFigure("sqnr_db", math.inf),
    CardFigure("positions", 1024),
    CardFigure("reference_bytes", 2831232),
    CardFigure("bytes", 1518720),
)


def card(**changes: Any) -> ModelCard:
    entries = measured_entries(
        CONDITIONS, {"file wiki.txt": "3" * 64, "prompt 1": "a | b ```\n<!--"}, {"torch": "2.13.0"}
    )
    recipe = RecipeFile(
        Recipe.of([Rule.parse("*.mlp=fp8")]), "small", RunSettings(autocast="bfloat16"), entries | changes
    )
    return ModelCard(FIGURES, recipe)


def test_card_that_was_written_is_read_with_the_same_content() -> None:
    found = read_card(f"# a\n\n{card_block(card())}\nmore\n", "README.md")
    assert found == card()
    assert found.conditions == CONDITIONS
    assert found.base_model == "acme/base"
    assert read_card(card_block(card()).replace("\n", "\r\n").replace("\r\n", "\n"), "README.md") == card()


def test_command_on_a_card_names_its_reference_and_its_files() -> None:
    said = card_block(card())
    assert "    dtype-engine check FOLDER --card FOLDER/README.md --against acme/base --text wiki.txt\n" in said


def test_metadata_is_read_by_the_classes_of_huggingface_hub() -> None:
    read = huggingface_hub.ModelCard(with_card("", "README.md", card(), "text-generation")).data
    assert (read.base_model, read.model_name) == ("acme/base", "small")
    assert read.eval_results is not None
    found = {each.metric_type: each for each in read.eval_results}
    assert found.keys() == {"kl_mean", "top1_agreement"}
    first = found["kl_mean"]
    assert (first.metric_value, first.metric_args) == (0.00324965, {"standard_error": 0.00018})
    assert (first.task_type, first.dataset_args) == (
        "text-generation",
        {"inputs_sha256": CONDITIONS.inputs_sha256, "reference_sha256": "1" * 64},
    )
    assert huggingface_hub.ModelCardData(eval_results=read.eval_results, model_name="small").to_dict()["model-index"]


README = """---
license: apache-2.0
base_model: other/name  # not to be changed
model-index:
- name: mine
  results:
  - task: {type: text-generation}
    dataset: {type: mmlu, name: MMLU}
    metrics:
    - {type: accuracy, value: 0.5}
# a comment
tags:
- quantized
---
# Mine

Some text.
"""


def test_rest_of_a_readme_stays_and_an_earlier_card_is_replaced() -> None:
    once = with_card(README, "README.md", card(), "other")
    longer = once + "\n## After\n"
    twice = with_card(longer, "README.md", ModelCard(FIGURES[1:], card().recipe), "other")
    data = yaml.safe_load(twice.split("---\n")[1])
    assert (data["license"], data["base_model"], data["tags"]) == ("apache-2.0", "other/name", ["quantized"])
    for text in (
        "base_model: other/name  # not to be changed\n",
        "# a comment\n",
        "\n# Mine\n\nSome text.\n",
        "\n## After\n",
    ):
        assert twice.count(text) == 1
    assert twice.count("model card of dtype-tui: begin") == 1
    (entry,) = data["model-index"]
    assert entry["name"] == "mine"
    assert [[metric["type"] for metric in each["metrics"]] for each in entry["results"]] == [
        ["accuracy"],
        ["top1_agreement"],
    ]
    assert read_card(twice, "README.md").figures == FIGURES[1:]
    assert metadata_differences(twice, "README.md", card()) == []
    assert len(huggingface_hub.ModelCard(twice).data.eval_results or ()) == 2


def test_size_of_a_readme_and_of_its_yaml_is_limited(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(b"x" * 5_000_000)
    with pytest.raises(UserError, match="which are too many for such a file"):
        read_readme(tmp_path)
    bomb = "a: &a [x]\n" + "".join(f"b{number}: [*a, *a]\n" for number in range(9))
    for text in (bomb, "a: " + "[" * 1000 + "\n", "x: y\n" * 100_000):
        block = card_block(card()).replace("version: 1\n", text, 1)
        with pytest.raises(UserError, match=r"^README\.md") as caught:
            read_card(block, "README.md")
        assert str(caught.value).isprintable()
        with pytest.raises(UserError, match=r"^README\.md"):
            with_card(f"---\n{text}---\n", "README.md", card(), "other")


def test_readme_that_is_a_link_out_of_its_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "outside.md").write_text(card_block(card()))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").symlink_to("../outside.md")
    with pytest.raises(UserError, match="is a link out of its folder"):
        read_readme(tmp_path / "model")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("<!-- model card of dtype-tui: end -->", "", "the comment at the end of the model card is missing"),
        (
            "<!-- model card of dtype-tui: begin -->",
            "<!-- model card of dtype-tui: begin -->\n" * 2,
            "several model cards",
        ),
        ("```yaml", "```json", "no block of YAML"),
        ("| `kl_mean` | 0.00324965 |", "| `kl_mean` | nan |", "kl_mean on the model card is 'nan', which is no number"),
        (
            "| `kl_mean` | 0.00324965 |",
            "| `kl_mean` | 1e999 |",
            "kl_mean on the model card is '1e999', which is no number",
        ),
        ("| `bytes` | 1518720 |", "| `bytes` | 1.5e6 |", "bytes on the model card is '1.5e6', which is no number"),
        ("| `kl_mean` |", "| `kl_meen` |", "the figure kl_meen of the model card is unknown to this version"),
        ("| `kl_mean` |", "| `top1_agreement` |", "the figure top1_agreement of the model card occurs twice"),
        ("| `bytes` |", "| bytes |", "the table of the model card lacks bytes"),
        ("  candidate_sha256", "  other", "has another reference than float32 or stored, and no candidate_sha256"),
        (
            "  sequence_length: 512",
            "  sequence_length: 16000000\n  sequences: 1000000",
            "asks for over 100,000,000 tokens",
        ),
        ("  sequence_length: 512", "  sequence_length: 0", "measured: sequence_length: expected int >= 2"),
        ("version: 1", "version: 2", "recipe version 2 is unknown"),
        ("version: 1", "version: 1\nversion: 1", "the key version occurs twice"),
        ("pattern: ", "weights: /etc/passwd, pattern: ", "rule 1 must have exactly 'pattern' and 'dtype'"),
    ],
)
def test_damaged_card_is_refused_by_the_name_of_its_file(old: str, new: str, says: str) -> None:
    text = card_block(card())
    assert old in text
    with pytest.raises(UserError, match=r"^README\.md") as caught:
        read_card(text.replace(old, new, 1), "README.md")
    assert says in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", [*Conditions.__struct_fields__, "rules", "settings", "model", "measured", "torch"])
def test_strange_entry_of_a_card_is_used_or_refused_by_the_name_of_its_file(name: str) -> None:
    before, text, after = _parts(card_block(card()))
    content = yaml.safe_load(text)
    holder = content if name in content else content["measured"]
    failures = []
    for value in STRANGE:
        holder[name] = value
        dumped = yaml.safe_dump(content, sort_keys=False)
        try:
            assert card_block(read_card(f"{before}\n```yaml\n{dumped}```\n{after}", "README.md"))
        except UserError as error:
            if not str(error).startswith("README.md") or not str(error).isprintable():
                failures.append(f"{value!r:.40}: {error}")
    assert failures == []


def _parts(block: str) -> tuple[str, str, str]:
    before, _, rest = block.partition("\n```yaml\n")
    text, _, after = rest.partition("\n```\n")
    return before, text, after


@pytest.mark.parametrize("index", [None, 1, "x", [], [1], [{}], [{"results": 1}], [{"results": [1, {"dataset": 2}]}],
                                   [{"results": [{"dataset": {"args": {"inputs_sha256": 1}}, "metrics": [1, {}]}]}]])  # fmt: skip
def test_strange_model_index_is_read(index: Any) -> None:
    head = yaml.safe_dump({"model-index": index})
    written = with_card(f"---\n{head}---\n# Mine\n", "README.md", card(), "other")
    assert read_card(written, "README.md") == card()
    assert metadata_differences(f"---\n{head}---\n", "README.md", card()) in (
        [], [("None", "is None in the metadata, and the card has no such figure")] * 2,
    )  # fmt: skip


def floor(**figures: float) -> NoiseFloor:
    return NoiseFloor(("batch of two",), 100, **{"sqnr_db": 120.0, "max_abs": 1e-6, "rel_l2": 1e-6, **figures})


@pytest.mark.parametrize(
    ("name", "before", "now", "noise", "in_16_bits", "holds"),
    [
        ("kl_mean", (1e-3, 1e-4), (1e-3 + 4.2e-4, 1e-4), None, False, True),
        ("kl_mean", (1e-3, 1e-4), (1e-3 + 4.3e-4, 1e-4), None, False, False),
        ("kl_mean", (1e-3, 1.6e-4), (1e-3, 1e-4), None, False, False),
        ("kl_mean", (1e-3, 1.4e-4), (1e-3, 1e-4), None, False, True),
        ("kl_mean", (0.0, 0.0), (9e-13, 0.0), floor(kl_mean=1e-12), False, True),
        ("kl_mean", (1.0e-6, 0.0), (1.44e-6, 0.0), floor(kl_mean=4e-8), False, True),
        ("kl_mean", (1.0e-6, 0.0), (1.60e-6, 0.0), floor(kl_mean=4e-8), False, False),
        ("kl_mean", (0.76e-3, 0.0), (1e-3, 0.0), None, True, True),
        ("kl_mean", (0.74e-3, 0.0), (1e-3, 0.0), None, True, False),
        ("kl_mean", (0.99e-3, 0.0), (1e-3, 0.0), None, False, False),
        ("top1_agreement", (1.0, 0.0), (0.99, 0.0), floor(top1_agreement=1.0), False, True),
        ("top1_agreement", (1.0, 0.0), (0.98, 0.0), floor(top1_agreement=1.0), False, False),
        ("top1_agreement", (1.0, 0.0), (0.98, 0.0), floor(top1_agreement=0.99), False, True),
        ("top1_agreement", (0.86, 0.0), (0.8, 0.0), None, True, True),
        ("top1_agreement", (0.87, 0.0), (0.8, 0.0), None, True, False),
        ("sqnr_db", (40.0, None), (39.91, None), None, False, True),
        ("sqnr_db", (40.0, None), (39.89, None), None, False, False),
        ("sqnr_db", (40.0, None), (38.91, None), None, True, True),
        ("sqnr_db", (40.0, None), (38.89, None), None, True, False),
        ("sqnr_db", (math.inf, None), (130.0, None), floor(), False, True),
        ("sqnr_db", (math.inf, None), (110.0, None), floor(), False, False),
        ("bytes", (100, None), (101, None), floor(), True, False),
    ],
)
def test_rule_by_which_a_repeated_figure_holds(
    name: str,
    before: tuple[float, float | None],
    now: tuple[float, float | None],
    noise: NoiseFloor | None,
    in_16_bits: bool,
    holds: bool,
) -> None:
    """The limits by hand: 3 √(1e-4² + 1e-4²) = 4.243e-4; (√1e-6 + √4e-8)² = 1.44e-6; 1 of 100 positions; 0.25 of 1e-3 nats;
    0.25 (1 - 0.8) + 0.01 = 0.06; 0.1 and 1.1 dB of the relative error.
    """
    figures = [CardFigure(name, *now), CardFigure("positions", 100)]
    (found,) = repeated_figures([CardFigure(name, *before)], figures, noise, in_16_bits)
    assert found.holds is holds


def test_figure_that_is_not_measured_again_does_not_hold() -> None:
    (found,) = repeated_figures([FIGURES[0]], [FIGURES[3]], None, False)
    assert (found.now, found.holds) == (None, False)


@pytest.mark.parametrize("value", [-1e308, 1e308, -0.0, 1e-308, math.inf])
@pytest.mark.parametrize("name", ["kl_mean", "kl_confident", "top1_agreement", "acceptance", "sqnr_db"])
def test_extreme_number_on_a_card_does_not_hold(name: str, value: float) -> None:
    now, noise = CardFigure(name, 0.5, 0.1), floor(kl_mean=1e-9, top1_agreement=1.0)
    for error in (None, 0.1, value, -value):
        (found,) = repeated_figures([CardFigure(name, value, error)], [now], noise, True)
        assert not found.holds or abs(value) < 1

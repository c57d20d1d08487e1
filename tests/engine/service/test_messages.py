"""Commands and events cross to another process whole; what is no message of ours is refused, whatever it is."""

from __future__ import annotations

import dataclasses
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.recorded_worker import RecordedWorker
from tests.helpers.recording_engine import report

from dtype_engine import Options, Recipe, Rule
from dtype_engine.checkpoint.source import locate
from dtype_engine.core.draft_heads import DraftHead
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import without_controls
from dtype_engine.core.token_reads import ReadPart, TokenReads
from dtype_engine.core.tree import TensorInfo, Tree, from_tensors
from dtype_engine.results.losses import ValueLoss
from dtype_engine.service import commands, control, events, frames, messages, save_requests
from dtype_engine.service.frames import FrameReader, FrameWriter, WireError
from dtype_engine.service.jobs import (
    ACTIVATIONS,
    CAUSES,
    CHECK,
    FLOW,
    GENERATE,
    JOBS,
    SPEED,
    TOKENS,
    VALUES,
    Ask,
    GenerateText,
    InspectTensor,
    PassSizes,
)

RECIPE = Recipe().then(Rule.parse("*.mlp=bf16"))
REQUESTS: list[messages.Request] = [
    control.Open(
        "demo", Options(texts=(Path("a b.txt"),), settings=RunSettings(autocast="bfloat16"), read_only=True), True
    ),
    control.Resume(7),
    control.Acknowledge(3),
    control.PlanExport(),
    control.Close(),
    save_requests.ExportRequest(Path("out"), True),
    save_requests.RecipeRequest(Path("r.yaml"), drift=report(RECIPE)),
    save_requests.ReportRequest(Path("r.html")),
    save_requests.ConvertRequest(Path("r.json"), "torchao"),
    commands.SetRecipe(RECIPE),
    commands.FollowRecipe(RECIPE),
    commands.SetSettings(RunSettings("bfloat16")),
    commands.Pause(True),
    commands.Cancel("scan"),
    commands.SetInputs("text a.txt"),
    commands.Measure(True),
    FLOW.ask(None),
    CAUSES.ask(None),
    SPEED.ask(None),
    ACTIVATIONS.ask(PassSizes((64, 128), 2)),
    CHECK.ask(None),
    commands.Download(),
    GENERATE.ask(GenerateText(48)),
    TOKENS.ask(GenerateText(48)),
    commands.Scan(("int8", "bfloat16")),
    commands.Scan(("int8",), keep=True),
    commands.MeasureRecipes((RECIPE, Recipe())),
    VALUES.ask(InspectTensor("a.weight", ("int8",))),
    VALUES.ask(InspectTensor("a.weight", ("int8:gptq",), with_gains=True)),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_request_is_unchanged_by_encoding_and_decoding(request_: messages.Request) -> None:
    arrived = messages.decode_request(messages.encode_request(request_))
    assert arrived == request_
    assert type(arrived) is type(request_)


def crossed(event: events.Event) -> Any:
    decoder = messages.AnswerDecoder()
    *parts, arrived = [decoder.decode(data) for data in messages.encode_answer(event)]
    assert set(parts) <= {None}
    return arrived


def described(tree: Tree) -> list[object]:
    """Write out all contents of a tree, without using the tree's own comparison."""
    return [
        tree.has_classes,
        [dataclasses.astuple(tensor) for tensor in tree.tensors.values()],
        [tensor.name for tensor in tree.order],
        tree.kept_in_fp32,
        [
            (
                name,
                module.class_name,
                module.keep_in_fp32,
                list(module.children),
                list(module.tensors),
                module.first,
                module.end,
            )
            for name, module in tree.modules.items()
        ],
    ]


def _plain(value: Any) -> object:
    """Return a value with every field of its dataclasses, even of those whose `repr` is a summary."""
    if dataclasses.is_dataclass(value):
        fields = [(field.name, _plain(getattr(value, field.name))) for field in dataclasses.fields(value)]
        return type(value).__name__, fields
    if isinstance(value, dict):
        return [(_plain(key), _plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_plain(item) for item in value]
    return value


def assert_same(arrived: Any, sent: Any) -> None:
    assert type(arrived) is type(sent)
    for name in sent.__struct_fields__:
        value, got = getattr(sent, name), getattr(arrived, name)
        if isinstance(value, Tree):
            assert described(got) == described(value)
            assert got.kv_cache == value.kv_cache
            assert got.draft == value.draft
            assert got.token_reads == value.token_reads
        else:
            assert repr(_plain(got)) == repr(_plain(value)), name  # nan is not equal to itself


def test_every_event_of_a_real_worker_is_unchanged_by_encoding_and_decoding() -> None:
    """The worker opens, measures, traces, attributes, times, writes, scans, reads values and fails."""
    with RecordedWorker(options=Options(prompts=("import os\n",))) as recorded:
        recorded.wait_for(events.Idle)
        worker = recorded.worker
        worker.request(commands.SetRecipe(RECIPE))
        recorded.measured(RECIPE)
        for command in (
            FLOW.ask(None),
            CAUSES.ask(None),
            SPEED.ask(None),
            ACTIVATIONS.ask(PassSizes((16, 32), 1)),
            GENERATE.ask(GenerateText(2)),
            TOKENS.ask(GenerateText(2)),
            commands.Scan(("int8",)),
            VALUES.ask(InspectTensor("lm_head.weight", ("int8",))),
        ):
            worker.request(command)
        worker.plan_export()
        recorded.wait_for(events.ScanUpdated, lambda event: event.finished)
        recorded.wait_for(events.ExportPlanned)
        recorded.answer(VALUES)
        assert [peak.context for peak in recorded.answer(ACTIVATIONS)] == [16, 32]
        told = list(recorded.events)
    assert len({type(event) for event in told}) > 14
    assert {event.ask.job for event in told if isinstance(event, events.JobDone)} > {
        "flow",
        "causes",
        "speed",
        "generate",
        "tokens",
    }
    for event in told:
        assert_same(crossed(event), event)


FIELD_WORDS = {
    "compute": "bfloat16",
    "kind": "missing-part",
    "dtype": "float16", "dtypes": "float16", "reference": "float16", "remedy": "*=float16", "rules": "*=float16",
    "job": "speed", "running": "speed", "waiting": "speed", "dropped": "speed",
}  # fmt: skip
"""By the name of a field: what is no dtype, no rule or no job does not cross."""


TEXT = "wörter\nzwei"


def made_up(hint: Any, name: str = "") -> Any:
    """Make a value of a field's type, so that all events are tested, even those that the demo never sends."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Recipe:
        return RECIPE
    if hint is Tree:
        return from_tensors(
            [
                TensorInfo("a.b", (2, 3), "float32", aliases=("c.b",)),
                TensorInfo("d", (), "int8", uncastable_reason="why"),
            ]
        )
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        return tuple(made_up(one, name) for one in arguments if one is not ...)
    if origin is Mapping:
        return {"kl_p99": made_up(arguments[1])}
    if arguments:
        return made_up(arguments[0], name)
    if dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct):
        return hint(**{name: made_up(type_, name) for name, type_ in typing.get_type_hints(hint).items()})
    if hint is type(None):
        return None
    return {int: 3, float: float("inf"), str: FIELD_WORDS.get(name, TEXT), bool: True, bytes: bytes(27)}[hint]


def made_up_answer(kind: Any, name: str) -> Any:
    types = messages.job_types(JOBS[name].run)
    result = made_up(types.result if kind is events.JobDone else types.partial)
    return kind(RECIPE, Ask(name, made_up(types.parameters)), result)


MADE_UP: dict[str, Callable[[], Any]] = {
    **{
        kind.__name__: partial(made_up, kind)
        for kind in events.Event.__subclasses__()
        if kind not in (events.JobDone, events.JobGrown)
    },
    **{name: partial(made_up_answer, events.JobDone, name) for name in JOBS},
    **{f"{name} so far": partial(made_up_answer, events.JobGrown, name) for name in ("causes", "generate", "tokens")},
}
"""Makes events of every type, and answers of every job."""


@pytest.mark.parametrize("name", MADE_UP)
def test_event_of_every_type_is_unchanged_by_encoding_and_decoding(name: str) -> None:
    event = MADE_UP[name]()
    assert_same(crossed(event), event)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (["JobDone", None, ["Ask", "tea", None], 3], "there is no job tea"),
        (["JobDone", None, ["Ask", "speed", None], None], "got `null`"),
        (["JobDone", None, ["Ask", "nonfinite", None], None], "has no such result"),
        (["JobDone", None, ["Ask", "flow", None], [3]], "got `int`"),
        (["JobDone", None, ["Ask", "speed", 3], {}], "Expected `null`, got `int`"),
        (["JobDone", None, ["Ask", "values", ["w"]], {}], "Expected `array` of at least length 2"),
        (["JobGrown", None, ["Ask", "speed", None], {}], "Expected `null`"),
        (["Refused", "tea", "why"], "there is no job tea"),
        (["Jobs", "", ["tea"]], "there is no job tea"),
        (["Stopped", {"rules": []}, "tea", []], "there is no job tea"),
    ],
)
def test_answer_of_the_wrong_type_for_its_job_is_refused(answer: list[Any], words: str) -> None:
    with pytest.raises(WireError, match=words):
        messages.AnswerDecoder().decode(msgspec.msgpack.encode(answer))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (["Ask", "tea", None], "there is no job tea"),
        (["Ask", "generate", ["48", ""]], "Expected `int`, got `str`"),
        (["Ask", "floor", None], "no app asks for the job floor"),
    ],
)
def test_request_for_an_unknown_job_is_refused(request_: list[Any], words: str) -> None:
    with pytest.raises(WireError, match=words):
        messages.decode_request(msgspec.msgpack.encode(request_))


def test_live_tree_is_unchanged_by_encoding_and_decoding() -> None:
    with RecordedWorker() as recorded:
        ready = recorded.wait_for(events.ModelReady)
    assert ready.tree.has_classes
    assert any(tensor.aliases for tensor in ready.tree.tensors.values())
    assert_same(crossed(ready), ready)


def test_tree_with_unusual_names_and_marks_is_unchanged_by_encoding_and_decoding() -> None:
    tree = Tree(
        [
            TensorInfo("a.b", (2, 3), "float32", aliases=("c.b",)),
            TensorInfo("d.10.w", (), "int8", uncastable_reason="why"),
        ],
        {"": "Net", "a": "Linear", "c": "Linear", "d": "List", "d.10": "Part", "d.10.empty": "Nothing"},
    )
    tree.modules["a"].keep_in_fp32 = "declared"
    tree.kept_in_fp32["d.10.w"] = "declared, too"
    assert_same(crossed(events.HeadersRead(tree)), events.HeadersRead(tree))


def test_large_tree_is_sent_in_small_parts() -> None:
    tree = from_tensors(
        TensorInfo(f"layers.{i}.mlp.experts.{j}.w", (64, 64), "bfloat16") for i in range(40) for j in range(100)
    )
    parts = list(messages.encode_answer(events.HeadersRead(tree)))
    assert len(parts) > 8
    assert max(map(len, parts)) < 40_000
    assert_same(crossed(events.HeadersRead(tree)), events.HeadersRead(tree))


HOSTILE = "\x1b]0;owned\x07\u202e\u3164\u1160\ufe0f\nb"
SAFE = "\\x1b]0;owned\\x07\\u202e\\u3164\\u1160\\ufe0f\nb"
NAMES = {
    "ActivationMemory.module", "Contribution.name", "ExpertTokens.module", "ExponentHistogram.name", "Failed.module",
    "Finding.tensor", "ImplicitCastStats.module", "InspectTensor.tensor",
    "LossRemedy.tensors", "ModuleDrift.name", "NonFiniteDiagnosis.first_module", "NonFiniteDiagnosis.module",
    "NonFiniteDiagnosis.weights", "Rule.pattern", "TensorInfo.aliases", "TensorInfo.name", "TensorInfo.stored_as",
    "ValueLoss.tensor", "WeightError.name", "WeightGain.name", "WeightScore.name",
}  # fmt: skip
"""The fields that the app looks up in the tree or compares with a recipe: whoever draws one has to escape it."""


def texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in a value, with the class and the name of its field."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Tree):
        for tensor in value.tensors.values():
            yield from texts(tensor)
        for module in value.modules.values():
            yield "class", module.class_name or ""
            yield "declared", module.keep_in_fp32 or ""
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from texts(item, where)
    else:
        kind = type(value)
        for name in getattr(kind, "__struct_fields__", getattr(kind, "__dataclass_fields__", ())):
            yield from texts(getattr(value, name), f"{kind.__name__}.{name}")


@pytest.mark.parametrize("name", MADE_UP)
def test_control_characters_in_events_are_escaped_except_in_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Escaped is even text that equals a name of the tree."""
    monkeypatch.setitem(globals(), "TEXT", HOSTILE)
    decoder = messages.AnswerDecoder()
    module = HOSTILE.partition(".")[0]
    tensor = TensorInfo(
        f"{HOSTILE}.w", (1,), "float32", "parameter", (f"{HOSTILE}.v",), None, HOSTILE, stored_as=(HOSTILE,)
    )
    tree = Tree([tensor], {"": "Net", module: HOSTILE})
    tree.modules[module].keep_in_fp32 = HOSTILE
    answers = [
        decoder.decode(data)
        for event in (events.HeadersRead(tree), MADE_UP[name]())
        for data in messages.encode_answer(event)
    ]
    found = [each for answer in answers if answer is not None for each in texts(answer)]
    exact = {where for where, text in found if without_controls(text) != text}
    assert {"TensorInfo.name", "TensorInfo.aliases", "TensorInfo.stored_as"} <= exact <= NAMES
    assert SAFE in [text for _, text in found]


def test_control_characters_in_a_message_that_equals_a_tensor_name_are_escaped() -> None:
    name = "layer\x1b]0;owned\x07"
    decoder = messages.AnswerDecoder()
    tree = from_tensors([TensorInfo(f"{name}.weight", (1,), "float32")])
    sent: list[events.Event] = [
        events.HeadersRead(tree), events.Failed(Recipe(), name, name), events.PathChecked(f"{name}.weight", False, name),
    ]  # fmt: skip
    read: Any
    read, failed, checked = [
        answer for event in sent for data in messages.encode_answer(event) if (answer := decoder.decode(data))
    ]
    assert name in read.tree.modules
    assert (failed.message, failed.module) == ("layer\\x1b]0;owned\\x07", name)
    assert (checked.path, checked.reason) == ("layer\\x1b]0;owned\\x07.weight", "layer\\x1b]0;owned\\x07")


@pytest.mark.parametrize("rule", [("*", 3), (["*"], "float16"), (None, "float16")])
def test_invalid_rules_in_a_message_are_refused(rule: tuple[Any, Any]) -> None:
    recipe = {"rules": [dict(zip(("pattern", "dtype"), rule, strict=True))]}
    with pytest.raises(WireError):
        messages.AnswerDecoder().decode(msgspec.msgpack.encode(["CastingProgress", recipe, 1, 2]))


LONG_LISTS = (
    ("HeadersRead", "notices"), ("ModelReady", "notices"), ("Saved", "notices"), ("Measured", "report.notices"),
    ("RecipeMeasured", "report.notices"), ("InputsReady", "summary.made_of"), ("speed", "result.rows"),
    ("speed", "result.notices"), ("tokens", "result.notices"), ("activations", "result"),
    ("check", "result.unchecked"), ("values", "result.errors"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "path"), LONG_LISTS)
def test_length_of_lists_in_events_is_limited(name: str, path: str) -> None:
    """Longer lists would take the app minutes to draw, without an answer to keys."""

    def with_entries(value: Any, fields: tuple[str, ...], times: int) -> Any:
        inner = getattr(value, fields[0])
        new = with_entries(inner, fields[1:], times) if fields[1:] else inner[:1] * times
        replace = msgspec.structs.replace if isinstance(value, msgspec.Struct) else dataclasses.replace
        return replace(value, **{fields[0]: new})

    def decode(event: Any) -> Any:
        decoder = messages.AnswerDecoder()
        return [decoder.decode(data) for data in messages.encode_answer(event)][-1]

    event, fields = MADE_UP[name](), tuple(path.split("."))
    assert decode(with_entries(event, fields, 100)) is not None
    with pytest.raises(WireError, match="3,000 entries in a list of at most 1"):
        decode(with_entries(event, fields, 3000))


def with_losses(*losses: ValueLoss) -> list[events.Event]:
    """Make every event that lists the values lost by casts."""
    told = dataclasses.replace(report(Recipe()), lost=losses)
    return [
        events.CastDone(Recipe(), losses),
        events.Measured(Recipe(), told),
        events.RecipeMeasured(told, RunSettings()),
        events.ExportPlanned(Recipe(), save_requests.ExportPlan(1, 1, (), "", lost=losses)),
    ]


@pytest.mark.parametrize("index", range(4))
def test_event_with_lost_values_of_an_empty_tensor_is_refused(index: int) -> None:
    messages.check_event(with_losses(ValueLoss("w", "float16", overflowed=1, vanished=0, elements=1))[index])
    with pytest.raises(ValueError, match="w loses values and has none"):
        messages.check_event(with_losses(ValueLoss("w", "float16", overflowed=1, vanished=0, elements=0))[index])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("kinds", ("tie", "tie"), "do not have one choice each"),
        ("candidate_pieces", (), "do not have one choice each"),
        ("severities", (-1.0,), "a severity that no token has"),
        ("severities", (float("nan"),), "a severity that no token has"),
    ],
)
def test_choices_that_do_not_fit_the_tokens_of_their_text_are_refused(field: str, value: Any, words: str) -> None:
    done = MADE_UP["tokens"]()
    messages.check_event(done)
    texts = tuple(dataclasses.replace(text, **{field: value}) for text in done.result.texts)
    with pytest.raises(ValueError, match=words):
        messages.check_event(msgspec.structs.replace(done, result=dataclasses.replace(done.result, texts=texts)))


def test_recipe_with_control_characters_is_unchanged_by_encoding_and_decoding() -> None:
    recipe = Recipe((Rule.parse("*.layer\x1b[[]2J.*=bf16"), Rule.parse("re:\u202e.*=f16")))
    assert crossed(events.CastingProgress(recipe, 1, 2)).recipe == recipe


WORDS: list[Any] = [kind.__name__ for kind in events.Event.__subclasses__()] + [
    "TreePart",
    "Hello",
    "Opened",
    "Open",
    "ExportRequest",
]
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


@given(st.sampled_from(WORDS), st.lists(ANYTHING, max_size=8))
def test_decoding_a_random_message_gives_an_event_or_raises_wire_error(word: str, fields: list[Any]) -> None:
    try:
        data = msgspec.msgpack.encode([word, *fields])
    except (OverflowError, ValueError):
        return
    for read in (messages.AnswerDecoder().decode, messages.decode_request):
        try:
            read(data)
        except WireError:
            continue


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_in_the_stream_raise_a_wire_error_at_most(data: bytes, compressed: bool) -> None:
    pieces: Iterator[bytes] = iter([frames.MARK + data])
    reader = FrameReader(lambda count: next(pieces, b""))
    try:
        assert reader.find_mark(compressed)
        while (message := reader.next()) is not None:
            messages.AnswerDecoder().decode(message)
    except WireError:
        pass


@pytest.mark.parametrize("compressed", [False, True])
def test_messages_are_decoded_from_a_stream_split_into_pieces(compressed: bool) -> None:
    written = bytearray(b"Welcome to host!\r\nLast login: never\n")
    writer = FrameWriter(written.extend, compressed)
    sent = [b"", b"x" * 70_000, bytes(range(256))]
    writer.mark()
    for message in sent:
        writer.put(message)
    rest = iter(bytes(written[index : index + 7]) for index in range(0, len(written), 7))
    reader = FrameReader(lambda count: next(rest, b""))
    assert reader.find_mark(compressed)
    assert [reader.next() for _ in sent] == sent
    assert reader.next() is None


def test_oversized_message_and_compression_bomb_are_refused() -> None:
    pieces = iter([frames.MARK + (frames.MOST_BYTES + 1).to_bytes(4, "big")])
    reader = FrameReader(lambda count: next(pieces, b""))
    assert reader.find_mark(False)
    with pytest.raises(WireError, match="bytes"):
        reader.next()
    bomb = zlib.compress(bytes(8 * frames.MOST_BYTES))
    assert len(bomb) < 200_000
    pieces = iter([frames.MARK, bomb])
    reader = FrameReader(lambda count: next(pieces, b""))
    with pytest.raises(WireError, match="too much"):
        _ = reader.find_mark(True) and [*iter(reader.next, None)]


def test_endless_tree_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_MOST_OF_A_TREE", 1200)
    part = messages.encode_request(messages.TreePart(True, (), (("a" * 300, "Net", None),)))
    decoder, complete = messages.AnswerDecoder(), events.HeadersRead(from_tensors([]))
    for _ in range(3):  # three parts are little enough, and the next tree begins anew
        for data in (part, part, part, *messages.encode_answer(complete)):
            decoder.decode(data)
    for _ in range(3):
        decoder.decode(part)
    with pytest.raises(WireError, match="a tree of more than 1,200 bytes"):
        decoder.decode(part)


def test_engine_stream_without_the_start_mark_is_refused() -> None:
    reader = FrameReader(lambda count: b"y" * count)
    with pytest.raises(WireError, match="no mark"):
        reader.find_mark(False)


def test_model_named_demo_is_the_built_in_model() -> None:
    assert locate(None).title == locate("demo").title


@pytest.mark.parametrize(
    "draft",
    [
        DraftHead("unheard of", ("mtp",)),
        DraftHead("named", ("mtp",), entry="\x1b[2J"),
        DraftHead("named", ("mtp",), first=-1),
        DraftHead("named", ("mtp",), declared=10**6),
        DraftHead("named", tuple(f"mtp_{number}" for number in range(1000))),
    ],
)
def test_impossible_draft_head_is_refused(draft: DraftHead) -> None:
    decoder = messages.AnswerDecoder()
    part = messages.encode_request(messages.TreePart(True, (), (), None, draft))
    with pytest.raises(WireError):
        decoder.decode(part)


@pytest.mark.parametrize(
    "reads",
    [
        TokenReads((ReadPart("a", 3, 2),)),
        TokenReads((ReadPart("a", -1, 2),)),
        TokenReads((ReadPart("a", 0, 0),)),
        TokenReads((ReadPart("a", 1, 1 << 50),)),
        TokenReads(tuple(ReadPart(f"a{rows}", 1, rows) for rows in range(1, 1000))),
        TokenReads(routed=(0, 8)),
        TokenReads(notes=("far too many",) * 1000),
    ],
)
def test_impossible_share_of_a_weight_is_refused(reads: TokenReads) -> None:
    part = messages.encode_request(messages.TreePart(True, (), (), None, None, reads))
    with pytest.raises(WireError):
        messages.AnswerDecoder().decode(part)


def test_draft_head_of_one_model_does_not_stay_for_the_next() -> None:
    tensors = [TensorInfo("mtp.fc.weight", (1,), "float32")]
    with_head = from_tensors(tensors)
    with_head.draft = DraftHead("named", ("mtp",))
    decoder = messages.AnswerDecoder()
    for tree in (with_head, from_tensors(tensors)):
        (arrived,) = filter(None, map(decoder.decode, messages.encode_answer(events.HeadersRead(tree))))
        assert isinstance(arrived, events.HeadersRead)
        assert arrived.tree.draft == tree.draft
        assert set(arrived.tree.of_draft) == set(tree.of_draft)

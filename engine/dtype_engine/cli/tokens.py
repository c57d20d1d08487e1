"""`dtype-engine tokens`: whether the candidate chooses the tokens that the reference writes."""

from __future__ import annotations

import click

from dtype_engine.cli.options import FLOOR, REFERENCE, ModelCommand, json_option
from dtype_engine.cli.program import answer, note, print_json, say, say_share
from dtype_engine.cli.request import RunRequest
from dtype_engine.results.as_json import as_json


@click.command(cls=ModelCommand, also=(*REFERENCE, FLOOR))
@click.option(
    "--tokens",
    "count",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="N",
    help="Maximum number of tokens that the reference writes after each prompt.",
)
@json_option
def tokens(request: RunRequest, count: int, as_object: bool) -> None:
    """Let the reference continue prompts greedily, and ask at each token of its texts whether the candidate would choose the same
    one. A token that differs is a tie if another order of arithmetic may swap the two tokens, and otherwise a difference with a
    severity: by how many nats the candidate's token is less likely to the reference than the reference's own.

    Without --prompt and --text, the built-in prompts are continued, through the model's chat template if it has one. With --floor
    auto, the noise floors, from which ties are told, are measured if a token differs.
    """
    session = request.open_session()
    report = session.token_choices(count, say_share)
    say("")
    if as_object:
        of_texts = ("tokens", "counts", "histogram", "largest_severity", "first_difference")
        print_json(as_json(report) | {name: as_json(getattr(report, name)) for name in of_texts})
        return
    from dtype_engine.reports.text_tokens import token_text

    answer(token_text(report))
    note((*session.model.notices, *report.notices))

"""Runs tasks of EleutherAI's lm-evaluation-harness as metrics of a live model. The package `lm_eval` is imported on first use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.replaced import replaced
from dtype_engine.core.text import printable
from dtype_engine.runtime.inputs import Inputs, tokenizer_of
from dtype_engine.runtime.libraries.hub import offline
from dtype_engine.runtime.libraries.silence_libraries import no_stderr, quiet
from dtype_engine.runtime.measure.paired import Examples
from dtype_engine.runtime.model.live import LiveModel

_BATCH = 8


def lm_eval_function(task: str) -> Callable[[LiveModel, Inputs], Mapping[str, Examples]]:
    """Return a function that runs a task of lm-eval on a live model and returns its metrics by name, such as `arc_easy/acc`.
    Datasets come from the local cache or from the files that the task names; nothing is downloaded. Raises UserError if lm-eval is
    not installed or has no such task.

    task: the name of a task or group that lm-eval has, or the path of a YAML file with a task.
    """
    try:
        with quiet():
            from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(f"--eval needs lm-eval: pip install 'dtype-tui[eval]' ({one_line(error, 200)})") from None
    logging.getLogger("lm_eval").setLevel(logging.CRITICAL)
    is_file = Path(task).suffix in (".yaml", ".yml")
    if is_file and not Path(task).is_file():
        raise UserError(f"there is no file {printable(task, 200)}")
    manager = TaskManager(include_defaults=not is_file)
    if not is_file and task not in (*manager.all_tasks, *manager.all_groups, *manager.all_tags):
        raise UserError(
            f"lm-eval has no task {printable(task, 200)}; give the name of a task, or the path of its YAML file"
        )

    def run(model: LiveModel, data: Inputs) -> Mapping[str, Examples]:
        from datasets import config
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        tokenizer = data.tokenizer or tokenizer_of(model)
        if tokenizer is None:
            raise UserError(f"lm-eval needs a tokenizer, and {model.title} has none")
        with quiet(), no_stderr(), replaced(config, "HF_HUB_OFFLINE", True), offline():
            tasks = manager.load(task)["tasks"]
            wrapped = HFLM(pretrained=model.module, tokenizer=tokenizer, batch_size=_BATCH)
            found = simple_evaluate(wrapped, tasks=list(tasks.values()), task_manager=manager, bootstrap_iters=0)
        return dict(_by_metric(tasks, found["samples"]))

    return run


def _by_metric(tasks: Mapping[str, Any], samples: Mapping[str, list[dict[str, Any]]]) -> Iterator[tuple[str, Examples]]:
    """Yield (name of the metric, its values for all examples). tasks: the tasks of lm-eval, by name. samples: what lm-eval logged
    for the examples, by task name.
    """
    for name, logged in samples.items():
        aggregations = tasks[name].aggregation()
        ordered = sorted(logged, key=lambda sample: sample["doc_id"])
        for filtered in dict.fromkeys(sample["filter"] for sample in ordered):
            of_filter = [sample for sample in ordered if sample["filter"] == filtered]
            for metric in of_filter[0]["metrics"]:
                aggregate = aggregations[metric]
                values = [sample[metric] for sample in of_filter]
                is_mean = getattr(aggregate, "__name__", "") == "mean"
                examples = Examples([*map(float, values)]) if is_mean else Examples(values, aggregate)
                yield f"{name}/{metric}" if filtered == "none" else f"{name}/{metric},{filtered}", examples

"""The ways to use a model with formats of its KV cache and with the texts and pictures that it makes."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from . import outside
from .commands import BF16, Job, Way, answer, cast_everything, check_output, program

_DIGITS = 1e-14
"""Drifts below this, in nats, are of the last digits of float32."""
_FORMATS = {"k": "fp8", "v": "int8@token"}


def memory_kv(job: Job) -> str:
    """The bytes of the cache that transformers makes, with one byte for each value."""
    found = answer("memory", *job.model, "--context", "8", "--batch", "2", "--activations", "none", "--kv", "fp8")
    assert found["weights_bytes"] == job.made.stored_bytes()
    held = outside.cache_bytes(job.made, 2, 8, itemsize=1)
    if held is None:
        return job.made.loader
    assert found["kv_bytes"] == held
    return "transformers' cache"


def drift_kv(job: Job) -> str:
    """Both parts of all caches in formats of their own, and all weights in float32."""
    rules = ["--cast", "*=float32"]
    rules += [part for name, form in _FORMATS.items() for part in ("--cast", f"*.kv_cache.{name}={form}")]
    found = answer("drift", *job.run, *rules)
    check_output(found, outside.cache_drift(job.made, _FORMATS))
    assert not found["weights_only"]
    # Without `kv_cache` in the pattern, and with keys alone.
    keys = answer("drift", *job.run, *rules[:2], "--cast", "*.k=fp8")
    check_output(keys, outside.cache_drift(job.made, {"k": "fp8"}))
    assert not keys["weights_only"]
    return "plain torch"


def drift_states(job: Job) -> str:
    """The recurrent states in bfloat16 after each token, and all weights in float32."""
    found = answer("drift", *job.run, "--cast", "*=float32", "--cast", "*.ssm_state=bf16")
    check_output(found, outside.state_drift(job.made))
    assert not found["weights_only"]
    return "plain torch"


def scan_kv(job: Job) -> str:
    """The keys and the values of each layer alone: as they are in plain torch, but for what draws at random leave open."""
    found = answer("scan", *job.run, "--dtypes", "kv:int8@token", "--draws", "64")
    scores = {row["name"]: row["score"] for row in found["weights"] if row["dtype"].startswith("kv:")}
    truth = outside.caches_alone(job.made, "int8@token", "nats" in found["unit"])
    for part in ("k", "v"):
        of_part = sorted(score for name, score in scores.items() if name.endswith(f".{part}"))
        assert len(of_part) == len(truth[part])
        for score, expected in zip(of_part, sorted(truth[part]), strict=True):
            if max(score, expected) > _DIGITS:
                assert abs(math.log(score / expected)) < math.log(2), (part, of_part, sorted(truth[part]))
    return "each alone in plain torch"


def drift_generate(job: Job) -> str:
    """The reference, and the model in bfloat16, continue the first input as transformers does."""
    first = answer("drift", *job.run, "--cast", "*=bfloat16", "--generate", "4")["generated"][0]
    for side, model in (("reference", job.made), ("candidate", cast_everything(job.made))):
        written = first[side]["ids"]
        assert written
        assert written == outside.generated(model, 4)[-len(written) :], side
    return "transformers"


def save_pictures(job: Job) -> str:
    """The files have the pictures of both sides, to the last of 255 steps."""
    program("drift", *job.run, "--cast", "*=bfloat16", "--save-pictures", str(job.work / "pictures"))
    sides = {"reference": job.made, "candidate": cast_everything(job.made)}
    for (side, model), dtype in zip(sides.items(), (None, BF16), strict=True):
        picture = outside.call(model.runs, model.inputs, *([dtype] if dtype else []))[0]
        wanted = (255 * picture.clamp(0, 1)).round().movedim(0, -1).numpy()
        held = np.asarray(Image.open(job.work / "pictures" / f"1-{side}.png"))
        assert np.abs(held - wanted).max() <= 1
    return "diffusers"


CACHES: dict[str, Way] = {
    "memory --kv": memory_kv,
    "drift *.kv_cache": drift_kv,
    "drift *.ssm_state": drift_states,
    "scan kv:": scan_kv,
    "drift --generate": drift_generate,
    "drift --save-pictures": save_pictures,
}

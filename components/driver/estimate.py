"""A rough estimate of a run's memory and duration from sizes and lengths, labelled as rough in the output.

Memory is counted in `memory`. Time is two figures at typical speeds: everything as long as allowed and trained on, and
what runs rather meet, half of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import Config, Hardware, Recipe, Stage, derive
from ..config.hardware import computes_bfloat16
from .memory import GIB, processes_of, served_bytes
from .models import ModelShape, shape_of_model

# Floating-point operations per second that small and medium models reach: on one core in float32 (measured with 0.9 and
# with 135 million weights), on one GPU (not measured).
TRAINING_FLOPS = {"cpu": 5e10, "cuda": 2e14}
GENERATION_FLOPS = {"cpu": 5e10, "cuda": 2e13}
IN_BFLOAT16 = 2.0
"""How many times as fast a core is that has it (AVX-512 BF16, AMX; measured with 135 million weights)."""
IN_EMULATED_BFLOAT16 = 0.1
"""The same for a core that emulates it: products took 7 times as long as in float32, those of gradients 23 times."""
# What an engine spends on a token besides, however small the model, and what a step costs however small it is.
TOKEN_S = {"cpu": 1.25e-4, "cuda": 0.0}
STEP_S = {"cpu": 0.2, "cuda": 0.0}
USUAL_FRAC = 0.5
"""Of the allowed lengths, and of the groups where those without an advantage are skipped: what runs rather meet."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Rows (what, how much) to print, and the bytes that this machine's main memory must hold (None: not known)."""

    rows: tuple[tuple[str, str], ...]
    main_memory_bytes: int | None = None


def estimate_stage(stage: Stage) -> Estimate:
    """What is known about one stage's memory and time before anything starts."""
    config = stage.config
    shape = shape_of_model(config.model.path, config.model.init)
    if shape is None:
        return Estimate(rows=(("memory, time", "unknown: the sizes of the model are not available"),))
    rows, total = _memory(config, stage.recipe, shape)
    rows.insert(0, ("model size", f"{_count(shape.num_parameters)} parameters"))
    rows.append(("time", _time(config, stage.recipe, shape)))
    return Estimate(rows=tuple(rows), main_memory_bytes=total if config.cluster.device == "cpu" else None)


def memory_problem(stages: Sequence[Stage], hardware: Hardware) -> str:
    """Why this machine's memory cannot hold a stage; "" if it can, or if that is unknown."""
    for stage in stages:
        needed = estimate_stage(stage).main_memory_bytes
        if needed is not None and stage.config.cluster.address is None and needed > hardware.memory_gib * GIB:
            return (
                f"model.path: missing hardware: got {hardware.memory_gib:.1f} GiB of memory, expected more than the "
                f"{size_text(needed)} that {stage.name} holds at once; take a smaller model, or lower train.num_ranks, "
                "rollout.num_generators or cluster.kv_cache_gib"
            )
    return ""


def _memory(config: Config, recipe: Recipe, shape: ModelShape) -> tuple[list[tuple[str, str]], int]:
    """Rows, and the bytes of all processes together: on a CPU, of this machine's main memory."""
    rows: list[tuple[str, str]] = []
    total = 0
    for process in processes_of(config, recipe, shape):
        rows += [_row(f"memory of {_one(process.name)}", process.device)] if process.device else []
        if process.main:
            several = process.device or process.number > 1
            name = f"main memory of {_one(process.name)}" if several else process.name
            rows.append(_row(name, process.main))
        total += process.number * sum((process.device | process.main).values())
    if recipe.generates and config.cluster.device == "cpu":
        cache = int(config.cluster.kv_cache_gib * GIB)
        tokens = cache // max(1, shape.kv_bytes_per_token(served_bytes(config)))
        rows.append(("KV cache", f"room for {tokens // config.rollout.max_model_len} sequences of max_model_len"))
    return rows, total


def _one(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _time(config: Config, recipe: Recipe, shape: ModelShape) -> str:
    if recipe.is_offline:
        return "unknown: it depends on the lengths of the examples"
    if not recipe.is_online or recipe.study_of is not None:
        return "unknown: it depends on the tasks"
    if recipe.elsewhere is not None:
        return f"unknown: it depends on the job of the {recipe.elsewhere} as well"
    usual_s, most_s = _step_s(config, recipe, shape, usual=True), _step_s(config, recipe, shape, usual=False)
    steps = config.train.steps
    whole = "" if steps is None else f", {_between(steps * usual_s, steps * most_s)} for {steps} steps"
    return (
        f"very roughly {_between(usual_s, most_s)} per step{whole}, from half of the allowed lengths and of the "
        "training to all of both, plus a minute to start. `leeway plan --from RUN` uses measured speeds"
    )


def _step_s(config: Config, recipe: Recipe, shape: ModelShape, *, usual: bool) -> float:
    """Seconds of a step. Engine and trainer read the prompt that a group has in common once."""
    need, rollout, train, device = derive(config, recipe), config.rollout, config.train, config.cluster.device
    frac = USUAL_FRAC if usual else 1.0
    units, size = need.cpus if device == "cpu" else need.gpus, shape.num_parameters
    sequences, groups = need.sequences_per_step, train.groups_per_step / train.updates_per_batch
    answers, prompt = sequences * rollout.max_response_tokens * frac, rollout.max_prompt_tokens * frac

    new = need.fresh_groups_per_batch / train.groups_per_step
    faster = 1.0
    if device == "cpu" and config.model.dtype == "bfloat16":
        faster = IN_BFLOAT16 if computes_bfloat16() else IN_EMULATED_BFLOAT16
    per_token_s = 2 * size / (units["generator"] * faster * GENERATION_FLOPS[device])
    engine_s = new * answers * TOKEN_S[device] / need.processes["generator"]
    generating_s = new * (groups * prompt + answers) * per_token_s + engine_s

    prompts = (groups if train.packing == "auto" else sequences) * prompt
    trained = (prompts + answers) * (frac if need.skip_zero_advantage else 1.0)
    training_s = 6 * size * trained / (units["trainer"] * faster * TRAINING_FLOPS[device])

    takes_turns = need.lockstep or config.cluster.in_turns
    return STEP_S[device] + (generating_s + training_s if takes_turns else max(generating_s, training_s))


def _row(name: str, parts: dict[str, int]) -> tuple[str, str]:
    listed = ", ".join(f"{part} {size_text(n)}" for part, n in parts.items())
    return name, f"{size_text(sum(parts.values()))}: {listed}"


def size_text(number: float) -> str:
    for unit, factor in (("GiB", GIB), ("MiB", 2**20)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number / 1024:.0f} KiB"


def _count(number: int) -> str:
    for unit, factor in (("B", 1e9), ("M", 1e6)):
        if number >= factor:
            return f"about {number / factor:.1f} {unit}"
    return f"about {number:,}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "less than a second"
    for unit, factor in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.0f} {unit}"
    return f"{seconds:.0f} s"


def _between(least_s: float, most_s: float) -> str:
    least, most = _duration(least_s), _duration(most_s)
    return least if least == most else f"{least} to {most}"

"""Measure each side of a run while the other is idle, so that contention cannot distort the speed limit.

It takes seconds at the start of a run, however long its answers and large its batches: answers are cut after
`PROBE_TOKENS` tokens, and the trainer gets one microbatch. The duration of a whole step is computed from these. A
resumed run reuses the measurements of its first part.

Each measurement has tasks of its own, as the run has: an engine that keeps prompts in its cache would not read one that
it has just read. Where engines are kept full, they have just forgotten what other prompts began with, as they do with
each version.
"""

from __future__ import annotations

import itertools
import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import Config, derive
from ..failures import PartFailed
from ..monitor.jsonl import write_text_atomically
from ..runtime.launch import Parts
from ..runtime.limit import PROBE_TOKENS, Speeds
from ..runtime.supervisor import together
from ..shared_rows import num_rows
from ..types import Task, Trajectory
from .turns import Turns

BUDGET_S = 3.0
"""Each measurement is repeated until this time has passed; a single one may take longer."""
_REPEATS, _MAX_REPEATS = 3, 12
FILE = "speeds.json"


async def measure_speeds(
    config: Config, parts: Parts, tasks: Sequence[Task], turns: Turns, *, weight_sync_s: float
) -> Speeds:
    """Roll out enough groups to fill the engines; one group alone, and its first tokens; then a training step.

    The fastest of several counts. Nothing is learned: the trainer steps a temporary optimizer with a learning
    rate of 0.
    """
    fresh = itertools.cycle(tasks)
    first_s, per_token_s, trajectories = await _together(config, parts, fresh)
    first_token_s, serial_s_per_token = await _alone(config, parts, fresh)
    batch = _one_pass(config, trajectories)
    refs = await _wait(config, parts, parts.buffer.sample_batch.remote(batch, _group_size(config)), "replay")
    await turns.trainer()
    calls = [t.measure.remote(ref) for t, ref in zip(parts.trainers, refs, strict=True)]
    times = (await _wait(config, parts, together(calls), "trainer"))[0]
    await turns.engines()
    return Speeds(
        generate_s_per_sequence=first_s,
        generate_s_per_token=per_token_s,
        train_s_per_token=times["forward_backward_s"] / max(1.0, times["tokens_in_pass"]),
        optim_s=times["optim_s"],
        first_token_s=first_token_s,
        serial_s_per_token=serial_s_per_token,
        weight_sync_s=weight_sync_s,
    )


def save_speeds(speeds: Speeds, config: Config, stage_dir: Path) -> None:
    """Save them for a later part of the run."""
    text = json.dumps({"speeds": asdict(speeds), "of": _conditions(config)}, indent=2)
    write_text_atomically(stage_dir / FILE, text + "\n")


def saved_speeds(config: Config, stage_dir: Path) -> Speeds | None:
    """What an earlier part measured; None if there is none, or if anything that affects speed differs."""
    file = stage_dir / FILE
    if not file.exists():
        return None
    saved = json.loads(file.read_text())
    return Speeds(**saved["speeds"]) if saved["of"] == _conditions(config) else None


def _conditions(config: Config) -> dict[str, Any]:
    """Everything that affects speed and may differ between the parts of a run."""
    dump = {name: own for name, own in config.written().items() if name in ("rollout", "train", "cluster")}
    for how_long in ("steps", "epochs"):
        del dump["train"][how_long]
    return dump | {"host": platform.node(), "tokens": "as models compute them"}


def is_cut(config: Config) -> bool:
    """Whether answers may be longer than the probe measures."""
    return config.rollout.max_response_tokens > PROBE_TOKENS


def _group_size(config: Config) -> int:
    """Of all groups that are measured: the mean, because what is measured is the cost of a sequence and of a token."""
    return max(1, round(config.samplings.mean_group_size))


async def _together(config: Config, parts: Parts, fresh: Iterator[Task]) -> tuple[float, float, list[Trajectory]]:
    """(seconds per sequence until its first token, per further token, trajectories), of all engines, kept full.

    Where answers share rows, it is per group, and per row of a further pass. Short answers are whole, and enough of
    them that some end while others begin: then both are the mean of all tokens.
    """
    count = min(derive(config).max_outstanding_groups, 2 * config.train.groups_per_step)
    if is_cut(config):  # all have the same length: one wave stays full to its end
        room = config.rollout.engine_options.places
        count = min(count, config.rollout.num_generators * -(-room // _group_size(config)))
    whole_s, trajectories = await _fastest(config, parts, fresh, count, call_limit=PROBE_TOKENS)
    if not trajectories:
        raise _all_failed()
    _, tokens = _num_tokens(config, trajectories)
    if not is_cut(config):
        return whole_s / max(1, tokens), whole_s / max(1, tokens), trajectories
    first_s, firsts = await _fastest(config, parts, fresh, count, call_limit=1)
    begun, first_tokens = _num_tokens(config, firsts)
    further = tokens - first_tokens
    if further < begun:  # an environment's own words, or a first token that ends most answers
        return whole_s / max(1, tokens), whole_s / max(1, tokens), trajectories
    return first_s / max(1, begun), max(0.0, whole_s - first_s) / further, trajectories


async def _alone(config: Config, parts: Parts, fresh: Iterator[Task]) -> tuple[float, float]:
    """(seconds in the engine until a group on its own has its first tokens, seconds per further token)."""
    begun, first_token_s, per_token = time.monotonic(), float("inf"), []
    for _ in range(_MAX_REPEATS):
        first_s, firsts = await _timed_rollouts(config, parts, [next(fresh)], call_limit=1)
        whole_s, group = await _timed_rollouts(config, parts, [next(fresh)], call_limit=PROBE_TOKENS)
        if firsts and group:  # a failed task is no measurement
            first_token_s = min(first_token_s, first_s)
            if (further := _longest(group) - _longest(firsts)) > 0:
                per_token.append((whole_s, further))
        if time.monotonic() - begun > BUDGET_S and first_token_s < float("inf"):
            break
    if first_token_s == float("inf"):
        raise _all_failed()
    return first_token_s, min((max(0.0, s - first_token_s) / further for s, further in per_token), default=0.0)


def _longest(trajectories: Sequence[Trajectory]) -> int:
    return max(len(t.response_tokens) for t in trajectories)


def _all_failed() -> PartFailed:
    return PartFailed("generators", "every rollout failed while speeds were measured; see the generators' logs")


def _one_pass(config: Config, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Whole groups of them, at most a batch and about a microbatch per rank; repeated if there are too few.

    A microbatch as the trainer reads it: a pass that is less full than a run's takes longer for each of its tokens.
    """
    size, ranks = _group_size(config), config.train.num_ranks
    most = ranks * config.train.microbatch_tokens(config.cluster.device)
    num_groups, tokens = config.train.groups_per_step, 0
    batch: list[Trajectory] = []
    for i in range(num_groups):
        start = i * size % max(size, len(trajectories) // size * size)
        group = trajectories[start : start + size]
        tokens += _num_read(group, packs=config.train.packing == "auto")
        if i >= ranks and tokens > most:
            break
        batch += group
    return batch


def _num_read(group: Sequence[Trajectory], *, packs: bool) -> int:
    """Tokens of a group that the trainer reads: where it packs, a prompt and what answers begin with are read once."""
    if not packs:
        return sum(len(t.prompt_tokens) + len(t.response_tokens) for t in group)
    prompts = [tuple(t.prompt_tokens) for t in group]
    return sum(map(len, set(prompts))) + num_rows(prompts, [t.response_tokens for t in group])[1]


async def _fastest(
    config: Config, parts: Parts, fresh: Iterator[Task], count: int, *, call_limit: int
) -> tuple[float, list[Trajectory]]:
    """(seconds, trajectories) of the one with the least seconds per token, of several with `count` groups each."""

    def s_per_token(measured: tuple[float, list[Trajectory]]) -> float:
        seconds, trajectories = measured
        _, tokens = _num_tokens(config, trajectories)
        return seconds / tokens if tokens else float("inf")  # where all failed, in no time

    begun, found = time.monotonic(), []
    for _ in range(_REPEATS):
        tasks = list(itertools.islice(fresh, count))
        found.append(await _timed_rollouts(config, parts, tasks, call_limit=call_limit, anew=True))
        if time.monotonic() - begun > BUDGET_S:
            break
    return min(found, key=s_per_token)


def _num_tokens(config: Config, trajectories: Sequence[Trajectory]) -> tuple[int, int]:
    """(first, all) tokens that the engines compute for these: rows, where answers share them."""
    if config.rollout.engine_options.shares_rows:
        return num_rows([tuple(t.prompt_tokens) for t in trajectories], [t.response_tokens for t in trajectories])
    return len(trajectories), sum(len(t.response_tokens) for t in trajectories)


async def _timed_rollouts(
    config: Config, parts: Parts, tasks: Sequence[Task], *, call_limit: int, anew: bool = False
) -> tuple[float, list[Trajectory]]:
    """Seconds in which the busiest engine had a request: time in environments does not count. `anew`: engines know
    nothing of earlier prompts.
    """
    temperature, group_size = config.rollout.temperature, _group_size(config)
    while True:
        if anew:
            forgetting = together(g.call(lambda actor: actor.forget_prompts.remote()) for g in parts.generators)
            await _wait(config, parts, forgetting, "generators")
        left = parts.restarts.left
        begun = await _generating_s(config, parts)
        calls = [
            g.call(
                lambda actor, share=share: actor.rollouts.remote(list(share), temperature, group_size, call_limit, True)
            )
            for i, g in enumerate(parts.generators)
            if (share := tasks[i :: len(parts.generators)])
        ]
        results = await _wait(config, parts, together(calls), "generators")
        seconds = [after - before for before, after in zip(begun, await _generating_s(config, parts), strict=True)]
        if parts.restarts.left == left:  # else one of them has begun to count anew
            return max(seconds), [t for part in results for t in part]


async def _generating_s(config: Config, parts: Parts) -> list[float]:
    """Seconds so far in which each engine had a request."""
    calls = together(g.call(lambda actor: actor.generating_s.remote()) for g in parts.generators)
    return await _wait(config, parts, calls, "generators")


async def _wait(config: Config, parts: Parts, call: Any, what: str) -> Any:
    return await parts.supervisor.wait(call, what=what, timeout_s=config.cluster.step_timeout_s)

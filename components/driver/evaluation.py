"""Evaluation over all collectors, or all explorers, on one stated policy version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ..config import Config
from ..config.inputs import AuxiliaryModel, EvalConfig, EvalSampling
from ..envs.auxiliary import AuxiliaryClient, AuxiliaryError
from ..failures import PartFailed, Refused
from ..monitor.logs import say
from ..runtime.fleet import with_a_process
from ..runtime.launch import Parts
from ..runtime.supervisor import as_coroutine, together
from ..tasks.evalsets import EvalSet
from ..types import Evaluated, Task, Trajectory
from .eval_metrics import at_k, interval

PROGRESS_S = 10.0
"""How often the driver asks how many tasks have ended."""
Answers = list[list[Evaluated] | str]
"""To each task, or why it failed for good."""
Asks = Callable[[EvalSet, int], Awaitable[Answers | None]]
"""Has a taskset answered under this policy version; None: by nobody."""


async def evaluate(
    config: Config, parts: Parts, evalsets: Sequence[EvalSet], *, policy_version: int
) -> tuple[dict[str, float], list[Trajectory]]:
    """(`eval/<name>/...`, the trajectories), one taskset after another.

    Tasks are distributed over the collectors; the result does not depend on how many there are. Raises PartFailed with
    a reason if all tasks of a taskset fail.
    """
    trajectories: list[Trajectory] = []
    ask = asks_generators(config, parts, keep=trajectories.extend)
    return await measured(ask, evalsets, policy_version=policy_version), trajectories


def asks_generators(
    config: Config, parts: Parts, *, keep: Callable[[Sequence[Trajectory]], Any] = lambda trajectories: None
) -> Asks:
    """`keep`: is given the trajectories of each task."""

    async def ask(evalset: EvalSet, version: int) -> Answers:
        results = await answered(config, parts, evalset, version)
        for result in results:
            if not isinstance(result, str):
                keep(result)
        return evaluated_of(results)

    return ask


def asks_explorers(config: Config, parts: Parts) -> Asks:
    return lambda evalset, version: answered_by_explorers(config, parts, evalset, version)


async def measured(ask: Asks, evalsets: Sequence[EvalSet], *, policy_version: int) -> dict[str, float]:
    """`eval/<name>/...` of all tasksets, or nothing where nobody answers. Raises as `evaluate`."""
    metrics: dict[str, float] = {}
    for evalset in evalsets:
        results = await ask(evalset, policy_version)
        if results is None:
            return {}
        failures = [result for result in results if isinstance(result, str)]
        if len(failures) == len(results):
            why = (
                f"all {len(failures)} tasks failed, the last one: {failures[-1]}" if failures else "there are no tasks"
            )
            raise PartFailed(f"evaluation on {evalset.name}", why)
        groups = [[] if isinstance(result, str) else result for result in results]
        metrics |= summarise(groups, evalset.sampling, name=evalset.name, policy_version=policy_version)
    return metrics


def evaluated_of(results: Sequence[list[Trajectory] | str]) -> Answers:
    return [result if isinstance(result, str) else [Evaluated.of(t) for t in result] for result in results]


async def answered(config: Config, parts: Parts, evalset: EvalSet, policy_version: int) -> list[list[Trajectory] | str]:
    """The trajectories of each task, or why it failed permanently. The deadline is for one task to end, not for all."""
    what, timeout_s = f"evaluation on {evalset.name}", config.cluster.step_timeout_s
    pending = asyncio.ensure_future(shared_out(parts, evalset.tasks, evalset.sampling, policy_version))
    now = asyncio.get_running_loop().time
    num_ended, since = [], now()
    try:
        while not pending.done():
            pause = asyncio.wait({pending}, timeout=min(PROGRESS_S, timeout_s))
            await parts.supervisor.wait(pause, what=what, timeout_s=timeout_s + PROGRESS_S)
            ended = await parts.supervisor.wait(num_evaluated(parts), what="generators", timeout_s=timeout_s)
            if ended != num_ended:
                num_ended, since = ended, now()
            elif now() - since >= timeout_s and not pending.done():
                raise PartFailed(
                    what, f"no task ended for {timeout_s:g} s; raise cluster.step_timeout_s if that is normal here"
                )
        return await parts.supervisor.wait(pending, what=what, timeout_s=timeout_s)
    finally:
        pending.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else retrieves it
        pending.cancel()


async def shared_out(
    parts: Parts, tasks: Sequence[Task], sampling: EvalSampling, policy_version: int
) -> list[list[Trajectory] | str]:
    """The answers of all generators that there are, each to its share of the tasks; others do what one that is lost was
    asked for. Raises what one of them raised.
    """
    answers: dict[int, list[Trajectory] | str] = {}

    def answers_to(share: Sequence[int]) -> Callable[[Any], Awaitable[Any]]:
        return lambda actor: actor.evaluate.remote([tasks[i] for i in share], sampling, policy_version)

    while missing := [i for i in range(len(tasks)) if i not in answers]:
        asked = await with_a_process(parts.generators)
        shares = [own for first in range(len(asked)) if (own := missing[first :: len(asked)])]
        results = await together(g.call_once(answers_to(share)) for g, share in zip(asked, shares, strict=False))
        for share, result in zip(shares, results, strict=True):
            answers |= {} if result is None else dict(zip(share, result, strict=True))
    return [answers[i] for i in range(len(tasks))]


async def num_evaluated(parts: Parts) -> list[int | None]:
    """How many tasks each generator has answered so far: a sign of progress."""
    return [*await together(g.call_now(lambda actor: actor.num_evaluated.remote()) for g in parts.generators)]


async def answered_by_explorers(config: Config, parts: Parts, evalset: EvalSet, policy_version: int) -> Answers | None:
    """The same where generators are jobs of their own; None, and said, where none of these can. The train job's side of
    the meeting ends a standstill, and names the cause.
    """
    what, timeout_s = f"evaluation on {evalset.name}", config.cluster.step_timeout_s
    sampling = evalset.sampling
    longest = sampling.max_tokens or config.rollout.max_response_tokens  # an explorer may have another
    asked = sampling.model_copy(update={"max_tokens": longest})
    pending = asyncio.ensure_future(
        as_coroutine(parts.buffer.evaluate.remote(list(evalset.tasks), asked, policy_version))
    )
    try:
        while not pending.done():
            await parts.supervisor.wait(
                asyncio.wait({pending}, timeout=PROGRESS_S), what=what, timeout_s=timeout_s + PROGRESS_S
            )
            await parts.supervisor.wait(parts.buffer.ping.remote(), what="replay", timeout_s=timeout_s)
        answers = await parts.supervisor.wait(pending, what=what, timeout_s=timeout_s)
    finally:
        pending.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        pending.cancel()
    if answers is None:
        say(
            f"warning: version {policy_version} is not evaluated: no explorer works on the train job's own tasks "
            "(explorer.tasks=trainer)"
        )
    return answers


def evaluated_at_start(rows: Sequence[Mapping[str, Any]], evalsets: Sequence[EvalSet]) -> dict[str, Any]:
    """That of step 0 in `rows` of a metrics.jsonl, in the form of `by_set`; {} if there is none."""
    first = next((row for row in rows if row["role"] == "evaluation" and not row["step"]), {})
    return by_set({name: value for name, value in first.items() if name.startswith("eval/")}, evalsets) if first else {}


def by_set(metrics: dict[str, float], evalsets: Sequence[EvalSet]) -> dict[str, Any]:
    """The numbers of the first taskset (the held-out tasks); those of the others are under "tasksets", by name."""
    first, *others = [of_set(metrics, e.name) for e in evalsets]
    named = {e.name: own for e, own in zip(evalsets[1:], others, strict=True)}
    return {**first, "tasksets": named} if named else dict(first)


def in_one_line(*evaluations: Mapping[str, float]) -> str:
    """In words, from first to last: the accuracy, if it is known which answers are right, and the reward, if it is
    different.
    """
    names = [name for name in ("exact_match", "reward") if all(name in numbers for numbers in evaluations)]
    if len(names) == 2 and all(numbers["exact_match"] == numbers["reward"] for numbers in evaluations):
        names = ["exact_match"]
    called = {"exact_match": "accuracy"}
    values = [(called.get(name, name), [f"{numbers[name]:.3f}" for numbers in evaluations]) for name in names]
    return ", ".join(f"{name} {' -> '.join(course)}" for name, course in values)


def measured_by(numbers: Mapping[str, float]) -> tuple[str, float]:
    """What runs are compared by: the accuracy if there is one, else the reward."""
    return ("accuracy", numbers["exact_match"]) if "exact_match" in numbers else ("reward", numbers["reward"])


async def version_at(evaluation: EvalConfig) -> int:
    """The policy version that `eval.address` says it serves; 0 where it says none, or none is set."""
    if evaluation.address is None:
        return 0
    settings = AuxiliaryModel(url=evaluation.address, key_variable=evaluation.key_variable)
    try:
        model = await AuxiliaryClient("", settings, where="eval.address").first_model()
    except AuxiliaryError as error:
        raise Refused(f"{error}; expected an OpenAI-compatible address that answers GET /v1/models") from None
    version = model.get("policy_version")
    return version if isinstance(version, int) and version >= 0 else 0


def table_of_versions(name: str, measured: Mapping[int, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Lines of a table: what models are compared by, at each version, with its 95 % interval over tasks."""
    first = next(iter(measured.values()))[name]
    called, _ = measured_by(first)
    metric = "exact_match" if called == "accuracy" else "reward"
    lines = [f"{name}: step  {called} (95 % of samples of tasks like these)  tokens"]
    for version, sets in measured.items():
        own = sets[name]
        low, high = own.get(f"{metric}_low"), own.get(f"{metric}_high")
        between = "" if low is None or high is None else f" ({low:.4f} to {high:.4f})"
        lines.append(f"{name}: {version:>4}  {own[metric]:.4f}{between}  {own['response_tokens_mean']:.1f}")
    return lines


def of_set(metrics: dict[str, float], name: str) -> dict[str, float]:
    """The metrics of one taskset, by their bare names."""
    prefix = f"eval/{name}/"
    return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}


def summarise(
    groups: Sequence[Sequence[Evaluated]], sampling: EvalSampling, *, name: str, policy_version: int
) -> dict[str, float]:
    """`groups`: the answers to each task; none if it failed permanently, which counts only in `failed_tasks`."""
    answered = [group for group in groups if group]
    answers = [answer for group in answered for answer in group]
    num = len(answers)
    metrics = {
        "reward": sum(a.reward for a in answers) / num,
        "num_tasks": float(len(answered)),
        "failed_tasks": float(len(groups) - len(answered)),
        "policy_version": float(policy_version),
        "response_tokens_mean": sum(a.num_tokens for a in answers) / num,
    }
    for metric in sorted({m for a in answers for m in a.metrics}):
        values = [a.metrics[metric] for a in answers if metric in a.metrics]
        metrics[metric] = sum(values) / len(values)
    if sampling.samples == 1:
        metrics |= _intervals("reward", [a.reward for a in answers])
        if right := [a.metrics["exact_match"] for a in answers if "exact_match" in a.metrics]:
            metrics |= _intervals("exact_match", right)
    if sampling.samples > 1:
        rewards = [[a.reward for a in group] for group in answered]
        right = [[_is_right(a, sampling.solved) for a in group] for group in answered]
        metrics |= at_k(rewards, right, sampling.ks())
    return {f"eval/{name}/{metric}": value for metric, value in metrics.items()}


def _intervals(name: str, values: Sequence[float]) -> dict[str, float]:
    low, high = interval(values)
    return {f"{name}_low": low, f"{name}_high": high}


def _is_right(answer: Evaluated, solved: float) -> bool:
    return answer.metrics.get("exact_match", float(answer.reward >= solved)) == 1.0

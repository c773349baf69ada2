"""What is measured at the start: how much is generated and trained for it, and what comes out of known speeds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.config import Config, load_config
from leeway.driver import speeds as module
from leeway.driver.speeds import PROBE_TOKENS, measure_speeds, save_speeds, saved_speeds
from leeway.driver.turns import Turns
from leeway.failures import PartFailed
from leeway.runtime.supervisor import Supervisor
from leeway.types import Task, Trajectory

from .standing import generators_of

PREFILL_S, TOKEN_S, PASS_S = 0.5, 0.01, 0.25
PROMPT = 10


def trajectory(tokens: int, last: int = 2, prompt: int = 1) -> Trajectory:
    return Trajectory(
        prompt_tokens=[prompt] * PROMPT,
        response_tokens=[*[2] * (tokens - 1), last],
        loss_mask=[True] * tokens,
        behavior_logprobs=[0.0] * tokens,
        policy_versions=[0] * tokens,
        reward=0.0,
        finish_reason="length",
        text="",
    )


class FakeCollector:
    """An engine whose answers are all `length` long: so many seconds per prompt, and per token of all sequences."""

    fails: str | None = None
    said_between = 0
    keeps_prompts = False
    keeps_beginnings = False
    shares_rows = False
    fails_first_together = False

    def __init__(self, length: int, clock: SimpleNamespace) -> None:
        self.length, self.clock, self.generated_s = length, clock, 0.0
        self.asked: list[tuple[int, int]] = []
        self.read: set[str] = set()
        self.failed: list[str] = []
        self.rollouts = SimpleNamespace(remote=self._rollouts)
        self.forget_prompts = SimpleNamespace(remote=self._forget_prompts)
        self.generating_s = SimpleNamespace(remote=self._generating_s)

    async def _rollouts(
        self, tasks: list[Task], temperature: float, size: int, limit: int, all_may_fail: bool
    ) -> list[Trajectory]:
        assert all_may_fail
        if self.fails is not None and [t.task_id for t in tasks] == [self.fails]:
            self.failed.append(self.fails)
            return []
        if self.fails_first_together and len(tasks) > 1 and not self.failed:
            self.failed.append("together")
            return []
        tokens = min(self.length, limit)
        self.asked.append((len(tasks), limit))
        known = self.read.intersection(t.task_id for t in tasks) if self.keeps_prompts else ()
        if self.keeps_beginnings and len(tasks) > 1 and self.read:  # all prompts begin alike
            known = {t.task_id for t in tasks}
        seconds = size * ((len(tasks) - len(known)) * PREFILL_S + len(tasks) * (tokens - 1) * TOKEN_S)
        self.read.update(t.task_id for t in tasks)
        if self.shares_rows:  # answers differ in their last tokens alone
            self.generated_s += len(tasks) * (PREFILL_S + (tokens - 1) * TOKEN_S)
            self.clock.now += 100.0
            return [trajectory(tokens, last=i, prompt=int(t.task_id)) for t in tasks for i in range(size)]
        self.generated_s += seconds
        self.clock.now += 100.0  # the environment thinks
        return [trajectory(tokens + self.said_between) for _ in tasks for _ in range(size)]

    async def _forget_prompts(self) -> None:
        self.read.clear()

    async def _generating_s(self) -> float:
        return self.generated_s


def measured(monkeypatch: pytest.MonkeyPatch, config: Config, *, length: int) -> tuple[Any, list[FakeCollector], Any]:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    collectors = [FakeCollector(length, clock) for _ in range(config.rollout.num_generators)]
    given: dict[str, Any] = {}

    async def sample_batch(batch: list[Trajectory], size: int) -> list[Any]:
        given["tokens"] = sum(len(t.prompt_tokens) + len(t.response_tokens) for t in batch)
        given["groups"] = len(batch) / size
        return ["share"] * config.train.num_ranks

    async def measure(_: Any) -> dict[str, float]:
        return {"forward_backward_s": PASS_S, "optim_s": 0.125, "tokens_in_pass": float(given["tokens"])}

    parts: Any = SimpleNamespace(
        **generators_of(*collectors),
        buffer=SimpleNamespace(sample_batch=SimpleNamespace(remote=sample_batch)),
        trainers=[SimpleNamespace(measure=SimpleNamespace(remote=measure))] * config.train.num_ranks,
        supervisor=Supervisor(),
    )
    tasks = [Task(task_id=str(i), prompt=[]) for i in range(2000)]
    turns = Turns(config, parts, sent=lambda: asyncio.sleep(0))
    return asyncio.run(measure_speeds(config, parts, tasks, turns, weight_sync_s=0.75)), collectors, given


def settings(**rollout: Any) -> Config:
    names = {
        "stages.async_rl.rollout.max_response_tokens": rollout.pop("answers", 8),
        "stages.async_rl.rollout.max_model_len": 8192,
        "model.init.options.max_position_embeddings": 8192,
        "stages.async_rl.rollout.num_generators": rollout.pop("generators", 1),
    } | {f"stages.async_rl.{name}": value for name, value in rollout.items() if name != "engine"}
    if "engine" in rollout:
        names |= {"rollout.engine": "null", "rollout.engine.name": rollout["engine"]}
    return load_config("quickstart", [f"{name}={value}" for name, value in names.items()], recipe="async_rl")


def test_long_answers_are_cut_and_no_more_of_them_asked_for_than_fill_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = settings(answers=4096, generators=2)
    speeds, collectors, given = measured(monkeypatch, config, length=4096)
    room = 256 // config.algorithm.group_size  # groups in one engine of the quickstart
    for collector in collectors:
        assert max(limit for _, limit in collector.asked) == PROBE_TOKENS
        assert max(groups for groups, _ in collector.asked) == room
        tokens = sum(groups * config.algorithm.group_size * limit for groups, limit in collector.asked)
        assert tokens <= 1.2 * 256 * PROBE_TOKENS, "a single wave, where one takes longer than there is time"
    # Two engines at once: each second is worth two.
    assert speeds.generate_s_per_sequence == pytest.approx(PREFILL_S / 2)
    assert speeds.generate_s_per_token == pytest.approx(TOKEN_S / 2)
    assert speeds.first_token_s == pytest.approx(8 * PREFILL_S)
    assert speeds.serial_s_per_token == pytest.approx(8 * TOKEN_S)
    assert (speeds.optim_s, speeds.weight_sync_s) == (0.125, 0.75)
    assert given["groups"] == 4096 // (PROMPT + PROBE_TOKENS), "a microbatch, in which a group's answers are one"
    assert speeds.train_s_per_token == pytest.approx(PASS_S / given["tokens"])


def test_short_answers_are_whole_and_as_many_as_the_run_has_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(answers=8)
    speeds, (collector,), given = measured(monkeypatch, config, length=5)
    assert max(groups for groups, _ in collector.asked) == 2 * config.train.groups_per_step
    mean = (PREFILL_S + 4 * TOKEN_S) / 5
    assert speeds.generate_s_per_sequence == speeds.generate_s_per_token == pytest.approx(mean)
    assert given["groups"] == config.train.groups_per_step, "a whole batch fits one pass"


@pytest.mark.parametrize(
    ("packing", "groups"), [("auto", 4096 // (PROMPT + 5)), ("padded", 4096 // (8 * (PROMPT + 5)))]
)
def test_the_trainer_is_measured_with_a_pass_as_full_as_those_of_a_run(
    monkeypatch: pytest.MonkeyPatch, packing: str, groups: int
) -> None:
    """Otherwise its tokens are dearer than a run's, and its limit is easier to reach."""
    config = settings(answers=8, **{"train.packing": packing, "train.groups_per_step": 1000})
    _, _, given = measured(monkeypatch, config, length=5)
    assert given["groups"] == groups


def test_what_an_environment_says_is_not_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCollector, "said_between", 30)
    speeds, _, _ = measured(monkeypatch, settings(answers=4096), length=4096)
    assert speeds.generate_s_per_token == pytest.approx(TOKEN_S)
    assert speeds.serial_s_per_token == pytest.approx(8 * TOKEN_S)


def test_answers_that_all_end_with_their_first_token_have_no_speed_of_further_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A difference of nothing would be divided by a difference of nothing: thousands of seconds for a step."""
    speeds, _, _ = measured(monkeypatch, settings(answers=4096), length=1)
    assert speeds.generate_s_per_token == speeds.generate_s_per_sequence == pytest.approx(PREFILL_S)
    assert speeds.serial_s_per_token == 0.0


def test_of_several_measurements_one_whose_tasks_all_failed_is_not_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCollector, "fails_first_together", True)
    speeds, (collector,), _ = measured(monkeypatch, settings(), length=5)
    assert collector.failed == ["together"]
    assert speeds.generate_s_per_token == pytest.approx((PREFILL_S + 4 * TOKEN_S) / 5)


@pytest.mark.parametrize("answers", [8, 4096])
def test_a_prompt_that_an_engine_still_has_is_not_measured(monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
    """A run's prompts are new to its engine."""
    speeds, _, _ = measured(monkeypatch, settings(answers=answers), length=answers)
    monkeypatch.setattr(FakeCollector, "keeps_prompts", True)
    assert measured(monkeypatch, settings(answers=answers), length=answers)[0] == speeds


@pytest.mark.parametrize("answers", [8, 4096])
def test_what_prompts_of_an_earlier_measurement_began_with_is_read_again(
    monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    """As a run's engine does with each version that it loads."""
    speeds, _, _ = measured(monkeypatch, settings(answers=answers), length=answers)
    monkeypatch.setattr(FakeCollector, "keeps_beginnings", True)
    assert measured(monkeypatch, settings(answers=answers), length=answers)[0] == speeds


@pytest.mark.parametrize("length", [8, 4096])
def test_rows_are_measured_where_answers_share_them(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(FakeCollector, "shares_rows", True)
    config = settings(answers=length, engine="hf")
    speeds, _, _ = measured(monkeypatch, config, length=length)
    if length == 8:
        mean = (PREFILL_S + 7 * TOKEN_S) / 8
        assert speeds.generate_s_per_sequence == speeds.generate_s_per_token == pytest.approx(mean)
    else:
        assert speeds.generate_s_per_sequence == pytest.approx(PREFILL_S)
        assert speeds.generate_s_per_token == pytest.approx(TOKEN_S)


def test_a_model_that_answers_with_nothing_but_failures_ends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCollector, "_rollouts", lambda *_: asyncio.sleep(0, []))
    with pytest.raises(PartFailed, match="generators: every rollout failed"):
        measured(monkeypatch, settings(), length=5)


def test_a_task_that_fails_says_nothing_about_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings()
    first_alone = str(2 * config.train.groups_per_step)
    monkeypatch.setattr(FakeCollector, "fails", first_alone)
    speeds, (collector,), _ = measured(monkeypatch, config, length=5)
    assert collector.failed == [first_alone]
    assert speeds.first_token_s == pytest.approx(8 * PREFILL_S)


@pytest.mark.slow
def test_a_run_that_goes_on_takes_its_first_parts_speeds_on_the_same_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings()
    speeds, _, _ = measured(monkeypatch, config, length=5)
    assert saved_speeds(config, tmp_path) is None
    save_speeds(speeds, config, tmp_path)
    assert saved_speeds(config, tmp_path) == speeds
    assert saved_speeds(settings(**{"train.steps": 500}), tmp_path) == speeds
    assert saved_speeds(settings(generators=2), tmp_path) is None
    monkeypatch.setattr(module.platform, "node", lambda: "another")
    assert saved_speeds(config, tmp_path) is None
    assert replace(speeds, optim_s=1.0) != speeds

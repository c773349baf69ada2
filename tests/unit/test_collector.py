"""The collector's loop against a fake engine and fake environments: versions, withholding, retries, and how it ends."""

from __future__ import annotations

import asyncio
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torchrl.data
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.modules.distributions.discrete import LLMMaskedCategorical
from torchrl.objectives.llm import GRPOLoss
from torchrl.objectives.llm.grpo import MCAdvantage

from leeway.collector.clock import ACTIVITIES
from leeway.collector.engine import EngineLost, StagedWeights
from leeway.config import derive, load_config
from leeway.config.inputs import EvalSampling
from leeway.envs.base import all_or_none
from leeway.envs.single_turn import SingleTurn
from leeway.types import NO_VERSION, Admission, Completion, Task, Trajectory
from leeway.weights import Canary, CanaryGap, Manifest, Publication, WeightSyncError, digest_of

from ..fakes import CANARY, GREEDY, PROMPTER, Answer, FakeEngine, Rig, play, play_to_the_end, settle
from .virtual_clock import VirtualClock

# ------------------------------------------------------------------------------------------------ a group's life


def test_groups_come_out_with_their_ids_tokens_and_versions():
    rig = play_to_the_end(Answer(), min_policy_versions=(0, 0, 0))
    assert isinstance(rig.collector, BaseCollector)
    assert sorted(rig.group_ids) == [0, 1, 2]
    [group] = [g for batch in rig.out for g in batch if g.group_id == 1]
    assert group.task_id == "task-1"
    assert len(group.trajectories()) == 2
    t = group.trajectories()[0]
    assert (t.prompt_tokens, t.response_tokens, t.policy_versions, t.text) == ([1] * 5, [7, 0], [0, 0], "70")
    request = rig.engine.requests[0]
    assert {k: request[k] for k in ("n", "temperature", "max_tokens", "stop_token_ids")} == {
        "n": 2,
        "temperature": 0.7,
        "max_tokens": 4,
        "stop_token_ids": [0],
    }


def test_no_more_is_asked_for_than_there_is_room():
    running: set[str] = set()
    most = 0

    class Counting(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            nonlocal most
            running.add(task.task_id)
            most = max(most, len(running))
            await settle()
            running.remove(task.task_id)
            return await super().rollout(task, policy)

    rig = play_to_the_end(Counting(), min_policy_versions=(0,) * 10, max_in_flight=3)
    assert sorted(rig.group_ids) == list(range(10))
    assert most == 3
    assert max(rig.slots.limits) == 3
    assert min(rig.slots.limits) >= 1


@pytest.mark.slow
def test_a_group_says_how_long_it_was_outside_the_engine(monkeypatch):
    sample = FakeEngine.generate

    async def slow(engine: FakeEngine, prompt_tokens: list[int], **sampling: Any) -> list[Any]:
        await asyncio.sleep(0.4)
        return await sample(engine, prompt_tokens, **sampling)

    class Thinking(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            trajectories = await super().rollout(task, policy)
            await asyncio.sleep(0.05)
            return trajectories

    monkeypatch.setattr(FakeEngine, "generate", slow)
    begun = time.monotonic()
    rig = play_to_the_end(Thinking(), min_policy_versions=(0,))
    wall_s = time.monotonic() - begun
    assert 0.05 <= rig.out[0][0].environment_s <= wall_s - 0.4
    assert 0.4 <= rig.collector.generating_s() <= wall_s - 0.05


def test_a_fast_group_does_not_wait_for_a_slow_one():
    async def scenario(rig, collecting):
        rig.slots.add(0, 0)
        await settle()
        assert rig.group_ids == [1]
        rig.environment.gate.set()
        rig.slots.end()
        await collecting
        assert rig.group_ids == [1, 0]

    class FirstIsSlow(Answer):
        gate: Any = None

        async def rollout(self, task: Task, policy: Any) -> Any:
            if task.task_id == "task-0":
                self.gate = asyncio.Event()
                await self.gate.wait()
            return await super().rollout(task, policy)

    play(scenario, FirstIsSlow())


def test_a_rollout_starts_when_its_min_policy_version_is_loaded_and_ends_when_that_is_proven():
    async def scenario(rig, collecting):
        rig.slots.add(0, 2, 1)
        await settle()
        assert rig.group_ids == [0]
        assert len(rig.engine.requests) == 1
        await rig.publish(1)
        assert rig.group_ids == [0, 2]
        rig.engine.canary_gate = asyncio.Event()
        await rig.publish(2)
        assert len(rig.engine.requests) == 3, "version 2 is loaded"
        assert rig.group_ids == [0, 2], "but not proven"
        rig.engine.canary_gate.set()
        await settle()
        assert rig.group_ids == [0, 2, 1]
        assert [r["version"] for r in rig.engine.requests] == [0, 1, 2]

    play(scenario)


def test_groups_with_unproven_tokens_are_withheld_until_the_canary_passes():
    async def scenario(rig, collecting):
        rig.engine.canary_gate = asyncio.Event()
        await rig.publish(1)
        rig.slots.add(0)  # may start under version 0, and is generated by 1, which is loaded but not proven
        rig.slots.end()
        await settle()
        assert rig.engine.requests[0]["version"] == 1
        assert rig.out == []
        rig.engine.canary_gate.set()
        await collecting
        assert rig.group_ids == [0]

    play(scenario)


def test_groups_of_weights_that_failed_their_canary_never_come_out():
    async def main() -> None:
        rig = Rig()
        pulling = asyncio.create_task(rig.weight_sync.run())
        await rig.publish(0)
        collecting = asyncio.create_task(rig.collect())
        rig.engine.canary_gate, rig.engine.gap = asyncio.Event(), 1.0
        await rig.publish(1)
        rig.slots.add(0)
        await settle()
        rig.engine.canary_gate.set()
        with pytest.raises(WeightSyncError, match="compute"):
            await pulling
        with pytest.raises(TimeoutError, match=r"version 1 .*; this engine serves version -1"):
            await collecting
        assert rig.out == []

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(main())


def test_tokens_written_by_the_environment_withhold_nothing():
    class Talks(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            [c, *_] = await policy.generate(task.prompt)
            return [
                Trajectory(
                    prompt_tokens=[1],
                    response_tokens=[*c.tokens, 3],
                    loss_mask=[True, True, False],
                    behavior_logprobs=[*c.logprobs, 0.0],
                    policy_versions=[*c.policy_versions, NO_VERSION],
                    reward=0.0,
                    finish_reason="stop",
                    text="",
                )
            ] * 2

    assert play_to_the_end(Talks()).group_ids == [0]


# ------------------------------------------------------------------------------------------------------ failures


class Fails(Answer):
    def __init__(self, times: int, error: Callable[[], BaseException] = lambda: ValueError("no such tool")) -> None:
        self.left, self.error, self.attempts = times, error, 0

    async def rollout(self, task: Task, policy: Any) -> Any:
        self.attempts += 1
        if self.left:
            self.left -= 1
            raise self.error()
        return await super().rollout(task, policy)


def test_a_group_that_fails_is_tried_again_under_a_seed_of_its_own():
    rig = play_to_the_end(Fails(2))
    assert rig.group_ids == [0]
    assert rig.slots.retried_ids == [0, 0]
    assert rig.slots.failures == {}
    rig_at_once = play_to_the_end(Fails(0))
    assert rig.engine.requests[-1]["seed"] != rig_at_once.engine.requests[-1]["seed"]


def test_a_group_that_was_issued_again_says_so_and_samples_as_it_would_have():
    """A collector that dies changes nothing of what its groups become."""

    def played(attempt: int) -> Rig:
        rig = Rig()

        async def main() -> None:
            admission = Admission(
                group_id=3, task=Task(task_id="t", prompt="2 + 2"), min_policy_version=0, attempt=attempt
            )
            rig.slots.waiting.put_nowait(admission)
            rig.slots.end()
            pulling = asyncio.create_task(rig.weight_sync.run())
            await rig.publish(0)
            await asyncio.wait_for(rig.collect(), 200)
            pulling.cancel()

        asyncio.run(main())
        return rig

    first, again = played(0), played(2)
    assert [[g.attempt for b in rig.out for g in b] for rig in (first, again)] == [[0], [2]]
    assert first.engine.requests[-1]["seed"] == again.engine.requests[-1]["seed"]


@pytest.mark.parametrize("tokens", [[9, 8, 7], None])
def test_a_prompt_that_comes_as_tokens_is_not_encoded_again(tokens: list[int] | None):
    """Others of the same rollout are, and what an environment does to its list stays with it."""
    encoded = []

    class Asks(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            policy.encode(task.prompt).clear()
            encoded.extend([policy.encode(task.prompt), policy.encode("2 + 3")])
            return await super().rollout(task, policy)

    async def scenario(rig: Rig, collecting: asyncio.Task[None]) -> None:
        task = Task(task_id="t", prompt="2 + 2")
        admission = Admission(group_id=0, task=task, min_policy_version=0, prompt_tokens=tokens)
        rig.slots.waiting.put_nowait(admission)
        rig.slots.end()
        await collecting

    rig = play(scenario, Asks())
    own = PROMPTER.encode("2 + 2") if tokens is None else tokens
    assert encoded == [own, PROMPTER.encode("2 + 3")]
    assert [r["prompt"] for r in rig.engine.requests] == [own]
    (delivered,) = rig.out[0]
    assert delivered.samples["prompt_tokens"].tolist()[: len(own)] == own


def test_an_engine_that_went_back_to_old_weights_delivers_nothing():
    """Restarted behind our back, say: what it samples is too old, whatever was proven before."""

    async def main() -> None:
        rig = Rig()
        pulling = asyncio.create_task(rig.weight_sync.run())
        for version in (0, 1, 2):
            await rig.publish(version)
        rig.engine.version = 1
        rig.slots.add(2)
        rig.slots.end()
        with pytest.raises(
            WeightSyncError, match=r"version 1 failed the version check: .*group 0.*its min_policy_version is 2"
        ):
            await asyncio.wait_for(rig.collect(), 200)
        assert rig.out == []
        assert rig.slots.failures == {}
        pulling.cancel()

    asyncio.run(main())


def test_after_its_retries_a_group_fails_with_the_reason_and_the_place():
    environment = Fails(99)
    rig = play_to_the_end(environment)
    assert environment.attempts == 3
    assert rig.out == []
    assert rig.slots.retried_ids == [0, 0]
    assert list(rig.slots.failures) == [0]
    assert re.fullmatch(r"ValueError: no such tool \(.*test_collector\.py:\d+\)", rig.slots.failures[0])


def test_one_group_that_fails_does_not_stop_the_others():
    class ThirdFails(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            if task.task_id == "task-2":
                raise KeyError("answer")
            return await super().rollout(task, policy)

    rig = play_to_the_end(ThirdFails(), min_policy_versions=(0,) * 6, retries=0)
    assert sorted(rig.group_ids) == [0, 1, 3, 4, 5]
    assert "KeyError" in rig.slots.failures[2]
    assert rig.slots.retried_ids == []


def test_a_rollout_that_takes_too_long_names_its_time_out():
    class Hangs(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            await asyncio.Event().wait()

    rig = play_to_the_end(Hangs(), timeout_s=0.02, retries=1)
    assert rig.slots.failures == {0: "rollout took longer than rollout.timeout_s = 0.02 s"}


def test_a_time_out_inside_the_environment_is_told_in_its_own_words():
    rig = play_to_the_end(Fails(99, lambda: TimeoutError("the sandbox did not answer in 3 s")))
    assert "the sandbox did not answer in 3 s" in rig.slots.failures[0]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda good: good[:1], r"returned 1 trajectories; expected policy.group_size = 2"),
        (lambda good: good + good, r"returned 4 trajectories; expected policy.group_size = 2"),
        (lambda good: [], r"returned 0 trajectories; expected policy.group_size = 2"),
        (lambda good: None, r"returned NoneType; expected a list of leeway.Trajectory"),
        (lambda good: good[0], r"returned Trajectory; expected a list of leeway.Trajectory"),
        (lambda good: tuple(good), r"returned tuple; expected a list of leeway.Trajectory"),
        (lambda good: [good[0], {"reward": 1.0}], r"expected a list of leeway.Trajectory"),
    ],
)
def test_a_wrong_return_fails_the_group_and_says_what_was_expected(returned, reason):
    class Returns(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            return returned(await super().rollout(task, policy))

    rig = play_to_the_end(Returns(), retries=0)
    assert rig.out == []
    assert re.search(reason, rig.slots.failures[0])


class EndsItself(Answer):
    """Task 1 raises what is no ordinary exception, in one of these ways, in every attempt; the others are answered."""

    REASONS: ClassVar[dict[str, str]] = {
        "cancelled": "CancelledError: something that it waited for was cancelled",
        "cancels_itself": "CancelledError: the rollout cancelled itself",
        "exits": "SystemExit: 3: an environment must not end its process",
        "exits_in_a_task": "SystemExit: 3",
        "exits_in_a_conversation": "SystemExit: 3",
        "exits_in_a_thread": "SystemExit: 3",
        "interrupts": "KeyboardInterrupt: an environment must not end its process",
        "closes": "GeneratorExit: an environment must not end its process",
        "own": "Own: not an Exception",
    }

    def __init__(self, way: str) -> None:
        self.way = way

    def rollout(self, task: Task, policy: Any) -> Any:
        if task.task_id != "task-1":
            return super().rollout(task, policy)
        if self.way == "exits":
            sys.exit(3)  # before there is anything to await
        return getattr(self, self.way)()

    async def cancelled(self) -> None:
        helper = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        helper.cancel()
        await helper

    async def cancels_itself(self) -> None:
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        await asyncio.sleep(1)

    async def exits_in_a_task(self) -> None:
        async def helper() -> None:
            sys.exit(3)

        await asyncio.gather(helper(), asyncio.sleep(0))

    async def exits_in_a_conversation(self) -> None:
        async def conversation() -> None:
            sys.exit(3)

        await all_or_none([conversation(), asyncio.sleep(60)])  # type: ignore[list-item]

    async def exits_in_a_thread(self) -> None:
        await asyncio.to_thread(sys.exit, 3)

    async def interrupts(self) -> None:
        raise KeyboardInterrupt

    async def closes(self) -> None:
        raise GeneratorExit

    async def own(self) -> None:
        class Own(BaseException):
            pass

        raise Own("not an Exception")


@pytest.mark.parametrize("way", EndsItself.REASONS)
def test_what_is_no_ordinary_exception_fails_its_own_group_only(way):
    """A CancelledError would pass for a group that was called off, a SystemExit would end the loop: both unheard."""
    rig = play_to_the_end(EndsItself(way), min_policy_versions=(0,) * 4)
    assert sorted(rig.group_ids) == [0, 2, 3]
    assert rig.slots.retried_ids == [1, 1]
    assert EndsItself.REASONS[way] in rig.slots.failures[1]
    if way != "cancels_itself":
        assert re.search(r"\(.*\.py:\d+\)$", rig.slots.failures[1])


@pytest.mark.parametrize("way", ["cancelled", "exits_in_a_task"])
def test_in_an_evaluation_and_outside_of_admission_it_fails_its_own_task_only(way):
    async def scenario(rig, collecting):
        tasks = [Task(task_id=f"task-{i}", prompt="x") for i in range(3)]
        first, reason, last = await rig.collector.evaluate(tasks, GREEDY, policy_version=0)
        assert (len(first), len(last)) == (1, 1)
        assert EndsItself.REASONS[way] in reason
        assert len(await rig.collector.rollouts(tasks, temperature=1.0, group_size=2)) == 4
        with pytest.raises(RuntimeError, match=f"all 1 tasks failed; the last one: {EndsItself.REASONS[way]}"):
            await rig.collector.rollouts(tasks[1:2], temperature=1.0, group_size=2)

    play(scenario, EndsItself(way))


@pytest.mark.parametrize("ended_by", ["CancelledError", "SystemExit"])
def test_a_reward_that_ends_itself_is_named(ended_by):
    async def scorer(task: Task, text: str) -> float:
        if ended_by == "SystemExit":
            sys.exit(3)
        helper = asyncio.create_task(asyncio.sleep(60))
        helper.cancel()
        await helper
        return 1.0

    rig = play_to_the_end(SingleTurn(reward=scorer), min_policy_versions=(0, 0))
    assert rig.out == []
    assert all(f"reward scorer failed on task task-{i}: {ended_by}" in rig.slots.failures[i] for i in (0, 1))


def test_what_a_rollout_started_asks_the_engine_for_nothing_once_it_has_ended():
    """Its requests are aborted with it, and later ones are refused: the engine works for those who live."""
    refused: list[str] = []

    class Leaves(Answer):
        left: Any = None

        async def rollout(self, task: Task, policy: Any) -> Any:
            async def goes_on() -> None:
                try:
                    await policy.conversation(3).generate(task.prompt)
                except asyncio.CancelledError:
                    try:
                        await policy.generate(task.prompt)
                    except RuntimeError as error:
                        refused.append(str(error))

            good = await super().rollout(task, policy)
            rig.engine.generate = never
            self.left = asyncio.create_task(goes_on())
            await asyncio.sleep(0)
            return good

    async def never(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    async def scenario(its_rig, collecting):
        nonlocal rig
        rig = its_rig
        rig.slots.add(0)
        await settle()
        assert rig.group_ids == [0]
        assert refused == ["this rollout has ended: its policy answers no more"]
        assert rig.environment.left.done()

    rig: Any = None
    play(scenario, Leaves())


def test_a_group_without_a_single_sampled_token_fails():
    class Silent(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            empty = Completion(tokens=[], logprobs=[], policy_versions=[], finish_reason="stop", text="")
            return [Trajectory.from_completion([1], empty, reward=0.0)] * 2

    rig = play_to_the_end(Silent(), retries=0)
    assert "no token was sampled by the policy" in rig.slots.failures[0]


def test_a_prompt_that_is_too_long_fails_with_the_numbers_and_never_reaches_the_engine():
    class Long(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            return await policy.generate([1] * 9)

    rig = play_to_the_end(Long(), retries=0)
    assert "prompt of 9 tokens; rollout.max_prompt_tokens is 8" in rig.slots.failures[0]
    assert rig.engine.requests == []


def test_a_later_turn_may_be_longer_than_a_prompt_but_not_than_the_model():
    class Turns(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            for length in (8, 10):
                await policy.generate([1] * length, n=1)
            return await policy.generate([1] * 12)

    rig = play_to_the_end(Turns(), retries=0)
    assert [r["max_tokens"] for r in rig.engine.requests] == [4, 2]
    assert "prompt of 12 tokens" in rig.slots.failures[0]


class Misbehaves(Answer):
    """One task in twenty goes wrong in one of these ways, in every attempt; the others are answered."""

    WAYS = (
        "hangs", "raises", "nan", "lengths", "type", "strings", "endless", "versions", "logprobs", "not_cancelled",
    )  # fmt: skip

    def __init__(self) -> None:
        self.running = 0
        self.let_go = False

    async def rollout(self, task, policy):
        number = int(task.task_id.removeprefix("task-"))
        good = await super().rollout(task, policy)
        if number % 20:
            return good
        self.running += 1
        try:
            return await getattr(self, self.WAYS[number // 20 % len(self.WAYS)])(good)
        finally:
            self.running -= 1

    async def hangs(self, good):
        await asyncio.sleep(3600)

    async def not_cancelled(self, good):
        while not self.let_go:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                pass

    async def raises(self, good):
        raise KeyError("no such tool")

    async def nan(self, good):
        return [replace(t, reward=float("nan")) for t in good]

    async def lengths(self, good):
        return [replace(t, loss_mask=[True]) for t in good]

    async def type(self, good):
        return {"reward": 1.0}

    async def strings(self, good):
        return [replace(t, response_tokens=["a"] * len(t.response_tokens)) for t in good]

    async def endless(self, good):
        num = 10**5
        fields = {"response_tokens": [1], "loss_mask": [True], "behavior_logprobs": [0.0], "policy_versions": [0]}
        return [replace(t, **{name: value * num for name, value in fields.items()}) for t in good]

    async def versions(self, good):
        return [replace(t, policy_versions=[99] * len(t.policy_versions)) for t in good]

    async def logprobs(self, good):
        return [replace(t, behavior_logprobs=[float("-inf")] * len(t.policy_versions)) for t in good]


@pytest.mark.slow
def test_one_rollout_in_twenty_that_goes_wrong_costs_its_own_group_only(monkeypatch, caplog):
    monkeypatch.setattr("leeway.collector.checks.GRACE_S", 0.1)
    environment = Misbehaves()

    async def scenario(rig, collecting):
        rig.slots.add(*[0] * 200)
        rig.slots.end()
        await collecting
        assert environment.running == 3, "the three attempts that do not let themselves be cancelled"
        environment.let_go = True
        await asyncio.sleep(0.1)
        assert environment.running == 0

    rig = play(scenario, environment, loop=VirtualClock, timeout_s=0.2, retries=2, max_in_flight=16)
    wrong = {20 * way: name for way, name in enumerate(Misbehaves.WAYS)}
    assert sorted(rig.group_ids) == [i for i in range(200) if i not in wrong]
    expected = {
        "hangs": "took longer than rollout.timeout_s = 0.2 s",
        "not_cancelled": "took longer than rollout.timeout_s = 0.2 s",
        "raises": "KeyError: 'no such tool'",
        "nan": "reward is nan",
        "lengths": "per-token lists differ in length",
        "type": "returned dict; expected a list",
        "strings": "tokens that are no whole numbers",
        "endless": "a trajectory of 100005 tokens; rollout.max_model_len is 12",
        "versions": "version 99; expected what generate() gave in this rollout: [0]",
        "logprobs": "logprob -inf",
    }
    assert {wrong[i]: expected[wrong[i]] in reason for i, reason in rig.slots.failures.items()} == dict.fromkeys(
        expected, True
    )
    assert sorted(rig.slots.retried_ids) == sorted(2 * list(wrong)), "each is tried again as often as it may be"
    assert "Traceback" in caplog.text
    assert 'raise KeyError("no such tool")' in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: {"response_tokens": [3, *t.response_tokens[1:]]}, "token 3 with logprob .* as sampled, which"),
        (lambda t: {"behavior_logprobs": [-0.5, *t.behavior_logprobs[1:]]}, "with logprob -0.5 as sampled, which"),
        (lambda t: {"prompt_tokens": [*t.prompt_tokens, 60]}, "token id 60; the model's vocabulary has 60"),
        (lambda t: {"response_tokens": [3, *t.response_tokens[1:]], "loss_mask": [False, *t.loss_mask[1:]]}, None),
        (lambda t: {}, None),
    ],
)
def test_a_token_is_trained_on_only_as_the_engine_drew_it(change, reason):
    class Changes(Answer):
        async def rollout(self, task, policy):
            first, *others = reversed(await super().rollout(task, policy))  # in another order than they came in
            return [replace(first, **change(first)), *others]

    rig = play_to_the_end(Changes(), retries=0, vocab_size=60)
    assert rig.group_ids == ([0] if reason is None else [])
    assert re.search(reason, rig.slots.failures[0]) if reason else not rig.slots.failures


@pytest.mark.parametrize(("name", "value"), [("tokens", 3), ("logprobs", -0.5)])
def test_an_answer_that_was_changed_where_it_lies_is_not_as_the_engine_drew_it(name, value):
    class Overwrites(Answer):
        async def rollout(self, task, policy):
            completions = await policy.generate(task.prompt)
            getattr(completions[0], name)[0] = value
            return [Trajectory.from_completion([1], completion, reward=1.0) for completion in completions]

    rig = play_to_the_end(Overwrites(), retries=0)
    assert rig.group_ids == []
    assert "as sampled, which" in rig.slots.failures[0]


def test_a_prompt_with_an_id_that_no_token_has_never_reaches_the_engine():
    class Asks(Answer):
        async def rollout(self, task, policy):
            return await policy.conversation(0).generate([1, 60])

    rig = play_to_the_end(Asks(), retries=0, vocab_size=60)
    assert not rig.engine.requests
    assert "prompt with token id 60; expected ids from 0, below 60" in rig.slots.failures[0]


def test_a_lost_engine_ends_the_iteration_at_once_and_is_not_retried():
    class OneHangs(Answer):
        cancelled = False

        async def rollout(self, task: Task, policy: Any) -> Any:
            if task.task_id != "task-0":
                return await super().rollout(task, policy)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    async def scenario(rig, collecting):
        rig.slots.add(0)
        await settle()
        rig.engine.dead = True
        rig.slots.add(0, first=1)
        with pytest.raises(EngineLost, match="the inference engine died: core process exited"):
            await collecting
        await settle()
        assert rig.environment.cancelled, "what was in flight was left running"
        assert rig.slots.retried_ids == []
        assert rig.slots.failures == {}

    play(scenario, OneHangs())


def test_seeds_depend_on_the_group_and_the_attempt_and_repeat():
    def seeds(**changes: Any) -> list[int]:
        rig = play_to_the_end(Answer(), min_policy_versions=(0,) * 4, max_in_flight=1, **changes)
        return [r["seed"] for r in rig.engine.requests]

    assert seeds() == seeds()
    assert len(set(seeds())) == 4
    assert seeds(seed=12) != seeds()
    assert seeds(seeded=False) == [None] * 4


def test_admission_that_fails_ends_the_iteration():
    async def scenario(rig, collecting):
        rig.collector._admit = broken
        rig.slots.add(0)
        with pytest.raises(TimeoutError, match="waited for a slot"):
            await collecting

    async def broken(limit: int) -> list[Admission]:
        raise TimeoutError("waited for a slot")

    play(scenario)


def test_giving_up_the_iteration_cancels_what_is_in_flight():
    class Hangs(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            if task.task_id == "task-0":
                return await super().rollout(task, policy)
            await asyncio.Event().wait()

    async def main() -> None:
        rig = Rig(Hangs())
        pulling = asyncio.create_task(rig.weight_sync.run())
        await rig.publish(0)
        before = asyncio.all_tasks()  # this one, and those of the weight sync
        rig.slots.add(0, 0, 0)
        groups = rig.collector.groups()
        assert [g.group_id for g in await anext(groups)] == [0]
        await groups.aclose()  # type: ignore[attr-defined]
        await settle()
        left = asyncio.all_tasks() - before
        pulling.cancel()
        assert not left

    asyncio.run(main())


# ----------------------------------------------------------------------------------- evaluation, speed and stats


def test_evaluation_is_of_one_version_with_one_trajectory_per_task_in_order():
    async def scenario(rig, collecting):
        tasks = [Task(task_id=f"t{i}", prompt="x" * (i + 1)) for i in range(6)]
        evaluating = asyncio.create_task(rig.collector.evaluate(tasks, GREEDY, policy_version=1))
        await settle()
        assert not evaluating.done(), "version 1 is not served yet"
        await rig.publish(1)
        trajectories = [t for (t,) in await asyncio.wait_for(evaluating, 200)]
        assert [len(t.prompt_tokens) for t in trajectories] == [1, 2, 3, 4, 5, 6]
        assert {(r["n"], r["temperature"], r["seed"]) for r in rig.engine.requests} == {(1, 0.0, None)}
        assert {v for t in trajectories for v in t.policy_versions} == {1}

    play(scenario)


def test_evaluation_holds_newer_weights_back():
    class Gated(Answer):
        gate: Any = None

        async def rollout(self, task: Task, policy: Any) -> Any:
            self.gate = self.gate or asyncio.Event()
            await self.gate.wait()
            return await super().rollout(task, policy)

    async def scenario(rig, collecting):
        tasks = [Task(task_id="t", prompt="x")]
        evaluating = asyncio.create_task(rig.collector.evaluate(tasks, GREEDY, policy_version=0))
        await settle()
        await rig.publish(1)
        assert rig.engine.version == 0
        rig.environment.gate.set()
        assert (await evaluating)[0][0].policy_versions == [0, 0]
        await rig.weight_sync.until_verified(1)

    play(scenario, Gated())


@pytest.mark.parametrize("waits_for", ["a version that never comes", "an answer"])
def test_an_evaluation_that_is_called_off_leaves_the_engine_to_newer_weights(waits_for: str):
    class Stuck(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            await asyncio.Event().wait()

    async def scenario(rig, collecting):
        tasks = [Task(task_id=f"t{i}", prompt="x") for i in range(3)]
        version = 0 if waits_for == "an answer" else 7
        evaluating = asyncio.create_task(rig.collector.evaluate(tasks, GREEDY, policy_version=version))
        await settle()
        await rig.publish(1)
        assert not evaluating.done()
        assert rig.engine.version == (0 if waits_for == "an answer" else 1)
        rig.collector.stop_evaluating()
        assert await asyncio.wait_for(evaluating, 60) == ["the evaluation was called off"] * 3
        await asyncio.wait_for(rig.weight_sync.until_verified(1), 60)

    play(scenario, Stuck())


def test_evaluation_of_a_version_that_is_gone_is_refused():
    async def scenario(rig, collecting):
        await rig.publish(3)
        with pytest.raises(RuntimeError, match="evaluate version 2, but this engine already serves 3"):
            await rig.collector.evaluate([], GREEDY, policy_version=2)
        assert not rig.weight_sync.freeze_weights().locked()

    play(scenario)


def test_samples_of_an_evaluation_are_a_function_of_seed_and_task_with_settings_of_their_own():
    sampling = EvalSampling(samples=3, temperature=0.5, top_p=0.9, max_tokens=2)

    async def scenario(rig, collecting):
        tasks = [Task(task_id=f"t{i}", prompt="x") for i in range(3)]
        await rig.publish(1)
        groups = await rig.collector.evaluate(tasks, sampling, policy_version=1)
        again = await rig.collector.evaluate(tasks[::-1], sampling, policy_version=1)
        assert [len(group) for group in groups + again] == [3] * 6
        asked = [(r["n"], r["temperature"], r["top_p"], r["max_tokens"]) for r in rig.engine.requests]
        assert set(asked) == {(3, 0.5, 0.9, 2)}
        seeds = [r["seed"] for r in rig.engine.requests]
        assert seeds[3:] == seeds[:3][::-1]
        assert len(set(seeds)) == 3

    play(scenario)


def test_a_probe_cuts_each_call_although_the_environment_asks_for_more():
    class Long(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            prompt = policy.encode(task.prompt)
            turns = [await policy.generate(prompt, max_tokens=most) for most in (3, None, 1)]
            return [Trajectory.from_completion(prompt, c, reward=1.0) for c in turns[-1]]

    async def scenario(rig, collecting):
        await rig.collector.rollouts([Task(task_id="t", prompt="x")], temperature=1.0, group_size=1, call_limit=2)
        assert [r["max_tokens"] for r in rig.engine.requests] == [2, 2, 1]

    play(scenario, Long())


@pytest.mark.parametrize("most", [0, -3])
def test_a_call_for_no_token_at_all_fails_its_rollout_and_reaches_no_engine(most: int):
    class Spent(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            return await policy.generate(policy.encode(task.prompt), max_tokens=most)

    async def scenario(rig, collecting):
        with pytest.raises(Exception, match=f"max_tokens: got {most}, expected 1 or more"):
            await rig.collector.rollouts([Task(task_id="t", prompt="x")], temperature=1.0, group_size=1)
        assert not rig.engine.requests

    play(scenario, Spent())


def test_a_task_that_fails_in_an_evaluation_leaves_its_reason():
    class Picky(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            if task.task_id == "t1":
                raise OSError("no such host")
            return await super().rollout(task, policy)

    async def scenario(rig, collecting):
        tasks = [Task(task_id=f"t{i}", prompt="x") for i in range(3)]
        await rig.publish(1)
        first, reason, last = await rig.collector.evaluate(tasks, GREEDY, policy_version=1)
        assert (len(first), len(last)) == (1, 1)
        assert "OSError: no such host" in reason

    play(scenario, Picky())


def test_a_cap_on_groups_in_flight_holds_for_evaluations_and_for_training():
    most = now = 0

    class Counting(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            nonlocal most, now
            now += 1
            most = max(most, now)
            await settle()
            now -= 1
            return await super().rollout(task, policy)

    async def scenario(rig, collecting):
        rig.collector._rollout = rig.collector._rollout.model_copy(update={"max_groups_in_flight": 2})
        await rig.publish(1)
        tasks = [Task(task_id=str(i), prompt="x") for i in range(9)]
        assert len(await rig.collector.evaluate(tasks, GREEDY, policy_version=1)) == 9
        assert most == 2

    play(scenario, Counting())
    assert derive(load_config("quickstart", ["stages=null", "train.steps=4"])).groups_per_generator > 3
    capped = load_config("quickstart", ["stages=null", "train.steps=4", "rollout.max_groups_in_flight=3"])
    assert derive(capped).groups_per_generator == 3


def test_measuring_rollouts_keep_to_the_number_in_flight():
    most = now = 0

    class Counting(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            nonlocal most, now
            now += 1
            most = max(most, now)
            await settle()
            now -= 1
            return await super().rollout(task, policy)

    async def scenario(rig, collecting):
        tasks = [Task(task_id=str(i), prompt="x") for i in range(9)]
        assert len(await rig.collector.rollouts(tasks, temperature=1.0, group_size=3)) == 27
        assert most == 4

    play(scenario, Counting())


def test_stats_are_of_the_time_since_the_last_call():
    async def scenario(rig, collecting):
        rig.slots.add(0, 0, 0)
        await settle()
        first, second = rig.collector.stats(), rig.collector.stats()
        assert (first["collector/groups_finished"], second["collector/groups_finished"]) == (3.0, 0.0)
        assert (first["param_server/pulls"], second["param_server/pulls"]) == (1.0, 0.0)
        assert first["param_server/served_gap/max"] == 0.0
        assert first["collector/tokens_per_s"] > 0
        assert second["collector/tokens_per_s"] == 0
        shares = sum(first[f"collector/{name}_frac"] for name in ACTIVITIES)
        assert shares == pytest.approx(1.0)

    play(scenario)


# --------------------------------------------------------------------------------------------- plain `for` loops


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch):
    """The queues between collectors' threads and consumers: a test can free a thread that is stuck on one."""
    made: list[queue.Queue] = []
    real = queue.Queue

    def remember(*args: Any, **kwargs: Any) -> queue.Queue:
        made.append(real(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("leeway.collector.collector.queue.Queue", remember)
    yield made
    deadline = time.monotonic() + 200
    while collector_threads() and time.monotonic() < deadline:
        for q in made:
            try:
                q.get_nowait()
            except queue.Empty:
                time.sleep(0.001)


def collector_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "leeway-collector"]


def ready_rig(number: int, environment: Any = None, **changes: Any) -> Rig:
    rig = Rig(environment, **changes)
    asyncio.run(rig.server.publish(Publication(Manifest(0, [], [], CANARY, digest_of([])), [])))
    rig.slots.add(*[0] * number)
    rig.slots.end()
    return rig


def drain(rig: Rig) -> list[int]:
    """The groups' ids, once for each conversation."""
    return [int(query) for data in rig.collector for query in data["query"]]


@pytest.mark.slow
def test_a_plain_for_loop_gets_every_group(queues):
    rig = ready_rig(30, max_in_flight=3)
    assert sorted(drain(rig)) == [i for i in range(30) for _ in range(2)]


def test_list_of_a_collector_works(queues):
    assert sum(len(data) for data in list(ready_rig(3).collector)) == 2 * 3


class OneOfTwo(Answer):
    """The second answer of each group is the better one."""

    async def rollout(self, task: Task, policy: Any) -> Any:
        trajectories = await super().rollout(task, policy)
        return [replace(t, reward=float(i)) for i, t in enumerate(trajectories)]


class Uniform(torch.nn.Module):
    """As much of a torchrl policy as a loss asks for: the same logits for every place."""

    in_keys = ()

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(16))

    def get_dist(self, data: TensorDictBase, **_: Any) -> LLMMaskedCategorical:
        mask = data.get(("masks", "all_assistant_mask"), as_padded_tensor=True, padding_side="left")  # type: ignore[call-overload]
        return LLMMaskedCategorical(logits=self.logits.expand(*mask.shape, 16), mask=mask)


def test_torchrls_buffer_advantage_and_loss_take_its_data_as_they_are(queues):
    """`ReplayBuffer.extend`, `MCAdvantage` and `GRPOLoss`, with no code of ours between them."""
    buffer = torchrl.data.ReplayBuffer(
        storage=torchrl.data.LazyStackStorage(100), transform=MCAdvantage(grpo_size=2), batch_size=8
    )
    for data in ready_rig(4, OneOfTwo()).collector:
        assert data["next", "reward"].shape == (len(data), 1, 1)
        buffer.extend(data)
    assert len(buffer) == 8
    sampled = buffer.sample()
    assert sorted(set(sampled["advantage"].flatten().tolist())) == pytest.approx([-(0.5**0.5), 0.5**0.5])
    actor: Any = Uniform()
    out = GRPOLoss(actor, entropy_bonus=False, masking_strategy="generic")(sampled)
    out.loss_objective.backward()
    assert actor.logits.grad is not None
    assert out.loss_objective.isfinite()
    assert actor.logits.grad.isfinite().all()


def test_a_plain_for_loop_raises_what_went_wrong_and_shuts_the_engine_down(queues):
    rig = ready_rig(3)
    rig.engine.dead = True
    with pytest.raises(EngineLost):
        drain(rig)
    assert rig.engine.shut_down


def test_a_plain_for_loop_raises_when_a_weight_sync_fails(queues):
    rig = ready_rig(3)
    rig.engine.gap = 1.0
    with pytest.raises(WeightSyncError, match="compute"):
        drain(rig)


def test_leaving_a_plain_for_loop_early_ends_its_thread(queues):
    rig = ready_rig(200, max_in_flight=1)
    for _ in rig.collector:
        while not queues[0].full():  # the thread runs ahead until it can go no further
            time.sleep(0.001)
        break
    rig.collector.shutdown()
    deadline = time.monotonic() + 200
    while collector_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert collector_threads() == []


@pytest.mark.parametrize("check", ["compute", "load"])
def test_quarantine_gives_back_what_is_in_flight_and_none_of_it_comes_out_later(check):
    """Groups under way, and one that is finished and withheld, are given back; none of their tokens gets out.

    Both proofs end after the engine has resumed: the canary's, and that of the read-back.
    """

    async def scenario(rig: Rig, collecting: asyncio.Task[None]) -> None:
        rig.slots.add(0)
        await settle()
        assert rig.group_ids == [0]
        gate, gaps = asyncio.Event(), [0.3 if check == "compute" else 0.0, 0.0]
        differing = [check == "load", False]

        async def score(canary: Canary) -> CanaryGap:
            await gate.wait()
            return CanaryGap(gaps[0], gaps.pop(0), 0.0)

        async def read_back(staged: StagedWeights) -> None:
            await gate.wait()
            if differing.pop(0):
                raise staged.manifest.error("load", "weights differ")

        rig.engine.score, rig.engine.read_back = score, read_back
        await rig.publish(1)  # loaded; its proof is under way
        rig.slots.add(0, 1, first=1)
        await settle()
        assert len(rig.engine.requests) == 3
        assert rig.group_ids == [0]  # 1 and 2 are generated by version 1, and withheld
        gate.set()
        await settle()
        [reason] = rig.slots.given_back
        assert reason.startswith(f"weight sync of policy version 1 failed the {check} check: ")
        assert rig.group_ids == [0]  # the same version passed now, and still nothing of before comes out
        assert rig.weight_sync.verified_version == 1
        rig.slots.add(0, first=3)
        await settle()
        assert rig.group_ids == [0, 3]
        rig.slots.end()
        await collecting

    play(scenario, max_failures=1)


@pytest.mark.parametrize("is_right", [True, False], ids=["right weights", "wrong weights"])
def test_a_group_that_fails_under_unproven_weights_is_lost_only_if_they_are_right(is_right):
    """Wrong weights say anything, and environments fail on it."""

    class Fails(Answer):
        async def rollout(self, task: Task, policy: Any) -> Any:
            await policy.generate(task.prompt)
            raise ValueError("no such tool")

    async def scenario(rig: Rig, collecting: asyncio.Task[None]) -> None:
        gate, gaps = asyncio.Event(), [0.0 if is_right else 1.0, 0.0]

        async def score(canary: Canary) -> CanaryGap:
            await gate.wait()
            return CanaryGap(gaps[0], gaps.pop(0), 0.0)

        rig.engine.score = score
        await rig.publish(1)
        rig.slots.add(1)
        await settle()
        assert [r["version"] for r in rig.engine.requests] == [1, 1], "its retries are used up"
        assert rig.slots.failures == {}, "nobody knows yet whether that says anything"
        gate.set()
        await settle()
        assert list(rig.slots.failures) == ([0] if is_right else [])
        assert len(rig.slots.given_back) == (0 if is_right else 1)
        rig.slots.end()
        await collecting

    play(scenario, Fails(), max_failures=1, retries=1)


def test_after_a_quarantine_no_rollout_of_before_is_left_at_work():
    """Nor one that had been cancelled earlier and takes its time: the engine is used again after this."""

    class CleansUp(Answer):
        at_work = 0

        async def rollout(self, task: Task, policy: Any) -> Any:
            self.at_work += 1
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)
                self.at_work -= 1

    async def scenario(rig: Rig, collecting: asyncio.Task[None]) -> None:
        rig.slots.add(0, 0)
        await settle()
        assert environment.at_work == 2
        earlier = asyncio.create_task(rig.collector.discard("once"))
        await settle()
        await rig.collector.discard("twice")
        assert environment.at_work == 0
        await earlier

    environment = CleansUp()
    play(scenario, environment)

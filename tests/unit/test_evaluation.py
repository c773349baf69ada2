"""What is measured on, and what the samples say: against counting all choices by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.config import ConfigError, load_config
from leeway.config.inputs import EvalSampling
from leeway.driver import explore_stage
from leeway.driver.eval_metrics import at_k, best_at_k, interval, pass_at_k
from leeway.driver.evaluation import (
    evaluate,
    evaluated_at_start,
    evaluated_of,
    in_one_line,
    measured_by,
    of_set,
    shared_out,
    summarise,
)
from leeway.driver.saved_weights import saved_models
from leeway.failures import PartFailed
from leeway.runtime.supervisor import Supervisor
from leeway.tasks.evalsets import build_evalsets
from leeway.tasks.taskset import build_taskset
from leeway.types import Trajectory

from .standing import Standing, generators_of
from .virtual_clock import VirtualClock


def samples_and_k(value):
    return st.integers(1, 7).flatmap(lambda n: st.tuples(st.lists(value, min_size=n, max_size=n), st.integers(1, n)))


@given(samples_and_k(st.booleans()))
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(drawn):
    right, k = drawn
    choices = list(itertools.combinations(right, k))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(sum(map(any, choices)) / len(choices))


@given(samples_and_k(st.floats(-2, 2)))
def test_best_at_k_is_the_mean_of_the_best_of_all_choices(drawn):
    rewards, k = drawn
    choices = list(itertools.combinations(rewards, k))
    assert best_at_k(rewards, k) == pytest.approx(sum(map(max, choices)) / len(choices), abs=1e-12)


def test_pass_at_k_is_unbiased_where_one_minus_the_failure_rate_to_the_k_is_not():
    draw, p, n, k = random.Random(0), 0.3, 8, 4
    counts = [sum(draw.random() < p for _ in range(n)) for _ in range(20000)]
    truth = 1 - (1 - p) ** k
    assert sum(pass_at_k(n, c, k) for c in counts) / len(counts) == pytest.approx(truth, abs=0.005)
    naive = sum(1 - (1 - c / n) ** k for c in counts) / len(counts)
    assert naive < truth - 0.03


@pytest.mark.slow
def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    draw, inside = random.Random(1), 0
    for _ in range(200):
        low, high = interval([float(draw.random() < 0.4) for _ in range(100)])
        inside += low <= 0.4 <= high
    assert 180 <= inside <= 199
    assert interval([1.0] * 5) == (1.0, 1.0)


def test_k_beyond_the_samples_is_refused():
    with pytest.raises(ValueError, match="expected 1 to 4"):
        pass_at_k(4, 2, 5)
    with pytest.raises(ValueError, match="expected 1 to 2"):
        best_at_k([0.0, 1.0], 0)


def test_default_ks():
    assert [EvalSampling(samples=n).ks() for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert EvalSampling(samples=8, k=[5, 1, 5]).ks() == [1, 5]


def trajectory(reward, **metrics):
    return Trajectory(
        prompt_tokens=[1], response_tokens=[2, 3], loss_mask=[True] * 2, behavior_logprobs=[0.0] * 2,
        policy_versions=[0] * 2, reward=reward, finish_reason="stop", text="", metrics=metrics,
    )  # fmt: skip


def summarised(groups, sampling, policy_version=0):
    kept = [own for own in evaluated_of(groups) if not isinstance(own, str)]
    return summarise(kept, sampling, name="a", policy_version=policy_version)


def test_a_summary_of_several_samples_counts_right_answers_and_failed_tasks():
    groups = [[trajectory(1.0), trajectory(0.2)], [], [trajectory(0.2), trajectory(0.4)]]
    found = of_set(summarised(groups, EvalSampling(samples=2, temperature=1.0), policy_version=7), "a")
    assert found["reward"] == pytest.approx(0.45)
    assert (found["num_tasks"], found["failed_tasks"], found["policy_version"]) == (2.0, 1.0, 7.0)
    assert (found["mean_at_2"], found["pass_at_1"], found["pass_at_2"]) == (0.25, 0.25, 0.5)
    assert found["best_at_2"] == pytest.approx(0.7)
    assert found["pass_at_2_low"] <= 0.5 <= found["pass_at_2_high"]
    low = summarised(groups, EvalSampling(samples=2, temperature=1.0, solved=0.4))
    assert low["eval/a/pass_at_2"] == 1.0
    said = [[trajectory(0.9, exact_match=1.0), trajectory(1.0, exact_match=0.0)]]
    assert summarised(said, EvalSampling(samples=2))["eval/a/pass_at_1"] == 0.5


def test_accuracy_is_only_told_where_it_was_measured():
    before, after = {"reward": 0.03, "exact_match": 0.0}, {"reward": 0.36, "exact_match": 0.25}
    assert in_one_line(before) == "accuracy 0.000, reward 0.030"
    assert in_one_line({"reward": 0.5, "exact_match": 0.5}) == "accuracy 0.500"
    assert in_one_line(before, after) == "accuracy 0.000 -> 0.250, reward 0.030 -> 0.360"
    assert in_one_line({"reward": 0.03}, {"reward": 0.36}) == "reward 0.030 -> 0.360"
    assert in_one_line({"reward": 0.03}, after) == "reward 0.030 -> 0.360"
    assert (measured_by(after), measured_by({"reward": 0.36})) == (("accuracy", 0.25), ("reward", 0.36))


def test_one_sample_says_nothing_at_k():
    found = summarised([[trajectory(1.0)]], EvalSampling())
    assert not [name for name in found if "_at_" in name]


def test_at_k_of_rewards_zero_and_one_is_the_same_by_both_names():
    rewards = [[0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]]
    found = at_k(rewards, [[r == 1.0 for r in task] for task in rewards], [1, 2, 4])
    for k in (1, 2, 4):
        assert found[f"pass_at_{k}"] == pytest.approx(found[f"best_at_{k}"])
    assert found["mean_at_4"] == found["pass_at_1"] == 0.5


def rows(path, *questions):
    path.write_text("".join(json.dumps({"question": q, "answer": "a"}) + "\n" for q in questions))
    return path


def config(tmp_path, *overrides):
    train = rows(tmp_path / "train.jsonl", "a", "b", "c", "d")
    return load_config(
        "qwen2_5_3b_async_grpo",
        [
            f"task.path={train}",
            "task.answer_after=null",
            "eval.path=null",
            "eval.every=0",
            "task.holdout_frac=0",
            *overrides,
        ],
    )


def test_tasksets_to_measure_on_have_settings_of_their_own_and_are_not_trained_on(tmp_path):
    easy, hard = rows(tmp_path / "easy.jsonl", "b", "x", "b"), rows(tmp_path / "hard.jsonl", "y", "d", "z")
    settings = config(
        tmp_path,
        f"eval.tasksets={{easy: {{name: jsonl, path: {easy}}}, hard: {{name: jsonl, path: {hard}, num_tasks: 2, "
        "samples: 4, temperature: 0.6, prompt_template: 'Q: {prompt}'}}",
    )
    easy_set, hard_set = build_evalsets(settings)
    assert [t.task_id.split("/")[0] for t in easy_set.tasks] == ["easy", "easy"], "each question once"
    assert (easy_set.sampling.samples, hard_set.sampling.samples, hard_set.sampling.temperature) == (1, 4, 0.6)
    assert ["Q: " in str(t.prompt) for t in hard_set.tasks] == [True, True]
    assert {t.info["taskset"] for t in hard_set.tasks} == {"hard"}
    train = build_taskset(settings.task, seed=0, split="train", eval_config=settings.eval)
    held = {t.task_id.partition("/")[2] for t in (*easy_set.tasks, *hard_set.tasks)}
    assert not held & {t.task_id for t in train.tasks}
    assert len(train.tasks) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.tasksets={a: {name: jsonl}}", r"eval\.tasksets\.a\.path: got null, expected a value"),
        ("eval.tasksets={a: {path: x.jsonl}}", r"eval\.tasksets\.a\.name: got null, expected a value; set"),
        (
            "eval.tasksets={a: {name: jsonl, path: x, sample: 3}}",
            r"a\.sample: got 3, .*did you mean samples",
        ),
        ("eval.tasksets={held_out: {name: jsonl, path: x}}", r"eval\.tasksets\.held_out: .*another name"),
        ("eval.samples=4", r"eval\.temperature: got 0, expected more than 0, because eval\.samples is 4"),
        ("eval.k=[1, 8]", r"eval\.k: .*expected numbers up to eval\.samples 1"),
        ("env.by_taskset={a: {reward: boxed}}", r"env\.by_taskset\.a: .*a taskset of task\.mix or eval\.tasksets"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, override)


def test_a_taskset_is_built_and_can_be_scored(tmp_path):
    given = f"{{a: {{name: jsonl, path: {tmp_path}/none.jsonl}}}}"
    with pytest.raises(ValueError, match=r"eval\.tasksets\.a: task file: got .*none\.jsonl, expected an existing"):
        build_evalsets(config(tmp_path, f"eval.tasksets={given}"))
    unscored = ["env.reward=reasoning_gym", f"eval.tasksets={given}"]
    with pytest.raises(ConfigError, match=r"env\.by_taskset\.a\.reward: got 'reasoning_gym', .* tasks of jsonl"):
        load_config("quickstart", unscored)
    load_config("quickstart", [*unscored, "env.by_taskset={a: {reward: exact_match}}"])


def test_saved_models_of_a_run_in_order(tmp_path):
    for step in (10, 2):
        folder = tmp_path / f"run/stages/rl/checkpoints/step-{step:06d}"
        (folder / "hf").mkdir(parents=True)
        (folder / "hf/config.json").write_text("{}")
    (tmp_path / "run/stages/rl/checkpoints/step-000020.partial/hf").mkdir(parents=True)
    (tmp_path / "run/stages/rl/checkpoints/step-000030").mkdir()
    sharded = tmp_path / "run/stages/rl/checkpoints/step-000006/trainer"
    sharded.mkdir(parents=True)
    (sharded / "state.json").write_text("{}")
    found = saved_models("eval.checkpoints", tmp_path / "run")
    assert [(saved.version, saved.exported is None) for saved in found] == [(2, False), (6, True), (10, False)]
    with pytest.raises(ValueError, match=r"eval\.checkpoints: got .*step-000030, expected a run's folder"):
        saved_models("eval.checkpoints", tmp_path / "run/stages/rl/checkpoints/step-000030")
    twin = tmp_path / "run/stages/sft/checkpoints/step-000002/hf"
    twin.mkdir(parents=True)
    (twin / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="both of step 2; name the folder of one stage"):
        saved_models("eval.checkpoints", tmp_path / "run")


class PlayedCollector:
    """Answers one task after the other, each in `task_s`; those named in `failing` fail for good."""

    def __init__(self, task_s: float, failing: str = "") -> None:
        self.task_s, self.failing, self.ended = task_s, failing, 0
        self.evaluate = SimpleNamespace(remote=self._evaluate)
        self.num_evaluated = SimpleNamespace(remote=self._num_evaluated)

    async def _evaluate(self, tasks: list[Any], sampling: Any, policy_version: int) -> list[Any]:
        results: list[Any] = []
        for task in tasks:
            await asyncio.sleep(self.task_s)
            self.ended += 1
            results.append(f"OSError: no {task}" if task in self.failing else [trajectory(float(task))])
        return results

    async def _num_evaluated(self) -> int:
        return self.ended


def evaluated(*collectors: PlayedCollector, tasks: str, step_timeout_s: float = 3600.0) -> tuple[Any, float]:
    async def main() -> tuple[Any, float]:
        parts: Any = SimpleNamespace(**generators_of(*collectors), supervisor=Supervisor())
        config: Any = SimpleNamespace(cluster=SimpleNamespace(step_timeout_s=step_timeout_s))
        evalset: Any = SimpleNamespace(name="a", tasks=list(tasks), sampling=EvalSampling())
        found = await evaluate(config, parts, [evalset], policy_version=3)
        return found, asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(main())


def test_an_evaluation_may_take_longer_than_a_wait_for_one_task():
    (metrics, trajectories), seconds = evaluated(
        PlayedCollector(100.0), PlayedCollector(70.0), tasks="0123456", step_timeout_s=150.0
    )
    assert [t.reward for t in trajectories] == [0, 1, 2, 3, 4, 5, 6]
    assert metrics["eval/a/num_tasks"] == 7
    assert 400 <= seconds <= 410
    with pytest.raises(PartFailed, match="evaluation on a: no task ended for 90 s; raise cluster"):
        evaluated(PlayedCollector(100.0), tasks="01", step_timeout_s=90.0)


class LostAtOnce(Standing):
    """Its process is gone before it has answered, and it is not back before the others have."""

    async def call_once(self, ask):
        self.is_up = False
        asyncio.get_running_loop().call_later(500.0, setattr, self, "is_up", True)


def test_what_a_lost_generator_was_asked_others_answer_and_nobody_waits_for_it():
    async def main():
        generators = [Standing(PlayedCollector(1.0)), LostAtOnce(PlayedCollector(1.0)), Standing(PlayedCollector(1.0))]
        parts: Any = SimpleNamespace(generators=generators)
        tasks: Any = list("0123456")
        answers = await shared_out(parts, tasks, EvalSampling(), 3)
        assert [own[0].reward for own in answers if not isinstance(own, str)] == [0, 1, 2, 3, 4, 5, 6]
        assert asyncio.get_running_loop().time() < 10

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(main())


def test_one_generators_tasks_may_all_fail_but_not_all_tasks():
    (metrics, _), _ = evaluated(PlayedCollector(1.0), PlayedCollector(1.0, failing="1"), tasks="012")
    assert (metrics["eval/a/num_tasks"], metrics["eval/a/failed_tasks"]) == (2.0, 1.0)
    with pytest.raises(PartFailed, match="evaluation on a: all 2 tasks failed, the last one: OSError: no 1"):
        evaluated(PlayedCollector(1.0, failing="01"), tasks="01")
    with pytest.raises(PartFailed, match="evaluation on a: there are no tasks"):
        evaluated(PlayedCollector(1.0), tasks="")


@pytest.mark.parametrize("wanted", [True, False], ids=["wanted", "the train job was started again"])
def test_an_explorer_works_on_held_out_tasks_for_as_long_as_they_are_wanted(wanted, monkeypatch, capsys):
    monkeypatch.setattr(explore_stage, "PROGRESS_S", 0.01)
    told = []

    async def main():
        called_off, asked, num_looks = asyncio.Event(), asyncio.Event(), 0

        async def evaluate(tasks, sampling, version):
            await called_off.wait()
            return ["the evaluation was called off"] * len(tasks)

        async def stop_evaluating():
            called_off.set()

        async def num_evaluated():
            return 0

        async def evaluation():
            if asked.is_set():
                return None
            asked.set()
            task = {"task_id": "t", "prompt": "p"}
            return {"session": "s", "number": 3, "policy_version": 7, "sampling": {}, "tasks": {"0": task, "1": task}}

        async def evaluating(session, moved):
            nonlocal num_looks
            num_looks += 1
            told.append((session, moved))
            if wanted and num_looks == 5:  # they are answered in the end
                called_off.set()
            return wanted

        async def evaluated(session, number, answers, why):
            told.append((session, number, sorted(answers)))

        def remote(**calls):
            return SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in calls.items()})

        actor = remote(evaluate=evaluate, stop_evaluating=stop_evaluating, num_evaluated=num_evaluated)
        link = remote(evaluation=evaluation, evaluating=evaluating, evaluated=evaluated)
        stage = object.__new__(explore_stage.ExploreStage)
        stage._name = "explore"
        async with asyncio.timeout(60):
            await stage._evaluate(SimpleNamespace(buffer=link, **generators_of(actor)))  # type: ignore[arg-type]

    asyncio.run(main())
    looks, (last,) = told[:-1], told[-1:]
    assert looks == [("s", True), *[("s", False)] * (4 if wanted else 0)], "only the first look was news"
    assert last == ("s", 3, ["0", "1"])
    assert ("answered no more" in capsys.readouterr().out) is not wanted


def test_what_was_before_training_is_no_evaluation_of_its_middle():
    config = load_config("quickstart", [], recipe="async_rl")
    first, tenth = ({"role": "evaluation", "step": step, "eval/held_out/reward": float(step)} for step in (0, 10))
    assert evaluated_at_start([{"role": "trainer", "step": 1}, tenth], build_evalsets(config)) == {}
    assert evaluated_at_start([first, tenth], build_evalsets(config)) == {"reward": 0.0}

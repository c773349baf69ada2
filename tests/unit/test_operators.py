"""Operators: what each does to a group, in which order, and how it is counted."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from leeway.replay.operators import OperatorFailed, Pipeline, check_operators
from leeway.types import NO_VERSION, Group, Trajectory


def trajectory(reward=0.0, tokens=(5, 6), finish_reason="stop"):
    return Trajectory(
        prompt_tokens=[1],
        response_tokens=list(tokens),
        loss_mask=[True] * len(tokens),
        behavior_logprobs=[-0.5] * len(tokens),
        policy_versions=[3] * len(tokens),
        reward=reward,
        finish_reason=finish_reason,
        text="",
    )


def group(*trajectories):
    return Group.of(group_id=1, task_id="t", trajectories=list(trajectories))


def rewards(result):
    assert isinstance(result, Group), result
    return [round(t.reward, 6) for t in result.trajectories()]


def test_filters():
    assert Pipeline(["filter_zero_variance"])(group(trajectory(1), trajectory(1))) == "equal rewards"
    kept = group(trajectory(1), trajectory(0))
    assert Pipeline(["filter_zero_variance"])(kept) is kept
    pipeline = Pipeline([{"filter_reward": {"min": 0.5, "max": 0.75}}])
    assert pipeline(kept) is kept
    assert pipeline(group(trajectory(1), trajectory(1))) == "mean reward out of range"
    assert pipeline(group(trajectory(0), trajectory(0))) == "mean reward out of range"


def test_truncated_trajectories_are_masked_and_stay_in_the_baseline():
    long = trajectory(0, (5, 6, 7), "length")
    result = Pipeline(["mask_truncated"])(group(long, trajectory(1)))
    assert isinstance(result, Group)
    assert rewards(result) == [0, 1]
    cut = result.trajectories()[0]
    assert (cut.loss_mask, cut.policy_versions, cut.behavior_logprobs) == ([False] * 3, [NO_VERSION] * 3, [0.0] * 3)
    assert cut.response_tokens == [5, 6, 7]
    assert result.policy_versions() == (3, 3)
    assert Pipeline(["mask_truncated"])(group(long, long)) == "all truncated"
    step = {"mask_truncated": {"reasons": ["max_turns"]}}
    other = Pipeline([step])(group(trajectory(0, finish_reason="max_turns"), long))
    assert isinstance(other, Group)
    assert other.trajectories()[1] == long


def test_shaping():
    shape = {"shape_reward": {"scale": 2, "offset": -1, "min": -0.5}}
    assert rewards(Pipeline([shape])(group(trajectory(0), trajectory(1)))) == [-0.5, 1]
    short, middle, long = (5,), (5, 6), (5, 6, 7)
    made = group(
        trajectory(1, short), trajectory(1, long), trajectory(0, short), trajectory(0, long), trajectory(1, middle)
    )
    assert rewards(Pipeline([{"prefer_short": {"weight": 0.2}}])(made)) == [1.1, 0.9, 0.0, -0.1, 1.0]


def test_dedupe():
    result = Pipeline(["dedupe"])(group(trajectory(1, (5,)), trajectory(0, (6,)), trajectory(1, (5,))))
    assert rewards(result) == [1, 0]
    assert Pipeline(["dedupe"])(group(trajectory(1), trajectory(1))) == "one answer only"


def test_they_run_in_order_and_each_is_counted():
    pipeline = Pipeline([{"shape_reward": {"max": 1}}, "filter_zero_variance", "mask_truncated"])
    assert pipeline(group(trajectory(1), trajectory(2))) == "equal rewards"
    assert rewards(pipeline(group(trajectory(0), trajectory(2)))) == [0, 1]
    assert (
        pipeline(group(trajectory(0, finish_reason="length"), trajectory(1, finish_reason="length"))) == "all truncated"
    )
    assert pipeline.counts() == {
        "replay/filtered_by/shape_reward": 0,
        "replay/filtered_by/filter_zero_variance": 1,
        "replay/filtered_by/mask_truncated": 1,
        "replay/changed_by/shape_reward": 2,
        "replay/changed_by/filter_zero_variance": 0,
        "replay/changed_by/mask_truncated": 0,
    }


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("operators_of_mine", None)
    (tmp_path / "operators_of_mine.py").write_text(
        "def few(group, *, least=2):\n    return 'too few' if len(group.trajectories()) < least else None\n"
        "def wrong(group):\n    return 3\n"
    )


def test_one_of_the_users_own(mine):
    pipeline = Pipeline([{"operators_of_mine:few": {"least": 3}}])
    assert pipeline(group(trajectory(), trajectory())) == "too few"
    assert pipeline.counts()["replay/filtered_by/few"] == 1
    with pytest.raises(TypeError, match="operators_of_mine:wrong returned 3; expected the group"):
        Pipeline(["operators_of_mine:wrong"])(group(trajectory()))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["filter_zero"], "got 'filter_zero', expected one of filter_zero_variance"),
        ([{"filter_reward": {"least": 1}}], "filter_reward.* cannot be called .*least"),
        (["operators_of_mine:nothing"], "has no 'nothing'"),
        (["operators_of_mine_too:x"], "no module"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(mine, steps, message):
    with pytest.raises(ValueError, match=rf"replay\.operators: .*{message}") as caught:
        Pipeline(steps)
    assert "\n" not in str(caught.value)


def test_groups_with_further_tensors_are_compared_by_all_they_hold():
    """Sampling from a few tokens (`rollout.top_k`) leaves ids with each token."""
    ids = torch.arange(4, dtype=torch.int32).view(2, 2)
    plain = trajectory(1.0)
    own = group(replace(plain, token_tensors={"kept_ids": ids}))
    pipeline = Pipeline([{"shape_reward": {"scale": 2.0}}, {"shape_reward": {"scale": 1.0}}])
    assert rewards(pipeline(own)) == [2.0]
    assert pipeline.counts()["replay/changed_by/shape_reward"] == 1
    assert own == group(replace(plain, token_tensors={"kept_ids": ids.clone()}))
    assert own != group(replace(plain, token_tensors={"kept_ids": ids + 1}))
    assert own != group(plain)
    assert own != group(replace(plain, text="x", token_tensors={"kept_ids": ids}))


def test_an_operator_that_raises_is_named_and_so_is_one_that_gives_no_number(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("operators_that_fail", None)
    (tmp_path / "operators_that_fail.py").write_text(
        "from dataclasses import replace\n"
        "def divides(group): return 1 / 0\n"
        "def no_number(group): return replace(group, rewards=[float('nan')])\n"
    )
    with pytest.raises(OperatorFailed, match="operators_that_fail:divides failed on group 1 of task t: ZeroDivision"):
        Pipeline(["dedupe", "operators_that_fail:divides"])(group(trajectory(), trajectory(1, (9, 9))))
    with pytest.raises(TypeError, match=r"operators_that_fail:no_number returned rewards \[nan\]; expected finite"):
        Pipeline(["operators_that_fail:no_number"])(group(trajectory()))


@pytest.mark.parametrize("name", ["filter_reward", "shape_reward"])
def test_a_range_that_holds_nothing_is_refused(name):
    check_operators([name, {name: {"min": 0.5, "max": 0.5}}, {name: {"min": 0.9}}])
    with pytest.raises(ValueError, match=rf"replay\.operators: {name}: got min 0.9 and max 0.1"):
        check_operators([{name: {"min": 0.9, "max": 0.1}}])
    with pytest.raises(ValueError, match=rf"replay\.operators: {name}: got min 'high', expected a number"):
        check_operators([{name: {"min": "high"}}])

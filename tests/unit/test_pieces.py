"""A user's own loss and advantage: used as they are, and refused by name when they are wrong."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leeway.algorithms.objective import PolicyObjective
from leeway.algorithms.pieces import advantage_of, check_pieces, policy_loss_of
from leeway.config import ConfigError, load_config
from leeway.replay.assemble import Assembler
from leeway.types import Group, Trajectory

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MINE = """
import torch

def loss(logprobs, old_logprobs, advantages, *, beta=0.0):
    return -advantages * logprobs * beta

def one_argument(logprobs):
    return logprobs

def needs(logprobs, old_logprobs, advantages, *, gamma):
    return logprobs * gamma

def mean(logprobs, old_logprobs, advantages):
    return logprobs.mean()

def number(logprobs, old_logprobs, advantages):
    return 1.0

def nan(logprobs, old_logprobs, advantages):
    return logprobs * float("nan")

def late_nan(logprobs, old_logprobs, advantages):
    return logprobs * (float("nan") if len(logprobs) == 2 else 1.0)

def detached(logprobs, old_logprobs, advantages):
    return logprobs.detach()

def broken(logprobs, old_logprobs, advantages):
    return logprobs @ torch.ones(3, 3)

not_a_function = 3

def advantage(rewards, groups, *, scale=1.0):
    return (rewards - rewards.mean()) * scale

def short_advantage(rewards, groups):
    return rewards[:1]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def section(**changes) -> SimpleNamespace:
    defaults = {"policy_loss": "clip", "policy_loss_options": {}, "advantage": "grpo", "advantage_options": {}}
    return SimpleNamespace(**(defaults | {"advantage_eps": 1e-6} | changes))


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"policy_loss": "mine:one_argument"}, ["mine:one_argument", "(logprobs)", "old_logprobs, advantages"]),
        ({"policy_loss": "mine:needs"}, ["mine:needs", "gamma", "algorithm.policy_loss_options"]),
        ({"policy_loss": "mine:mean"}, ["mine:mean", "returned shape []", "shape [6]"]),
        ({"policy_loss": "mine:number"}, ["mine:number", "returned a float"]),
        ({"policy_loss": "mine:nan"}, ["mine:nan", "nan or inf at 6 places", "finite"]),
        ({"policy_loss": "mine:detached"}, ["mine:detached", "does not depend on logprobs"]),
        ({"policy_loss": "mine:broken"}, ["mine:broken", "RuntimeError"]),
        ({"policy_loss": "mine:not_a_function"}, ["mine:not_a_function is a int", "expected a function"]),
        ({"policy_loss": "mine:gone"}, ["no 'gone'", "expected a function"]),
        ({"policy_loss": "mine:loss", "policy_loss_options": {"bta": 1}}, ["options.bta", "it takes beta"]),
        ({"advantage": "mine:short_advantage"}, ["mine:short_advantage", "returned shape [1]", "shape [6]"]),
        ({"advantage": "mine:loss"}, ["algorithm.advantage: mine:loss", "(rewards, groups"]),
        ({"policy_loss": "rec", "policy_loss_options": {"clip": "left"}}, ["policy loss rec", "'left'", "one_side"]),
    ],
)
def test_a_mistake_is_refused_with_the_functions_name_and_what_was_expected(changes, parts) -> None:
    with pytest.raises(ValueError) as error:
        check_pieces(section(**changes))
    text = str(error.value)
    assert "\n" not in text.strip()
    assert all(part in text for part in parts), text


@pytest.mark.usefixtures("mine")
def test_a_result_that_goes_wrong_later_is_refused_at_that_step() -> None:
    check_pieces(section(policy_loss="mine:late_nan"))
    loss = policy_loss_of("mine:late_nan")
    with pytest.raises(ValueError, match=r"policy loss mine:late_nan returned nan or inf at 2 places"):
        loss(torch.ones(2), torch.ones(2), torch.ones(2))


@pytest.mark.usefixtures("mine")
def test_a_loss_of_ones_own_is_what_is_minimised() -> None:
    objective = PolicyObjective(
        policy_loss=policy_loss_of("mine:loss", {"beta": 2.0}), clip_low=0.2, clip_high=0.2, aggregation="token_mean"
    )
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    tokens = SimpleNamespace(
        segments=torch.tensor([0, 0, 1]),
        mask=torch.tensor([True, False, True]),
        behavior_logprobs=torch.tensor([-1.0, 0.0, -3.0]),
        policy_versions=torch.zeros(3, dtype=torch.int64),
        advantages=torch.tensor([1.0, 1.0, -1.0]),
    )
    loss = objective.loss(logprobs, torch.ones(3), tokens, policy_version=0, num_sequences=2, num_tokens=2)  # type: ignore[arg-type]
    loss.total.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 0.0, 1.0]
    assert objective.metrics(loss.sums, loss.maxima)["train/ratio/clipped_frac"] == 0.0


@pytest.mark.usefixtures("mine")
def test_an_advantage_of_ones_own_sees_the_whole_take() -> None:
    advantage: Any = advantage_of("mine:advantage", {"scale": 2.0})
    assert advantage(torch.tensor([0.0, 4.0]), torch.tensor([0, 1])).tolist() == [-4.0, 4.0]


@pytest.mark.usefixtures("mine")
def test_names_are_checked_before_anything_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: org/model}\ntask: {path: t.jsonl}\ntrain: {steps: 12}\n")
    assert load_config(str(file), ["algorithm.policy_loss=mine:loss"]).algorithm.policy_loss == "mine:loss"
    assert "mine" not in sys.modules
    with pytest.raises(ConfigError, match=r"mine.py has no lss"):
        load_config(str(file), ["algorithm.policy_loss=mine:lss"])


def test_the_example_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    check_pieces(
        section(policy_loss="my_loss:my_loss", policy_loss_options={"beta": 0.5}, advantage="my_loss:my_advantage")
    )
    loss = policy_loss_of("my_loss:my_loss", {"beta": 0.5})
    got = loss(torch.tensor([-1.0]), torch.tensor([-3.0]), torch.tensor([2.0]), mask=torch.tensor([True]))
    assert got.item() == pytest.approx(2.0 + 0.5 * 4.0)

    def trajectory(reward: float) -> Trajectory:
        return Trajectory(
            prompt_tokens=[1], response_tokens=[2], loss_mask=[True], behavior_logprobs=[-0.5], policy_versions=[0],
            reward=reward, finish_reason="stop", text="",
        )  # fmt: skip

    take = Assembler(
        advantage=advantage_of("my_loss:my_advantage"), updates_per_take=1, num_ranks=1, skip_zero_advantage=False,
        rollouts_per_take=0,
    )(0, [Group.of(group_id=0, task_id="a", trajectories=[trajectory(r) for r in (0.0, 1.0, 4.0)])])  # fmt: skip
    assert take.batches[0][0].advantages.tolist() == [-1.0, 0.0, 3.0]
    assert math.isclose(take.metrics["train/reward/mean"], 5 / 3, rel_tol=1e-6)

"""A user's own advantage, loss, correction and KL estimator: used as they are, and refused by name when they are wrong.

Each is a walk that a contributor makes: one file of the user's own, in a folder of their own, and no file of ours.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leeway.algorithms.losses import LossInputs
from leeway.algorithms.objective import PolicyObjective
from leeway.algorithms.trial import try_pieces
from leeway.config import Config, ConfigError, derive, find_recipe, load_config
from leeway.config.algorithm import AlgorithmConfig, Pieces
from leeway.config.objective import objective_of
from leeway.config.rules import a_loss_without_a_ratio_is_on_policy, check_rules
from leeway.replay.assemble import Assembler
from leeway.types import Group, Trajectory

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MINE = """
import torch
from leeway import Advantage, Correction, GroupAdvantage, KLEstimator, PolicyLoss, RatioCorrection

class Loss(PolicyLoss):
    beta: float = 0.0
    def __call__(self, x):
        return -x.advantages * x.logprobs * self.beta

class OnPolicy(Loss):
    works_off_policy = False

class Plain(PolicyLoss):
    pass

class Needs(PolicyLoss):
    gamma: float
    def __call__(self, x):
        return x.logprobs * self.gamma

class Scalar(PolicyLoss):
    def __call__(self, x):
        return x.logprobs.mean()

class Number(PolicyLoss):
    def __call__(self, x):
        return 1.0

class Nan(PolicyLoss):
    def __call__(self, x):
        return x.logprobs * float("nan")

class LateNan(PolicyLoss):
    def __call__(self, x):
        return x.logprobs * (float("nan") if len(x.logprobs) == 2 else 1.0)

class Detached(PolicyLoss):
    def __call__(self, x):
        return x.logprobs.detach()

class Broken(PolicyLoss):
    def __call__(self, x):
        return x.logprobs @ torch.ones(3, 3)

not_a_class = 3

class Scaled(Advantage):
    scale: float = 1.0
    def of_batch(self, rewards, groups):
        return (rewards - rewards.mean()) * self.scale

class Short(Advantage):
    def of_batch(self, rewards, groups):
        return rewards[:1]

class InGroups(GroupAdvantage):
    def of_group(self, rewards):
        return rewards - rewards.median()

class Square(RatioCorrection):
    most: float = 4.0
    def of_ratio(self, ratio):
        return ratio.square().clamp(max=self.most)

class Halves(Correction):
    def weights(self, x):
        return torch.full_like(x.advantages, 0.5)

class Loud(KLEstimator):
    places = ("loss",)
    factor: float = 2.0
    def __call__(self, logprobs, reference_logprobs, behavior_logprobs):
        return self.factor * (logprobs - reference_logprobs).square()
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def section(**changes: Any) -> AlgorithmConfig:
    return Config.model_validate({"algorithm": changes}).algorithm


def tried(**changes: Any) -> Pieces:
    a = section(**changes).made()
    try_pieces(a.advantage, a.loss, a.correction, a.estimator)
    return a


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("piece", "chosen", "parts"),
    [
        ("loss", {"name": "mine:Plain"}, ["policy loss mine:Plain", "define __call__"]),
        ("loss", {"name": "mine:Needs"}, ["algorithm.loss.gamma: field required", "mine:Needs takes gamma"]),
        ("loss", {"name": "mine:Scalar"}, ["mine:Scalar", "returned shape []", "shape [6]"]),
        ("loss", {"name": "mine:Number"}, ["mine:Number", "returned a float"]),
        ("loss", {"name": "mine:Nan"}, ["mine:Nan", "nan or inf at 6 places", "finite"]),
        ("loss", {"name": "mine:Detached"}, ["mine:Detached", "does not depend on logprobs"]),
        ("loss", {"name": "mine:Broken"}, ["mine:Broken", "RuntimeError"]),
        ("loss", {"name": "mine:not_a_class"}, ["mine:not_a_class is a int", "derived from leeway.PolicyLoss"]),
        ("loss", {"name": "mine:Scaled"}, ["mine:Scaled is the class Scaled", "derived from leeway.PolicyLoss"]),
        ("loss", {"name": "mine:Loss", "bta": 1}, ["algorithm.loss.bta", "mine:Loss takes beta"]),
        ("loss", {"name": "mine:Loss", "beta": "much"}, ["algorithm.loss.beta", "valid number"]),
        ("advantage", {"name": "mine:Short"}, ["mine:Short", "returned shape [1]", "shape [6]"]),
        ("advantage", {"name": "mine:Loss"}, ["algorithm.advantage.name", "derived from leeway.Advantage"]),
        ("correction", {"name": "mine:Loss"}, ["algorithm.correction.name", "derived from leeway.Correction"]),
        ("correction", {"name": "mine:Square", "level": "word"}, ["algorithm.correction.level", "'token'"]),
    ],
)
def test_a_mistake_is_refused_with_the_classs_name_and_what_was_expected(piece: str, chosen: Any, parts: Any) -> None:
    with pytest.raises(ValueError) as error:
        tried(**{piece: chosen})
    text = str(error.value)
    assert "\n" not in text.strip()
    assert all(part in text for part in parts), text


@pytest.mark.usefixtures("mine")
def test_what_a_class_of_ones_own_needs_is_asked_once_it_is_imported() -> None:
    whole = Config.model_validate({"algorithm": {"loss": {"name": "mine:OnPolicy"}}})
    made = whole.model_copy(update={"algorithm": whole.algorithm.made().settings})
    with pytest.raises(ConfigError, match=r"staleness.max_policy_lag: got 2, .*mine:OnPolicy with advantage grpo"):
        check_rules(made, [a_loss_without_a_ratio_is_on_policy])
    with pytest.raises(ValueError, match=r"algorithm.group_size: got 1.*mine:InGroups"):
        section(group_size=1, advantage={"name": "mine:InGroups"}).made()
    loud = {"coef": 0.1, "where": "token", "estimator": {"name": "mine:Loud"}}
    with pytest.raises(ValueError, match=r"algorithm.kl.where: got 'token', expected loss .*mine:Loud"):
        section(kl=loud).made()


@pytest.mark.usefixtures("mine")
def test_a_result_that_goes_wrong_later_is_refused_at_that_step() -> None:
    loss: Any = tried(loss={"name": "mine:LateNan"}).loss
    pair = torch.ones(2)
    with pytest.raises(ValueError, match=r"policy loss mine:LateNan returned nan or inf at 2 places"):
        loss.checked(loss(LossInputs(pair, pair, pair, pair.bool(), pair.long())), like=pair)


def minimised(**changes: Any) -> tuple[list[float], dict[str, float]]:
    """(gradient of three tokens' logprobs, metrics) of the objective that these settings make; one is masked."""
    own = Config.model_validate({"algorithm": {"aggregation": "token_mean", **changes}})
    objective = objective_of(own, find_recipe("async_rl"))
    assert isinstance(objective, PolicyObjective)
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    tokens: Any = SimpleNamespace(
        segments=torch.tensor([0, 0, 1]),
        mask=torch.tensor([True, False, True]),
        behavior_logprobs=torch.tensor([-1.0, 0.0, -3.0]) - math.log(2.0),
        proximal_logprobs=torch.tensor([-1.0, 0.0, -3.0]),
        reference_logprobs=torch.tensor([-1.5, 0.0, -3.0]),
        policy_versions=torch.zeros(3, dtype=torch.int64),
        advantages=torch.tensor([1.0, 1.0, -1.0]),
    )
    loss = objective.loss(logprobs, torch.ones(3), tokens, policy_version=0, num_sequences=2, num_tokens=2)
    loss.total.backward()
    assert logprobs.grad is not None
    return logprobs.grad.tolist(), objective.metrics(loss.sums, loss.maxima)


@pytest.mark.slow
@pytest.mark.usefixtures("mine")
def test_a_loss_of_ones_own_is_what_is_minimised() -> None:
    gradient, metrics = minimised(loss={"name": "mine:Loss", "beta": 2.0})
    assert gradient == [-1.0, 0.0, 1.0]
    assert metrics["train/ratio/clipped_frac"] == 0.0


@pytest.mark.usefixtures("mine")
def test_a_correction_of_ones_own_weighs_the_tokens() -> None:
    """`prox / mu` is 2 everywhere: its square is 4, and the weight is at most `most`."""
    plain, _ = minimised(correction={"name": "decoupled"})
    for most, factor in ((4.0, 2.0), (3.0, 1.5)):
        gradient, metrics = minimised(correction={"name": "mine:Square", "most": most})
        assert gradient == pytest.approx([factor * g for g in plain])
        assert metrics["train/correction_weight/max"] == pytest.approx(2 * factor)
    half, _ = minimised(correction={"name": "mine:Halves"})
    assert half == pytest.approx([g / 4 for g in plain])
    assert derive(Config.model_validate({"algorithm": {"correction": {"name": "mine:Square"}}})).scores_proximal


@pytest.mark.usefixtures("mine")
def test_a_kl_estimator_of_ones_own_is_the_penalty() -> None:
    _, metrics = minimised(kl={"coef": 0.1, "estimator": {"name": "mine:Loud", "factor": 3.0}})
    assert metrics["train/reference_kl/mean"] == pytest.approx(3.0 * 0.5**2 / 2)


@pytest.mark.usefixtures("mine")
def test_an_advantage_of_ones_own_sees_the_whole_batch_or_a_group() -> None:
    rewards, groups = torch.tensor([0.0, 4.0, 1.0]), torch.tensor([0, 1, 1])
    advantage: Any = tried(advantage={"name": "mine:Scaled", "scale": 3.0}).advantage
    assert advantage(rewards, groups).tolist() == pytest.approx([-5.0, 7.0, -2.0])
    advantage = tried(advantage={"name": "mine:InGroups"}).advantage
    assert advantage(rewards, groups).tolist() == [0.0, 3.0, 0.0]


@pytest.mark.usefixtures("mine")
def test_names_are_checked_before_anything_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: org/model}\ntask: {path: t.jsonl}\ntrain: {steps: 12}\n")
    config = load_config(str(file), ["algorithm.loss.name=mine:Loss", "algorithm.loss.beta=0.5"])
    assert config.algorithm.loss.model_dump() == {"name": "mine:Loss", "beta": 0.5}
    assert "mine" not in sys.modules
    with pytest.raises(ConfigError, match=r"algorithm.loss.name: .*mine.py has no Lss"):
        load_config(str(file), ["algorithm.loss.name=mine:Lss"])


def test_the_example_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    algorithm = tried(loss={"name": "my_loss:MyLoss", "beta": 0.5}, advantage={"name": "my_loss:MyAdvantage"})
    loss: Any = algorithm.loss
    logprob, old, advantage_of_it = (torch.tensor([x]) for x in (-1.0, -3.0, 2.0))
    got = loss(LossInputs(logprob, old, advantage_of_it, torch.tensor([True]), torch.tensor([0])))
    assert got.item() == pytest.approx(2.0 + 0.5 * 4.0)

    def trajectory(reward: float) -> Trajectory:
        return Trajectory(
            prompt_tokens=[1], response_tokens=[2], loss_mask=[True], behavior_logprobs=[-0.5], policy_versions=[0],
            reward=reward, finish_reason="stop", text="",
        )  # fmt: skip

    advantage: Any = algorithm.advantage
    batch = Assembler(
        advantage=advantage, updates_per_batch=1, num_ranks=1, skip_zero_advantage=False, rollouts_per_step=0,
    )(0, [Group.of(group_id=0, task_id="a", trajectories=[trajectory(r) for r in (0.0, 1.0, 4.0)])])  # fmt: skip
    assert batch.steps[0][0].advantages.tolist() == [-1.0, 0.0, 3.0]
    assert math.isclose(batch.metrics["train/reward/mean"], 5 / 3, rel_tol=1e-6)

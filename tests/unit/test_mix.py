"""Rollouts and expert data in one step: the objective, the batches, and the trainer's check of versions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.mix import ExpertData, MixedObjective
from leeway.algorithms.objective import PolicyObjective
from leeway.algorithms.presets import ADVANTAGES
from leeway.algorithms.sequences import StepCounts, Tokens
from leeway.config import find_recipe, load_config
from leeway.config.objective import objective_of
from leeway.replay.assemble import Assembler
from leeway.tasks.examples import expert_source, expert_tasks
from leeway.trainer.trainer import StalenessError
from leeway.types import NO_VERSION, Group, Trajectory, batch_trajectories

from ..trainers import random_trajectories

f64 = torch.float64
SETTINGS: dict[str, Any] = {
    "policy_loss": PPOClip(clip_low=0.2, clip_high=0.28),
    "aggregation": "seq_mean_token_mean",
}
POLICY = PolicyObjective(**SETTINGS)


def mixed(mu: float, **changes: Any) -> MixedObjective:
    return MixedObjective(**SETTINGS, experts=ExpertData(path="e.jsonl", weight=mu, **changes))


def tokens_of(seed: int) -> tuple[Tokens, torch.Tensor, list[bool]]:
    """Two rollouts and two expert answers, masks everywhere; expert tokens share 1 / 7 each."""
    rng = random.Random(seed)
    segments = [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    expert = [s >= 2 for s in segments]
    mask = [True, False, True, True, True, True, False, True, True, True]
    count = len(segments)
    tokens = Tokens(
        segments=torch.tensor(segments),
        mask=torch.tensor(mask),
        behavior_logprobs=torch.tensor([0.0 if e else rng.uniform(-2, 0) for e in expert], dtype=f64),
        proximal_logprobs=torch.zeros(count, dtype=f64),
        reference_logprobs=torch.zeros(count, dtype=f64),
        policy_versions=torch.tensor([NO_VERSION if e or not m else 3 for e, m in zip(expert, mask, strict=True)]),
        advantages=torch.tensor(
            [1 / 7 if e else (1.0 if s == 0 else -2.0) for e, s in zip(expert, segments, strict=True)], dtype=f64
        ),
    )
    logprobs = torch.tensor([rng.uniform(-2, 0) for _ in segments], dtype=f64)
    return tokens, logprobs, [e and m for e, m in zip(expert, mask, strict=True)]


COUNTS: StepCounts = {"policy_version": 4, "num_sequences": 2, "num_tokens": 4}


@pytest.mark.parametrize("token_weights", [False, True])
def test_the_loss_is_the_mixture_and_its_gradient_too(token_weights: bool) -> None:
    tokens, start, is_target = tokens_of(0)
    first = slice(0, 5)
    rollouts = Tokens(**{name: value[first] for name, value in vars(tokens).items()})
    x = start.clone().requires_grad_()
    loss = mixed(0.3, token_weights=token_weights).loss(x, torch.ones(10), tokens, **COUNTS)
    loss.total.backward()
    y = start[first].clone().requires_grad_()
    alone = POLICY.loss(y, torch.ones(5), rollouts, **COUNTS)
    alone.total.backward()
    weights = [p * (1 - p) if token_weights else 1.0 for p in start.exp().tolist()]
    supervised = sum(-w * lp / 7 for w, lp, t in zip(weights, start.tolist(), is_target, strict=True) if t)
    assert loss.total.item() == pytest.approx(0.7 * alone.total.item() + 0.3 * supervised)
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad[first], 0.7 * y.grad)
    expected = [-0.3 * w / 7 if t else 0.0 for w, t in zip(weights, is_target, strict=True)]
    assert x.grad[5:].tolist() == pytest.approx(expected[5:])
    objective = mixed(0.3, token_weights=token_weights)
    metrics = objective.metrics(loss.sums, loss.maxima)
    assert (len(loss.sums), len(loss.maxima)) == (objective.num_sums, objective.num_maxima)
    assert {k: metrics[k] for k in ("train/expert/tokens", "train/expert/weight")} == pytest.approx(
        {"train/expert/tokens": 4.0, "train/expert/weight": 0.3}
    )
    assert metrics["train/loss/expert"] == pytest.approx(supervised)
    plain = POLICY.metrics(alone.sums, alone.maxima)
    assert {name: metrics[name] for name in plain} == plain  # experts are no part of the policy's diagnostics


def test_without_weight_it_is_the_policy_loss_and_with_all_of_it_supervised_training() -> None:
    tokens, start, is_target = tokens_of(1)
    gradients = []
    for mu in (0.0, 1.0):
        x = start.clone().requires_grad_()
        mixed(mu).loss(x, torch.ones(10), tokens, **COUNTS).total.backward()
        assert x.grad is not None
        gradients.append(x.grad.tolist())
    assert gradients[0][5:] == [0.0] * 5
    assert gradients[1] == pytest.approx([-1 / 7 if t else 0.0 for t in is_target])


def test_the_weight_falls_in_a_straight_line_and_then_stays() -> None:
    experts = ExpertData(path="e.jsonl", weight=0.9, weight_end=0.1, decay_steps=4)
    assert [experts.weight_at(v) for v in (0, 1, 2, 4, 99)] == pytest.approx([0.9, 0.7, 0.5, 0.1, 0.1])


def expert(length: int) -> Trajectory:
    return Trajectory(
        prompt_tokens=[9], response_tokens=[8] * length, loss_mask=[True] * (length - 1) + [False],
        behavior_logprobs=[0.0] * length, policy_versions=[NO_VERSION] * length, reward=0.0, finish_reason="stop",
        text="",
    )  # fmt: skip


def test_every_optimizer_step_gets_its_experts_and_the_counts_stay_those_of_the_rollouts() -> None:
    groups = []
    for i in range(4):
        trajectories = random_trajectories(i, 2)
        trajectories[1] = Trajectory(**{**vars(trajectories[1]), "reward": 1.0})
        groups.append(Group.of(group_id=i, task_id="t", trajectories=trajectories))
    stream = iter([[expert(3), expert(4)], [expert(5)]])
    batch = Assembler(
        advantage=ADVANTAGES["grpo"](), updates_per_batch=2, num_ranks=2, skip_zero_advantage=True,
        rollouts_per_step=0, experts=lambda: next(stream),
    )(0, groups)  # fmt: skip
    for step, group_ids, share in ((batch.steps[0], (0, 2), 1 / 5), (batch.steps[1], (1, 3), 1 / 4)):
        rollouts = [t for i in group_ids for t in groups[i].trajectories()]
        found = 0
        for own in step:
            assert int(own.num_sequences) == 4
            assert int(own.num_tokens) == sum(sum(t.loss_mask) for t in rollouts)
            is_expert = (own.policy_versions == NO_VERSION) & own.loss_mask
            torch.testing.assert_close(own.advantages[is_expert], torch.full((int(is_expert.sum()),), share))
            found += int(is_expert.sum())
        assert found * share == pytest.approx(1.0)


@pytest.mark.slow
def test_the_trainer_takes_expert_tokens_only_where_the_objective_does(make) -> None:
    trajectories = [*random_trajectories(0, 3), expert(4)]
    batch = batch_trajectories(trajectories, [0.5, -0.5, 0.1, 1 / 3], num_sequences=3, num_tokens=20)
    trainer = make(objective=mixed(0.5))
    metrics = trainer.forward_backward(batch)
    assert metrics["train/expert/tokens"] == 3.0
    assert metrics["train/policy_lag/max"] == 0.0
    with pytest.raises(StalenessError, match=r"version -1"):
        make(objective=POLICY).forward_backward(batch)
    stale = batch_trajectories(
        [*random_trajectories(0, 3, version=-5), expert(4)], [0.5] * 4, num_sequences=3, num_tokens=20
    )
    with pytest.raises(StalenessError, match=r"version -5"):
        make(objective=mixed(0.5)).forward_backward(stale)


class Characters:
    def encode_example(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        return [ord(c) for c in prompt], [*(ord(c) for c in answer), 0]


def test_experts_come_from_a_file_and_never_from_what_is_held_out(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(40)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: org/model}}\ntask: {{path: {tmp_path}/t.jsonl, holdout_frac: 0.5}}\ntrain: {{steps: 12}}\n"
        f"algorithm: {{name: mix, expert: {{path: {tmp_path}/t.jsonl, weight_end: null}}, kl: {{coef: 0.1}}}}\n"
    )
    config = load_config(str(tmp_path / "c.yaml"))
    assert config.algorithm.expert is not None
    tasks = expert_tasks(config.algorithm.expert.path, config.task, config.eval, seed=0)
    assert 0 < len(tasks) < 40
    prompter: Any = Characters()
    source = expert_source(tasks, prompter, count=len(tasks))
    first, second = source(), source()
    texts = [[t.text for t in batch] for batch in (first, second)]
    assert sorted(texts[0]) == sorted(texts[1]) == sorted(task.answer for task in tasks.tasks)
    assert texts[0] != texts[1]
    again = expert_tasks(config.algorithm.expert.path, config.task, config.eval, seed=0)
    resumed = expert_source(again, prompter, count=len(tasks), skip=len(tasks))
    assert [t.text for t in resumed()] == texts[1]
    objective = objective_of(config, find_recipe("async_rl"))
    assert isinstance(objective, MixedObjective)
    assert [objective.experts.weight_at(version) for version in (0, 99)] == [0.5, 0.5]
    assert objective.needs_reference

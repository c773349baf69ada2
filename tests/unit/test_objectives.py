"""Every preset's whole objective, as the settings make it: what must change nothing, and boundaries."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.algorithms.advantages import TurnAdvantage
from leeway.algorithms.losses import LossInputs
from leeway.algorithms.presets import ADVANTAGES, POLICY_LOSSES, PRESETS
from leeway.algorithms.turns import Turns, num_turns
from leeway.config import Config, find_recipe
from leeway.config.objective import objective_of
from leeway.types import NO_VERSION, Group, Trajectory

from ..tiers import sample, slow_but_for

f64 = torch.float64
LOW, HIGH = 0.2, 0.28
SAMPLED_ALONE = [name for name in PRESETS if name not in ("mix", "ppo", "remax")]
"""Presets that look at rollouts and nothing else."""


def objective(preset: str, **changes: Any) -> Any:
    own = {"name": preset, "reference_path": "org/teacher", **changes}
    return objective_of(Config.model_validate({"algorithm": own}), find_recipe("async_rl"))


class Step:
    """N ragged sequences with masks, as one step's tokens or as any part of it."""

    def __init__(self, seed: int, *, on_policy: bool = False) -> None:
        rng = random.Random(seed)
        self.lengths = [rng.randint(1, 6) for _ in range(rng.randint(2, 5))]
        self.mask = [[rng.random() < 0.7 for _ in range(n)] for n in self.lengths]
        self.mask[0][0] = True
        self.logprobs = [[rng.uniform(-3, -0.1) for _ in range(n)] for n in self.lengths]
        shift = [[0.0 if on_policy else rng.uniform(-0.5, 0.5) for _ in range(n)] for n in self.lengths]
        self.behavior = [[x - d for x, d in zip(*p, strict=True)] for p in zip(self.logprobs, shift, strict=True)]
        self.reference = [[x + rng.uniform(-1, 1) for x in row] for row in self.logprobs]
        self.advantages = [[rng.choice((-1.5, -0.5, 0.5, 2.0))] * n for n in self.lengths]

    def gradient(self, objective: Any, parts: list[list[int]]) -> list[list[float]]:
        """Of the whole step by each logprob, with `parts` (lists of sequences) as microbatches."""
        sampled = [m for row in self.mask for m in row]
        turns = sum(a and not b for row in self.mask for a, b in zip(row, [False, *row], strict=False))
        per_turn = objective.aggregation == "turn_mean_token_mean"
        counts = {"policy_version": 1, "num_sequences": turns if per_turn else len(self.lengths)}
        out: list[list[float]] = [[] for _ in self.lengths]
        for part in parts:
            logprobs = torch.tensor([x for i in part for x in self.logprobs[i]], dtype=f64, requires_grad=True)

            def flat(rows: list[list[Any]], part: list[int] = part, dtype: Any = f64) -> torch.Tensor:
                return torch.tensor([x for i in part for x in rows[i]], dtype=dtype)

            tokens = SimpleNamespace(
                segments=torch.tensor([k for k, i in enumerate(part) for _ in range(self.lengths[i])]),
                mask=flat(self.mask, dtype=torch.bool),
                behavior_logprobs=flat(self.behavior),
                policy_versions=torch.zeros(len(logprobs), dtype=torch.int64),
                advantages=flat(self.advantages),
                proximal_logprobs=flat(self.behavior),
                reference_logprobs=flat(self.reference),
            )
            loss = objective.loss(logprobs, torch.ones_like(logprobs), tokens, **counts, num_tokens=sum(sampled))
            loss.total.backward()
            assert logprobs.grad is not None
            values = iter(logprobs.grad.tolist())
            for i in part:
                out[i] = [next(values) for _ in range(self.lengths[i])]
        return out


def close(got: list[list[float]], expected: list[list[float]]) -> None:
    assert [x for row in got for x in row] == pytest.approx([x for row in expected for x in row], abs=1e-12)


@settings(max_examples=sample(6, 12), deadline=None)
@given(seed=st.integers(0, 10_000), order=st.randoms(use_true_random=False))
@pytest.mark.parametrize("preset", slow_but_for(["grpo", "rloo", "topr"], SAMPLED_ALONE))
def test_order_and_microbatches_change_nothing_and_masked_tokens_move_nothing(preset: str, seed: int, order) -> None:
    step, whole = Step(seed), objective(preset)
    sequences = list(range(len(step.lengths)))
    expected = step.gradient(whole, [sequences])
    shuffled = list(sequences)
    order.shuffle(shuffled)
    cut = order.randint(0, len(shuffled))
    close(step.gradient(whole, [p for p in (shuffled[:cut], shuffled[cut:]) if p]), expected)
    for row, mask in zip(expected, step.mask, strict=True):
        assert [x for x, m in zip(row, mask, strict=True) if not m] == [0.0] * mask.count(False)
    for i, mask in enumerate(step.mask):
        for t, m in enumerate(mask):
            if not m:  # whatever stands where the environment wrote
                step.behavior[i][t], step.reference[i][t] = -order.uniform(0, 50), -order.uniform(0, 50)
                step.logprobs[i][t] = -order.uniform(0, 50)
    close(step.gradient(whole, [sequences]), expected)


@settings(max_examples=sample(10, 30), deadline=None)
@given(seed=st.integers(0, 10_000))
@pytest.mark.parametrize(
    "preset",
    slow_but_for(["grpo"], ["grpo", "dr_grpo", "dapo", "cispo", "sapo", "step_grpo", "rloo", "topr", "asymre"]),
)
def test_on_policy_the_gradient_is_that_of_reinforce_with_the_same_advantages(preset: str, seed: int) -> None:
    step = Step(seed, on_policy=True)
    sequences = [list(range(len(step.lengths)))]
    close(
        step.gradient(objective(preset), sequences),
        step.gradient(objective(preset, loss={"name": "reinforce"}), sequences),
    )


@pytest.mark.slow
@settings(max_examples=sample(10, 30), deadline=None)
@given(seed=st.integers(0, 10_000))
@pytest.mark.parametrize("correction", ["decoupled", "tis", "icepop", "mis"])
def test_where_the_sampling_policy_took_the_batch_a_correction_is_plain_ppo(correction: str, seed: int) -> None:
    """Lag 0: the proximal policy is the one that sampled, however far the updates have gone since."""
    step = Step(seed)
    sequences = [list(range(len(step.lengths)))]
    close(
        step.gradient(objective("grpo", correction={"name": correction}), sequences),
        step.gradient(objective("grpo"), sequences),
    )


# ---------------------------------------------------------------------------------------------------- boundaries


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    ("name", "edge"),
    [("ppo_clip", 1 - LOW), ("ppo_clip", 1 + HIGH), ("gspo", 1 - LOW), ("gspo", 1 + HIGH), ("cispo", 1 - LOW),
     ("cispo", 1 + HIGH), ("rec", 1 - LOW), ("rec", 1 + HIGH), ("sppo", 1.3), ("sppo", 1 / 1.3)],
)  # fmt: skip
def test_exactly_at_the_clip_a_gradient_is_one_of_the_two_beside_it(name: str, edge: float, advantage: float) -> None:
    def gradient(ratio: float) -> float:
        x = torch.tensor([math.log(ratio)], dtype=f64, requires_grad=True)
        zero, a = torch.zeros(1, dtype=f64), torch.tensor([advantage], dtype=f64)
        cls: Any = POLICY_LOSSES[name]
        clips = {"clip_low": LOW, "clip_high": HIGH} if "clip_low" in cls.model_fields else {}
        cls(**clips)(LossInputs(x, zero, a, torch.ones(1).bool(), torch.zeros(1).long())).sum().backward()
        assert x.grad is not None
        return x.grad.item()

    below, at, above = (gradient(edge * (1 + d)) for d in (-1e-7, 0.0, 1e-7))
    # At a kink autograd may also give the mean of both sides: `minimum` of equals shares its gradient.
    assert (
        at == pytest.approx(below, abs=1e-5)
        or at == pytest.approx(above, abs=1e-5)
        or (at == pytest.approx((below + above) / 2, abs=1e-5))
    )
    assert below != 0.0 or above != 0.0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_groups_of_one_and_of_equal_rewards_are_finite_and_compare_nothing(name: str) -> None:
    def trajectory(reward: float) -> Trajectory:
        return Trajectory(
            prompt_tokens=[1], response_tokens=[2, 3], loss_mask=[True, False], behavior_logprobs=[-1.0, 0.0],
            policy_versions=[0, NO_VERSION], reward=reward, finish_reason="stop", text="",
        )  # fmt: skip

    groups = [
        Group.of(group_id=i, task_id="", trajectories=[trajectory(r) for r in rewards])
        for i, rewards in enumerate([[0.1], [0.1, 0.1, 0.1]])
    ]
    rewards = torch.tensor([t.reward for g in groups for t in g.trajectories()])
    indices, advantage = torch.tensor([0, 1, 1, 1]), ADVANTAGES[name]()
    if isinstance(advantage, TurnAdvantage):
        turns = Turns.of([g.trajectories() for g in groups])
        assert len(turns.rewards) == sum(
            num_turns(g.samples["loss_mask"], g.samples["response_lengths"]) for g in groups
        )
        got = advantage.of_each_turn(rewards, indices, turns)
    else:
        got = advantage(rewards, indices)
    assert torch.isfinite(got).all()
    if advantage.needs_group and name not in ("asymre", "best"):
        assert got.tolist() == [0.0] * 4


@pytest.mark.parametrize("preset", SAMPLED_ALONE)
def test_all_tokens_masked_and_no_tokens_at_all_cost_nothing(preset: str) -> None:
    step = Step(1)
    step.mask = [[False] * n for n in step.lengths]
    whole = objective(preset)
    none = torch.zeros(0, dtype=f64, requires_grad=True)
    empty = SimpleNamespace(
        segments=torch.zeros(0).long(), mask=torch.zeros(0).bool(), behavior_logprobs=none.detach(),
        policy_versions=torch.zeros(0).long(), advantages=none.detach(), proximal_logprobs=none.detach(),
        reference_logprobs=none.detach(),
    )  # fmt: skip
    loss = whole.loss(none, none, empty, policy_version=0, num_sequences=3, num_tokens=9)
    loss.total.backward()  # a rank without work takes part in the collective
    assert loss.total.item() == 0.0
    counts = {"policy_version": 1, "num_sequences": 3, "num_tokens": 9}
    logprobs = torch.tensor([x for row in step.logprobs for x in row], dtype=f64, requires_grad=True)
    behavior = torch.tensor([x for row in step.behavior for x in row], dtype=f64)
    tokens = SimpleNamespace(
        segments=torch.tensor([i for i, n in enumerate(step.lengths) for _ in range(n)]),
        mask=torch.zeros(len(logprobs)).bool(), behavior_logprobs=behavior,
        policy_versions=torch.zeros(len(logprobs)).long(), advantages=torch.ones(len(logprobs), dtype=f64),
        proximal_logprobs=behavior, reference_logprobs=behavior,
    )  # fmt: skip
    loss = whole.loss(logprobs, torch.ones_like(logprobs), tokens, **counts)
    loss.total.backward()
    assert loss.total.item() == 0.0
    assert logprobs.grad is not None
    assert not logprobs.grad.any()

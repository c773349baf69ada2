"""Our objectives beside torchrl's, where it has the same one; and where it has not, what differs and which is right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.objectives.llm.grpo import CISPOLoss, GRPOLoss

from leeway.algorithms.aggregation import aggregate
from leeway.algorithms.grpo import GRPO
from leeway.algorithms.kl import K3
from leeway.algorithms.losses import LossInputs
from leeway.algorithms.presets import POLICY_LOSSES

f64 = torch.float64
LOW, HIGH = 0.2, 0.28
LENGTHS = [4, 1, 6]
WIDTH = 6


class Padded(nn.Module):
    """A policy that is its logprobs, as torchrl wants to be given one: padded rows, and a mask."""

    in_keys = ()

    def __init__(self, logprobs: torch.Tensor, mask: torch.Tensor) -> None:
        super().__init__()
        self.logprobs, self.mask = nn.Parameter(logprobs), mask

    def get_dist(self, tensordict: Any, logits_key: str) -> Any:
        return self

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        return self.logprobs


class Case:
    """Ragged sequences with ratios inside and outside of the clip on both sides, packed for us and padded for them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.mask = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]
        self.mask[2, 2] = False  # something that the environment wrote
        self.logprobs = -torch.rand(3, WIDTH, generator=generator, dtype=f64) * 3 - 0.1
        choice = torch.randint(0, 6, (3, WIDTH), generator=generator)
        self.old = self.logprobs - torch.tensor([0.3, 0.7, 0.95, 1.1, 1.5, 3.0], dtype=f64)[choice].log()
        self.advantages = torch.tensor([1.0, -0.5, -1.5], dtype=f64)[:, None].expand(3, WIDTH)
        self.real = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]

    def theirs(self, loss: type[GRPOLoss], **options: Any) -> tuple[float, torch.Tensor, Any]:
        actor: Any = Padded(self.logprobs.clone(), self.mask)
        module = loss(actor, clip_epsilon=(LOW, HIGH), entropy_bonus=False, **options)
        rows = {
            "advantage": self.advantages[..., None],
            "tokens": {"full": torch.zeros(3, WIDTH, dtype=torch.int64)},
            "log_probs": {"full": self.old},
            "next": {"ref_log_probs": {"full": self.old}},
        }
        out = module(TensorDict(rows, batch_size=[3]))  # type: ignore[arg-type]  # its stub knows the LLM wrappers only
        total = out.loss_objective.sum()
        total.backward()
        return total.item(), actor.logprobs.grad, out

    def ours(self, name: str, how: str) -> tuple[float, torch.Tensor]:
        padded = self.logprobs.clone().requires_grad_()
        real = self.real
        segments = torch.arange(3)[:, None].expand(3, WIDTH)[real]
        tensors = (padded[real], self.old[real], self.advantages[real], self.mask[real], segments)
        cls: Any = POLICY_LOSSES[name]
        losses = cls(clip_low=LOW, clip_high=HIGH)(LossInputs(*tensors))
        total = aggregate(losses, self.mask[real], segments, how=how, num_sequences=3, num_tokens=int(self.mask.sum()))
        total.backward()
        assert padded.grad is not None
        return total.item(), padded.grad


@pytest.mark.parametrize(("how", "theirs"), [("token_mean", "token_mean"), ("seq_mean_token_mean", "prompt_mean")])
def test_the_clipped_objective_is_theirs_in_value_and_gradient(how: str, theirs: str) -> None:
    case = Case()
    value, gradient = case.ours("ppo_clip", how)
    their_value, their_gradient, _ = case.theirs(GRPOLoss, aggregation=theirs)
    assert value == pytest.approx(their_value, abs=1e-6)  # they keep the clip range in float32
    torch.testing.assert_close(gradient, their_gradient, rtol=0, atol=1e-6)


def test_cispo_differs_where_the_ratio_is_clipped() -> None:
    """Theirs is `-clip(r) A`: the gradient of a clipped token is 0, which is what CISPO (arXiv 2506.13585) was made
    to avoid. The paper's weight is detached, and multiplies `log pi`: every token keeps a gradient. Inside of the range
    both gradients are `-r A`.
    """
    case = Case()
    _, ours = case.ours("cispo", "token_mean")
    _, theirs, _ = case.theirs(CISPOLoss, aggregation="token_mean")
    ratio = (case.logprobs - case.old).exp()
    inside = case.mask & (ratio > 1 - LOW) & (ratio < 1 + HIGH)
    clipped = case.mask & ~inside
    assert inside.any()
    assert clipped.any()
    torch.testing.assert_close(ours[inside], theirs[inside], rtol=0, atol=1e-6)
    assert theirs[clipped].tolist() == [0.0] * int(clipped.sum())
    assert (ours[clipped] != 0).all()
    weight = ratio.clamp(1 - LOW, 1 + HIGH)
    torch.testing.assert_close(ours, torch.where(case.mask, -weight * case.advantages / case.mask.sum(), 0.0))


def test_their_kl_is_averaged_over_padding_too() -> None:
    """Both are k3 of KL(pi || reference). Theirs is a mean over all places of the padded rows, ours over real tokens:
    theirs falls when another sequence of the batch happens to be longer.
    """
    case = Case()
    _, _, out = case.theirs(GRPOLoss, kl_to_ref_coeff=1.0)
    k3 = K3()(case.logprobs[case.mask], case.old[case.mask], case.old[case.mask])
    assert out.kl_to_ref.item() == pytest.approx(k3.sum().item() / case.mask.numel(), abs=1e-9)
    assert out.kl_to_ref.item() < k3.mean().item()


def test_their_clipped_share_counts_padding_and_clips_that_do_not_act() -> None:
    """Theirs: every ratio outside of the range, over all places. Ours (see `diagnostics`): clips that stop a gradient,
    over real tokens.
    """
    case = Case()
    _, _, out = case.theirs(GRPOLoss)
    ratio = torch.where(case.mask, (case.logprobs - case.old).exp(), 1.0)
    outside = (ratio < 1 - LOW) | (ratio > 1 + HIGH)
    acting = ((ratio < 1 - LOW) & (case.advantages < 0)) | ((ratio > 1 + HIGH) & (case.advantages > 0))
    assert out.clip_fraction.item() == pytest.approx(outside.sum().item() / case.mask.numel())
    assert 0 < int(acting.sum()) < int(outside.sum())


def test_a_group_of_equal_rewards_is_exactly_nothing_for_us() -> None:
    """torchrl divides by `max(std, 1e-6)`, the paper and we by `std + eps`: the same unless the deviation is tiny."""
    grpo_advantage = GRPO().of_group
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=f64)
    theirs = (rewards - rewards.mean()) / rewards.std().clamp_min(1e-6)
    torch.testing.assert_close(grpo_advantage(rewards), theirs, rtol=1e-5, atol=0)
    assert math.copysign(1, grpo_advantage(torch.full((3,), 0.1))[0].item()) == 1.0
    assert grpo_advantage(torch.full((3,), 0.1)).tolist() == [0.0] * 3

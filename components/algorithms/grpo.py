"""GRPO, whole: how rewards become advantages, how advantages become a loss, and the presets of its family.

    rewards [G] of a group --GRPO--> advantages [G], one per answer
    logprobs of the policy and of the engine [S] --PPOClip, with its answer's advantage--> losses [S], one per token
    losses --aggregation--> mean over each answer's tokens, then over the answers of the step

Everything else (a correction, a KL penalty, an entropy bonus) is off by default; `objective` puts the parts together.
Source: DeepSeekMath, arXiv 2402.03300, section 4.1.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat

from ..lazy import torch
from .advantages import GroupAdvantage, normalised
from .losses import ClippedLoss, LossInputs
from .piece import preset


class GRPO(GroupAdvantage):
    """`(R - mean_g) / (std_g + eps)`, std_g of the sample; zeros where all rewards are equal."""

    name: Literal["grpo"] = "grpo"
    eps: PositiveFloat = Field(default=1e-6, description="added to the standard deviation of rewards")

    def of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        return normalised(rewards, eps=self.eps)


class PPOClip(ClippedLoss):
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`; with `dual_clip` c, not above `-c A` where A < 0.

    `r = exp(logprobs - old_logprobs)`. Source: PPO, arXiv 1707.06347, eq. 7; the asymmetric range is DAPO's, arXiv
    2503.14476, section 3.1; dual clip is arXiv 1912.09729.
    """

    name: Literal["ppo_clip"] = "ppo_clip"
    dual_clip: float | None = Field(
        default=None, gt=1.0, description="the loss of a bad answer is at most this many times its advantage"
    )
    clips: ClassVar[str] = "gradient"

    def __call__(self, x: LossInputs) -> torch.Tensor:
        ratio = self.ratio(x)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        objective = torch.minimum(ratio * x.advantages, clipped * x.advantages)
        if self.dual_clip is not None:
            objective = torch.where(
                x.advantages < 0, torch.maximum(objective, self.dual_clip * x.advantages), objective
            )
        return -objective


PRESETS = {
    "grpo": preset("grpo", "ppo_clip", "seq_mean_token_mean"),
    "dr_grpo": preset("mean", "ppo_clip", "fixed_length"),
    "dapo": preset("grpo", "ppo_clip", "token_mean", overlong_buffer_frac=0.2)
    | {"replay": {"operators": ["filter_zero_variance"]}},
    "step_grpo": preset("grpo", "ppo_clip", "turn_mean_token_mean"),
}

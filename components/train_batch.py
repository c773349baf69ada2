"""What one trainer rank takes for one optimizer step, as tensors: apart from the other types, which load no torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorClass

from .types import Trajectory


class TrainBatch(TensorClass):
    """N trajectories laid end to end, unpadded: one trainer rank's share of one optimizer step.

    `num_sequences` and `num_tokens` count the whole step over all ranks: losses divide by them, so the gradient is the
    same however the step was cut into ranks and microbatches.

    Example, two trajectories with prompts of 2 tokens and responses of 1 and 3 tokens: `prompt_tokens` [4],
    `prompt_lengths` [2, 2], `response_tokens` [4], `response_lengths` [1, 3]. Supervised examples are the same with
    `policy_versions` = NO_VERSION.
    """

    prompt_tokens: torch.Tensor  # int64 [sum of prompt lengths]
    prompt_lengths: torch.Tensor  # int64 [N]
    response_tokens: torch.Tensor  # int64 [S]
    response_lengths: torch.Tensor  # int64 [N]
    loss_mask: torch.Tensor  # bool [S]
    behavior_logprobs: torch.Tensor  # float32 [S]
    policy_versions: torch.Tensor  # int64 [S]
    advantages: torch.Tensor  # float32 [S]
    num_sequences: torch.Tensor  # int64 []
    num_tokens: torch.Tensor  # int64 [], tokens with loss_mask True


def batch_trajectories(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | Sequence[float]],
    *,
    num_sequences: int,
    num_tokens: int,
) -> TrainBatch:
    """Lay N trajectories end to end; `advantages` [N]: of each, one number for all of its tokens, or one per token."""

    def flat(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([x for t in trajectories for x in getattr(t, name)], dtype=dtype)

    response_lengths = torch.tensor([len(t.response_tokens) for t in trajectories], dtype=torch.int64)
    return TrainBatch(
        prompt_tokens=flat("prompt_tokens", torch.int64),
        prompt_lengths=torch.tensor([len(t.prompt_tokens) for t in trajectories], dtype=torch.int64),
        response_tokens=flat("response_tokens", torch.int64),
        response_lengths=response_lengths,
        loss_mask=flat("loss_mask", torch.bool),
        behavior_logprobs=flat("behavior_logprobs", torch.float32),
        policy_versions=flat("policy_versions", torch.int64),
        advantages=torch.tensor(
            [
                x
                for t, a in zip(trajectories, advantages, strict=True)
                for x in ([a] * len(t.response_tokens) if isinstance(a, float | int) else a)
            ],
            dtype=torch.float32,
        ),
        num_sequences=torch.tensor(num_sequences),
        num_tokens=torch.tensor(num_tokens),
        batch_size=[],
    )

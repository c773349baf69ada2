"""What one trainer rank takes for one optimizer step, as tensors: apart from the other types, which load no torch."""

from __future__ import annotations

from array import array
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

    response_lengths = torch.tensor([len(t.response_tokens) for t in trajectories], dtype=torch.int64)
    return TrainBatch(
        prompt_tokens=_end_to_end([t.prompt_tokens for t in trajectories], torch.int64),
        prompt_lengths=torch.tensor([len(t.prompt_tokens) for t in trajectories], dtype=torch.int64),
        response_tokens=_end_to_end([t.response_tokens for t in trajectories], torch.int64),
        response_lengths=response_lengths,
        loss_mask=_end_to_end([t.loss_mask for t in trajectories], torch.bool),
        behavior_logprobs=_end_to_end([t.behavior_logprobs for t in trajectories], torch.float32),
        policy_versions=_end_to_end([t.policy_versions for t in trajectories], torch.int64),
        advantages=_by_token(advantages, response_lengths),
        num_sequences=torch.tensor(num_sequences),
        num_tokens=torch.tensor(num_tokens),
        batch_size=[],
    )


_CODES = {torch.int64: "q", torch.float32: "f", torch.bool: "b"}


def _end_to_end(lists: Sequence[Sequence[int | float]], dtype: torch.dtype) -> torch.Tensor:
    """All numbers of the lists, [sum of lengths]; five times as fast as `torch.tensor` on one long list."""
    numbers = array(_CODES[dtype])
    for own in lists:
        numbers.fromlist(list(own))
    if not numbers:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(numbers, dtype=torch.int8 if dtype is torch.bool else dtype).to(dtype)


def _by_token(advantages: Sequence[float | Sequence[float]], lengths: torch.Tensor) -> torch.Tensor:
    """float32 [sum of lengths]."""
    if all(isinstance(a, float | int) for a in advantages):
        return torch.repeat_interleave(torch.tensor(advantages, dtype=torch.float32), lengths)
    each = zip(advantages, lengths.tolist(), strict=True)
    return _end_to_end([[a] * length if isinstance(a, float | int) else a for a, length in each], torch.float32)

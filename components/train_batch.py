"""What one trainer rank takes for one optimizer step, as tensors: apart from the other types, which load no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorClass, TensorDict

from .samples import FURTHER, TOKEN_FIELDS, Layout, as_buffers, end_to_end, from_buffers, laid

if TYPE_CHECKING:
    from .samples import Samples
    from .types import Trajectory


class TrainBatch(TensorClass):
    """N trajectories laid end to end, unpadded: one trainer rank's share of one optimizer step.

    `num_sequences` and `num_tokens` count the whole step over all ranks: losses divide by them, so the gradient is the
    same however the step was cut into ranks and microbatches. `prompt_tensors` and `token_tensors`: see `samples`.
    `buffer_counts`: the same of each auxiliary buffer, whose tokens the two do not count; None: there are none.
    `recorded`: the trajectories that people can read, whose logprobs are asked for; None: none of them is here.

    Example, two trajectories with prompts of 2 tokens and responses of 1 and 3 tokens: `prompt_tokens` [4],
    `prompt_lengths` [2, 2], `response_tokens` [4], `response_lengths` [1, 3]. Supervised examples are the same with
    `policy_versions` = NO_VERSION.
    """

    prompt_tokens: torch.Tensor  # int32 [sum of prompt lengths]
    prompt_lengths: torch.Tensor  # int64 [N]
    response_tokens: torch.Tensor  # int32 [S]
    response_lengths: torch.Tensor  # int64 [N]
    loss_mask: torch.Tensor  # bool [S]
    behavior_logprobs: torch.Tensor  # float32 [S]
    policy_versions: torch.Tensor  # int32 [S]
    advantages: torch.Tensor  # float32 [S]
    temperatures: torch.Tensor  # float32 [N], at which each was sampled: its logprobs are those of logits / temperature
    num_sequences: torch.Tensor  # int64 []
    num_tokens: torch.Tensor  # int64 [], tokens with loss_mask True
    prompt_tensors: TensorDict | None = None
    token_tensors: TensorDict | None = None
    buffer_counts: torch.Tensor | None = None  # int64 [K, 2]: sequences, and tokens with loss_mask True
    recorded: torch.Tensor | None = None  # int64 [R, 2]: (row of the step's rollouts, its conversation here)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, as_buffers(dict(self.items()), protocol=protocol)


_BY_CONVERSATION = ("prompt_tokens", "prompt_lengths", "response_lengths", "temperatures")


def batch_samples(
    samples: Samples,
    advantages: torch.Tensor,
    *,
    num_sequences: int,
    num_tokens: int,
    buffer_counts: Sequence[tuple[int, int]] = (),
    recorded: Sequence[tuple[int, int]] = (),
) -> TrainBatch:
    """The batch of these samples; `advantages` float32 [S]."""
    return TrainBatch(
        **{name: samples[name] for name in (*_BY_CONVERSATION, *TOKEN_FIELDS)},
        advantages=advantages,
        num_sequences=torch.tensor(num_sequences),
        num_tokens=torch.tensor(num_tokens),
        **{name: TensorDict(samples[name], batch_size=[]) for name in FURTHER if name in samples},
        buffer_counts=torch.tensor(buffer_counts, dtype=torch.int64) if buffer_counts else None,
        recorded=torch.tensor(recorded, dtype=torch.int64) if recorded else None,
        batch_size=[],
    )


def of_recorded(batch: TrainBatch, by_token: torch.Tensor) -> dict[int, torch.Tensor]:
    """By row of the step's rollouts, what `by_token` [S] says of the response tokens of that trajectory."""
    if batch.recorded is None:
        return {}
    each = torch.split(by_token, batch.response_lengths.tolist())
    return {row: each[conversation] for row, conversation in batch.recorded.tolist()}


def batch_trajectories(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | Sequence[float]],
    *,
    num_sequences: int,
    num_tokens: int,
    temperature: float = 1.0,
) -> TrainBatch:
    """Lay N trajectories end to end; `advantages` [N]: of each, one number for all of its tokens, or one per token.

    `temperature`: at which all of them were sampled.
    """
    each = zip(advantages, trajectories, strict=True)
    by_token = [[a] * len(t.response_tokens) if isinstance(a, float | int) else a for a, t in each]
    return batch_samples(
        laid(trajectories, temperature=temperature),
        end_to_end(by_token, torch.float32),
        num_sequences=num_sequences,
        num_tokens=num_tokens,
    )


def _restored(layout: Layout, buffers: list[Any]) -> TrainBatch:
    return TrainBatch.from_tensordict(TensorDict(from_buffers(layout, buffers), batch_size=[]))

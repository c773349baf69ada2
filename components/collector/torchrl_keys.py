"""Conversations under torchrl's LLM keys, as its `ReplayBuffer.extend`, `MCAdvantage` and `GRPOLoss` read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torch.nn.functional import pad

from ..group import Group
from ..samples import further
from ..train_batch import TrainBatch
from ..versions import NO_VERSION


def under_torchrl_keys(groups: Sequence[Group]) -> LazyStackedTensorDict:
    """[C] conversations of T tokens each, ragged: a lazy stack, which torchrl pads where it needs to.

        query                       int64 [1], the group's id: what `MCAdvantage(prompt_key="query")` groups by
        tokens.prompt, .response, .full             int64 [P], [R], [T]
        masks.all_attention_mask, .all_assistant_mask   bool [T]; the latter: sampled by the policy
        log_probs.response, .full   float32 [R], [T]; NaN where the policy sampled nothing, which `GRPOLoss` leaves out
        policy_versions             int64 [T]; -1 where the policy sampled nothing
        next.reward, .done, .terminated    float32 [1, 1], bool [1], bool [1]

    and, where the environment gave them, `prompt_tensors` and `token_tensors` by name. A conversation is one step of a
    torchrl trajectory. What a transform or an advantage adds is torchrl's own business.
    """
    rows, done = [], torch.ones(1, dtype=torch.bool)
    for group in groups:
        for row, owner in zip(_rows(group.samples), group.samples["trajectory"].tolist(), strict=True):
            reward = torch.tensor([[group.rewards[owner]]], dtype=torch.float32)
            row["query"] = torch.tensor([group.group_id])
            row["next"] = {"reward": reward, "done": done, "terminated": done}
            rows.append(TensorDict(row, batch_size=[]))
    return lazy_stack(rows)


def batch_under_torchrl_keys(batch: TrainBatch) -> LazyStackedTensorDict:
    """A batch's conversations under the same keys, without `query` and `next`, and with

        advantage                   float32 [T, 1]; 0 where the policy sampled nothing

    All have the length of the longest: shorter ones are filled on the left, outside of both masks, because torchrl's
    losses pad an advantage on the other side than a log-probability.
    """
    advantages = batch.advantages.split(batch.response_lengths.tolist())
    rows = list(_rows(batch))
    longest = max(len(row["tokens"]["full"]) for row in rows)
    for row, advantage in zip(rows, advantages, strict=True):
        fill = longest - len(row["tokens"]["full"])
        row["advantage"] = pad(advantage, (longest - len(advantage), 0))[:, None]
        row["tokens"]["full"] = pad(row["tokens"]["full"], (fill, 0))
        row["masks"] = {name: pad(mask, (fill, 0)) for name, mask in row["masks"].items()}
        row["log_probs"]["full"] = pad(row["log_probs"]["full"], (fill, 0), value=torch.nan)
        row["policy_versions"] = pad(row["policy_versions"], (fill, 0), value=NO_VERSION)
    return lazy_stack([TensorDict(row, batch_size=[]) for row in rows])


def _rows(s: Any) -> Iterator[dict[str, Any]]:
    """Of each conversation of a group's samples or of a batch: both have the same tensors."""
    prompts = s.get("prompt_tokens").long().split(s.get("prompt_lengths").tolist())
    lengths = s.get("response_lengths").tolist()
    names = ("response_tokens", "loss_mask", "behavior_logprobs", "policy_versions")
    each = zip(prompts, *(s.get(name).split(lengths) for name in names), strict=True)
    for c, (prompt, response, mask, logprobs, versions) in enumerate(each):
        sampled = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), mask])
        own = torch.where(mask, logprobs, torch.nan)
        yield {
            "tokens": {"prompt": prompt, "response": response.long(), "full": torch.cat([prompt, response.long()])},
            "masks": {"all_attention_mask": torch.ones_like(sampled), "all_assistant_mask": sampled},
            "log_probs": {"response": own, "full": torch.cat([torch.full((len(prompt),), torch.nan), own])},
            "policy_versions": torch.cat([torch.full_like(prompt, NO_VERSION), versions.long()]),
            **_further(s, c),
        }


def _further(s: Any, conversation: int) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in further(s, "prompt_tensors").items():
        parts = tensor["values"].split(tensor["lengths"].tolist())
        found.setdefault("prompt_tensors", {})[name] = parts[conversation]
    for name, tensor in further(s, "token_tensors").items():
        parts = tensor.split(s.get("response_lengths").tolist())
        found.setdefault("token_tensors", {})[name] = parts[conversation]
    return found

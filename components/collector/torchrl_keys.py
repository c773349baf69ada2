"""Finished groups under torchrl's LLM keys, as its `ReplayBuffer.extend`, `MCAdvantage` and `GRPOLoss` read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from ..group import Group
from ..samples import further


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
    rows = []
    for group in groups:
        s = group.samples
        prompts = s["prompt_tokens"].long().split(s["prompt_lengths"].tolist())
        lengths = s["response_lengths"].tolist()
        responses, masks, logprobs, versions = (
            s[name].split(lengths) for name in ("response_tokens", "loss_mask", "behavior_logprobs", "policy_versions")
        )
        for c, owner in enumerate(s["trajectory"].tolist()):
            prompt, response, mask = prompts[c], responses[c].long(), masks[c]
            sampled = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), mask])
            own = torch.where(mask, logprobs[c], torch.nan)
            done = torch.ones(1, dtype=torch.bool)
            row = {
                "query": torch.tensor([group.group_id]),
                "tokens": {"prompt": prompt, "response": response, "full": torch.cat([prompt, response])},
                "masks": {"all_attention_mask": torch.ones_like(sampled), "all_assistant_mask": sampled},
                "log_probs": {"response": own, "full": torch.cat([torch.full((len(prompt),), torch.nan), own])},
                "policy_versions": torch.cat([torch.full_like(prompt, -1), versions[c].long()]),
                "next": {
                    "reward": torch.tensor([[group.rewards[owner]]], dtype=torch.float32),
                    "done": done,
                    "terminated": done,
                },
            }
            row |= _further(group, c)
            rows.append(TensorDict(row, batch_size=[]))
    return lazy_stack(rows)


def _further(group: Group, conversation: int) -> dict[str, dict[str, torch.Tensor]]:
    s, found = group.samples, {}
    for name, tensor in further(s, "prompt_tensors").items():
        parts = tensor["values"].split(tensor["lengths"].tolist())
        found.setdefault("prompt_tensors", {})[name] = parts[conversation]
    for name, tensor in further(s, "token_tensors").items():
        parts = tensor.split(s["response_lengths"].tolist())
        found.setdefault("token_tensors", {})[name] = parts[conversation]
    return found

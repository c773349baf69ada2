"""Which tokens a token was drawn from, where that is not all of them: beside each response token, to the trainer.

    kept_tokens    int32 [S, W]: the ids that top-k and top-p left, -1 after them
    barred_tokens  int32 [S, B]: the ids that could not be drawn (what ends an answer, while it is too short), then -1

Both travel as `token_tensors`. A behaviour logprob is that of the distribution over what was left; the trainer
renormalises its own over the same ids. Without them the ratio of the two would compare different distributions, and
each step would push probability into what was cut off. Rows of tokens that the environment wrote are all -1.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from .lazy import torch

KEPT, BARRED = "kept_tokens", "barred_tokens"


def rows_of(ids: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """int32 [T, width], one row for each list. Raises ValueError for a longer list."""
    counts = torch.tensor([len(own) for own in ids], dtype=torch.int64)
    if len(ids) and int(counts.max()) > width:
        raise ValueError(f"a token was drawn from {int(counts.max())} tokens, more than the {width} that have room")
    rows = torch.full((len(ids), width), -1, dtype=torch.int32)
    numbers = array("i", itertools.chain.from_iterable(ids))  # far quicker than a tensor for each of many short lists
    if numbers:
        rows[torch.arange(width) < counts[:, None]] = torch.frombuffer(numbers, dtype=torch.int32)
    return rows


def no_rows(like: torch.Tensor, count: int) -> torch.Tensor:
    """Of tokens that nobody drew."""
    return torch.full((count, *like.shape[1:]), -1, dtype=like.dtype)


def joined_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Those of one turn after the other."""
    return torch.cat(list(parts))


def check_masks(samples: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises ValueError unless exactly these of the two are there, and each sampled token fits them."""
    found: Mapping[str, Any] = samples.get("token_tensors", {})
    if missing := [name for name in names if name not in found]:
        raise ValueError(
            f"a trajectory has no token_tensors[{missing[0]!r}], which rollout.top_k and rollout.min_response_tokens "
            "need; expected what generate() gave: make it with Trajectory.from_completion or Transcript"
        )
    if more := [name for name in (KEPT, BARRED) if name in found and name not in names]:
        raise ValueError(f"token_tensors[{more[0]!r}]: got one, expected none, as this run samples")
    sampled = samples["loss_mask"]
    for name in names:
        rows, tokens = found[name], samples["response_tokens"]
        if rows.ndim != 2 or rows.dtype != torch.int32 or (rows < -1).any():
            raise ValueError(f"token_tensors[{name!r}]: expected token ids, int32 [tokens, width], -1 after them")
        is_there = (rows == tokens[:, None]).any(-1)[sampled]
        if not bool(is_there.all() if name == KEPT else ~is_there.any()):
            raise ValueError(f"token_tensors[{name!r}]: a token was sampled that it says could not be")

"""The next tokens of rows of logits: drawn with numbers that come from outside, under what each row asks for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

PIECE = 256
"""Tokens that a large vocabulary's distribution is summed up by."""
Drawn = tuple[int, float, list[int]]
"""A token, its logprob under what it was drawn from, and, with a top_k, the ids that were left."""


class Sampling(NamedTuple):
    """What a request asks for. `temperature` 0: the likeliest token; `top_p` 1 and `top_k` 0: of all tokens."""

    temperature: float
    top_p: float
    top_k: int


def sample(
    logits: torch.Tensor,
    wanted: Sequence[Sampling],
    numbers: Sequence[Sequence[float]],
    *,
    barred: Sequence[Collection[int]],
    scale: float,
) -> list[list[Drawn]]:
    """Tokens for each row of `logits` [B, V], which are changed: one for each of the row's numbers (from 0 to 1).

    It is where the row's cumulative distribution passes the number. `barred`: tokens that a row may not
    have. `scale`: what the model's logits are multiplied with.
    """
    if out := [(row, token) for row, tokens in enumerate(barred) for token in tokens]:
        rows, tokens = torch.tensor(out, device=logits.device).T
        logits[rows, tokens] = float("-inf")
    kinds = set(wanted)  # one, mostly, and then rows need not be looked at
    factors = {w: scale / (w.temperature or 1.0) for w in kinds}
    if len(kinds) == 1:
        logits *= factors[wanted[0]]
    else:
        logits *= torch.tensor([factors[w] for w in wanted], device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    if any(w.top_k for w in kinds):
        logprobs = _among_likeliest(logprobs, [w.top_k for w in wanted])
    if any(w.top_p < 1.0 for w in kinds):
        nucleus = torch.tensor([w.top_p for w in wanted], device=logits.device)
        logprobs = _within_nucleus(logprobs, nucleus)
    counts = [len(own) for own in numbers]
    most = max(counts)
    # A row with fewer numbers than others has zeros, too.
    flat = [x for own in numbers for x in (own if len(own) == most else (*own, *[0.0] * (most - len(own))))]
    # Never the very end, where rounding could reach a token of probability 0.
    drawn = torch.tensor(flat, dtype=torch.float64, device=logits.device).view(-1, most).clamp_(max=1 - 1e-12)
    tokens = _passing(logprobs, drawn)
    if not all(w.temperature for w in kinds):
        greedy = torch.tensor([not w.temperature for w in wanted], device=logits.device)
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    kept: list[list[int]] = [[] for _ in wanted]
    if any(w.top_k for w in kinds):
        kept = [logprobs[row].isfinite().nonzero()[:, 0].tolist() if w.top_k else [] for row, w in enumerate(wanted)]
    of_rows = zip(tokens.tolist(), logprobs.gather(-1, tokens).tolist(), kept, counts, strict=True)
    return [
        [(token, logprob, ids) for token, logprob in zip(own[:count], own_logprobs, strict=False)]
        for own, own_logprobs, ids, count in of_rows
    ]


def _passing(logprobs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """[B, V], [B, K] in float64 -> [B, K]: where each row's sum of probabilities passes so much of all of it.

    Sums of more than a few thousand probabilities are made of those of pieces, so that only the sums, and the pieces in
    which they pass, are there in float64.
    """
    size = logprobs.shape[-1]
    if size <= 16 * PIECE:
        total = logprobs.double().exp_().cumsum(-1)
        # In a row that is not a number all the way, which is no other row's concern: its logprob says so.
        return torch.searchsorted(total, numbers * total[:, -1:], right=True).clamp_(max=size - 1)
    probabilities = logprobs.exp()
    if missing := -size % PIECE:
        probabilities = F.pad(probabilities, (0, missing))
    pieces = probabilities.unflatten(-1, (-1, PIECE))
    total = pieces.sum(-1).double().cumsum(-1)
    wanted = numbers * total[:, -1:]
    passed = torch.searchsorted(total, wanted, right=True).clamp_(max=total.shape[-1] - 1)
    before = F.pad(total, (1, 0)).gather(-1, passed)
    within = pieces.gather(1, passed[..., None].expand(-1, -1, PIECE)).double().cumsum(-1)
    # What its sum was rounded by is not beyond the piece.
    left = torch.minimum(wanted - before, within[..., -1] * (1 - 1e-12))
    at = torch.searchsorted(within, left[..., None], right=True)[..., 0].clamp_(max=PIECE - 1)
    return (passed * PIECE + at).clamp_(max=size - 1)


def _among_likeliest(logprobs: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    """logprobs [B, V] of each row's `top_k` likeliest tokens, normalised; -inf for the others. 0: of all."""
    size = logprobs.shape[-1]
    counts = torch.tensor([min(k or size, size) for k in top_k], device=logprobs.device)
    order = logprobs.topk(int(max((k for k in top_k if k < size), default=1)), dim=-1).indices
    outside = torch.ones_like(logprobs, dtype=torch.bool)
    outside.scatter_(-1, order, torch.arange(order.shape[1], device=order.device) >= counts[:, None])
    outside &= (counts < size)[:, None]
    return torch.log_softmax(logprobs.masked_fill(outside, float("-inf")), dim=-1)


def _within_nucleus(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """logprobs [B, V] of the likeliest tokens that make up `top_p` [B] together, normalised; -inf for the others."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    probabilities = ordered.exp()
    before = probabilities.cumsum(-1) - probabilities
    # A row without a top_p keeps all: its sum may round to more than 1 before the end.
    cut = (before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    outside = torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, order, cut)
    return torch.log_softmax(logprobs.masked_fill(outside, float("-inf")), dim=-1)

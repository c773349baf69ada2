"""What the trainer says of the canary prompts; an engine that serves its weights must agree."""

from __future__ import annotations

import torch

from ..weights import Canary, CanaryPrompts
from .scoring import ScoringModel


def score_canary(model: ScoringModel, prompts: CanaryPrompts, device: torch.device) -> Canary:
    """One forward over all prompts (a collective), padded on the right; see `Canary`."""
    sequences = [*prompts.scored, *prompts.cached]
    width = max(len(s) for s in sequences)
    input_ids = torch.zeros(len(sequences), width, dtype=torch.int64, device=device)
    for i, sequence in enumerate(sequences):
        input_ids[i, : len(sequence)] = torch.tensor(sequence)
    rows = [i * width + t for i, s in enumerate(prompts.scored) for t in range(len(s) - 1)]
    last = [i * width + len(s) - 1 for i, s in enumerate(sequences) if i >= len(prompts.scored)]
    targets = torch.tensor([token for s in prompts.scored for token in s[1:]], dtype=torch.int64, device=device)
    logprobs, _ = model(input_ids, torch.tensor(rows + last, device=device), None, 1.0)
    scored = logprobs[: len(rows)].gather(-1, targets[:, None]).squeeze(-1)
    likeliest = logprobs[len(rows) :].max(dim=-1)
    pieces = torch.split(scored, [len(s) - 1 for s in prompts.scored])
    return Canary(prompts, [p.tolist() for p in pieces], likeliest.indices.tolist(), likeliest.values.tolist())

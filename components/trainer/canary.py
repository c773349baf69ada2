"""The trainer's logprobs of the canary prompts; an engine that serves its weights must agree."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..weights import Canary, CanaryPrompts
from .layout import Segment, make_layout
from .scoring import ScoringModel


def score_canary(model: ScoringModel, prompts: CanaryPrompts, device: torch.device) -> Canary:
    """One forward pass over all prompts (a collective), in rows like those of training; see `Canary`.

    What another one begins with is not computed twice: a context for the prefix cache begins like the prompt before it.
    """
    sequences = prompts.longest()
    lengths = torch.tensor([len(s) for s in sequences])
    if model.is_packed:
        starts = [0, *itertools.accumulate(map(len, sequences))][:-1]
        input_ids = torch.tensor([[token for s in sequences for token in s]], device=device)
        layout = make_layout([Segment(start, len(s)) for start, s in zip(starts, sequences, strict=True)]).to(device)
        form: dict[str, Any] = {
            "layout": layout,
            "position_ids": torch.cat([torch.arange(len(s)) for s in sequences])[None].to(device),
        }
    else:
        width = int(lengths.max())
        starts = [i * width for i in range(len(sequences))]
        input_ids = torch.zeros(len(sequences), width, dtype=torch.int64, device=device)
        for i, sequence in enumerate(sequences):
            input_ids[i, : len(sequence)] = torch.tensor(sequence)
        form = {"attention_mask": (torch.arange(width) < lengths[:, None]).long().to(device)}

    def start_of(sequence: list[int]) -> int:
        return next(at for at, s in zip(starts, sequences, strict=True) if s[: len(sequence)] == sequence)

    rows = [start + t for s in prompts.scored for start in [start_of(s)] for t in range(len(s) - 1)]
    last = [start_of(s) + len(s) - 1 for s in prompts.cached]
    targets = torch.tensor([token for s in prompts.scored for token in s[1:]], dtype=torch.int64, device=device)
    logprobs, _ = model(input_ids, torch.tensor(rows + last, device=device), None, 1.0, **form)
    scored = logprobs[: len(rows)].gather(-1, targets[:, None]).squeeze(-1)
    likeliest = logprobs[len(rows) :].max(dim=-1)
    pieces = torch.split(scored, [len(s) - 1 for s in prompts.scored])
    return Canary(prompts, [p.tolist() for p in pieces], likeliest.indices.tolist(), likeliest.values.tolist())

"""Cut a rank's unpadded batch into padded microbatches. Padding exists here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..types import TrainBatch


@dataclass(frozen=True)
class Microbatch:
    """B sequences padded on the right to T tokens, and where their S trained tokens are.

    The logprob of response token s is read at `rows[s]` of the flattened [B * T] positions (one before the token
    itself). Right padding needs no attention mask: under causal attention no real token looks at a padded one.
    """

    input_ids: torch.Tensor  # int64 [B, T]
    rows: torch.Tensor  # int64 [S]
    targets: torch.Tensor  # int64 [S]
    segments: torch.Tensor  # int64 [S], sequence index 0 .. B - 1
    mask: torch.Tensor  # bool [S]
    behavior_logprobs: torch.Tensor  # float32 [S]
    policy_versions: torch.Tensor  # int64 [S]
    advantages: torch.Tensor  # float32 [S]
    proximal_logprobs: torch.Tensor  # float32 [S]; the behaviour ones where no objective asks for them
    reference_logprobs: torch.Tensor  # float32 [S]; the behaviour ones where no objective asks for them
    places: torch.Tensor  # int64 [S], where each token is in the batch

    def to(self, device: torch.device) -> Microbatch:
        return Microbatch(**{name: tensor.to(device, non_blocking=True) for name, tensor in vars(self).items()})


def cut(
    batch: TrainBatch,
    *,
    max_tokens: int,
    proximal_logprobs: torch.Tensor | None = None,
    reference_logprobs: torch.Tensor | None = None,
    unit: int = 1,
) -> list[Microbatch]:
    """Microbatches of at most `max_tokens` padded tokens, similar lengths together; a longer sequence gets its own.

    `proximal_logprobs` and `reference_logprobs` [S]: in the batch's order. Every `unit` neighbouring sequences stay
    together, in their order.
    """
    scored = {
        name: batch.behavior_logprobs if logprobs is None else logprobs
        for name, logprobs in (("proximal_logprobs", proximal_logprobs), ("reference_logprobs", reference_logprobs))
    }
    lengths = (batch.prompt_lengths + batch.response_lengths).reshape(-1, unit).amax(1)
    order = torch.argsort(lengths, stable=True).tolist()
    widths = lengths.tolist()
    chunks: list[list[int]] = []
    for i in reversed(order):
        # Longest first: the first unit of a chunk is its width.
        if chunks and widths[chunks[-1][0]] * (len(chunks[-1]) + 1) * unit <= max_tokens:
            chunks[-1].append(i)
        else:
            chunks.append([i])
    sequences = [[i * unit + j for i in chunk for j in range(unit)] for chunk in chunks]
    prompt_starts = _starts(batch.prompt_lengths)
    response_starts = _starts(batch.response_lengths)
    return [_pad(batch, scored, chunk, prompt_starts, response_starts) for chunk in sequences]


def empty_microbatch() -> Microbatch:
    """One token and nothing to train on, for a rank that has run out of work while others have not."""
    none = torch.zeros(0, dtype=torch.int64)
    return Microbatch(
        input_ids=torch.zeros(1, 1, dtype=torch.int64),
        rows=none,
        targets=none,
        segments=none,
        mask=none.bool(),
        behavior_logprobs=none.float(),
        policy_versions=none,
        advantages=none.float(),
        proximal_logprobs=none.float(),
        reference_logprobs=none.float(),
        places=none,
    )


def _starts(lengths: torch.Tensor) -> list[int]:
    return [0, *torch.cumsum(lengths, 0).tolist()]


def _pad(
    batch: TrainBatch,
    scored: dict[str, torch.Tensor],
    chunk: list[int],
    prompt_starts: list[int],
    response_starts: list[int],
) -> Microbatch:
    prompts = [batch.prompt_tokens[prompt_starts[i] : prompt_starts[i + 1]] for i in chunk]
    spans = [slice(response_starts[i], response_starts[i + 1]) for i in chunk]
    sequences = [torch.cat([p, batch.response_tokens[s]]) for p, s in zip(prompts, spans, strict=True)]
    width = max(len(s) for s in sequences)
    input_ids = torch.zeros(len(chunk), width, dtype=torch.int64)
    rows = []
    for b, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        input_ids[b, : len(sequence)] = sequence
        rows.append(torch.arange(b * width + len(prompt) - 1, b * width + len(sequence) - 1))

    def gather(name: str) -> torch.Tensor:
        tensor = getattr(batch, name)
        return torch.cat([tensor[s] for s in spans])

    return Microbatch(
        input_ids=input_ids,
        rows=torch.cat(rows),
        targets=gather("response_tokens"),
        segments=torch.repeat_interleave(torch.arange(len(chunk)), torch.tensor([s.stop - s.start for s in spans])),
        mask=gather("loss_mask"),
        behavior_logprobs=gather("behavior_logprobs"),
        policy_versions=gather("policy_versions"),
        advantages=gather("advantages"),
        places=torch.cat([torch.arange(s.start, s.stop) for s in spans]),
        **{name: torch.cat([logprobs[s] for s in spans]) for name, logprobs in scored.items()},
    )

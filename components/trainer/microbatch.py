"""Split a rank's unpadded batch into the passes that compute it: packed rows, or padded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..algorithms.sequences import Tokens
from ..samples import further, prompt_keys, ranges, starts
from .layout import Layout, Segment, make_layout

if TYPE_CHECKING:  # the benchmark runs where tensordict is not installed
    from ..types import TrainBatch

Packing = Literal["shared", "packed", "padded"]
"""Sequences back to back in one row, those of one prompt sharing it; back to back only; or each in a padded row."""

LEAST_SHARED = 32
"""Tokens that a common beginning must save: below that, one more call of attention costs as much."""


@dataclass(frozen=True)
class PromptRows:
    """The rows of one prompt tensor, of the prompts of a microbatch in the order in which these stand in it."""

    values: torch.Tensor  # [rows of all of them, ...]
    lengths: torch.Tensor  # int64 [prompts]


@dataclass(frozen=True)
class Microbatch(Tokens):
    """B rows of T tokens, and where their S trained tokens are.

    The logprob of response token s is read at `logit_positions[s]` of the flattened [B * T] positions: where the token
    before it stands. Packed: one row, `position_ids` and `layout` say what stands where. Padded: `attention_mask` does,
    for the few models that need it: under causal attention no real token looks at the padding on its right.
    """

    input_ids: torch.Tensor  # int64 [B, T]
    position_ids: torch.Tensor | None  # int64 [B, T]
    layout: Layout | None
    attention_mask: torch.Tensor | None  # int64 [B, T], 1 where there is a token
    logit_positions: torch.Tensor  # int64 [S]
    targets: torch.Tensor  # int64 [S]
    batch_positions: torch.Tensor  # int64 [S], where each token is in the batch
    temperature: float | torch.Tensor  # of all tokens, or float32 [S]
    token_tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # [S, ...]
    prompt_tensors: dict[str, PromptRows] = field(default_factory=dict)

    def to(self, device: torch.device) -> Microbatch:
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(
            self,
            **moved,
            layout=None if self.layout is None else self.layout.to(device),
            token_tensors={name: t.to(device, non_blocking=True) for name, t in self.token_tensors.items()},
            prompt_tensors={
                name: PromptRows(rows.values.to(device, non_blocking=True), rows.lengths.to(device))
                for name, rows in self.prompt_tensors.items()
            },
        )


def split_into_microbatches(
    batch: TrainBatch,
    *,
    max_tokens: int,
    packing: Packing = "shared",
    proximal_logprobs: torch.Tensor | None = None,
    reference_logprobs: torch.Tensor | None = None,
    unit: int = 1,
) -> list[Microbatch]:
    """Microbatches of at most `max_tokens` tokens (padding included); a longer sequence (or unit) gets its own.

    `proximal_logprobs` and `reference_logprobs` [S]: in the batch's order. Every `unit` neighbouring sequences stay
    together, in their order, first one first.
    """
    scored = {
        name: batch.behavior_logprobs if logprobs is None else logprobs
        for name, logprobs in (("proximal_logprobs", proximal_logprobs), ("reference_logprobs", reference_logprobs))
    }
    sequences = _Sequences(batch, scored)
    if packing == "padded":
        return [_pad(sequences, chunk) for chunk in _similar(sequences, max_tokens, unit=unit)]
    share = packing == "shared"
    if unit > 1:
        units = [sequences.runs(range(i, i + unit), shared=share) for i in range(0, len(sequences), unit)]
        return [_pack(sequences, chunk, share=share) for chunk in _fill_whole(sequences, units, max_tokens)]
    clusters = sequences.by_prompt() if share else [[i] for i in range(len(sequences))]
    return [_pack(sequences, chunk, share=share) for chunk in _fill(sequences, clusters, max_tokens)]


def empty_microbatch(*, packed: bool) -> Microbatch:
    """One token and nothing to train on, for a rank that runs out of passes before others do."""
    none = torch.zeros(0, dtype=torch.int64)
    token = torch.zeros(1, 1, dtype=torch.int64)
    return Microbatch(
        input_ids=token,
        position_ids=token if packed else None,
        layout=make_layout([Segment(0, 1)]) if packed else None,
        attention_mask=None if packed else torch.ones_like(token),
        logit_positions=none,
        targets=none,
        segments=none,
        mask=none.bool(),
        behavior_logprobs=none.float(),
        policy_versions=none,
        advantages=none.float(),
        proximal_logprobs=none.float(),
        reference_logprobs=none.float(),
        batch_positions=none,
        temperature=1.0,
    )


class _Sequences:
    """The batch's sequences, by index: where their tokens are in `tokens`, all prompts followed by all responses."""

    def __init__(self, batch: TrainBatch, scored: dict[str, torch.Tensor]) -> None:
        self.batch = batch
        self.scored = scored
        self.tokens = torch.cat([batch.prompt_tokens, batch.response_tokens]).long()
        self.prompt_lengths: list[int] = batch.prompt_lengths.tolist()
        self.response_lengths: list[int] = batch.response_lengths.tolist()
        self.lengths = [p + r for p, r in zip(self.prompt_lengths, self.response_lengths, strict=True)]
        self.prompt_starts = starts(self.prompt_lengths)
        self.response_starts = starts(self.response_lengths)
        self.first_response = self.prompt_starts[-1]
        self.prompt_keys = prompt_keys(batch)

    def __len__(self) -> int:
        return len(self.lengths)

    def by_prompt(self) -> list[list[int]]:
        """Sequences with the same prompt together, in the order in which the prompts first appear."""
        clusters: dict[bytes, list[int]] = {}
        for i, key in enumerate(self.prompt_keys):
            clusters.setdefault(key, []).append(i)
        return list(clusters.values())

    def runs(self, indices: Sequence[int], *, shared: bool) -> list[list[int]]:
        """These sequences in order, with neighbours grouped if they have the same prompt and it is `shared`."""
        clusters: list[list[int]] = []
        for i in indices:
            if shared and clusters and self.prompt_keys[i] == self.prompt_keys[clusters[-1][0]]:
                clusters[-1].append(i)
            else:
                clusters.append([i])
        return clusters

    def common_beginning(self, prompts: Sequence[int]) -> int:
        """How many tokens the prompts of these sequences all begin with; each has at least one token after it.

        0 where sharing them saves too little, and where there are prompt tensors, which may belong to any token.
        """
        if len(prompts) < 2 or further(self.batch, "prompt_tensors"):
            return 0
        most = max(0, min(self.prompt_lengths[i] for i in prompts) - 1)
        rows = self.tokens[torch.tensor([self.prompt_starts[i] for i in prompts])[:, None] + torch.arange(most)]
        same = int((rows == rows[0]).all(0).long().cumprod(0).sum())
        return same if same * (len(prompts) - 1) >= LEAST_SHARED else 0

    def fields(self, chunk: Sequence[int]) -> dict[str, Any]:
        """The per-token fields of a microbatch of these sequences, in this order."""
        lengths = [self.response_lengths[i] for i in chunk]
        positions = ranges([self.response_starts[i] for i in chunk], lengths)
        return {
            "targets": self.batch.response_tokens[positions].long(),
            "segments": torch.repeat_interleave(torch.arange(len(chunk)), torch.tensor(lengths)),
            "mask": self.batch.loss_mask[positions],
            "behavior_logprobs": self.batch.behavior_logprobs[positions],
            "policy_versions": self.batch.policy_versions[positions].long(),
            "advantages": self.batch.advantages[positions],
            "batch_positions": positions,
            "temperature": self._temperature(chunk, lengths),
            **{name: logprobs[positions] for name, logprobs in self.scored.items()},
            "token_tensors": {name: tensor[positions] for name, tensor in further(self.batch, "token_tensors").items()},
        }

    def _temperature(self, chunk: Sequence[int], lengths: list[int]) -> float | torch.Tensor:
        """One number where these sequences have one, so that nothing is looked up on the device."""
        temperatures = self.batch.temperatures[list(chunk)]
        if len(distinct := temperatures.unique()) == 1:
            return float(distinct)
        return torch.repeat_interleave(temperatures, torch.tensor(lengths))

    def prompt_tensors(self, prompts: Sequence[int]) -> dict[str, PromptRows]:
        """Those of the prompts of these sequences, in this order."""
        chosen = {}
        for name, tensor in further(self.batch, "prompt_tensors").items():
            lengths: list[int] = tensor["lengths"].tolist()
            first = starts(lengths)
            rows = ranges([first[i] for i in prompts], [lengths[i] for i in prompts])
            chosen[name] = PromptRows(tensor["values"][rows], tensor["lengths"][torch.tensor(prompts)])
        return chosen


# ------------------------------------------------------------------------------------------------------- packed


def _fill(sequences: _Sequences, clusters: list[list[int]], max_tokens: int) -> list[list[list[int]]]:
    """Clusters into microbatches, longest first, so that attention finds similar lengths together."""
    order = sorted(clusters, key=lambda c: -max(sequences.lengths[i] for i in c))
    chunks: list[list[list[int]]] = []
    room = 0
    for cluster in order:
        prompt = sequences.prompt_lengths[cluster[0]]
        piece: list[int] = []
        for i in cluster:
            own = max(0, sequences.response_lengths[i] - 1)
            needed = own if piece else prompt + own
            if not chunks or needed > room:
                # Each piece of a split cluster repeats its prompt.
                chunks.append([])
                room, needed, piece = max_tokens, prompt + own, []
            if not piece:
                chunks[-1].append(piece)
            piece.append(i)
            room -= needed
    return chunks


def _fill_whole(sequences: _Sequences, units: list[list[list[int]]], max_tokens: int) -> list[list[list[int]]]:
    """Units, each a list of clusters, into microbatches, longest first; no unit is ever cut."""
    chunks: list[list[list[int]]] = []
    room = 0
    for unit in sorted(units, key=lambda u: -max(sequences.lengths[i] for cluster in u for i in cluster)):
        prompts = sum(sequences.prompt_lengths[cluster[0]] for cluster in unit)
        needed = prompts + sum(max(0, sequences.response_lengths[i] - 1) for cluster in unit for i in cluster)
        if not chunks or needed > room:
            chunks.append([])
            room = max_tokens
        chunks[-1] += unit
        room -= needed
    return chunks


def _pack(sequences: _Sequences, clusters: list[list[int]], *, share: bool) -> Microbatch:
    """One row. The last token of a response is left out: nothing is predicted from it, and nothing attends to it.

    `share`: how all prompts begin (a system prompt, the words of a template) is computed once.
    """
    sources, positions, lengths = [], [], []  # of the runs of tokens that make up the row
    firsts, others = [], []  # by sequence: where the first response token is predicted from, and where it stands
    segments: list[Segment] = []
    end = 0

    def add(source: int, position: int, length: int) -> None:
        nonlocal end
        sources.append(source)
        positions.append(position)
        lengths.append(length)
        end += length

    begin = sequences.common_beginning([cluster[0] for cluster in clusters]) if share else 0
    context = ((0, begin),) if begin else ()
    if begin:
        add(sequences.prompt_starts[clusters[0][0]], 0, begin)
        segments.append(Segment(0, begin))
    for cluster in clusters:
        rest, prompt_length = end, sequences.prompt_lengths[cluster[0]]
        add(sequences.prompt_starts[cluster[0]] + begin, begin, prompt_length - begin)
        shared = len(cluster) > 1
        if shared:
            segments.append(Segment(rest, prompt_length - begin, context))
        for i in cluster:
            own = max(0, sequences.response_lengths[i] - 1)
            if shared:
                segments.append(Segment(end, own, (*context, (rest, prompt_length - begin))))
            else:
                segments.append(Segment(rest, prompt_length - begin + own, context))
            firsts.append(rest + prompt_length - begin - 1)
            others.append(end)
            add(sequences.first_response + sequences.response_starts[i], prompt_length, own)
    order = [i for cluster in clusters for i in cluster]
    return Microbatch(
        input_ids=sequences.tokens[ranges(sources, lengths)][None],
        position_ids=ranges(positions, lengths)[None],
        layout=make_layout(segments),
        attention_mask=None,
        logit_positions=_rows(firsts, others, [sequences.response_lengths[i] for i in order]),
        **sequences.fields(order),
        prompt_tensors=sequences.prompt_tensors([cluster[0] for cluster in clusters]),
    )


def _rows(firsts: list[int], others: list[int], response_lengths: list[int]) -> torch.Tensor:
    """Where each response token is predicted from: the first at `firsts`, the next ones from `others` on."""
    rows = ranges([start - 1 for start in others], response_lengths)
    real = [k for k, length in enumerate(response_lengths) if length]
    begins = starts(response_lengths)
    rows[[begins[k] for k in real]] = torch.tensor([firsts[k] for k in real], dtype=torch.int64)
    return rows


# ------------------------------------------------------------------------------------------------------- padded


def _similar(sequences: _Sequences, max_tokens: int, *, unit: int) -> list[list[int]]:
    """Group sequences of similar length, so that there is little padding; `unit` neighbours always stay together."""
    widths = [max(sequences.lengths[i : i + unit]) for i in range(0, len(sequences), unit)]
    chunks: list[list[int]] = []  # of units
    for i in sorted(range(len(widths)), key=lambda i: -widths[i]):
        # Longest first: the first unit of a chunk is its width.
        if chunks and widths[chunks[-1][0]] * (len(chunks[-1]) + 1) * unit <= max_tokens:
            chunks[-1].append(i)
        else:
            chunks.append([i])
    return [[i * unit + j for i in chunk for j in range(unit)] for chunk in chunks]


def _pad(sequences: _Sequences, chunk: list[int]) -> Microbatch:
    width = max(sequences.lengths[i] for i in chunk)
    input_ids = torch.zeros(len(chunk), width, dtype=torch.int64)
    firsts = []
    for b, i in enumerate(chunk):
        prompt, response = sequences.prompt_lengths[i], sequences.response_lengths[i]
        source = sequences.first_response + sequences.response_starts[i]
        input_ids[b, :prompt] = sequences.tokens[sequences.prompt_starts[i] :][:prompt]
        input_ids[b, prompt : prompt + response] = sequences.tokens[source : source + response]
        firsts.append(b * width + prompt - 1)
    rows = ranges(firsts, [sequences.response_lengths[i] for i in chunk])
    lengths = torch.tensor([sequences.lengths[i] for i in chunk])
    mask = (torch.arange(width) < lengths[:, None]).long()
    return Microbatch(
        input_ids=input_ids,
        position_ids=None,
        layout=None,
        attention_mask=mask,
        logit_positions=rows,
        **sequences.fields(chunk),
        prompt_tensors=sequences.prompt_tensors(chunk),
    )

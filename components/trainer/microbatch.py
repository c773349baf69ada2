"""Split a rank's unpadded batch into the passes that compute it: packed rows, or padded ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ..algorithms.sequences import Tokens
from ..samples import further, prompt_keys, ranges, starts
from .layout import Layout, Segment, make_layout
from .linear import num_rows
from .prefixes import Path, PrefixTree

if TYPE_CHECKING:  # the benchmark runs where tensordict is not installed
    from ..types import TrainBatch

Packing = Literal["shared", "packed", "padded"]
"""Sequences back to back in one row, each prompt and what its responses begin with alike there once; back to back only;
or each in a padded row.
"""

LEAST_SHARED = 32
"""Tokens that a common beginning must save: below that, one more call of attention costs as much."""

MOST_NEEDED = 0.9
"""Of a row's tokens: where more of them are needed, leaving out the others gains nothing."""

LONGEST_FILLER = 32
"""Tokens that fill up a row attend to so many of each other."""


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

    Answers to one prompt often begin alike, and the logprob of one target at one place is the same for all of them:
    `distinct` are the tokens of which no earlier one has it, and token s has that of number `copies[s]` among them.
    None: each has its own.
    """

    input_ids: torch.Tensor  # int64 [B, T]
    position_ids: torch.Tensor | None  # int64 [B, T]
    layout: Layout | None
    attention_mask: torch.Tensor | None  # int64 [B, T], 1 where there is a token
    logit_positions: torch.Tensor  # int64 [S]
    targets: torch.Tensor  # int64 [S]
    batch_positions: torch.Tensor  # int64 [S], where each token is in the batch
    temperature: float | torch.Tensor  # of all tokens, or float32 [S]
    distinct: torch.Tensor | None = None  # int64 [U]
    copies: torch.Tensor | None = None  # int64 [S]
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
    few_lengths: bool = False,
) -> list[Microbatch]:
    """Microbatches of at most `max_tokens` tokens (padding included); a longer sequence (or unit) gets its own.

    `proximal_logprobs` and `reference_logprobs` [S]: in the batch's order. Every `unit` neighbouring sequences stay
    together, in their order, first one first. `few_lengths`: packed rows get tokens that nothing looks at, up to one of
    the lengths that `num_rows` knows, or `max_tokens`.
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
        runs = [sequences.runs(range(i, i + unit), shared=share) for i in range(0, len(sequences), unit)]
        units = [[_Cluster(sequences, members) for members in run] for run in runs]
        chunks = _fill_whole(units, max_tokens)
    else:
        clusters = sequences.by_prompt() if share else [[i] for i in range(len(sequences))]
        chunks = _fill(sequences, clusters, max_tokens)
    fill_to = max_tokens if few_lengths else 0
    return [_pack(sequences, chunk, share=share, fill_to=fill_to) for chunk in chunks]


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
        self._responses: list[int] = batch.response_tokens.tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def response_at(self, i: int) -> int:
        """Where the first token of its response is in `tokens`."""
        return self.first_response + self.response_starts[i]

    def read_of(self, i: int) -> list[int]:
        """Its response but for the last token: nothing is predicted from that, and nothing attends to it."""
        begin = self.response_starts[i]
        return self._responses[begin : begin + max(0, self.response_lengths[i] - 1)]

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


class _Cluster:
    """Sequences of one prompt that stand in one row, and the tree of their responses."""

    def __init__(self, sequences: _Sequences, members: Sequence[int]) -> None:
        self._sequences = sequences
        self.members: list[int] = []
        self.paths: list[Path] = []
        self.tree = PrefixTree()
        for i in members:
            self.add(i)

    @property
    def first(self) -> int:
        """A sequence with this prompt."""
        return self.members[0]

    @property
    def num_tokens(self) -> int:
        return self._sequences.prompt_lengths[self.first] + self.tree.num_tokens

    @property
    def longest(self) -> int:
        return max(self._sequences.lengths[i] for i in self.members)

    def add(self, i: int) -> None:
        self.members.append(i)
        self.paths.append(self.tree.add(self._sequences.read_of(i)))

    def num_new(self, i: int) -> int:
        return self.tree.num_new(self._sequences.read_of(i))


def _fill(sequences: _Sequences, prompts: list[list[int]], max_tokens: int) -> list[list[_Cluster]]:
    """Sequences by their prompts into microbatches, longest first, so that attention finds similar lengths together."""
    chunks: list[list[_Cluster]] = []
    room = 0
    for members in sorted(prompts, key=lambda members: -max(sequences.lengths[i] for i in members)):
        cluster = None
        for i in members:
            if cluster is not None and (needed := cluster.num_new(i)) <= room:
                cluster.add(i)
            else:  # each piece of what is split repeats the prompt
                cluster = _Cluster(sequences, [i])
                needed = cluster.num_tokens
                if not chunks or needed > room:
                    chunks.append([])
                    room = max_tokens
                chunks[-1].append(cluster)
            room -= needed
    return chunks


def _fill_whole(units: list[list[_Cluster]], max_tokens: int) -> list[list[_Cluster]]:
    """Units into microbatches, longest first; no unit is ever cut."""
    chunks: list[list[_Cluster]] = []
    room = 0
    for unit in sorted(units, key=lambda unit: -max(cluster.longest for cluster in unit)):
        needed = sum(cluster.num_tokens for cluster in unit)
        if not chunks or needed > room:
            chunks.append([])
            room = max_tokens
        chunks[-1] += unit
        room -= needed
    return chunks


def _pack(sequences: _Sequences, clusters: list[_Cluster], *, share: bool, fill_to: int) -> Microbatch:
    """One row. `share`: how all prompts begin (a system prompt, the words of a template) is computed once. `fill_to`:
    the longest row that is filled up to a length that `num_rows` knows.
    """
    sources, positions, lengths = [], [], []  # of the runs of tokens that make up the row
    rows: list[tuple[int, int]] = []  # runs (start, length) of the row that response tokens are predicted from
    segments: list[Segment] = []
    runs_of_clusters: list[tuple[int, int]] = []  # runs of segments, of a prompt and what follows it
    end = 0

    def add(source: int, position: int, length: int) -> None:
        nonlocal end
        sources.append(source)
        positions.append(position)
        lengths.append(length)
        end += length

    begin = sequences.common_beginning([cluster.first for cluster in clusters]) if share else 0
    context = ((0, begin),) if begin else ()
    if begin:
        add(sequences.prompt_starts[clusters[0].first], 0, begin)
        segments.append(Segment(0, begin))
    for cluster in clusters:
        rest, prompt_length = end, sequences.prompt_lengths[cluster.first]
        add(sequences.prompt_starts[cluster.first] + begin, begin, prompt_length - begin)
        prompt = (rest, prompt_length - begin)
        branches = cluster.tree.branches
        if len(branches) != 1:
            runs_of_clusters.append((len(segments), 1 + len(branches)))
            segments.append(Segment(*prompt, context))
        starts_of = []
        for branch in branches:
            if len(branches) == 1:
                segments.append(Segment(rest, prompt[1] + branch.length, context))
            else:
                before = tuple((starts_of[number], length) for number, length in branch.before)
                segments.append(Segment(end, branch.length, (*context, prompt, *before)))
            starts_of.append(end)
            source = sequences.response_at(cluster.members[branch.sequence])
            add(source + branch.begin, prompt_length + branch.begin, branch.length)
        for i, path in zip(cluster.members, cluster.paths, strict=True):
            if sequences.response_lengths[i]:
                rows += [(rest + prompt[1] - 1, 1), *((starts_of[number], length) for number, length in path)]
    if not further(sequences.batch, "prompt_tensors"):  # else what is filled in may have rows of these
        length = min(num_rows(end), fill_to)
        for start in range(end, length, LONGEST_FILLER):
            segments.append(Segment(start, min(LONGEST_FILLER, length - start)))
            add(0, 0, segments[-1].num_queries)
    members = [i for cluster in clusters for i in cluster.members]
    logit_positions = ranges(*map(list, zip(*rows, strict=True))) if rows else torch.zeros(0, dtype=torch.int64)
    fields = sequences.fields(members)
    distinct, copies = _distinct(logit_positions, fields) if share else (None, None)
    needed = _needed(logit_positions, segments[-1].start + segments[-1].num_queries, few=bool(fill_to))
    return Microbatch(
        input_ids=sequences.tokens[ranges(sources, lengths)][None],
        position_ids=ranges(positions, lengths)[None],
        layout=replace(make_layout(segments, runs_of_clusters), needed=needed),
        attention_mask=None,
        logit_positions=logit_positions,
        **fields,
        distinct=distinct,
        copies=copies,
        prompt_tensors=sequences.prompt_tensors([cluster.first for cluster in clusters]),
    )


def _needed(logit_positions: torch.Tensor, num_tokens: int, *, few: bool) -> torch.Tensor | None:
    """`Layout.needed` of a row; `few`: as many as `num_rows` knows. None where most are."""
    is_needed = np.zeros(num_tokens, dtype=bool)
    is_needed[logit_positions.numpy()] = True
    least = max(2, int(is_needed.sum()))  # a single row may be rounded otherwise, see `linear`
    if least > MOST_NEEDED * num_tokens:
        return None
    others = np.flatnonzero(~is_needed)[: (num_rows(least) if few else least) - int(is_needed.sum())]
    is_needed[others] = True
    return torch.from_numpy(np.flatnonzero(is_needed))


def _distinct(
    logit_positions: torch.Tensor, fields: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """`distinct` and `copies` of a microbatch; None where all differ, or may differ by more than place and target."""
    if isinstance(fields["temperature"], torch.Tensor) or fields["token_tensors"]:
        return None, None
    targets = fields["targets"].numpy()
    pairs = logit_positions.numpy() * (targets.max(initial=0) + 1) + targets
    _, distinct, copies = np.unique(pairs, return_index=True, return_inverse=True)
    if len(distinct) == len(pairs):
        return None, None
    return torch.from_numpy(distinct), torch.from_numpy(copies)


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
        source = sequences.response_at(i)
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

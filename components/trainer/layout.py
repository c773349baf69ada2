"""The positions of a packed row's tokens, and what each token attends to.

Sequences lie back to back in one row. Those with the same prompt share it, and prompts share how they all begin:

    row        | begin | rest of prompt A | a1 | a2 | a3 | rest of prompt b + response b | ...
    positions  | 0 ..  | B ..             | P..| P..| P..| B ..                          | ...
    segments   |   0   |        1         | 2  | 3  | 4  |              5                | ...

A `Segment` is a run of queries and the keys they see: its own tokens, after those of its context. Linear layers see
every token once; only attention reads a shared prompt as often as there are responses. Where these are short, a prompt
and its responses are one segment with a tree mask, because kernels have an overhead for each segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..samples import ranges

# Sequences of a bucket are padded to its longest. More padding than this share of the work opens a new bucket, where
# the work is not so small that the calls cost more.
PADDING_FRAC = 0.25
SMALL_AREA = 1 << 13
# Queries x keys of a bucket with a mask of its own: 16 MB in float32, and of a pass over all of them at most that.
MAX_MASKED_AREA = 1 << 22
# A CPU kernel's overhead for each segment, forward and backward, as queries x keys that take as long.
SEGMENT_AREA = 128
# Queries x keys of the largest segment that is merged from several.
MAX_TREE_AREA = 1 << 16


@dataclass(frozen=True)
class Segment:
    """`num_queries` tokens of the row from `start`. `context`: runs (start, length) of what their sequence has before
    them, in its order. `inner`: the segments that it was merged from, in which its queries still see the same keys.
    """

    start: int
    num_queries: int
    context: tuple[tuple[int, int], ...] = ()
    inner: tuple[Segment, ...] = ()

    @property
    def num_before(self) -> int:
        return sum(length for _, length in self.context)

    @property
    def num_keys(self) -> int:
        return self.num_before + self.num_queries

    @property
    def area(self) -> int:
        return self.num_queries * self.num_keys


@dataclass(frozen=True)
class TreeMask:
    """Which keys each query of n merged segments sees: its own sequence up to itself, but no sibling's tokens.

    `visible` bool [n, Q, K]; `queries` int64 [n, Q] and `keys` [n, K]: positions in their sequences, for windows.
    """

    visible: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor

    def to(self, device: torch.device) -> TreeMask:
        return TreeMask(self.visible.to(device), self.queries.to(device), self.keys.to(device))


@dataclass(frozen=True)
class AttentionGroup:
    """n segments of similar shape, padded to Q queries and K keys; indices into the row.

    Padded entries point at token 0: as keys they lie after every query, and as queries they are never read. `offsets`
    [n]: position of each first query among its keys; None: the keys are the queries, and attention is plainly causal.
    `tree`: of merged segments (None: a query sees everything before it).
    """

    query_index: torch.Tensor  # int64 [n, Q]
    key_index: torch.Tensor  # int64 [n, K]
    offsets: torch.Tensor | None
    tree: TreeMask | None = None
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """What to add to the scores, [n or 1, 1, Q, K]; None where causal attention needs no mask.

        A query sees itself and the `window` - 1 tokens before it (None: all of them). Cached, as all layers use it.
        """
        num_queries, num_keys = self.query_index.shape[1], self.key_index.shape[1]
        if window is not None and window >= num_keys:
            window = None
        if self.offsets is None and self.tree is None and window is None:
            return None
        if (window, dtype) not in self._masks:
            device = self.query_index.device
            if self.tree is not None:
                distance = self.tree.queries[:, :, None] - self.tree.keys[:, None]
                hidden = ~self.tree.visible
            else:
                offsets = torch.zeros(1, dtype=torch.int64, device=device) if self.offsets is None else self.offsets
                # Padded queries may lie beyond all keys; they must see something too, or their softmax is 0 / 0.
                queries = (offsets[:, None] + torch.arange(num_queries, device=device)).clamp(max=num_keys - 1)
                distance = queries[:, :, None] - torch.arange(num_keys, device=device)
                hidden = distance < 0
            if window is not None:
                hidden = hidden | (distance >= window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
            self._masks[window, dtype] = mask[:, None]
        return self._masks[window, dtype]

    def gathered(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, H, D], k and v [T, H_kv, D] of the row -> [n, H, Q or K, D] each: no kernel is asked for fewer heads of
        keys than of queries.
        """
        queries, keys, values = (
            x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:]).transpose(1, 2)
            for x, index in ((q, self.query_index), (k, self.key_index), (v, self.key_index))
        )
        if (groups := q.shape[1] // k.shape[1]) > 1:
            keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        return queries, keys, values

    def to(self, device: torch.device) -> AttentionGroup:
        offsets = None if self.offsets is None else self.offsets.to(device)
        tree = None if self.tree is None else self.tree.to(device)
        return AttentionGroup(self.query_index.to(device), self.key_index.to(device), offsets, tree)


@dataclass(frozen=True)
class Layout:
    """A packed row of T tokens as attention needs it, in two forms of the same thing.

    Padded: `buckets`, and `restore` [T] from their flattened queries, laid end to end, back to the row. Variable
    length: the segments' queries in the row's order, cut at `query_starts` [n + 1], and their keys `key_index` cut at
    `key_starts` [n + 1], causal from the lower right.

    `needed`: in order, the tokens whose hidden states the head reads, and perhaps some others; None: it may read any.
    """

    buckets: list[AttentionGroup]
    restore: torch.Tensor  # int64 [T]
    query_starts: torch.Tensor  # int32 [n + 1]
    key_starts: torch.Tensor  # int32 [n + 1]
    key_index: torch.Tensor | None  # int64 [sum of keys]; None: the row itself
    max_queries: int
    max_keys: int
    needed: torch.Tensor | None = None  # int64 [U]

    def in_row(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[n, H, Q, D] of each bucket -> [T, H, D]"""
        rows = [part.transpose(1, 2).flatten(0, 1) for part in parts]
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).index_select(0, self.restore)

    def to(self, device: torch.device) -> Layout:
        if device == self.restore.device:
            return self
        return Layout(
            [b.to(device) for b in self.buckets],
            self.restore.to(device),
            self.query_starts.to(device),
            self.key_starts.to(device),
            None if self.key_index is None else self.key_index.to(device),
            self.max_queries,
            self.max_keys,
            None if self.needed is None else self.needed.to(device),
        )


def padded_layout(num_rows: int, width: int, device: torch.device) -> Layout:
    """Rows of `width` tokens, each attending to itself."""
    index = torch.arange(num_rows * width, device=device)
    starts = torch.arange(0, num_rows * width + 1, width, dtype=torch.int32, device=device)
    rows = index.view(num_rows, width)
    return Layout([AttentionGroup(rows, rows, None)], index, starts, starts, None, width, width)


def make_layout(segments: Sequence[Segment], clusters: Sequence[tuple[int, int]] = ()) -> Layout:
    """The layout of a row that `segments` cover from end to end, in order.

    `clusters`: runs (first, number) of neighbouring segments, a prompt and what follows it: the others have the first
    one in their context, after what it has in its own.
    """
    assert all(a.start + a.num_queries == b.start for a, b in itertools.pairwise(segments))
    num_tokens = segments[-1].start + segments[-1].num_queries
    queries = torch.tensor([s.num_queries for s in segments])
    keys = torch.tensor([s.num_keys for s in segments])
    positions = ranges((keys - queries).tolist(), queries.tolist()) if clusters else None
    buckets, restore, done = [], torch.empty(num_tokens, dtype=torch.int64), 0
    for chosen in _bucket(_merged(segments, clusters)):
        bucket, places = _pad(chosen, positions)
        restore[bucket.query_index.flatten()[places]] = places + done
        done += bucket.query_index.numel()
        buckets.append(bucket)
    return Layout(
        buckets,
        restore,
        _starts(queries),
        _starts(keys),
        _keys(segments) if any(s.context for s in segments) else None,
        int(queries.max()),
        int(keys.max()),
    )


def _merged(segments: Sequence[Segment], clusters: Sequence[tuple[int, int]]) -> list[Segment]:
    """The same, with each cluster merged into one segment where that is less work."""
    merged, done = [], 0
    for first, number in clusters:
        own = segments[first : first + number]
        whole = Segment(own[0].start, sum(s.num_queries for s in own), own[0].context, tuple(own))
        apart = sum(s.area + SEGMENT_AREA for s in own)
        if number > 1 and whole.area <= MAX_TREE_AREA and whole.area + SEGMENT_AREA < apart:
            merged += [*segments[done:first], whole]
            done = first + number
    return [*merged, *segments[done:]]


def _bucket(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments of similar shape and one kind together, largest first."""
    buckets: list[list[Segment]] = []
    # Kinds: 2 merged, 1 with a context, 0 neither.
    shapes = [(2 if s.inner else int(bool(s.context)), s.num_keys, s.num_queries) for s in segments]
    queries = keys = work = 0  # the widest of the last bucket, and its area without padding
    last_kind = None
    for i in sorted(range(len(segments)), key=shapes.__getitem__, reverse=True):
        kind, num_keys, num_queries = shapes[i]
        if num_queries == 0:
            continue
        own, widest = num_queries * num_keys, max(queries, num_queries)
        area = widest * keys * (len(buckets[-1]) + 1) if buckets else 0
        fits = area <= (1 + PADDING_FRAC) * (work + own) + SMALL_AREA and (area <= MAX_MASKED_AREA or kind == 0)
        if fits and kind == last_kind:
            buckets[-1].append(segments[i])
            queries, work = widest, work + own
        else:
            buckets.append([segments[i]])
            queries, keys, work, last_kind = num_queries, num_keys, own, kind
    return buckets


def _pad(segments: Sequence[Segment], positions: torch.Tensor | None) -> tuple[AttentionGroup, torch.Tensor]:
    """The bucket of these segments, and where in its flattened queries the row's own tokens are. `positions` int64 [T]
    of the row's tokens (None: no segment is merged).
    """
    own = torch.tensor([s.num_queries for s in segments])[:, None]
    before = torch.tensor([s.num_before for s in segments])[:, None]
    keys = torch.arange(int((before + own).max()))
    key_index = torch.zeros(len(segments), len(keys), dtype=torch.int64)
    key_index[keys < before + own] = _keys(segments)
    width = int(own.max())
    are_merged = bool(segments[0].inner)
    if not are_merged and (not int(before.max()) or width * len(keys) > MAX_MASKED_AREA):
        # A mask for such a long response costs more than computing the prompt's queries again and dropping them.
        real = (keys >= before) & (keys < before + own)
        return AttentionGroup(key_index, key_index, None), real.flatten().nonzero()[:, 0]
    queries = torch.arange(width)
    starts = torch.tensor([s.start for s in segments])[:, None]
    query_index = torch.where(queries < own, starts + queries, 0)
    places = (queries < own).flatten().nonzero()[:, 0]
    if not are_merged:
        return AttentionGroup(query_index, key_index, before[:, 0]), places
    assert positions is not None, "there are clusters"
    tree = TreeMask(_visible(segments, width, len(keys)), positions[query_index], positions[key_index])
    return AttentionGroup(query_index, key_index, None, tree), places


def _visible(segments: Sequence[Segment], num_queries: int, num_keys: int) -> torch.Tensor:
    """`TreeMask.visible` of merged segments."""
    # Each inner segment sees each of its runs of keys: a rectangle of queries x keys, in which the numbers at its
    # corners add up to 1. Rectangles do not overlap; the keys after a query, in its own segment, are cut off below.
    corners: list[tuple[int, int, int, int, int]] = []
    for n, segment in enumerate(segments):
        own = segment.num_before - segment.start  # from places in the row to keys
        for s in segment.inner:
            first, last = s.start - segment.start, s.start - segment.start + s.num_queries
            corners.append((n, first, last, 0, segment.num_before))
            for start, length in (*s.context[len(segment.context) :], (s.start, s.num_queries)):
                corners.append((n, first, last, own + start, own + start + length))
    n, first, last, begin, end = np.array(corners).T
    added = np.zeros((len(segments), num_queries + 1, num_keys + 1), dtype=np.int8)
    for queries, keys, sign in ((first, begin, 1), (last, begin, -1), (first, end, -1), (last, end, 1)):
        np.add.at(added, (n, queries, keys), sign)
    visible = added.cumsum(1, dtype=np.int8).cumsum(2, dtype=np.int8)[:, :-1, :-1] > 0
    before = np.array([s.num_before for s in segments])
    visible &= np.arange(num_keys) <= before[:, None, None] + np.arange(num_queries)[:, None]
    visible[:, :, 0] = True  # every sequence begins there; padded queries must see something too
    return torch.from_numpy(visible)


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)


def _keys(segments: Sequence[Segment]) -> torch.Tensor:
    """Where the keys of each segment are in the row, end to end."""
    runs = [run for s in segments for run in (*s.context, (s.start, s.num_queries))]
    return ranges([start for start, _ in runs], [length for _, length in runs])

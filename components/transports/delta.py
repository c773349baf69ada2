"""Only what changed: differences between versions, on top of another transport (`param_server.delta`).

    version 7       version 8            version 9            ...
    whole           changed since 7      changed since 8
      a receiver that holds 7 fetches --------^--------------------^
      one that holds nothing fetches 7 whole, then these

A bucket is compared with what left last, in words of two bytes, and the changed words travel with their places. Where
that would be more than half of the bucket (in float32 nearly every weight changes at every step) the bucket travels
whole. After `MAX_CHAIN` versions, or when the differences add up to half a version, a whole one is sent beside
the difference, for receivers that come new. The digest says which version a difference applies to, and checksums are
those of the result: the checks of `WeightSync` catch what goes wrong here.

Rank 0 keeps the bytes that left last, and each receiver the version that it verified last: one more copy of the weights
in each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..weights import Canary, CanaryPrompts, Manifest, Publication
from .transport import Held, Outgoing, WeightTransport

MAX_CHAIN = 8
"""Versions that a receiver may be behind, and still fetches differences only."""
WORTH_IT = 0.5
"""A difference of a larger share of its bucket saves less than it costs to make and to apply."""
BLOCK = 1 << 16
"""Words that are compared at a time: a place in them has two bytes, and what is found stays in the cache."""
PROBED = 16
"""One block in so many is looked at first: most buckets that travel whole are known after that."""
WORD, COUNT = np.dtype("<u2"), np.dtype("<u4")


@dataclass(frozen=True)
class _Piece:
    """One bucket's bytes, or a difference: what was put below as the `index`th of the `number`th version."""

    number: int
    publication: Publication
    index: int
    num_bytes: int


@dataclass(frozen=True)
class _Chain:
    """One bucket of one version: all that is needed to make it.

    `whole`: its bytes in the version with the digest `whole_at`. `changes`: (digest of the version that it applies to,
    difference), oldest first; they may begin before `whole_at`.
    """

    whole: _Piece
    whole_at: str
    changes: tuple[tuple[str, _Piece], ...] = ()

    def since(self, digest: str) -> list[_Piece] | None:
        """What to apply, in turn, to a version with this digest; None where that is not known."""
        for index in reversed(range(len(self.changes))):
            if self.changes[index][0] == digest:
                return [piece for _, piece in self.changes[index:]]
        return None

    def since_whole(self) -> list[_Piece]:
        return self.since(self.whole_at) or []

    def oldest(self) -> int:
        return min(piece.number for piece in (self.whole, *(piece for _, piece in self.changes)))


class Delta:
    """Differences over `below`, whose `keep` follows what the last versions are made of."""

    uses_held = True

    def __init__(self, below: WeightTransport) -> None:
        self._below = below
        self.keep = below.keep
        self._last: list[np.ndarray] = []
        self._digest = ""
        self._chains: list[_Chain] = []
        self._num_sent = 0
        self._oldest: list[int] = []

    @property
    def memory_bytes(self) -> int:
        return sum(bucket.nbytes for bucket in self._last) + self._below.memory_bytes

    def places(self, publication: Publication) -> tuple[()]:
        return ()

    def begin(self, policy_version: int) -> _Sending:
        changed = self._below.begin(policy_version)
        try:
            return _Sending(self, changed, self._below.begin(policy_version) if self._whole_is_due() else None)
        except BaseException:
            changed.discard()
            raise

    async def fetch(self, publication: Publication, index: int, into: np.ndarray, held: Held | None = None) -> int:
        chain: _Chain = publication.bucket_refs[index]
        changes, base = None, _bucket_of(held, index, into.nbytes)
        if held is not None and base is not None:
            same = held.manifest.digest == publication.manifest.digest
            changes = [] if same else chain.since(held.manifest.digest)
        if changes is None or base is None:
            changes = chain.since_whole()
            fetched = await self._below.fetch(chain.whole.publication, chain.whole.index, into)
        else:
            fetched = 0
            await asyncio.to_thread(np.copyto, into, base)
        for piece in changes:
            change = np.empty(piece.num_bytes, dtype=np.uint8)
            fetched += await self._below.fetch(piece.publication, piece.index, change)
            await asyncio.to_thread(apply_change, change, into)
        return fetched

    def close(self) -> None:
        self._below.close()

    def _whole_is_due(self) -> bool:
        """A receiver that comes new would have too much to fetch."""
        since = [chain.since_whole() for chain in self._chains]
        num_bytes = sum(piece.num_bytes for pieces in since for piece in pieces)
        whole_bytes = sum(chain.whole.num_bytes for chain in self._chains)
        return max(map(len, since), default=0) >= MAX_CHAIN or num_bytes > WORTH_IT * whole_bytes

    def _change(self, index: int, bucket: np.ndarray) -> np.ndarray | None:
        """What changed in a bucket since it left last; None: all of it goes. From now on, this is what left last."""
        if index < len(self._last) and self._last[index].nbytes == bucket.nbytes:
            if (change := take_change(self._last[index], bucket)) is None:
                np.copyto(self._last[index], bucket)
            return change
        self._last[index:] = [bucket.copy()]
        return None

    def _commit(
        self,
        manifest: Manifest,
        sizes: Sequence[int],
        is_change: Sequence[bool],
        changed: Outgoing,
        whole: Outgoing | None,
    ) -> Publication:
        """`changed`: of each bucket all bytes or its difference, with their `sizes`; `whole`: all bytes of each."""
        # What later versions are made of carries no manifest.
        at_whole, at_changed = (Publication(_described(manifest, []), []) for _ in range(2))
        number = self._num_sent + (whole is not None)
        chains = []
        for index, (size, changes) in enumerate(zip(sizes, is_change, strict=True)):
            piece = _Piece(number, at_changed, index, size)
            if not changes:
                chains.append(_Chain(piece, manifest.digest))
                continue
            before = self._chains[index]
            after = replace(before, changes=(*before.changes, (self._digest, piece))[-MAX_CHAIN:])
            if whole is not None:
                whole_piece = _Piece(self._num_sent, at_whole, index, manifest.bucket_bytes[index])
                after = replace(after, whole=whole_piece, whole_at=manifest.digest)
            chains.append(after)
        oldest = [*self._oldest, min(chain.oldest() for chain in chains)][-self.keep :]
        self._below.keep = number + 1 - min(oldest)  # before the commits, which make room
        if whole is not None:
            at_whole.bucket_refs.extend(whole.commit(manifest).bucket_refs)
        described = _described(manifest, sizes) if any(is_change) else manifest
        at_changed.bucket_refs.extend(changed.commit(described).bucket_refs)
        self._chains, self._digest, self._num_sent, self._oldest = chains, manifest.digest, number + 1, oldest
        return Publication(manifest, list(chains))

    def _forget(self) -> None:
        """Nobody knows what left last: the next version goes whole."""
        self._last, self._chains, self._digest = [], [], ""


class _Sending:
    def __init__(self, delta: Delta, changed: Outgoing, whole: Outgoing | None) -> None:
        self._delta = delta
        self._changed = changed
        self._whole = whole
        self._sizes: list[int] = []
        self._is_change: list[bool] = []

    def put(self, bucket: np.ndarray) -> None:
        change = self._delta._change(len(self._sizes), bucket)
        sent = bucket if change is None else change
        self._sizes.append(sent.nbytes)
        self._is_change.append(change is not None)
        self._changed.put(sent)
        if self._whole is not None:
            self._whole.put(bucket)

    def commit(self, manifest: Manifest) -> Publication:
        return self._delta._commit(manifest, self._sizes, self._is_change, self._changed, self._whole)

    def discard(self) -> None:
        self._delta._forget()
        self._changed.discard()
        if self._whole is not None:
            self._whole.discard()


def _bucket_of(held: Held | None, index: int, num_bytes: int) -> np.ndarray | None:
    if held is None or index >= len(held.buckets) or held.buckets[index].nbytes != num_bytes:
        return None
    return held.buckets[index]


def _described(manifest: Manifest, sizes: Sequence[int]) -> Manifest:
    """A manifest without tensors: what it describes is no version that can be used by itself."""
    nothing = Canary(CanaryPrompts([], []), [], [], [])
    return replace(manifest, entries=[], bucket_bytes=list(sizes), canary=nothing)


def take_change(last: np.ndarray, bucket: np.ndarray) -> np.ndarray | None:
    """The difference that makes `bucket` of `last` (both uint8, of one size), which becomes equal to it.

    How many words changed in each block (uint32), where in their block (uint16), what they became, and the odd last
    byte. None, and `last` stays, where that would not be worth it.
    """
    before, after = _words(last), _words(bucket)
    starts = range(0, len(after), BLOCK)
    most = (WORTH_IT * bucket.nbytes - len(starts) * COUNT.itemsize - 1) / (2 * WORD.itemsize)
    probed = sum(np.count_nonzero(_differ(before, after, start)) for start in starts[::PROBED])
    if most < 0 or probed * len(starts) > most * len(starts[::PROBED]):
        return None
    found = [np.flatnonzero(_differ(before, after, start)).astype(WORD) for start in starts]
    counts = np.array([len(positions) for positions in found], dtype=COUNT)
    if counts.sum() > most:
        return None
    words = [after[start : start + BLOCK][positions] for start, positions in zip(starts, found, strict=True)]
    for start, positions, became in zip(starts, found, words, strict=True):
        before[start : start + BLOCK][positions] = became
    last[before.nbytes :] = bucket[before.nbytes :]
    return np.concatenate([part.view(np.uint8) for part in (counts, *found, *words, bucket[before.nbytes :])])


def apply_change(change: np.ndarray, bucket: np.ndarray) -> None:
    """Make of `bucket` what it became. Raises ValueError or IndexError for bytes that are no difference of its size."""
    words = _words(bucket)
    starts, odd = range(0, len(words), BLOCK), bucket.nbytes - words.nbytes
    counts = change[: len(starts) * COUNT.itemsize]
    if counts.nbytes == len(starts) * COUNT.itemsize:
        counts = counts.view(COUNT)
        total = int(counts.sum(dtype=np.int64))
        if change.nbytes == counts.nbytes + 2 * WORD.itemsize * total + odd:
            both = change[counts.nbytes : change.nbytes - odd].view(WORD)
            positions, became, end = both[:total], both[total:], 0
            for start, count in zip(starts, counts.tolist(), strict=True):
                of_block = slice(end, end := end + count)
                words[start : start + BLOCK][positions[of_block]] = became[of_block]
            bucket[words.nbytes :] = change[change.nbytes - odd :]
            return
    raise ValueError(f"{change.nbytes} bytes are no difference of a bucket of {bucket.nbytes}")


def _words(bucket: np.ndarray) -> np.ndarray:
    return bucket[: bucket.nbytes - bucket.nbytes % WORD.itemsize].view(WORD)


def _differ(before: np.ndarray, after: np.ndarray, start: int) -> np.ndarray:
    return before[start : start + BLOCK] != after[start : start + BLOCK]

"""Published weights: the form of a policy version in transit from the trainer to the engines.

A publication is a `Manifest` and a few flat byte buckets. The manifest lists every tensor under its Hugging Face name
with its place in the buckets and its SHA-256, and carries a `Canary`: a few token sequences with the log-probabilities
the *trainer* gives them under exactly these weights, so that whoever loads them can prove it computes the same
function.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the parameter server handles references only: without torch it starts 2 s sooner, 300 MB smaller
    import torch


class WeightSyncError(RuntimeError):
    """A weight sync failed a check (`bytes`, `load`, `compute`, `version`): the engine must not serve these weights."""

    def __init__(self, check: str, policy_version: int, detail: str) -> None:
        super().__init__(check, policy_version, detail)
        self.check, self.policy_version, self.detail = check, policy_version, detail

    def __str__(self) -> str:
        return f"weight sync of policy version {self.policy_version} failed the {self.check} check: {self.detail}"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a publication: bytes `[offset, offset + num_bytes)` of a bucket; tied tensors share their bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class CanaryPrompts:
    """Fixed token sequences that every published version is scored on.

    `scored`: realistic sequences (a prompt and its answer), of any lengths. `cached`: contexts longer than one block of
    the engine's prefix cache, after which one further token is requested.
    """

    scored: list[list[int]]
    cached: list[list[int]]


@dataclass(frozen=True)
class Canary:
    """The trainer's results on the canary prompts under one version, at temperature 1.

    `logprobs[c][t]` is the log-probability of token t + 1 of `prompts.scored[c]` after tokens 0..t. `next_tokens[c]` is
    the likeliest token after `prompts.cached[c]`, and `next_logprobs[c]` its log-probability: the token that floating
    point disturbs least, in contexts that are not what the policy was trained on.
    """

    prompts: CanaryPrompts
    logprobs: list[list[float]]
    next_tokens: list[int]
    next_logprobs: list[float]


@dataclass(frozen=True)
class CanaryGap:
    """Largest |logprob difference| of an engine from a canary, in nats, by route; see `Engine.score`."""

    scored: float
    cached: float

    @property
    def largest(self) -> float:
        """NaN if either is: `max` alone loses a NaN that does not come first."""
        return math.nan if math.isnan(self.scored) or math.isnan(self.cached) else max(self.scored, self.cached)

    def within(self, tolerance: float) -> bool:
        return self.largest <= tolerance

    def __str__(self) -> str:
        return f"{self.scored:.3g} nats on scored prompts, {self.cached:.3g} after prompts in the prefix cache"


@dataclass(frozen=True)
class Manifest:
    """One published policy version."""

    policy_version: int
    entries: list[TensorEntry]
    num_buckets: int
    num_bytes: int
    canary: Canary
    digest: str

    def check(self) -> None:
        """Raises `WeightSyncError` if the entries are not those that were published."""
        if (got := digest_of(self.entries)) != self.digest:
            raise WeightSyncError(
                "bytes",
                self.policy_version,
                f"the manifest's digest is {self.digest[:16]}, its entries give {got[:16]}",
            )


def digest_of(entries: Iterable[TensorEntry]) -> str:
    """One SHA-256 over names, types, shapes and contents of all tensors."""
    lines = sorted(f"{e.name} {e.dtype} {e.shape} {e.sha256}" for e in entries)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Publication:
    """A manifest and where its buckets are.

    A bucket reference is opaque here: only the transport can resolve it.
    """

    manifest: Manifest
    bucket_refs: list[Any]


def sha256_of(data: torch.Tensor) -> str:
    """SHA-256 of a uint8 CPU tensor."""
    return hashlib.sha256(data.numpy().data).hexdigest()


ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes in their bucket, so that any dtype can be viewed there."""


@dataclass(frozen=True)
class TensorSpan:
    """One tensor's bytes in its bucket. Tied tensors share one span under several names, and cost no extra bytes."""

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def data(self, memory: torch.Tensor) -> torch.Tensor:
        """Its bytes in the bucket's memory (uint8), as a view."""
        return memory[self.offset : self.offset + self.num_bytes]

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor itself, as a view of the bucket's memory."""
        return self.data(memory).view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class BucketPlan:
    """What one bucket will hold: made from names, types and shapes alone, so every rank makes the same."""

    index: int
    spans: list[TensorSpan]
    num_bytes: int

    def empty(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Memory for it, uint8 [num_bytes]; the gaps between tensors are zero, the tensors uninitialized."""
        import torch

        memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        for span, next_span in itertools.pairwise(self.spans):
            memory[span.offset + span.num_bytes : next_span.offset] = 0
        return memory

    def entries(self, hashes: Iterable[str]) -> list[TensorEntry]:
        """The manifest's entries for it; `hashes`: the SHA-256 of each span."""
        return [
            TensorEntry(
                name,
                str(span.dtype).removeprefix("torch."),
                span.shape,
                self.index,
                span.offset,
                span.num_bytes,
                sha256,
            )
            for span, sha256 in zip(self.spans, hashes, strict=True)
            for name in span.names
        ]


def plan_buckets(
    tensors: Iterable[tuple[Sequence[str], torch.dtype, Sequence[int]]], bucket_bytes: int
) -> list[BucketPlan]:
    """Lay tensors (names, type, shape) in sequence into buckets of at most `bucket_bytes`.

    A tensor is never split: one that is larger than a bucket gets its own bucket of its own size.
    """
    buckets: list[list[TensorSpan]] = []
    end = 0
    for names, dtype, shape in tensors:
        span = TensorSpan(tuple(names), dtype, tuple(shape), offset=end + -end % ALIGNMENT)
        if not buckets or span.offset + span.num_bytes > bucket_bytes:
            span = replace(span, offset=0)
            buckets.append([])
        buckets[-1].append(span)
        end = span.offset + span.num_bytes
    return [BucketPlan(i, spans, spans[-1].offset + spans[-1].num_bytes) for i, spans in enumerate(buckets)]


def read_bucket(
    bucket: torch.Tensor, entries: Iterable[TensorEntry], *, policy_version: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Named tensors of one bucket, as views of its bytes; each is checked against its hash before it is yielded."""
    import torch

    for entry in entries:
        data = bucket[entry.offset : entry.offset + entry.num_bytes]
        if sha256_of(data) != entry.sha256:
            raise WeightSyncError(
                "bytes", policy_version, f"tensor {entry.name} does not match its SHA-256 in the manifest"
            )
        yield entry.name, data.view(getattr(torch, entry.dtype)).view(entry.shape)

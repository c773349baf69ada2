"""Published weights: what a policy version looks like on its way from the trainer to the engines.

A publication is a `Manifest` and a few flat byte buckets. The manifest lists every tensor under its Hugging Face name
with its place in the buckets and its SHA-256, and carries a `Canary`: a few token sequences with the log-probabilities
the *trainer* gives them under exactly these weights, so that whoever loads them can prove it computes the same
function.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


class HandOverError(RuntimeError):
    """A hand-over failed a check (`bytes`, `load`, `compute`, `floor`): the engine must not serve these weights."""

    def __init__(self, check: str, policy_version: int, detail: str) -> None:
        super().__init__(check, policy_version, detail)
        self.check, self.policy_version, self.detail = check, policy_version, detail

    def __str__(self) -> str:
        return f"hand-over of policy version {self.policy_version} failed the {self.check} check: {self.detail}"


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

    `scored`: as the policy meets them (a prompt and its answer), of any lengths. `cached`: contexts of more than one
    block of the engine's prefix cache, after which one further token is asked for.
    """

    scored: list[list[int]]
    cached: list[list[int]]


@dataclass(frozen=True)
class Canary:
    """What the trainer says of the canary prompts under one version, at temperature 1.

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
    """Largest |logprob difference| of an engine from a canary, in nats, by its two routes; see `Engine.score`."""

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
        """Raises `HandOverError` when the entries are not those that were published."""
        if (got := digest_of(self.entries)) != self.digest:
            raise HandOverError(
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

    A bucket reference is opaque here: it is whatever the transport resolves.
    """

    manifest: Manifest
    bucket_refs: list[Any]


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as uint8 [num_bytes], without a copy where it is contiguous and on the CPU."""
    return tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)


def sha256_of(data: torch.Tensor) -> str:
    """SHA-256 of a uint8 CPU tensor."""
    return hashlib.sha256(data.numpy().data).hexdigest()


class BucketWriter:
    """Lays a stream of named tensors into buckets of at most `bucket_bytes` (a larger tensor gets a bucket of its own).

    `add` copies, so the caller may let its tensor go at once. A tensor that was already added under another name
    (`alias_of`) costs no bytes: its entry points at the same place.
    """

    ALIGNMENT = 64

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._pieces: list[torch.Tensor] = []
        self._size = 0
        self._pending: list[tuple[str, str, tuple[int, ...], int, int]] = []
        self._full: list[torch.Tensor] = []
        self._places: list[tuple[str, str, tuple[int, ...], int, int, int]] = []
        self._aliases: list[tuple[str, str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        data = tensor_bytes(tensor).clone()
        if self._size and self._size + data.numel() > self._bucket_bytes:
            self._close_bucket()
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._places.append((name, dtype, tuple(tensor.shape), len(self._full), self._size, data.numel()))
        padding = -data.numel() % self.ALIGNMENT
        self._pieces += [data, torch.zeros(padding, dtype=torch.uint8)]
        self._size += data.numel() + padding

    def add_alias(self, name: str, *, alias_of: str) -> None:
        self._aliases.append((name, alias_of))

    def _close_bucket(self) -> None:
        self._full.append(torch.cat(self._pieces))
        self._pieces, self._size = [], 0

    def finish(self) -> tuple[list[TensorEntry], list[torch.Tensor]]:
        """All entries and all buckets (uint8); hashing happens here, so that it can run beside the next step."""
        if self._pieces:
            self._close_bucket()
        entries = [
            TensorEntry(name, dtype, shape, bucket, offset, size, sha256_of(self._full[bucket][offset : offset + size]))
            for name, dtype, shape, bucket, offset, size in self._places
        ]
        by_name = {e.name: e for e in entries}
        for name, alias_of in self._aliases:
            e = by_name[alias_of]
            entries.append(TensorEntry(name, e.dtype, e.shape, e.bucket, e.offset, e.num_bytes, e.sha256))
        return entries, self._full


def read_bucket(
    bucket: torch.Tensor, entries: Iterable[TensorEntry], *, policy_version: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Named tensors of one bucket, as views of its bytes; each is checked against its hash before it is handed out."""
    for entry in entries:
        data = bucket[entry.offset : entry.offset + entry.num_bytes]
        if sha256_of(data) != entry.sha256:
            raise HandOverError(
                "bytes", policy_version, f"tensor {entry.name} does not match its SHA-256 in the manifest"
            )
        yield entry.name, data.view(getattr(torch, entry.dtype)).view(entry.shape)

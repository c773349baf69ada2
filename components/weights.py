"""Published weights: the form of a policy version in transit from the trainer to the engines.

A publication is a `Manifest` and a few flat byte buckets. The manifest lists every tensor under its Hugging Face name
with its place in the buckets and its checksum, and carries a `Canary`: a few token sequences with the log-probabilities
the *trainer* gives them under exactly these weights, so that whoever loads them can prove it computes the same
function. How the bytes travel is a transport's affair (`transports/`); what they must be is written here.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import xxhash

if TYPE_CHECKING:  # the parameter server handles references only: without torch it starts 2 s sooner, 300 MB smaller
    import numpy as np
    import torch

Checksum = Literal["xxh3_128", "sha256"]
"""What bytes in transit are checked with. xxh3_128 finds every accident, at the speed of a copy (11 GB/s on one core);
sha256 (1.1 GB/s) is for stores that others can write, because nobody can make other bytes to fit it."""


class WeightSyncError(RuntimeError):
    """A weight sync failed a check: the engine must not serve these weights.

    `check`: "transfer" (a bucket did not arrive), "bytes", "load", "compute", "version", or "base" (the weights that an
    adapter is added to are not the trainer's).
    """

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
    checksum: str


@dataclass(frozen=True)
class CanaryPrompts:
    """Fixed token sequences that every published version is scored on, all of them or the first few.

    `scored`: realistic sequences (a prompt and its answer), of any lengths. `cached`: contexts longer than one block of
    the engine's prefix cache, after which one further token is requested.
    """

    scored: list[list[int]]
    cached: list[list[int]]

    def longest(self) -> list[list[int]]:
        """Those that no other one begins with: a pass over them is one over all."""
        whole: list[list[int]] = []
        for sequence in sorted([*self.scored, *self.cached], key=len, reverse=True):
            if not any(longer[: len(sequence)] == sequence for longer in whole):
                whole.append(sequence)
        return whole

    def within(self, num_tokens: float) -> CanaryPrompts:
        """As many of each kind as a pass over so many tokens scores, and at least the first of each."""
        for number in range(max(len(self.scored), len(self.cached)), 1, -1):
            fewer = CanaryPrompts(self.scored[:number], self.cached[:number])
            if sum(map(len, fewer.longest())) <= num_tokens:
                return fewer
        return CanaryPrompts(self.scored[:1], self.cached[:1])


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
    """|logprob difference| of an engine from a canary, in nats: the largest by each route, see `Engine.score`, and the
    mean over the scored prompts' tokens.
    """

    scored: float
    cached: float
    mean: float

    @classmethod
    def of(cls, scored: Sequence[float], cached: Sequence[float]) -> CanaryGap:
        """From the differences of all tokens. NaN if any is: `max` alone loses a NaN that does not come first."""

        def largest(gaps: Sequence[float]) -> float:
            return math.nan if any(map(math.isnan, gaps)) else max(gaps, default=0.0)

        return cls(largest(scored), largest(cached), sum(scored) / max(1, len(scored)))

    @property
    def largest(self) -> float:
        """NaN if either is: `max` alone loses a NaN that does not come first."""
        return math.nan if math.isnan(self.scored) or math.isnan(self.cached) else max(self.scored, self.cached)

    def __str__(self) -> str:
        return (
            f"{self.scored:.3g} nats on scored prompts ({self.mean:.3g} on average), "
            f"{self.cached:.3g} after prompts in the prefix cache"
        )


LARGEST_VARIES = 3.0
"""How much further than their mean the largest of some hundred gaps may move from version to version. Measured with
SmolLM2-135M in bfloat16: the mean from 0.056 to 0.062, the largest from 0.20 to 0.66."""
ONE_TOKEN = 8.0
"""Times the type's resolution: what is taken for the largest gap proven where that was less, so that in bfloat16 single
tokens may be off by 0.375 nats. Measured with SmolLM2-135M on the engine `hf`, which rounds as its trainer does: one
token of ninety off by 0.105 in some versions, and no other by more than 0.0003."""


@dataclass(frozen=True)
class Tolerance:
    """The gap on the canary that passes for rounding, in nats: the `largest` of any token, and the `mean` of all.

    With a `factor` these are ceilings, and the tolerance is calibrated: the mean is held to `factor` times the largest
    mean that was `proven`, that of a load which passed every check, or times `least`, the resolution of the type, if
    that is more; single tokens likewise, with `LARGEST_VARIES` and `ONE_TOKEN` in addition. Engine and trainer round
    differently, and each always in the same way: an engine that loads the same weights again has the same gap to the
    last bit, so a second load says nothing. The first one that is read back, bit for bit, says how far the two are
    apart on equal weights. Later ones count too, because rounding grows with the logits.
    """

    largest: float
    mean: float | None = None
    factor: float | None = None
    least: float = 0.0
    proven: CanaryGap | None = None

    @property
    def limits(self) -> CanaryGap:
        """What the next load's gap is held to."""
        if self.factor is None or self.mean is None:
            return CanaryGap(self.largest, self.largest, self.largest)
        if self.proven is None:  # there must be room for its multiple
            return CanaryGap(self.largest, self.largest, self.mean / self.factor)
        gap, of_one = self.proven, LARGEST_VARIES * self.factor
        return CanaryGap(
            scored=min(self.largest, of_one * max(gap.scored, ONE_TOKEN * self.least)),
            # A few contexts, each with its likeliest token: a gap of nearly 0 says little of the next one.
            cached=min(self.largest, of_one * max(gap.cached, gap.mean, self.least)),
            mean=min(self.mean, self.factor * max(gap.mean, self.least)),
        )

    def allows(self, gap: CanaryGap) -> bool:
        most = self.limits
        return gap.scored <= most.scored and gap.cached <= most.cached and gap.mean <= most.mean  # nan is not

    def after(self, gap: CanaryGap) -> Tolerance:
        """For the load after one that passed every check."""
        old = self.proven or gap
        most = CanaryGap(max(old.scored, gap.scored), max(old.cached, gap.cached), max(old.mean, gap.mean))
        return replace(self, proven=most)

    def __str__(self) -> str:
        if self.factor is None:
            return f"param_server.served_tolerance is {self.largest:g}"
        if self.proven is None:
            return (
                f"param_server.served_tolerance=auto expects of an engine's first load at most {self.limits}; where it "
                "is rounding, set model.head_dtype=float32, model.dtype=float16, or a number"
            )
        return f"param_server.served_tolerance=auto came to {self.limits} by the loads before"


@dataclass(frozen=True)
class Manifest:
    """One published policy version. `bucket_bytes`: the size of each bucket.

    `base`: of an adapter, the digest of the weights that it is added to, which do not travel; "": of whole weights.
    """

    policy_version: int
    entries: list[TensorEntry]
    bucket_bytes: list[int]
    canary: Canary
    digest: str
    checksum: Checksum = "xxh3_128"
    base: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(self.bucket_bytes)

    def entries_of(self, bucket: int) -> list[TensorEntry]:
        return [e for e in self.entries if e.bucket == bucket]

    def check(self) -> None:
        """Raises `WeightSyncError` unless the entries are those that were published and each lies in its bucket."""
        if (got := digest_of(self.entries)) != self.digest:
            raise self.error("bytes", f"the manifest's digest is {self.digest[:16]}, its entries give {got[:16]}")
        for e in self.entries:
            inside = 0 <= e.bucket < len(self.bucket_bytes) and e.offset >= 0
            if not inside or e.num_bytes < 0 or e.offset + e.num_bytes > self.bucket_bytes[e.bucket]:
                raise self.error("bytes", f"tensor {e.name} is not inside of a bucket")

    def error(self, check: str, detail: str) -> WeightSyncError:
        return WeightSyncError(check, self.policy_version, detail)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """The inverse of `to_json`. Raises ValueError for anything else, which runs nothing."""
        try:
            given = json.loads(text)
            canary = given["canary"]
            return cls(
                policy_version=_of(int, given["policy_version"]),
                entries=[_entry(**entry) for entry in given["entries"]],
                bucket_bytes=[_of(int, size) for size in given["bucket_bytes"]],
                canary=Canary(**canary | {"prompts": CanaryPrompts(**canary["prompts"])}),
                digest=_of(str, given["digest"]),
                checksum=_of(str, given["checksum"]),  # type: ignore[arg-type]  # an unknown one fits no bytes
                base=_of(str, given["base"]),
            )
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a manifest of published weights: {error!r}") from None


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"got {value!r:.60}, expected {kind.__name__}")
    return value


def _entry(**given: Any) -> TensorEntry:
    texts = {key: _of(str, given.pop(key)) for key in ("name", "dtype", "checksum")}
    shape = tuple(_of(int, size) for size in given.pop("shape"))
    return TensorEntry(shape=shape, **texts, **{key: _of(int, value) for key, value in given.items()})


def digest_of(entries: Iterable[TensorEntry]) -> str:
    """One SHA-256 over names, types, shapes and checksums of all tensors."""
    lines = sorted(f"{e.name} {e.dtype} {e.shape} {e.checksum}" for e in entries)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Publication:
    """A manifest and where its buckets are: what the references mean, the transport alone knows."""

    manifest: Manifest
    bucket_refs: list[Any]


def checksum_of(data: np.ndarray, kind: str) -> str:
    """Of a uint8 array. Both kinds let other threads run meanwhile."""
    return _hash(kind)(data.data).hexdigest()


def _hash(kind: str) -> Callable[..., Any]:
    return xxhash.xxh3_128 if kind == "xxh3_128" else hashlib.sha256


def check_bucket(manifest: Manifest, index: int, bucket: np.ndarray) -> None:
    """Raises `WeightSyncError` unless the bucket (uint8) holds what was published, tensor by tensor."""
    read = lambda start, size: bucket[start : start + size]  # noqa: E731
    for _ in bucket_checks(manifest, index, bucket.nbytes, read, piece_bytes=max(1, bucket.nbytes)):
        pass


def bucket_checks(
    manifest: Manifest, index: int, num_bytes: int, read: Callable[[int, int], np.ndarray], *, piece_bytes: int
) -> Iterator[None]:
    """The same, piece by piece, of so many bytes that lie elsewhere; `read`(start, size): one piece of them."""
    if manifest.checksum not in ("xxh3_128", "sha256"):
        raise manifest.error("bytes", f"no checksum is called {manifest.checksum!r:.40}")
    if num_bytes != manifest.bucket_bytes[index]:
        raise manifest.error("bytes", f"bucket {index} has {num_bytes} bytes, expected {manifest.bucket_bytes[index]}")
    seen: dict[tuple[int, int], str] = {}  # tied tensors share their bytes
    for e in manifest.entries_of(index):
        where = e.offset, e.num_bytes
        if where not in seen:
            found, end = _hash(manifest.checksum)(), e.offset + e.num_bytes
            for start in range(e.offset, end, piece_bytes):
                found.update(read(start, min(piece_bytes, end - start)).data)
                yield
            seen[where] = found.hexdigest()
        if seen[where] != e.checksum:
            raise manifest.error("bytes", f"tensor {e.name} does not match its checksum in the manifest")


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

    def empty(self, *, pinned: bool = False) -> torch.Tensor:
        """Memory for it, uint8 [num_bytes]; the gaps between tensors are zero, the tensors uninitialized."""
        import torch

        return self.lay_out(torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=pinned))

    def lay_out(self, memory: torch.Tensor) -> torch.Tensor:
        """The first bytes of `memory` for it; the gaps between tensors become zero."""
        for span, next_span in itertools.pairwise(self.spans):
            memory[span.offset + span.num_bytes : next_span.offset] = 0
        return memory[: self.num_bytes]

    def entries(self, checksums: Iterable[str]) -> list[TensorEntry]:
        """The manifest's entries for it; `checksums`: of each span."""
        return [
            TensorEntry(
                name,
                str(span.dtype).removeprefix("torch."),
                span.shape,
                self.index,
                span.offset,
                span.num_bytes,
                checksum,
            )
            for span, checksum in zip(self.spans, checksums, strict=True)
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


def read_bucket(manifest: Manifest, index: int, bucket: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Named tensors of one bucket (uint8, checked before), as views of its bytes.

    Raises `WeightSyncError` for an entry whose type or shape its bytes cannot have.
    """
    import torch

    for e in manifest.entries_of(index):
        dtype = getattr(torch, e.dtype, None)
        sizes = all(size >= 0 for size in e.shape)
        if not isinstance(dtype, torch.dtype) or not sizes or math.prod(e.shape) * dtype.itemsize != e.num_bytes:
            raise manifest.error("bytes", f"tensor {e.name} of {e.num_bytes} bytes cannot be {e.dtype} {e.shape}")
        yield e.name, bucket[e.offset : e.offset + e.num_bytes].view(dtype).view(e.shape)

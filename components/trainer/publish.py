"""How a policy version leaves the trainer: copied aside between two steps, sent during the next one.

    every rank, compute:   step v   copy   canary   step v + 1 ...
    every rank, beside:                    gather 0, gather 1, ...
    rank 0, beside:                        upload 0, upload 1, ...   manifest

A rank keeps one copy of its own shards, in the published dtype: the next version is copied when the last one has been
gathered, and waits for that. Rank 0 has one bucket more at a time, and that one twice where the model's files have
other names for its weights (experts). A rank that is alone gathers nothing: its copy is the buckets.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from .. import spans
from ..transports.transport import Outgoing, WeightTransport
from ..weights import BucketPlan, Canary, Checksum, Manifest, Publication, TensorEntry, checksum_of, digest_of
from .gather import Gatherer

MAX_HASHING_THREADS = 4
"""SHA-256 in one thread is slower than a gather; four threads keep up."""


@dataclass(frozen=True)
class _Version:
    """One on its way. `canary`: scored under it; `gathered`: this rank's copy may be overwritten."""

    policy_version: int
    base: str
    canary: Future[Canary] = field(default_factory=Future)
    gathered: Future[None] = field(default_factory=Future)


class Publisher:
    """One rank's part in publishing. Made by all ranks at once, and each method is called on all of them in one order.

    `timeout_s`: how long a version may take to leave.
    """

    def __init__(self, gatherer: Gatherer, *, transport: WeightTransport, checksum: Checksum, timeout_s: float) -> None:
        self._gatherer = gatherer
        self._transport = transport
        self._checksum: Checksum = checksum
        self._timeout_s = timeout_s
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="publishing")
        self._hashing = ThreadPoolExecutor(
            min(MAX_HASHING_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="hash"
        )
        self._copy: list[torch.Tensor] = []
        self._bucket = torch.empty(0)
        self._last: _Version | None = None
        self._unclaimed: Future[Publication | None] | None = None

    @property
    def memory_bytes(self) -> int:
        """What publishing holds: the copy, a bucket, and what the transport keeps."""
        return sum(part.nbytes for part in self._copy) + self._bucket.nbytes + self._transport.memory_bytes

    def begin(self, policy_version: int, *, base: str = "") -> None:
        """Copy the current weights aside, and send them while training continues; `base`: see `Manifest`.

        Waits until the last version has been gathered, and raises what that failed with.
        """
        if self._last is not None:
            self._wait_for(self._last)
        if not self._copy:
            self._copy, self._bucket = self._gatherer.new_parts(), self._gatherer.new_bucket()
        copied = self._gatherer.copy_parts(self._copy)
        self._last = _Version(policy_version, base)
        self._unclaimed = self._beside.submit(self._send, self._last, copied)

    def score(self, score: Callable[[], Canary]) -> None:
        """The canary of the last `begin`, still under its weights (a collective). If it fails, so does that version."""
        if self._last is None or self._last.canary.done():
            return
        try:
            self._last.canary.set_result(score())
        except BaseException as error:
            self._last.canary.set_exception(error)

    def claim(self) -> Future[Publication | None]:
        """The last `begin`, before the next one: done when all of its buckets can be pulled. Ranks but 0 get None."""
        assert self._unclaimed is not None, "claim() comes once after each begin()"
        claimed, self._unclaimed = self._unclaimed, None
        return claimed

    def close(self) -> None:
        """Wait for what is on its way: its collectives end before their group does."""
        if self._last is not None:
            wait([self._last.gathered], self._timeout_s)
        self._beside.shutdown(wait=False, cancel_futures=True)
        self._hashing.shutdown(wait=False)

    def _wait_for(self, last: _Version) -> None:
        try:
            last.gathered.result(self._timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"version {last.policy_version} of the weights did not leave the trainer within {self._timeout_s:g} s "
                "(cluster.step_timeout_s)"
            ) from None

    def _send(self, version: _Version, copied: Callable[[], None]) -> Publication | None:
        """A failure leaves nothing: what was uploaded is released, and was never announced."""
        with spans.span("publish", version=version.policy_version):
            return self._sent(version, copied)

    def _sent(self, version: _Version, copied: Callable[[], None]) -> Publication | None:
        outgoing: Outgoing | None = None
        uploaded: list[tuple[int, list[TensorEntry]]] = []
        failure: Exception | None = None
        try:
            copied()
            for index, part in enumerate(self._copy):
                plan, memory = self._gatherer.gather(index, part, self._bucket)
                if memory is not None and failure is None:
                    try:
                        outgoing = outgoing or self._transport.begin(version.policy_version)
                        uploaded.append(self._upload(outgoing, plan, memory))
                    except Exception as error:  # raised later: the others are still sending
                        failure = error
            version.gathered.set_result(None)
            if failure is not None:
                raise failure
            canary = version.canary.result(self._timeout_s)
            if outgoing is None:
                return None
            entries = [entry for _, of_bucket in uploaded for entry in of_bucket]
            sizes = [num_bytes for num_bytes, _ in uploaded]
            digest = digest_of(entries)
            manifest = Manifest(version.policy_version, entries, sizes, canary, digest, self._checksum, version.base)
            return outgoing.commit(manifest)
        except BaseException as error:
            if not version.gathered.done():
                version.gathered.set_exception(error)
            if outgoing is not None:
                outgoing.discard()
            raise

    def _upload(self, outgoing: Outgoing, plan: BucketPlan, memory: torch.Tensor) -> tuple[int, list[TensorEntry]]:
        """Returns what the manifest says of this bucket: its size, and its entries."""
        plan, memory = self._gatherer.as_published(plan, memory)
        # Of what was gathered, not of what was put, so that it covers the whole transfer.
        checksum = functools.partial(checksum_of, kind=self._checksum)
        checksums = self._hashing.map(checksum, [span.data(memory).numpy() for span in plan.spans])
        entries = plan.entries(checksums)
        outgoing.put(memory.numpy())
        return plan.num_bytes, entries

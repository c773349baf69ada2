"""How a policy version leaves the trainer: a stream of buckets, each gathered, summed and given to the transport.

    all ranks:       gather 0   gather 1   gather 2   ...  canary | next step
    rank 0, beside:             upload 0   upload 1   upload 2 ...

At most two buckets exist at a time: the one being gathered and the one being uploaded. If uploading is slower,
gathering waits for it; a model of one bucket is uploaded entirely during the next step. If the model's files have
other names for its weights (experts), the bucket being uploaded exists twice while it is renamed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore

import torch

from ..transports.transport import Outgoing, WeightTransport
from ..weights import BucketPlan, Canary, Checksum, Manifest, Publication, TensorEntry, checksum_of, digest_of
from .gather import Gatherer

MAX_HASHING_THREADS = 4
"""SHA-256 in one thread is slower than a gather between GPUs; four threads keep up."""


@dataclass(frozen=True)
class _Uploaded:
    """One bucket that can be pulled."""

    entries: list[TensorEntry]
    num_bytes: int


@dataclass(frozen=True)
class _Pending:
    policy_version: int
    outgoing: Outgoing
    uploads: list[Future[_Uploaded]]
    canary: Canary


class Publisher:
    """One rank's part in publishing. Rank 0 uploads and holds the last publication until it is claimed."""

    def __init__(self, gatherer: Gatherer, *, transport: WeightTransport, checksum: Checksum) -> None:
        self._gatherer = gatherer
        self._transport = transport
        self._checksum: Checksum = checksum
        self._uploading = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._hashing = ThreadPoolExecutor(
            min(MAX_HASHING_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="hash"
        )
        self._uploaded = Semaphore(1)  # acquired: the previous bucket was uploaded
        self._pending: _Pending | None = None

    def publish(self, policy_version: int, score: Callable[[], Canary]) -> None:
        """Gather the current weights and start uploading them, then `score` the canary (both collectives).

        On failure nothing is left: uploaded buckets are released and were never announced. A publication that has not
        been claimed by then is released too.
        """
        if self._pending is not None:
            self._release(self._pending)
            self._pending = None
        outgoing: Outgoing | None = None
        uploads: list[Future[_Uploaded]] = []
        try:
            for plan, memory in self._gatherer.buckets():
                if memory is None:
                    continue
                outgoing = outgoing or self._transport.begin(policy_version)
                self._uploaded.acquire()
                uploads.append(self._uploading.submit(self._upload, outgoing, plan, memory))
                del memory
                if len(uploads) > 1:
                    uploads[-2].result()  # it is done: raises here if it failed
            canary = score()
        except BaseException:
            if outgoing is not None:
                self._uploading.submit(outgoing.discard)
            raise
        if outgoing is not None:
            self._pending = _Pending(policy_version, outgoing, uploads, canary)

    def claim(self) -> Callable[[], Publication]:
        """Rank 0: take over the last `publish`, before the next one releases it.

        The returned function waits until all of its buckets can be pulled; it may run in any thread.
        """
        assert self._pending is not None, "claim() is for rank 0, after publish()"
        pending, self._pending = self._pending, None
        return lambda: self._complete(pending)

    def _upload(self, outgoing: Outgoing, plan: BucketPlan, memory: torch.Tensor) -> _Uploaded:
        try:
            plan, memory = self._gatherer.as_published(plan, memory)
            # Of what was gathered, not of what was put, so that it covers the whole transfer.
            checksum = functools.partial(checksum_of, kind=self._checksum)
            checksums = self._hashing.map(checksum, [span.data(memory).numpy() for span in plan.spans])
            entries = plan.entries(checksums)
            outgoing.put(memory.numpy())
            return _Uploaded(entries, plan.num_bytes)
        finally:
            self._uploaded.release()

    def _complete(self, pending: _Pending) -> Publication:
        try:
            uploaded = [upload.result() for upload in pending.uploads]
            entries = [entry for bucket in uploaded for entry in bucket.entries]
            manifest = Manifest(
                pending.policy_version,
                entries,
                [bucket.num_bytes for bucket in uploaded],
                pending.canary,
                digest_of(entries),
                self._checksum,
            )
            return self._uploading.submit(pending.outgoing.commit, manifest).result()
        except BaseException:
            self._release(pending)
            raise

    def _release(self, pending: _Pending) -> None:
        self._uploading.submit(pending.outgoing.discard)

"""How a policy version leaves the trainer: gathered, hashed and handed over as a stream of buckets.

    all ranks:       gather 0   gather 1   gather 2   ...  canary | next step
    rank 0, beside:             upload 0   upload 1   upload 2 ...

At most two buckets exist at a time: the one being gathered and the one being uploaded. If uploading is slower,
gathering waits for it; a model of one bucket is uploaded entirely during the next step. If the model's files have
other names for its weights (experts), the bucket being uploaded exists twice while it is renamed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore
from typing import Any

import numpy as np
import torch

from ..weights import BucketPlan, Canary, Manifest, Publication, TensorEntry, digest_of, sha256_of
from .gather import Gatherer

Put = Callable[[np.ndarray], Any]
"""put(bucket) -> a reference to its bytes, which the transport owns from then on. Called in a separate thread."""

MAX_HASHING_THREADS = 4
"""SHA-256 in one thread is slower than a gather between GPUs; four threads keep up."""


@dataclass(frozen=True)
class _Uploaded:
    """One bucket that can be pulled."""

    entries: list[TensorEntry]
    ref: Any
    num_bytes: int


@dataclass(frozen=True)
class _Pending:
    policy_version: int
    uploads: list[Future[_Uploaded]]
    canary: Canary


class Publisher:
    """One rank's part in publishing. Rank 0 uploads and holds the last publication until it is claimed."""

    def __init__(self, gatherer: Gatherer, *, put: Put) -> None:
        self._gatherer = gatherer
        self._put = put
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
        self._pending = None
        uploads: list[Future[_Uploaded]] = []
        for plan, memory in self._gatherer.buckets():
            if memory is None:
                continue
            self._uploaded.acquire()
            uploads.append(self._uploading.submit(self._upload, plan, memory))
            del memory
            if len(uploads) > 1:
                uploads[-2].result()  # it is done: raises here if it failed
        canary = score()
        if uploads:
            self._pending = _Pending(policy_version, uploads, canary)

    def claim(self) -> Callable[[], Publication]:
        """Rank 0: take over the last `publish`, before the next one releases it.

        The returned function waits until all of its buckets can be pulled; it may run in any thread.
        """
        assert self._pending is not None, "claim() is for rank 0, after publish()"
        pending, self._pending = self._pending, None
        return lambda: _complete(pending)

    def _upload(self, plan: BucketPlan, memory: torch.Tensor) -> _Uploaded:
        try:
            plan, memory = self._gatherer.as_published(plan, memory)
            # Hash what was gathered, not what was put, so that the hash covers the whole transfer.
            hashes = self._hashing.map(sha256_of, [span.data(memory) for span in plan.spans])
            ref = self._put(memory.numpy())
            return _Uploaded(plan.entries(hashes), ref, plan.num_bytes)
        finally:
            self._uploaded.release()


def _complete(pending: _Pending) -> Publication:
    uploaded = [upload.result() for upload in pending.uploads]
    entries = [entry for bucket in uploaded for entry in bucket.entries]
    num_bytes = sum(bucket.num_bytes for bucket in uploaded)
    manifest = Manifest(pending.policy_version, entries, len(uploaded), num_bytes, pending.canary, digest_of(entries))
    return Publication(manifest, [bucket.ref for bucket in uploaded])


def keep(bucket: np.ndarray) -> np.ndarray:
    """The transport within one process: the bucket is its own reference."""
    return bucket

"""Weights in Ray's object store: one copy on every node that asks for them, freed when nobody holds a reference."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from ..weights import Manifest, Publication
from .transport import Held, TransportSettings


class ObjectStore:
    """`put` stores one bucket and returns a reference; `get` returns what a reference stands for, perhaps read-only.

    A version is there as long as its references are: none is counted, and nothing of it is in the trainer's memory.
    """

    uses_held = False
    keep = 1
    memory_bytes = 0

    def __init__(self, put: Callable[[np.ndarray], Any], get: Callable[[Any], Awaitable[np.ndarray]]) -> None:
        self._put = put
        self._get = get

    @classmethod
    def open(cls, settings: TransportSettings) -> ObjectStore:
        import ray

        async def get(ref: Any) -> np.ndarray:
            return await ref

        return cls(ray.put, get)

    @classmethod
    def of_this_process(cls) -> ObjectStore:
        """For a trainer whose weights leave its process by no other way: a bucket's copy is its own reference."""

        async def get(bucket: np.ndarray) -> np.ndarray:
            return bucket

        return cls(np.copy, get)

    def places(self, publication: Publication) -> tuple[()]:
        return ()

    def begin(self, policy_version: int) -> _Refs:
        return _Refs(self._put)

    async def fetch(self, publication: Publication, index: int, into: np.ndarray, held: Held | None = None) -> int:
        bucket = await self._get(publication.bucket_refs[index])
        await asyncio.to_thread(np.copyto, into, bucket, casting="no")
        return into.nbytes

    def close(self) -> None:
        """References are what holds the store's memory; there is nothing else."""


class _Refs:
    """A version that is discarded, or that nobody claims, goes with its references."""

    def __init__(self, put: Callable[[np.ndarray], Any]) -> None:
        self._put = put
        self._refs: list[Any] = []

    def put(self, bucket: np.ndarray) -> None:
        self._refs.append(self._put(bucket))

    def commit(self, manifest: Manifest) -> Publication:
        refs, self._refs = self._refs, []
        return Publication(manifest, refs)

    def discard(self) -> None:
        self._refs = []

"""Which adapters an engine holds, and which one the next rollout is sampled under.

    ahead    pull -> fetch every bucket, check its bytes -> a free place -> load beside the other versions
    proof    read back the adapter and the weights under it; score the canary under it
    then     rollouts that begin are sampled under it; those under way keep theirs, and hold its place until they end

Nothing pauses, no cache is read again, and no token is sampled under a version before it was proven.

The lag bound needs nothing new. A group may begin under any version from its `min_policy_version` on, which was chosen
so that its last use is within the bound; here every token of it is of the version that it began with.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ..weights import CanaryGap, Manifest, WeightSyncError
from .engine import HoldsVersions, StagedWeights
from .weight_sync import WeightSync

logger = logging.getLogger(__name__)


class AdapterSync(WeightSync):
    """A weight sync for an engine that holds several versions: a rollout begins under one that was proven."""

    serves_unproven = False

    def __init__(self, engine: HoldsVersions, *args: Any, max_versions: int, **settings: Any) -> None:
        """`max_versions`: that the engine holds at once, the newest among them; 2 at least."""
        assert max_versions >= 2, "one to serve while the next one is proven"
        super().__init__(engine, *args, **settings)
        self._holder = engine
        self._max_versions = max_versions
        self._loaded: set[int] = set()
        self._rollouts: Counter[int] = Counter()
        self._rollout_ended = asyncio.Event()

    def stats(self) -> dict[str, float]:
        return {"collector/adapter_versions": float(len(self._loaded))}

    @asynccontextmanager
    async def one_version(self) -> AsyncIterator[int | None]:
        await self.until_verified(0)
        version = self.verified_version
        self._rollouts[version] += 1
        try:
            yield version
        finally:
            self._rollouts[version] -= 1
            if not self._rollouts[version]:
                del self._rollouts[version]
                self._rollout_ended.set()

    async def _drain(self) -> None:
        """Wait for a place. Rollouts have time-outs, and newer ones begin under the newest version, so this ends."""
        await super()._drain()
        while not self._closed.is_set():
            # Nothing begins under an old version again.
            for version in self._loaded - {self.verified_version} - self._rollouts.keys():
                await self._drop(version)
            if len(self._loaded) < self._max_versions:
                return
            self._rollout_ended.clear()
            await self._first(self._rollout_ended.wait())

    async def ended(self) -> None:
        """The engine holds none of its versions then: those of the next run have the same numbers."""
        await super().ended()
        for version in list(self._loaded):
            await self._drop(version)

    async def _load_and_verify(self, staged: StagedWeights, ahead_s: float, fetched_bytes: int) -> None:
        self._loaded.add(staged.manifest.policy_version)
        await super()._load_and_verify(staged, ahead_s, fetched_bytes)

    async def _score(self, manifest: Manifest) -> CanaryGap:
        return await self._holder.score(manifest.canary, version=manifest.policy_version)

    async def _quarantine(self, error: WeightSyncError) -> None:
        """A version that fails a check was never served: the engine goes on with those that passed. If what all of them
        are added to is not what it should be, nothing that it serves is right.
        """
        await self._drop(error.policy_version)
        if error.check == "base":
            await super()._quarantine(error)
        else:
            self._refuse(error)

    async def _drop(self, version: int) -> None:
        await self._holder.drop(version)
        self._loaded.discard(version)

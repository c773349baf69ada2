"""Holds the newest published weights and answers collectors that ask for something newer than what they serve."""

from __future__ import annotations

import asyncio
from collections import deque

from ..weights import Publication


class ParameterServer:
    """Pull-based, so a collector may join, leave or die at any time.

    The newest `keep` versions are kept. A collector in the middle of a pull holds its own references, so the memory of
    an older version is freed when the last reference is dropped.
    """

    def __init__(self, *, keep: int = 1) -> None:
        self._kept: deque[Publication] = deque(maxlen=keep)
        self._changed = asyncio.Condition()

    @property
    def newest_version(self) -> int:
        """-1 before anything was published."""
        return self._kept[-1].manifest.policy_version if self._kept else -1

    async def publish(self, publication: Publication) -> None:
        """Make a newer version available. Raises when versions do not increase or a bucket is missing."""
        manifest = publication.manifest
        assert len(publication.bucket_refs) == len(manifest.bucket_bytes), "a publication needs all of its buckets"
        async with self._changed:
            if manifest.policy_version <= self.newest_version:
                raise ValueError(
                    f"published version {manifest.policy_version} after {self.newest_version}; versions must increase"
                )
            self._kept.append(publication)
            self._changed.notify_all()

    async def pull(self, *, newer_than: int, timeout_s: float, oldest: bool = False) -> Publication | None:
        """The newest publication as soon as it is newer than `newer_than`; None when none came in `timeout_s`.

        `oldest`: of the kept ones that are newer, the oldest instead.
        """

        def newer() -> list[Publication]:
            return [p for p in self._kept if p.manifest.policy_version > newer_than]

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(newer)
                return newer()[0 if oldest else -1]
        except TimeoutError:
            return None

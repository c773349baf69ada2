"""Holds the newest published weights and answers collectors that ask for something newer than what they serve."""

from __future__ import annotations

import asyncio

from ..weights import Publication


class ParameterServer:
    """Pull-based, so a collector may join, leave or die at any time.

    Only the newest version is kept: whoever is in the middle of a pull holds references of its own, and the memory of
    an older version goes when the last of them does.
    """

    def __init__(self) -> None:
        self._newest: Publication | None = None
        self._changed = asyncio.Condition()

    async def publish(self, publication: Publication) -> None:
        """Make a newer version available. Raises when versions do not increase or a bucket is missing."""
        manifest = publication.manifest
        assert len(publication.bucket_refs) == manifest.num_buckets, "a publication needs all of its buckets"
        async with self._changed:
            if self._newest is not None and manifest.policy_version <= self._newest.manifest.policy_version:
                raise ValueError(
                    f"published version {manifest.policy_version} after {self._newest.manifest.policy_version}; "
                    "versions must increase"
                )
            self._newest = publication
            self._changed.notify_all()

    async def pull(self, *, newer_than: int, timeout_s: float) -> Publication | None:
        """The newest publication as soon as it is newer than `newer_than`; None when none came in `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(
                    lambda: self._newest is not None and self._newest.manifest.policy_version > newer_than
                )
                return self._newest
        except TimeoutError:
            return None

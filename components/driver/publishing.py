"""The trainer's weights on their way to the engines: uploaded beside the next step, announced, then pulled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ..config import Config
from ..runtime.launch import Parts
from ..runtime.supervisor import together
from ..weights import Publication
from .rl_report import StepReport

Uploads = Callable[[], Awaitable[list[Publication | None]]]
"""Every rank's part in what the ranks copied last; rank 0 has the publication."""


class Publishing:
    """Publishes one version at a time, beside the training step that follows it.

    `published`: the newest version that engines can pull; -1 before the first. `report` receives how long each took,
    `keep` each publication, for audits. `uploads`: None: those of the trainer's ranks. A publication that fails ends
    the run by name.
    """

    def __init__(
        self,
        config: Config,
        parts: Parts,
        *,
        report: Callable[[StepReport], Awaitable[None]],
        keep: Callable[[Publication], None],
        uploads: Uploads | None = None,
    ) -> None:
        self._parts = parts
        self._uploads = uploads or (lambda: together([t.publication.remote() for t in parts.trainers]))
        self._timeout_s = config.cluster.step_timeout_s
        self._report = report
        self._keep = keep
        self._under_way: asyncio.Task[None] | None = None
        self.published = -1

    async def gather(self, version: int) -> None:
        """Publish the current weights as `version`; returns when they can be pulled."""
        await self._wait(together(t.publish.remote() for t in self._parts.trainers), "trainer")
        await self._publish_to_engines(version, self._uploads())

    async def begin(self, version: int) -> None:
        """Publish what the last step copied aside; returns when the version before it can be pulled."""
        await self.finish()
        # Requested before the next step, because that step's publication replaces an unclaimed one.
        self._under_way = asyncio.create_task(self._publish_to_engines(version, self._uploads()))
        self._parts.supervisor.watch("publishing", self._under_way)

    async def finish(self) -> None:
        """Wait for the publication that is under way, if there is one."""
        if self._under_way is not None:
            await self._under_way
            self._under_way = None

    async def wait_engines_at(self, version: int) -> None:
        """Wait until every engine that is there has loaded and proven `version`. One that is being replaced will pull
        nothing older, and is not waited for: it may need a machine that is away.
        """
        calls = [g.call_once(lambda actor: actor.until_verified.remote(version)) for g in self._parts.generators]
        await self._wait(together(calls), "generators")

    async def _publish_to_engines(self, version: int, uploads: Awaitable[list[Publication | None]]) -> None:
        """Make the upload of `version` available, and let more groups start."""
        started = time.monotonic()
        publication = (await self._wait(uploads, "trainer"))[0]
        assert publication is not None, "rank 0 has it"
        assert publication.manifest.policy_version == version, "the trainer and the driver count steps differently"
        await self._wait(self._parts.param_server.publish.remote(publication), "param_server")
        await self._wait(self._parts.buffer.published.remote(version), "replay")
        self.published = version
        self._keep(publication)
        await self._report(StepReport(version, {"param_server/publish_s": time.monotonic() - started}))

    async def _wait(self, call: Any, what: str) -> Any:
        return await self._parts.supervisor.wait(call, what=what, timeout_s=self._timeout_s)

"""The parameter server as a Ray actor.

Buckets stay in the object store (one copy per node); only references pass through here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray

from .. import spans
from ..failures import Watched, as_text
from ..monitor.logs import log_to_file
from ..weights import Publication
from .server import ParameterServer


class ParameterServerActor(Watched):
    def __init__(self, *, keep: int, role: str, log_file: Path, log_level: str) -> None:
        """`keep`: the newest so many versions."""
        self.role = role
        log_to_file(log_file, log_level)
        self._server = ParameterServer(keep=keep)

    async def start(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "node": ray.util.get_node_ip_address()}

    async def reset(self, keep: int) -> None:
        """Another run: versions count from 0 again."""
        self._server = ParameterServer(keep=keep)

    @as_text
    async def publish(self, publication: Publication) -> None:
        await self._server.publish(publication)
        spans.instant("announce", version=publication.manifest.policy_version)

    @as_text
    async def pull(self, newer_than: int, timeout_s: float, oldest: bool) -> Publication | None:
        return await self._server.pull(newer_than=newer_than, timeout_s=timeout_s, oldest=oldest)


ParameterServerRemote = ray.remote(num_cpus=0)(ParameterServerActor)
"""To be created with a `max_concurrency` above the number of its waiting callers: see `runtime.launch`."""

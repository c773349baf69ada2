"""Two files in a run's folder through which others see its parts and change their number, while it runs.

parts.json   written every few seconds: each part's process, host and state (`leeway ps`)
scale.json   written by `leeway scale`: how many generators are wanted; read, followed and removed here

Files, because whoever asks may be on another host, and can neither slow the run nor end it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import Config
from ..failures import PartFailed
from ..monitor.jsonl import write_text_atomically
from ..monitor.logs import say
from ..runtime.launch import Parts
from ..runtime.parts_files import PARTS, SCALE, Wanted, read_wanted

EVERY_S = 2.0
ANSWER_S = 10.0


class Control:
    """`run` never returns. `version` tells the trainer's. A change that fails is said, and the run goes on."""

    def __init__(self, config: Config, parts: Parts, run_dir: Path, *, stage: str, version: Callable[[], int]) -> None:
        self._config = config
        self._parts = parts
        self._run_dir = run_dir
        self._stage = stage
        self._version = version
        self._said = ""

    async def run(self) -> None:
        (self._run_dir / SCALE).unlink(missing_ok=True)  # of an earlier part of the run
        following: asyncio.Task[None] | None = None
        try:
            while True:
                if following is None or following.done():
                    if following is not None:
                        following.result()  # raises what is no failure of a generator
                    wanted = self._asked()
                    following = None if wanted is None else asyncio.create_task(self._follow(wanted))
                await self._write()
                await asyncio.sleep(EVERY_S)
        finally:
            if following is not None:
                following.cancel()

    def _asked(self) -> Wanted | None:
        file = self._run_dir / SCALE
        wanted = read_wanted(file)
        if wanted is not None:
            file.unlink(missing_ok=True)
        return wanted

    async def _follow(self, wanted: Wanted) -> None:
        fleet = self._parts.generators
        if (refusal := self._refusal()) is not None:
            return self._say(refusal)
        try:
            while len(fleet) < wanted.generators:
                self._say(f"{(await fleet.join()).role} has joined")
            while len(fleet) > wanted.generators:
                role = fleet[-1].role
                groups = await fleet.leave(at_once=wanted.at_once)
                self._say(f"{role} has left; {groups} groups were issued again")
        except PartFailed as error:
            self._say(f"warning: there are {len(fleet)} generators, not {wanted.generators}: {error}")

    def _refusal(self) -> str | None:
        cluster = self._config.cluster
        if cluster.shares_devices:
            return f"warning: the number of generators is fixed where cluster.placement is {cluster.placement}"
        if not cluster.restarts:
            return "warning: the number of generators is fixed where cluster.restarts is 0"
        return None

    def _say(self, text: str) -> None:
        self._said = text
        say(f"{self._stage}: {text}")

    async def _write(self) -> None:
        rows = [await self._of(generator) for generator in self._parts.generators]
        processes = self._parts.processes
        others = {role: process for role, process in processes.items() if not role.startswith("generator-")}
        rows += [
            {"role": role, "host": process["node"], "pid": process["pid"], "state": "up"}
            | ({"policy_version": self._version()} if role.startswith("trainer-") else {})
            for role, process in others.items()
        ]
        text = json.dumps(
            {
                "time": time.time(),
                "stage": self._stage,
                "generators": len(self._parts.generators),
                "restarts_left": self._parts.restarts.left,
                "said": self._said,
                "parts": rows,
            }
        )
        with suppress(OSError):  # a full disk: the run has other ways to notice it
            await asyncio.to_thread(write_text_atomically, self._run_dir / PARTS, text + "\n")

    async def _of(self, generator: Any) -> dict[str, Any]:
        process = self._parts.processes.get(generator.role, {})
        row = {"role": generator.role, "host": process.get("node", ""), "pid": process.get("pid", 0)}
        state = None
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                state = await generator.call_now(lambda actor: actor.state.remote())
        if state is None:
            return {**row, "state": "does not answer" if generator.is_up else "starting again"}
        return {**row, "state": "serves" if state["policy_version"] >= 0 else "pulls weights", **state}

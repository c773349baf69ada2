"""Two files in a run's folder through which others see its parts and change their number, while it runs.

parts.json   written every few seconds: each part's process, host and state (`leeway ps`)
scale.json   written by `leeway scale`: how many generators are wanted; read, answered in parts.json, followed and
             removed here

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
    """`run` never returns. `version` tells the trainer's. A change that fails is said, and the run goes on.

    Before `allow_changes` and after the end of `run` the number of generators stays as it is.
    """

    def __init__(self, config: Config, parts: Parts, run_dir: Path, *, stage: str, version: Callable[[], int]) -> None:
        self._config = config
        self._parts = parts
        self._run_dir = run_dir
        self._stage = stage
        self._version = version
        self._said = ""
        self._rows: list[dict[str, Any]] = []
        self._answered: dict[str, str] = {}
        self._may_change = self._is_over = False

    def allow_changes(self) -> None:
        self._may_change = True

    async def run(self) -> None:
        self._asked("that was before this stage; ask again")
        following: asyncio.Task[None] | None = None
        wanted: Wanted | None = None
        try:
            while True:
                if following is None or following.done():
                    if following is not None:
                        following.result()  # raises what is no failure of a generator
                    wanted = self._asked(self._refusal())
                    following = None if wanted is None else asyncio.create_task(self._follow(wanted))
                await self._write()
                await asyncio.sleep(EVERY_S)
        finally:
            if following is not None and not following.done():
                following.cancel()
                assert wanted is not None, "it is followed"
                number = len(self._parts.generators)
                self._say(f"the stage ends with {number} generators: {wanted.generators} were not reached in time")
            self._asked("the stage is ending")
            self._is_over = True
            self._write_now()

    def _asked(self, refusal: str) -> Wanted | None:
        """What is wanted now, if that is not refused. What is wanted is answered in either case."""
        file = self._run_dir / SCALE
        wanted = read_wanted(file)
        if wanted is None:
            return None
        file.unlink(missing_ok=True)
        self._answered = {"id": wanted.id, "refusal": refusal}
        if not refusal:
            return wanted
        number = len(self._parts.generators)
        self._say(f"warning: {wanted.generators} generators were asked for, {number} stay: {refusal}")
        return None

    async def _follow(self, wanted: Wanted) -> None:
        fleet = self._parts.generators
        try:
            while len(fleet) < wanted.generators:
                self._say(f"{(await fleet.join()).role} has joined")
            while len(fleet) > wanted.generators:
                role = fleet[-1].role
                groups = await fleet.leave(at_once=wanted.at_once)
                self._say(f"{role} has left; {groups} groups were issued again")
        except PartFailed as error:
            self._say(f"warning: there are {len(fleet)} generators, not {wanted.generators}: {error}")

    def _refusal(self) -> str:
        """Why the number of generators cannot change in this stage; "" if it can."""
        cluster = self._config.cluster
        if not self._may_change:
            return "the stage is starting; ask again"
        if self._config.elsewhere == "generators":
            return "a train job has none of its own: those of explorers are in RUN/explorers/NAME"
        if cluster.shares_devices:
            return f"their number is fixed where cluster.placement is {cluster.placement}"
        if not cluster.restarts:
            return "their number is fixed where cluster.restarts is 0"
        return ""

    def _say(self, text: str) -> None:
        self._said = text
        say(f"{self._stage}: {text}")

    async def _write(self) -> None:
        rows = [await self._of(generator) for generator in self._parts.generators]
        processes = self._parts.processes
        others = {role: process for role, process in processes.items() if not role.startswith("generator-")}
        self._rows = rows + [
            {"role": role, "host": process["node"], "pid": process["pid"], "state": "up"}
            | ({"policy_version": self._version()} if role.startswith("trainer-") else {})
            for role, process in others.items()
        ]
        await asyncio.to_thread(self._write_now)

    def _write_now(self) -> None:
        text = json.dumps(
            {
                "time": time.time(),
                "stage": self._stage,
                "generators": len(self._parts.generators),
                "restarts_left": self._parts.restarts.left,
                "said": self._said,
                "answered": self._answered,
                "is_over": self._is_over,
                "parts": self._rows,
            }
        )
        with suppress(OSError):  # a full disk: the run has other ways to notice it
            write_text_atomically(self._run_dir / PARTS, text + "\n")

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

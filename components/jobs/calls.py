"""Calls from an explorer to the train job, as files: any number at once, answered in any order.

A call stays until it was answered. So one that the train job did not come to, because it was stopped or killed, is
found by its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folder import MOST_GROUP_BYTES, ExplorerFiles, read_bytes, read_json, write_json, write_whole

logger = logging.getLogger(__name__)

SOON_S, LATER_S = 0.01, 0.1
"""Interval between looks: right after something happened, and when nothing has for long."""
ABANDONED_S = 60.0
"""How long an answer that is not ours lies before it is removed."""
WAITING = ("admit", "evaluation")
"""Calls that may be answered long after those that came later."""
NAME = re.compile(r"(?P<session>[0-9a-f]{8}-[0-9a-f]{8})-(?P<number>\d{8})\.json")


class StoreFailed(RuntimeError):
    """What was delivered could not be written: the run's own failure, and nobody else's."""


class Pace:
    """Look often while things happen, and seldom when nothing does."""

    def __init__(self) -> None:
        self._next_s = SOON_S

    async def wait(self, *, busy: bool) -> None:
        self._next_s = SOON_S if busy else min(LATER_S, self._next_s * 1.5)
        await asyncio.sleep(self._next_s)


@dataclass(frozen=True)
class Call:
    """`session`: of the explorer's life with one life of the train job. `payload`: groups as bytes, if it has any."""

    session: str
    number: int
    verb: str
    arguments: dict[str, Any]
    payload: bytes | None


class Caller:
    """The explorer's end. `run` fetches answers, for ever; a call that nobody answers waits."""

    def __init__(self, files: ExplorerFiles) -> None:
        self._files = files
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._number = 0
        self._abandoned: dict[str, float] = {}  # names, and when they were first seen
        files.calls.mkdir(parents=True, exist_ok=True)
        files.answers.mkdir(parents=True, exist_ok=True)

    async def send(
        self, session: str, verb: str, arguments: dict[str, Any], payload: bytes | None = None
    ) -> asyncio.Future[Any]:
        """Returns when the call is on disk: it will be answered, whatever becomes of this process."""
        self._number += 1
        stem = f"{session}-{self._number:08d}"
        answer = self._waiting[stem] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.to_thread(self._write, stem, {"verb": verb, **arguments}, payload)
        except OSError:
            del self._waiting[stem]
            raise
        return answer

    async def run(self) -> None:
        pace = Pace()
        while True:
            names = await asyncio.to_thread(os.listdir, self._files.answers) if self._waiting else []
            found = {name: name.removesuffix(".json") for name in names if NAME.fullmatch(name)}
            ours = {name: stem for name, stem in found.items() if stem in self._waiting}
            for name, stem in ours.items():
                path = self._files.answers / name
                try:
                    answer = await asyncio.to_thread(read_json, path)
                except ValueError:  # replaced in this moment: it is looked at again
                    continue
                path.unlink(missing_ok=True)
                waiting = self._waiting.pop(stem)
                if not waiting.done():
                    waiting.set_result(answer or {})
            self._remove_abandoned(found.keys() - ours.keys())
            await pace.wait(busy=bool(ours))

    def _remove_abandoned(self, names: Set[str]) -> None:
        """Answers to an earlier life of this explorer; not at once, for a namesake may wait for them: one of the two
        will end, and which one is not known yet.
        """
        now = time.monotonic()
        self._abandoned = {name: self._abandoned.get(name, now) for name in names}
        for name, since in self._abandoned.items():
            if now - since > ABANDONED_S:
                (self._files.answers / name).unlink(missing_ok=True)

    def _write(self, stem: str, content: dict[str, Any], payload: bytes | None) -> None:
        if payload is not None:
            write_whole(self._files.calls / f"{stem}.groups", payload)
        write_json(self._files.calls / f"{stem}.json", content | {"has_groups": payload is not None})


class Calls:
    """The train job's end, of one explorer. Calls are handled in order, but for those that wait (`WAITING`)."""

    def __init__(self, files: ExplorerFiles, handle: Callable[[Call], Awaitable[dict[str, Any]]]) -> None:
        self._files = files
        self._handle = handle
        self._known: set[str] = set()
        self._handling: asyncio.Task[None] | None = None
        self._waits: set[asyncio.Task[None]] = set()

    def look(self) -> bool:
        """Begin to handle what is new; returns whether there was anything. Raises what kept a call from an answer."""
        for task in [t for t in self._waits if t.done()]:
            self._waits.discard(task)
            task.result()
        if self._handling is not None:
            if not self._handling.done():
                return True
            self._handling.result()
            self._handling = None
        try:
            names = sorted(name for name in os.listdir(self._files.calls) if NAME.fullmatch(name))
        except OSError:  # none yet, or somebody has put something else there
            return False
        self._known.intersection_update(names)
        if new := [name for name in names if name not in self._known]:
            self._known.update(new)
            self._handling = asyncio.create_task(self._handle_all(new))
        return bool(new)

    async def handled(self) -> None:
        """Wait until what was found is handled, but for those that wait."""
        if self._handling is not None:
            await self._handling

    def stop(self) -> None:
        for task in [*self._waits, *([self._handling] if self._handling else [])]:
            task.cancel()

    async def _handle_all(self, names: list[str]) -> None:
        for name in names:
            try:
                call = await asyncio.to_thread(self._read, name)
            except (ValueError, OSError) as error:
                await self._answer(name, {"error": str(error)})
                continue
            if call.verb in WAITING:
                self._waits.add(asyncio.create_task(self._handle_one(name, call)))
            else:
                await self._handle_one(name, call)

    async def _handle_one(self, name: str, call: Call) -> None:
        try:
            answer = await self._handle(call)
        except StoreFailed:
            raise
        except Exception as error:  # what a call provokes is its explorer's affair: it is told, and the run goes on
            logger.warning("a call of explorer %s failed", self._files.name, exc_info=error)
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        await self._answer(name, answer)

    async def _answer(self, name: str, answer: dict[str, Any]) -> None:
        path = self._files.calls / name
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # somebody has removed the explorer's folder
            await asyncio.to_thread(write_json, self._files.answers / name, answer)
        for done in (path, path.with_suffix(".groups")):
            with contextlib.suppress(IsADirectoryError, PermissionError, FileNotFoundError):
                done.unlink()

    def _read(self, name: str) -> Call:
        match = NAME.fullmatch(name)
        assert match is not None
        path: Path = self._files.calls / name
        content = read_json(path)
        if content is None or not isinstance(content.get("verb"), str):
            raise ValueError(f"{path.name}: no call")
        payload = None
        if content.pop("has_groups", False):
            payload = read_bytes(path.with_suffix(".groups"), MOST_GROUP_BYTES)
            if payload is None:
                raise ValueError(f"{path.name}: its groups are missing")
        return Call(match["session"], int(match["number"]), content.pop("verb"), content, payload)

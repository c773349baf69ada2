"""The train job's side of the meeting: explorers join, ask the replay buffer for groups, deliver them, and go.

It lives beside the buffer, in its process and on its event loop. Admission, order, the bound and exactly-once are the
buffer's alone: to it, a collector of an explorer is one more collector.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..config.inputs import EvalSampling
from ..config.sampling import Samplings
from ..group import Group
from ..sampling_masks import check_masks
from ..types import Admission, Evaluated, Offer, Task, clients_of
from .calls import Call, Calls, Pace, StoreFailed
from .evaluations import Evaluations
from .folder import (
    BEAT_S,
    CLIENTS,
    ENDED,
    LEFT,
    MOST_LIVES,
    OWN,
    STOPPED,
    TRAINERS,
    UP,
    Beats,
    ExplorerFiles,
    Meeting,
    good_until,
    read_json,
    write_json,
)
from .group_bytes import groups_of
from .store import GroupStore

logger = logging.getLogger(__name__)


class Buffer(Protocol):
    """What is asked of the replay buffer, see `replay.buffer.ReplayBuffer`."""

    async def admit(
        self, limit: int, *, timeout_s: float, collector: str = "", offer: Any = None
    ) -> list[Admission]: ...
    async def put(self, groups: Sequence[Group]) -> None: ...
    async def retried(self, group_id: int, *, attempt: int = 0) -> None: ...
    async def fail(self, group_id: int, reason: str, *, attempt: int = 0, counts: bool = True) -> None: ...
    def num_held(self, collector: str) -> int: ...
    async def give_back(self, collector: str, reason: str) -> list[int]: ...
    async def mark_dead(self, collector: str, reason: str) -> list[int]: ...
    async def retire(self, collector: str) -> None: ...
    def admission_of(self, group_id: int, collector: str) -> Admission | None: ...
    async def withdraw(self, source: str) -> list[int]: ...
    def where(self, source: str) -> tuple[int, list[int]]: ...
    def of(self, group_id: int) -> tuple[str, int]: ...
    def restart_deadlines(self) -> None: ...
    def left_out(self, group_ids: Sequence[int]) -> Awaitable[list[int]]: ...
    def keep(self, group: Group, *, of: tuple[str, int]) -> bool: ...
    def next_min_version(self) -> int | None: ...
    def is_known(self, of: tuple[str, int]) -> bool: ...
    def give(self, group: Group, *, of: tuple[str, int], prompt: str = "") -> int: ...


MOST_AHEAD = 100_000
"""How far an explorer's own draws may be ahead of the first that was never seen."""
MOST_REFUSED, MOST_FAILED, MOST_COLLECTORS = 10, 20, 10_000
MOST_PROMPT = 20_000


@dataclass(eq=False)
class _Explorer:
    """`session`: of its life with this life of the train job; "": none yet. `collectors`: those that have asked."""

    files: ExplorerFiles
    beats: Beats
    calls: Calls
    session: str = ""
    is_here: bool = False
    collectors: set[str] = field(default_factory=set)
    retired: set[str] = field(default_factory=set)
    tasks: str = TRAINERS
    num_refused: int = 0  # deliveries in a row
    num_failed: int = 0  # groups in a row
    held_s: float = 0.0  # with groups, and without a sign of work on them
    num_groups: int = 0
    num_told: int = 0  # of these
    num_unanswered: int = 0  # shares of held-out tasks in a row
    evaluates: bool = False  # its engines are up, and can be asked for more than groups
    sent_away: str = ""  # why; the session stays what it was, so it does not join again
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """See `replay.sources`."""
        return {OWN: self.files.name, CLIENTS: clients_of(self.files.name)}.get(self.tasks, "")


class Host:
    """`run` never returns. `about`: what explorers must know, and have equal. `resumed_at`: the policy version that
    this life of the train job continues from; newer ones of an earlier life are no more (-1: all of them).
    """

    def __init__(
        self,
        meeting: Meeting,
        buffer: Buffer,
        store: GroupStore,
        *,
        about: dict[str, Any],
        samplings: Samplings,
        vocab_size: int | None,
        max_length: int,
        resumed_at: int,
        silent_s: float,
        timeout_s: float,
        wait_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`vocab_size`: of the model (None: unknown); `max_length`: of a prompt and its response. `wait_s`: without any
        explorer for so long, the run ends. `now`: the clock that tells when one is silent.
        """
        self._now = now
        self._meeting, self._buffer, self._store = meeting, buffer, store
        self._about = about
        self._samplings, self._vocab_size, self._max_length = samplings, vocab_size, max_length
        self._resumed_at = resumed_at
        self._silent_s, self._timeout_s, self._wait_s = silent_s, timeout_s, wait_s
        self._next_beat, self._looked_at = 0.0, now()
        self._evaluable_at = now()
        self._life = secrets.token_hex(4)
        self._state = UP
        self._beat = 0
        self._signing, self._looking = asyncio.Lock(), asyncio.Lock()
        self._explorers: dict[str, _Explorer] = {}
        self._evaluations = Evaluations()
        self._published = -1
        self._sayings: list[str] = []
        self._noting: set[asyncio.Task[None]] = set()
        for folder in (meeting.folder, meeting.explorers):
            folder.mkdir(parents=True, exist_ok=True)
        self._lives = [*_earlier_lives(meeting), (self._life, resumed_at)][-MOST_LIVES:]

    @property
    def num_explorers(self) -> int:
        """Those that are here."""
        return sum(e.is_here for e in self._explorers.values())

    @property
    def somebody_generates(self) -> bool:
        """Whether an explorer is here that has asked for groups: its engines are up."""
        return any(e.is_here and e.collectors for e in self._explorers.values())

    def published(self, policy_version: int) -> None:
        """Explorers should hear of it now."""
        self._published = policy_version
        self._next_beat = 0.0

    def sayings(self) -> list[str]:
        """What a user should know, since the last call."""
        said, self._sayings = self._sayings, []
        return said

    async def evaluate(
        self, tasks: Sequence[Task], sampling: EvalSampling, policy_version: int
    ) -> list[list[Evaluated] | str] | None:
        """Answers of explorers that work on the trainer's tasks, each under this version. None: for `silent_s` there
        were explorers here, and none of these. Waits for them as long as nobody is here (`wait_s`), or engines start;
        raises TimeoutError when those that could answer have answered nothing for `timeout_s`.
        """
        asking = asyncio.create_task(self._evaluations.ask(tasks, sampling, policy_version=policy_version))
        num_answered, moved_at = 0, self._now()
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=BEAT_S)
                now, done = self._now(), self._evaluations.num_answered
                if done != num_answered or not any(e.evaluates for e in self._here(TRAINERS)):
                    num_answered, moved_at = done, now
                if not self._may_evaluate and now - self._evaluable_at > self._silent_s:
                    return None
                if now - moved_at > self._timeout_s:
                    raise TimeoutError(
                        f"no explorer answered a held-out task for {self._timeout_s:g} s; raise "
                        "cluster.step_timeout_s if that is normal here"
                    )
            return asking.result()
        finally:
            asking.cancel()

    @property
    def _may_evaluate(self) -> bool:
        """Nobody is here, or somebody who works on the trainer's tasks."""
        return bool(self._here(TRAINERS)) or not self.num_explorers

    def _here(self, tasks: str) -> list[_Explorer]:
        return [e for e in self._explorers.values() if e.is_here and e.tasks == tasks]

    def metrics(self) -> dict[str, float]:
        told = {name: e for name, e in self._explorers.items() if e.is_here or e.num_groups > e.num_told}
        for explorer in told.values():
            explorer.num_told = explorer.num_groups
        groups = {f"explorers/{name}/groups": float(e.num_groups) for name, e in told.items()}
        return {"explorers/present": float(self.num_explorers), **groups}

    async def run(self) -> None:
        await self._take_what_waits()
        await self._give_sign()
        loop, pace = asyncio.get_running_loop(), Pace()
        next_look, alone_since = loop.time(), self._now()
        while True:
            now = loop.time()
            if now >= next_look:
                next_look = now + BEAT_S
                await self._look_for_explorers()
            if now >= self._next_beat:
                self._next_beat = now + BEAT_S
                await self._give_sign()
            if self.num_explorers:
                alone_since = self._now()
            elif self._now() - alone_since > self._wait_s:
                raise TimeoutError(f"no explorer was here for {self._wait_s:g} s (explorer.wait_s)")
            for task in [task for task in self._noting if task.done()]:
                self._noting.discard(task)
                if not task.cancelled():  # operators failed, which the buffer tells
                    task.result()
            busy = [e.calls.look() for e in list(self._explorers.values()) if e.is_here]
            await pace.wait(busy=any(busy))

    async def _take_what_waits(self) -> None:
        """What was delivered while there was no train job comes before anything that is asked now."""
        for files in self._meeting.all_explorers():
            explorer = self._explorers[files.name] = self._made(files)
            explorer.calls.look()
            await explorer.calls.handled()

    async def close(self, *, ended: bool) -> None:
        """Tell the explorers that no more groups are wanted: for good, or (not `ended`) for now."""
        self._state = ENDED if ended else STOPPED
        await self._give_sign()

    async def _give_sign(self) -> None:
        async with self._signing:
            self._beat += 1
            await asyncio.to_thread(write_json, self._meeting.train, self._sign())

    def _sign(self) -> dict[str, Any]:
        return {
            **self._about,
            "life": self._life,
            "state": self._state,
            "beat": self._beat,
            "published": self._published,
            "lives": self._lives,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    async def _look_for_explorers(self) -> None:
        for files in await asyncio.to_thread(self._meeting.all_explorers):
            explorer = self._explorers.get(files.name)
            if explorer is None:
                explorer = self._explorers[files.name] = self._made(files)
            await self._look_at(explorer)
            if not explorer.is_here:  # what an earlier session has asked
                explorer.calls.look()
        passed_s, self._looked_at = self._now() - self._looked_at, self._now()
        if self._may_evaluate:
            self._evaluable_at = self._now()
        for explorer in [e for e in self._explorers.values() if e.is_here]:
            if explorer.beats.is_silent:
                await self._gone(explorer, f"it has given no sign of life for {explorer.beats.silent_for_s:.0f} s")
                continue
            num_held, what = self._held_by(explorer)
            # At most what a look may take: if this job was stopped, its explorers could tell it nothing.
            explorer.held_s = explorer.held_s + min(passed_s, self._silent_s) if num_held else 0.0
            if explorer.held_s > self._timeout_s / 2:
                cause = f"it holds {num_held} {what}, and has told nothing of them for {explorer.held_s:.0f} s"
                await self._send_away(explorer, f"{cause} (half of the train job's cluster.step_timeout_s)")

    def _held_by(self, explorer: _Explorer) -> tuple[int, str]:
        """During an evaluation the trainer stands still, and groups may have to wait for its next version."""
        if self._evaluations.is_under_way:
            return self._evaluations.num_held(explorer.session), "held-out tasks"
        return sum(self._buffer.num_held(name) for name in explorer.collectors), "groups"

    async def _look_at(self, explorer: _Explorer) -> None:
        async with self._looking:
            try:
                about = await asyncio.to_thread(read_json, explorer.files.about)
            except ValueError as error:
                logger.warning("explorer %s: %s", explorer.files.name, error)
                return
            if about is not None:
                await self._saw(explorer, about)

    def _made(self, files: ExplorerFiles) -> _Explorer:
        async def handle(call: Call) -> dict[str, Any]:
            return await self._handle(explorer, call)

        explorer = _Explorer(files, Beats(self._silent_s, now=self._now), Calls(files, handle))
        return explorer

    async def _saw(self, explorer: _Explorer, about: dict[str, Any]) -> None:
        session, state = str(about.get("session", "")), about.get("state")
        explorer.beats.saw((session, about.get("beat")))
        explorer.about = about
        if session != explorer.session and session.startswith(f"{self._life}-") and state == UP:
            if explorer.is_here:
                await self._gone(explorer, "it was started again")
            explorer.session, explorer.is_here, explorer.collectors = session, True, set()
            explorer.sent_away, explorer.num_failed, explorer.held_s = "", 0, 0.0
            explorer.evaluates, explorer.num_unanswered = False, 0
            tasks = about.get("tasks")
            explorer.tasks, explorer.num_refused = tasks if tasks in (OWN, CLIENTS) else TRAINERS, 0
            self._say(f"explorer {explorer.files.name} has joined, on {str(about.get('host'))[:80]}")
        elif explorer.is_here and session == explorer.session and state == LEFT:
            await self._gone(explorer, "it has left")

    async def _gone(self, explorer: _Explorer, cause: str) -> None:
        """What it holds is issued again. If it comes back, it comes under another session."""
        explorer.is_here = False
        await self._evaluations.give_back(explorer.session)
        held = [await self._buffer.mark_dead(name, cause) for name in sorted(explorer.collectors)]
        what = f"{sum(map(len, held))} groups are issued to others"
        if explorer.tasks == CLIENTS:
            what = "nothing else waits for its clients"
        elif explorer.tasks == OWN:
            what = f"{len(await self._buffer.withdraw(explorer.files.name))} of its own tasks wait for it"
        elif not self._here(TRAINERS):
            what = f"{len(await self._buffer.withdraw(''))} tasks wait for somebody who works on the trainer's"
        self._say(f"explorer {explorer.files.name} is gone: {cause}; {what}")

    async def _send_away(self, explorer: _Explorer, cause: str) -> None:
        """It does harm: whatever it asks from now on is answered with the cause, which ends it."""
        explorer.sent_away = cause
        await self._gone(explorer, f"{cause}; it is sent away")

    def _say(self, text: str) -> None:
        logger.warning("%s", text)
        self._sayings.append(text)

    async def _handle(self, explorer: _Explorer, call: Call) -> dict[str, Any]:
        """The answer. Raises ValueError for a call that no job of ours makes."""
        verb = getattr(self, f"_on_{call.verb}", None) if call.verb in VERBS else None
        if verb is None:
            raise ValueError(f"no such call: {call.verb[:40]}")
        if call.session != explorer.session:  # it may have come before its sign was seen
            await self._look_at(explorer)
        if not (explorer.is_here and call.session == explorer.session):
            _refuse_one_sent_away(explorer, call)
            if call.verb == "put":
                await self._keep(call, explorer)
            return {"over": True}
        if call.verb in OF_NO_COLLECTOR:
            return await verb(explorer, call)
        arguments = call.arguments
        collector = f"{explorer.files.name}#{call.session[-8:]}/{_text(arguments, 'collector')}"
        if len(explorer.collectors) >= MOST_COLLECTORS and collector not in explorer.collectors:
            raise ValueError(f"collector: more than {MOST_COLLECTORS} in one session")
        if not explorer.collectors:
            self._buffer.restart_deadlines()
        explorer.collectors.add(collector)
        return await verb(explorer, call, collector)

    async def _on_admit(self, explorer: _Explorer, call: Call, collector: str) -> dict[str, Any]:
        offer = self._offer(explorer, call.arguments.get("own"))
        if (OWN if offer else TRAINERS) != explorer.tasks:
            raise ValueError("own: got tasks from an explorer that has none, or none from one that has")
        try:
            admissions = await self._buffer.admit(
                _number(call.arguments, "limit"), timeout_s=self._timeout_s, collector=collector, offer=offer
            )
        except TimeoutError:  # whether that is too long is for the train job to say, not for its explorers
            return {"again": True}
        if not (explorer.is_here and call.session == explorer.session):
            _refuse_one_sent_away(explorer, call)
            return {"over": True}
        if not admissions and self._state == UP and not (offer and offer.used) and collector not in explorer.retired:
            # All groups are out. Should this life end before they are trained on, there are more.
            await asyncio.sleep(BEAT_S)
            return {"again": True}
        used = [] if offer is None else offer.used
        rows = [{**asdict(a), "draw": self._buffer.of(a.group_id)[1]} for a in admissions]
        for row in rows:
            del row["prompt_tokens"]  # an explorer encodes for itself
        return {"admissions": rows, "used": used}

    def _offer(self, explorer: _Explorer, own: Any) -> Offer | None:
        if own is None:
            return None
        try:
            offer = Offer(explorer.files.name, deque((int(draw), Task(**task)) for draw, task in own))
            first, _ = self._buffer.where(explorer.files.name)
            if any(not 0 <= draw < first + MOST_AHEAD or not _is_task(task) for draw, task in offer.tasks):
                raise ValueError(f"draws from {first} on, and tasks as text")
            return offer
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"own: got no tasks ({' '.join(str(error).split())[:120]})") from None

    async def _on_where(self, explorer: _Explorer, call: Call) -> dict[str, Any]:
        """Where the explorer's own tasks go on, or the groups of its clients."""
        first, again = self._buffer.where(explorer.source)
        return {"next": first, "open": again}

    async def _on_give(self, explorer: _Explorer, call: Call) -> dict[str, Any]:
        """A group of its clients, which nobody was asked for: taken now, or not at all. `draw` is the same each time
        that the same group is sent.
        """
        (group,) = groups_of(call.payload or b"")
        prompt, of = call.arguments.get("prompt"), (explorer.source, _number(call.arguments, "draw"))
        if explorer.tasks != CLIENTS or not isinstance(prompt, str):
            raise ValueError("give: expected groups of clients, with their prompt")
        if of[1] >= self._buffer.where(explorer.source)[0] + MOST_AHEAD:
            raise ValueError(f"draw: got {of[1]}, expected the next")
        self._check_content(group, least=0, most=self._published, sizes={self._samplings.default.group_size})
        if self._buffer.is_known(of):
            return {"taken": True}
        if (refusal := self._no_room(group)) is not None:
            return refusal
        rows = await self._stored([group], explorer, lambda _: of)
        if (refusal := self._no_room(group)) is not None:  # others came while it was written
            await asyncio.to_thread(self._store.void, rows)
            return refusal
        group_id = self._buffer.give(group, of=of, prompt=prompt[:MOST_PROMPT])
        explorer.num_groups += 1
        self._note_left_out({group_id: rows[0]})
        return {"taken": True}

    def _note_left_out(self, rows: dict[int, int]) -> None:
        """Groups that were just delivered, and their rows: what operators leave out is marked when they are through
        with it. Nobody waits for that.
        """
        left_out = self._buffer.left_out([*rows])

        async def note() -> None:
            if dropped := [rows[group_id] for group_id in await left_out]:
                await asyncio.to_thread(self._store.left_out, dropped)

        self._noting.add(asyncio.create_task(note()))

    def _no_room(self, group: Group) -> dict[str, Any] | None:
        oldest, _ = group.policy_versions()
        needs = self._buffer.next_min_version()
        if needs is None:
            return {"ended": True}
        return {"needs": needs, "oldest": oldest, "published": self._published} if oldest < needs else None

    async def _stored(
        self, groups: list[Group], explorer: _Explorer, of: Callable[[int], tuple[str, int]]
    ) -> list[int]:
        try:
            return await asyncio.to_thread(self._store.add, groups, explorer=explorer.files.name, of=of)
        except (OSError, sqlite3.Error) as error:
            raise StoreFailed(f"{self._store.folder}: groups could not be written: {error}") from error

    async def _on_evaluation(self, explorer: _Explorer, call: Call) -> dict[str, Any]:
        """Held-out tasks, once there are any."""
        if explorer.tasks != TRAINERS:
            raise ValueError("evaluation: expected an explorer that works on the trainer's tasks")
        explorer.evaluates = True

        def is_here() -> bool:
            return explorer.is_here and explorer.session == call.session

        tasks = await self._evaluations.take(
            call.session, num_holders=lambda: sum(e.evaluates for e in self._here(TRAINERS)), is_here=is_here
        )
        if tasks is None:
            _refuse_one_sent_away(explorer, call)
            return {"over": True}
        explorer.held_s = 0.0
        return tasks

    async def _on_evaluating(self, explorer: _Explorer, call: Call) -> dict[str, Any]:
        """A sign that it gets on with what it holds."""
        explorer.held_s = 0.0
        return {}

    async def _on_evaluated(self, explorer: _Explorer, call: Call) -> dict[str, Any]:
        """One that answers nothing for so often in a row is sent away, as one whose groups fail is."""
        try:
            answers, why = call.arguments.get("answers"), _text(call.arguments, "why")
            if not isinstance(answers, dict):
                raise ValueError(f"answers: got {answers!r:.40}, expected an object")
            number = await self._evaluations.answer(explorer.session, _number(call.arguments, "number"), answers)
        except ValueError as error:
            await self._evaluations.give_back(explorer.session)
            number, why = 0, str(error)
        explorer.held_s, explorer.num_unanswered = 0.0, 0 if number else explorer.num_unanswered + 1
        if explorer.num_unanswered >= MOST_FAILED:
            what = f"{MOST_FAILED} times in a row it has answered no held-out task"
            await self._send_away(explorer, f"{what}, the last: {why}"[:300])
        return {"tasks": number}

    async def _on_put(self, explorer: _Explorer, call: Call, collector: str) -> dict[str, Any]:
        try:
            wanted = self._wanted(call, collector)
        except Exception as error:
            await self._refused(explorer, collector, error)
            raise
        if wanted:
            explorer.num_refused = explorer.num_failed = 0
            explorer.held_s = 0.0
            of = {g.group_id: self._buffer.of(g.group_id) for g in wanted}
            rows = dict(zip(of, await self._stored(wanted, explorer, of.__getitem__), strict=True))
            # While it was written they may have been taken away from it.
            wanted = [g for g in wanted if self._buffer.admission_of(g.group_id, collector) is not None]
            late = [rows[group_id] for group_id in rows.keys() - {g.group_id for g in wanted}]
            await self._buffer.put(wanted)
            explorer.num_groups += len(wanted)
            self._note_left_out({g.group_id: rows[g.group_id] for g in wanted})
            if late:
                await asyncio.to_thread(self._store.void, late)
        return {"groups": len(wanted)}

    def _wanted(self, call: Call, collector: str) -> list[Group]:
        """Those of the delivered groups that are still theirs to deliver. Raises for one that cannot be trained on."""
        wanted: dict[int, Group] = {}
        for group in groups_of(call.payload or b""):
            admission = self._buffer.admission_of(group.group_id, collector)
            if admission is None or admission.attempt != group.attempt:
                logger.info("group %d of %s comes late: it was issued again", group.group_id, collector)
                continue
            self._check(group, admission)
            wanted[group.group_id] = group
        return list(wanted.values())

    async def _refused(self, explorer: _Explorer, collector: str, error: Exception) -> None:
        """What it was to deliver is issued again; one that delivers nothing else is sent away."""
        explorer.num_refused += 1
        await self._buffer.give_back(collector, f"it delivered what cannot be trained on: {error}"[:300])
        if explorer.num_refused >= MOST_REFUSED:
            await self._send_away(
                explorer, f"{MOST_REFUSED} deliveries in a row could not be trained on, the last: {error}"[:300]
            )

    def _check(self, group: Group, admission: Admission) -> None:
        size = self._samplings.of(admission.task).group_size
        self._check_content(group, least=admission.min_policy_version, most=self._published, sizes={size})
        if group.task_id != admission.task.task_id:
            raise ValueError(
                f"group {group.group_id}: got task {str(group.task_id)[:80]}, expected {admission.task.task_id}"
            )

    def _check_content(self, group: Group, *, least: int, most: int, sizes: Collection[int]) -> None:
        """That it can be trained on: its tensors, its versions from `least` to `most`, and its size."""
        samples = group.samples
        tokens = torch.cat([samples["prompt_tokens"], samples["response_tokens"]])
        longest = int((samples["prompt_lengths"] + samples["response_lengths"]).max())
        if (
            int(tokens.min()) < 0
            or (self._vocab_size is not None and int(tokens.max()) >= self._vocab_size)
            or longest > self._max_length
            or not bool(samples["behavior_logprobs"].isfinite().all())
        ):
            raise ValueError(
                f"group {group.group_id}: expected tokens of a vocabulary of {self._vocab_size}, at most "
                f"{self._max_length} in a conversation, and finite logprobs"
            )
        check_masks(samples, self._samplings.default.masks)
        for name in self._samplings.default.masks:
            if int(samples["token_tensors"][name].max()) >= (self._vocab_size or 2**31):
                raise ValueError(f"group {group.group_id}: {name} has an id outside of the vocabulary")
        oldest, newest = group.policy_versions()
        if not least <= oldest <= newest <= most:
            raise ValueError(
                f"group {group.group_id}: got tokens of versions {oldest} to {newest}, expected {least} to {most}"
            )
        if len(group) not in sizes or not isinstance(group.task_id, str):
            expected = " or ".join(map(str, sorted(sizes)))
            raise ValueError(f"group {group.group_id}: got {len(group)} trajectories, expected {expected}")

    async def _keep(self, call: Call, explorer: _Explorer) -> None:
        """Groups for an earlier life of the train job: those made under weights that are still good are of use."""
        if call.session.startswith(self._life):
            return  # of a session that is over: issued again
        newest = good_until(self._lives, call.session[:8])
        draws, source = call.arguments["draws"], explorer.files.name if call.arguments.get("own") is True else ""
        for group in groups_of(call.payload or b""):
            try:
                self._check_content(group, least=0, most=newest, sizes=self._samplings.group_sizes)
            except ValueError as error:  # it is made again
                logger.info("of an earlier life, from explorer %s: %s", explorer.files.name, error)
                continue
            of = (source, int(draws[str(group.group_id)]))
            if self._buffer.keep(group, of=of):
                await self._stored([group], explorer, lambda _, of=of: of)

    async def _on_retried(self, explorer: _Explorer, call: Call, collector: str) -> dict[str, Any]:
        group_id, attempt = _number(call.arguments, "group_id"), _number(call.arguments, "attempt")
        if self._buffer.admission_of(group_id, collector) is not None:
            await self._buffer.retried(group_id, attempt=attempt)
            explorer.held_s = 0.0
        return {}

    async def _on_fail(self, explorer: _Explorer, call: Call, collector: str) -> dict[str, Any]:
        group_id, attempt = _number(call.arguments, "group_id"), _number(call.arguments, "attempt")
        if self._buffer.admission_of(group_id, collector) is None:
            return {}
        reason = _text(call.arguments, "reason")
        await self._buffer.fail(group_id, reason, attempt=attempt, counts=False)
        explorer.num_failed, explorer.held_s = explorer.num_failed + 1, 0.0
        if explorer.num_failed >= MOST_FAILED:
            await self._send_away(explorer, f"{MOST_FAILED} groups in a row have failed, the last: {reason}"[:300])
        return {}

    async def _on_give_back(self, explorer: _Explorer, call: Call, collector: str) -> dict[str, Any]:
        return {"group_ids": await self._buffer.give_back(collector, _text(call.arguments, "reason"))}

    async def _on_mark_dead(self, explorer: _Explorer, call: Call, collector: str) -> dict[str, Any]:
        return {"group_ids": await self._buffer.mark_dead(collector, _text(call.arguments, "reason"))}

    async def _on_retire(self, explorer: _Explorer, call: Call, collector: str) -> dict[str, Any]:
        explorer.retired.add(collector)
        await self._buffer.retire(collector)
        return {}


def _refuse_one_sent_away(explorer: _Explorer, call: Call) -> None:
    if explorer.sent_away and call.session == explorer.session:
        raise ValueError(f"explorer {explorer.files.name} was sent away: {explorer.sent_away}")


def _is_task(task: Task) -> bool:
    return isinstance(task.task_id, str) and isinstance(task.prompt, str | list) and isinstance(task.answer, str)


def _earlier_lives(meeting: Meeting) -> list[tuple[str, int]]:
    about = read_json(meeting.train) or {}
    return [(str(life), int(began)) for life, began in about.get("lives", ())]


OF_NO_COLLECTOR = ("where", "give", "evaluation", "evaluating", "evaluated")
VERBS = ("admit", "put", "retried", "fail", "give_back", "mark_dead", "retire", *OF_NO_COLLECTOR)


def _text(arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: got {value!r:.40}, expected text")
    return value[:1000]


def _number(arguments: dict[str, Any], name: str) -> int:
    value = arguments.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}: got {value!r:.40}, expected a whole number")
    return value


class Begins(Protocol):
    """See `replay.position.Position`."""

    @property
    def num_batches(self) -> int: ...
    def __contains__(self, draw: int) -> bool: ...


def take_over(store: GroupStore, buffer: Buffer, position: Begins, *, policy_version: int) -> None:
    """What an earlier life of the run has finished, for the one that begins at `position` with these weights."""
    for stored in store.resume(num_batches=position.num_batches, policy_version=policy_version):
        source, draw = stored.of
        if buffer.keep(stored.group, of=stored.of):
            continue
        first, again = buffer.where(source)
        if (draw >= first or draw in again) if source else draw in position:  # another of the same draw is kept
            store.void([stored.row])
        else:  # its draw is over: its batch was trained on, and its job was killed before it had written that down
            store.trained([stored.of], batch=position.num_batches - 1)


def shared_model(path: Path, into: Path) -> None:
    """The files of a model's folder where explorers find them: links on one disk, copies otherwise."""
    import shutil

    into.mkdir(parents=True, exist_ok=True)
    for file in path.iterdir():
        if not file.is_file():
            continue
        there = into / file.name
        there.unlink(missing_ok=True)
        try:
            os.link(file.resolve(), there)
        except OSError:
            shutil.copyfile(file, there)

"""The explorer's side of the meeting: what its collectors know as the replay buffer and the parameter server.

A session is this job's life with one life of the train job. It ends when either is thought lost: then what the
collectors hold is no longer theirs, and they go on in another session as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import secrets
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..failures import Kind, PartFailed
from ..group import Group
from ..transports.files import newest_publication
from ..types import Admission, Task
from ..weights import Publication
from .calls import Caller
from .folder import (
    BEAT_S,
    CLIENTS,
    ENDED,
    LEFT,
    OWN,
    TRAINERS,
    UP,
    Beats,
    Meeting,
    good_until,
    read_json,
    write_json,
)
from .group_bytes import laid_out

logger = logging.getLogger(__name__)

LOOK_S = 0.05
LEAVE_S = 30.0
"""How long a job that leaves waits until what it has delivered was taken."""


@dataclass(frozen=True)
class _Held:
    """Who holds a group of ours: under which session it was admitted, its draw (see `replay.sources`), and the oldest
    weights that it may start under.
    """

    session: str
    collector: str
    draw: int
    min_policy_version: int


class SessionOver(Exception):
    """The train job has given this session up, or is another one by now."""


class TrainLink:
    """`run` never returns. `wait_s`: how long the train job may be gone. `own`: the explorer's own tasks, in an order
    that never changes, each time anew (None: it works on the trainer's). `clients`: it works on no tasks at all, and
    gives what its clients commit. `now`: the clock that tells whether the train job is silent.
    """

    def __init__(
        self,
        meeting: Meeting,
        name: str,
        *,
        silent_s: float,
        wait_s: float,
        own: Callable[[], Iterator[Task]] | None = None,
        clients: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks = CLIENTS if clients else TRAINERS if own is None else OWN
        self._meeting, self._files = meeting, meeting.explorer(name)
        self._caller = Caller(self._files)
        self._silent_s, self._wait_s = silent_s, wait_s
        self._own = own
        self._draws: Iterator[tuple[int, Task]] | None = None
        self._offers: deque[tuple[int, Task]] = deque()
        self._drawing = asyncio.Lock()
        self._beats = Beats(silent_s, now=now)
        self._numbers: dict[str, int] = {}  # commit -> draw, of those that were not answered
        self._free_numbers: list[int] = []
        self._new_numbers: Iterator[int] | None = None
        self._numbering = asyncio.Lock()
        self._train: dict[str, Any] = {}
        self._life = self._session = ""
        self._state, self._beat = UP, 0
        self._changed = asyncio.Condition()
        self._signing = asyncio.Lock()
        self._holders: dict[tuple[int, int], _Held] = {}  # by group and attempt
        self._no_more: set[str] = set()  # collectors that get no more groups
        self._dead: set[str] = set()
        self._num_undelivered = 0
        self._owner = secrets.token_hex(8)
        self.newest_pulled = -1
        self._was_gone = self._is_over = False
        self._sayings: list[str] = []
        self.num_given = 0
        self.must_start_again = False
        """The train job continues from weights that are older than what the engines serve."""

    # -------------------------------------------------------------------------------------------- as the replay buffer

    async def admit(self, limit: int, collector: str) -> list[Admission]:
        """See `ReplayBuffer.admit`. Waits for as long as the train job is gone, `wait_s` at most."""
        while collector not in self._no_more and await self._until_here():
            session = self._session
            try:
                if self._own is None:
                    answer = await self._ask("admit", limit=limit, collector=collector)
                else:
                    answer = await self._ask_with_own(limit, collector)
            except SessionOver:
                continue
            if answer is None:
                return []
            if answer.get("again") or (answer.get("used") and not answer["admissions"]):
                continue
            admissions = [self._admitted(row, collector, session) for row in answer["admissions"]]
            if admissions and collector in self._dead:
                await self.mark_dead(collector, "it is no more")
                return []
            return admissions
        return []

    async def _ask_with_own(self, limit: int, collector: str) -> dict[str, Any] | None:
        """None: its tasks have ended."""
        session = self._session
        async with self._drawing:
            if self._draws is None:
                where = await self._ask("where")
                self._draws = self._drawn_from(where["next"], {*where["open"]})
                self._offers.clear()
            draws = self._draws
            while len(self._offers) < limit and (drawn := await asyncio.to_thread(next, draws, None)) is not None:
                self._offers.append(drawn)
            offered = [self._offers.popleft() for _ in range(min(limit, len(self._offers)))]
        if not offered:
            return None
        own = [[draw, asdict(task)] for draw, task in offered]
        answer = await self._ask("admit", limit=limit, collector=collector, own=own)
        if session == self._session:
            used = {*answer.get("used", ())}
            self._offers.extendleft(reversed([offer for offer in offered if offer[0] not in used]))
        return answer

    def _drawn_from(self, first: int, again: set[int]) -> Iterator[tuple[int, Task]]:
        assert self._own is not None
        return ((draw, task) for draw, task in enumerate(self._own()) if draw >= first or draw in again)

    def _admitted(self, row: dict[str, Any], collector: str, session: str) -> Admission:
        draw = row.pop("draw")
        admission = Admission(**{**row, "task": Task(**row["task"])})
        self._holders[admission.group_id, admission.attempt] = _Held(
            session, collector, draw, admission.min_policy_version
        )
        return admission

    async def put(self, groups: Sequence[Group]) -> None:
        """Returns when they are on disk; a train job that is gone takes them when it is back."""
        by_holder: dict[tuple[str, str], list[tuple[Group, int]]] = defaultdict(list)
        for group in groups:
            held = self._holders.pop((group.group_id, group.attempt), None)
            if held is not None:  # else it was given back
                by_holder[held.session, held.collector].append((group, held.draw))
        for (session, collector), own in by_holder.items():
            arguments = {
                "collector": collector,
                "own": self._tasks == OWN,
                "draws": {group.group_id: draw for group, draw in own},
            }
            answer = await self._caller.send(session, "put", arguments, laid_out([group for group, _ in own]))
            self._num_undelivered += 1
            answer.add_done_callback(functools.partial(self._delivered, session))

    async def give(self, group: Group, *, commit: str, prompt: str, within_s: float) -> dict[str, Any]:
        """A finished group that nobody was asked for. Whether it was `taken`; if not, which version it `needs`, whether
        the run has `ended`, or nothing, if there was no answer `within_s`: then it may have been taken, and the same
        group is to be given again under the same name, `commit`.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while await self._until_here():
                    try:
                        number = await self._number(commit)
                        if self.must_start_again:  # its weights may be no more
                            break
                        answer = await self._ask("give", laid_out([group]), draw=number, prompt=prompt)
                    except SessionOver:
                        continue
                    del self._numbers[commit]
                    if answer.get("taken"):
                        self.num_given += 1
                    else:
                        self._free_numbers.append(number)
                    return answer
        return {"ended": True} if self.has_ended else {}

    async def _number(self, commit: str) -> int:
        async with self._numbering:
            if commit not in self._numbers:
                if self._new_numbers is None:
                    self._new_numbers = itertools.count((await self._ask("where"))["next"])
                self._numbers[commit] = self._free_numbers.pop() if self._free_numbers else next(self._new_numbers)
            return self._numbers[commit]

    async def evaluation(self) -> dict[str, Any] | None:
        """Held-out tasks that the train job wants answered, once there are any: see `Evaluations.take`, with the
        `session` that they belong to. None: there will be no more, or none for this explorer.
        """
        while self._tasks == TRAINERS and await self._until_here():
            session = self._session
            try:
                return {**await self._ask("evaluation"), "session": session}
            except SessionOver:
                continue
        return None

    async def evaluating(self, session: str, *, moved: bool) -> bool:
        """Whether its answers are still wanted: not by another life of the train job. `moved`: it gets on with them."""
        if moved and session == self._session:
            await self._tell("evaluating")()
        return session == self._session

    async def evaluated(self, session: str, number: int, answers: dict[str, Any], why: str) -> None:
        """What its engines say, by index; `why` there is none. After the session, others are asked."""
        if session == self._session:
            await self._tell("evaluated")(number=number, answers=answers, why=why)

    async def until_over(self) -> None:
        """Returns when the train job has ended, or the engines must start again."""
        await self._until_ended()

    async def retried(self, group_id: int, attempt: int) -> None:
        await self._report("retried", group_id, attempt)

    async def fail(self, group_id: int, reason: str, attempt: int) -> None:
        await self._report("fail", group_id, attempt, reason=reason)
        self._holders.pop((group_id, attempt), None)

    async def give_back(self, collector: str, reason: str) -> list[int]:
        self._let_go(collector)
        return (await self._tell("give_back")(collector=collector, reason=reason)).get("group_ids", [])

    async def mark_dead(self, collector: str, reason: str) -> list[int]:
        """Does not wait for a train job that is gone: the call lies there when it is back, in this life or another."""
        self._no_more.add(collector)
        self._dead.add(collector)
        self._let_go(collector)
        if self._is_gone:
            if self._session:
                await self._caller.send(self._session, "mark_dead", {"collector": collector, "reason": reason})
            return []
        return (await self._tell("mark_dead")(collector=collector, reason=reason)).get("group_ids", [])

    async def retire(self, collector: str) -> None:
        self._no_more.add(collector)
        await self._tell("retire")(collector=collector)

    # ----------------------------------------------------------------------------------------- as the parameter server

    async def pull(self, newer_than: int, timeout_s: float) -> Publication | None:
        """See `ParameterServer.pull`: the newest that the train job of this session has published."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < deadline:
            published, life = self._train.get("published", -1), self._train.get("life")
            if not self.must_start_again and life == self._life and published > newer_than:
                try:
                    publication = await asyncio.to_thread(
                        newest_publication, self._meeting.weights, newer_than=newer_than, at_most=published
                    )
                except (OSError, ValueError) as error:  # removed in this moment, or not yet seen whole on a shared disk
                    logger.info("a version could not be read yet: %s", error)
                    publication = None
                if publication is not None and self._train.get("life") == life and not self.must_start_again:
                    self.newest_pulled = max(self.newest_pulled, publication.manifest.policy_version)
                    return publication
            await asyncio.sleep(LOOK_S)
        return None

    # ------------------------------------------------------------------------------------------------------- the link

    @property
    def has_ended(self) -> bool:
        """The train job has done all of its steps."""
        return self._train.get("state") == ENDED

    def sayings(self) -> list[str]:
        """What a user should know, since the last call."""
        said, self._sayings = self._sayings, []
        return said

    async def run(self) -> None:
        answers = asyncio.create_task(self._caller.run())
        try:
            next_beat = 0.0
            while True:
                if answers.done():
                    answers.result()
                await self._look()
                now = asyncio.get_running_loop().time()
                if now >= next_beat:
                    next_beat = now + BEAT_S
                    await self._give_sign()
                await asyncio.sleep(LOOK_S)
        finally:
            answers.cancel()

    async def leave(self) -> None:
        """What was delivered is taken first, if the train job is there."""
        deadline = asyncio.get_running_loop().time() + LEAVE_S
        while self._num_undelivered and not self._is_gone and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(LOOK_S)
        self._state = LEFT
        await self._give_sign()

    @property
    def _is_gone(self) -> bool:
        return self._train.get("state") != UP or self._beats.is_silent

    async def _look(self) -> None:
        try:
            train = await asyncio.to_thread(read_json, self._meeting.train) or {}
        except ValueError:  # on a shared disk, replaced in this moment; if it lasts, the train job is silent
            train = self._train
        self._beats.saw((train.get("life"), train.get("beat")))
        self._train = train
        if self._is_gone != self._was_gone:
            self._was_gone = self._is_gone
            self._say(self._how_it_is())
        if self._beats.silent_for_s > self._wait_s:
            raise PartFailed(
                "train", f"the train job was not there for {self._wait_s:g} s (explorer.wait_s)", kind=Kind.LOST
            )
        if train.get("life", self._life) != self._life and train.get("state") == UP:
            if self._life and self._newest_needed() > good_until(train.get("lives", []), self._life):
                self.must_start_again = True
            self._life = train["life"]
            await self._begin_session()
        elif self._is_over and not self._is_gone:
            await self._begin_session()
        elif train.get("state") == ENDED or self.must_start_again:
            async with self._changed:
                self._changed.notify_all()

    def _newest_needed(self) -> int:
        """The newest version that its engines serve, or that a group of theirs waits for: that may never come again."""
        return max([self.newest_pulled, *(held.min_policy_version for held in self._holders.values())])

    def _how_it_is(self) -> str:
        if not self._is_gone:
            return "the train job is there"
        state = self._train.get("state")
        if state == ENDED:
            return "the train job has ended"
        how = "was stopped" if state != UP else f"has given no sign of life for {self._beats.silent_for_s:.0f} s"
        return f"the train job {how}; what is finished is kept for it (explorer.wait_s: {self._wait_s:g})"

    async def _begin_session(self) -> None:
        self._session, self._is_over = f"{self._life}-{secrets.token_hex(4)}", False
        self._draws = None
        await self._give_sign()
        async with self._changed:
            self._changed.notify_all()

    async def _until_here(self) -> bool:
        """Whether groups are wanted, or will be; waits for a session."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._session or self.has_ended or self.must_start_again)
        return not (self.has_ended or self.must_start_again)

    async def _ask(self, verb: str, payload: bytes | None = None, **arguments: Any) -> dict[str, Any]:
        session = self._session
        answered = await self._caller.send(session, verb, arguments, payload)
        ended = asyncio.ensure_future(self._until_ended())
        try:
            await asyncio.wait({answered, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not answered.done():
            raise SessionOver
        answer = answered.result()
        if answer.get("over"):
            if session == self._session and not self.has_ended:
                await self._begin_session()
            raise SessionOver
        return _checked(answer)

    async def _until_ended(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.has_ended or self.must_start_again)

    def _let_go(self, collector: str) -> None:
        self._holders = {key: held for key, held in self._holders.items() if held.collector != collector}

    async def _report(self, verb: str, group_id: int, attempt: int, **arguments: Any) -> None:
        held = self._holders.get((group_id, attempt))
        if held is not None and held.session == self._session:
            await self._tell(verb)(collector=held.collector, group_id=group_id, attempt=attempt, **arguments)

    def _tell(self, verb: str) -> Any:
        async def tell(**arguments: Any) -> dict[str, Any]:
            if not self._session:
                return {}
            try:
                return await self._ask(verb, **arguments)
            except SessionOver:  # all that it held is issued again
                return {}

        return tell

    def _delivered(self, session: str, answer: asyncio.Future[Any]) -> None:
        self._num_undelivered -= 1
        if answer.cancelled():
            return
        if (error := answer.result().get("error")) is not None:
            self._say(f"warning: the train job refused groups: {error}")
        elif answer.result().get("over") and session == self._session:
            self._is_over = True

    async def _give_sign(self) -> None:
        async with self._signing:
            self._beat += 1
            await asyncio.to_thread(self._sign_as_the_only_one)

    def _sign_as_the_only_one(self) -> None:
        about = None
        with contextlib.suppress(ValueError):
            about = read_json(self._files.about)
        if self._beat > 1 and about is not None and about.get("owner") != self._owner:
            who = f"process {about.get('pid')} on {about.get('host')}"
            raise PartFailed(
                "explorer", f"explorer.name: {self._files.name} is explored by {who} by now", kind=Kind.LOST
            )
        write_json(self._files.about, self._sign())

    def _sign(self) -> dict[str, Any]:
        return {
            "owner": self._owner,
            "tasks": self._tasks,
            "session": self._session,
            "state": self._state,
            "beat": self._beat,
            "policy_version": self.newest_pulled,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def _say(self, text: str) -> None:
        logger.warning("%s", text)
        self._sayings.append(text)


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if (error := answer.get("error")) is not None:
        raise RuntimeError(f"the train job refused a call: {error}")
    return answer

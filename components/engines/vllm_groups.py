"""Groups of completions as vLLM's front end sees them: one message asks for a group, one record tells of a pass.

`Groups` assembles completions from these records, and wakes whoever waits for a group. What runs in the engine's own
process is `vllm_scheduler.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..collector.engine import Heard
from ..collector.progress import Sampled

GROUP = "group-"
"""What the ids of such requests begin with."""
PASS = "pass"
"""The id of the record of a pass."""
MEMBERS, COUNTS, ENDED, REASONS = "members", "counts", "ended", "reasons"
"""Of that record: ids; how many new tokens each has; positions of those that ended, and why."""


def member_id(group: str, index: int) -> str:
    return f"{group}/{index}"


def group_of(member: str) -> str:
    return member.rpartition("/")[0]


def is_of_group(request_id: str) -> bool:
    """Whether it is a group's or a member's."""
    return request_id.startswith(GROUP)


@dataclass
class Member:
    """One completion on its way. `kept` [tokens][k]: with top_k, ids and logprobs of the likeliest, the sampled one
    first.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None


class _Group:
    def __init__(self, name: str, n: int, *, num_kept: int, version: int | None, heard: Heard | None) -> None:
        self.name = name
        self.num_kept = num_kept
        self.version = version
        self.heard = heard
        self.members = [Member(i) for i in range(n)]
        self.num_left = n
        self.may_go_on = False  # in the engine, though nobody waits for it
        self.ended: asyncio.Future[list[Member]] = asyncio.get_running_loop().create_future()

    def end(self, member: Member, reason: str) -> None:
        member.finish_reason = reason
        self.num_left -= 1
        if not self.num_left and not self.ended.done():
            self.ended.set_result(self.members)


class Groups:
    """Those under way. `abort`: tells the engine of groups that nobody waits for."""

    def __init__(self, abort: Callable[[list[str]], Awaitable[None]]) -> None:
        self._abort = abort
        self._groups: dict[str, _Group] = {}
        self._members: dict[str, tuple[_Group, Member]] = {}  # that have not ended

    async def sample(
        self,
        request_id: str,
        send: Callable[[], Awaitable[None]],
        *,
        n: int,
        num_kept: int = 0,
        version: int | None = None,
        heard: Heard | None = None,
    ) -> list[Member]:
        """The n completions of a request, which `send` hands to the engine. Cancelling it aborts them.

        `num_kept`: how many of the likeliest tokens to note. `version`: of all tokens (None: what passes say).
        """
        group = self._groups[request_id] = _Group(request_id, n, num_kept=num_kept, version=version, heard=heard)
        for member in group.members:
            self._members[member_id(request_id, member.index)] = group, member
        try:
            await send()
            return await group.ended
        except BaseException:
            if not group.ended.done() or group.ended.cancelled() or group.may_go_on:
                await self._abort([request_id])
            raise
        finally:
            del self._groups[request_id]
            for member in group.members:
                self._members.pop(member_id(request_id, member.index), None)

    def passed(self, record: Any, version: str) -> list[Sampled]:
        """Note what a pass sampled. `record`: the scheduler's. `version`: of the engine's weights, by vLLM's name."""
        said, tokens = record.kv_transfer_params, record.new_token_ids
        drawn: list[list[int]] = []
        logprobs: list[list[float]] = []
        if record.new_logprobs is not None:
            drawn, logprobs = record.new_logprobs.logprob_token_ids.tolist(), record.new_logprobs.logprobs.tolist()
        assert [row[0] for row in drawn] == tokens, "logprobs of other tokens than were sampled"
        reasons = dict(zip(said[ENDED], said[REASONS], strict=True))
        sampled, end = [], 0
        for i, (name, count) in enumerate(zip(said[MEMBERS], said[COUNTS], strict=True)):
            start, end = end, end + count
            if (found := self._members.get(name)) is None:
                continue  # aborted; the news had not reached the engine
            group, member = found
            new, their = tokens[start:end], [row[0] for row in logprobs[start:end]]
            under = int(version) if group.version is None else group.version
            member.tokens += new
            member.logprobs += their
            member.versions += [under] * count
            if group.num_kept:
                rows = zip(drawn[start:end], logprobs[start:end], strict=True)
                member.kept += [dict(zip(*(part[: 1 + group.num_kept] for part in row), strict=True)) for row in rows]
            if group.heard is not None and count:
                group.heard(member.index, new, their, under)
            reason = reasons.get(i)
            sampled.append(Sampled(group.name, name, count, reason is not None))
            if reason is not None:
                del self._members[name]
                group.end(member, reason)
        return sampled

    def ended(self, request_id: str, reason: str) -> list[Sampled]:
        """The engine ended a group, or one of its members, outside of a pass: it was refused or aborted there."""
        group = self._groups.get(request_id)
        names = [request_id] if group is None else [member_id(request_id, m.index) for m in group.members]
        sampled = []
        for name in names:
            if (found := self._members.pop(name, None)) is not None:
                found[0].end(found[1], reason)
                sampled.append(Sampled(found[0].name, name, 0, True))
        return sampled

    async def give_up(self, request_ids: list[str]) -> None:
        """Abort these, as far as they are under way: whoever waits for one gets what there is of it."""
        if own := [name for name in request_ids if name in self._groups]:
            await self._abort(own)
        for name in own:
            self.ended(name, "abort")

    def fail(self, error: Exception, request_ids: Iterable[str] | None = None) -> None:
        """Everyone who waits for these is told; None: the engine is lost, and all are."""
        for name in self._groups if request_ids is None else request_ids:
            group = self._groups.get(name)
            if group is not None and not group.ended.done():
                group.may_go_on = request_ids is not None
                group.ended.set_exception(error)

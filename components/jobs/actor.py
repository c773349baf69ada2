"""The link to the train job as a Ray actor: collectors call it as they call the buffer and the parameter server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from ..config import Config
from ..envs.base import all_or_none
from ..failures import Watched, as_text
from ..group import Group
from ..monitor.logs import log_to_file
from ..tasks.prompting import Prompter
from ..tasks.queue_tasks import QueueTaskSet
from ..tasks.taskset import build_taskset
from ..types import Admission, Task
from ..weights import Publication
from .folder import OWN, Meeting
from .link import TrainLink


class TrainLinkActor(Watched):
    def __init__(self, config: Config, *, role: str, log_file: Path, log_level: str, clients: bool = False) -> None:
        """`clients`: see `TrainLink`."""
        self.role = role
        log_to_file(log_file, log_level)
        explorer = config.explorer
        self._config = config
        self._link = TrainLink(
            Meeting(config.meeting_folder),
            explorer.name,
            silent_s=explorer.silent_s,
            wait_s=explorer.wait_s,
            own=self._tasks if explorer.tasks == OWN and not clients else None,
            clients=clients,
        )

    def _tasks(self) -> Iterator[Task]:
        """Its own, without those whose prompts are too long."""
        config = self._config
        taskset = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval)
        assert not isinstance(taskset, QueueTaskSet), "a rule on settings"
        assert config.model.path is not None
        prompter, most = Prompter.of(config.model), config.rollout.max_prompt_tokens
        return (task for task in taskset if len(prompter.encode(task.prompt)) <= most)

    async def start(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "node": ray.util.get_node_ip_address()}

    @as_text
    async def serve(self) -> None:
        """Never returns."""
        await self._link.run()

    async def state(self) -> dict[str, Any]:
        """`said`: what a user should know, since the last call."""
        return {
            "has_ended": self._link.has_ended,
            "must_start_again": self._link.must_start_again,
            "policy_version": self._link.newest_pulled,
            "given": self._link.num_given,
            "said": self._link.sayings(),
        }

    @as_text
    async def leave(self) -> None:
        await self._link.leave()

    @as_text
    async def admit(
        self, limit: int, timeout_s: float, collector: str, finished: Sequence[Group] = ()
    ) -> list[Admission]:
        """Groups travel while others are asked for: what is put may take long, and needs no answer."""
        calls: list[Coroutine[Any, Any, Any]] = [self._link.put(finished)] if finished else []
        calls.append(self._link.admit(limit, collector))  # second: it counts on the room of what is put
        return (await all_or_none(calls))[-1]

    @as_text
    async def put(self, groups: Sequence[Group]) -> None:
        await self._link.put(groups)

    @as_text
    async def retried(self, group_id: int, attempt: int) -> None:
        await self._link.retried(group_id, attempt)

    @as_text
    async def fail(self, group_id: int, reason: str, attempt: int) -> None:
        await self._link.fail(group_id, reason, attempt)

    @as_text
    async def give(self, group: Group, commit: str, prompt: str, within_s: float) -> dict[str, Any]:
        return await self._link.give(group, commit=commit, prompt=prompt, within_s=within_s)

    @as_text
    async def evaluation(self) -> dict[str, Any] | None:
        return await self._link.evaluation()

    @as_text
    async def evaluating(self, session: str, moved: bool) -> bool:
        return await self._link.evaluating(session, moved=moved)

    @as_text
    async def evaluated(self, session: str, number: int, answers: dict[str, Any], why: str) -> None:
        await self._link.evaluated(session, number, answers, why)

    @as_text
    async def until_over(self) -> None:
        await self._link.until_over()

    @as_text
    async def give_back(self, collector: str, reason: str) -> list[int]:
        return await self._link.give_back(collector, reason)

    @as_text
    async def mark_dead(self, collector: str, reason: str) -> list[int]:
        return await self._link.mark_dead(collector, reason)

    @as_text
    async def retire(self, collector: str) -> None:
        await self._link.retire(collector)

    @as_text
    async def pull(self, newer_than: int, timeout_s: float, oldest: bool) -> Publication | None:
        assert not oldest, "a rule on settings"
        return await self._link.pull(newer_than, timeout_s)

    async def ping(self) -> None:
        await asyncio.sleep(0)


TrainLinkRemote = ray.remote(num_cpus=0)(TrainLinkActor)
"""Create it with a `max_concurrency` above the number of its waiting callers: see `runtime.launch`."""

"""The replay buffer as a Ray actor: it owns the tasks, and puts each rank's share of a batch into the object store."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from .. import spans
from ..config import Config, derive
from ..config.inputs import EvalSampling
from ..config.model_files import model_config
from ..failures import Watched, as_text
from ..garbage import settle
from ..group import Group
from ..jobs.fit import must_be_equal
from ..jobs.folder import Meeting
from ..jobs.host import Host, shared_model, take_over
from ..jobs.store import GroupStore
from ..monitor.logs import log_to_file
from ..tasks.prompting import Prompter
from ..tasks.queue_tasks import QueueTaskSet
from ..tasks.taskset import build_taskset
from ..tasks.truncate import truncated
from ..types import Admission, Evaluated, Task, Trajectory
from .admission import AdmissionRule
from .ahead import Ahead
from .operator_pool import OperatorPool
from .operators import Pipeline
from .position import Position
from .reuse import ReusePool, priority_of
from .saved_groups import groups_as_text, groups_from_text
from .stream import TaskStream
from .suspects import SuspectWatch

if TYPE_CHECKING:
    from .buffer import ServedBatch

logger = logging.getLogger(__name__)

POLL_S = 0.2
MOST_ENCODED = 256
"""Prompts whose tokens are kept from being measured to being admitted; what is dropped, collectors encode again."""
"""Interval between polls of a queue that had no task."""


@dataclass(frozen=True, kw_only=True)
class BatchRefs:
    """A batch as the driver sees it: `steps[i][rank]` are references into the object store.

    `rollouts[i]`: the readable trajectories of that step. `suspects`: answers to list, see `SuspectWatch`, of the
    groups that were delivered since the batch before.
    """

    index: int
    group_ids: list[int]
    steps: list[list[Any]]
    metrics: dict[str, float]
    rollouts: list[list[dict]]
    suspects: list[dict] = field(default_factory=list)


class ReplayBufferActor(Watched):
    def __init__(
        self,
        config: Config,
        *,
        role: str,
        log_file: Path,
        start: dict[str, Any] | None = None,
        meets: bool = False,
        kept: Path | None = None,
    ) -> None:
        """`meets`: those who generate are jobs of their own, see `host`. `kept`: a folder for groups that are trained
        on (None: they are not kept there).
        """
        self.role = role
        log_to_file(log_file, config.log.level)
        self._host: Host | None = None
        self._store: GroupStore | None = None
        self._kept = None if kept is None else GroupStore(kept)
        self._log_file = log_file
        self._failure: Exception | None = None
        self._has_failed = asyncio.Event()
        self._begin(config, start, meets=meets)

    def _begin(self, config: Config, start: dict[str, Any] | None = None, *, meets: bool = False) -> None:
        """`start`: what `position` returned in the run that this one resumes."""
        # Here, because torchrl and tensordict load a compiler: seconds of the driver, which only names this class.
        from torchrl.data.replay_buffers.samplers import Sampler
        from torchrl.data.replay_buffers.storages import Storage

        from ..experiences.buffers import buffer_feeds
        from .assemble import Assembler, pass_rate, shaping_of
        from .buffer import ReplayBuffer
        from .storage import own_part

        own = dict(start or {})
        stream, used = own.pop("stream", None), own.pop("used_groups", None)
        position = Position(**own)
        self._config = config
        numbers = derive(config)
        train, algorithm = config.train, config.algorithm
        self._taskset = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval)
        assert config.model.path is not None
        self._prompter = Prompter.of(config.model)
        self._encoded: dict[str, list[int]] = {}  # prompts that were measured, until they are admitted
        self._admits_with_tokens = not meets  # explorers encode for themselves
        self._assembler = Assembler(
            advantage=algorithm.made().advantage,
            shaping=shaping_of(config),
            updates_per_batch=train.updates_per_batch,
            num_ranks=train.num_ranks,
            skip_zero_advantage=numbers.skip_zero_advantage,
            rollouts_per_step=config.monitor.rollouts_per_step,
            buffers=buffer_feeds(config, self._prompter, first_step=position.num_batches * train.updates_per_batch),
            count_turns=algorithm.aggregation == "turn_mean_token_mean",
        )
        self._assembling = asyncio.Lock()
        self._ahead = Ahead()
        self._stream = TaskStream(
            self._taskset,
            num_tokens=self._num_tokens,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            shortened=self._shortened,
            epochs=train.epochs,
            start=stream,
        )
        self._suspects = SuspectWatch(solved=config.eval.solved) if config.monitor.suspects else None
        self._pass_rate = pass_rate
        replay = config.replay
        # Where there is a pool, its processes load what operators need.
        self._pipeline = Pipeline([] if replay.operator_processes else replay.operators)
        self._pool: OperatorPool | None = None
        if replay.operator_processes:
            self._pool = OperatorPool(
                replay.operators,
                num_processes=replay.operator_processes,
                timeout_s=replay.operator_timeout_s,
                log_file=self._log_file,
                log_level=config.log.level,
            )
        priority = priority_of(replay.priority) if replay.sampling == "priority" else None
        self._reuse = ReusePool(
            max_uses=replay.max_uses,
            max_reused=train.groups_per_step - numbers.fresh_groups_per_batch,
            updates_per_batch=train.updates_per_batch,
            max_lag=numbers.max_policy_lag,
            cooldown=replay.cooldown,
            priority=priority,
            decay=replay.priority_decay,
            start=groups_from_text(used) if used else (),
            num_batches=position.num_batches,
        )
        capacity = numbers.max_outstanding_groups + train.groups_per_step
        if meets:  # clients give groups for as long as the bound lets them
            reach = (numbers.max_policy_lag + 1) // train.updates_per_batch
            capacity = (reach + 1) * train.groups_per_step
        self._buffer = ReplayBuffer(
            tasks=self._stream,
            start=position,
            rule=AdmissionRule(
                groups_per_batch=numbers.fresh_groups_per_batch,
                updates_per_batch=train.updates_per_batch,
                publish_every=numbers.publish_every,
                reorder_window=numbers.reorder_window,
                target_lag=numbers.target_policy_lag,
                max_lag=numbers.first_use_policy_lag,
            ),
            num_batches=numbers.num_batches,
            capacity=capacity,
            sampler=own_part("replay.sampler", replay.sampler, Sampler, capacity),
            storage=own_part("replay.storage", replay.storage, Storage, capacity),
            operators=[self._pipeline],
            operated_elsewhere=None if self._pool is None else self._pool.apply,
            failed=self._fail,
            reuse=self._reuse,
            priority=priority,
            # Before operators, because the groups that they leave out say most about how hard a task is.
            delivered=self._delivered,
            num_collectors=0 if meets else config.rollout.num_generators,
            drawn=self._stream.admitted,
            returned=self._stream.returned,
            anybody=lambda: self._host is None or self._host.somebody_generates,
        )
        if self._kept is not None:
            self._kept.keep_before(position.num_batches)
        if meets:
            self._meet(position, is_resumed=start is not None)

    def _meet(self, position: Position, *, is_resumed: bool) -> None:
        """Prepare the folder where explorers are met, and go on with what they have finished already."""
        config, meeting = self._config, Meeting(self._config.meeting_folder)
        version = position.num_batches * config.train.updates_per_batch if is_resumed else -1
        self._store = store = GroupStore(meeting.groups)
        self._needed_from = position.num_batches
        take_over(store, self._buffer, position, policy_version=version)
        path = config.model.path
        assert path is not None
        if is_here := Path(path).is_dir():
            shared_model(Path(path), meeting.model)
        self._host = Host(
            meeting,
            self._buffer,
            store,
            about={"model": None if is_here else path, "must_be_equal": must_be_equal(config)},
            samplings=config.samplings,
            vocab_size=model_config(Path(path)).get("vocab_size") if is_here else None,
            max_length=config.rollout.max_model_len,
            resumed_at=version,
            silent_s=config.explorer.silent_s,
            timeout_s=config.cluster.step_timeout_s,
            wait_s=config.explorer.wait_s,
        )

    def _delivered(self, task: Task, group: Group) -> None:
        if not self._buffer.of(group.group_id)[0]:  # an order that adapts is for the run's own tasks
            self._taskset.record(group.task_id, self._pass_rate(group))
        if self._suspects is not None:
            self._suspects.delivered(task, group)

    def _num_tokens(self, task: Task) -> int:
        tokens = self._prompter.encode(task.prompt)
        fits = len(tokens) <= self._config.rollout.max_prompt_tokens
        if fits and self._admits_with_tokens and isinstance(task.prompt, str):
            self._encoded[task.prompt] = tokens
            if len(self._encoded) > MOST_ENCODED:
                del self._encoded[next(iter(self._encoded))]
        return len(tokens)

    def _with_tokens(self, admission: Admission) -> Admission:
        """With the prompt's tokens, if it is a text that was measured lately: to encode a short one again costs the
        collector a fifth of a millisecond.
        """
        prompt = admission.task.prompt
        tokens = self._encoded.pop(prompt, None) if isinstance(prompt, str) else None
        return admission if tokens is None else replace(admission, prompt_tokens=tokens)

    def _shortened(self, task: Task) -> Task | None:
        """Apply `rollout.overlong_prompts` to a task whose prompt is too long; None leaves it out."""
        rollout = self._config.rollout
        if rollout.overlong_prompts == "refuse":
            raise ValueError(
                f"rollout.max_prompt_tokens: got {rollout.max_prompt_tokens}, but the prompt of task {task.task_id} "
                f"has {self._num_tokens(task)}; raise it, or set rollout.overlong_prompts=drop or truncate"
            )
        if rollout.overlong_prompts == "drop":
            return None
        return truncated(task, self._prompter, rollout.max_prompt_tokens)

    @as_text
    async def start(self) -> dict[str, Any]:
        started = {"pid": os.getpid(), "node": ray.util.get_node_ip_address()}
        started |= await self._start_operators()
        settle()
        return started

    async def _start_operators(self) -> dict[str, Any]:
        if self._pool is None:
            return {}
        await self._pool.start()
        return {"operator_pids": self._pool.process_ids()}

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._has_failed.set()

    @as_text
    async def reset(self, config: Config) -> None:
        """Another run: tasks from the first, nothing outstanding. The last run's waiters must have left."""
        self._buffer.stop()
        if self._pool is not None:
            self._pool.close()
        self._begin(config)
        await self._start_operators()

    @as_text
    async def wait_until_death(self) -> None:
        """Never returns; raises what operators raise in other processes."""
        feeding, failing = asyncio.create_task(self._feed_from_queue()), asyncio.create_task(self._has_failed.wait())
        try:
            await asyncio.wait({feeding, failing}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            await feeding
        finally:
            feeding.cancel()
            failing.cancel()

    async def _feed_from_queue(self) -> None:
        """Never returns. If tasks come from a queue, this tells the buffer about tasks that others put into it."""
        queue = self._taskset
        while isinstance(queue, QueueTaskSet):
            if self._buffer.awaits_a_task and queue.may_have_more():
                await self._buffer.tasks_arrived()
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(POLL_S)
        await asyncio.Event().wait()

    @as_text
    async def admit(
        self, limit: int, timeout_s: float, collector: str, finished: Sequence[Group] = ()
    ) -> list[Admission]:
        """See `ReplayBuffer.admit`; `finished` groups are delivered first, as by `put`."""
        if finished:
            await self._buffer.put(finished)
        admissions = await self._buffer.admit(limit, timeout_s=timeout_s, collector=collector)
        return [self._with_tokens(admission) for admission in admissions]

    @as_text
    async def put(self, groups: Sequence[Group]) -> None:
        await self._buffer.put(groups)

    @as_text
    async def retried(self, group_id: int, attempt: int) -> None:
        await self._buffer.retried(group_id, attempt=attempt)

    @as_text
    async def fail(self, group_id: int, reason: str, attempt: int) -> None:
        await self._buffer.fail(group_id, reason, attempt=attempt)

    @as_text
    async def reissue(self, group_ids: list[int], reason: str) -> None:
        await self._buffer.reissue(group_ids, reason)

    @as_text
    async def give_back(self, collector: str, reason: str) -> list[int]:
        return await self._buffer.give_back(collector, reason)

    @as_text
    async def mark_dead(self, collector: str, reason: str) -> list[int]:
        return await self._buffer.mark_dead(collector, reason)

    @as_text
    async def retire(self, collector: str) -> None:
        await self._buffer.retire(collector)

    @as_text
    async def take_part(self, at_least: int, timeout_s: float) -> list[Any] | None:
        """Each rank's share of the next batch's groups that have come since the last call, `at_least` of them or more;
        None once the batch is complete, and `take_batch` holds the rest. See `ReplayBuffer.groups_ahead`.
        """
        groups = await self._buffer.groups_ahead(self._ahead.group_ids, at_least=at_least, timeout_s=timeout_s)
        if not groups:
            return None
        ahead, index, of = self._ahead, self._buffer.num_trained_batches, self._config.train.groups_per_step
        ahead.group_ids.update(group.group_id for group in groups)

        def assembled() -> list[Any]:
            return [ray.put(share) for share in self._assembler.part(index, groups, ahead, of=of)]

        async with self._assembling:
            return await asyncio.to_thread(assembled)

    @as_text
    async def take_batch(self, timeout_s: float) -> BatchRefs | None:
        asked_at = spans.now()
        served = await self._buffer.take_batch(timeout_s=timeout_s)
        if served is None:
            return None
        if (due_at := spans.now()) - asked_at >= spans.SHORTEST_S:
            collector, group = self._buffer.last_delivered
            whom = {"for": collector.partition("/")[0] or "generators", "why": f"group {group}"}
            spans.record("wait", asked_at, due_at, **whom, batch=served.index)
        spans.instant("batch_taken", batch=served.index, groups=served.group_ids)
        async with self._assembling:  # one batch at a time, in a thread: it may be hundreds of megabytes
            return await asyncio.to_thread(self._assembled, served)

    def _assembled(self, served: ServedBatch) -> BatchRefs:
        if self._kept is not None:
            self._kept.add(served.groups)
        ahead, self._ahead = self._ahead, Ahead()
        batch = self._assembler(served.index, served.groups, served.reused, ahead)
        suspicion, suspects = self._suspects.inspect() if self._suspects is not None else ({}, [])
        return BatchRefs(
            index=batch.index,
            group_ids=batch.group_ids,
            steps=[[ray.put(share) for share in step] for step in batch.steps],
            metrics=batch.metrics | suspicion,
            rollouts=batch.rollouts,
            suspects=suspects,
        )

    @as_text
    async def trained(self, group_ids: list[int]) -> dict[str, float]:
        """Mark the batch as trained; returns the state of the buffer."""
        if self._store is not None:
            of = [self._buffer.of(group_id) for group_id in group_ids]
            await asyncio.to_thread(self._store.trained, of, batch=self._buffer.num_trained_batches)
        if self._kept is not None:
            own = [("", group_id) for group_id in group_ids]
            await asyncio.to_thread(self._kept.trained, own, batch=self._buffer.num_trained_batches)
        await self._buffer.trained(group_ids)
        spans.instant("trained", groups=group_ids)
        self._stream.forget_before(self._buffer.first_draw)
        self._reuse.forget_before(self._buffer.num_trained_batches)
        stats = asdict(self._buffer.stats())
        counts = {f"replay/{name}": float(value) for name, value in stats.items()}
        own = {
            "replay/too_long": float(self._stream.num_too_long),
            "replay/cut_prompts": float(self._stream.num_shortened),
        }
        if self._host is not None:
            own |= self._host.metrics()
        counted = self._pipeline.counts() if self._pool is None else self._pool.metrics()
        return counts | own | self._buffer.length_bias.metrics() | counted | self._reuse.metrics()

    @as_text
    async def position(self, policy_version: int) -> dict[str, Any] | None:
        """See `ReplayBuffer.position`, as JSON-able data, with the taskset's own position under `stream`.

        `used_groups`: those that may be used again, with how often and when they were.
        """
        position = self._buffer.position(policy_version)
        if position is None:
            return None
        # Both at one moment: while something is awaited, more tasks are drawn.
        stream, used = self._stream.position(position), self._reuse.after(position.num_batches)
        if self._store is not None and not self._config.replay.keep_groups:
            # The checkpoint before is still needed, until the one that is being saved is whole.
            await asyncio.to_thread(self._store.forget_before, self._needed_from)
            self._needed_from = position.num_batches
        return asdict(position) | {
            "stream": stream,
            "used_groups": await asyncio.to_thread(groups_as_text, used) if used else "",
        }

    @as_text
    async def published(self, policy_version: int) -> None:
        await self._buffer.published(policy_version)
        if self._host is not None:
            self._host.published(policy_version)

    @as_text
    async def close(self) -> None:
        await self._buffer.close()
        await self.leave(ended=True)
        if self._kept is not None:
            await asyncio.to_thread(self._kept.close)

    @as_text
    async def host(self) -> None:
        """Meet explorers; never returns."""
        assert self._host is not None, "meets"
        await self._host.run()

    @as_text
    async def evaluate(
        self, tasks: list[Task], sampling: EvalSampling, policy_version: int
    ) -> list[list[Evaluated] | str] | None:
        """See `Host.evaluate`."""
        assert self._host is not None, "meets"
        return await self._host.evaluate(tasks, sampling, policy_version)

    async def sayings(self) -> list[str]:
        """What became of explorers since the last call."""
        return [] if self._host is None else self._host.sayings()

    @as_text
    async def leave(self, *, ended: bool) -> None:
        """Explorers hear that the run has ended, or (not `ended`) that it stops for now."""
        if self._host is not None:
            await self._host.close(ended=ended)

    @as_text
    async def sample_batch(self, trajectories: list[Trajectory], group_size: int) -> list[Any]:
        """Rank shares of a batch made from these trajectories, to measure the trainer's speed; nothing is stored."""
        groups = [
            Group.of(trajectories[i : i + group_size], group_id=i, task_id="")
            for i in range(0, len(trajectories), group_size)
        ]
        # All in one step, including trajectories without an advantage: speed is measured per token.
        assembler = replace(self._assembler, skip_zero_advantage=False, updates_per_batch=1, buffers=())

        def assembled() -> list[Any]:
            return [ray.put(share) for share in assembler(0, groups).steps[0]]

        async with self._assembling:
            return await asyncio.to_thread(assembled)

    async def ping(self) -> None:
        """An answer proves that this process responds, even while its callers wait for others."""


ReplayBufferRemote = ray.remote(num_cpus=0)(ReplayBufferActor)
"""Create it with a `max_concurrency` above the number of its waiting callers: see `runtime.launch`."""

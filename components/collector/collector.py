"""The collector: many environments in flight against one engine, as a torchrl collector that yields trajectory groups.

    admit() --> [in flight: environment x engine] --> finished --> withheld until its version is verified --> yield
                     ^ started only under weights of at least the group's min_policy_version

Everything that waits for somebody else is a callable handed in, so that the whole loop runs under asyncio alone.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn, Protocol

from tensordict import LazyStackedTensorDict
from torchrl.collectors import BaseCollector

from .. import spans
from ..config.flow import RolloutConfig
from ..config.inputs import EvalSampling
from ..config.sampling import Sampling, Samplings
from ..envs.base import all_or_none
from ..group import Group
from ..samples import Samples, sampled_versions
from ..types import Admission, Task, Trajectory
from ..weights import WeightSyncError
from .bounded import RolloutFailed, run_bounded
from .checks import TookTooLong, checked, reason_of, until_ended, within
from .clock import ActivityClock, RolloutClock
from .completion_queue import CompletionQueue, unless
from .engine import Engine, EngineLost
from .policy import EnginePolicy, derived_seed
from .progress import EngineHung
from .room import Room
from .torchrl_keys import under_torchrl_keys
from .weight_sync import SyncReport, WeightSync

logger = logging.getLogger(__name__)


PolicyOf = Callable[..., EnginePolicy]
"""(version=...) -> what a rollout samples from: all of it under this version, if it is not None."""


class RunsTasks(Protocol):
    async def rollout(self, task: Task, policy: Any) -> list[Trajectory]: ...


class Collector(BaseCollector):
    """Iterate it to get finished groups, as many as finished at the same moment.

    `async for groups in collector.groups()`; a plain `for` gives TensorDicts for torchrl.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        environment: RunsTasks,
        prompter: Any,
        weight_sync: WeightSync,
        clock: ActivityClock,
        admit: Callable[[int], Awaitable[list[Admission]]],
        retried: Callable[[Admission], Awaitable[None]],
        give_back: Callable[[str], Awaitable[Any]],
        fail: Callable[[Admission, str], Awaitable[None]],
        rollout: RolloutConfig,
        samplings: Samplings,
        greedy_baseline: bool,
        seed: int,
        seeded: bool,
        max_in_flight: int,
        vocab_size: int | None = None,
    ) -> None:
        """`seeded`: every request has its own seed, derived from the group (see `Derived.seeded_requests`).

        `max_in_flight`: groups at a time, at most; as many of them as the engine holds. With `greedy_baseline`, each
        group brings the reward of one more rollout, sampled greedily, under weights as new, and as proven, as the
        others. `vocab_size`: of the model (None: not known).
        """
        super().__init__()
        self._engine = engine
        self._environment = environment
        self._prompter = prompter
        self._weight_sync = weight_sync
        self._clock = clock
        self._admit = admit
        self._retried = retried
        self._give_back = give_back
        self._fail = fail
        self._rollout = rollout
        self._samplings, self._greedy_baseline = samplings, greedy_baseline
        self._seed, self._seeded = seed, seeded
        self._max_in_flight = max_in_flight
        self._vocab_size = vocab_size
        self._room = Room(engine.progress, places=engine.places, cache_tokens=engine.cache_tokens)
        self._in_flight: set[asyncio.Task[Group | None]] = set()
        self._given_away: set[asyncio.Task[Group | None]] = set()
        self._going_on: set[asyncio.Task[Any]] = set()
        self._evaluating: set[asyncio.Future[Any]] = set()
        self._num_evaluated = 0
        self._num_tokens = 0
        self._num_finished = 0
        self._num_retried = 0

    async def groups(self) -> AsyncIterator[list[Group]]:
        """Finished groups until admission ends.

        Waits for a slot when nothing is in flight; raises when the engine is lost.
        """
        admitting: asyncio.Future[list[Admission]] | None = None
        ended, completions = False, CompletionQueue()
        watching = completions.add(asyncio.create_task(self.watch_engine()))
        more_room = completions.add(asyncio.create_task(self._room.more()))
        try:
            while not (ended and not self._in_flight):
                if admitting is None and not ended and (free := self._num_startable()) > 0:
                    admitting = completions.add(asyncio.ensure_future(self._admit_when_serving(free)))
                done = await completions.get()
                if watching in done:
                    watching.result()
                if more_room in done:
                    more_room = completions.add(asyncio.create_task(self._room.more()))
                if admitting in done:
                    admissions = admitting.result()
                    admitting = None
                    ended = not admissions
                    for admission in admissions:
                        clock = self._rollout_clock(group=admission.group_id)
                        self._room.begin(clock, self._samplings.of(admission.task).group_size + self._greedy_baseline)
                        self._in_flight.add(completions.add(asyncio.create_task(self._run_group(admission, clock))))
                finished = self._finished(self._in_flight.intersection(done))
                self._in_flight.difference_update(done)
                if finished:
                    self._num_finished += len(finished)
                    yield finished
        finally:
            for task in [*self._in_flight, watching, more_room, *([admitting] if admitting else [])]:
                task.cancel()

    async def watch_engine(self) -> NoReturn:
        """Raise EngineLost when the engine has work and gives no sign of life."""
        try:
            await self._engine.progress.watch(self._rollout.engine_stall_s)
        except EngineHung as error:
            raise EngineLost(str(error)) from None

    async def discard(self, reason: str) -> None:
        """Give away everything in flight: what this engine generated is not to be trusted.

        Returns when no rollout is running any more, including those that were cancelled before. One that still runs
        after `checks.GRACE_S` gets no more answers.
        """
        unfinished = [task for task in self._in_flight if not task.done()]
        self._given_away.update(unfinished)
        for task in unfinished:
            task.cancel()
        await self._give_back(reason)
        if unfinished:
            await asyncio.wait(unfinished)  # aborted at the engine before it is used again
        await until_ended(self._going_on)

    def iterator(self) -> Iterator[LazyStackedTensorDict]:
        """For synchronous callers, under torchrl's LLM keys (`under_torchrl_keys`): what `for data in collector` gives.

        The loop runs in a thread of its own, at most two batches ahead.

        Raises what the loop or the weight sync raised. Leaving the iteration early ends the thread.
        """
        ready: queue.Queue[list[Group] | BaseException | None] = queue.Queue(maxsize=2)
        left = threading.Event()

        async def put(item: list[Group] | BaseException | None) -> None:
            while not left.is_set():
                try:
                    return ready.put_nowait(item)
                except queue.Full:
                    await asyncio.sleep(0.01)

        async def collect() -> None:
            async for finished in self.groups():
                await put(finished)
                if left.is_set():
                    return

        async def run() -> None:
            collecting, pulling = asyncio.create_task(collect()), asyncio.create_task(self._weight_sync.run())
            done, _ = await asyncio.wait({collecting, pulling}, return_when=asyncio.FIRST_COMPLETED)
            error = next((task.exception() for task in done), None)
            for task in (collecting, pulling):
                task.cancel()
            await asyncio.gather(collecting, pulling, return_exceptions=True)
            await put(error)

        thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True, name="leeway-collector")
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield under_torchrl_keys(item)
        finally:
            left.set()

    def __len__(self) -> int:
        raise TypeError("a collector has no length: it ends when admission does")

    async def evaluate(
        self, tasks: list[Task], sampling: EvalSampling, *, policy_version: int
    ) -> list[list[Trajectory] | str]:
        """`sampling.samples` trajectories per task, under exactly `policy_version`: newer weights are held back.

        For a task that failed for good, the reason; for every task where `stop_evaluating` came before the end. Nothing
        of it is trained on. What is drawn depends on the weights, the run's seed and the task alone.
        """
        evaluating = asyncio.ensure_future(self._evaluate(tasks, sampling, policy_version))
        self._evaluating.add(evaluating)
        try:
            await asyncio.wait({evaluating})
            return ["the evaluation was called off"] * len(tasks) if evaluating.cancelled() else evaluating.result()
        finally:
            self._evaluating.discard(evaluating)
            evaluating.cancel()

    def stop_evaluating(self) -> None:
        """Nobody wants the answers any more: the engine is free to load newer weights."""
        for evaluating in self._evaluating:
            evaluating.cancel()

    async def _evaluate(
        self, tasks: list[Task], sampling: EvalSampling, policy_version: int
    ) -> list[list[Trajectory] | str]:
        await self._weight_sync.until_verified(policy_version)
        async with self._weight_sync.freeze_weights():
            if self._weight_sync.verified_version != policy_version:
                raise RuntimeError(
                    f"asked to evaluate version {policy_version}, "
                    f"but this engine already serves {self._weight_sync.verified_version}"
                )
            with self._clock.doing("evaluate"), spans.span("evaluate", version=policy_version, tasks=len(tasks)):
                results = await self._run_bounded(
                    tasks,
                    functools.partial(self._evaluated, sampling),
                    num_sequences=sampling.samples,
                    at_most=min(
                        max(self._max_in_flight, 2 * self._engine.places // sampling.samples),
                        self._rollout.max_groups_in_flight or len(tasks) or 1,
                    ),
                )
        return [str(result) if isinstance(result, RolloutFailed) else result for result in results]

    def num_evaluated(self) -> int:
        """Tasks of all evaluations that have ended so far: a sign of progress."""
        return self._num_evaluated

    async def rollouts(
        self,
        tasks: list[Task],
        *,
        temperature: float,
        group_size: int,
        call_limit: int | None = None,
        all_may_fail: bool = False,
    ) -> list[Trajectory]:
        """Run tasks outside of admission, for measuring speed and for trying one. Those that fail are left out.

        `call_limit`: tokens of a call of the model, also where the environment asks for more. Raises RuntimeError with
        the last one's reason where all of them fail and not `all_may_fail`.
        """

        async def attempts(task: Task, clock: RolloutClock) -> list[Trajectory]:
            trajectories, _ = await self._attempts(
                task,
                clock=clock,
                sampling=replace(self._samplings.default, group_size=group_size, temperature=temperature),
                call_limit=call_limit,
            )
            return trajectories

        groups = await self._run_bounded(tasks, attempts, num_sequences=group_size, at_most=self._max_in_flight)
        failures = [group for group in groups if isinstance(group, RolloutFailed)]
        if failures and len(failures) == len(groups) and not all_may_fail:
            raise RuntimeError(f"all {len(groups)} tasks failed; the last one: {failures[-1]}") from failures[-1]
        return [t for group in groups if not isinstance(group, RolloutFailed) for t in group]

    @property
    def num_in_flight(self) -> int:
        """Groups that it works on."""
        return len(self._in_flight)

    def generating_s(self) -> float:
        """Seconds since the start in which the engine had a request."""
        return self._clock.total("generate")

    def stats(self) -> dict[str, float]:
        """What happened since the last call."""
        seconds = self._clock.drain()
        total = sum(seconds.values()) or 1.0
        tokens, self._num_tokens = self._num_tokens, 0
        finished, self._num_finished = self._num_finished, 0
        retried, self._num_retried = self._num_retried, 0
        return {
            "collector/tokens_per_s": tokens / total,
            **{f"collector/{activity}_frac": spent / total for activity, spent in seconds.items()},
            "collector/wait_for_slot_s": seconds["wait_for_slot"],
            "collector/groups_finished": float(finished),
            "collector/groups_retried": float(retried),
            "collector/in_flight_groups": float(len(self._in_flight)),
            "collector/quarantines": float(self._weight_sync.num_quarantines),
            "collector/refused_transfers": float(self._weight_sync.num_refused),
            **self._weight_sync.stats(),
            **_sync_metrics(self._weight_sync.drain_reports()),
        }

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        for task in self._in_flight:
            task.cancel()
        self._engine.shutdown()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        self._seed = seed
        return seed if static_seed else derived_seed(seed)

    def state_dict(self) -> OrderedDict:
        """Empty: tasks, order and what is in flight belong to the replay buffer's ledger."""
        return OrderedDict()

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        assert not state_dict, "a collector keeps no state of its own"

    async def _run_bounded(
        self,
        tasks: list[Task],
        attempts: Callable[[Task, RolloutClock], Awaitable[list[Trajectory]]],
        *,
        num_sequences: int,
        at_most: int,
    ) -> list[list[Trajectory] | RolloutFailed]:
        """Many tasks, as fast as the engine goes; raises EngineLost when it goes no more."""
        working = run_bounded(
            tasks,
            attempts,
            room=self._room,
            num_sequences=num_sequences,
            at_most=at_most,
            clock=self._rollout_clock,
        )
        return await unless(self.watch_engine(), working)

    def _rollout_clock(self, *, group: int | None = None) -> RolloutClock:
        # An engine that hangs is found out before any of its rollouts is taken for lost.
        patience_s = self._rollout.timeout_s + self._rollout.engine_stall_s
        return RolloutClock(asyncio.get_running_loop().time, patience_s=patience_s, group=group)

    def _num_startable(self) -> int:
        free = self._max_in_flight - len(self._in_flight)
        # Which tasks come next is not known: there is room for the largest groups.
        largest = self._samplings.group_sizes[-1] + self._greedy_baseline
        return min(free, self._room.groups(largest)) if free > 0 else 0

    def _finished(self, ended: set[asyncio.Task[Group | None]]) -> list[Group]:
        for task in ended:
            if task.cancelled() and task not in self._given_away:
                raise RuntimeError("a group in flight was cancelled: does an environment cancel tasks not its own?")
        self._given_away.difference_update(ended)
        return [g for task in ended if not task.cancelled() and (g := task.result()) is not None]

    async def _evaluated(self, sampling: EvalSampling, task: Task, clock: RolloutClock) -> list[Trajectory]:
        drawn = Sampling(group_size=sampling.samples, temperature=sampling.temperature, top_p=sampling.top_p)

        def policy(attempt: int, *, version: int | None) -> EnginePolicy:
            seed = None if sampling.temperature == 0 else derived_seed(self._seed, *task.task_id.encode(), attempt)
            longest = sampling.max_tokens
            return self._policy(drawn, seed=seed, max_response_tokens=longest, clock=clock, version=version)

        try:
            trajectories, _ = await self._attempts(task, clock=clock, sampling=drawn, policy_of=policy)
            return trajectories
        finally:
            self._num_evaluated += 1

    async def _run_group(self, admission: Admission, clock: RolloutClock) -> Group | None:
        """One group through all of its attempts; None when it failed for good (and was reported as such)."""
        with self._clock.doing("wait_for_weights"):
            await self._weight_sync.until_served(admission.min_policy_version)
        own = self._samplings.of(admission.task)
        greedily = Sampling(group_size=1, temperature=0.0)
        try:
            async with self._weight_sync.generating_under(admission.min_policy_version):
                clock.begin()
                attempts = functools.partial(self._attempts, admission.task)
                rollouts = [attempts(clock=clock, sampling=own, admission=admission)]
                if self._greedy_baseline:
                    rollouts.append(attempts(clock=self._rollout_clock(), sampling=greedily))
                (trajectories, samples), *greedy = await all_or_none(rollouts)
                environment_s, answered_at = clock.idle_s, clock.end()
        except RolloutFailed as failure:
            await self._weight_sync.until_all_verified()  # else it is given back, and is issued again
            await self._fail(admission, str(failure))
            return None
        group = Group.of(
            trajectories,
            samples=samples,
            group_id=admission.group_id,
            task_id=admission.task.task_id,
            attempt=admission.attempt,
            greedy_reward=greedy[0][0][0].reward if greedy else None,
            environment_s=environment_s,
        )
        versions = [group.policy_versions(), *(sampled_versions(alone) for _, alone in greedy)]
        oldest, newest = min(old for old, _ in versions), max(new for _, new in versions)
        if oldest < admission.min_policy_version:
            raise WeightSyncError(
                "version",
                oldest,
                f"the engine sampled group {group.group_id} with weights of version {oldest} after version "
                f"{self._weight_sync.served_version} was loaded; its min_policy_version is "
                f"{admission.min_policy_version}",
            )
        if clock.asked_at is not None:
            attrs = {"group": group.group_id, "version": oldest, "newest": newest}
            spans.record("generate", clock.asked_at, answered_at, **attrs, tokens=len(samples["response_tokens"]))
        if self._weight_sync.verified_version < newest:
            with self._clock.doing("withheld"), spans.span("withhold", group=group.group_id, version=newest):
                await self._weight_sync.until_verified(newest)
        return group

    async def _admit_when_serving(self, limit: int) -> list[Admission]:
        """Groups are asked for by engines that could start them: not by one in quarantine."""
        await self._weight_sync.until_verified(0)
        return await self._admit(limit)

    async def _attempts(
        self,
        task: Task,
        *,
        clock: RolloutClock,
        sampling: Sampling,
        admission: Admission | None = None,
        call_limit: int | None = None,
        policy_of: PolicyOf | None = None,
    ) -> tuple[list[Trajectory], Samples]:
        """The trajectories of one task, also as tensors, tried again `retries` times; then raises `RolloutFailed`.

        `admission`: of an admitted group, whose retries are counted and whose samples may be seeded. `policy_of`: what
        each attempt samples from, where that is not the policy as it is trained. `clock` is notified of
        requests to the engine, and knows how much of the time limit is used up.
        """
        r = self._rollout
        reason, last_error = "", None
        for attempt in range(r.retries + 1):
            if attempt and admission:
                self._num_retried += 1
                await self._retried(admission)
            # Not of `admission.attempt`: a group that is issued again because its collector died samples the same.
            seed = derived_seed(self._seed, admission.group_id, attempt) if self._seeded and admission else None
            encoded = (task.prompt, admission.prompt_tokens) if admission and admission.prompt_tokens else None
            train_policy = functools.partial(
                self._policy,
                sampling,
                seed=seed,
                call_limit=call_limit,
                clock=clock,
                encoded=encoded,
            )
            own_policy = train_policy if policy_of is None else functools.partial(policy_of, attempt)
            try:
                return await self._attempt(task, own_policy, clock=clock, sampling=sampling)
            except EngineLost as error:
                raise EngineLost(str(error)) from None
            except WeightSyncError:  # no other attempt would be better
                raise
            except Exception as error:
                too_long = f"rollout took longer than rollout.timeout_s = {r.timeout_s:g} s"
                reason, last_error = too_long if isinstance(error, TookTooLong) else reason_of(error), error
                logger.warning("task %s, attempt %d: %s", task.task_id, attempt, reason, exc_info=error)
        raise RolloutFailed(reason) from last_error

    async def _attempt(
        self, task: Task, policy_of: PolicyOf, *, clock: RolloutClock, sampling: Sampling
    ) -> tuple[list[Trajectory], Samples]:
        r = self._rollout
        async with self._weight_sync.one_version() as version:
            policy = policy_of(version=version)
            try:
                with self._clock.doing("environment"):
                    trajectories = await within(
                        r.timeout_s,
                        functools.partial(self._environment.rollout, task, policy),
                        counted_s=lambda: clock.counted_s,
                        going_on=self._going_on,
                    )
                samples = checked(
                    trajectories,
                    group_size=sampling.group_size,
                    # Nothing that is sampled greedily is trained on.
                    temperature=sampling.temperature or r.temperature,
                    max_model_len=r.max_model_len,
                    versions=policy.versions,
                    sampled=policy.sampled,
                    vocab_size=self._vocab_size,
                    masks=policy.masks,
                )
                return trajectories, samples
            finally:
                policy.end()

    def _policy(
        self,
        sampling: Sampling,
        *,
        seed: int | None,
        clock: RolloutClock,
        max_response_tokens: int | None = None,
        call_limit: int | None = None,
        version: int | None = None,
        encoded: tuple[Any, list[int]] | None = None,
    ) -> EnginePolicy:
        r = self._rollout
        return EnginePolicy(
            self._engine,
            self._prompter,
            group_size=sampling.group_size,
            temperature=sampling.temperature,
            max_prompt_tokens=r.max_prompt_tokens,
            max_response_tokens=max_response_tokens or r.max_response_tokens,
            call_limit=call_limit,
            max_model_len=r.max_model_len,
            seed=seed,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_tokens=sampling.min_tokens,
            version=version,
            vocab_size=self._vocab_size,
            count_tokens=self._count_tokens,
            generating=lambda: self._clock.doing("generate"),
            clock=clock,
            encoded=encoded,
        )

    def _count_tokens(self, count: int) -> None:
        self._num_tokens += count


def _sync_metrics(reports: list[SyncReport]) -> dict[str, float]:
    if not reports:
        return {"param_server/pulls": 0.0}

    def mean(seconds: Callable[[SyncReport], float]) -> float:
        return sum(map(seconds, reports)) / len(reports)

    return {
        "param_server/pulls": float(len(reports)),
        "param_server/pull_s": mean(lambda r: r.sync_s),
        "param_server/ahead_s": mean(lambda r: r.ahead_s),
        "param_server/proof_s": mean(lambda r: r.proof_s),
        "param_server/served_gap/max": max(r.served_gap.largest for r in reports),
        "param_server/served_gap/mean": mean(lambda r: r.served_gap.mean),
        "param_server/served_tolerance/max": reports[-1].tolerance.largest,
        "param_server/served_tolerance/mean": reports[-1].tolerance.mean,
        "param_server/bytes": float(reports[-1].num_bytes),
        "param_server/fetched_bytes": mean(lambda r: r.fetched_bytes),
        "collector/drain_s": mean(lambda r: r.drain_s),
        "collector/pause_s": mean(lambda r: r.pause_s),
    }

"""How an async_rl run reports: metrics while it runs, totals at the end; off the critical path."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .. import spans
from ..config import Config, derive
from ..failures import PartFailed
from ..monitor import Monitor, read_metrics, reward_first, reward_last
from ..monitor.metrics import reduced
from ..runtime.launch import Parts
from ..runtime.limit import LimitMeter, Speeds
from ..runtime.memory import MemoryMeter
from ..runtime.supervisor import together
from .learned import LearningWatch, Verdict

WORK = ("step/forward_backward_s", "step/optim_s", "step/publish_s", "step/proximal_s", "step/critic_s")
"""What a trainer does in a step; it waits for the rest of the step."""

REPORTS_AHEAD = 32
"""How many steps training may be ahead of its log before it waits."""
MEMORY_EVERY_S = 15.0
"""How often the memory of all parts is looked at: each look costs the kernel milliseconds for every process."""
LAST_REPORTS_S = 30.0
"""How long an interrupted run waits for the metrics of its last steps to be written."""


@dataclass(frozen=True)
class StepReport:
    """Something to log at a step. `batch_metrics`: those of the batch, if this is one of its optimizer steps.

    `rollouts`: the readable ones that the step trained on. `begins_batch`: at its batch's first step, where the batch's
    metrics are logged, and `suspects` are listed. Nothing here keeps a batch alive in the object store.
    """

    step: int
    metrics: dict[str, float]
    batch_metrics: dict[str, float] | None = None
    rollouts: Sequence[dict] = ()
    begins_batch: bool = False
    suspects: Sequence[dict] = ()


SPANS = {
    "wait_for_batch": ("batch", {}),
    "wait_for_publish": ("wait", {"for": "weights", "why": "the version before is still on its way out"}),
    "turns": ("wait", {"for": "devices", "why": "engines and trainer take turns"}),
}
"""What the driver waits for, as a span; the others have the name of what it does."""


class StepClock:
    """Splits a step's wall time by what the driver waited for; `end` closes the step and opens the next."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._spent[f"step/{what}_s"] += ended - begun
            if ended - begun >= spans.SHORTEST_S:
                name, attrs = SPANS.get(what, (what, {}))
                spans.record(name, begun, ended, **attrs)

    def so_far(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._since

    def end(self, work: dict[str, float]) -> dict[str, float]:
        """`step/*` of the step that ends now; `work` holds the seconds that the trainer itself measured."""
        now = time.monotonic()
        total, self._since = now - self._since, now
        spent, self._spent = {"step/wait_for_batch_s": 0.0, **self._spent}, defaultdict(float)
        known = sum(spent.values()) + sum(work.get(name, 0.0) for name in WORK)
        return spent | {"step/total_s": total, "step/other_s": max(0.0, total - known)}


class Reporter:
    """Logs step reports in order of arrival, and asks the collectors for theirs.

    The run's results are read from its metrics.jsonl, which also holds the earlier parts of a resumed run.
    `first_step`: the step that this part resumes from. `warn` is called once per notable problem. `on_limit` is told of
    each optimizer step beside what the machine could do, where that is known.
    """

    def __init__(
        self,
        config: Config,
        parts: Parts,
        monitor: Monitor,
        *,
        first_step: int = 0,
        warn: Callable[[str], None] = lambda _: None,
        on_limit: Callable[[Mapping[str, float]], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._parts = parts
        self._monitor = monitor
        self._first_step = first_step
        self._warn = warn
        self._on_limit = on_limit
        self._learning = LearningWatch(config, monitor.run_dir, earlier=self._rows() if first_step else ())
        self._queue: asyncio.Queue[StepReport | None] = asyncio.Queue(maxsize=REPORTS_AHEAD)
        self._last_stats = time.monotonic()
        self.served_tolerance: dict[str, float] = {}
        """What the last loads that were reported were held to."""
        self._num_restarts = 0
        self._training = False
        self._memory = MemoryMeter()
        self._looked_at_memory = float("-inf")
        self._running: asyncio.Task[None] | None = None

    async def put(self, report: StepReport | None) -> None:
        """Waits while `REPORTS_AHEAD` reports are still unlogged. Logging never waits for this side."""
        try:
            self._queue.put_nowait(report)
        except asyncio.QueueFull:
            await self._parts.supervisor.wait(
                self._queue.put(report), what="reports", timeout_s=self._config.cluster.step_timeout_s
            )

    def begin(self, speeds: Speeds | None) -> None:
        """Log reports from now on; if that fails, the run ends with the cause. `speeds`: None: engines are elsewhere,
        and what they could do at best is not known.
        """
        self._running = asyncio.create_task(self._run(speeds))
        self._parts.supervisor.watch("driver", self._running)

    async def end(self) -> None:
        """No more reports: wait until all that there are have been logged."""
        assert self._running is not None, "begin() first"
        running, supervisor = self._running, self._parts.supervisor
        await self.put(None)
        timeout_s = self._config.cluster.step_timeout_s
        while not running.done():  # the deadline is for one report
            left = self._queue.qsize()
            await supervisor.wait(asyncio.wait({running}, timeout=timeout_s), what="reports", timeout_s=timeout_s + 60)
            if not running.done() and self._queue.qsize() == left:
                raise PartFailed("reports", f"none of {left} was logged for {timeout_s:g} s")
        await supervisor.wait(running, what="reports", timeout_s=timeout_s)

    async def end_interrupted(self, last: StepReport | None) -> bool:
        """Log what there is, and `last`, for at most `LAST_REPORTS_S`. Returns whether all of it was logged."""
        if self._running is None or self._running.done():
            return True

        async def log_the_rest() -> None:
            if last is not None:
                await self.put(last)
            await self.end()

        rest = asyncio.ensure_future(log_the_rest())
        _, late = await asyncio.wait({rest}, timeout=LAST_REPORTS_S)
        rest.cancel()
        return not late and rest.exception() is None

    async def _run(self, speeds: Speeds | None) -> None:
        """Consumes step reports; waits for steps; asks the collectors for theirs; returns after `end`."""
        lag = derive(self._config).max_policy_lag
        num_measured = len(self._parts.generators)
        limit = speeds and LimitMeter(speeds, max_policy_lag=lag, in_turns=self._config.cluster.in_turns)
        updates = self._config.train.updates_per_batch
        sequences, response_tokens = "train/sequences", "train/response_tokens/total"
        if self._config.rollout.engine_options.shares_rows:
            sequences, response_tokens = "train/response_rows/first", "train/response_rows/total"
        await self.collect_stats()  # what happened before the first step does not count
        self._training = True
        while (report := await self._queue.get()) is not None:
            if report.batch_metrics is None:
                if report.step > self._first_step or not self._first_step:  # that step is already on record
                    self._monitor.log(report.step, report.metrics, role="driver")
                continue
            batch, step_s = report.batch_metrics, report.metrics["step/total_s"]
            metrics = dict(report.metrics)
            if limit is not None:
                metrics |= limit.step(
                    sequences=batch[sequences] / updates,
                    response_tokens=batch[response_tokens] / updates,
                    trained_tokens=metrics["train/tokens_in_pass"],
                    longest_response_tokens=batch["train/response_tokens/max"],
                    longest_environment_s=batch["train/environment_s/max"],
                    generators=len(self._parts.generators) / num_measured,
                    step_s=step_s,
                )
                self._on_limit(metrics)
            metrics["train/tokens_per_s"] = batch["train/response_tokens/total"] / updates / step_s
            if report.begins_batch:
                metrics |= batch
                self._monitor.suspects(report.step, report.suspects)
            self._monitor.rollouts(report.step, report.rollouts)
            self._monitor.log(report.step, metrics, role="trainer")
            for warning in self._learning.step(metrics):
                self._warn(warning)
            await self.collect_stats(report.step)
        self._training = False

    async def collect_stats(self, step: int | None = None) -> dict[str, float]:
        """Log what the collectors did since the last call; without a `step`: before the first step."""
        calls = together(g.call_now(lambda actor: actor.stats.remote()) for g in self._parts.generators)
        of_all = await self._parts.supervisor.wait(
            calls, what="generators", timeout_s=self._config.cluster.step_timeout_s
        )
        stats = reduced([own for own in of_all if own is not None]) | self._restarts()
        now = time.monotonic()
        seconds, self._last_stats = now - self._last_stats, now
        if self._training and now - self._looked_at_memory >= MEMORY_EVERY_S:
            self._looked_at_memory = now
            stats |= await asyncio.to_thread(self._memory.look)
        held_to = {name: value for name, value in stats.items() if name.startswith("param_server/served_tolerance/")}
        self.served_tolerance = held_to or self.served_tolerance
        if self._training:
            stats["collector/interval_s"] = seconds
        if step is not None or not self._first_step:
            self._monitor.log(step or 0, stats, role="collector")
        return stats

    def _restarts(self) -> dict[str, float]:
        """The generators that were replaced since the last call."""
        new = self._parts.restarts.over[self._num_restarts :]
        self._num_restarts += len(new)
        if not new:
            return {}
        return {
            "collector/restarts": float(len(new)),
            "collector/restart_s": max(restart.down_s for restart in new),
            "collector/groups_lost": float(sum(restart.groups for restart in new)),
        }

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._monitor.log(step, dict(metrics), role="evaluation")

    def totals(self, summary: Mapping[str, Any]) -> None:
        """What the stage came to, for those who show more than curves."""
        self._monitor.summary(summary)

    @property
    def failed_sinks(self) -> dict[str, str]:
        return self._monitor.failed_sinks

    def verdict(self) -> Verdict:
        """Whether the run has learned, as far as its metrics can say."""
        return self._learning.verdict()

    def summary(self, *, steps: int) -> dict[str, Any]:
        """The part of summary.json that comes from metrics, over the run's whole life."""
        return summary_of(
            self._rows(),
            steps=steps,
            max_policy_lag=derive(self._config).max_policy_lag,
            updates_per_batch=self._config.train.updates_per_batch,
        )

    def _rows(self) -> list[dict[str, Any]]:
        return read_metrics(self._monitor.run_dir / "metrics.jsonl")


def summary_of(
    rows: Sequence[Mapping[str, Any]], *, steps: int, max_policy_lag: int, updates_per_batch: int = 1
) -> dict[str, Any]:
    """Totals over the `rows` of a metrics.jsonl of `steps` optimizer steps.

    `efficiency`: the share of the speed limit that some steps came to; `efficiency_steps`: the first and the last of
    them, of whole batches. The last `max_policy_lag` steps are left out, as all that they train on may have been there
    before, and then the first half of those that remain; None if none does.
    """

    def values(name: str) -> list[float]:
        return [row[name] for row in rows if row.get(name) is not None]

    def largest(name: str) -> float:
        return max(values(name), default=0.0)

    num_batches = max(0, steps - max_policy_lag) // updates_per_batch
    before, last = num_batches // 2 * updates_per_batch, num_batches * updates_per_batch
    late = [row for row in rows if "limit/step_s" in row and before < row["step"] <= last]
    efficiency = sum(row["limit/step_s"] for row in late) / sum(row["step/total_s"] for row in late) if late else None
    audits = {"audit_gap_max": gap} if (gap := max(values("train/audit_gap/max"), default=None)) is not None else {}
    return {
        "steps": steps,
        "tokens": int(sum(values("train/response_tokens/total"))),
        "reward_first": reward_first(rows),
        "reward_last": reward_last(rows),
        "max_policy_lag_observed": int(largest("train/policy_lag/max")),
        "dropped_stale": int(largest("replay/dropped_stale")),
        "served_gap_max": float(largest("param_server/served_gap/max")),
        # What it came to: an engine's first load is held to the ceilings.
        **{
            f"served_tolerance_{n}": v[-1]
            for n in ("max", "mean")
            if (v := values(f"param_server/served_tolerance/{n}"))
        },
        "quarantines": int(largest("collector/quarantines")),
        "restarts": int(sum(values("collector/restarts"))),
        "pulls": int(sum(values("param_server/pulls"))),
        "efficiency": efficiency,
        "efficiency_steps": [late[0]["step"], late[-1]["step"]] if late else None,
        "time_shares": time_shares(rows),
        "memory_peak_gib": memory_peaks(rows),
        **audits,
    }


def memory_peaks(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The most that each part was seen to hold, in GiB, largest first."""
    peaks: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("memory/") and name.endswith("/peak_gib") and value is not None:
                part = name.split("/")[1]
                peaks[part] = max(value, peaks.get(part, 0.0))
    return dict(sorted(peaks.items(), key=lambda item: -item[1]))


def describe_memory(peaks: Mapping[str, float]) -> list[str]:
    if not peaks:
        return []
    return ["memory at its peak: " + ", ".join(f"{part} {gib:.2f} GiB" for part, gib in peaks.items())]


def time_shares(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Each activity's share of the trainer's and of the generators' wall time, largest first."""
    trainer, generator = defaultdict[str, float](float), defaultdict[str, float](float)
    for row in rows:
        seconds = row.get("collector/interval_s")  # absent outside of training
        for name, value in row.items():
            if name.startswith("step/") and name != "step/total_s":
                trainer["work" if name in WORK else name.removeprefix("step/").removesuffix("_s")] += value
            elif seconds is not None and name.startswith("collector/") and name.endswith("_frac"):
                generator[name.removeprefix("collector/").removesuffix("_frac")] += value * seconds
    shares = {}
    for role, spent in {"trainer": trainer, "generator": generator}.items():
        total = sum(spent.values())
        largest_first = sorted(spent.items(), key=lambda item: -item[1])
        shares[role] = {cause: s / total for cause, s in largest_first if total and s / total >= 0.001}
    return shares


def describe_time_shares(shares: dict[str, dict[str, float]]) -> list[str]:
    """One line per role: where its time went."""

    def line(causes: dict[str, float]) -> str:
        return ", ".join(f"{cause.replace('_', ' ')} {share:.0%}" for cause, share in causes.items() if share >= 0.005)

    return [f"{role}: {line(causes)}" for role, causes in shares.items() if causes]

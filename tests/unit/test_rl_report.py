"""What an RL run says of itself: where a step's time went, what is logged in which order, and the sums at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.config import load_config
from leeway.driver import rl_report
from leeway.driver.rl_report import WORK, Reporter, StepClock, StepReport, describe_time_shares, summary_of
from leeway.driver.rl_stage import goodbye
from leeway.failures import PartFailed
from leeway.monitor import build_monitor, read_metrics
from leeway.monitor.metrics import reduced
from leeway.runtime.generators import Restart
from leeway.runtime.limit import Speeds
from leeway.runtime.supervisor import Supervisor

from .standing import generators_of

CAUSES = ("wait_for_batch", "audit", "checkpoint", "evaluate")
STATS_S = 10.0
"""Seconds between two reports of the fake collectors."""


class FakeTime:
    """Stands for the module `time` in `rl_report`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


# The clock of a step


@pytest.mark.slow
@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from(CAUSES), st.integers(0, 100)), max_size=6),
            st.lists(st.integers(0, 100), min_size=len(WORK), max_size=len(WORK)),
            st.integers(0, 100),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_parts_of_a_step_add_up_to_its_wall_time(steps: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl_report, "time", fake := FakeTime())
        clock = StepClock()
        for waits, work_s, rest_s in steps:  # whole seconds, so that sums are exact
            begun = fake.now
            for cause, seconds in waits:
                with clock.waiting(cause):
                    fake.now += seconds
            fake.now += sum(work_s) + rest_s
            work = {name: float(s) for name, s in zip(WORK, work_s, strict=True)}
            parts = clock.end(work | {"train/grad_norm": 7.0})
            assert parts["step/total_s"] == fake.now - begun
            assert parts["step/other_s"] == rest_s
            assert parts["step/wait_for_batch_s"] == sum(s for cause, s in waits if cause == "wait_for_batch")
            assert sum({**parts, **work}.values()) == 2 * parts["step/total_s"]  # the total, and what it is made of


def test_no_part_is_negative_when_work_overlaps_a_wait_and_a_wait_that_fails_counts() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl_report, "time", fake := FakeTime())
        clock = StepClock()

        def fail() -> None:
            with clock.waiting("publish"):
                fake.now += 3
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        parts = clock.end({"step/optim_s": 2.0})
        assert parts == {"step/wait_for_batch_s": 0.0, "step/publish_s": 3.0, "step/total_s": 3.0, "step/other_s": 0.0}


# Collectors' numbers


def test_rates_and_counts_add_up_shares_are_averaged_and_maxima_kept() -> None:
    got = reduced(
        [
            {
                "collector/tokens_per_s": 100.0,
                "collector/groups_finished": 3.0,
                "collector/generate_frac": 0.2,
                "collector/pause_s": 0.5,
                "param_server/bytes": 80.0,
                "param_server/served_gap/max": 0.1,
            },
            {
                "collector/tokens_per_s": 50.0,
                "collector/groups_finished": 4.0,
                "collector/generate_frac": 0.8,
            },
            {
                "collector/tokens_per_s": 1.0,
                "collector/generate_frac": 0.5,
                "collector/pause_s": 0.25,
                "param_server/bytes": 80.0,
                "param_server/served_gap/max": 0.3,
            },
        ]
    )
    assert got == {
        "collector/tokens_per_s": 151.0,
        "collector/groups_finished": 7.0,
        "collector/generate_frac": pytest.approx(0.5),
        "collector/pause_s": 0.5,
        "param_server/bytes": 80.0,
        "param_server/served_gap/max": 0.3,
    }
    assert reduced([]) == {}
    with pytest.raises(KeyError, match="collector/x_ratio: no `reduce`"):
        reduced([{"collector/x_ratio": 1.0}])


# The reporter


class FakeCollector:
    """Reports one dictionary after the other, the last one for ever."""

    def __init__(self, fake_time: FakeTime, reports: list[dict[str, float]], *, seconds: float) -> None:
        self._time, self._reports, self._seconds = fake_time, reports, seconds
        self.stats = SimpleNamespace(remote=self._stats)

    async def _stats(self) -> dict[str, float]:
        self._time.now += self._seconds
        if len(self._reports) > 1:
            return self._reports.pop(0)
        return self._reports[0]


def collector_stats(*, generate: float, gap: float | None = None, quarantines: float = 0.0) -> dict[str, float]:
    pulls = (
        {"param_server/pulls": 0.0}
        if gap is None
        else {
            "param_server/pulls": 1.0,
            "param_server/served_gap/max": gap,
            "param_server/served_tolerance/max": 2 * gap,
            "param_server/served_tolerance/mean": gap,
        }
    )
    return {
        "collector/generate_frac": generate,
        "collector/wait_for_slot_frac": 1.0 - generate,
        "collector/quarantines": quarantines,
        **pulls,
    }


def batch_of(reward: float, tokens: float) -> dict[str, float]:
    return {
        "train/reward/mean": reward,
        "train/sequences": 8.0,
        "train/response_rows/first": 2.0,
        "train/response_tokens/total": tokens,
        "train/response_rows/total": tokens / 5,
        "train/response_tokens/max": 9.0,
        "train/environment_s/max": 0.0,
    }


def step_metrics(*, wait_s: float, work_s: float, lag: float, **more: float) -> dict[str, float]:
    return {
        "step/wait_for_batch_s": wait_s,
        "step/forward_backward_s": work_s / 2,
        "step/optim_s": work_s / 2,
        "step/other_s": 0.0,
        "step/total_s": wait_s + work_s,
        "train/policy_lag/max": lag,
        "train/tokens_in_pass": 100.0,
        **more,
    }


SPEEDS = Speeds(
    generate_s_per_sequence=0.01,
    generate_s_per_token=0.01,
    train_s_per_token=0.0,
    optim_s=0.0,
    first_token_s=0.0,
    serial_s_per_token=0.0,
    weight_sync_s=0.0,
)


def reported(
    tmp_path: Path,
    reports: list[StepReport],
    *stats: list[dict[str, float]],
    resumed_at: int | None = None,
    restarts: Sequence[Restart] = (),
    settings: Sequence[str] = (),
    speeds: Any = None,
    on_limit: Any = lambda _: None,
) -> Reporter:
    config = load_config(
        "quickstart",
        ["stages.async_rl.train.updates_per_batch=2", "staleness.max_policy_lag=2", "monitor.console=off", *settings],
        recipe="async_rl",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl_report, "time", fake := FakeTime())

        async def main() -> Reporter:
            collectors = [FakeCollector(fake, list(s), seconds=STATS_S / len(stats)) for s in stats]
            parts: Any = SimpleNamespace(**generators_of(*collectors), supervisor=Supervisor())
            parts.restarts.over += restarts
            monitor = build_monitor(tmp_path, config.monitor, {}, 4, "rl", resumed_at=resumed_at)
            reporter = Reporter(config, parts, monitor, first_step=resumed_at or 0, on_limit=on_limit)
            reporter.begin(speeds or SPEEDS)
            for report in reports:
                await reporter.put(report)
            await reporter.end()
            return reporter

        return asyncio.run(main())


def a_run(tmp_path: Path) -> Reporter:
    """Two batches of two steps: 100 and 200 response tokens; a report of the driver after each."""
    one, two = batch_of(0.25, 100.0), batch_of(0.75, 200.0)
    reports = [
        StepReport(1, step_metrics(wait_s=2, work_s=2, lag=1), one, [{"text": "one"}], begins_batch=True),
        StepReport(2, step_metrics(wait_s=0, work_s=2, lag=2), one),
        StepReport(2, {"replay/dropped_stale": 0.0, "replay/groups_ready": 5.0}),
        StepReport(
            3,
            step_metrics(wait_s=3, work_s=1, lag=1, **{"train/audit_gap/max": 0.5}),
            two,
            [{"text": "two"}],
            begins_batch=True,
        ),
        StepReport(4, step_metrics(wait_s=0, work_s=2, lag=1, **{"train/audit_gap/max": 0.25}), two),
        StepReport(4, {"param_server/publish_s": 0.5}),
    ]
    first = [
        collector_stats(generate=0.0, gap=0.125),  # before the first step: no part of its shares
        collector_stats(generate=1.0, gap=0.5),
        collector_stats(generate=0.75, quarantines=1.0),
        collector_stats(generate=0.75, gap=0.25),
        collector_stats(generate=1.0, quarantines=1.0),
    ]
    restarts = [Restart("generator-0", "the process died", at=0.0, down_s=s, groups=3) for s in (1.5, 2.5)]
    return reported(tmp_path, reports, first, [collector_stats(generate=0.5, gap=0.0625)], restarts=restarts)


def test_each_optimizer_step_is_told_of_beside_its_limit(tmp_path: Path) -> None:
    one, own = batch_of(0.25, 100.0), step_metrics(wait_s=2, work_s=2, lag=1)
    reports = [StepReport(1, own, one, [], begins_batch=True), StepReport(2, own, one), StepReport(2, {"a/b": 1.0})]
    told: list[Any] = []
    reported(tmp_path, reports, [collector_stats(generate=1.0)], on_limit=told.append)
    assert [(m["limit/train_s"], m["limit/generate_s"]) for m in told] == [(0.0, 0.5)] * 2


@pytest.mark.parametrize(("engine", "generate_s"), [("vllm", 0.01 * 50), ("hf", 0.01 * 10)])
def test_the_limit_counts_what_the_engine_computes(tmp_path: Path, engine: str, generate_s: float) -> None:
    """Rows, where answers that are the same so far are one row of a pass."""
    report = StepReport(1, step_metrics(wait_s=2, work_s=2, lag=1), batch_of(0.25, 100.0), [], begins_batch=True)
    settings = ["rollout.engine=null", f"rollout.engine.name={engine}"]
    reported(tmp_path, [report], [collector_stats(generate=1.0)], settings=settings)
    [row] = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["role"] == "trainer"]
    assert row["limit/generate_s"] == pytest.approx(generate_s)
    assert row["train/tokens_per_s"] == pytest.approx(50 / 4)


def test_everything_is_logged_in_the_order_in_which_it_came(tmp_path: Path) -> None:
    a_run(tmp_path)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["role"]) for r in rows] == [
        (0, "collector"),
        (1, "trainer"),
        (1, "collector"),
        (2, "trainer"),
        (2, "collector"),
        (2, "driver"),
        (3, "trainer"),
        (3, "collector"),
        (4, "trainer"),
        (4, "collector"),
        (4, "driver"),
    ]
    steps = [r for r in rows if r["role"] == "trainer"]
    # What describes a batch is said once, at its first step.
    assert [r.get("train/reward/mean") for r in steps] == [0.25, None, 0.75, None]
    # A step's share of its batch, in its time: 100 / 2 tokens in 4 s, ...
    assert [r["train/tokens_per_s"] for r in steps] == pytest.approx([50 / 4, 50 / 2, 100 / 4, 100 / 2])
    assert [r["limit/step_s"] for r in steps] == pytest.approx([0.5, 0.5, 1.0, 1.0])
    written = sorted(p.name for p in (tmp_path / "rollouts").iterdir())
    assert written == ["step-000001.jsonl", "step-000003.jsonl"]


def test_a_restart_is_logged_once(tmp_path: Path) -> None:
    a_run(tmp_path)
    rows = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["role"] == "collector"]
    numbers = [[r.get(f"collector/{name}") for name in ("restarts", "restart_s", "groups_lost")] for r in rows]
    assert numbers == [[2.0, 2.5, 6.0], *[[None, None, None]] * (len(rows) - 1)]


def test_the_summary_adds_up_what_was_logged(tmp_path: Path) -> None:
    summary = a_run(tmp_path).summary(steps=4)
    shares = summary.pop("time_shares")
    assert summary.pop("memory_peak_gib")["driver"] > 0
    assert summary == {
        "steps": 4,
        "tokens": 300,
        "reward_first": pytest.approx(0.5),
        "reward_last": pytest.approx(0.5),
        "max_policy_lag_observed": 2,
        "dropped_stale": 0,
        "served_gap_max": 0.5,
        "served_tolerance_max": 0.125,  # of the last load
        "served_tolerance_mean": 0.0625,
        "quarantines": 1,
        "restarts": 2,
        "pulls": 3 + 5,
        "efficiency": pytest.approx(1.0 / 6),  # with a lag of 2, for steps 3 and 4 all may have been there before
        "efficiency_steps": [1, 2],
        "audit_gap_max": 0.5,
    }
    # 12 s of steps, of which 7 s work; the engines: the mean of both, over four reports of equal length.
    assert list(shares["trainer"]) == ["work", "wait_for_batch"]
    assert shares["trainer"] == pytest.approx({"work": 7 / 12, "wait_for_batch": 5 / 12})
    assert shares["generator"] == pytest.approx({"generate": 0.6875, "wait_for_slot": 0.3125})


@pytest.mark.parametrize(
    ("bound", "updates", "efficiency", "counted"),
    [
        (0, 1, 2.0 / 6, [3, 4]),
        (1, 1, 1.5 / 6, [2, 3]),
        (3, 1, 0.5 / 4, [1, 1]),
        (4, 1, None, None),
        (7, 1, None, None),
        (0, 2, 2.0 / 6, [3, 4]),
        (1, 2, 1.0 / 6, [1, 2]),
        (3, 2, None, None),
    ],
)
def test_the_share_of_the_limit_is_of_whole_batches_that_engines_cannot_have_finished_before(
    tmp_path: Path, bound: int, updates: int, efficiency: float | None, counted: list[int] | None
) -> None:
    a_run(tmp_path)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    summary = summary_of(rows, steps=4, max_policy_lag=bound, updates_per_batch=updates)
    assert summary["efficiency"] == (efficiency and pytest.approx(efficiency))
    assert summary["efficiency_steps"] == counted
    said = [line for line in goodbye(summary | {"eval": {}}) if "speed limit" in line]
    if efficiency is None or counted is None:
        assert said == []
    else:
        when = "step 1" if counted == [1, 1] else f"steps {counted[0]} to {counted[1]}"
        assert said == [f"{efficiency:.0%} of the speed limit in {when}"]


@pytest.mark.slow
def test_a_run_that_was_stopped_has_one_record(tmp_path: Path) -> None:
    """Three steps, of which two were saved; gone on from there: no step twice, sums and shares over both parts."""
    batches = [batch_of(reward, 100.0) for reward in (0.0, 0.5, 0.9, 1.0, 1.0)]

    def steps(*numbers: int) -> list[StepReport]:
        return [StepReport(0 if numbers[0] == 1 else 2, {"param_server/publish_s": 0.5})] + [
            StepReport(
                n,
                step_metrics(wait_s=1, work_s=3, lag=n, **{"train/grad_norm": 1.0}),
                batches[n - 1],
                begins_batch=True,
            )
            for n in numbers
        ]

    first = [collector_stats(generate=0.0, gap=0.125), collector_stats(generate=1.0, gap=0.5)]
    alone = reported(tmp_path / "alone", steps(1, 2, 3, 4, 5), first).summary(steps=5)
    reported(tmp_path / "run", steps(1, 2, 3), first)
    second = reported(tmp_path / "run", steps(3, 4, 5), first, resumed_at=2)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [(r["step"], r["role"]) for r in rows] == [
        (r["step"], r["role"]) for r in read_metrics(tmp_path / "alone/metrics.jsonl")
    ]
    summary = second.summary(steps=5)
    assert summary.pop("memory_peak_gib").keys() == alone.pop("memory_peak_gib").keys()
    assert summary == alone
    assert [r["step"] for r in read_metrics(tmp_path / "run/metrics-1.jsonl")] == [3, 3]
    assert second.verdict().learned is True


def test_a_dropped_group_would_be_seen_and_an_audit_that_never_was_is_not_reported(tmp_path: Path) -> None:
    batch = batch_of(1.0, 10.0)
    reports = [
        StepReport(1, step_metrics(wait_s=1, work_s=1, lag=0), batch, begins_batch=True),
        StepReport(1, {"replay/dropped_stale": 2.0}),
        StepReport(2, {"replay/dropped_stale": 1.0}),
    ]
    summary = reported(tmp_path, reports, [collector_stats(generate=0.5)]).summary(steps=1)
    assert summary["dropped_stale"] == 2
    assert "audit_gap_max" not in summary


def test_shares_of_a_run_without_a_step_are_empty_and_small_ones_are_left_out(tmp_path: Path) -> None:
    idle = reported(tmp_path / "idle", [], [collector_stats(generate=0.5)])
    summary = idle.summary(steps=0)
    assert summary["time_shares"] == {"trainer": {}, "generator": {}}
    assert summary["efficiency"] is summary["efficiency_steps"] is None
    batch = batch_of(1.0, 10.0)
    metrics = step_metrics(wait_s=0.001, work_s=5.0, lag=0, **{"step/audit_s": 2.0})
    report = StepReport(1, metrics | {"step/total_s": 7.001}, batch, begins_batch=True)
    busy = reported(tmp_path / "busy", [report], [collector_stats(generate=1.0)])
    shares = busy.summary(steps=1)["time_shares"]
    assert shares["trainer"] == pytest.approx({"work": 5 / 7, "audit": 2 / 7}, abs=1e-3)
    assert shares["generator"] == {"generate": 1.0}
    for causes in shares.values():
        assert sum(causes.values()) == pytest.approx(1.0, abs=0.005)
        assert list(causes.values()) == sorted(causes.values(), reverse=True)


@pytest.mark.slow
def test_a_collector_that_fails_ends_the_reports_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        async def fail() -> dict[str, float]:
            raise ValueError("lost its numbers")

        config = load_config("quickstart", ["monitor.console=off"], recipe="async_rl")
        collector = SimpleNamespace(stats=SimpleNamespace(remote=fail))
        parts: Any = SimpleNamespace(**generators_of(collector), supervisor=Supervisor())
        reporter = Reporter(config, parts, build_monitor(tmp_path, config.monitor, {}, 4, "rl"))
        reporter.begin(SPEEDS)
        with pytest.raises(PartFailed, match="generators: ValueError: lost its numbers"):
            await reporter.end()

    asyncio.run(main())


@pytest.mark.slow
def test_steps_wait_for_reports_that_are_far_behind_and_hear_when_they_fail(tmp_path: Path) -> None:
    """Else every batch of rollouts that is still to be logged stays in memory."""

    async def main() -> None:
        config = load_config("quickstart", ["monitor.console=off"], recipe="async_rl")
        answering = asyncio.Event()

        async def stats() -> dict[str, float]:
            await answering.wait()
            return collector_stats(generate=1.0)

        collector = SimpleNamespace(stats=SimpleNamespace(remote=stats))
        supervisor = Supervisor()
        parts: Any = SimpleNamespace(**generators_of(collector), supervisor=supervisor)
        reporter = Reporter(config, parts, build_monitor(tmp_path, config.monitor, {}, 4, "rl"))
        reporter.begin(SPEEDS)
        for step in range(rl_report.REPORTS_AHEAD):
            await reporter.put(StepReport(step, {}))
        late = asyncio.create_task(reporter.put(StepReport(99, {})))
        await asyncio.sleep(0.01)
        assert not late.done()
        answering.set()
        await late
        await reporter.end()
        assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl") if r["role"] == "driver"][-1] == 99

        async def fail() -> dict[str, float]:
            raise ValueError("lost its numbers")

        collector.stats.remote = fail
        reporter.begin(SPEEDS)
        for step in range(rl_report.REPORTS_AHEAD):
            await reporter.put(StepReport(step, {}))
        with pytest.raises(PartFailed, match="lost its numbers"):
            await reporter.put(StepReport(100, {}))

    asyncio.run(main())


def test_shares_in_words_name_each_cause_and_leave_out_what_rounds_to_nothing() -> None:
    shares = {"trainer": {"work": 0.716, "wait_for_batch": 0.28, "audit": 0.004}, "generator": {"generate": 1.0}}
    assert describe_time_shares(shares) == ["trainer: work 72%, wait for batch 28%", "generator: generate 100%"]

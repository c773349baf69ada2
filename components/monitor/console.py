"""Progress on the terminal: how far, how good, how fast, and who waits for whom."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from ..failures import printable
from .sink import MonitorError, Record, Sink
from .waits import LAST_STEPS, Wait, who_waits

PLAIN_EVERY_S, PLAIN_EVERY_AT_MOST_S, LINES_PER_RUN = 5.0, 60.0, 100
"""Seconds between two lines: at first, at most, and in between so many for a run as long as it has been."""
SENTENCE_STEPS = 5
"""Steps before it is said who waits for whom."""
SENTENCE_EVERY_S = 1.0
"""How often that, and the course of the reward, is worked out anew: from all numbers of the last steps, or of all."""
SENTENCE_LINES = 20
"""Lines after which a sentence that has not changed is said again."""
SPARKS, SPARK_WIDTH = "▁▂▃▄▅▆▇█", 24
SUSPECT = "reward_hacking/suspect_frac"


class ConsoleSink(Sink):
    """ "live": a bar, a status line and a sentence that redraw in place; "plain": a line now and then.

    "auto" is live on a terminal and plain elsewhere (files, CI). Both start with the first step, and the last line says
    how far the run got. `step`: the step that the run resumes from. `settings`: by dotted key, for the sentence.
    """

    name = "console"

    def __init__(
        self,
        *,
        mode: str = "auto",
        total_steps: int | None,
        title: str,
        step: int = 0,
        settings: Mapping[str, Any] | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if mode not in ("auto", "live", "plain"):
            raise MonitorError(f"monitor.console: got {mode!r}, expected 'auto', 'live', 'plain' or 'off'")
        self._console = console or Console()
        self._title, self._total_steps, self._clock = printable(title), total_steps, clock
        self._latest: dict[str, float] = {}
        self._rewards: list[float] = []
        self._sparkline, self._drawn_s = "", -math.inf
        self._waits = _Waits(settings or {}, clock)
        self._step = step
        self._started_s, self._printed_s, self._unprinted = clock(), -math.inf, False
        self._said, self._lines_since = ("", ""), 0
        self._is_live = mode == "live" or (mode == "auto" and self._console.is_terminal)
        self._live: _LiveView | None = None
        self._has_begun = False

    def log(self, record: Record) -> None:
        self._latest.update(record.metrics)
        self._waits.add(record)
        if math.isfinite(reward := record.metrics.get("train/reward/mean", math.nan)):
            self._rewards.append(reward)
        self._step = max(self._step, record.step)
        if not self._has_begun:  # a bar that stands at 0 while everything starts would say nothing
            if record.role != "trainer":
                return
            self._has_begun = True
            if self._is_live:
                self._live = _LiveView(self._console, self._title, self._total_steps)
        if self._live is not None:
            self._live.update(self._step, describe(self._latest, self._sparks()), self._waits.now())
            return
        self._unprinted = True
        now_s = self._clock()
        if now_s - self._printed_s >= self._every_s(now_s):
            self._print_status(now_s)

    def close(self, status: str) -> None:
        took = f"{status} {'in' if status == 'done' else 'after'} {self._clock() - self._started_s:.1f} s"
        if self._live is None:
            self._print_status(self._clock(), ended=took)
            return
        self._live.stop(is_done=status == "done")
        if status != "done":  # else the bar is full, and has the time beside it
            self._write(f"{self._title}: {took}, at step {self._step}")

    def _every_s(self, now_s: float) -> float:
        return min(PLAIN_EVERY_AT_MOST_S, max(PLAIN_EVERY_S, (now_s - self._started_s) / LINES_PER_RUN))

    def _print_status(self, now_s: float, *, ended: str = "") -> None:
        steps = f"{self._step}/{self._total_steps}" if self._total_steps else f"{self._step}"
        said = [part for part in (describe(self._latest), ended or self._time_left()) if part]
        self._write(f"{self._title} step {steps}  {' | '.join(said)}".rstrip())
        self._printed_s, self._unprinted, self._lines_since = now_s, False, self._lines_since + 1
        wait = None if ended else self._waits.now()
        if wait is None:
            return
        if (wait.waiter, wait.holder) != self._said or self._lines_since >= SENTENCE_LINES:
            self._said, self._lines_since = (wait.waiter, wait.holder), 0
            self._write(f"{self._title}: {in_one_line(wait)}")

    def _time_left(self) -> str:
        step_s = self._latest.get("step/total_s", math.nan)
        if not self._total_steps or math.isnan(step_s) or self._step >= self._total_steps:
            return ""
        mean_s = self._waits.step_s or step_s
        return f"{as_duration((self._total_steps - self._step) * mean_s)} left"

    def _sparks(self) -> str:
        if self._clock() - self._drawn_s >= SENTENCE_EVERY_S:
            self._drawn_s = self._clock()
            can_show = (self._console.encoding or "").lower().startswith("utf")
            self._sparkline = sparkline(self._rewards) if can_show else ""
        return self._sparkline

    def _write(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Waits:
    """Who waits for whom in the last steps, worked out now and then."""

    def __init__(self, settings: Mapping[str, Any], clock: Callable[[], float]) -> None:
        self._settings, self._clock = settings, clock
        self._rows: deque[dict[str, Any]] = deque()
        self._step_s: deque[float] = deque(maxlen=LAST_STEPS)
        self._wait: Wait | None = None
        self._looked_s = -math.inf

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return sum(self._step_s) / len(self._step_s) if self._step_s else 0.0

    def add(self, record: Record) -> None:
        if record.role == "evaluation":
            return
        self._rows.append({"step": record.step, **record.metrics})
        if "step/total_s" in record.metrics:
            self._step_s.append(record.metrics["step/total_s"])
        while self._rows[0]["step"] <= record.step - LAST_STEPS:
            self._rows.popleft()

    def now(self) -> Wait | None:
        if len(self._step_s) < SENTENCE_STEPS:
            return None
        if self._clock() - self._looked_s >= SENTENCE_EVERY_S:
            self._looked_s = self._clock()
            self._wait = who_waits([*self._rows], self._settings)
        return self._wait


class _LiveView:
    def __init__(self, console: Console, title: str, total_steps: int | None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task(title, total=total_steps)
        # Leave stderr alone: what libraries write there is kept off the terminal.
        self._live = Live(self._render("", None), console=console, refresh_per_second=4, redirect_stderr=False)
        self._live.start()

    def update(self, step: int, status: str, wait: Wait | None) -> None:
        self._progress.update(self._task, completed=step)
        self._live.update(self._render(status, wait))

    def stop(self, *, is_done: bool) -> None:
        if is_done:  # a run that is done early is as done as one that took all its steps
            self._progress.update(self._task, total=self._progress.tasks[0].completed)
        self._live.stop()

    def _render(self, status: str, wait: Wait | None) -> Group:
        said = [] if wait is None else [Text(in_one_line(wait), style="dim")]
        return Group(self._progress, Text(status), *said)


def in_one_line(wait: Wait) -> str:
    """The sentence, and the setting that would change it."""
    return f"{wait.sentence} What would change it: {wait.advice}" if wait.advice else wait.sentence


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The course of `values` from the first to the last, `width` characters at most, from the least to the largest."""
    if len(values) < 2:
        return ""
    count = min(width, len(values))
    bounds = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


def as_duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes:.0f} min" if minutes < 90 else f"{hours:.1f} h"


def describe(latest: Mapping[str, float], sparks: str = "") -> str:
    """The newest value of what matters most, in one line; whatever was never measured is left out.

    `sparks`: the course of the reward.
    """

    def show(pattern: str, *names: str) -> list[str]:
        values = [latest.get(name, math.nan) for name in names]
        return [] if any(math.isnan(value) for value in values) else [pattern.format(*values)]

    parts = [
        *show(f"reward {{:.3f}}{sparks and ' ' + sparks}", "train/reward/mean"),
        *(show("{:.0%} of full scores suspect", SUSPECT) if latest.get(SUSPECT, 0.0) >= 0.005 else []),
        *show("loss {:.4f}", "train/loss/sft"),
        *show("loss {:.4f}, margin {:.3f}", "train/loss/dpo", "train/preference/margin"),
        *show("lag {:.1f} (max {:.0f})", "train/policy_lag/mean", "train/policy_lag/max"),
        *show("{:,.0f} tok/s trained", "train/tokens_per_s"),
        *show("{:,.0f} tok/s generated", "collector/tokens_per_s"),
        *show("{:.2f} s/step", "step/total_s"),
    ]
    return " | ".join(parts)

"""Progress on the terminal: how far, how good, how fast, and who waits for whom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from .sink import MonitorError, Record, Sink

PLAIN_EVERY_S = 5.0
BALANCED_BELOW_FRAC = 0.05
SUSPECT = "reward_hacking/suspect_frac"


class ConsoleSink(Sink):
    """ "live": a bar and one status line that redraw in place; "plain": the same words as one line every few seconds.

    "auto" is live on a terminal and plain elsewhere (files, CI). Both start with the first step, and report at the end
    how far the run got. `step`: the step that the run resumes from.
    """

    name = "console"

    def __init__(
        self,
        *,
        mode: str = "auto",
        total_steps: int | None,
        title: str,
        step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if mode not in ("auto", "live", "plain"):
            raise MonitorError(f"monitor.console: got {mode!r}, expected 'auto', 'live', 'plain' or 'off'")
        self._console = console or Console()
        self._title, self._total_steps, self._clock = title, total_steps, clock
        self._latest: dict[str, float] = {}
        self._step = step
        self._started_s, self._printed_s, self._unprinted = clock(), -math.inf, False
        self._is_live = mode == "live" or (mode == "auto" and self._console.is_terminal)
        self._live: _LiveView | None = None
        self._has_begun = False

    def log(self, record: Record) -> None:
        self._latest.update(record.metrics)
        self._step = max(self._step, record.step)
        if not self._has_begun:  # a bar that stands at 0 while everything starts would say nothing
            if record.role != "trainer":
                return
            self._has_begun = True
            if self._is_live:
                self._live = _LiveView(self._console, self._title, self._total_steps)
        if self._live is not None:
            self._live.update(self._step, describe(self._latest))
            return
        self._unprinted = True
        now_s = self._clock()
        if now_s - self._printed_s >= PLAIN_EVERY_S:
            self._print_status(now_s)

    def close(self, status: str) -> None:
        if self._live is not None:
            self._live.stop(is_done=status == "done")
        elif self._unprinted:
            self._print_status(self._clock())
        self._write(f"{self._title}: {status} at step {self._step} after {self._clock() - self._started_s:.1f} s")

    def _print_status(self, now_s: float) -> None:
        steps = f"{self._step}/{self._total_steps}" if self._total_steps else f"{self._step}"
        self._write(f"{self._title} step {steps}  {describe(self._latest)}".rstrip())
        self._printed_s, self._unprinted = now_s, False

    def _write(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


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
        self._live = Live(self._render(""), console=console, refresh_per_second=4, redirect_stderr=False)
        self._live.start()

    def update(self, step: int, status: str) -> None:
        self._progress.update(self._task, completed=step)
        self._live.update(self._render(status))

    def stop(self, *, is_done: bool) -> None:
        if is_done:  # a run that is done early is as done as one that took all its steps
            self._progress.update(self._task, total=self._progress.tasks[0].completed)
        self._live.stop()

    def _render(self, status: str) -> Group:
        return Group(self._progress, Text(status, style="dim"))


def describe(latest: dict[str, float]) -> str:
    """The newest value of what matters most, in one line; whatever was never measured is left out."""

    def show(pattern: str, *names: str) -> list[str]:
        values = [latest.get(name, math.nan) for name in names]
        return [] if any(math.isnan(value) for value in values) else [pattern.format(*values)]

    parts = [
        *show("reward {:.3f}", "train/reward/mean"),
        *(show("{:.0%} of full scores suspect", SUSPECT) if latest.get(SUSPECT, 0.0) >= 0.005 else []),
        *show("loss {:.4f}", "train/loss/sft"),
        *show("loss {:.4f}, margin {:.3f}", "train/loss/dpo", "train/preference/margin"),
        *show("lag {:.1f} (max {:.0f})", "train/policy_lag/mean", "train/policy_lag/max"),
        *show("{:,.0f} tok/s trained", "train/tokens_per_s"),
        *show("{:,.0f} tok/s generated", "collector/tokens_per_s"),
        *show("{:.2f} s/step", "step/total_s"),
        *who_waits(latest),
    ]
    return " | ".join(parts)


def who_waits(latest: dict[str, float]) -> list[str]:
    """At most one phrase: the side that spends the larger share of its time waiting for the other."""
    total_s, wait_s = latest.get("step/total_s", math.nan), latest.get("step/wait_for_batch_s", math.nan)
    trainer_frac = wait_s / total_s if total_s > 0 else math.nan
    collector_frac = latest.get("collector/wait_for_slot_frac", math.nan)
    waiting = [
        (frac, phrase)
        for frac, phrase in (
            (trainer_frac, "trainer waits for a batch"),
            (collector_frac, "collectors wait for a slot"),
        )
        if not math.isnan(frac)
    ]
    if not waiting:
        return []
    frac, phrase = max(waiting)
    return ["nobody waits"] if frac < BALANCED_BELOW_FRAC else [f"{phrase} {100 * frac:.0f} %"]

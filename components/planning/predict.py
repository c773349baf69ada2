"""Simulates one setting and summarizes it: step time, who is busy, how old the tokens are, how close to the limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .model import Calibration, Settings
from .simulate import SimulatedRun, Simulation

_EVENTS = 40_000
"""Group parts simulated per prediction; takes about 0.1 s."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds, shares of time, and lags in optimizer steps.

    `step_s` is a mean over optimizer steps; `limit_s` is the shortest possible under any schedule (docs/metrics.md).
    `generator_busy` counts decoding and prefill, `generating_frac` the time with a request in an engine and no pause
    (what runs log as collector/generate_frac), `trainer_busy` the forward, backward and optimizer passes.
    `lag_share[l]` is the share of trained tokens with lag l.
    """

    settings: Settings
    step_s: float
    samples_per_s: float
    generator_busy: float
    generating_frac: float
    trainer_busy: float
    wait_for_batch_s: float
    lag_mean: float
    lag_max: int
    lag_share: dict[int, float]
    limit_s: float
    num_events: int

    @property
    def efficiency(self) -> float:
        return self.limit_s / self.step_s


def predict(calibration: Calibration, settings: Settings, *, events: int = _EVENTS, seed: int = 0) -> Prediction:
    """Simulate `settings` on the measured parts until start-up effects are gone and the means have settled.

    `events`: about how much to simulate; the time it takes is proportional to it (3-5 microseconds each). Raises
    ValueError where the admission rule refuses the settings.
    """
    groups_per_update = settings.groups_per_step / settings.updates_per_batch
    pulls = settings.generators / settings.publish_every
    chunks, least_steps, least_bursts = min(settings.group_size, 4), 12, 3
    if (groups_per_update * chunks + pulls) * 40 > events:  # large batches: each step says more
        chunks, least_steps, least_bursts = min(settings.group_size, 2), 8, 1
    per_step = groups_per_update * chunks + pulls
    # All slots are free at the start, so batches come in bursts of L + 1 steps at first; means are over whole bursts.
    burst = max(settings.max_policy_lag + 1, settings.publish_every)
    burst = -(-burst // settings.updates_per_batch) * settings.updates_per_batch
    recorded = max(least_steps, least_bursts * burst, min(400, math.ceil(events / per_step)))
    recorded = -(-recorded // burst) * burst
    skip = burst + 2 * settings.updates_per_batch
    simulation = Simulation(
        calibration, settings, num_steps=skip + recorded, skip=skip, chunks_per_group=chunks, seed=seed
    )
    return _sum_up(calibration, settings, simulation.run())


def limit_s(calibration: Calibration, settings: Settings) -> float:
    """T_step >= max(Wg / Ng, Wt / Nt, (Lmax + Tt + Ts) / (L + 1)), with the means of the calibration."""
    c, s = calibration, settings
    groups = s.groups_per_step / s.updates_per_batch
    generate_s = groups * group_work_s(c, s) / s.generators
    train_s = groups * train_work_s(c, s) / s.trainers + c.optim_s
    longest = c.lengths.longest_of(s.groups_per_step * s.group_size)
    # The longest answer of a batch and its longest wait may belong to different groups: take the longer of the two.
    longest_s = (
        c.pass_s
        + c.prompt_tokens * c.token_s
        + c.latency_s
        + max(
            (longest - 1) * (c.pass_s + c.token_s),
            c.environment_s.longest_of(s.groups_per_step) if c.environment_s else 0.0,
        )
    )
    serial_s = (longest_s + train_s + c.pause_s) / (s.max_policy_lag + 1)
    return max(generate_s, train_s, serial_s)


def train_work_s(c: Calibration, s: Settings) -> float:
    """Seconds of one trainer rank per group."""
    return c.train_tokens(s.group_size) * c.train_token_s


def group_work_s(c: Calibration, s: Settings) -> float:
    """Seconds of one engine per group with the largest possible number of concurrent sequences."""
    at_once = max(1.0, min(c.max_sequences, s.max_outstanding_groups * s.group_size / s.generators))
    tokens = (c.lengths.mean - 1) * s.group_size  # the first one comes with the prompt
    return (tokens * (c.pass_s / at_once + c.token_s) + c.prefill_tokens(s.group_size) * c.token_s) / c.kept_frac


def _sum_up(c: Calibration, s: Settings, record: SimulatedRun) -> Prediction:
    elapsed = record.ended_at - record.started_at
    step_s = math.fsum(record.steps) / len(record.steps)
    total = math.fsum(record.lag_tokens.values()) or 1.0
    share = {lag: record.lag_tokens[lag] / total for lag in sorted(record.lag_tokens)}
    return Prediction(
        settings=s,
        step_s=step_s,
        samples_per_s=s.groups_per_step * s.group_size / s.updates_per_batch / step_s,
        generator_busy=record.engine_busy_s / elapsed / s.generators,
        generating_frac=record.generating_s / elapsed / s.generators,
        trainer_busy=record.train_s / elapsed,
        wait_for_batch_s=math.fsum(record.waits) / len(record.waits),
        lag_mean=math.fsum(lag * part for lag, part in share.items()),
        lag_max=max(share, default=0),
        lag_share=share,
        limit_s=limit_s(c, s),
        num_events=record.num_events,
    )

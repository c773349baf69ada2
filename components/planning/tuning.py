"""What `leeway tune` tries on a machine, one change at a time, and what it makes of the times measured.

A candidate is a set of overrides with the step time that is expected of it, where that can be told: the planner
simulates schedules (bound, window, versions, engines against ranks); time in turns on shared cores follows from the
parts' own speeds. The rest is only measured.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import Config, ConfigError, derive
from ..config.errors import words
from ..config.rules import (
    a_batch_can_come_in_parts,
    evaluations_meet_published_weights,
    staleness_is_possible,
    uses_fit_the_bound,
)
from ..monitor import read_metrics
from .calibration import calibrate, open_run
from .model import Calibration, Settings
from .predict import group_work_s, predict, train_work_s
from .search import fitting, splits_of, variants

WORTH_IT = 0.05
"""A change must save this share of a step, or it is noise."""
LARGER_LAGS = (1, 2, 4)
FEWER_VERSIONS = (2, 3)
"""Times as many optimizer steps between published versions."""
MOST_ENGINES = 4
"""That share the cores in lockstep: each has a copy of the weights, and a start."""
ENGINES, ENGINE_CORES = "rollout.num_generators", "cluster.cpus_per_generator"
PLACES = "rollout.engine.max_num_seqs"
PUBLISH_EVERY = "param_server.publish_every"
_WAITING = 0.15
"""In lockstep, the share of a batch's time in environments from which its halves are worth a trial."""
NOTES = {
    "staleness.max_policy_lag": "A larger lag bound is more off-policy: compare what is learned with "
    "`leeway run frontier`.",
    PUBLISH_EVERY: "With fewer versions, tokens are sampled from older ones, within the same lag bound.",
    "train.stream_groups": "With train.stream_groups a seed does not decide the weights to the last bit.",
}
_EVENTS = 20_000


@dataclass(frozen=True)
class Candidate:
    """`overrides`: dotted keys. `expected_s`: seconds a step; None: only a trial can tell. `why`: in a few words.

    `in_lockstep`: it is of no use once a larger lag bound was found faster.
    """

    overrides: Mapping[str, Any]
    why: str
    expected_s: float | None = None
    in_lockstep: bool = False

    def on_top_of(self, best: Mapping[str, Any], *, engines: int) -> Candidate:
        """With the overrides found so far. Its own are for so many engines: of more, each needs fewer places, and has
        the cores that it was found with.
        """
        own, now = dict(self.overrides), best.get(ENGINES, engines)
        if now != engines and ENGINES not in own:
            own.pop(ENGINE_CORES, None)
            if PLACES in own:
                own[PLACES] = -(-own[PLACES] * engines // now)
        return replace(self, overrides={**best, **own})


@dataclass(frozen=True)
class Trial:
    """A candidate that ran: `step_s`, see `step_seconds`; None: it failed, and `failure` says how."""

    candidate: Candidate
    step_s: float | None
    failure: str = ""


def step_seconds(rows: Sequence[Mapping[str, Any]], *, period: int = 1) -> float | None:
    """A step in seconds, without the first third of them; None if fewer than three are left.

    Of each `period` steps, which differ by what else is done in them (a version is published), the median of all first
    ones, of all second ones, and so on; then the mean of these medians. The mean of all where there are few of each.
    """
    took = [row["step/total_s"] for row in rows if "step/total_s" in row]
    settled = took[max(2, len(took) // 3) :]
    if len(settled) < 3:
        return None
    if len(settled) < 3 * period:
        return statistics.fmean(settled)
    return statistics.fmean(statistics.median(settled[phase::period]) for phase in range(period))


def candidates(
    config: Config, calibration: Calibration, *, num_cores: int | None = None, keep_lag: bool = False
) -> list[Candidate]:
    """What is worth a trial, the most promising axis first; each is tried on top of the best so far."""
    cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
    schedules = _schedules(calibration, keep_lag=keep_lag)
    return [
        *schedules,
        *_publications(config, calibration, schedules),
        *(_core_splits(config, calibration, cores) if config.cluster.device == "cpu" else _splits(calibration)),
        *_places(config, calibration.settings),
        *_halves(config, calibration, cores),
        *_passes(config, calibration),
    ]


def _schedules(c: Calibration, *, keep_lag: bool) -> list[Candidate]:
    """The lag bound and reorder window that the planner finds fastest, where that is not what is set."""
    own = c.settings
    now_s = predict(c, own, events=_EVENTS).step_s
    larger = [] if keep_lag else [lag for lag in LARGER_LAGS if lag >= own.max_policy_lag]
    lags = sorted({own.max_policy_lag, *larger})
    windows = sorted({1, own.reorder_window, max(1, own.groups_per_step // 4), own.groups_per_step})
    tried = variants(own, lags=lags, windows=windows, splits=[(own.generators, own.trainers)])
    found = [p for s in tried if (p := predict(c, s, events=_EVENTS)).step_s <= now_s * (1 - WORTH_IT)]
    if not found:
        return []
    fastest = min(p.step_s for p in found)
    best = min((p for p in found if p.step_s <= fastest * 1.02), key=lambda p: (p.settings.max_policy_lag, p.step_s))
    changed: dict[str, Any] = {}
    if best.settings.max_policy_lag != own.max_policy_lag:
        changed["staleness.max_policy_lag"] = best.settings.max_policy_lag
    if best.settings.reorder_window != own.reorder_window:
        changed["staleness.reorder_window"] = best.settings.reorder_window
    return [Candidate(changed, "bound and window, by simulation", best.step_s)] if changed else []


def _publications(config: Config, c: Calibration, schedules: Sequence[Candidate]) -> list[Candidate]:
    """Fewer versions: each one's proof takes the trainer and the engines their time. Those that the config takes, as it
    is and with any of `schedules`, on top of which they may be tried.
    """
    now_s = predict(c, c.settings, events=_EVENTS).step_s
    found: dict[int, float] = {}
    for times in FEWER_VERSIONS:
        fewer = {PUBLISH_EVERY: derive(config).publish_every * times}
        if all(_is_taken(_changed(config, {**s.overrides, **fewer})) for s in (Candidate({}, ""), *schedules)):
            step_s = predict(c, Settings.of(_changed(config, fewer)), events=_EVENTS).step_s
            if step_s <= now_s * (1 - WORTH_IT):
                found[fewer[PUBLISH_EVERY]] = step_s
    if not found:
        return []
    every = min(n for n, step_s in found.items() if step_s <= min(found.values()) * 1.02)
    return [Candidate({PUBLISH_EVERY: every}, "fewer versions, by simulation", found[every])]


def _changed(config: Config, overrides: Mapping[str, Any]) -> Config:
    """With these keys of sections changed; nothing is checked."""
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    return config


def _is_taken(config: Config) -> bool:
    """Whether the rules on how often versions are published hold."""
    try:
        for rule in (staleness_is_possible, uses_fit_the_bound, evaluations_meet_published_weights):
            rule(config)
    except ConfigError:
        return False
    return True


def _core_splits(config: Config, c: Calibration, cores: int) -> list[Candidate]:
    """Cores for engines and trainer: all of them for both sides, or each with its own."""
    found = []
    s, cluster = c.settings, config.cluster
    engine_s = s.groups_per_step / s.updates_per_batch * group_work_s(c, s) / s.generators
    train_s = s.groups_per_step / s.updates_per_batch * train_work_s(c, s) / s.trainers + c.optim_s
    has = min(cluster.cpus_per_generator * s.generators + cluster.cpus_per_trainer * s.trainers, cores)
    if cores > 1 and s.generators == s.trainers == 1:
        if cluster.placement == "separate":
            share, computing_s = has / 2 / cores, engine_s + train_s
            expected = computing_s * share + c.pause_s + c.overhead_s
            if s.max_policy_lag == 0:  # one waits for the other anyway, and both for environments
                expected = predict(c, s, events=_EVENTS).step_s - computing_s * (1 - share)
                why = "all cores for each side, which wait for each other"
                found.append(Candidate(_shared("together", cores), why, expected, in_lockstep=True))
                if (engines := min(cores, MOST_ENGINES, s.groups_per_step)) > 1:
                    several = _shared("together", cores) | {ENGINES: engines, ENGINE_CORES: cores // engines}
                    why = "engines with fewer cores each, and all cores for the trainer after them"
                    found.append(Candidate(several, why, in_lockstep=True))
            turns = _shared("turns", cores)
            if config.staleness.in_flight == "keep":  # an engine's turn ends with its keys and values
                turns["staleness.in_flight"] = "recompute"
            found.append(Candidate(turns, "all cores for each side, in turns", expected))
        for trainer in sorted({1, cores // 2, cores - 1}):
            own = {ENGINE_CORES: cores - trainer, "cluster.cpus_per_trainer": trainer}
            if (cores - trainer, trainer) != (cluster.cpus_per_generator, cluster.cpus_per_trainer):
                found.append(Candidate(own, f"{cores - trainer} cores for the engine, {trainer} for the trainer"))
    return found


def _shared(placement: str, cores: int) -> dict[str, Any]:
    return {"cluster.placement": placement, ENGINE_CORES: cores, "cluster.cpus_per_trainer": cores}


def _halves(config: Config, c: Calibration, cores: int) -> list[Candidate]:
    """In lockstep, half of a batch is generated while the environments of the other half take their time, and the
    first half is trained on while the second one's do.
    """
    s, waits_s = c.settings, c.environment_s.mean if c.environment_s else 0.0
    batch_s = s.groups_per_step / s.updates_per_batch * group_work_s(c, s) / s.generators
    groups = s.groups_per_step // 2
    if s.max_policy_lag or groups < 2 or waits_s < _WAITING * (waits_s + batch_s):
        return []
    places = -(-groups // s.generators) * s.group_size
    overrides: dict[str, Any] = {PLACES: places, "train.stream_groups": groups}
    if config.cluster.device == "cpu" and cores > 1 and s.generators == s.trainers == 1:
        overrides |= _shared("together", cores)
    why = "one half is generated while the environments of the other take their time"
    try:
        a_batch_can_come_in_parts(_changed(config, {"train.stream_groups": groups}))
    except ConfigError:
        return []
    return [Candidate(overrides, why, in_lockstep=True)]


def _splits(c: Calibration) -> list[Candidate]:
    """Engines against ranks on the GPUs that the config has."""
    own, found = c.settings, []
    now_s = predict(c, own, events=_EVENTS).step_s
    for generators, trainers in splits_of(c, own, own.num_gpus, trainer_factors=(0.75, 1.0, 1.33)):
        if (generators, trainers) == (own.generators, own.trainers):
            continue
        fits = fitting(replace(own, generators=generators, trainers=trainers))
        if fits is not None and (step_s := predict(c, fits, events=_EVENTS).step_s) <= now_s * (1 - WORTH_IT):
            overrides = {ENGINES: generators, "train.num_ranks": trainers}
            found.append(Candidate(overrides, "engines against ranks, by simulation", step_s))
    return found


def _places(config: Config, s: Settings) -> list[Candidate]:
    """As many sequences at a time as are ever in flight: fewer wait in line, more only take memory."""
    in_flight = -(-s.max_outstanding_groups * s.group_size // s.generators)
    places = -(-in_flight // 8) * 8
    own = config.rollout.engine_options.places
    if places < own * 0.75 or (own < places <= 4096):
        return [Candidate({PLACES: places}, "places for all that is in flight")]
    return []


def _passes(config: Config, c: Calibration) -> list[Candidate]:
    """Smaller passes of the trainer stay in caches, larger ones have fewer calls."""
    s, own = c.settings, config.train.microbatch_tokens(config.cluster.device)
    in_batch = c.train_tokens(s.group_size) * s.groups_per_step / s.updates_per_batch / s.trainers
    sizes = [own // 4] if in_batch > own // 4 and own >= 4 * config.rollout.max_model_len else []
    sizes += [own * 4] if in_batch > own else []
    return [Candidate({"train.max_tokens_per_microbatch": n}, "size of the trainer's passes") for n in sizes]


def is_better(step_s: float | None, than_s: float) -> bool:
    return step_s is not None and step_s <= than_s * (1 - WORTH_IT)


def as_arguments(overrides: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in overrides.items()]


def in_a_line(trial: Trial, *, base_s: float | None) -> str:
    """What was changed, measured, expected; `base_s`: measured with the settings as given."""
    what = " ".join(as_arguments(trial.candidate.overrides)) or "as it is"
    if trial.step_s is None:
        return f"failed: {what}: {trial.failure}"
    gain = "" if not trial.candidate.overrides or not base_s else f" ({trial.step_s / base_s - 1:+.0%})"
    expected = "" if trial.candidate.expected_s is None else f", expected {trial.candidate.expected_s:.3g} s"
    return f"{trial.step_s:.3g} s a step{gain}{expected}: {what} ({trial.candidate.why})"


@dataclass(frozen=True)
class Found:
    """What the trials say. `again`: seconds a step of the given settings and of the best ones, each once more."""

    trials: list[Trial]
    base: Trial
    best: Trial
    again: list[float]

    @property
    def measured_s(self) -> tuple[float, float]:
        """Means over both runs: (as it is, the best)."""
        assert self.base.step_s is not None
        assert self.best.step_s is not None
        if len(self.again) < 2:
            return self.base.step_s, self.best.step_s
        return (self.base.step_s + self.again[0]) / 2, (self.best.step_s + self.again[1]) / 2

    def as_dict(self) -> dict[str, Any]:
        before_s, after_s = self.measured_s
        return {
            "overrides": dict(self.best.candidate.overrides),
            "step_s_before": before_s,
            "step_s_after": after_s,
            "expected_s": self.best.candidate.expected_s,
            "trials": [
                {"overrides": dict(t.candidate.overrides), "step_s": t.step_s, "expected_s": t.candidate.expected_s}
                | ({"failure": t.failure} if t.failure else {})
                for t in self.trials
            ],
        }

    def in_words(self) -> str:
        before_s, after_s = self.measured_s
        if self.best is self.base or not is_better(after_s, before_s):
            return (
                f"keep the settings: {before_s:.3g} s a step, and no trial saved {WORTH_IT:.0%} of it, or did so twice"
            )
        twice = " (each measured twice)" if len(self.again) == 2 else ""
        gain = f"{before_s:.3g} s -> {after_s:.3g} s a step, {after_s / before_s - 1:+.0%}{twice}"
        note = "".join(f"\n{NOTES[key]}" for key in self.best.candidate.overrides if key in NOTES)
        return f"{gain}:\n  {' '.join(as_arguments(self.best.candidate.overrides))}{note}"


def _measured(folder: Path) -> float | None:
    run = open_run(folder)
    period = math.lcm(run.config.train.updates_per_batch, derive(run.config).publish_every)
    return step_seconds(read_metrics(run.dir / "metrics.jsonl"), period=period)


def _calibrated(folder: Path) -> Calibration:
    return calibrate(open_run(folder))


def search(
    config: Config,
    run: Callable[[str, Sequence[str]], Path],
    *,
    most: int,
    say: Callable[[str], None],
    keep_lag: bool = False,
    measured: Callable[[Path], float | None] = _measured,
    calibrated: Callable[[Path], Calibration] = _calibrated,
) -> Found:
    """Tries each candidate on top of the best so far; then the given settings and the best once more, in turns.

    `run`: (name, overrides) -> the folder of a finished run; raises RuntimeError or TimeoutError. `most`: trials, those
    at the end not counted. Raises ConfigError if the settings as given do not run.
    """
    done: list[Trial] = []

    def trial(candidate: Candidate) -> tuple[Trial, Path | None]:
        folder, step_s, failure = None, None, ""
        try:
            folder = run(f"trial-{len(done)}", as_arguments(candidate.overrides))
            step_s = measured(folder)
            failure = "" if step_s is not None else "too few steps"
        except (RuntimeError, TimeoutError, ConfigError) as error:
            failure = str(error).strip().splitlines()[-1]
        done.append(Trial(candidate, step_s, failure))
        say(in_a_line(done[-1], base_s=done[0].step_s))
        return done[-1], folder

    base, folder = trial(Candidate({}, "as it is"))
    if base.step_s is None or folder is None:
        raise ConfigError("CONFIG", got=words(base.failure), expected="a run that trains", fix="run it first")
    best = base
    for candidate in candidates(config, calibrated(folder), keep_lag=keep_lag):
        if len(done) == most:
            break
        if candidate.in_lockstep and best.candidate.overrides.get("staleness.max_policy_lag"):
            continue
        tried, _ = trial(candidate.on_top_of(best.candidate.overrides, engines=config.rollout.num_generators))
        if is_better(tried.step_s, best.step_s or base.step_s):
            best = tried
    again = [trial(t.candidate)[0].step_s for t in (base, best)] if best is not base else []
    return Found(done, base, best, [s for s in again if s is not None])

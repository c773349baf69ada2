"""Many settings at once: tables of predictions, and the best of them in words.

A recommendation is cautious: a larger lag or more devices must bring a gain. Among settings that are equally fast
within `EQUAL`, the smallest of each wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .model import Calibration, Settings
from .predict import Prediction, group_work_s, predict, train_work_s

EQUAL = 0.02
WORTH_IT = 0.05


def fitting(settings: Settings) -> Settings | None:
    """The same settings with the widest window, up to their own, that the admission rule allows; None if none is."""
    s = settings
    overtaken = (s.target_policy_lag + 2 - s.least_publish_every) // s.updates_per_batch - 1
    if overtaken < 0 or s.target_policy_lag > s.max_policy_lag:
        return None
    return s.with_window(min(s.reorder_window, overtaken * s.groups_per_step + 1))


def variants(
    base: Settings,
    *,
    lags: Sequence[int],
    windows: Sequence[int],
    splits: Sequence[tuple[int, int]],
) -> list[Settings]:
    """Every combination that the admission rule allows, each once; a split is (generators, trainers)."""
    found: dict[Settings, None] = {}
    for generators, trainers in splits:
        for lag in lags:
            for window in windows:
                split = replace(base, generators=generators, trainers=trainers, reorder_window=window)
                fits = fitting(split.with_lag(lag))
                if fits is not None:
                    found[fits] = None
    return list(found)


def splits_of(
    calibration: Calibration, base: Settings, gpus: int, *, trainer_factors: Sequence[float] = (1.0,)
) -> list[tuple[int, int]]:
    """(generators, trainers) that share `gpus` devices, for each factor.

    A factor is the number of trainers relative to the split at which both sides have equal work. Raises ValueError if
    there are too few devices for one of each.
    """
    most = gpus - base.gpus_per_generator
    if most < 1:
        raise ValueError(f"{gpus} devices, but one generator takes {base.gpus_per_generator} and a trainer one more")
    trainers = max(1.0, most / 2)
    for _ in range(20):  # a generator's throughput depends on how many sequences it gets
        generators = max(1, int((gpus - trainers) // base.gpus_per_generator))
        generate = group_work_s(calibration, replace(base, generators=generators)) * base.gpus_per_generator
        train = train_work_s(calibration, base)
        trainers = min(float(most), max(1.0, 0.5 * trainers + 0.5 * gpus * train / (train + generate)))
    found: dict[tuple[int, int], None] = {}
    for factor in trainer_factors:
        wanted = min(most, max(1, round(trainers * factor)))
        generators = (gpus - wanted) // base.gpus_per_generator
        found[generators, gpus - generators * base.gpus_per_generator] = None
    return list(found)


def best_split(
    calibration: Calibration, base: Settings, gpus: int, *, events: int = 20_000
) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """((generators, trainers) with the shortest step, its neighbours with more and fewer trainers).

    Goes from the even split towards more or fewer trainers for as long as that helps. A large fleet is searched in
    miniature (an eighth of everything has nearly the same best shares), and its neighbours are left out: each would
    take a second to simulate.
    """
    small = 8 if min(base.groups_per_step // base.updates_per_batch, gpus) >= 512 else 1

    def split(factor: float) -> tuple[int, int]:
        return splits_of(calibration, base, gpus, trainer_factors=(factor,))[0]

    def step_s(factor: float) -> float:
        generators, trainers = (max(1, round(count / small)) for count in split(factor))
        groups = base.groups_per_step // small // base.updates_per_batch * base.updates_per_batch
        miniature = replace(base, groups_per_step=groups, generators=generators, trainers=trainers)
        fits = fitting(miniature)
        assert fits is not None
        return predict(calibration, fits, events=events // small).step_s

    best_factor, best_s = 1.0, step_s(1.0)
    for direction in (0.75, 1 / 0.75):
        factor = best_factor * direction
        while 0.2 < factor < 5 and (other_s := step_s(factor)) < best_s:
            best_factor, best_s, factor = factor, other_s, factor * direction
    around = [split(best_factor * 0.75), split(best_factor / 0.75)] if small == 1 else []
    chosen = split(best_factor)
    return chosen, [s for s in dict.fromkeys(around) if s != chosen]


def sweep(calibration: Calibration, settings: Iterable[Settings], *, events: int = 40_000) -> list[Prediction]:
    return [predict(calibration, s, events=events) for s in settings]


def best(predictions: Sequence[Prediction]) -> Prediction:
    """Among those as fast as the fastest: the smallest bound first, then the fewest devices, then the least lag."""
    fastest = min(p.step_s for p in predictions)
    good = [p for p in predictions if p.step_s <= fastest * (1 + EQUAL)]
    return min(
        good,
        key=lambda p: (p.settings.max_policy_lag, p.settings.num_gpus, round(p.lag_mean, 1), p.settings.reorder_window),
    )


def recommend(predictions: Sequence[Prediction], own: Prediction | None) -> str:
    """One line: what to set, the gain over `own` (the current settings), and the remaining bottleneck."""
    chosen = best(predictions)
    what = f"recommended: {_describe(chosen.settings, own.settings if own else None)}: {chosen.step_s:.3g} s a step"
    if own is not None and chosen.settings == own.settings:
        what = f"recommended: as it is, {chosen.step_s:.3g} s a step"
    elif own is not None:
        gain = 1 - chosen.step_s / own.step_s
        against = f"{abs(gain):.0%} {'less' if gain > 0 else 'more'} than"
        what += f", {'as with' if abs(gain) < 0.005 else against} {_as_it_is(own)}"
    return f"{what}; {_in_the_way(chosen)}"


def advise(calibration: Calibration, *, events: int = 8_000) -> str:
    """One line for the end of a run: the best single change to its settings, or a note that none is worth making.

    It compares a larger lag bound, other reorder windows, and moving devices between generators and trainers (the same
    total). Takes a few tenths of a second for a run of usual size. The reported times are the measured step time, and
    that time multiplied by the predicted ratio, so that errors common to both predictions cancel out.
    """
    own_settings = calibration.settings
    own = predict(calibration, own_settings, events=events)
    changed = _single_changes(own_settings)
    predictions = [(words, predict(calibration, s, events=events)) for words, s in changed]
    now_s = calibration.measured_step_s or own.step_s
    limit = min(1.0, own.limit_s / now_s)
    if predictions:
        words, found = min(predictions, key=lambda pair: pair[1].step_s)
        as_good = [(w, p) for w, p in predictions if p.step_s <= found.step_s * (1 + EQUAL)]
        words, found = as_good[0]  # the mildest change comes first
        gain = 1 - found.step_s / own.step_s
        if gain >= WORTH_IT:
            then_s = now_s * found.step_s / own.step_s
            return f"{words} would cut the step from {now_s:.3g} s to {then_s:.3g} s (-{gain:.0%}), by simulation"
    return (
        f"the step of {now_s:.3g} s is at {limit:.0%} of its limit, and no other lag bound, reorder window or split of "
        f"the same devices would cut it by {WORTH_IT:.0%} or more, by simulation"
    )


def _single_changes(own: Settings) -> list[tuple[str, Settings]]:
    """(in words, settings), the mildest change first."""
    found: dict[Settings, str] = {}
    P, L = own.groups_per_step, own.max_policy_lag
    for window in sorted({1, max(1, P // 4), P} - {own.reorder_window}):
        found[own.with_window(window)] = f"staleness.reorder_window={window}"
    for lag in (L + 1, 2 * L + 2):
        found[own.with_lag(lag)] = f"staleness.max_policy_lag={lag}"
    k = own.gpus_per_generator
    for part in (1, 4):
        shift = max(1, own.generators // (2 * part))
        for by in (shift, -shift):
            generators, trainers = own.generators + by, own.trainers - by * k
            if generators >= 1 and trainers >= 1:
                split = replace(own, generators=generators, trainers=trainers)
                found[split] = f"rollout.num_generators={generators} train.num_ranks={trainers}"
    return [(words, s) for s, words in found.items() if s != own and s.is_possible()]


def _describe(settings: Settings, own: Settings | None) -> str:
    """As overrides; unchanged settings are left out."""
    parts = []
    if own is None or settings.max_policy_lag != own.max_policy_lag:
        parts.append(f"staleness.max_policy_lag={settings.max_policy_lag}")
    if own is None or settings.reorder_window != own.reorder_window:
        parts.append(f"staleness.reorder_window={settings.reorder_window}")
    if own is None or (settings.generators, settings.trainers) != (own.generators, own.trainers):
        parts.append(f"rollout.num_generators={settings.generators} train.num_ranks={settings.trainers}")
    return " ".join(parts)


def _as_it_is(own: Prediction) -> str:
    s = own.settings
    return f"the {own.step_s:.3g} s of lag bound {s.max_policy_lag}, {s.generators} + {s.trainers} devices"


def _in_the_way(p: Prediction) -> str:
    near = f"{min(1.0, p.efficiency):.0%} of its limit"
    if p.trainer_busy >= 0.85 and p.trainer_busy >= p.generator_busy:
        return f"{near}, with the trainer as the bottleneck"
    if p.generator_busy >= 0.85:
        return f"{near}, with generation as the bottleneck"
    return (
        f"{near}, and both sides wait at times (trainer {p.trainer_busy:.0%}, generators {p.generator_busy:.0%} busy)"
    )

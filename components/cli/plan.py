"""`leeway plan`: turns options into predictions and prints them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..config import ConfigError, plan_run
from ..config.errors import words
from ..planning import lengths
from ..planning.calibration import calibrate, open_run
from ..planning.model import Calibration, Settings
from ..planning.predict import Prediction, predict
from ..planning.search import best, best_split, recommend, sweep, variants

DEFAULT_LAGS = (0, 1, 2, 4, 8)
"""In versions, above the smallest lag that the rule allows."""
_EVENTS_IN_ALL = 1_200_000
_TYPICAL_ALONE = 2.5
"""How many times faster one sequence alone is than its share of a full engine (about; 7B models on current GPUs)."""


@dataclass(frozen=True, kw_only=True)
class SpeedOverrides:
    """Speeds given on the command line; None: not given."""

    generate_tokens_per_s: float | None
    sequence_tokens_per_s: float | None
    max_sequences: int | None
    train_tokens_per_s: float | None
    length: str | None
    prompt_tokens: float | None
    sync_s: float | None
    publish_s: float | None
    environment_s: str | None
    generator_speed: float | None


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to vary, as typed; None: do not vary it."""

    max_policy_lag: str | None
    reorder_window: str | None
    generators: str | None
    trainers: str | None
    gpus: int | None
    gpus_per_generator: int | None


def plan(
    run: Path | None,
    config: str | None,
    overrides: Sequence[str],
    numbers: SpeedOverrides,
    shape: dict[str, int | None],
    grid: Grid,
    *,
    out: Path | None,
    as_json: bool,
) -> None:
    """The command: predict, print, draw. Raises ConfigError for wrong input."""
    folder = Path(out).expanduser() if out is not None else run if run is not None else Path()
    _refuse_if(folder.exists() and not folder.is_dir(), "--out", f"{folder} (a file)", "a folder", "choose another")
    calibration = known(run, config, overrides, numbers, shape)
    predictions, own = answer(calibration, grid)
    chosen = best(predictions)
    if as_json:
        print(_json(calibration, predictions, chosen, own))
    else:
        _print(calibration, predictions, chosen, own)
    if as_json and out is None:
        return
    from ..planning.picture import draw_plan

    title = f"leeway plan, {run or config or 'given numbers'}"
    measured_s = calibration.measured_step_s
    measured = None if measured_s is None else (calibration.settings.max_policy_lag, measured_s)
    draw_plan(predictions, folder / "plan.png", title=title, best=chosen, measured=measured)
    if not as_json:
        print(f"picture: {folder / 'plan.png'}")


def known(
    run: Path | None,
    config: str | None,
    overrides: Sequence[str],
    numbers: SpeedOverrides,
    shape: dict[str, int | None],
) -> Calibration:
    """The calibration of a finished run, or from given numbers; given numbers win.

    `shape`: groups_per_step and group_size, for a plan without a run and a config.
    """
    measured = None
    if run is not None:
        _refuse_if(config is not None, "--config", "a config as well as --from", "one of the two", "leave one out")
        measured = calibrate(open_run(run))
        changed = open_run(run, overrides).config
        calibration = replace(
            measured,
            settings=Settings.of(changed),
            max_sequences=int(changed.rollout.engine.get("max_num_seqs", measured.max_sequences)),
        )
    else:
        calibration = _from_numbers(config, overrides, numbers, shape)
    given = {name: value for name, value in shape.items() if value is not None}
    calibration = replace(calibration, settings=replace(calibration.settings, **given))
    calibration = _with_numbers(calibration, numbers)
    if calibration != measured:  # the measured step time no longer applies
        calibration = replace(calibration, measured_step_s=None)
    return calibration


def _from_numbers(
    config: str | None, overrides: Sequence[str], numbers: SpeedOverrides, shape: dict[str, int | None]
) -> Calibration:
    if config is not None:
        settings = Settings.of(plan_run(config, "async_rl", overrides)[-1].config)
    else:
        _refuse_if(
            bool(overrides), "KEY=VALUE", f"{overrides[0]!r}" if overrides else "", "--from or --config", "add one"
        )
        settings = Settings(groups_per_step=shape["groups_per_step"] or 64, group_size=shape["group_size"] or 8)
    for option, value in (
        ("--generate-tokens-per-s", numbers.generate_tokens_per_s),
        ("--train-tokens-per-s", numbers.train_tokens_per_s),
        ("--length", numbers.length),
    ):
        example = "--generate-tokens-per-s 8000 --train-tokens-per-s 12000 --length lognormal:1200,1,8192"
        _refuse_if(value is None, option, "nothing", "a value, since there is no --from RUN", f"e.g. {example}")
    return Calibration(
        settings=settings, lengths=lengths.Distribution((1.0,)), pass_s=1.0, token_s=0.0, train_token_s=1.0
    )


def _with_numbers(calibration: Calibration, numbers: SpeedOverrides) -> Calibration:
    n, changes = numbers, {}
    for option, value in asdict(n).items():
        if isinstance(value, int | float):
            least = 0.0 if option in ("prompt_tokens", "sync_s", "publish_s") else None
            bad = value < 0 if least == 0.0 else value <= 0
            name = "--" + option.replace("_", "-")
            _refuse_if(bad, name, f"{value:g}", "a number above 0" if least is None else "0 or more", "change it")
    room = n.max_sequences or calibration.max_sequences
    if n.max_sequences is not None:
        changes["max_sequences"] = room
    if n.generate_tokens_per_s is not None:
        full_s, alone = 1 / n.generate_tokens_per_s, n.sequence_tokens_per_s
        if alone is None:
            alone = min(1.0, _TYPICAL_ALONE / room) * n.generate_tokens_per_s
        possible = n.generate_tokens_per_s / room <= alone <= n.generate_tokens_per_s
        _refuse_if(
            not possible,
            "--sequence-tokens-per-s",
            f"{alone:g}",
            f"between {n.generate_tokens_per_s / room:g} (a full engine's share) and {n.generate_tokens_per_s:g}",
            "it is the speed of one sequence alone",
        )
        pass_s = (1 / alone - full_s) / (1 - 1 / room) if room > 1 else 0.0
        changes |= {"pass_s": pass_s, "token_s": 1 / alone - pass_s, "generate_slowdown": 1.0}
    elif n.sequence_tokens_per_s is not None:
        got, expected = f"{n.sequence_tokens_per_s:g} alone", "--generate-tokens-per-s beside it"
        raise ConfigError("--sequence-tokens-per-s", got=words(got), expected=expected, fix="give both")
    if n.train_tokens_per_s is not None:
        changes["train_token_s"] = 1 / n.train_tokens_per_s
    if n.length is not None:
        changes["lengths"] = _distribution("--length", n.length, least=1.0)
    if n.environment_s is not None:
        changes["environment_s"] = _distribution("--environment-s", n.environment_s)
    if n.prompt_tokens is not None:
        changes |= {"prompt_tokens": n.prompt_tokens, "shared_prompt_tokens": float(int(n.prompt_tokens // 16) * 16)}
    if n.sync_s is not None:
        changes["pause_s"] = n.sync_s
    if n.publish_s is not None:
        changes["publish_s"] = n.publish_s
    calibration = replace(calibration, **changes)
    return calibration if n.generator_speed is None else calibration.faster_generators(n.generator_speed)


def answer(calibration: Calibration, grid: Grid) -> tuple[list[Prediction], Prediction | None]:
    """(requested predictions, prediction for the present settings: None if the admission rule refuses them)."""
    base, q = calibration.settings, grid
    if q.gpus_per_generator is not None:
        _refuse_if(
            q.gpus_per_generator < 1, "--gpus-per-generator", f"{q.gpus_per_generator}", "1 or more", "change it"
        )
        base = replace(base, gpus_per_generator=q.gpus_per_generator)
    lags = sorted({*_ints("--max-policy-lag", q.max_policy_lag, _default_lags(base), least=0)})
    windows = sorted({*_ints("--reorder-window", q.reorder_window, (base.reorder_window,), least=1)})
    if q.gpus is not None:
        _refuse_if(
            q.generators is not None or q.trainers is not None,
            "--gpus",
            "a total as well as --generators or --trainers",
            "one of the two",
            "--gpus tries several splits itself",
        )
        return _over_splits(calibration, base, lags, windows, q.gpus), None
    generators = _ints("--generators", q.generators, (base.generators,), least=1)
    trainers = _ints("--trainers", q.trainers, (base.trainers,), least=1)
    splits = [(g, t) for g in generators for t in trainers]
    asked = _possible(base, lags, windows, splits)
    events = min(40_000, _EVENTS_IN_ALL // len(asked))
    predictions = sweep(calibration, asked, events=events)
    if not base.is_possible():
        return predictions, None
    own = next((p for p in predictions if p.settings == base), None)
    return predictions, own or predict(calibration, base, events=events)


def _default_lags(base: Settings) -> list[int]:
    """In optimizer steps: a version is one step, unless several are published or trained at a time."""
    u, least = base.updates_per_batch, base.updates_per_batch + base.least_publish_every - 2
    return [least + number * max(u, base.publish_every) for number in DEFAULT_LAGS]


def _over_splits(
    calibration: Calibration, base: Settings, lags: Sequence[int], windows: Sequence[int], gpus: int
) -> list[Prediction]:
    """Every lag and window on the split that is best for the largest lag, plus its neighbours at the present lag."""
    present = min(lags, key=lambda lag: (abs(lag - base.max_policy_lag), lag))
    widest = _possible(base, lags[-1:], windows[-1:], [(base.generators, base.trainers)])[0]
    try:
        chosen, around = best_split(calibration, widest, gpus)
    except ValueError as error:
        raise ConfigError("--gpus", got=words(str(error)), expected="more devices", fix="raise it") from None
    asked = _possible(base, lags, windows, [chosen])
    if around:
        asked += _possible(base, [present], windows[-1:], around)
    return sweep(calibration, asked, events=20_000)


def _possible(
    base: Settings, lags: Sequence[int], windows: Sequence[int], splits: Sequence[tuple[int, int]]
) -> list[Settings]:
    found = variants(base, lags=lags, windows=windows, splits=splits)
    if not found:
        need = base.updates_per_batch + base.least_publish_every - 2
        raise ConfigError(
            "--max-policy-lag",
            got=words(", ".join(map(str, lags))),
            expected=f"{need} or more with updates_per_batch={base.updates_per_batch} "
            f"and publish_every={base.least_publish_every}",
            fix="raise it",
        )
    return found


def table(predictions: Sequence[Prediction], chosen: Prediction) -> Any:
    """A rich table: one row per setting, by split, lag bound and window."""
    from rich.table import Table

    rows = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    names = "L|W|gens|ranks|step s|seq/s|gens busy|ranks busy|lag mean|lag max|limit s|of limit|"
    for name in names.split("|"):
        rows.add_column(name, justify="right")
    for p in sorted(predictions, key=lambda p: (p.settings.generators, p.settings.trainers, _order(p))):
        s = p.settings
        engines = f"{s.generators}" if s.gpus_per_generator == 1 else f"{s.generators} x {s.gpus_per_generator}"
        rows.add_row(
            f"{s.max_policy_lag}",
            f"{s.reorder_window}",
            engines,
            f"{s.trainers}",
            f"{p.step_s:.3g}",
            f"{p.samples_per_s:.4g}",
            f"{p.generator_busy:.0%}",
            f"{p.trainer_busy:.0%}",
            f"{p.lag_mean:.2f}",
            f"{p.lag_max}",
            f"{p.limit_s:.3g}",
            f"{p.efficiency:.0%}",
            "<-" if p is chosen else "",
            style="bold" if p is chosen else None,
        )
    return rows


def _json(
    calibration: Calibration, predictions: Sequence[Prediction], chosen: Prediction, own: Prediction | None
) -> str:
    """Everything as one JSON object; times in seconds."""
    speeds = asdict(replace(calibration, train_factors=()))
    for name in ("lengths", "environment_s"):
        found = getattr(calibration, name)
        speeds[name] = None if found is None else {"mean": found.mean, "max": found.largest}
    del speeds["train_factors"]
    return json.dumps(
        {
            "calibration": speeds,
            "predictions": [_as_dict(p) for p in predictions],
            "as_it_is": None if own is None else _as_dict(own),
            "recommended": _as_dict(chosen),
            "recommendation": recommend(predictions, own),
        },
        indent=2,
    )


def _as_dict(p: Prediction) -> dict[str, Any]:
    return asdict(p) | {"efficiency": p.efficiency}


def _print(
    calibration: Calibration, predictions: Sequence[Prediction], chosen: Prediction, own: Prediction | None
) -> None:
    from rich.console import Console

    Console(soft_wrap=True).print(table(predictions, chosen))
    print()
    if own is not None and calibration.measured_step_s is not None:
        error = own.step_s / calibration.measured_step_s - 1
        print(
            f"the run itself: {calibration.measured_step_s:.3g} s a step measured, "
            f"{own.step_s:.3g} s simulated ({error:+.0%})"
        )
    print(recommend(predictions, own))


def _order(p: Prediction) -> tuple[int, int]:
    return p.settings.max_policy_lag, p.settings.reorder_window


def _ints(option: str, text: str | None, default: Sequence[int], *, least: int) -> list[int]:
    if text is None:
        return list(default)
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    _refuse_if(
        not numbers or min(numbers) < least,
        option,
        f"{text!r}",
        f"whole numbers of {least} or more, with commas between them",
        f"e.g. {option} {','.join(map(str, (least, least + 1, least + 3)))}",
    )
    return numbers


def _distribution(option: str, text: str, *, least: float = 0.0) -> lengths.Distribution:
    try:
        return lengths.parse(text, least=least)
    except ValueError as error:
        got, _, expected = str(error).removeprefix("got ").partition(", expected ")
        wanted, _, fix = expected.partition("; ")
        raise ConfigError(option, got=words(got), expected=wanted, fix=fix or "e.g. lognormal:1200,1,8192") from None


def _refuse_if(wrong: bool, option: str, got: str, expected: str, fix: str) -> None:
    if wrong:
        raise ConfigError(option, got=words(got), expected=expected, fix=fix)

"""Output of the lightweight commands: plain text that pipes well."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..config import Config, Hardware, Stage, bundled_configs, bundled_recipes, derive, run_yaml
from ..config.derived import Derived, publishes_as_pulled
from ..config.secrets import shown_argument
from ..config.transports import transport_needs
from ..config.tree import settings_in
from ..config.user_code import code_that_runs
from ..weights import Tolerance


def bundled_table() -> str:
    """Each bundled config with the first line of its comment."""
    return "Configs\n" + _table((name, _description(file)) for name, file in bundled_configs().items())


def recipe_table() -> str:
    """Each recipe with a description."""
    return "Recipes\n" + _table(bundled_recipes().items())


def describe(
    name_or_file: str,
    stages: Sequence[Stage],
    hardware: Hardware,
    missing: Sequence[str],
    estimates: Sequence[Sequence[tuple[str, str]]],
    overrides: Sequence[str] = (),
    *,
    quick: bool = False,
    yaml: bool = False,
) -> str:
    """What `validate` prints: the verdict, then the numbers derived from the settings, then the settings.

    `missing`: what this machine lacks. `estimates`: rows of memory and time for each stage.
    """
    machine = f"{hardware.num_cpus} CPU cores, {hardware.num_gpus} GPUs, {hardware.memory_gib:.0f} GiB of memory"
    lines = [f"{name_or_file}: ok", f"this machine: {machine}"]
    lines += [f"  lacks: {problem}" for problem in missing]
    if not missing:
        lines.append(f"  can run it: {_command(name_or_file, stages, overrides)}")
        lines += ["  (data, models and your own code were not checked)"] if quick else []
    lines += [f"note: {note}" for note in stages[-1].notes]
    code = code_that_runs(stages)
    if code:
        lines += ["code that will run besides Leeway's own:", *(f"  {line}" for line in code)]
    for stage, estimate in zip(stages, estimates, strict=True):
        lines += ["", f"{stage.name} (recipe {stage.recipe.name})", _table([*_rows(stage), *estimate])]
    lines += ["", run_yaml(stages)] if yaml else ["", "add --yaml to print every setting"]
    return "\n".join(lines)


def described(
    name_or_file: str,
    stages: Sequence[Stage],
    missing: Sequence[str],
    estimates: Sequence[Sequence[tuple[str, str]]],
    overrides: Sequence[str],
) -> dict[str, Any]:
    """The same as JSON data. `settings`: every setting of the last stage, by dotted key."""
    return {
        "ok": True,
        "command": _command(name_or_file, stages, overrides),
        "recipe": stages[-1].recipe.name,
        "lacks": list(missing),
        "notes": list(stages[-1].notes),
        "code": code_that_runs(stages),
        "stages": [
            {"name": stage.name, "recipe": stage.recipe.name, "rows": [*_rows(stage), *estimate]}
            for stage, estimate in zip(stages, estimates, strict=True)
        ],
        "yaml": run_yaml(stages),
        "settings": dict(settings_in(stages[-1].config.written())),
    }


def _command(name_or_file: str, stages: Sequence[Stage], overrides: Sequence[str]) -> str:
    shown = map(shown_argument, overrides)
    return shlex.join(["leeway", "run", stages[-1].recipe.name, "--config", name_or_file, *shown])


def _rows(stage: Stage) -> list[tuple[str, str]]:
    config, d = stage.config, derive(stage.config, stage.recipe)
    rows = [
        ("files", str(stage.dir)),
        ("model", config.model.path or f"new {_init(config)}"),
        ("tasks", _tasks(config)),
    ]
    if stage.recipe.trains:
        rows.append(
            ("length", f"{config.train.steps} steps" if config.train.steps else f"{config.train.epochs} epochs")
        )
    if stage.recipe.is_offline:
        rows.append(("sequences per step", str(d.sequences_per_step)))
    if stage.recipe.is_online and stage.recipe.study_of is None:
        rows += [
            (
                "sequences per batch",
                f"{d.sequences_per_batch} ({config.train.groups_per_step} x {config.samplings.mean_group_size:g})",
            ),
            ("sequences per step", str(d.sequences_per_step)),
            ("batches", "until the tasks end" if d.num_batches is None else str(d.num_batches)),
            (
                "max policy lag",
                f"{d.max_policy_lag} (target {d.target_policy_lag}, least possible {d.least_policy_lag})",
            ),
            ("reorder window", f"{d.reorder_window} groups"),
            ("max outstanding groups", str(d.max_outstanding_groups)),
            ("weights", _weights(config, d)),
            ("served tolerance", _tolerance(d.served_tolerance)),
            ("weight transport", _transport(config)),
        ]
    for role, count in d.processes.items():
        if count:
            gpus = f", GPUs: {d.gpus[role]}" if d.gpus[role] else ""
            rows.append((f"{role} processes", f"{count} (cores: {d.cpus[role]}{gpus})"))
    if d.gpus_needed:
        rows.append(("GPUs needed", str(d.gpus_needed)))
    return rows


def _weights(config: Config, d: Derived) -> str:
    """How often there are new ones, and why not as seldom as engines pull them."""
    pull_every = config.rollout.pull_every
    said = f"published {_every(d.publish_every)}, pulled {_every(pull_every)}"
    if config.param_server.publish_every is not None or d.publish_every == pull_every:
        return said
    if not publishes_as_pulled(config):
        return f"{said} (evaluations, every {config.eval.every} steps, ask for versions in between)"
    return f"{said} (a lag of {d.max_policy_lag} leaves no room to publish less often)"


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def _tolerance(served: Tolerance) -> str:
    if served.factor is None:
        return f"{served.largest:g}"
    return f"{served.factor:g} x the mean gap of each engine's own loads, at least {served.factor * served.least:.2g}"


def _transport(config: Config) -> str:
    return f"{config.param_server.transport}: needs {transport_needs(config)}"


def _init(config: Config) -> str:
    init = config.model.init
    return f"{init.architecture} ({_arguments(init.options)})" if init is not None else ""


def _tasks(config: Config) -> str:
    task = config.task
    source = f"{task.dataset} ({_arguments(task.options)})" if task.name == "reasoning_gym" else str(task.path)
    if task.name == "hf":
        source += f" ({', '.join(filter(None, (task.subset, task.split)))})"
    if task.name == "mix":
        parts = [f"{name} ({own.name}, weight {own.weight:g})" for name, own in task.mix.items()]
        source = ", ".join(parts)
    held_out = config.eval.path or (f"{task.holdout_frac:g} held out" if task.holdout_frac else "")
    parts = [held_out, ", ".join(f"taskset {name}" for name in config.eval.tasksets)]
    return f"{task.name}: {source}; evaluation: {', '.join(filter(None, parts)) or 'nothing held out'}"


def _arguments(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _table(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def _description(file: Path) -> str:
    with file.open(encoding="utf-8") as lines:
        return next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")

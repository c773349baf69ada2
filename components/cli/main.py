"""`leeway run | resume | serve | studio | watch | ps | scale | trace | plot | plan | tune | ls | cat | cp | validate |
import | convert | download | prepare | env`.

Exit codes: 0 done, 1 the run failed or learned nothing (the last line says why), 2 the input was refused, 130 or 143
interrupted. Everything is checked before anything heavy is imported. Only `run`, `resume`, `serve` and `env try` import
torch, ray and vllm, and they do so last (`convert` imports torch; `validate` imports the user's modules named in
settings).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..config import (
    ConfigError,
    Stage,
    bundled_configs,
    bundled_recipe_path,
    bundled_recipes,
    config_path,
    plan_run,
    this_machine,
)
from ..config.errors import words
from ..config.names import nearest
from ..config.user_code import code_that_runs
from ..failures import printable
from .complete import complete_bundled, complete_config, complete_key, complete_recipe
from .download import download
from .env import app as env_app
from .importing import import_config
from .parts import ps, scale
from .prepare import prepare
from .see import plot as plot_curves
from .see import trace
from .serve import serve
from .show import bundled_table, describe, described, recipe_table
from .studio import studio
from .tune import tune
from .watch import watch, watch_beside


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"leeway {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="leeway",
    help="Asynchronous RL post-training for language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(env_app)
app.command()(ps)
app.command()(scale)
app.command()(trace)
app.command("plot")(plot_curves)
app.command()(watch)
app.command()(serve)
app.command()(studio)
app.command()(tune)
app.command("import")(import_config)
app.command()(download)
app.command()(prepare)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Settings to change, e.g. train.steps=100.", autocompletion=complete_key
    ),
]
Watched = Annotated[bool, typer.Option("--watch", help="Serve a page about the run beside it; see `leeway watch`.")]
NameOrFile = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE", help="A bundled config (see `leeway ls`) or a YAML file.", autocompletion=complete_config
    ),
]
BundledName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A bundled config or recipe; see `leeway ls`.", autocompletion=complete_bundled
    ),
]


@app.callback()
def leeway(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=print_version)
    ] = False,
) -> None:
    """Asynchronous RL post-training for language models."""


@app.command()
def run(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help=f"One of {', '.join(bundled_recipes())}, or your own: ./my_rl.py or my_pkg.my_rl.",
            autocompletion=complete_recipe,
        ),
    ],
    config: Annotated[
        str,
        typer.Option(
            "--config",
            "-c",
            metavar="NAME|FILE",
            help="A bundled config or a YAML file.",
            autocompletion=complete_config,
        ),
    ],
    overrides: Overrides = None,
    watched: Watched = False,
) -> None:
    """Run a recipe.

    Example: leeway run async_rl --config quickstart seed=1 staleness.max_policy_lag=1
    """
    stages = plan_run(config, recipe, overrides or [])
    _run(stages, stages[-1].notes, config, watched=watched)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, e.g. runs/leeway/quickstart.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, e.g. train.steps=400 to train longer."),
    ] = None,
    watched: Watched = False,
) -> None:
    """Resume a run that was stopped, or train a finished one for longer.

    The run resumes with its own settings, from its newest complete checkpoint, and continues its record. Only settings
    that do not change what is learned may differ: the number of steps, hardware, evaluation, monitoring.

    Example: leeway resume runs/leeway/quickstart train.steps=240
    """
    planned = importlib.import_module("leeway.driver.resume").plan_resume(run.expanduser(), overrides or [])
    _run(planned.stages, planned.notes, str(run), watched=watched)


def _run(stages: Sequence[Stage], notes: Sequence[str], config_name: str, *, watched: bool) -> None:
    for line in (*notes, *(f"code: {line}" for line in code_that_runs(stages))):
        print(f"leeway: {line}", flush=True)
    if watched:
        watch_beside(stages[0].config.run_dir)
    runner = importlib.import_module("leeway.driver.runner")
    raise typer.Exit(runner.run_stages(stages, stages[0].config.run_dir, config_name, sys.argv))


@app.command()
def plan(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings of the run or config to change, e.g. staleness.in_flight=keep."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Folder of a finished run, whose measured speeds are used."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", metavar="NAME|FILE", help="Take settings from a config instead of a run."),
    ] = None,
    max_policy_lag: Annotated[
        str | None,
        typer.Option("--max-policy-lag", "-L", metavar="N,N,...", help="Lag bounds. Default: of 0,1,2,4,8 versions."),
    ] = None,
    reorder_window: Annotated[
        str | None, typer.Option("--reorder-window", "-W", metavar="N,N,...", help="Windows. Default: as it is.")
    ] = None,
    generators: Annotated[
        str | None, typer.Option("--generators", metavar="N,N,...", help="Counts of engines. Default: as it is.")
    ] = None,
    trainers: Annotated[
        str | None, typer.Option("--trainers", metavar="N,N,...", help="Counts of trainer ranks. Default: as it is.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", help="Total number of devices; several splits of them are tried."),
    ] = None,
    gpus_per_generator: Annotated[
        int | None, typer.Option("--gpus-per-generator", metavar="N", help="Devices per engine.")
    ] = None,
    groups_per_step: Annotated[
        int | None, typer.Option("--groups-per-step", min=1, metavar="N", help="Groups per batch (default 64).")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", min=1, metavar="N", help="Completions per group (default 8).")
    ] = None,
    generate_tokens_per_s: Annotated[
        float | None,
        typer.Option("--generate-tokens-per-s", metavar="X", help="Tokens per second that one full engine samples."),
    ] = None,
    sequence_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            "--sequence-tokens-per-s",
            metavar="X",
            help="Tokens per second of one sequence alone on an engine. Default: 2.5 times its share of a full engine.",
        ),
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option("--max-sequences", metavar="N", help="Sequences that fill an engine (default 256).")
    ] = None,
    train_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            "--train-tokens-per-s",
            metavar="X",
            help="Prompt and response tokens per second that one trainer rank trains.",
        ),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            "--length", metavar="DIST", help="Response tokens: N, uniform:LOW,HIGH or lognormal:MEAN,SIGMA[,MAX]."
        ),
    ] = None,
    prompt_tokens: Annotated[
        float | None, typer.Option("--prompt-tokens", metavar="X", help="Mean tokens per prompt.")
    ] = None,
    sync_s: Annotated[
        float | None, typer.Option("--sync-s", metavar="X", help="Seconds that an engine pauses to load new weights.")
    ] = None,
    publish_s: Annotated[
        float | None, typer.Option("--publish-s", metavar="X", help="Seconds that publishing a version adds to a step.")
    ] = None,
    environment_s: Annotated[
        str | None,
        typer.Option(
            "--environment-s",
            metavar="DIST",
            help="Seconds a group spends outside the engine, in the form of --length.",
        ),
    ] = None,
    generator_speed: Annotated[
        float | None, typer.Option("--generator-speed", metavar="X", help="Engines X times as fast; below 1: slower.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME|FOLDER",
            help="Does it fit? Count memory, without the weights: a folder with a config.json, or qwen2.5-7b, "
            "qwen2.5-32b, qwen3-235b-a22b.",
        ),
    ] = None,
    hosts: Annotated[int, typer.Option("--hosts", metavar="N", help="With --model: hosts of the cluster.")] = 1,
    gpus_per_host: Annotated[
        int, typer.Option("--gpus-per-host", metavar="N", help="With --model: GPUs of each host.")
    ] = 8,
    gpu_gib: Annotated[
        float, typer.Option("--gpu-gib", metavar="X", help="With --model: memory of a GPU in GiB.")
    ] = 80.0,
    host_gib: Annotated[
        float, typer.Option("--host-gib", metavar="X", help="With --model: main memory of a host in GiB.")
    ] = 1024.0,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Where plan.png goes. Default: the run's folder, or here."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; draw nothing unless --out is given.")
    ] = False,
) -> None:
    """Simulate other settings of a job: step time, who is busy, lag; draws plan.png and recommends.

    With --model: say whether a run of a model of this size fits onto a cluster, and what would make it fit.

    Example: leeway plan --from runs/leeway/quickstart --max-policy-lag 0,1,2,4 --reorder-window 1,48
    """
    if model is not None:
        memory = importlib.import_module("leeway.cli.plan_memory")
        cluster = memory.Cluster(hosts=hosts, devices_per_host=gpus_per_host, device_gib=gpu_gib, host_gib=host_gib)
        memory.plan_memory(model, config, overrides or [], cluster, as_json=as_json)
        return
    planning = importlib.import_module("leeway.cli.plan")
    numbers = planning.SpeedOverrides(
        generate_tokens_per_s=generate_tokens_per_s,
        sequence_tokens_per_s=sequence_tokens_per_s,
        max_sequences=max_sequences,
        train_tokens_per_s=train_tokens_per_s,
        length=length,
        prompt_tokens=prompt_tokens,
        sync_s=sync_s,
        publish_s=publish_s,
        environment_s=environment_s,
        generator_speed=generator_speed,
    )
    grid = planning.Grid(
        max_policy_lag=max_policy_lag,
        reorder_window=reorder_window,
        generators=generators,
        trainers=trainers,
        gpus=gpus,
        gpus_per_generator=gpus_per_generator,
    )
    shape = {"groups_per_step": groups_per_step, "group_size": group_size}
    planning.plan(run, config, overrides or [], numbers, shape, grid, out=out, as_json=as_json)


@app.command()
def ls() -> None:
    """List the bundled configs and the recipes."""
    print(bundled_table())
    print()
    print(recipe_table())


@app.command()
def cat(name: BundledName) -> None:
    """Print a bundled config or recipe."""
    print(_bundled_path(name).read_text(encoding="utf-8"), end="")


@app.command()
def cp(
    name: BundledName,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="A new file, or a folder to put it in.")],
) -> None:
    """Copy a bundled config or recipe so that you can change it.

    Example: leeway cp async_rl my_rl.py; leeway run ./my_rl.py --config quickstart
    """
    source = _bundled_path(name)
    target = dest.expanduser()
    target = target / source.name if target.is_dir() else target
    if target.exists():
        _refuse(f"DEST: got {target} (exists), expected a new file; choose another name or remove it")
        raise typer.Exit(2)
    if not target.parent.is_dir():
        _refuse(f"DEST: got {target}, expected a file in an existing folder; create {target.parent} first")
        raise typer.Exit(2)
    shutil.copyfile(source, target)
    print(f"{target}\nrun it: {_command(source, target)}")


def _bundled_path(name: str) -> Path:
    """The file of a bundled recipe or config, or a config of the user's own."""
    if name in bundled_recipes():
        return bundled_recipe_path(name)
    try:
        return config_path(name)
    except ConfigError as error:
        known = [*bundled_configs(), *bundled_recipes()]
        guess = nearest(name, known)
        fix = f"did you mean {guess}?" if guess else "see leeway ls"
        raise ConfigError("NAME", got=name, expected=f"one of {', '.join(known)}", fix=fix) from error


def _command(source: Path, target: Path) -> str:
    """The command that runs a copy of a bundled file."""
    if source.suffix != ".py":
        return f"leeway run async_rl --config {target}"
    path = str(target) if "/" in str(target) else f"./{target}"
    return f"leeway run {path} --config quickstart"


@app.command()
def validate(
    config: NameOrFile,
    overrides: Overrides = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="Check as a run of this recipe (a name, ./my_rl.py or my_pkg.my_rl); default: every stage.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Check only the settings: do not read data, models or your own code (a recipe is imported)."
        ),
    ] = False,
    show: Annotated[bool, typer.Option("--yaml", help="Also print every setting, resolved, as YAML.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all of it, and what is refused, as one object.")
    ] = False,
) -> None:
    """Check a config as `run` does before it starts anything, and print the numbers that follow from it.

    Tasks are read, models are located, and your own classes and functions are imported. The exit code is 0 if the
    settings are right, whatever this machine lacks, and 2 if they are refused.
    """
    try:
        stages = plan_run(config, recipe, overrides or [])
    except ConfigError as error:
        if not as_json:
            raise
        print(json.dumps({"ok": False, "refused": [str(error)], "key": error.key}))
        raise typer.Exit(2) from None
    machine = this_machine()
    found = importlib.import_module("leeway.driver.checks").examine(
        stages, stages[0].config.run_dir, machine, quick=quick
    )
    if found.wrong:
        if as_json:
            print(json.dumps({"ok": False, "refused": list(found.wrong), "key": None}))
        else:
            for line in found.wrong:
                _refuse(line)
        raise typer.Exit(2)
    estimate = importlib.import_module("leeway.driver.estimate").estimate_stage
    estimates = [estimate(stage).rows for stage in stages]
    if as_json:
        print(json.dumps(described(config, stages, found.missing, estimates, overrides or [])))
    else:
        print(describe(config, stages, machine, found.missing, estimates, overrides or [], quick=quick, yaml=show))


@app.command()
def convert(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of a run, of a stage, or of a checkpoint.")],
    base_model: Annotated[
        str | None,
        typer.Option("--base-model", metavar="FOLDER", help="Source of config and tokenizer if they are missing."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="TYPE", help="float32 (default), bfloat16 or float16.")
    ] = None,
) -> None:
    """Write the weights of sharded checkpoints as Hugging Face folders, next to them.

    Those that Trinity-RFT and veRL saved with FSDP are read too: give the folder that holds global_step_N.

    Example: leeway convert runs/leeway/quickstart --dtype bfloat16
    """
    if dtype not in (None, "float32", "bfloat16", "float16"):
        _refuse(f"--dtype: got {dtype}, expected float32, bfloat16 or float16")
        raise typer.Exit(2)
    converter = importlib.import_module("leeway.trainer.convert")
    try:
        for folder, written in converter.convert(path.expanduser(), base_model=base_model, dtype=dtype):
            print(f"{folder}: {'written' if written else 'already exists'}")
    except converter.CheckpointError as error:
        _refuse(str(error))
        raise typer.Exit(2) from None


def main(argv: list[str] | None = None) -> None:
    """The console entry point; exits the process."""
    # User modules (env.name=my_env:MyEnv) are found where the command is run. Last on the path, so that a folder that
    # happens to be called `datasets` or `ray` hides nothing.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        _refuse_settings_as_options(sys.argv[1:] if argv is None else argv)
        app(args=argv, prog_name="leeway")
    except ConfigError as error:
        _refuse(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        print("leeway: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `leeway cat NAME | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        print(printable(traceback.format_exc()), end="", file=sys.stderr)
        print(f"leeway: failed: {type(error).__name__}: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit(1)


def _refuse_settings_as_options(argv: Sequence[str]) -> None:
    """Settings are no options here, as they are elsewhere: --train.steps=3, --train.steps 3, ++train.steps=3."""
    for argument in argv:
        if found := re.match(r"(--|\+\+?)([a-z]\w*(?:\.\w+)+)(?==|$)", argument):
            mark, key = found.groups()
            raise ConfigError(key, got=words(f"{mark}{key}"), expected="no mark before it", fix=f"write {key}=VALUE")


def _refuse(text: str) -> None:
    print(f"leeway: refused: {printable(text)}", file=sys.stderr)


if __name__ == "__main__":
    main()

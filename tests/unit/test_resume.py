"""Going on with a run: what is taken, what is refused, that nobody else runs there, and what its last lines say."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leeway.config import ConfigError, bundled_recipe_path, find_recipe, resolve_stages, run_yaml
from leeway.config.load import read_tree
from leeway.driver import runner
from leeway.driver.context import StageContext, StageResult, finished_stage, mark_finished
from leeway.driver.resume import plan_resume
from leeway.driver.run_record import BadRecord, RunIsRunning, RunRecord, check_not_running, locked
from leeway.failures import Kind, PartFailed
from leeway.integrity import sealed
from leeway.trainer.checkpoint import CheckpointError

CONFIG = """
output_dir: {out}
project: p
name: r
model: {{init: {{architecture: qwen2, options: {{hidden_size: 8}}}}}}
task: {{name: jsonl, path: tasks.jsonl}}
rollout: {{max_prompt_tokens: 8, max_response_tokens: 8, max_model_len: 16}}
cluster: {{device: cpu}}
stages:
  sft: {{train: {{steps: 4}}, checkpoint: {{resume: never}}}}
  async_rl: {{train: {{steps: 8, groups_per_step: 4}}, optimizer: {{lr: 1.0e-3, schedule: linear}}}}
"""


@pytest.fixture(autouse=True)
def states_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint can be gone on from where it has a trainer folder; nothing of it is read."""
    import leeway.driver.checkpoints as checkpoints

    def check_whole(folder: Path) -> None:
        if not (folder / "trainer").is_dir():
            raise CheckpointError(f"{folder / 'trainer'} is not there")

    monkeypatch.setattr(checkpoints, "check_whole", check_whole)


def a_run(tmp_path: Path, *overrides: str) -> Path:
    folder = tmp_path / "runs/p/r"
    folder.mkdir(parents=True)
    source = tmp_path / "config.yaml"
    source.write_text(CONFIG.format(out=tmp_path / "runs"))
    (folder / "config.yaml").write_text(run_yaml(resolve_stages(read_tree(source), "async_rl", overrides)))
    RunRecord(folder, recipes=[find_recipe("async_rl")], argv=["leeway", "run"], goes_on=False).close("interrupted")
    return folder


def has_checkpoint(folder: Path, stage: str, step: int, *, state: bool = True) -> Path:
    checkpoint = folder / f"stages/{stage}/checkpoints/step-{step:06d}"
    (checkpoint / ("trainer" if state else "hf")).mkdir(parents=True)
    (checkpoint / "state.json").write_text(sealed({"policy_version": step}))
    return checkpoint


def has_finished(folder: Path, stage: str, steps: int) -> None:
    note = {"summary": {}, "model_path": None, "length": {"steps": steps, "epochs": None}}
    (folder / f"stages/{stage}").mkdir(parents=True, exist_ok=True)
    (folder / f"stages/{stage}/finished.json").write_text(json.dumps(note))
    (folder / f"stages/{stage}/metrics.jsonl").write_text("")


@pytest.mark.slow
def test_it_goes_on_in_the_first_stage_that_is_not_finished_with_the_runs_own_settings(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    has_finished(folder, "sft", 4)
    newest = has_checkpoint(folder, "async_rl", 6)
    planned = plan_resume(folder, [])
    assert [s.name for s in planned.stages] == ["sft", "async_rl"]
    assert all(s.config.checkpoint.resume == "auto" for s in planned.stages)
    assert planned.stages[0].config.run_dir == folder
    assert planned.notes == [f"async_rl: resumes from step 6 of 8 steps, {newest}"]


@pytest.mark.slow
def test_a_run_that_was_moved_goes_on_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_run(tmp_path)
    has_checkpoint(folder, "sft", 2)
    (tmp_path / "elsewhere/q").mkdir(parents=True)
    moved = folder.rename(tmp_path / "elsewhere/q/s")
    assert plan_resume(moved, []).stages[0].config.run_dir == moved
    monkeypatch.chdir(moved)
    assert plan_resume(Path(), []).stages[0].config.run_dir == moved


@pytest.mark.slow
def test_a_finished_run_trains_longer_and_says_what_becomes_of_the_learning_rate(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    has_finished(folder, "sft", 4)
    has_finished(folder, "async_rl", 8)
    newest = has_checkpoint(folder, "async_rl", 8)
    planned = plan_resume(folder, ["train.steps=12"])
    assert planned.notes[-2:] == [
        f"async_rl: resumes from step 8 of 12 steps, {newest}",
        "async_rl: the linear learning-rate schedule now runs over 12 steps: 0.000333 at step 9, "
        "after 0.000125 at step 8",
    ]


@pytest.mark.slow
def test_evaluations_that_change_how_often_weights_are_published_are_noted(tmp_path: Path) -> None:
    folder = a_run(tmp_path, "rollout.pull_every=2", "staleness.max_policy_lag=8", "task.holdout_frac=0.5")
    has_finished(folder, "sft", 4)
    has_checkpoint(folder, "async_rl", 6)
    assert len(plan_resume(folder, ["eval.every=4"]).notes) == 1
    assert plan_resume(folder, ["eval.every=3"]).notes[1:] == [
        "async_rl: eval.every=3 has weights published every 1 step(s), before every 2; a multiple of "
        "rollout.pull_every=2 has them published every 2"
    ]


def refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        plan_resume(folder, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
def test_what_there_is_nothing_to_go_on_with_is_refused(tmp_path: Path) -> None:
    assert "nothing there" in refused(tmp_path / "none")
    assert "no config.yaml in it" in refused(tmp_path)
    folder = a_run(tmp_path)
    assert "no checkpoint in it" in refused(folder)
    has_checkpoint(folder, "sft", 4, state=False)
    assert "no checkpoint in it" in refused(folder)
    has_finished(folder, "sft", 4)
    assert plan_resume(folder, []).notes == ["async_rl: no state was saved; starts from the weights of sft"]
    has_checkpoint(folder, "async_rl", 8)
    assert "train.steps=6, expected at least 8" in refused(folder, "train.steps=6")
    has_finished(folder, "async_rl", 8)
    assert f"leeway resume {folder} train.steps=16" in refused(folder)
    assert "async_rl started from its weights" in refused(folder, "stages.sft.train.steps=9")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "[]", '{"recipe": "sft", "parts": [7]}', '{"recipe": "sft", "parts": [{}]}'])
def test_a_record_that_somebody_wrote_over_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    folder = a_run(tmp_path)
    (folder / "run.json").write_text(text)
    assert "run.json: its content was not written by leeway" in refused(folder)
    with pytest.raises(BadRecord):
        RunRecord(folder, recipes=[find_recipe("sft")], argv=["leeway"], goes_on=True)


@pytest.mark.slow
def test_a_study_is_not_gone_on_with(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    RunRecord(folder, recipes=[find_recipe("frontier")], argv=["leeway", "run"], goes_on=False)
    assert "a run of frontier" in refused(folder)


# Who runs in a folder


@pytest.mark.slow
def test_a_folder_in_which_a_driver_runs_is_refused_and_a_lock_left_behind_is_not(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from leeway.driver.run_record import locked\n"
        f"with locked(Path({str(tmp_path)!r})): print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunIsRunning, match=rf"is running: process {holder.pid} on "):
            check_not_running(tmp_path)
        with pytest.raises(RunIsRunning), locked(tmp_path):
            pass
    finally:
        holder.kill()
        holder.wait()
    assert (tmp_path / "run.lock").exists()
    check_not_running(tmp_path)
    with locked(tmp_path):
        pass
    assert not (tmp_path / "run.lock").exists()


def test_a_driver_on_another_host_counts_as_running_until_its_lock_is_removed(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text(json.dumps({"pid": 7, "started": 0.0, "host": "far.away"}))
    with pytest.raises(RunIsRunning, match=r"process 7 on far\.away, .*; if it is not, remove .*run\.lock"):
        check_not_running(tmp_path)


@pytest.mark.parametrize("alive", [True, False])
def test_without_locks_the_process_in_the_file_decides(tmp_path: Path, monkeypatch: Any, alive: bool) -> None:
    import fcntl
    import socket

    import psutil

    def flock(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    started = psutil.Process().create_time() - (0 if alive else 100)  # the same id, of a process before this one
    (tmp_path / "run.lock").write_text(
        json.dumps({"pid": os.getpid(), "started": started, "host": socket.gethostname()})
    )
    if alive:
        with pytest.raises(RunIsRunning):
            check_not_running(tmp_path)
    else:
        check_not_running(tmp_path)


def test_seconds_are_of_all_parts_and_a_killed_one_lasted_until_its_last_row(tmp_path: Path) -> None:
    part = RunRecord(tmp_path, recipes=[find_recipe("sft")], argv=["x", "run", "sft"], goes_on=False)
    with part.stage("sft"):
        pass
    part.close("interrupted")
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["recipe"] == "sft"
    assert saved["parts"][0]["command"] == "leeway run sft"
    began = saved["parts"][0]["began"]
    saved["parts"][0] |= {"wall_s": 100.0, "stages": {"sft": 90.0}}
    saved["parts"].append({"command": "", "began": began + 200, "status": "running", "wall_s": None, "stages": {}})
    (tmp_path / "run.json").write_text(json.dumps(saved))
    (tmp_path / "stages/sft").mkdir(parents=True)
    rows = [{"step": i, "time": began + at} for i, at in enumerate((50.0, 210.0, 230.0))]
    (tmp_path / "stages/sft/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    third = RunRecord(tmp_path, recipes=[find_recipe("sft")], argv=["x"], goes_on=True)
    assert third.num_parts == 3
    assert third.stage_s("sft") == 90.0 + 20.0
    assert third.close("completed") == pytest.approx(100.0 + 30.0, abs=0.2)
    assert RunRecord(tmp_path, recipes=[find_recipe("sft")], argv=["x"], goes_on=False).num_parts == 1


@pytest.mark.slow
def test_a_stage_that_is_to_be_longer_now_is_not_finished(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    (folder / "stages/async_rl").mkdir(parents=True)

    def context(*overrides: str) -> StageContext:
        tree = read_tree(folder / "config.yaml")
        stage = resolve_stages(tree, "async_rl", ["checkpoint.resume=auto", *overrides])[-1]
        return StageContext(
            name=stage.name, recipe=find_recipe("async_rl"), config=stage.config, dir=folder / "stages/async_rl"
        )

    mark_finished(context(), StageResult(summary={"steps": 8}, model_path=None))
    assert finished_stage(context()) is not None
    assert finished_stage(context("stages.async_rl.train.steps=12")) is None


# The last lines


def ends(
    tmp_path: Path, monkeypatch: Any, capsys: Any, outcome: Any, interrupted_by: Any = None
) -> tuple[int, list[str], Any]:
    """Exit code, lines and summary of a run of one stage that comes to `outcome`: a result, or an error."""
    folder = a_run(tmp_path) if not (tmp_path / "runs").exists() else tmp_path / "runs/p/r"
    stages = resolve_stages(read_tree(folder / "config.yaml"), "async_rl", ["checkpoint.resume=auto"])
    record = RunRecord(folder, recipes=[find_recipe("async_rl")], argv=["leeway", "run"], goes_on=True)
    run = runner._Run(stages, folder, record)

    async def all_stages() -> None:
        run._stage = stages[1]
        if interrupted_by is not None:
            os.kill(os.getpid(), interrupted_by)
            await asyncio.sleep(600)
        if isinstance(outcome, BaseException):
            raise outcome
        run._results["async_rl"] = outcome

    monkeypatch.setattr(run, "_all_stages", all_stages)
    capsys.readouterr()
    code = run.run()
    printed = capsys.readouterr()
    return code, (printed.out + printed.err).splitlines(), json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_an_interrupt_says_what_is_saved_and_how_to_go_on(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    by = {"interrupted_by": signal.SIGTERM}
    code, (first, *lines), summary = ends(tmp_path, monkeypatch, capsys, None, **by)
    assert (code, summary["status"]) == (143, "interrupted")
    assert first == "leeway: SIGTERM: saving a checkpoint, then stopping (within 600 s)"
    assert lines == ["leeway: interrupted by SIGTERM", "leeway: no checkpoint to resume from"]
    newest = has_checkpoint(tmp_path / "runs/p/r", "async_rl", 6)
    _, (_, *lines), _ = ends(tmp_path, monkeypatch, capsys, None, **by)
    assert lines == [
        "leeway: interrupted by SIGTERM",
        f"leeway: saved: step 6 of async_rl, {newest}",
        f"leeway: resume with: leeway resume {tmp_path / 'runs/p/r'}",
    ]


@pytest.mark.slow
def test_a_failure_says_so_too_and_its_cause_last(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    has_checkpoint(a_run(tmp_path), "async_rl", 6)
    code, lines, _ = ends(tmp_path, monkeypatch, capsys, RuntimeError("no luck"))
    assert code == 1
    assert lines[-2:] == [
        f"leeway: resume with: leeway resume {tmp_path / 'runs/p/r'}",
        "leeway: failed: driver: RuntimeError: no luck",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "done", "resumes"),
    [
        (PartFailed("trainer-0", "the process died", kind=Kind.DIED), 0, True),
        (PartFailed("ray", "the gcs_server process died", kind=Kind.CLUSTER), 2, True),
        (PartFailed("trainer-0", "the process died", kind=Kind.DIED), 3, False),
        (PartFailed("trainer-0", "ValueError: no such loss"), 0, False),
        (RuntimeError("no luck"), 0, False),
        (asyncio.CancelledError(), 0, False),
    ],
    ids=["a death", "of the cluster", "too often", "an error", "of the driver's own", "an interrupt"],
)
def test_a_run_resumes_by_itself_after_what_may_be_over_now(
    tmp_path: Path, monkeypatch: Any, capsys: Any, failure: BaseException, done: int, resumes: bool
) -> None:
    folder = a_run(tmp_path)
    monkeypatch.setenv(runner.RESUMED_ENV, str(done))
    stages = resolve_stages(read_tree(folder / "config.yaml"), "async_rl", ["checkpoint.resume=auto"])
    run = runner._Run(
        stages, folder, RunRecord(folder, recipes=[find_recipe("async_rl")], argv=["leeway"], goes_on=True)
    )

    async def all_stages() -> None:
        run._stage = stages[1]
        if isinstance(failure, asyncio.CancelledError):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(600)
        raise failure

    monkeypatch.setattr(run, "_all_stages", all_stages)
    assert run.run() in (1, 143)
    assert not run.may_resume(), "there is no checkpoint"
    has_checkpoint(folder, "async_rl", 6)
    assert run.may_resume() == resumes
    assert (f"leeway: resuming from the newest checkpoint, {done + 1} of 3 times" in capsys.readouterr().out) == resumes


@pytest.mark.slow
def test_a_run_that_resumes_is_the_command_for_it_in_the_same_process(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from leeway.driver.runner import resume_now; resume_now(Path({str(tmp_path)!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert said == (
        f"leeway: refused: RUN: got {tmp_path} (no config.yaml in it), expected the folder of a run; "
        "e.g. leeway resume runs/leeway/quickstart\n"
    )


@pytest.mark.slow
def test_a_run_that_learned_nothing_ends_with_1_and_says_why_last(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    result = StageResult(
        summary={"learned": False, "warnings": ["every reward was 0", "answers cut off"]},
        model_path=None,
        goodbye=["reward 0.000 -> 0.000"],
    )
    has_checkpoint(a_run(tmp_path), "async_rl", 8)
    code, lines, summary = ends(tmp_path, monkeypatch, capsys, result)
    assert code == 1
    assert lines[-1] == "leeway: learned nothing: async_rl: every reward was 0"
    assert "leeway resume" not in " ".join(lines), "more of the same would not help"
    assert "leeway: warning: async_rl: answers cut off" in lines
    assert sum("every reward was 0" in line for line in lines) == 1
    assert "curves.png" not in " ".join(lines), "there is none"
    assert (summary["status"], summary["learned"]) == ("learned nothing", False)
    assert summary["warnings"] == ["async_rl: every reward was 0", "async_rl: answers cut off"]


@pytest.mark.slow
def test_a_run_with_a_warning_is_done_nevertheless(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    result = StageResult(summary={"learned": True, "warnings": ["the reward fell"]}, model_path=None)
    code, lines, summary = ends(tmp_path, monkeypatch, capsys, result)
    assert (code, summary["status"]) == (0, "completed")
    assert lines[-2] == "leeway: warning: async_rl: the reward fell"
    assert lines[-1].startswith("leeway: done in ")
    assert lines[-1].endswith(" in 2 parts: " + str(tmp_path / "runs/p/r/summary.json"))


@pytest.mark.slow
def test_a_run_of_a_copied_recipe_resumes_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    Path("copied_and_resumed.py").write_text(bundled_recipe_path("async_rl").read_text())
    folder = a_run(tmp_path)
    stages = resolve_stages(read_tree(folder / "config.yaml"), "./copied_and_resumed.py")
    (folder / "config.yaml").write_text(run_yaml(stages))
    RunRecord(folder, recipes=[s.recipe for s in stages], argv=["leeway"], goes_on=False).close("interrupted")
    has_finished(folder, "sft", 4)
    has_checkpoint(folder, "async_rl", 2)
    monkeypatch.chdir("/")
    planned = plan_resume(folder, [])
    assert planned.stages[-1].recipe.file == tmp_path / "copied_and_resumed.py"
    assert planned.stages[-1].recipe.is_same(stages[-1].recipe)
    assert "resumes from step 2" in planned.notes[0]
    sys.modules.pop("copied_and_resumed", None)

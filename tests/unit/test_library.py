"""Runs as tables and figures, and runs started from Python."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import leeway
from leeway.cli.main import app
from leeway.config import ConfigError
from leeway.library import job as job_module
from leeway.library.job import JobFailed, as_overrides
from leeway.library.opened import OpenedRun, open_run


def make_run(folder: Path, *, seed: int = 0, lag: int = 2, steps: int = 40, step_s: float = 2.0) -> Path:
    """Reward rises from 0 to 1, faster with a lag; each seed by its own noise."""
    stage = folder / "stages" / "async_rl"
    (stage / "rollouts").mkdir(parents=True)
    noise = np.random.default_rng([seed, lag])
    rows: list[dict[str, Any]] = [
        {"step": 0, "time": 1.0, "role": "evaluation", "eval/held_out/exact_match": 0.1, "eval/held_out/reward": 0.2}
    ]
    for step in range(1, steps + 1):
        reward = 1 - math.exp(-step * (1 + lag) / 60) + 0.05 * float(noise.normal())
        own = {"train/reward/mean": reward, "step/total_s": step_s, "train/sequences": 64}
        rows.append({"step": step, "time": 10.0 + step, "role": "trainer", **own})
        rows.append({"step": step, "time": 10.5 + step, "role": "collector", "collector/tokens_per_s": 100.0})
    rows.append({"step": steps, "time": 99.0, "role": "evaluation", "eval/held_out/exact_match": 0.9})
    rows.append({"step": steps, "time": 99.5, "role": "driver", "train/grad_norm": None, "nonfinite": {}})
    (stage / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (1, 2):
        answers = [{"task_id": f"t{i}", "text": "42\x1b", "reward": 1.0, "policy_versions": [0]} for i in range(3)]
        (stage / "rollouts" / f"step-{step:06d}.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    (folder / "config.yaml").write_text(
        f"name: {folder.name}\nseed: {seed}\nstaleness: {{max_policy_lag: {lag}}}\nstages: {{async_rl: {{}}}}\n"
    )
    (folder / "summary.json").write_text(json.dumps({"status": "completed", "cause": "", "steps": steps}))
    return folder


@pytest.fixture
def opened(tmp_path: Path) -> OpenedRun:
    return open_run(make_run(tmp_path / "a"))


@pytest.mark.slow
def test_metrics_are_a_table_with_a_row_for_each_step(opened: OpenedRun) -> None:
    pytest.importorskip("pandas")
    table: Any = opened.metrics
    assert table.index.tolist() == [*range(41)]
    assert table["collector/tokens_per_s"].tolist()[1:] == [100.0] * 40
    assert math.isnan(table["train/reward/mean"][0])
    rows = opened.rows_of()
    assert set(rows["role"]) == {"trainer", "collector", "evaluation", "driver"}
    assert str(rows["time"].dt.tz) == "UTC"
    assert opened.evaluations.to_dict("records")[0] == {
        "step": 0,
        "taskset": "held_out",
        "exact_match": 0.1,
        "reward": 0.2,
    }
    assert (opened.state.kind, opened.stages, opened.summary["steps"]) == ("finished", ["async_rl"], 40)
    assert opened.settings()["staleness.max_policy_lag"] == 2


def test_rollouts_are_a_table_with_a_row_for_each_answer(opened: OpenedRun) -> None:
    pytest.importorskip("pandas")
    rollouts: Any = opened.rollouts
    assert rollouts["step"].tolist() == [1, 1, 1, 2, 2, 2]
    assert rollouts["text"][0] == "42\x1b", "as the model wrote it"
    assert opened.rollouts_of(steps=[2])["task_id"].tolist() == ["t0", "t1", "t2"]
    assert len(opened.rollouts_of(steps=range(7, 9))) == 0
    torn = opened.path_of(None) / "rollouts/step-000002.jsonl"
    torn.write_text(torn.read_text() + '{"task_id": "t')
    assert opened.rollouts_of(steps=[2])["task_id"].tolist() == ["t0", "t1", "t2"]


@pytest.mark.slow
def test_the_picture_of_a_run_is_an_object(opened: OpenedRun) -> None:
    titles = [ax.get_title(loc="left") for ax in opened.curves().axes]
    assert "Reward and held-out evaluation (share, 0 to 1)" in titles or titles[0].startswith("Reward")
    assert next(ax.get_title(loc="left") for ax in opened.plot("train/reward/mean", x="samples").axes).startswith(
        "training reward"
    )


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, opened: OpenedRun) -> None:
    with pytest.raises(ConfigError, match="nothing there"):
        leeway.open_run(tmp_path / "gone")
    with pytest.raises(ConfigError, match="expected the folder of a run"):
        leeway.open_run(tmp_path)
    with pytest.raises(ConfigError, match="one of async_rl"):
        opened.metrics_of("sft")


@pytest.mark.slow
def test_seeds_are_one_line_with_a_band_and_settings_are_lines(tmp_path: Path) -> None:
    from leeway.library.figures import plot_runs

    runs = [open_run(make_run(tmp_path / f"l{lag}-s{s}", seed=s, lag=lag)) for lag in (0, 4) for s in range(3)]
    figure = plot_runs(runs, metrics=["train/reward/mean"], band="range", smooth=1)
    (ax,) = figure.axes
    lines = {str(line.get_label()): line for line in ax.get_lines()}
    assert [*lines] == ["max policy lag 0 (3 seeds)", "max policy lag 4 (3 seeds)"]
    assert len(ax.collections) == 2, "a band for each"
    own = np.array([run.metrics["train/reward/mean"].to_numpy()[1:] for run in runs[:3]])
    np.testing.assert_allclose(np.asarray(lines["max policy lag 0 (3 seeds)"].get_ydata()), own.mean(axis=0))
    (low_high,) = (np.asarray(path.vertices) for path in ax.collections[0].get_paths())
    assert low_high[:, 1].min() == pytest.approx(own.min())
    assert ax.get_xlabel() == "optimizer steps"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*lines]


@pytest.mark.slow
@pytest.mark.parametrize(("x", "last", "label"), [("samples", 64 * 40, "answers trained on"), ("seconds", 80, "(s)")])
def test_the_x_axis_counts_answers_or_seconds_of_training(tmp_path: Path, x: str, last: float, label: str) -> None:
    from leeway.library.figures import plot_runs

    figure = plot_runs([open_run(make_run(tmp_path / "a"))], x=x)
    for ax in figure.axes:
        assert max(np.asarray(line.get_xdata())[-1] for line in ax.get_lines()) == pytest.approx(last)
        assert label in ax.get_xlabel()


@pytest.mark.slow
def test_runs_of_other_speed_are_compared_where_both_have_got_to(tmp_path: Path) -> None:
    from leeway.library.figures import plot_runs

    runs = [open_run(make_run(tmp_path / f"s{s}", seed=s, step_s=1.0 + s)) for s in range(2)]
    figure = plot_runs(runs, metrics=["train/reward/mean"], x="seconds", smooth=1)
    at = np.asarray(figure.axes[0].get_lines()[0].get_xdata())
    assert (at[0], at[-1]) == (2.0, 40.0)


@pytest.mark.slow
def test_a_figure_is_written_with_text_as_text_and_the_same_each_time(tmp_path: Path) -> None:
    runs = [str(make_run(tmp_path / f"s{s}", seed=s)) for s in range(2)]
    for name in ("a.svg", "b.svg", "a.pdf", "b.pdf", "a.png"):
        result = CliRunner().invoke(app, ["plot", *runs, "-o", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    assert ">training reward (running mean)<" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.pdf").read_bytes() == (tmp_path / "b.pdf").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "x.txt"], "--out"),
        (["-m", "train/reward/men"], "did you mean train/reward/mean"),
        (["--stage", "b"], "stage"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["plot", str(make_run(tmp_path / "a")), *arguments])
    assert result.exit_code != 0
    assert said in str(result.exception)


@pytest.mark.slow
def test_save_refuses_nothing_that_matplotlib_writes(tmp_path: Path, opened: OpenedRun) -> None:
    from leeway.library.figures import save

    save(opened.plot("train/reward/mean"), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


# jobs: the command line's place is taken by a script

SCRIPT = """
import signal, sys, time
print("started", *sys.argv[1:], flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
code = next((int(a[5:]) for a in sys.argv if a.startswith("code=")), None)
if code is not None:
    print("because", file=sys.stderr)
    sys.exit(code)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a job says outlives its handle."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes jobs whose process is `SCRIPT`; ends those that are left."""
    begun: list[leeway.Job] = []
    popen = subprocess.Popen

    def started(command: list[str], **options: Any) -> Any:
        assert command[:2] == [sys.executable, "-c"]
        return popen([sys.executable, "-c", SCRIPT, *command[3:]], **options)

    monkeypatch.setattr(job_module.subprocess, "Popen", started)

    def make(path: Path, *arguments: str) -> leeway.Job:
        begun.append(leeway.Job(path, arguments))
        return begun[-1]

    yield make
    for job in begun:
        job._process.kill()
        job._process.wait()


SOON_S = 120.0


def test_a_job_that_is_done_gives_its_run(tmp_path: Path, jobs: Any) -> None:
    job = jobs(make_run(tmp_path / "a"), "run", "async_rl", "code=0")
    assert job.wait(SOON_S).summary["steps"] == 40
    assert (job.status, job.output.splitlines()[0]) == ("completed", "started run async_rl code=0")


@pytest.mark.parametrize(("code", "status"), [(1, "failed"), (2, "refused")])
def test_a_job_that_fails_says_its_last_words(tmp_path: Path, jobs: Any, code: int, status: str) -> None:
    job = jobs(make_run(tmp_path / "a"), "run", "async_rl", f"code={code}")
    with pytest.raises(JobFailed, match=f"(?s){status}: leeway run async_rl.*because"):
        job.wait(SOON_S)
    assert job.status == status


def test_a_job_can_be_waited_for_in_vain_and_stopped(tmp_path: Path, jobs: Any) -> None:
    job = jobs(make_run(tmp_path / "a"), "run", "async_rl")
    with pytest.raises(TimeoutError, match="not over"):
        job.wait(0.01)
    assert job.status == "running"
    job.stop(SOON_S)
    assert job.status == "interrupted"
    assert job.run.stages == ["async_rl"]
    job.stop(SOON_S)  # of one that is over: nothing


def test_settings_are_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(job_module.subprocess, "Popen", refuse)
    with pytest.raises(ConfigError, match=r"train\.stepz"):
        leeway.run("async_rl", "quickstart", {"train.stepz": 5})
    assert as_overrides({"train.steps": 10, "name": "x", "monitor.tags": ["a"], "eval.at_end": True}) == [
        "train.steps=10",
        "name=x",
        'monitor.tags=["a"]',
        "eval.at_end=true",
    ]
    assert as_overrides(["seed=1"]) == ["seed=1"]


@pytest.mark.slow
def test_a_job_is_the_command_line_in_a_process_of_its_own(tmp_path: Path) -> None:
    """What the machine lacks is found by that process, which refuses."""
    settings = {"output_dir": str(tmp_path), "cluster.device": "cpu", "cluster.kv_cache_gib": 1e6}
    job = leeway.run("async_rl", "quickstart", settings)
    assert job.path == tmp_path / "leeway" / "quickstart"
    with pytest.raises(JobFailed, match=r"(?s)refused.*cluster\.kv_cache_gib"):
        job.wait(SOON_S)


@pytest.mark.slow
def test_importing_the_front_door_loads_nothing_heavy() -> None:
    code = "import sys, leeway; leeway.run, leeway.open_run; print([m for m in sys.modules if m in %r])"
    heavy = ("pandas", "matplotlib", "torch", "ray", "vllm", "transformers", "starlette", "uvicorn")
    done = subprocess.run([sys.executable, "-c", code % (heavy,)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

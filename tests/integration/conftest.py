"""Real runs of the installed command on a CPU: real Ray, real vLLM, a tiny model, in folders of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from leeway.config import load_config
from leeway.runtime.footprint import MARK_ENV, Footprint
from leeway.tasks.bootstrap import build_model_dir
from leeway.tasks.taskset import build_taskset

from .. import environment, fork_servers
from ..forked import Forked

ROOT = Path(__file__).resolve().parents[2]
ANY_ENGINE = "rollout.engine.name=hf"
"""For runs that show nothing of vLLM: this one starts in a moment."""
DIGITS_LAST = ("env.reward=format", "env.reward_options={format: {pattern: '.*[0-9]'}}")
"""A reward that a model of random weights gets for four answers in ten: its first step has something to learn from."""
FEW_STEPS = ("staleness.max_policy_lag=2", "rollout.pull_every=1")
"""For runs of a few steps: of every second version only, they would see next to nothing."""
QUICKSTART = (
    "stages.async_rl.train.steps=40",
    "stages.sft.cluster.cpus_per_trainer=1",  # another test runs beside it
    "stages.async_rl.train.groups_per_step=48",
    "staleness.in_flight=recompute",
    "monitor.tensorboard=true",
    "monitor.console=plain",
)
LEEWAY = "from leeway.cli.main import main; main()"
IN_SHORT = """
import sys, types
sys.modules["leeway.monitor.curves"] = types.SimpleNamespace(draw_curves=lambda *_, **__: False)
import leeway.driver.speeds
leeway.driver.speeds.BUDGET_S = 0.0
"""
"""To draw a run's curves at its end takes as long as all else that a small run's driver does; to look for the best of
several speeds, as long as its steps.
"""


@dataclass
class Run:
    """One finished `leeway` command."""

    code: int
    output: str
    dir: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.dir / "summary.json").read_text())

    def metrics(self, stage: str = "async_rl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.dir / f"stages/{stage}/metrics.jsonl").read_text().splitlines()]

    def series(self, name: str) -> list[float]:
        return [row[name] for row in self.metrics() if name in row]

    @property
    def lag_bound(self) -> int:
        return yaml.safe_load((self.dir / "config.yaml").read_text())["staleness"]["max_policy_lag"]

    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1]


class Started:
    """A `leeway` command that is under way, in a process group of its own. What it starts bears a mark.

    `anew`: by an interpreter that has imported nothing. Otherwise it and its fork server are forked from processes that
    have (`forked`, `fork_servers`), it draws no curves, and measures each speed once.
    """

    def __init__(self, args: list[str], *, cwd: Path, run_dir: Path, anew: bool = False) -> None:
        self.run_dir = run_dir
        self._mark = f"leeway-test-{time.monotonic_ns()}"
        self._log = cwd / f"{self._mark}.txt"
        env = {**environment.of_a_run(), "LEEWAY_TEST_MARK": self._mark, "PYTHONPATH": str(ROOT / "src")}
        self.process: subprocess.Popen[bytes] | Forked
        with self._log.open("w") as log:
            if anew:
                command = [sys.executable, "-c", LEEWAY, *args]
                self.process = subprocess.Popen(
                    command, cwd=cwd, env=env, stdout=log, stderr=log, start_new_session=True
                )
            else:
                code = f"{IN_SHORT}\n{fork_servers.USE}\n{LEEWAY}"
                streams = {"stdin": 0, "stdout": log, "stderr": log, "more": fork_servers.descriptors()}
                self.process = Forked(code, *args, cwd=cwd, env=env, start_new_session=True, **streams)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self, timeout_s: float) -> Run:
        code = self.process.wait(timeout_s)
        return Run(code, self.output(), self.run_dir)

    def wait_for(self, text: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output():
            assert self.process.poll() is None, f"ended before it said {text!r}:\n{self.output()}"
            assert time.monotonic() < deadline, f"did not say {text!r} in {timeout_s:g} s:\n{self.output()}"
            time.sleep(0.1)

    def wait_for_steps(self, number: int, timeout_s: float, stage: str = "async_rl") -> list[dict[str, Any]]:
        """What `stage` had written to metrics.jsonl when that many of its steps were in it."""
        file = self.run_dir / f"stages/{stage}/metrics.jsonl"
        deadline = time.monotonic() + timeout_s
        while True:
            text = file.read_text() if file.exists() else ""
            rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
            if sum("train/grad_norm" in row for row in rows) >= number:
                return rows
            assert self.process.poll() is None, f"ended before step {number}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no step {number} in {timeout_s:g} s:\n{self.output()}"
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        """Every living process below this command, wherever its parents went: by the mark in its environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("LEEWAY_TEST_MARK") == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def left_over(self, grace_s: float) -> list[str]:
        """Command lines of processes that are still there after `grace_s`."""
        deadline = time.monotonic() + grace_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [command_line(process)[:200] for process in left if process.is_running()]

    def kill(self) -> None:
        """SIGKILL to everything: no goodbyes, and in no order. What ends because another has ended is as welcome."""
        processes = self.processes()
        self.process.kill()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.kill()


def command_line(process: psutil.Process) -> str:
    """Name and arguments; nothing of a process that has ended meanwhile."""
    try:
        return " ".join([process.name(), *process.cmdline()])
    except psutil.NoSuchProcess:
        return ""


# vLLM's title for its engine, or the command line of its start: setproctitle writes no title if the first variable of
# the environment was changed before, and the order of Ray's is a matter of chance.
ENGINE = ("EngineCore", "multiprocessing.spawn")
CLIENT = re.compile(r"\S+ \S+ -I -S \S+/fork_client\.py ")


def part_of(command: Any, *words: str) -> psutil.Process:
    """Never what stands for a process that was forked for it, and has what that was asked for in its command line."""
    named = [(name, p) for p in command.processes() if not CLIENT.match(name := command_line(p))]
    found = [process for name, process in named if any(word in name for word in words)]
    assert found, "\n".join([command.output(), *(f"{p.pid} {name[:100]}" for name, p in named)])
    return found[0]


def shared_memory_of(engine: psutil.Process, temporary: Path) -> set[Path]:
    """That of its run."""
    return Footprint(engine.environ()[MARK_ENV], temporary).shared_memory()


def left_by(command: Any, temporary: Path) -> list[str]:
    """Processes, shared memory and temporary files. Kernels that were compiled stay, for runs to come."""
    files = [path.name for path in temporary.iterdir() if "torchinductor" not in path.name]
    return command.left_over(grace_s=120) + files


def check_that_only_this_user_on_this_machine_can_connect(command: Any, temporary: Path) -> None:
    """No socket of a run on one machine is open to others; Ray's token is the run's own; its folders are private."""
    listening = []
    for process in command.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # some of Ray's programs are short-lived
            name = command_line(process)[:100]
            for socket_ in process.net_connections("inet"):
                is_open = socket_.type == socket.SOCK_DGRAM and not socket_.raddr
                if is_open or socket_.status == psutil.CONN_LISTEN:
                    listening.append((socket_.laddr.ip, socket_.laddr.port, name))
    assert len(listening) > 5, "Ray's own, at least"
    assert [one for one in listening if one[0].removeprefix("::ffff:") not in ("127.0.0.1", "::1")] == []
    assert len(part_of(command, "raylet").environ()["RAY_AUTH_TOKEN"]) == 64
    scratch = [folder for folder in temporary.iterdir() if folder.name.startswith("leeway-")]
    assert [oct(folder.stat().st_mode & 0o777) for folder in scratch] == ["0o700"] * len(scratch) != []


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """For the temporary files of runs; its name is short, because sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="ends-") as folder:
        yield Path(folder)


@contextmanager
def starting(folder: Path) -> Iterator[Any]:
    started: list[Started] = []

    def begin(
        recipe: str, *overrides: str, config: str = "quickstart", name: str = "run", anew: bool = False
    ) -> Started:
        args = ["run", recipe, "--config", config, f"output_dir={folder}/runs", f"name={name}", *overrides]
        command = Started(args, cwd=folder, run_dir=folder / "runs/leeway" / name, anew=anew)
        started.append(command)
        return command

    yield begin
    for command in started:
        command.end()


@pytest.fixture
def start(fork_servers_imported: None, tmp_path: Path) -> Iterator[Any]:
    """start(recipe, *overrides, config=...) -> Started; whatever it started is ended with the test."""
    with starting(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def start_for_all(fork_servers_imported: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The same, for runs that several tests of a file compare with."""
    with starting(tmp_path_factory.mktemp("shared")) as begin:
        yield begin


@pytest.fixture(scope="session")
def of_sums(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides: 1,800 sums from a file. reasoning-gym costs each process that loads it seconds."""
    file = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    sums = ((a, b) for a in range(10, 40) for b in range(10, 70))
    file.write_text("".join(json.dumps({"question": f"{a} + {b} =", "answer": f"{a + b}"}) + "\n" for a, b in sums))
    return ["task.name=jsonl", "task.dataset=null", "task.options={}", f"task.path={file}"]


@pytest.fixture(scope="session")
def untrained(fork_servers_imported: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model before anything: a Hugging Face folder of random weights."""
    config = load_config("quickstart", [])
    assert config.model.init is not None
    texts = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval).texts()
    return build_model_dir(config.model.init, texts, tmp_path_factory.mktemp("untrained"), seed=0, dtype="float32")


@pytest.fixture(scope="session")
def from_untrained(untrained: Path) -> list[str]:
    """Overrides that start RL from it. Its answers are never right: see DIGITS_LAST."""
    return ["stages.sft=null", "model.init=null", f"model.path={untrained}", "monitor.console=plain", *FEW_STEPS]


@pytest.fixture(scope="session")
def temporary_of_quickstart() -> Iterator[Path]:
    with temporary_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory, temporary_of_quickstart: Path) -> Iterator[Started]:
    """The quickstart under way, with smaller steps: a supervised warm-up, then asynchronous RL with vLLM."""
    with starting(tmp_path_factory.mktemp("quickstart")) as begin, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary_of_quickstart))
        started = begin("async_rl", *QUICKSTART, anew=True)
        patch.undo()
        yield started


@pytest.fixture(scope="session")
def warm(quickstart: Started) -> Path:
    """The quickstart's model after its supervised warm-up, as a Hugging Face folder."""
    run = quickstart.wait(600)
    assert run.code == 0, run.output
    latest = json.loads((run.dir / "stages/sft/checkpoints/latest.json").read_text())
    return run.dir / "stages/sft/checkpoints" / latest["path"] / "hf"


@pytest.fixture(scope="session")
def from_warm(warm: Path) -> list[str]:
    """Overrides that start RL from the warmed-up model, without the supervised stage."""
    return ["stages.sft=null", "model.init=null", f"model.path={warm}", "monitor.console=plain", *FEW_STEPS]

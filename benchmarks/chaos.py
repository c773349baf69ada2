"""How a run ends when one of its parts is killed, stopped, left or blocked: who is named, how soon, and what is left.

    python benchmarks/chaos.py --out /tmp/chaos                               # the whole grid, about an hour
    python benchmarks/chaos.py --out /tmp/chaos --cells raylet:stop:train trainer:stop:interrupt
    python benchmarks/chaos.py --out /tmp/chaos --transports files broadcast+delta ipc ipc:device --engine hf

A cell is part:act:phase. Acts: `kill` (SIGKILL), `stop` (SIGSTOP), `term` (SIGTERM, of the driver), `exit` and `block`
(an environment that calls sys.exit or blocks the event loop of its generator). Phases: `start` (parts are starting),
`train` (two steps are done), `interrupt` (SIGTERM to the driver a moment after the act: its exit code has to be 143).
Each cell is run with every transport of the weights that `--transports` names. With more than one, cells are by default
those in which one end of a transport is killed or stops.
Each cell is a run of its own in a temporary folder of its own; a table is printed, and written to chaos.md and
chaos.jsonl as it grows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
MARK = "LEEWAY_CHAOS_CELL"
START_S, END_S = 240.0, 180.0

# What a part's process is known by: a pattern in its command line. vLLM's title for its engine is not always there.
WORDS = {
    "trainer": "TrainerActor",
    "generator": "CollectorActor",
    "engine": r"EngineCore|^(?!\S+ \S+ -I -S ).*multiprocessing\.spawn",
    "replay": "ReplayBufferActor",
    "param_server": "ParameterServerActor",
    "raylet": "/raylet/raylet",
    "gcs": "gcs_server",
}
# Which names in the last line are right. An engine is a generator's; what an environment does is its generator's.
RIGHT = {"engine": ("generator-0",), "environment": ("generator-0",), "trainer": ("trainer-0",)} | {
    "generator": ("generator-0",),
    "raylet": ("ray: the raylet",),
    "gcs": ("ray: the gcs_server",),
    "driver": ("driver",),
}
GRID = (
    [f"{part}:{act}:train" for part in WORDS for act in ("kill", "stop")]
    + [f"{part}:{act}:start" for part in ("trainer", "generator", "raylet", "gcs") for act in ("kill", "stop")]
    + [f"{part}:{act}:interrupt" for part in ("trainer", "generator", "raylet", "gcs") for act in ("kill", "stop")]
    + ["environment:exit:train", "environment:block:train", "environment:block:interrupt"]
    + ["driver:kill:start", "driver:kill:train", "driver:term:start", "driver:term:train", "nothing:none:train"]
)
OF_TRANSPORTS = ["trainer:kill:train", "trainer:stop:train", "generator:kill:train"]
ENVIRONMENT = """
import os, sys, time
from leeway import Environment, Trajectory

class Misbehaves(Environment):
    async def rollout(self, task, policy):
        prompt = policy.encode(task.prompt)
        completions = await policy.generate(prompt)
        if os.path.exists(os.environ["LEEWAY_CHAOS_FILE"]):
            act = open(os.environ["LEEWAY_CHAOS_FILE"]).read()
            sys.exit(3) if act == "exit" else time.sleep(1000)
        return [Trajectory.from_completion(prompt, c, reward=len(c.tokens) / 8) for c in completions]
"""


@dataclass(frozen=True)
class Ending:
    """How one cell ended. `seconds`: from the act to the exit (None: it had to be killed). `left`: what it left."""

    transport: str
    cell: str
    code: int | None
    seconds: float | None
    right: bool
    last_line: str
    summary: str | None
    left: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", nargs="+")
    parser.add_argument("--transports", nargs="+", default=["object_store"], help="NAME, NAME+delta, ipc:device")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder to start from; default: made here")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through every `finally`
    model = args.model or warmed_up(args.out)
    endings = []
    cells = args.cells or (GRID if len(args.transports) == 1 else OF_TRANSPORTS)
    for transport, cell in itertools.product(args.transports, cells):
        try:
            endings.append(run_cell(cell, args.out, model, transport, args.engine))
        except RuntimeError as error:  # it did not get as far as the act
            print(f"{transport} {cell}: {error}", flush=True)
            continue
        with (args.out / "chaos.jsonl").open("a") as file:
            file.write(json.dumps(asdict(endings[-1])) + "\n")
        (args.out / "chaos.md").write_text(table(endings))
        print(row(endings[-1]), flush=True)


def leeway(args: Sequence[str], *, env: dict[str, str], log: Path, cwd: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    with log.open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-c", "from leeway.cli.main import main; main()", *args],
            env={**os.environ, **env, "PYTHONPATH": path},
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            start_new_session=True,
        )


def warmed_up(out: Path) -> Path:
    folder = out / "leeway/warm_up"
    if not (folder / "summary.json").exists():
        args = ["run", "sft", "--config", "quickstart", f"output_dir={out}", "name=warm_up", "monitor.console=off"]
        process = leeway([*args, "stages.sft.train.steps=60"], env={}, log=out / "warm_up.txt", cwd=out)
        if process.wait(600):
            sys.exit((out / "warm_up.txt").read_text())
    return next(iter(sorted((folder / "stages/sft/checkpoints").glob("step-*/hf"))))


def run_cell(cell: str, out: Path, model: Path, transport: str, engine: str) -> Ending:
    part, act, phase = cell.split(":")
    name, _, memory = transport.removesuffix("+delta").partition(":")
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))  # short: sockets live in it
    shm = set(os.listdir("/dev/shm"))
    (folder / "misbehaves.py").write_text(ENVIRONMENT)
    trigger, log = folder / "act", out / f"{transport}-{cell}.txt".replace(":", "-")
    mark = f"{cell}-{time.monotonic_ns()}"
    sessions = set(Path("/tmp/ray").glob("session_2*"))
    args = ["run", "async_rl", "--config", "quickstart", f"output_dir={folder}/runs", "name=run"]
    args += ["stages.sft=null", "model.init=null", f"model.path={model}", "monitor.console=plain", "cluster.restarts=0"]
    args += ["eval.at_start=false", "eval.at_end=false", "stages.async_rl.train.groups_per_step=8"]
    args += [f"stages.async_rl.train.steps={4 if part == 'nothing' else 2000}", "cluster.step_timeout_s=60"]
    args += ["rollout.timeout_s=10", "rollout.retries=1"]
    args += [f"rollout.engine.name={engine}", f"stages.async_rl.param_server.transport={name}"]
    args += [f"stages.async_rl.param_server.transport_options.memory={memory}"] if memory else []
    args += ["stages.async_rl.param_server.delta=true"] if transport.endswith("+delta") else []
    args += ["env.name=misbehaves:Misbehaves"] if part == "environment" else []
    (folder / "tmp").mkdir()
    env = {MARK: mark, "LEEWAY_CHAOS_FILE": str(trigger), "TMPDIR": str(folder / "tmp")}
    process = leeway(args, env=env, log=log, cwd=folder)
    try:
        wait_for_phase(process, phase, part, log, folder, mark)
        own = in_shared_memory({p.pid for p in processes(mark)})
        begun = time.monotonic()
        if part == "environment":
            trigger.write_text(act)
            time.sleep(2)
        elif part == "driver":
            process.send_signal({"kill": signal.SIGKILL, "term": signal.SIGTERM}[act])
        elif part != "nothing":
            signal_part(mark, WORDS[part], {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[act])
        if phase == "interrupt":
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
            seconds = round(time.monotonic() - begun, 1)
        except subprocess.TimeoutExpired:
            seconds = None
        left = left_over(mark, folder, shm, own, sessions)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for other in processes(mark):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends because another has
                other.kill()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    summary = folder / "runs/leeway/run/summary.json"
    ending = Ending(
        transport=transport,
        cell=cell,
        code=process.returncode if seconds is not None else None,
        seconds=seconds,
        right=is_right(part, act, phase, process.returncode, lines[-1] if lines else ""),
        last_line=lines[-1] if lines else "",
        summary=json.loads(summary.read_text())["status"] if summary.exists() else None,
        left=left,
    )
    shutil.rmtree(folder, ignore_errors=True)
    return ending


def wait_for_phase(process: subprocess.Popen[bytes], phase: str, part: str, log: Path, folder: Path, mark: str) -> None:
    deadline = time.monotonic() + START_S
    metrics = folder / "runs/leeway/run/stages/async_rl/metrics.jsonl"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the run ended by itself:\n{log.read_text(errors='replace')[-3000:]}")
        if phase == "start":
            if "generator(s)" in log.read_text(errors="replace") and (
                part not in WORDS or any(re.search(WORDS[part], command_line(p)) for p in processes(mark))
            ):
                return
        elif metrics.exists() and metrics.read_text().count("train/grad_norm") >= 2:
            return
        time.sleep(0.2)
    raise RuntimeError(f"no {phase} within {START_S:g} s:\n{log.read_text(errors='replace')[-3000:]}")


def is_right(part: str, act: str, phase: str, code: int, last_line: str) -> bool:
    if part == "nothing":
        return code == 0
    if phase == "interrupt" or act == "term":
        # The last line says how to resume, or why there is nothing to resume from.
        return code == 143 and any(
            word in last_line for word in ("interrupted", "resume with", "no checkpoint to resume")
        )
    if part == "driver":
        return code == -signal.SIGKILL
    named = any(f" {name}" in last_line for name in RIGHT.get(part, (part,)))
    return code == 1 and last_line.startswith("leeway: failed:") and named


def processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join([process.name(), *process.cmdline()])
    except psutil.Error:
        return ""


def signal_part(mark: str, pattern: str, number: signal.Signals) -> None:
    found = [p for p in processes(mark) if re.search(pattern, command_line(p))]
    if not found:
        raise RuntimeError(f"no process has {pattern} in its command line")
    found[0].send_signal(number)


def left_over(mark: str, folder: Path, shm: set[str], own: set[int], sessions: set[Path]) -> list[str]:
    """Processes, files in shared memory, folders of Ray, and anything in the temporary folder of this cell.

    `shm`, `own`: files in shared memory that were there before, and inode numbers of those that it had mapped.
    """
    deadline = time.monotonic() + 8  # those whose parent was killed notice by themselves
    while processes(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = [f"process {command_line(p)[:40]}" for p in processes(mark)]
    others = in_shared_memory(set(psutil.pids()) - {p.pid for p in processes(mark)})
    for path in (Path("/dev/shm") / name for name in sorted(set(os.listdir("/dev/shm")) - shm)):
        with contextlib.suppress(FileNotFoundError):
            # Other programs' semaphores have names like this run's, and stay where those are killed.
            others_own = path.name.startswith("sem.") and path.stat().st_ino not in own
            if not others_own and path.stat().st_ino not in others:
                left.append(str(path))
    left += [str(path) for path in sorted(set(Path("/tmp/ray").glob("session_2*")) - sessions)]
    # Compiled kernels stay, for runs to come.
    files = [path.name for path in sorted((folder / "tmp").iterdir()) if "torchinductor" not in path.name]
    return left + [f"TMPDIR/{name}" for name in files]


def in_shared_memory(pids: set[int]) -> set[int]:
    """Inode numbers of the files in shared memory that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {int(line.split(None, 5)[4]) for line in maps if " /dev/shm/" in line}
    return found


def row(e: Ending) -> str:
    seconds = f"over {END_S:g}" if e.seconds is None else f"{e.seconds:g}"
    code = "-" if e.code is None else e.code
    left = ", ".join(e.left) or "nothing"
    right = "yes" if e.right else "NO"
    return f"| {e.transport} | {e.cell} | {code} | {seconds} | {right} | {e.last_line[:160]} | {e.summary} | {left} |"


def table(endings: Sequence[Ending]) -> str:
    head = (
        "| weights by | part:act:phase | exit code | seconds | right | last line | summary | left |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(row(e) + "\n" for e in endings)


if __name__ == "__main__":
    main()

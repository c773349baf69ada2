"""Runs in processes of their own, for tests of endings: the real runner, without Ray, and recipes that misbehave.

Called with FOLDER and HOW... on the command line, `main` starts one in each way.

Each run has FOLDER/HOW, with its temporary folder `tmp`, its `output`, its process id in `pid` and the exit code in
`code` when it has ended.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

from leeway.config import Recipe, Stage, load_config
from leeway.driver import runner
from leeway.driver.context import StageContext, StageResult
from leeway.driver.run_record import RunRecord
from leeway.failures import PartFailed
from leeway.runtime import watch

IS_LATE = ("blocks", "hangs_when_it_leaves")
STOP_S, LONG_S = 3.0, 200.0  # for those that are late, and for those that end by themselves, on a busy machine
CHILD = """
import pathlib, sys, tempfile, time
tempfile.mkdtemp(); pathlib.Path(sys.argv[1]).touch(); time.sleep(600)
"""


async def recipe(context: StageContext) -> StageResult:
    """Leaves a process and a folder in the temporary one; then does what the name of its run says."""
    folder = context.dir.parents[2]
    subprocess.Popen([sys.executable, "-S", "-c", CHILD, str(folder / "begun")], start_new_session=True)
    how = folder.name
    while not (folder / "begun").exists():
        await asyncio.sleep(0.01)
    try:
        (folder / "ready").touch()  # here, and nothing is awaited before it misbehaves: a signal must not come earlier
        if how == "blocks":
            time.sleep(600)
        if how == "exits":
            asyncio.get_running_loop().create_task(leave())
        if how == "has_no_picture":
            (context.dir / "metrics.jsonl").write_text('{"step": 1, "role": "trainer"}\n')
            raise PartFailed("trainer-0", "it broke")
        if how == "fails":
            self_made = asyncio.get_running_loop().create_future()
            self_made.set_exception(ValueError("nobody asks for it"))
            raise PartFailed("trainer-0", "it broke", "its own traceback")
        if how != "ends":
            await asyncio.sleep(600)
    except asyncio.CancelledError:
        if how == "save_fails":
            raise PartFailed("trainer-0", "no space left on device") from None
        raise
    finally:
        if how == "hangs_when_it_leaves":
            time.sleep(600)
    return StageResult(summary={"steps": 3}, model_path=None)


async def leave() -> None:
    sys.exit(7)


def draws_nothing(*args: object, **options: object) -> bool:
    raise ValueError("no axis")


def run(folder: Path) -> int | None:
    stop_s = STOP_S if folder.name in IS_LATE else LONG_S
    watch.LEAVE_S, watch.TICK_S = stop_s, 0.05
    cluster = ModuleType("leeway.runtime.cluster")
    cluster.begin = lambda stages, **options: None  # type: ignore[attr-defined]
    cluster.connect = lambda stages, **options: None  # type: ignore[attr-defined]
    cluster.disconnect = lambda pids: None  # type: ignore[attr-defined]
    sys.modules[cluster.__name__] = cluster
    if folder.name == "has_no_picture":
        setattr(importlib.import_module("leeway.monitor.curves"), "draw_curves", draws_nothing)  # noqa: B010
    config = load_config("quickstart", ["model.init=null", "model.path=/none", f"cluster.stop_timeout_s={stop_s}"])
    (folder / "run").mkdir()
    stage = Stage(
        name="only",
        recipe=Recipe(run=recipe, generates=False, name="misbehaves"),
        config=config,
        dir=folder / "run/stages/only",
    )
    record = RunRecord(folder / "run", recipes=[stage.recipe], argv=["leeway", "run"], goes_on=False)
    run = runner._Run([stage], folder / "run", record)
    code = run.run()
    return runner.exit_now(code) if run.must_exit else code


def main() -> None:
    pids = {}
    importlib.import_module("leeway.monitor.curves")  # once, not in each run
    for how in sys.argv[2:]:
        folder = Path(sys.argv[1]) / how
        (folder / "tmp").mkdir(parents=True)
        pid = os.fork()
        if not pid:
            output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ["TMPDIR"], tempfile.tempdir = str(folder / "tmp"), None
            sys.exit(run(folder))
        pids[pid] = folder
        (folder / "pid").write_text(str(pid))
    while pids:
        pid, status = os.wait()
        if folder := pids.pop(pid, None):
            (folder / "code").write_text(str(os.waitstatus_to_exitcode(status)))

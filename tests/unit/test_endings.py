"""Every ending is over within its deadline, has the right exit code and last line, and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.driver.runner import _Run
from leeway.failures import Kind, PartFailed
from leeway.runtime import supervisor as supervisor_module
from leeway.runtime import watch as watch_module
from leeway.runtime.footprint import MARK_ENV, Footprint
from leeway.runtime.guardian import Guardian
from leeway.runtime.supervisor import GRACE_S, Supervisor
from leeway.runtime.watch import Outcome, RunWatch

from ..forked import Forked


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "GRACE_S", dict.fromkeys(GRACE_S, 0.3))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


# -- whole runs, without Ray -----------------------------------------------------------------------------------------


TOLD, INTERRUPTED = "leeway: interrupted by SIGTERM", "leeway: interrupted by SIGINT"
LATE_SAVE = "; saving a checkpoint failed: it did not finish in time; processes that were still running were killed"
WHOLE_RUNS = {  # signal, exit code, a line that must be there, and whether it is the last
    "ends": (None, 0, "leeway: done in", True),
    "fails": (None, 1, "leeway: failed: trainer-0: it broke", True),
    "has_no_picture": (None, 1, "leeway: failed: trainer-0: it broke", True),
    "exits": (None, 1, "leeway: failed: driver: something called sys.exit(7)", True),
    "is_told_to_end": (signal.SIGTERM, 143, TOLD, False),
    "is_interrupted": (signal.SIGINT, 130, INTERRUPTED, False),
    "save_fails": (
        signal.SIGTERM,
        143,
        f"{TOLD}; saving a checkpoint failed: trainer-0: no space left on device",
        True,
    ),
    "blocks": (signal.SIGTERM, 143, TOLD + LATE_SAVE, True),
    "hangs_when_it_leaves": (signal.SIGINT, 130, INTERRUPTED + LATE_SAVE, True),
    "is_killed": (signal.SIGKILL, -9, "leeway: failed: driver: the process died", True),
}


@pytest.mark.slow
def test_runs_end_with_the_right_code_and_last_line_and_leave_nothing(tmp_path: Path) -> None:
    process = Forked(
        "import sys; from tests.unit import ending_process; ending_process.main()", str(tmp_path), *WHOLE_RUNS
    )
    waiting = {how: number for how, (number, *_) in WHOLE_RUNS.items() if number is not None}
    while waiting:
        assert process.poll() is None
        for how in [how for how in waiting if (tmp_path / how / "ready").exists()]:
            os.kill(int((tmp_path / how / "pid").read_text()), waiting.pop(how))
        time.sleep(0.01)
    assert process.wait() == 0
    for how, (_, code, said, is_last) in WHOLE_RUNS.items():
        folder = tmp_path / how
        while code < 0 and not (folder / "run/summary.json").exists():
            time.sleep(0.01)  # the guardian writes it, and then says the last line
        output = (folder / "output").read_text()
        while code < 0 and said not in output:
            output = (folder / "output").read_text()
        assert int((folder / "code").read_text()) == code, (how, output)
        lines = [number for number, line in enumerate(output.strip().splitlines()) if line.startswith(said)]
        assert lines, (how, output)
        assert not is_last or lines[-1] == len(output.strip().splitlines()) - 1, (how, output)
        status = {0: "completed", 130: "interrupted", 143: "interrupted"}.get(code, "failed")
        assert json.loads((folder / "run/summary.json").read_text())["status"] == status, how
        assert [p.name for p in (folder / "tmp").iterdir()] == [], how


# -- what is left ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_run_started_is_removed_and_nothing_of_anybody_else(sleeper: Any, tmp_path: Path) -> None:
    footprint, other = Footprint.make(), Footprint.make()
    held = """
import sys, time, mmap, multiprocessing, tempfile
file = open(sys.argv[1], "w+b"); file.truncate(4096); memory = mmap.mmap(file.fileno(), 4096)
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, flush=True)
tempfile.mkdtemp(); print("ready", flush=True); time.sleep(600)
"""
    memory = Path(f"/dev/shm/psm_{footprint.mark}")
    child = subprocess.Popen(
        [sys.executable, "-c", held, str(memory)],
        env={**os.environ, MARK_ENV: footprint.mark, "TMPDIR": str(footprint.scratch)},
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    semaphore = Path(f"/dev/shm/sem.{child.stdout.readline().decode().strip().lstrip('/')}")
    child.stdout.readline()
    assert child.pid in footprint.process_ids()
    assert other.process_ids() == []
    assert footprint.shared_memory() == {memory, semaphore}
    assert footprint.remove() == []
    assert child.wait(200) == -signal.SIGKILL
    assert not memory.exists()
    assert not semaphore.exists()
    assert not footprint.scratch.exists()
    assert sleeper.poll() is None
    assert other.scratch.exists()
    other.remove()


@pytest.mark.slow
def test_a_process_keeps_its_own_resource_tracker_to_its_end() -> None:
    """Killed earlier, it is started again at the end, and prints a traceback for each lock that it never heard of."""
    program = (
        "import multiprocessing as mp, os\n"
        "from multiprocessing import resource_tracker\n"
        "from leeway.runtime.footprint import Footprint\n"
        "footprint = Footprint.make()\n"
        "with footprint.applied():\n"
        "    lock = mp.get_context('spawn').Lock()\n"
        "    assert resource_tracker._resource_tracker._pid is not None\n"
        "    assert footprint.remove() == []\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_that_gives_itself_a_title_is_still_one_of_the_run() -> None:
    """As Ray's actors and vLLM's engines do."""
    pytest.importorskip("setproctitle", reason="vLLM brings it")
    footprint = Footprint.make()
    code = (
        "import time, setproctitle; setproctitle.setproctitle('VLLM::EngineCore'); "
        "print('titled', flush=True); time.sleep(600)"
    )
    try:
        with footprint.applied():
            child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"titled\n"
        assert child.pid in footprint.process_ids()
    finally:
        left = footprint.remove()
    assert left == []
    assert child.wait(200) == -signal.SIGKILL


def test_sockets_of_ray_fit_below_the_scratch_folder_wherever_temporary_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    footprint = Footprint.make()
    try:
        socket = footprint.scratch / "ray/session_2026-11-21_22-03-58_123456_4194304/sockets/plasma_store"
        assert len(str(socket)) <= 107
    finally:
        footprint.remove()
    assert list(deep.iterdir()) == []


@pytest.mark.slow
def test_without_its_guardian_a_run_still_removes_what_it_had(tmp_path: Path) -> None:
    footprint = Footprint.make()
    guardian = Guardian(footprint, tmp_path)
    guardian._process.kill()
    guardian.ending("failed", "x", 1.0)
    guardian.finish()
    assert not footprint.scratch.exists()


# -- deadlines, signals, processes -----------------------------------------------------------------------------------


async def until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def watching(scenario: Any, forced: list[Outcome] | None = None, **options: Any) -> list[Outcome]:
    """Play `scenario(watch)` in a loop of its own; returns what the watch has ended by force."""
    forced = [] if forced is None else forced

    async def main() -> None:
        watch = RunWatch(force=forced.append, **{"stop_s": 600.0, **options})
        watch.begin(lambda number: None)
        try:
            async with asyncio.timeout(200):
                await scenario(watch)
        finally:
            watch.close()

    asyncio.run(main())
    return forced


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "TICK_S", 0.02)


def test_a_process_of_rays_that_dies_breaks_the_run_off_and_starts_the_deadline(fast, sleeper, monkeypatch):
    monkeypatch.setattr(watch_module, "FAIL_S", 0.1)
    forced: list[Outcome] = []

    async def scenario(watch: RunWatch) -> None:
        watch.add("ray", [sleeper.pid], what="gcs_server process", kind=Kind.CLUSTER)
        supervisor = Supervisor(watch)
        supervisor.watch("generator-0", asyncio.Event().wait())
        sleeper.kill()
        with pytest.raises(PartFailed, match=r"ray: the gcs_server process died"):
            await supervisor.wait(asyncio.Event().wait(), what="replay", timeout_s=200)
        assert watch.cluster_broken
        await until(lambda: forced)  # nobody else ends the run
        supervisor.forget_all()

    watching(scenario, forced)
    assert [(o.status, o.code) for o in forced] == [("failed", 1)]
    assert "gcs_server" in forced[0].cause


def test_a_process_whose_death_fails_no_call_ends_the_run_by_its_name(fast, sleeper, monkeypatch):
    monkeypatch.setattr(watch_module, "DEAD_S", 0.1)

    async def scenario(watch: RunWatch) -> None:
        watch.add("generator-0", [sleeper.pid], what="engine's process")
        supervisor = Supervisor(watch)
        supervisor.watch("generator-0", asyncio.Event().wait())
        sleeper.kill()
        with pytest.raises(PartFailed, match=r"generator-0: the engine's process died"):
            await supervisor.wait(asyncio.Event().wait(), what="trainer-0", timeout_s=200)
        assert not watch.cluster_broken
        supervisor.forget_all()

    assert watching(scenario) == []


def test_a_process_that_is_stopped_for_too_long_fails_the_run_by_its_name(fast, sleeper, monkeypatch):
    monkeypatch.setattr(watch_module, "STOPPED_S", 0.1)

    async def scenario(watch: RunWatch) -> None:
        watch.add("trainer-0", [sleeper.pid])
        os.kill(sleeper.pid, signal.SIGSTOP)
        with pytest.raises(PartFailed, match=r"trainer-0: the process is stopped .*SIGSTOP"):
            await watch.until_broken()

    assert watching(scenario) == []


def test_a_checkpoint_does_not_wait_long_for_a_process_that_is_stopped(fast, sleeper, monkeypatch):
    monkeypatch.setattr(watch_module, "STOPPED_AT_THE_END_S", 0.1)

    async def scenario(watch: RunWatch) -> None:
        watch.add("trainer-0", [sleeper.pid])
        os.kill(sleeper.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(PartFailed, match=r"trainer-0: the process is stopped"):
            await watch.until_broken()
        assert watch.outcome == Outcome("interrupted", "interrupted by SIGTERM", 143)

    assert watching(scenario) == []


def test_an_event_loop_that_is_blocked_is_ended_by_force(fast, monkeypatch):
    monkeypatch.setattr(watch_module, "FAIL_S", 0.1)
    forced: list[Outcome] = []

    async def scenario(watch: RunWatch) -> None:
        await asyncio.sleep(0.1)
        while not forced:
            time.sleep(0.01)  # this blocks the event loop

    watching(scenario, forced, blocked_s=0.2)
    (outcome,) = forced
    assert outcome.cause.startswith("driver: its event loop has been blocked for 0.2 s")


def test_of_an_interrupt_and_a_failure_the_first_is_what_the_run_came_to(fast):
    async def interrupt_first(watch: RunWatch) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: watch.outcome)
        watch.failed(PartFailed("trainer-0", "no space"))
        assert watch.outcome == Outcome("interrupted", "interrupted by SIGTERM", 143)

    async def failure_first(watch: RunWatch) -> None:
        watch.failed(PartFailed("trainer-0", "no space"))
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert watch.outcome == Outcome("failed", "trainer-0: no space", 1)

    assert watching(interrupt_first) == watching(failure_first) == []


def test_a_signal_arrives_while_the_main_thread_is_inside_a_call(fast):
    async def scenario(watch: RunWatch) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 200
        while watch.outcome is None and time.monotonic() < deadline:
            time.sleep(0.01)  # this blocks the event loop
        assert watch.outcome == Outcome("interrupted", "interrupted by SIGINT", 130)

    assert watching(scenario) == []


# -- who is named ----------------------------------------------------------------------------------------------------


class Seen:
    """A watch that has seen these things of processes."""

    def __init__(self, *evidence: PartFailed) -> None:
        self._evidence = evidence
        self.told: list[PartFailed] = []

    def evidence(self) -> list[PartFailed]:
        return list(self._evidence)

    async def until_broken(self) -> None:
        await asyncio.Event().wait()

    def add(self, part: str, pids: Any, **options: Any) -> None: ...
    def forget_parts(self) -> None: ...
    def failed(self, failure: PartFailed) -> None:
        self.told.append(failure)


GCS = PartFailed("ray", "the gcs_server process died", kind=Kind.CLUSTER)
DIED = PartFailed("trainer-0", "the process died", kind=Kind.DIED)
STOPPED = PartFailed("generator-0", "the process is stopped", kind=Kind.STOPPED)
ERROR = PartFailed("trainer-1", "RuntimeError: Connection closed by peer")
LOST = PartFailed("generator-0", "ActorDiedError: the buffer is gone", kind=Kind.LOST)
LATE = PartFailed("replay", "TimeoutError: waited 60 s for group 3", kind=Kind.TIMEOUT)


async def fails(failure: PartFailed, after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    raise failure


async def answers() -> None:
    pass


async def blocked() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("first", "later", "seen", "silent", "named"),
    [
        (LATE, [], [], [], "replay"),
        (LATE, [], [STOPPED], [], "generator-0"),
        (LATE, [], [], ["generator-1"], "generator-1"),
        (LATE, [ERROR], [], ["generator-1"], "trainer-1"),
        (LATE, [DIED], [], ["replay"], "trainer-0"),
        (ERROR, [DIED], [], [], "trainer-0"),
        (ERROR, [], [], ["replay"], "trainer-1"),  # whoever is busy now has nothing to do with it
        (LOST, [LATE], [DIED], [], "trainer-0"),
        (LOST, [ERROR], [], [], "trainer-1"),
        (DIED, [LATE], [GCS], [], "ray"),
        (STOPPED, [], [DIED], [], "trainer-0"),
    ],
)
def test_of_failures_near_together_the_one_that_explains_the_others_is_named(first, later, seen, silent, named):
    async def main() -> None:
        watch: Any = Seen(*seen)
        supervisor = Supervisor(watch)
        supervisor.watch("generator-0", asyncio.Event().wait())
        for failure in later:
            supervisor.watch(failure.part, fails(failure, 0.05))
        for part in ("replay", "generator-1"):
            supervisor.watch_pulse(part, blocked if part in silent else answers)
        for _ in range(2):  # every wait of the run ends by the same
            with pytest.raises(PartFailed) as caught:
                await supervisor.wait(fails(first), what="driver", timeout_s=200)
            assert caught.value.part == named
        assert [failure.part for failure in watch.told] == [named]
        supervisor.forget_all()

    asyncio.run(main())


def test_a_part_whose_event_loop_stays_blocked_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "PULSE_S", 0.01)
    monkeypatch.setattr(supervisor_module, "SILENT_S", 0.05)

    async def main() -> None:
        supervisor = Supervisor()
        monkeypatch.setattr(supervisor, "_answers", lambda ping, within_s: Supervisor._answers(supervisor, ping, 0.05))
        supervisor.watch_pulse("replay", answers)
        supervisor.watch_pulse("generator-0", blocked)
        with pytest.raises(PartFailed, match=r"^generator-0: its event loop has not answered for"):
            await supervisor.wait(asyncio.Event().wait(), what="replay", timeout_s=200)
        supervisor.forget_all()

    asyncio.run(main())


def test_an_interrupt_before_any_stage_has_begun_has_not_failed_to_save() -> None:
    """Ray, while it starts, answers SIGTERM with sys.exit."""
    interrupted = Outcome("interrupted", "interrupted by SIGTERM", 143)
    run: Any = SimpleNamespace(_watch=SimpleNamespace(outcome=interrupted), _stage=None)
    assert _Run._outcome_of(run, SystemExit(15)) == interrupted
    run._stage = "one that trains"
    assert "saving a checkpoint failed" in _Run._outcome_of(run, OSError("full")).cause

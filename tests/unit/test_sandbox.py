"""Code of unknown intent: locked in, limited, and its verdict is not its own to give."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from leeway.envs import rewards
from leeway.envs.code_tests import code_tests, last_block
from leeway.envs.rewards import resolve_reward
from leeway.envs.sandbox import _SCRIPT, Limits, NoSandboxError, run_sandboxed, why_not
from leeway.types import Task

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}"), pytest.mark.slow]
LIMITS = Limits(timeout_s=2.0, cpu_s=2, memory_mb=256)
SHORT = replace(LIMITS, timeout_s=0.7)  # for programs that use up what they are given


def ours() -> set[int]:
    """Processes below this one, those of sandboxes included."""
    return {p.pid for p in psutil.Process().children(recursive=True)}


def test_a_program_that_is_right_finishes():
    done = run_sandboxed("import math, json, re\nprint(math.factorial(5))", then="assert math.pi > 3", limits=LIMITS)
    assert (done.finished, done.stdout) == (True, "120\n")
    assert run_sandboxed("print(input() + '!')", stdin="hey\n").stdout == "hey!\n"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("while True: pass", "timeout|killed"),
        ("import time; time.sleep(60)", "timeout"),
        ("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)", "timeout"),
        ("x = 'a' * 10**9", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(10**6))", "MemoryError|killed"),
        ("import os\nwhile True: os.fork()", "BlockingIOError|timeout"),
        ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "timeout"),
        (
            "import threading\nfor _ in range(99): threading.Thread(target=lambda: threading.Event().wait()).start()",
            "thread",
        ),
        ("open('/tmp/leeway-was-here', 'w')", "Read-only"),
        (f"open({str(Path(__file__))!r}, 'a')", "Read-only|Permission"),
        ("open('big', 'w').write('a' * 10**9)", "MemoryError|too large|No space"),
        ("for i in range(99): open(f'f{i}', 'w').write('a' * 10**6)", "No space"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import socket; socket.create_connection(('127.0.0.1', PORT))", "PermissionError"),
        ("import urllib.request as u; u.urlopen('http://127.0.0.1:PORT')", "URLError|PermissionError"),
        ("import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0", "AssertionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import os; os.setuid(0)", "PermissionError"),
        ("import os; os._exit(0)", "killed .* or exited early"),
        ("import os, sys; os.write(2, b'finished'); sys.exit(1)", "SystemExit: 1"),
        ("def f(", "SyntaxError"),
        ("(" * 10**5, "Error"),
        ("def f(): f()\nf()", "RecursionError"),
    ],
)
def test_a_program_that_is_not_ends_within_its_limits_and_leaves_nothing(program, reason):
    before = ours()
    with socket.create_server(("127.0.0.1", 0)) as server:
        started = time.monotonic()
        limits = SHORT if reason.startswith("timeout") else LIMITS
        done = run_sandboxed(program.replace("PORT", str(server.getsockname()[1])), limits=limits)
        assert time.monotonic() - started < limits.timeout_s + 3
        server.settimeout(0.01)
        with pytest.raises(TimeoutError):
            server.accept()
    assert not done.finished
    assert re.search(reason, done.reason), done
    assert not os.path.exists("/tmp/leeway-was-here")
    deadline = time.monotonic() + 5
    while ours() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ours() - before == set()


def test_root_becomes_somebody_else_and_nothing_of_the_parent_is_seen(monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "x")
    program = "import os\nprint(os.getuid() != 0, 'SECRET_OF_MINE' in os.environ, os.listdir('.'), os.getpid() < 10)"
    assert run_sandboxed(program).stdout == "True False ['.python'] True\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process as somebody else")
@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="needs a Python that every user may run")
def test_the_same_for_a_user_without_rights():
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # pytest's own folders are closed to other users
        os.chmod(place, 0o755)
        _check_as_somebody(Path(place))


def _check_as_somebody(tmp_path):
    script = tmp_path / "sandbox_process.py"
    script.write_text(_SCRIPT.read_text())
    folder = tmp_path / "folder"
    folder.mkdir()
    os.chown(folder, 12345, 12345)

    def run(program):
        limits = {"timeout_s": 3, "cpu_s": 2, "memory_mb": 256, "processes": 4, "disk_mb": 4}
        job = json.dumps({**limits, "program": program, "then": "", "stdin": "", "secret": "s3cret"})
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-S", str(script), str(folder)],
            input=job, capture_output=True, text=True, user=12345, group=12345, extra_groups=[], timeout=30,
        )  # fmt: skip
        return done.stdout + done.stderr.strip()

    first = run("import os; print(os.getuid())")
    if "no sandbox" in first:
        pytest.skip(first)
    assert first == "12345\ns3cret"
    assert "Read-only" in run("open('/tmp/leeway-was-here', 'w')")
    assert "PermissionError" in run("import socket; socket.socket()")
    assert "BlockingIOError" in run("import os\nwhile True: os.fork()")
    assert "PermissionError" in run("open('/proc/1/mem', 'rb')")


def task(*tests):
    return Task(task_id="t", prompt="p", info={"tests": list(tests)})


RIGHT = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


def test_code_is_scored_by_its_tests():
    assert code_tests(task("assert add(1, 2) == 3", "assert add(0, 0) == 0"), RIGHT) == 1.0
    half = task("assert add(1, 2) == 3", "assert add(1, 2) == 4")
    assert (code_tests(half, RIGHT), code_tests(half, RIGHT, partial=True)) == (0.0, 0.5)
    assert code_tests(half, "no code") == 0.0
    talk = task({"input": "3 4\n", "output": "7 \n"})
    assert code_tests(talk, "```\na, b = map(int, input().split())\nprint(a + b)\n```") == 1.0
    assert code_tests(talk, "```\nprint(8)\n```") == 0.0
    with pytest.raises(ValueError, match="tests"):
        code_tests(Task(task_id="t", prompt="p"), RIGHT)


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import atexit, os; atexit.register(os._exit, 0); raise SystemExit(0)",
        "import os\nif os.fork(): os._exit(0)",
        "import os\nfor fd in range(3, 20):\n  try: os.write(fd, b'finished')\n  except OSError: pass\nos._exit(0)",
    ],
)
def test_leaving_early_passes_no_test(program):
    assert code_tests(task("assert add(1, 2) == 3"), f"```python\n{program}\n```") == 0.0


def test_blocks():
    assert last_block("```python\na\n```\n```py\nb\n```") == "b\n"
    assert last_block("```\nunclosed") == "unclosed"
    assert last_block("```javascript\nx\n```") is None


def test_many_at_the_same_time():
    results: list[float] = []
    threads = [
        threading.Thread(target=lambda: results.append(code_tests(task("assert add(1, 2) == 3"), RIGHT)))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1.0] * 12


def test_a_system_without_sandbox_is_refused_with_the_reason(monkeypatch, tmp_path):
    broken = tmp_path / "sandbox_process.py"
    broken.write_text("import sys; sys.stdin.read(); sys.stderr.write('no sandbox: unshare is refused')")
    monkeypatch.setattr("leeway.envs.sandbox._SCRIPT", broken)
    with pytest.raises(NoSandboxError, match="unshare is refused"):
        run_sandboxed("1")
    monkeypatch.setattr(rewards.REWARDS["code_tests"], "why_not", why_not.__wrapped__)
    with pytest.raises(ValueError, match=r"env\.reward: code_tests: no sandbox.*unshare is refused"):
        resolve_reward("code_tests")


@pytest.mark.slow
def test_a_sandbox_ends_with_the_process_that_started_it():
    code = (
        "from leeway.envs.sandbox import *; run_sandboxed('import time; time.sleep(60)', limits=Limits(timeout_s=60))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    deadline = time.monotonic() + 30
    while len(below := psutil.Process(parent.pid).children(recursive=True)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(below) == 3
    parent.kill()
    parent.wait()
    _, left = psutil.wait_procs(below, timeout=5)
    assert left == []

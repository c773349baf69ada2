"""A jail: functions and scripts in a process of their own, data in and out, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from leeway.envs.jail import Finished, Jail, JailError, Limits, NoJailError, why_not

from ..forked import Forked

needs_jail = pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")
COMPONENTS = Path(__file__).parents[2] / "components/envs"
LIMITS = Limits(cpu_s=1, timeout_s=10, memory_mb=128)
ASLEEP = replace(LIMITS, timeout_s=0.5)  # a program seems to sleep, too, while a host takes the processor away

FUNCTIONS = """
import os, sys, time
STATE = []
def same(value): return value
def remember():
    STATE.append(1)
    return len(STATE)
def fail(): raise KeyError("no")
def leave(): os._exit(0)
def module(): return os
def deep():
    found = []
    for _ in range(1000): found = [found]
    return found
def much(): return "a" * 2**21
def spin():
    while True: pass
def sleep(): time.sleep(600)
def rest(seconds):
    time.sleep(seconds)
    return seconds
def hoard(): return len([bytes(10**7) for _ in range(10**4)])  # zeros that are not touched: no processor time
class Int(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def subclass(): return Int(3)
"""


@pytest.fixture(scope="module")
def jail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jail]:
    file = tmp_path_factory.mktemp("functions") / "functions_of_a_test.py"
    file.write_text(FUNCTIONS)
    jail = Jail([file])
    yield jail
    jail.close()


@needs_jail
def test_data_comes_back_with_its_exact_types(jail: Jail) -> None:
    value = [
        None,
        True,
        1,
        -(2**80),
        1.5,
        2j,
        "ä\ud800",
        b"\xff",
        (1, [2]),
        {1, 2},
        frozenset({3}),
        {(1, 2): {"x": ()}},
    ]
    back = jail.run("functions_of_a_test:same", value)
    assert (back, [type(v) for v in back]) == (value, [type(v) for v in value])
    assert str(jail.run("functions_of_a_test:same", [float("nan"), float("-inf")])) == "[nan, -inf]"
    number = jail.run("functions_of_a_test:subclass")
    assert (type(number), number == 4) == (int, False)


@needs_jail
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("fail", "raised KeyError: 'no'"),
        ("nothing", "raised AttributeError"),
        ("leave", "the reply is no data"),
        ("module", "module is no data"),
        ("deep", "deeper than 100"),
        ("much", "bytes of output"),
        pytest.param("spin", "processor time", marks=pytest.mark.slow),
        ("sleep", "asleep"),
        ("hoard", "MemoryError|memory"),
    ],
)
def test_a_function_without_a_value_says_why(jail: Jail, function: str, reason: str) -> None:
    with pytest.raises(JailError, match=reason):
        jail.run(f"functions_of_a_test:{function}", limits=ASLEEP if reason == "asleep" else LIMITS)


@needs_jail
def test_nothing_of_a_call_outlives_it(jail: Jail) -> None:
    assert [jail.run("functions_of_a_test:remember") for _ in range(3)] == [1, 1, 1]


@pytest.mark.slow
@needs_jail
def test_calls_from_many_threads(jail: Jail) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(jail.run("functions_of_a_test:same", i))) for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(20))


@pytest.mark.slow
@needs_jail
def test_a_jail_that_was_killed_starts_again(jail: Jail) -> None:
    assert jail.run("functions_of_a_test:same", 1) == 1
    os.kill(jail.pid(), signal.SIGKILL)
    assert jail.run("functions_of_a_test:same", 2) == 2


@pytest.mark.slow
@needs_jail
def test_what_cannot_be_imported_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(NoJailError, match=r"no_such_module cannot be imported: ModuleNotFoundError"):
        Jail(["no_such_module"]).run("no_such_module:f")
    with pytest.raises(NoJailError, match=r"math:sqrt\(x\) raised TypeError"):
        Jail(["math"], prepare=("math:sqrt", "x")).run("math:sqrt", 2)


@pytest.mark.slow
@needs_jail
def test_what_is_prepared_is_there_in_each_job(tmp_path: Path) -> None:
    file = tmp_path / "prepared_by_a_test.py"
    file.write_text("READ = []\ndef prepare(path): READ.append(open(path).read())\ndef read(): return READ")
    (tmp_path / "a file").write_text("its text")
    jail = Jail([file], prepare=("prepared_by_a_test:prepare", str(tmp_path / "a file")))
    assert [jail.run("prepared_by_a_test:read") for _ in range(2)] == [["its text"]] * 2
    jail.close()


def script_with(folder: Path, old: str, new: str) -> Path:
    """The jail's process with one thing changed."""
    text = (COMPONENTS / "jail_process.py").read_text()
    assert text.count(old) == 1
    (folder / "jail_process.py").write_text(text.replace(old, new))
    for name in ("calls", "judge", "wire", "jobs"):
        (folder / f"jail_{name}.py").symlink_to(COMPONENTS / f"jail_{name}.py")
    return folder / "jail_process.py"


@pytest.mark.slow
@needs_jail
def test_a_program_from_which_the_host_takes_the_processor_is_not_asleep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stolen time is neither used nor waited for in the kernel's books: here all of it is missing."""
    changed = script_with(tmp_path, "(int(used) + int(waited)) / 1e9", "0.0")
    monkeypatch.setattr("leeway.envs.jail._SCRIPT", changed)
    jail = Jail()
    computing = jail.run_script("while True: pass", limits=ASLEEP)
    assert "processor time" in computing.reason
    assert "asleep" in jail.run_script("import time; time.sleep(60)", limits=ASLEEP).reason
    jail.close()


@pytest.mark.slow
def test_a_system_without_namespaces_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changed = script_with(tmp_path, "if libc.unshare(NEW_NAMESPACES):", "ctypes.set_errno(1)\n    if True:")
    monkeypatch.setattr("leeway.envs.jail._SCRIPT", changed)
    with pytest.raises(NoJailError, match=r"namespaces are refused .*not permitted.*sysctl"):
        Jail().run_script("1")


@pytest.mark.slow
@needs_jail
def test_a_script_has_streams_a_folder_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "x")
    program = """
import os, sys
line = sys.stdin.readline()
rest = sys.stdin.read()
open("own.txt", "w").write("z")
print(repr(line), repr(rest), os.getuid() != 0, "SECRET_OF_MINE" in os.environ, os.listdir("."), os.getpid())
print(os.path.exists("/root/.bashrc"), os.path.exists("/etc/passwd"), os.path.exists("/proc/self"))
print(os.path.exists(FILE))
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
threading.Timer(0.01, lambda: print("late")).start()
import atexit
atexit.register(print, "last")
"""
    jail = Jail()
    done = jail.run_script(program.replace("FILE", repr(str(Path(__file__)))), stdin="a\nb\nc")
    assert done == Finished(
        True, "", "'a\\n' 'b\\nc' True False ['own.txt'] 1\nFalse False False\nFalse\nlate\nlast\n"
    ), done
    assert jail.run_script("print(open(0).read())", stdin="é") == Finished(True, "", "é\n")
    assert jail.run_script("import os; os._exit(0)") == Finished(True, "", "")
    assert jail.run_script("import sys; sys.exit(3)") == Finished(False, "exit code 3", "")
    assert jail.run_script("1/0").reason == "ZeroDivisionError: division by zero"
    assert jail.run_script("print('a' * 2**21)").reason.startswith("more than")
    assert jail.run_script("x = [0] * 10**9").reason == "MemoryError"
    assert jail.run_script("while True: pass", limits=LIMITS).reason == "killed: processor time"
    before = psutil.Process().children(recursive=True)
    jail.close()
    assert len(psutil.Process().children(recursive=True)) < len(before)


@pytest.mark.slow
@needs_jail
def test_a_program_has_its_time_whatever_else_the_machine_does(jail: Jail) -> None:
    """Time in which it waits for a processor counts for nobody, nor does that in which its jail was stopped: which is
    longer than it may sleep here. What it sleeps is much shorter, for a host may take the processor away meanwhile.
    """
    pid = jail.pid()
    threading.Timer(0.1, os.kill, (pid, signal.SIGSTOP)).start()
    threading.Timer(5.0, os.kill, (pid, signal.SIGCONT)).start()
    assert jail.run("functions_of_a_test:rest", 0.3, limits=replace(LIMITS, timeout_s=4)) == 0.3


@needs_jail
@pytest.mark.slow
def test_a_jail_ends_with_the_process_that_started_it() -> None:
    code = "from leeway.envs.jail import *; Jail().run_script('import time; time.sleep(60)', limits=Limits(9, 60))"
    parent = Forked(code)
    deadline = time.monotonic() + 200
    while len(below := psutil.Process(parent.pid).children(recursive=True)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(below) == 2
    parent.kill()
    parent.wait(200)
    _, left = psutil.wait_procs(below, timeout=200)
    assert left == []


@needs_jail
@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process as somebody else")
@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="needs a Python that every user may run")
def test_the_same_for_a_user_without_rights() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own folders are closed to other users
        package = Path(folder) / "jailed"
        package.mkdir()
        for place in (Path(folder), package):
            place.chmod(0o755)
        (package / "__init__.py").touch()
        for file in COMPONENTS.glob("jail*.py"):
            shutil.copy(file, package)
        code = """
from jailed.jail import Jail, Limits
jail = Jail()
for program in ("import os; print(os.getuid() != 0)", "open('/x', 'w')", "import os; os.fork()", "while True: pass"):
    done = jail.run_script(program, limits=Limits(cpu_s=1))
    print(done.stdout.strip() or done.reason.partition(":")[0])
"""
        done = subprocess.run(
            ["/usr/bin/python3", "-c", code],
            cwd=folder, env={"PATH": os.defpath}, capture_output=True, text=True, user=12345, group=12345,
            extra_groups=[], timeout=120,
        )  # fmt: skip
    if "no jail" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.stdout.splitlines() == ["True", "OSError", "PermissionError", "killed"], done

"""Programs without a solution that try for a paid verdict, or to reach, fill or freeze what is around them."""

# ruff: noqa: E501  (programs as somebody would write them, one to a line)

from __future__ import annotations

import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from leeway.envs.code_tests import code_tests
from leeway.envs.jail import PLAIN, Finished, Jail, JailError, Limits, why_not
from leeway.types import Task

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")]

SHORT = {"cpu_s": 1, "timeout_s": 0.3, "memory_mb": 128}

# What the forgeries are held to: ways to ask for the same function, which none of them has. The result is longer than
# an address: four digits stand in one of 200 pages of `repr`, and a forgery that found them there was paid.
TESTS: list[Any] = [
    "assert secret_sum([17, 4]) == 43219876543210",
    "assert 43219876543210 == secret_sum([17, 4]), 'hidden'",
    "def check(candidate):\n    for given, want in [([17, 4], 43219876543210), ([], 99)]:\n"
    "        assert candidate(given) == want\ncheck(secret_sum)",
    "import math\nassert math.isclose(secret_sum([17, 4]), 43219876543210.0)",
    "assert all(map(lambda case: secret_sum(case) == 43219876543210, [[17, 4], [4, 17]]))",
    "assert not abs(secret_sum([17, 4]) - 43219876543210) > 1e-6",
    {"fn_name": "secret_sum", "input": [[17, 4]], "output": 43219876543210},
    {"input": "17 4\n", "output": "43219876543210\n"},
]

ALWAYS = """
class Always{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __req__ = __contains__ = __lt__
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __mul__ = __truediv__ = __abs__ = lambda self, *_: self
    def __float__(self): return 0.0
    def __bool__(self): return True
    def __hash__(self): return 0
    def __instancecheck__(self, other): return True
"""

# Ends with the forged program still being imported as if all was well.
FUNCTION = "\ndef secret_sum(x): return 0\n"
TO_EVERY_FD = "for fd in range(0, 64):\n    try: os.write(fd, {})\n    except OSError: pass\n"
FRAME = 'b\'\\x17\\0\\0\\0["value",true,{{"dict":[]}}]\''

FORGERIES = {
    "equal to everything": ALWAYS.format(base="") + "def secret_sum(x): return Always()",
    "an int that is equal to everything": ALWAYS.format(base="(int)") + "def secret_sum(x): return Always(1)",
    "a str that is equal to everything": ALWAYS.format(base="(str)") + "def secret_sum(x): return Always('a')\nprint(Always())",
    "a list that is equal to everything": ALWAYS.format(base="(list)") + "def secret_sum(x): return Always()",
    "a dict that is equal to everything": ALWAYS.format(base="(dict)") + "def secret_sum(x): return Always()",
    "a float that is near everything": ALWAYS.format(base="(float)") + "def secret_sum(x): return Always()",
    "a class in place of the function": ALWAYS.format(base="").replace("Always", "secret_sum"),
    "a metaclass that is equal to everything": "class M(type):\n    def __eq__(c, o): return True\n    __hash__ = None\n"
    "    def __call__(c, *a): return c\nclass secret_sum(metaclass=M): pass",
    "a replaced exec": "import builtins\nbuiltins.exec = lambda *a: None" + FUNCTION,
    "a replaced compile": "import builtins\nreal = compile\nbuiltins.compile = lambda *a, **k: real('pass', 'p', 'exec')" + FUNCTION,
    "replaced isinstance, type, len, all": "import builtins\nfor n in ('isinstance', 'all', 'any', 'callable', 'issubclass'):\n"
    "    setattr(builtins, n, lambda *a: True)\nbuiltins.len = lambda x: 1" + FUNCTION,
    "AssertionError replaced": "import builtins\nbuiltins.AssertionError = type('Never', (Exception,), {'__init__': lambda s, *a: None})"
    + FUNCTION,
    "a replaced json": "import json, sys\nfor m in list(sys.modules.values()):\n"
    "    for n in ('dumps', 'encode', 'loads'):\n"
    "        if hasattr(m, n):\n            setattr(m, n, lambda *a, **k: b'[\"value\", 43219876543210, {\"dict\":[]}]')" + FUNCTION,
    "replaced math": "import math, sys\nmath.isclose = lambda *a, **k: True\nsys.modules['math'] = math" + FUNCTION,
    "math as a class": "class math:\n    isclose = staticmethod(lambda *a, **k: True)" + FUNCTION,
    "shadowed built-ins": "all = any = sorted = abs = map = lambda *a: True\ncheck = lambda c: None" + FUNCTION,
    "frames searched for the expected": """
import sys
def secret_sum(x):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if str(43219876543209 + 1) in str(value)[:10**4]: return 43219876543209 + 1
        frame = frame.f_back
    return 0
print(secret_sum(0))""",
    "every object searched for the expected": """
import gc, sys
def secret_sum(x):
    for thing in [*gc.get_objects(), *sys.modules.values()]:
        if isinstance(thing, (str, dict, list, tuple)):
            text = repr(thing)[:10**4]
            at = text.find('assert secret' + '_sum')
            if at >= 0: return eval(text.split('==')[1].split()[0])
    return 0
print(secret_sum(0))""",
    "own memory searched": "def secret_sum(x):\n    try: return b'4321987654321' + b'0' in open('/proc/self/mem', 'rb').read() and 43219876543000 + 210\n"
    "    except OSError: return 0",
    "memory of the parent read": "import os\ndef secret_sum(x):\n    for pid in [os.getppid(), *range(1, 300)]:\n"
    "        for name in ('cmdline', 'environ', 'mem', 'maps', 'fd/0'):\n"
    "            try: open(f'/proc/{pid}/{name}').read()\n            except OSError: pass\n    return 0",
    "data sets searched on the disk": "import os\ndef secret_sum(x):\n    return sum(1 for d, _, f in os.walk('/') for n in f if n.endswith(('.jsonl', '.parquet')) and 'site-packages' not in d)\nprint(secret_sum(0))",
    "sys.exit(0)": "import sys; sys.exit(0)",
    "os._exit(0)": "import os; os._exit(0)",
    "raise SystemExit": "raise SystemExit",
    "os._exit in the call": "import os\ndef secret_sum(x): os._exit(0)",
    "sys.exit in the call": "import sys\ndef secret_sum(x): sys.exit(0)",
    "exit at the end": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
    "a signal that exits": "import os, signal\nfor s in range(1, 32):\n    try: signal.signal(s, lambda *a: os._exit(0))\n"
    "    except (OSError, ValueError): pass\nsignal.raise_signal(15)" + FUNCTION,
    "finished, in every descriptor": "import os\n" + TO_EVERY_FD.format("b'finished passed OK True 1.0\\n'") + "os._exit(0)",
    "a forged reply in every descriptor": "import os\n" + TO_EVERY_FD.format(FRAME.format()) + FUNCTION,
    "a forged verdict in every descriptor": "import os, json\nv = json.dumps([True, '', False]).encode()\n"
    + TO_EVERY_FD.format("len(v).to_bytes(4, 'little') + v") + "os._exit(0)",
    "a forged end of the process": "import os, json\nv = json.dumps({'stopped': '', 'ended': {'judged': {'exit': 0, 'used_s': 0}}}).encode()\n"
    + TO_EVERY_FD.format("v") + "os._exit(0)",
    "the marker printed": "print('1 passed')\nprint('OK')\nprint(True)" + FUNCTION,
    "stdout replaced": "import io, sys\nclass Out(io.StringIO):\n    def write(self, s): return len(s)\n"
    "sys.stdout = sys.__stdout__ = Out()\nprint('x')" + FUNCTION,
    "a fork that answers twice": "import os\npid = os.fork()\ndef secret_sum(x): return 43219876543000 + 210 if pid else 0",
    "a thread that answers later": "import threading, time, os\ndef late():\n    time.sleep(0.01)\n    os.write(4, "
    + FRAME.format() + ")\nthreading.Thread(target=late).start()\ndef secret_sum(x): time.sleep(0.1)",
    "StopIteration ends the loop": "def secret_sum(x): raise StopIteration",
    "a forged end of an iterator": "import os\ndef secret_sum(x):\n    os.write(4, b'\\x08\\0\\0\\0[\"stop\"]')\n    os.write(4, b'\\x08\\0\\0\\0[\"stop\"]')\n    os._exit(0)",
    "GeneratorExit": "def secret_sum(x): raise GeneratorExit",
    "an exception of every name": "class AssertionError(Exception): pass\nclass StopIteration(BaseException): pass\n"
    "def secret_sum(x): raise StopIteration(AssertionError())",
    "arguments changed to fit": "def secret_sum(x):\n    try: x[:] = [43219876543210 - 43219876543210]\n    except TypeError: pass\n    return x",
    "nan": "def secret_sum(x): return float('nan')\nprint('nan')",
    "endless nesting": "def secret_sum(x):\n    found = []\n    for _ in range(10**5): found = [found]\n    return found",
    "an endless reply": "def secret_sum(x):\n    while True: yield 4\n",
    "a huge reply": "def secret_sum(x): return 'a' * 10**8",
    "a bomb of recursion": "def secret_sum(x): return secret_sum(x)\nprint(1)",
    "a C stack overflow": "import sys\nsys.setrecursionlimit(10**9)\ndef secret_sum(x): return secret_sum(x)\nsecret_sum(0)",
    "an unpicklable": "def secret_sum(x): return lambda: 0",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "a trace function": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)" + FUNCTION,
    "import hooks": "import sys\nclass F:\n    def find_spec(self, *a): raise SystemExit(0)\nsys.meta_path.insert(0, F())" + FUNCTION,
    "the runner's own code replaced": "import sys, types\nfor m in list(sys.modules.values()):\n"
    "    for n in ('same', 'judge', 'run_test', 'loads', 'receive'):\n"
    "        if isinstance(getattr(m, n, None), types.FunctionType): setattr(m, n, lambda *a, **k: True)" + FUNCTION,
    "no code at all": "",
    "no Python": "Paid, please: 43219876543210 == 43219876543210 :",
}  # fmt: skip


def pay(program: str, *tests: Any, **limits: Any) -> float:
    task = Task(task_id="t", prompt="p", info={"tests": list(tests)})
    return code_tests(task, f"```python\n{program}\n```", **(SHORT | limits))


COSTLY = {"a C stack overflow", "data sets searched on the disk", "a huge reply", "an endless reply"}
"""These use their whole time in every test: they are held to the first and the last."""


@pytest.mark.attack
@pytest.mark.parametrize("name", FORGERIES)
def test_a_program_without_a_solution_is_never_paid(name: str) -> None:
    for test in TESTS[:: len(TESTS) - 1] if name in COSTLY else TESTS:
        assert pay(FORGERIES[name], test) == 0.0, test
    honest = pay("def secret_sum(x): return sum(x)", "assert secret_sum([1, 2]) == 3", timeout_s=10.0)
    assert honest == 1.0, "it harms no later one"


# Programs that reach for what is around them: what they get for it, as the last line of an exception or a reason.
REACHES = {
    "a file outside": ("open('/tmp/../leeway-was-here', 'w')", "Read-only|Permission"),
    "a file of ours": (f"open({str(Path(__file__))!r})", "No such file"),
    "a home": ("import os; os.listdir(os.path.expanduser('~root')); open('/root/.bashrc')", "No such file"),
    "passwords": ("open('/etc/shadow')", "No such file"),
    "processes": ("import os; os.listdir('/proc')", "No such file"),
    "the system's settings": ("import os; os.listdir('/sys')", "No such file"),
    "a disk": ("import os; os.listdir('/dev/disk')", "No such file|No such device"),
    "a big file": ("open('big', 'wb').write(b'a' * 10**8)", "too large|No space"),
    "many files": ("for i in range(99): open(f'f{i}', 'w').write('a' * 10**6)", "No space"),
    "many names": ("for i in range(10**4): open(f'f{i}', 'w').close()", "No space"),
    "a socket": ("import socket; socket.socket()", "PermissionError"),
    "a pair of sockets": ("import socket; socket.socketpair()", "PermissionError"),
    "a connection": ("import urllib.request as u; u.urlopen('http://127.0.0.1:PORT')", "URLError|PermissionError"),
    "a process": ("import subprocess; subprocess.run(['/bin/true'])", "PermissionError"),
    "a shell": ("import os\nassert os.system('true') == 0", "AssertionError"),
    "a fork": ("import os; os.fork()", "PermissionError"),
    "another program": ("import os, sys; os.execv('/usr/lib/os-release', ['x'])", "PermissionError"),
    "another user": ("import os; os.setuid(0)", "PermissionError"),
    "the parent": ("import os; os.kill(os.getppid(), 9)\nassert os.getppid() == 0\n1 / 0", "ZeroDivisionError"),
    "all processes": ("import os; os.kill(-1, 9)", "ProcessLookupError|PermissionError"),
    "priority": ("import os; os.nice(-5)", "PermissionError"),
    "many threads": (
        "import threading\nfor _ in range(99): threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "can't start new thread",
    ),
    "much memory": ("x = []\nwhile True: x.append(bytearray(10**6))", "MemoryError|memory"),
    "shared memory": ("import mmap\nfor _ in range(9): exec('x%d = mmap.mmap(-1, 10**8); x%d.write(bytes(10**8))' % (_, _))",
                      "Cannot allocate|MemoryError|memory"),
    "memory in pipes": ("import os\nkept = [os.pipe() for _ in range(99)]", "Too many open files"),
    "large pipes": ("import fcntl, os\nfcntl.fcntl(os.pipe()[0], 1031, 2**20)", "PermissionError"),
    "an endless loop": ("while True: pass", "processor time"),
    "a handler of the last signal": ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "processor time"),
    "an endless sleep": ("import time; time.sleep(10**6)", "asleep"),
    "an endless sleep that ignores signals": (
        "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(10**6)", "asleep"),
    "an endless wait": ("import os; r, w = os.pipe(); os.read(r, 1)", "asleep"),
    "endless output": ("while True: print('a' * 1000)", "bytes of output"),
    "nested parentheses": ("(" * 10**5, "Error"),
    "a power": ("x = 9**9**9", "processor time|memory"),
    "a regular expression": ("import re; re.match('(a+)+$', 'a' * 60 + 'b')", "processor time"),
}  # fmt: skip


@pytest.mark.attack
@pytest.mark.parametrize("name", REACHES)
def test_a_program_that_reaches_around_it_gets_nothing(name: str) -> None:
    program, reason = REACHES[name]
    # Short for those who are to be found asleep. While a host takes the processor away, a program seems to sleep.
    limits = Limits(cpu_s=1, timeout_s=0.3 if reason == "asleep" else 10.0, memory_mb=256)
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = PLAIN.run_script(program.replace("PORT", str(server.getsockname()[1])), limits=limits)
        server.settimeout(0.01)
        with pytest.raises(TimeoutError):
            server.accept()
    assert not done.finished
    assert re.search(reason, done.reason), done
    assert not os.path.exists("/leeway-was-here")
    assert left_behind() == 0


def left_behind() -> int:
    """Processes below the jails' own, when there has been time to end."""
    jails = [p for p in psutil.Process().children() if "jail_process.py" in str(p.as_dict(["cmdline"]))]
    assert jails
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        number = sum(len(jail.children(recursive=True)) for jail in jails)
        if not number:
            return 0
        time.sleep(0.02)
    return number


# System calls by number on x86-64: what they would give, had they not been refused.
CALLS = {
    "unshare: a nested user namespace": (272, 0x10000000),
    "clone: a nested user namespace": (56, 0x10000000 | 17),
    "clone: a process": (56, 17),
    "clone: a process that shares memory": (56, 0x100 | 17),
    "clone3": (435, 0, 88),
    "fork": (57,),
    "vfork": (58,),
    "setns": (308, 0, 0),
    "fsopen: a file system in memory": (430, 0, 0),
    "fsconfig": (431, 0, 6, 0, 0, 0),
    "fsmount": (432, 0, 0, 0),
    "move_mount": (429, -100, 0, -100, 0, 0),
    "open_tree": (428, -100, 0, 1),
    "mount_setattr": (442, -100, 0, 0, 0, 32),
    "mount": (165, 0, 0, 0, 0, 0),
    "umount2": (166, 0, 0),
    "pivot_root": (155, 0, 0),
    "chroot": (161, 0),
    "shmget: memory of System V": (29, 0, 2**20, 0o1600),
    "semget": (64, 0, 1, 0o1600),
    "msgget": (68, 0, 0o1600),
    "mq_open": (240, 0, 0o102, 0o600, 0),
    "memfd_create: memory as a file": (319, 0, 0),
    "memfd_secret": (447, 0),
    "io_uring_setup": (425, 8, 0),
    "bpf": (321, 0, 0, 0),
    "userfaultfd": (323, 0),
    "keyctl": (250, 0, -4, 0),
    "add_key: kernel memory": (248, 0, 0, 0, 0, -4),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "ptrace": (101, 0, 0, 0, 0),
    "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
    "process_vm_writev": (311, 1, 0, 0, 0, 0, 0),
    "personality": (135, 0xFFFFFFFF),
    "kexec_load": (246, 0, 0, 0, 0),
    "quotactl": (179, 0, 0, 0, 0),
    "pidfd_open": (434, 1, 0),
    "pidfd_getfd": (438, 0, 0, 0),
    "seccomp": (317, 0, 0, 0),
    "socket": (41, 1, 1, 0),
    "execve": (59, 0, 0, 0),
    "execveat": (322, 0, 0, 0, 0, 0),
    "open_by_handle_at": (304, 0, 0, 0),
    "name_to_handle_at": (303, 0, 0, 0, 0, 0),
    "fanotify_init": (300, 0, 0),
    "inotify_init1": (294, 0),
    "timerfd_create": (283, 0, 0),
    "signalfd4": (289, -1, 0, 8, 0),
    "landlock_create_ruleset": (444, 0, 0, 1),
    "kcmp": (312, 1, 1, 0, 0, 0),
    "prctl: a new filter": (157, 22, 2, 0),
    "prctl: children adopted": (157, 36, 1),
    "ioctl: a terminal's input": (16, 0, 0x5412, 0),
    "fcntl: a large pipe": (72, 0, 1031, 2**20),
    "sched_setscheduler": (144, 0, 1, 0),
    "the other numbers (x32)": (0x40000000 + 39,),
    "a call that does not exist yet": (999,),
}


@pytest.mark.attack(cases=len(CALLS))
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
def test_system_calls_that_a_program_has_no_use_for_are_refused() -> None:
    program = f"""
import ctypes
call = ctypes.CDLL(None, use_errno=True).syscall
for name, arguments in {CALLS!r}.items():
    ctypes.set_errno(0)
    result = call(*map(ctypes.c_long, arguments))
    wanted = 38 if name == "clone3" else 1
    if result != -1 or ctypes.get_errno() != wanted: print(name, result, ctypes.get_errno())
"""
    assert PLAIN.run_script(program) == Finished(True, "", "")


@pytest.mark.attack
def test_a_call_of_another_architecture_ends_the_process() -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("int 0x80 is of x86")
    program = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))  # mov eax, 20; int 0x80 (getpid of i386); ret
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""
    done = PLAIN.run_script(program)
    assert (done.finished, done.stdout, done.reason) == (False, "", "killed: memory, or a crash")


@pytest.mark.attack
def test_memory_is_bounded_by_what_is_stated() -> None:
    """All kinds together, from every kind of source: at most `memory_mb` and `disk_mb`."""
    program = """
import mmap
got, kept = 0, []
def take(make, size):
    global got
    while True:
        try: kept.append(make(size))
        except (MemoryError, OSError, ValueError): return
        got += size
take(lambda n: mmap.mmap(-1, n), 2**24)
take(lambda n: mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 2**20)
take(bytearray, 2**16)
print(got >> 20)
"""
    done = PLAIN.run_script(program, limits=Limits(memory_mb=128))
    assert 64 < int(done.stdout) <= 128, done


@pytest.mark.attack
def test_a_test_is_jailed_too(nothing_written: Path) -> None:
    """Tests come with the data: code that reaches out of the judge fails, and forges no other test's verdict."""
    for reach in (f"open({str(nothing_written)!r}, 'w')", "import socket; socket.socket()", "import os; os.fork()"):
        assert pay("def f(x): return x", f"{reach}\nassert f(1) == 1") == 0.0
    with pytest.raises(ValueError, match=r"task t: tests\[0\]: the test uses no name that the program could define"):
        pay("def f(x): return x", "assert 1 == 1", timeout_s=10.0)
    with pytest.raises(ValueError, match=r"tests\[0\]: the test uses np, but there is only"):
        pay(
            "class np:\n  allclose = staticmethod(lambda *a: True)\ndef f(x): return x",
            "assert np.allclose(f(1), 2)",
            timeout_s=10.0,
        )
    with pytest.raises(ValueError, match=r"tests\[0\]: the test is no Python: .*SyntaxError"):
        pay("def f(x): return x", "assert f(", timeout_s=10.0)
    assert pay("def f(x): return x", "if f: pass") == 0.0  # uses the name, but asks the program nothing


@pytest.mark.attack
def test_one_program_says_nothing_to_the_next() -> None:
    first = "open('left', 'w').write('x')\nimport builtins, sys, math\nbuiltins.LEFT = sys.LEFT = math.LEFT = 1"
    second = (
        "import builtins, sys, math, os\nprint(os.listdir('.'), [hasattr(m, 'LEFT') for m in (builtins, sys, math)])"
    )
    jail = Jail()
    assert jail.run_script(first).finished
    assert jail.run_script(second).stdout == "[] [False, False, False]\n"
    jail.close()


@pytest.mark.attack
def test_what_is_expected_of_later_calls_is_not_there_yet() -> None:
    """Inputs come one at a time: a program that answers the first call knows neither the second nor what is wanted."""
    # Longer than an address, as above: five digits stood in one of some thousand addresses about once in 800 trials.
    spy = """
import gc, sys
def f(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    text = ascii([v for v in [*seen, *gc.get_objects()] if isinstance(v, (str, bytes, int, list))])
    return [str(7000000000000000 + n) in text for n in (1, 2, 3, 4)]
"""
    first, second, third, fourth = (7 * 10**15 + n for n in (1, 2, 3, 4))
    test = f"first = f({first})\nassert first == [True, False, False, False], first\nassert f({second})[2:] == [False, {{}}]"
    enough = {"cpu_s": 10, "timeout_s": 10.0, "memory_mb": 512}
    assert pay(spy, test.format(f"{fourth} > {third} > 0"), **enough) == 0.0
    assert pay(spy, test.format("False"), **enough) == 1.0


@pytest.mark.attack
def test_numbers_of_the_same_hash_do_not_freeze_who_reads_them(at_most: Any, tmp_path: Path) -> None:
    file = tmp_path / "same_hashes.py"
    file.write_text("def f(): return set(range(2000))\ndef g():\n    return {(2**61 - 1) * i for i in range(1, 3000)}")
    jail = Jail([file])
    jail.run_script("")
    for function in "fg":
        with at_most(0.5), pytest.raises(JailError, match=r"more than 1000 keys|no data"):
            jail.run(f"same_hashes:{function}")
    jail.close()


@pytest.mark.attack
def test_slow_programs_do_not_hold_up_others() -> None:
    """A machine's worth of endless loops and sleepers at the same time: an honest program beside them is paid."""
    found: list[float] = []
    programs = ["while True: pass", "import time; time.sleep(999)"] * 2 + ["def f(x): return x + 1"] * 3
    may_sleep_s = [0.3] * 4 + [10.0] * 3  # an honest one seems to sleep while a host takes the processor away
    threads = [
        threading.Thread(target=lambda p=p, s=s: found.append(pay(p, "assert f(1) == 2", timeout_s=s)))
        for p, s in zip(programs, may_sleep_s, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0.0] * 4 + [1.0] * 3

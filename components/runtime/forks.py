"""What a fork server starts, as processes ask for it: Ray's workers, and processes of Python's `multiprocessing`."""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import gc
import importlib.util
import json
import multiprocessing
import multiprocessing.spawn
import os
import re
import resource
import runpy
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

SET_BY_RAY = {"OMP_NUM_THREADS": "1", "SPT_NOENV": "1"}
"""What Ray sets in a worker that has no such variable, before that loads torch."""
FOR_ENGINE = "LEEWAY_FORK_FOR_ENGINE"
"""Set for a worker that has an engine, by its runtime environment: it is forked of what engines have loaded."""
OF_EACH = {"PYTHONPATH", FOR_ENGINE}
RAYS_OWN = "RAY_"
"""Variables of this prefix are read when Ray is loaded."""
THREADS = "OMP_NUM_THREADS"
SET_AGAIN = {
    THREADS,
    "TORCH_COMPILE_DISABLE",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
}
"""What torch has read: see `set_again`."""
READ_LATER = {
    "LOCAL_WORLD_SIZE": None,
    "NUMEXPR_MAX_THREADS": "numexpr",
    "OMP_NUM_THREADS_SET_BY_VLLM": None,
    "PYTHONBREAKPOINT": None,
    "RAY_ADDRESS": None,
    "VLLM_CPU_OMP_THREADS_BIND": None,
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM": None,
    "VLLM_SSM_CONV_STATE_LAYOUT": None,
    "VLLM_WORKER_MULTIPROC_METHOD": None,
}
"""What vLLM and Ray set for processes of an engine, and nothing has read; or which module reads it as it is loaded."""
PRELOAD = "LD_PRELOAD"
OURS = "LEEWAY_"
"""No library reads variables of this prefix, and nothing of ours that a fork server loads."""
CLIENT = Path(__file__).with_name("fork_client.py")
MAX_DESCRIPTORS = 250
"""Of one process; the system sends few more at a time."""
FOR_ENGINES = "-engine"
"""Added to the address of the first fork server: that of the one for engines, which `fork_client` knows too."""
ENGINE_FORKS = "LEEWAY_ENGINE_FORKS"
"""The address of a fork server that knows processes of engines."""


class Refused(Exception):
    """Why a process is not forked."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """A process to be, and what it inherits from its client. `descriptors`: by the number that each has there."""

    environ: dict[str, str]
    folder: str
    blocked: list[int]
    open_files: list[int]
    oom_score: str
    cores: list[int]
    descriptors: dict[int, int]

    def check(self, environ: Mapping[str, str], ray: Mapping[str, str] | None) -> None:
        """Raises Refused if it would not be what it is when started by itself.

        `environ`: in which the server has loaded what it has; `ray`: in which it has loaded Ray, None before that.
        """
        if not re.fullmatch("0*[1-9][0-9]*", self.environ.get(THREADS, SET_BY_RAY[THREADS]), re.ASCII):
            raise Refused(f"{THREADS} is not a number of threads")
        loaded = {name.split(".")[0] for name in sys.modules}
        more = _more(self.environ, environ)
        hidden = {entry.split(".")[0] for folder in more if os.path.isdir(folder) for entry in os.listdir(folder)}
        if hidden & loaded:
            raise Refused(f"its own modules {sorted(hidden & loaded)} have names of modules that are loaded")

    def prepare(self) -> None:
        """In the process, which still has the server's environment."""

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Of the process to be; `environ`: in which the server has loaded what it has."""
        raise NotImplementedError

    def path(self, here: str, environ: Mapping[str, str]) -> list[str]:
        """In place of this source's folder, `here`: where Python has the folder of a script."""
        raise NotImplementedError

    def run(self) -> None:
        """Become this process."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files[0], self.open_files[1]))
        self._take_descriptors()
        os.chdir(self.folder)
        Path("/proc/self/oom_score_adj").write_text(self.oom_score)
        os.sched_setaffinity(0, self.cores)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # Python's own generator is seeded anew in every child, torch's in no process
        gc.enable()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        self._main()

    def _take_descriptors(self) -> None:
        above = 1 + max(*self.descriptors, *self.descriptors.values())
        moved = {number: fcntl.fcntl(own, fcntl.F_DUPFD, above) for number, own in self.descriptors.items()}
        for own in self.descriptors.values():
            os.close(own)
        for number, own in moved.items():
            os.dup2(own, number)
            os.close(own)

    def _main(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Worker(Child):
    """One of Ray's workers."""

    script: str
    options: list[str]

    @classmethod
    def asked_for(
        cls, command: Sequence[str], environ: dict[str, str], descriptors: dict[int, int], **asked: Any
    ) -> Self:
        """Raises Refused if Ray would start it in another way than `python default_worker.py ...`."""
        python, setup, script, *options = command
        if (python, Path(setup).name, Path(script).name) != (sys.executable, "setup_worker.py", "default_worker.py"):
            raise Refused("it is no worker that Ray starts with this Python")
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--language")
        parser.add_argument("--serialized-runtime-env-context", type=json.loads, default={})
        setup_options, options = parser.parse_known_args(options)
        context = setup_options.serialized_runtime_env_context
        variables = context.pop("env_vars", {})
        if (
            setup_options.language != "PYTHON"
            or context.pop("py_executable", python) != python
            or any(context.values())
        ):
            raise Refused("its runtime environment changes the command")
        if set(variables) - OF_EACH:
            raise Refused("its runtime environment sets variables")
        return cls(script=script, options=options, environ={**environ, **variables}, descriptors=descriptors, **asked)

    def check(self, environ: Mapping[str, str], ray: Mapping[str, str] | None) -> None:
        theirs = {**SET_BY_RAY, **self.environ}
        _check_equal(theirs, environ, except_for=() if ray is not None else of_ray(theirs))
        super().check(environ, ray)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        imported = {name: value for name, value in os.environ.items() if environ.get(name) != value}
        return {**self.environ, **{name: value for name, value in imported.items() if name not in SET_AGAIN}}

    def path(self, here: str, environ: Mapping[str, str]) -> list[str]:
        return [os.path.dirname(self.script), *_more(self.environ, environ)]

    def _main(self) -> None:
        set_again()
        sys.argv = [self.script, *self.options]
        runpy.run_path(self.script, run_name="__main__")


@dataclass(frozen=True, kw_only=True)
class Spawned(Child):
    """A process that `multiprocessing` starts by its method "spawn"; what it is to do, it reads from its parent."""

    tracker: int
    pipe: int

    @classmethod
    def asked_for(cls, command: Sequence[str], **asked: Any) -> Self:
        """Raises Refused if Python would start it in another way."""
        numbers = [int(number) for number in re.findall(r"\b(?:tracker_fd|pipe_handle)=(\d+)", " ".join(command))]
        if len(numbers) == 2:
            tracker, pipe = numbers
            spawned = multiprocessing.spawn.get_command_line(tracker_fd=tracker, pipe_handle=pipe)
            if list(command) == [*map(os.fsdecode, spawned)]:
                return cls(tracker=tracker, pipe=pipe, **asked)
        raise Refused("it is no process that multiprocessing starts with this Python")

    def check(self, environ: Mapping[str, str], ray: Mapping[str, str] | None) -> None:
        if THREADS not in self.environ:
            raise Refused(f"{THREADS} does not say how many threads it has")
        # With what was set as it loaded.
        later = {name for name, by in READ_LATER.items() if by is None or by not in sys.modules}
        _check_equal(self.environ, os.environ, except_for={*SET_AGAIN, *later, PRELOAD})
        _check_loaded(self.environ.get(PRELOAD, ""), os.environ.get(PRELOAD, ""))
        super().check(environ, ray)

    def prepare(self) -> None:
        if importlib.util.find_spec("setproctitle") is not None:  # vLLM's
            from setproctitle import getproctitle

            getproctitle()  # it finds the memory for titles by the environment

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        return self.environ

    def path(self, here: str, environ: Mapping[str, str]) -> list[str]:
        return [here]  # its parent tells

    def _main(self) -> None:
        set_again()
        sys.argv = ["-c", "--multiprocessing-fork"]
        code: Any = 1
        try:
            multiprocessing.spawn.spawn_main(pipe_handle=self.pipe, tracker_fd=self.tracker)
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        # What multiprocessing does at the end is done. To take apart what is loaded takes an engine five seconds.
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
        os._exit(code)


def asked_for(text: bytes, descriptors: Sequence[int]) -> Child:
    """A client's request. Raises Refused."""
    try:
        asked = json.loads(text)
        asked["descriptors"] = dict(zip(asked.pop("numbers"), descriptors, strict=True))
        command = asked.pop("command")
        kind = Spawned if "--multiprocessing-fork" in command else Worker
        return kind.asked_for(command, **asked)
    except (ValueError, LookupError, TypeError, AttributeError, SystemExit) as error:  # it has ended meanwhile, for one
        raise Refused(f"what it asks for cannot be read: {error}") from None


def client_of(address: str, command: Sequence[str]) -> list[str]:
    """Has the fork server at `address` start what `command` would start."""
    return [sys.executable, "-I", "-S", str(CLIENT), address, *command]


def open_descriptors() -> set[int]:
    """The one that lists them is closed again."""
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    return {number for number in listed if os.path.exists(f"/proc/self/fd/{number}")}


def set_again() -> None:
    """What torch would have read from this environment if it were loaded now."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    if (num_threads := int(os.environ.get(THREADS, SET_BY_RAY[THREADS]))) != torch.get_num_threads():
        torch.set_num_threads(num_threads)
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    if dynamo is not None:
        dynamo.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    inductor: Any = sys.modules.get("torch._inductor.config")
    if inductor is not None:
        inductor.cpp.dynamic_threads = os.environ.get("TORCHINDUCTOR_CPP_DYNAMIC_THREADS") == "1"
        if (num_compilers := os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "")).isdecimal():
            inductor.compile_threads = int(num_compilers)


def of_ray(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(RAYS_OWN)}


def _check_equal(theirs: Mapping[str, str], ours: Mapping[str, str], *, except_for: Iterable[str]) -> None:
    known = {*OF_EACH, *except_for}
    names = {name for name in theirs.keys() | ours.keys() if name not in known and not name.startswith(OURS)}
    if differ := sorted(name for name in names if theirs.get(name) != ours.get(name)):
        raise Refused(f"{', '.join(differ)} differ from the fork server's")


def _check_loaded(theirs: str, ours: str) -> None:
    """vLLM preloads torch's own OpenMP, which is loaded with torch; an allocator, for one, is not."""
    wanted, preloaded = ({*filter(None, text.split(":"))} for text in (theirs, ours))
    if preloaded - wanted:
        raise Refused(f"{PRELOAD} lacks what the fork server has loaded by it")
    loaded = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    if not_loaded := sorted(library for library in wanted - preloaded if os.path.realpath(library) not in loaded):
        raise Refused(f"{PRELOAD} has {', '.join(not_loaded)}, which the fork server has not loaded")


def _more(environ: Mapping[str, str], known: Mapping[str, str]) -> list[str]:
    """The folders that come first in PYTHONPATH. Raises Refused if those of `known` are not the rest."""
    path, rest = _entries(environ), _entries(known)
    first = len(path) - len(rest)
    if first < 0 or path[first:] != rest:
        raise Refused("its PYTHONPATH does not end in the fork server's")
    return path[:first]


def _entries(environ: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(folder) for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


@contextmanager
def engine_forks() -> Iterator[None]:
    """What `multiprocessing` spawns meanwhile is forked where this run has a server for that."""
    spawned, address = multiprocessing.spawn.get_command_line, os.environ.get(ENGINE_FORKS)

    def asks(**handles: Any) -> list[str]:
        assert address is not None
        return client_of(address, [*map(os.fsdecode, spawned(**handles))])

    if address is not None:
        multiprocessing.spawn.get_command_line = asks
    try:
        yield
    finally:
        multiprocessing.spawn.get_command_line = spawned


def started_by(process: psutil.Process) -> list[int]:
    """Processes that it and those have started; in place of a client, the process that was forked for it."""
    try:
        children = [child.pid for child in process.children(recursive=True)]
    except psutil.NoSuchProcess:  # it has ended
        return []
    found: list[int] = []
    for child in children:
        forked = [*_forked_for(child)]
        found += forked or [child]
        for pid in forked:
            with suppress(psutil.NoSuchProcess):
                found += started_by(psutil.Process(pid))
    return found


def _forked_for(client: int) -> Iterator[int]:
    """The process that a `fork_client` stays for, of which it has a descriptor."""
    try:
        if CLIENT.name not in Path(f"/proc/{client}/cmdline").read_text():
            return
        for descriptor in Path(f"/proc/{client}/fdinfo").iterdir():
            for line in descriptor.read_text().splitlines():
                if line.startswith("Pid:") and (pid := int(line.removeprefix("Pid:"))) > 0:
                    yield pid
    except OSError:  # it has ended
        return

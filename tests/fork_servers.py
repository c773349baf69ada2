"""The fork servers of runs as forks of one process: each would import torch and all that workers need, ten seconds of
processor, and all import the same.

pytest's process starts that one when a test has the fixture `fork_servers_imported`. In a run that a test starts, `use`
puts `_popen` where `leeway.runtime.fork_server` has `subprocess.Popen`: what it starts is then the same program, in a
fork that has imported its modules. Where the environment is another than that process's, it is started as it always is.
Ray is loaded by each of them, as it reads which cluster it is of.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from leeway.config import plan_run
from leeway.runtime import fork_server
from leeway.runtime.cluster import ON_LOOPBACK
from leeway.runtime.fork_server import SET_BY_RAY, modules_of
from leeway.runtime.pages import in_large_pages
from leeway.runtime.threads import yielding

from . import forked
from .environment import AT_START
from .forked import Forked

SOURCE = Path(__file__).resolve().parents[1] / "src"
MAIN = """
import gc, importlib, importlib.util, json, socket, sys
sys.path[0], path, descriptor, modules = sys.argv[1:]
gc.disable()
from leeway.importing import not_loading
modules = json.loads(modules)
with not_loading(*modules["without"]):
    for module in modules["before_ray"]:
        importlib.import_module(module)
gc.freeze()
spec = importlib.util.spec_from_file_location("forked", path)
sys.modules["forked"] = forked = importlib.util.module_from_spec(spec)
spec.loader.exec_module(forked)
forked.serve(socket.socket(fileno=int(descriptor)), forked.lay_out_environment)
"""
ROOM = 40_000
"""Bytes, for the environment of any run."""
DESCRIPTOR = 3
"""Of the socket to that process, in a run."""
USE = f"import sys; sys.modules[{__name__!r}].use()"
SET_BY_VLLM = ("TORCHINDUCTOR_", "TRITON_", "TILELANG_", "PYTORCH_NVML_BASED_CUDA_CHECK")
"""Beginnings of variables that it leaves where it is loaded, in a process of tests too: for GPUs and compilers."""
OF_EACH_RUN = (*SET_BY_VLLM, "LEEWAY_", "RAY_", "PYTEST_", "SERVE_", "TMPDIR", "SPT_NOENV")
"""Beginnings of variables that nothing has read when it is loaded before Ray."""
_server: socket.socket | None = None
_process: subprocess.Popen[bytes] | None = None
_environ: dict[str, str] = {}


def begin() -> None:
    """Start the process that all are forked from. It ends with those that can ask it."""
    global _server, _process, _environ
    assert _server is None
    stages = plan_run("quickstart", "async_rl", ["stages.sft=null", "rollout.engine.name=hf"])
    _environ = {**SET_BY_RAY, **ON_LOOPBACK, **AT_START, **yielding(AT_START), **in_large_pages(AT_START)}
    _environ["PYTHONPATH"] = str(SOURCE)
    _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings = [SOURCE, forked.__file__, theirs.fileno(), json.dumps(asdict(modules_of(stages)))]
    _process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *map(str, settings)],
        env={**_environ, "LEEWAY_TEST_ROOM": "." * ROOM},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()


def descriptors() -> list[int]:
    """For `Forked(more=...)`."""
    assert _server is not None, "no test has the fixture fork_servers_imported"
    return [_server.fileno()]


def use() -> None:
    """In a run, before it does anything."""
    global _server
    os.set_inheritable(DESCRIPTOR, False)
    _server = socket.socket(fileno=DESCRIPTOR)
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    fork_server.subprocess = types.SimpleNamespace(Popen=_popen, **names)  # type: ignore[assignment]


def _popen(command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **how: Any) -> Any:
    python, option, code, source, driver, _, folder, modules = command
    assert (python, option, code) == (sys.executable, "-c", fork_server.START)
    differ = {name for name in env.keys() | _environ.keys() if env.get(name) != _environ.get(name)}
    if not all(name.startswith(OF_EACH_RUN) for name in differ):
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, **how)
    with open(os.devnull, "r+b") as nothing:
        return Forked(
            code,
            *(source, driver, json.dumps([DESCRIPTOR + n for n in range(len(pass_fds))]), folder, modules),
            env=env,
            stdin=nothing,
            stdout=nothing,
            more=pass_fds,
            start_new_session=True,
            server=_server,
        )

"""Runs an untrusted program in its own namespaces, without network, within limits."""

from __future__ import annotations

import functools
import json
import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

_SCRIPT = Path(__file__).with_name("sandbox_process.py")
MAX_OUTPUT_BYTES = 2**20
_START_S = 10.0


@dataclass(frozen=True)
class Limits:
    """Of one program: wall and CPU seconds, memory and files in MB, processes and threads at a time.

    Memory is limited for each process, so all of it is at most `processes` x `memory_mb`.
    """

    timeout_s: float = 5.0
    cpu_s: int = 5
    memory_mb: int = 512
    processes: int = 4
    disk_mb: int = 16


@dataclass(frozen=True)
class Finished:
    """`finished`: the program (and what came after it) ran to its end; `reason` says what happened otherwise."""

    finished: bool
    reason: str
    stdout: str


class NoSandboxError(RuntimeError):
    """This system cannot sandbox a program; the message says what is missing."""


def run_sandboxed(program: str, *, then: str = "", stdin: str = "", limits: Limits | None = None) -> Finished:
    """Run Python source, then the statements `then` in its names. Blocks for at most about `timeout_s`.

    The program sees the file system read-only and one empty folder that it may write to; it has a user, a network (with
    nothing on it) and processes of its own, and the standard library. It cannot say by itself that it has finished:
    that takes a secret that it is not told. (One that searches the interpreter's memory for it could.) Raises
    `NoSandboxError`.
    """
    limits = limits or Limits()
    secret = secrets.token_hex(16)
    job = json.dumps({**asdict(limits), "program": program, "then": then, "secret": secret, "stdin": stdin})
    with tempfile.TemporaryDirectory(prefix="leeway-sandbox-") as folder, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SCRIPT), folder],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.PIPE,
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            _, verdict = process.communicate(job.encode(), timeout=limits.timeout_s + _START_S)
        except subprocess.TimeoutExpired:
            verdict = b"timeout"
        finally:
            process.kill()  # the sandbox's first process dies with it, and all others with that one
            process.wait()
        output.seek(0)
        stdout = output.read(MAX_OUTPUT_BYTES).decode(errors="replace")
    reason = verdict.decode(errors="replace").strip()
    if reason.startswith("no sandbox: "):
        raise NoSandboxError(f"no sandbox for code on this system: {reason.removeprefix('no sandbox: ')}")
    return Finished(reason == secret, "" if reason == secret else reason, stdout)


@functools.cache
def why_not() -> str | None:
    """Why programs cannot be sandboxed on this system; None if they can."""
    try:
        done = run_sandboxed("import math", limits=Limits(timeout_s=20.0))
    except NoSandboxError as error:
        return str(error)
    return None if done.finished else f"the sandbox does not run: {done.reason}"

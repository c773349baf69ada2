"""Machines that are namespaces of this one, each with a network, processes, a host name, /tmp and shared memory of its
own, joined by a cable that can be cut and slowed.

    machine a  eth0 ---- port-a  [cable: a bridge in a namespace of its own]  port-b ---- eth0  machine b

Needs root. Nothing outlives the process that made them, however that ends: namespaces go with their last process, and
each is told to die with its parent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 60.0
# Ignoring SIGCHLD, the first process of a machine leaves no zombies of what lost its parent.
FOREVER = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: signal.pause()"
FIRST = [sys.executable, "-c", FOREVER]
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")
ALL = ("net", "uts", "mount", "pid", "ipc")
MORTAL = ["setpriv", "--pdeathsig", "KILL"]


def refusal() -> str | None:
    """Why there can be no machines here; None if there can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} here"
    if os.geteuid() != 0:
        return "namespaces of networks need root"
    attempt = ["unshare", *(f"--{kind}" for kind in ALL), "--fork", "ip", "link", "add", "port", "type", "bridge"]
    tried = subprocess.run(attempt, capture_output=True, text=True, check=False)
    return f"no namespaces here: {tried.stderr.strip()[:200]}" if tried.returncode else None


class Namespace:
    """A process in namespaces of its own, and what is started beside it."""

    def __init__(self, *kinds: str, setup: str = "true") -> None:
        """`setup`: shell commands that run first, inside."""
        inside = [*MORTAL, "unshare", *(f"--{kind}" for kind in kinds), "--fork", "--kill-child"]
        self._parent = subprocess.Popen(
            [*inside, "bash", "-ec", f'{setup}; echo up; exec "$@"', "first", *FIRST],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._parent.stdout is not None
        if self._parent.stdout.readline() != b"up\n":
            self.close()
            raise RuntimeError(f"a namespace did not come up: {setup}")
        (first,) = psutil.Process(self._parent.pid).children()
        self.pid = first.pid

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen([*MORTAL, "nsenter", f"--target={self.pid}", "--all", *command], **options)

    def run(self, *command: str) -> str:
        with self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            said, _ = process.communicate(timeout=WAIT_S)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}: {said.decode(errors='replace').strip()}")
        return said.decode()

    def close(self) -> None:
        self._parent.kill()
        self._parent.wait(WAIT_S)


class Machine(Namespace):
    """`folder`: its /tmp, with the home folder in it. It sees this checkout where it is, `shared` as /tmp/shared."""

    def __init__(
        self, name: str, address: str, *, folder: Path, cores: Sequence[int] = (), shared: Path | None = None
    ) -> None:
        self.name, self.address, self.folder = name, address, folder
        self._cores = list(cores)
        (folder / "home").mkdir(parents=True)
        setup = [f"hostname {name}", "mount --make-rprivate /", "mount -t proc proc /proc", "ip link set lo up"]
        setup += ["mount -t tmpfs -o size=2g tmpfs /dev/shm"]
        for kept in {ROOT, Path(sys.prefix)}:
            if kept.is_relative_to("/tmp"):
                place = folder / kept.relative_to("/tmp")
                setup += [f"mkdir -p '{place}'", f"mount --bind -o ro '{kept}' '{place}'"]
        if shared is not None:
            (folder / "shared").mkdir()
            setup += [f"mount --bind '{shared}' '{folder}/shared'"]
        setup += [f"mount --rbind '{folder}' /tmp"]
        super().__init__(*ALL, setup="; ".join(setup))

    def start(
        self, command: Sequence[str], *, log: IO[bytes], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """In its /tmp, with nothing of this process's environment but where Python is."""
        own = {
            "HOME": "/tmp/home",
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(ROOT / "src"),
            "LANG": "C.UTF-8",
            **(env or {}),
        }
        kept_on = ["taskset", "--cpu-list", ",".join(map(str, self._cores))] if self._cores else []
        return self.popen(
            ["--wd=/tmp", *kept_on, *command], env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )

    def processes(self) -> list[psutil.Process]:
        """All of them but the first."""
        own = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != self.pid and os.stat(f"/proc/{process.pid}/ns/pid").st_ino == own:
                    found.append(process)
            except OSError:  # it has ended
                continue
        return found

    def kill(self, word: str) -> int:
        """Kill the processes whose command line has this word; returns how many."""
        number = 0
        for process in self.processes():
            try:
                if any(word in argument for argument in process.cmdline()):
                    process.kill()
                    number += 1
            except psutil.NoSuchProcess:
                continue
        return number


class Cable:
    """Joins machines. Both ends stay up while it is cut, as at a switch: what is sent is lost, and nobody is told."""

    def __init__(self, *machines: Machine) -> None:
        self._cable = Namespace(*ALL, setup="ip link set lo up")
        self._ports = []
        ip = lambda *words: self._cable.run("ip", *words)  # noqa: E731
        ip("link", "add", "switch", "type", "bridge", "forward_delay", "0")
        ip("link", "set", "switch", "up")
        for machine in machines:
            port = f"port-{machine.name}"[:15]
            self._ports.append(port)
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0")
            # Of the cable's network alone, and not its processes: the other end moves to a machine that we know by id.
            move = ["ip", "link", "set", "eth0", "netns", str(machine.pid)]
            subprocess.run(["nsenter", f"--target={self._cable.pid}", "--net", *move], check=True, timeout=WAIT_S)
            machine.run("ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
            machine.run("ip", "link", "set", "eth0", "up")
            ip("link", "set", port, "up")
        self.mend()

    def cut(self) -> None:
        for port in self._ports:
            self._cable.run("ip", "link", "set", port, "nomaster")

    def mend(self) -> None:
        for port in self._ports:
            self._cable.run("ip", "link", "set", port, "master", "switch")

    def slow(self, mbit_per_s: float) -> None:
        for port in self._ports:
            limits = ["rate", f"{mbit_per_s:g}mbit", "burst", "64kb", "latency", "400ms"]
            self._cable.run("tc", "qdisc", "replace", "dev", port, "root", "tbf", *limits)

    def close(self) -> None:
        self._cable.close()


def ray_start(
    machine: Machine, *options: str, cpus: int, log: IO[bytes], token: str, again: bool = False
) -> subprocess.Popen[Any]:
    """Ray's node on this machine, as docs/cluster.md says. `again`: whenever it ends, it is started again."""
    (machine.folder / "home" / ".ray").mkdir(exist_ok=True)
    (machine.folder / "home" / ".ray" / "auth_token").write_text(token)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={machine.address}"]
    command += [f"--num-cpus={cpus}", "--object-store-memory=200000000", "--disable-usage-stats", *options]
    if again:
        command = ["bash", "-c", 'while true; do "$@"; sleep 1; done', "service", *command]
    # Both machines have the memory of one, which others use too: Ray would end a worker here for what they take.
    env = {"RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": "1", "RAY_memory_monitor_refresh_ms": "0"}
    return machine.start(command, log=log, env=env)


def wait_until(holds: Any, *, within_s: float, what: str) -> float:
    """Returns the seconds that it took."""
    begun = time.monotonic()
    while not holds():
        if time.monotonic() - begun > within_s:
            raise TimeoutError(f"{what}: not within {within_s:g} s")
        time.sleep(0.25)
    return time.monotonic() - begun

"""Stands in for `python` where Ray starts a worker, or an engine its processes: has a fork server of the run start it,
and stays as long as it lives.

    python -I -S fork_client.py SOCKET COMMAND...

The process gets what this one has: arguments, environment, working directory, descriptors, cores, signal mask, limit
of open files. Signals are passed on, and this process ends as that one does. Whenever the fork server does not answer,
or will not fork, this process becomes COMMAND itself: a run without a fork server is slower, and nothing else.

Runs before anything is imported, so it loads the standard library only, and little of that.
"""

import json
import os
import resource
import select
import signal
import socket
import sys

ANSWER_S = {False: 20.0, True: 30.0}
"""The server may still be importing, which takes the process itself as long, and more where it has an engine (True).
Ray waits 60 s for a worker.
"""
FOR_ENGINES = "-engine"
CONTEXT, FOR_ENGINE = "--serialized-runtime-env-context=", '"LEEWAY_FORK_FOR_ENGINE"'
"""Of a worker of Ray's that has an engine."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    address, command = sys.argv[1], sys.argv[2:]
    if any(option.startswith(CONTEXT) and FOR_ENGINE in option for option in command):
        address += FOR_ENGINES
    inherited = _open_descriptors()
    # Until they can be passed on.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.settimeout(ANSWER_S[address.endswith(FOR_ENGINES)])
            server.connect(address)
            worker = _ask(server, command, blocked, inherited)
        except OSError:  # it is gone, or has no time, or there are more descriptors than can be sent
            worker = None
        if worker is not None:
            server.settimeout(None)
            _end_as(_stay(server, worker, blocked))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.execv(command[0], command)


def _ask(server: socket.socket, command: list[str], blocked: set[int], inherited: list[int]) -> int | None:
    """A descriptor of the process that was started (pidfd); None if the server does not fork.

    It forks only when it has this process's word that it still waits: otherwise both would become it.
    """
    request = {
        "command": command,
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "blocked": [int(number) for number in blocked],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "oom_score": _oom_score(),
        "cores": sorted(os.sched_getaffinity(0)),
        "numbers": inherited,
    }
    text = json.dumps(request).encode()
    socket.send_fds(server, [len(text).to_bytes(8, "big")], inherited)
    server.sendall(text)
    if not server.recv(1):
        return None
    server.settimeout(None)
    server.sendall(b"!")
    _, descriptors, _, _ = socket.recv_fds(server, 1, 1)
    return descriptors[0] if descriptors else None


def _open_descriptors() -> list[int]:
    """With the standard streams; the one that lists them is closed again."""
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    return sorted(number for number in listed if os.path.exists(f"/proc/self/fd/{number}"))


def _oom_score() -> str:
    with open("/proc/self/oom_score_adj") as file:
        return file.read()


def _stay(server: socket.socket, worker: int, blocked: set[int]) -> int | None:
    """Its exit code, negative for a signal; None if the server, its parent, did not live to tell."""

    def pass_on(number: int, _: object) -> None:
        try:
            signal.pidfd_send_signal(worker, number)
        except ProcessLookupError:  # it has just ended, which is about to be told
            pass

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if status := server.recv(16):
        return int(status)
    select.select([worker], [], [])  # readable when it has ended
    return None


def _end_as(code: int | None) -> None:
    """End with this exit code, or by the same signal."""
    if code is not None and code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(1 if code is None else code)


if __name__ == "__main__":
    main()

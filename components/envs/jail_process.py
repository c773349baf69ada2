"""The script of a jail: a warm interpreter that locks itself in and forks one process for every job.

    Leeway --control socket--> this process: own user, network and mounts; runs trusted code only
                                 |- job: process 1 of its own pid namespace, as nobody, with an empty folder, limits,
                                 |  and a list of allowed system calls: no fork, no exec, no socket
                                 '- ...

Started by `jail.py` as a file, so that it imports nothing of the package. The control socket (fd 0) says what to fork
and brings the ends of pipes for it. What the job is comes through those pipes: this process reads nothing that a model
or a data set wrote. Linux (x86-64, arm64), kernel 5.12 or newer, by calls of libc.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NoReturn

libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock while it calls, as `clone` needs it

NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x40000000  # mount, uts, ipc, user, net
NEW_PID, NEW_MOUNT = 0x20000000, 0x00020000  # of every job
MS_NOSUID_NODEV, MS_BIND_REC, MS_REC_PRIVATE, MNT_DETACH = 2 | 4, 4096 | 0x4000, 0x4000 | 0x40000, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, struct.pack("QQQQ", 1 | 2, 0, 0, 0)  # and nosuid
NEW_USER = 0x10000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
CLONE, PIVOT_ROOT = {"x86_64": (56, 155), "aarch64": (220, 41)}.get(platform.machine(), (0, 0))
NOBODY = 65534

DATA, LINK = 3, 4
"""Where a job finds its pipes: to Leeway (or none), and to the other process of a pair."""
TICK_S = 0.1
BOX = "/box"
"""The one folder that a job may write to, and where it is; /tmp too."""

LIBRARIES = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"]
FILES = ["/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
WARM = ["bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq"]
WARM += ["itertools", "math", "operator", "queue", "random", "re", "statistics", "string", "threading", "typing"]


class NoJail(Exception):
    pass


def load(path: Path) -> ModuleType:
    """A file as a module, without the package around it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise NoJail(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


calls = load(Path(__file__).with_name("jail_calls.py"))
for name in ("wire", "judge"):  # jobs imports them by these names
    load(Path(__file__).with_name(f"jail_{name}.py"))
jobs = load(Path(__file__).with_name("jail_jobs.py"))


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "r+b") as nowhere:
        os.dup2(nowhere.fileno(), 0)
    settings = json.loads(control.recv(2**20))
    try:
        uid = lock_in()
        import_all(settings["modules"], settings["prepare"], settings["path"])
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        see_libraries_only(settings["folder"], settings["path"] if settings["modules"] else [])
        zygote = Zygote(control, uid, proc)
    except NoJail as missing:
        control.send(f"missing: {missing}".encode())
        return
    control.send(b"ready")
    zygote.serve()


@dataclass
class Job:
    """The processes of one job, by pidfd: (what it does, its pid). Times in seconds; `used` as the kernel counted."""

    status: int
    limits: dict
    living: dict[int, tuple[str, int]] = field(default_factory=dict)
    ended: dict[str, dict] = field(default_factory=dict)
    stopped: str = ""
    wall_s: float = 0.0
    used_s: float = 0.0
    asleep_s: float = 0.0

    def stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason
        for pidfd in self.living:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


class Zygote:
    """Forks the jobs, and ends those that have had their time."""

    def __init__(self, control: socket.socket, uid: int, proc: int) -> None:
        self._control, self._uid, self._proc = control, uid, proc
        self._jobs: dict[int, Job] = {}  # by each descriptor that is watched for it
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._filter = calls.build_filter(platform.machine())
        self._own_bytes = int(self._read("self/statm", proc).split()[0]) * resource.getpagesize()
        jobs.warm_up()
        gc.collect()
        gc.freeze()  # a collection in a child would copy every page

    def serve(self) -> None:
        """Until Leeway is gone; the kernel then kills the jobs (PR_SET_PDEATHSIG)."""
        last = time.monotonic()
        while True:
            events = self._poll.poll(TICK_S * 1000 if self._jobs else None)
            for fd, _ in events:
                if fd == self._control.fileno():
                    if not self._begin():
                        return
                elif fd in self._jobs:
                    job = self._jobs[fd]
                    if fd == job.status:
                        job.stop("given up")
                    else:
                        self._reap(job, fd)
            now = time.monotonic()
            if now - last >= TICK_S:
                # Time in which this process itself did not run counts for nobody.
                self._watch_time(min(now - last, 2 * TICK_S))
                last = now

    def _begin(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, 2**16, 8)
        if not message:
            return False
        order = json.loads(message)
        status, data, *more = fds
        job = Job(status, order["limits"])
        if order["kind"] == "pair":
            near, far = (end.detach() for end in socket.socketpair())
            self._fork(job, "judge", {DATA: data, LINK: near}, {**job.limits, **order["judge"]})
            self._fork(job, "judged", {LINK: far}, job.limits)
            os.close(near)
            os.close(far)
        else:
            self._fork(job, order["kind"], {DATA: data, **({1: more[0]} if more else {})}, job.limits)
        for fd in (data, *more):
            os.close(fd)
        self._jobs[status] = job
        self._poll.register(status, 0)  # an error: Leeway has closed its end
        return True

    def _fork(self, job: Job, kind: str, fds: dict[int, int], limits: dict) -> None:
        # What os.fork does, with a flag for own namespaces: a process can have only one new pid namespace by unshare.
        ctypes.pythonapi.PyOS_BeforeFork()
        namespaces = NEW_PID | (NEW_MOUNT if limits["disk_mb"] else 0)
        pid = libc.syscall(CLONE, namespaces | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            self._be_job(kind, fds, limits)
        reason = ctypes.get_errno()
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        if pid < 0:
            job.ended[kind] = {"exit": None, "used_s": 0.0}
            job.stop(f"no process could be made: {os.strerror(reason)}")
            return
        pidfd = os.pidfd_open(pid)
        job.living[pidfd] = (kind, pid)
        self._jobs[pidfd] = job
        self._poll.register(pidfd, select.POLLIN)

    def _be_job(self, kind: str, fds: dict[int, int], limits: dict) -> NoReturn:
        code = 70
        try:
            # Should this process end, the jobs do. Here and after the change of user, which resets it.
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if limits["disk_mb"]:
                options = f"size={limits['disk_mb']}m,nr_inodes=4096,mode=1777".encode()
                call("mount", b"tmpfs", BOX.encode(), b"tmpfs", MS_NOSUID_NODEV, options)
            os.chdir(BOX)
            place_fds(fds)
            give_up_rights(self._uid, limits, self._own_bytes, self._filter)
            code = jobs.KINDS[kind](DATA, LINK)
        except BaseException:  # a fork that came back from here would be a second zygote
            traceback.print_exc()
        finally:
            os._exit(code)

    def _reap(self, job: Job, pidfd: int) -> None:
        kind, pid = job.living.pop(pidfd)
        _, status, usage = os.wait4(pid, 0)
        job.ended[kind] = {"exit": os.waitstatus_to_exitcode(status), "used_s": usage.ru_utime + usage.ru_stime}
        self._forget(pidfd)
        if kind == "judge":  # its word is the last one
            for other in job.living:
                signal.pidfd_send_signal(other, signal.SIGKILL)
        if not job.living:
            try:
                os.write(job.status, json.dumps({"stopped": job.stopped, "ended": job.ended}).encode())
            except BrokenPipeError:
                pass  # Leeway has given up
            self._forget(job.status)

    def _forget(self, fd: int) -> None:
        self._poll.unregister(fd)
        del self._jobs[fd]
        os.close(fd)

    def _watch_time(self, passed_s: float) -> None:
        """End who sleeps too long, whatever the machine's load; who computes too long, the kernel ends (RLIMIT_CPU)."""
        for job in {id(job): job for job in self._jobs.values()}.values():
            job.wall_s += passed_s
            threads = [thread for _, pid in job.living.values() for thread in self._threads(pid)]
            before, job.used_s = job.used_s, sum(used_s for used_s, _ in threads)
            # What waits now is not in the kernel's sum before it runs, and what another guest of this host takes never.
            if not any(wants_to_run for _, wants_to_run in threads):
                job.asleep_s += max(0.0, passed_s - max(0.0, job.used_s - before))
            if job.asleep_s > job.limits["timeout_s"]:
                job.stop("asleep")
            elif job.wall_s > job.limits["backstop_s"]:
                job.stop("wall clock")

    def _threads(self, pid: int) -> Iterator[tuple[float, bool]]:
        """Of each thread: seconds that it has computed, or wanted to while others had the processors; and whether it
        computes, or wants to, at this moment.
        """
        folder = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        try:
            for thread in os.listdir(folder):
                try:
                    used, waited, _ = self._read(f"{thread}/schedstat", folder).split()
                    # Its name, before the state, is its own choice.
                    state = self._read(f"{thread}/stat", folder).rpartition(")")[2].split()[0]
                    yield (int(used) + int(waited)) / 1e9, state == "R"
                except (FileNotFoundError, ProcessLookupError):
                    pass  # the thread has ended
        finally:
            os.close(folder)

    def _read(self, path: str, folder: int) -> str:
        with open(os.open(path, os.O_RDONLY, dir_fd=folder)) as file:
            return file.read()


def lock_in() -> int:
    """New namespaces for this process; returns the user id that jobs are to have in them."""
    if sys.platform != "linux" or not calls.is_supported(platform.machine()):
        raise NoJail(f"it needs Linux on x86-64 or arm64, this is {sys.platform} on {platform.machine()}")
    uid, gid = os.getuid(), os.getgid()
    map_users = mapper_of_root() if uid == 0 else None
    if libc.unshare(NEW_NAMESPACES):
        reason = os.strerror(ctypes.get_errno())
        raise NoJail(
            f"own user, process, file and network namespaces are refused ({reason}); allow user namespaces "
            "(sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone) or the container's seccomp profile"
        )
    try:
        if map_users is not None:
            # Jobs run as nobody: root's files are then not their own, and the limit on threads holds.
            map_users()
            return NOBODY
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        return uid
    except OSError as error:
        raise NoJail(f"no other user can be taken in a new user namespace: {error}") from None


def mapper_of_root() -> Callable[[], None]:
    """A second user can be mapped only from outside of a user namespace: by a process that is forked before."""
    me, (ready, go) = os.getpid(), os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(go)
        error = 1
        if os.read(ready, 1):
            try:
                for kind in ("uid", "gid"):
                    Path(f"/proc/{me}/{kind}_map").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1")
                error = 0
            except OSError as failed:
                error = failed.errno or 1
        os._exit(error)

    def map_users() -> None:
        os.write(go, b"x")
        os.close(go)
        _, status = os.waitpid(helper, 0)
        if status:
            raise OSError(os.strerror(os.waitstatus_to_exitcode(status)))

    os.close(ready)
    return map_users


def import_all(names: list[str], prepare: list[str], path: list[str]) -> None:
    """Import what jobs will use: a module's name, or the path of a file. Then call what is to prepare them."""
    for name in WARM:
        importlib.import_module(name)
    sys.path += [place for place in path if place not in sys.path] if names else []
    for name in names:
        try:
            load(Path(name)) if name.endswith(".py") else importlib.import_module(name)
        except Exception as error:
            raise NoJail(f"{name} cannot be imported: {type(error).__name__}: {error}") from None
    if prepare:
        function, *arguments = prepare
        try:
            jobs.find(function)(*arguments)
        except Exception as error:
            raise NoJail(f"{function}({', '.join(arguments)}) raised {type(error).__name__}: {error}") from None
    if len(os.listdir("/proc/self/task")) > 1:
        raise NoJail(f"{', '.join(names)}: importing them starts threads, which a fork would lose")


def see_libraries_only(folder: str, path: list[str]) -> None:
    """The root becomes a small read-only tree with the system's and Python's libraries, and an empty folder.

    So there is no home, no data set, no /proc and no socket to be seen.
    """
    packages = [place for place in path if os.path.basename(place) in ("site-packages", "dist-packages")]
    places = [*LIBRARIES, os.path.join(sys.base_prefix, "lib"), os.path.dirname(os.__file__), *packages, *FILES]
    call("mount", None, b"/", None, MS_REC_PRIVATE, None)
    call("mount", b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID_NODEV, b"size=4m,mode=755")
    bound: list[str] = []
    for place in places:
        inside = folder + place
        if os.path.lexists(inside) or not os.path.exists(place) or any(place.startswith(b + "/") for b in bound):
            continue
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(place):
            os.symlink(os.readlink(place), inside)
            continue
        if os.path.isdir(place):
            os.mkdir(inside)
        else:
            open(inside, "x").close()
        call("mount", place.encode(), inside.encode(), None, MS_BIND_REC, None)
        bound.append(place)
    os.mkdir(folder + BOX)
    if not os.path.lexists(folder + "/tmp"):  # unless packages are there
        os.symlink(BOX, folder + "/tmp")
    if libc.syscall(MOUNT_SETATTR, AT_FDCWD, folder.encode(), AT_RECURSIVE, READ_ONLY, len(READ_ONLY)):
        reason = os.strerror(ctypes.get_errno())
        raise NoJail(f"file systems cannot be made read-only: {reason} (kernel 5.12 or newer)")
    os.chdir(folder)
    if libc.syscall(PIVOT_ROOT, b".", b"."):
        raise NoJail(f"pivot_root is refused: {os.strerror(ctypes.get_errno())}")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def place_fds(fds: dict[int, int]) -> None:
    """The job's pipes at their numbers, nothing at 0 to 2 otherwise, and no other descriptor."""
    high = {target: os.dup2(fd, 100 + target) for target, fd in fds.items()}
    nowhere = os.open(os.devnull, os.O_RDWR)
    for target in range(3):
        os.dup2(high.get(target, nowhere), target)
    for target in (DATA, LINK):
        if target in high:
            os.dup2(high[target], target)
        else:
            os.dup2(nowhere, target)
    os.closerange(LINK + 1, 2**16)


def give_up_rights(uid: int, limits: dict, own_bytes: int, program: bytes) -> None:
    if uid == NOBODY and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    # Limits count by user and user namespace: without one of its own, jobs that run at a time would share the limit on
    # threads. No user is mapped in it, so that there is nobody to become.
    call("unshare", NEW_USER)
    header, none = struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", *[0] * 6)
    call("capset", header, none)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for limit, value in {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: own_bytes + limits["memory_mb"] * 2**20,
        resource.RLIMIT_NPROC: limits["threads"],
        resource.RLIMIT_FSIZE: limits["disk_mb"] * 2**20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_SIGPENDING: 64,
        resource.RLIMIT_MSGQUEUE: 0,
    }.items():
        resource.setrlimit(limit, (value, value))
    code = ctypes.create_string_buffer(program, len(program))
    filter_of = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    call("prctl", PR_SET_SECCOMP, 2, ctypes.c_void_p(ctypes.addressof(filter_of)), 0, 0)


def call(name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments):
        raise NoJail(f"{name} is refused: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()

"""The script of a sandbox: locks itself in, runs one program, and says how that ended.

    parent (outside) -> this process -> first process of the new namespaces -> the program, as a separate user

Started by `sandbox.py` as a file, so that it imports nothing of the package. stdin: the job as JSON; stdout: the
program's; stderr: one line, the secret when the program finished, else the reason. Linux (x86-64, arm64), kernel 5.12
or newer, by calls of libc: util-linux's `unshare` is not everywhere.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import platform
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)

NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000  # mount, ipc, user, pid, net
MS_REC_PRIVATE = 0x4000 | 0x40000
MS_NOSUID_NODEV = 2 | 4
MS_BIND = 4096
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 38, 22, 24
NOBODY = 65534

# Numbers of system calls that a program under test has no use for. Unix sockets are reached through the file system,
# whatever the network namespace: so there are no sockets at all.
REFUSED_CALLS = {
    "x86_64": (0xC000003E, [41, 53, 101, 155, 165, 166, 246, 250, 272, 298, 308, 321, 323, 425, 428, 429, 442]),
    "aarch64": (0xC00000B7, [198, 199, 117, 41, 40, 39, 104, 219, 97, 241, 268, 280, 282, 425, 428, 429, 442]),
}


class NoSandbox(Exception):
    pass


def main(folder: str) -> None:
    job = json.loads(sys.stdin.buffer.read())
    verdict = os.fdopen(os.dup(2), "w")
    with open(os.devnull, "r+b") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        uid = lock_in()
    except NoSandbox as missing:
        print(f"no sandbox: {missing}", file=verdict, flush=True)
        return
    # If the parent dies, this process dies too. Set it now, because a change of privileges resets it.
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    first = os.fork()
    if first == 0:  # process 1 of its namespace: when it ends, the kernel kills all others there
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        be_first_process(job, folder, uid, verdict)
        os._exit(0)
    os.waitpid(first, 0)


def be_first_process(job: dict, folder: str, uid: int, verdict: io.TextIOWrapper) -> None:
    report_in, report_out = os.pipe()
    try:
        library = make_read_only(folder, job["disk_mb"])
    except NoSandbox as missing:
        print(f"no sandbox: {missing}", file=verdict, flush=True)
        return
    program = os.fork()
    if program == 0:
        os.close(report_in)
        os.close(verdict.fileno())
        run(job, folder, library, uid, report_out)
        os._exit(0)
    os.close(report_out)
    deadline = time.monotonic() + job["timeout_s"]
    while os.waitpid(program, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            print("timeout", file=verdict, flush=True)
            return
        time.sleep(0.005)
    os.set_blocking(report_in, False)
    try:
        report = os.read(report_in, 4096).decode(errors="replace")
    except BlockingIOError:
        report = ""
    print(report or "the program was killed (memory, CPU time) or exited early", file=verdict, flush=True)


def lock_in() -> int:
    """New namespaces for what is forked from here; returns the user id that the program is to have."""
    if sys.platform != "linux" or platform.machine() not in REFUSED_CALLS:
        raise NoSandbox(f"it needs Linux on x86-64 or arm64, this is {sys.platform} on {platform.machine()}")
    uid, gid = os.getuid(), os.getgid()
    map_users = mapper_of_root() if uid == 0 else None
    if libc.unshare(NEW_NAMESPACES):
        reason = os.strerror(ctypes.get_errno())
        raise NoSandbox(
            f"own user, process, file and network namespaces are refused ({reason}); allow user namespaces "
            "(sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone) or the container's seccomp profile"
        )
    try:
        if map_users is not None:
            # The program runs as nobody: root's files are then not its own, and limits on processes hold.
            map_users()
            return NOBODY
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{uid} {uid} 1")
        write("/proc/self/gid_map", f"{gid} {gid} 1")
        return uid
    except OSError as error:
        raise NoSandbox(f"no other user can be taken in a new user namespace: {error}") from None


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
                    write(f"/proc/{me}/{kind}_map", f"0 0 1\n{NOBODY} {NOBODY} 1")
                error = 0
            except OSError as failed:
                error = failed.errno or 1
        os._exit(error)

    def map_users() -> None:
        os.write(go, b"x")
        _, status = os.waitpid(helper, 0)
        if status:
            raise OSError(os.strerror(os.waitstatus_to_exitcode(status)))

    os.close(ready)
    return map_users


def make_read_only(folder: str, disk_mb: int) -> list[str]:
    """Everything becomes read-only but `folder`, a small file system in memory. Returns where the library then is.

    The library is bound into the folder: its own place may be closed to other users (/root).
    """
    call("mount", None, b"/", None, MS_REC_PRIVATE, None)
    read_only = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    if libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, len(read_only)):
        raise NoSandbox(
            f"file systems cannot be made read-only: {os.strerror(ctypes.get_errno())} (kernel 5.12 or newer)"
        )
    options = f"size={disk_mb}m,nr_inodes=4096,mode=1777".encode()
    call("mount", b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID_NODEV, options)
    place = os.path.join(folder, ".python")
    os.mkdir(place, 0o755)
    call("mount", os.path.dirname(os.__file__).encode(), place.encode(), None, MS_BIND, None)
    # Other processes cannot be seen, where the system lets /proc be mounted anew; they are out of reach in any case.
    libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID_NODEV, None)
    return [place, os.path.join(place, "lib-dynload")]


def run(job: dict, folder: str, library: list[str], uid: int, report: int) -> None:
    """Give up every right, then run the program; the secret goes into `report` when it has come to its end."""
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    give_up_rights(uid, job)
    sys.path[:] = [folder, *library]
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):  # packages that are loaded look for their other modules in the new place
        if path := getattr(module, "__path__", None):
            module.__path__ = [p.replace(os.path.dirname(os.__file__), library[0], 1) for p in path]
    sys.argv[:] = ["program"]
    os.environ.clear()
    sys.stdin = io.TextIOWrapper(io.BytesIO(job["stdin"].encode()))
    secret, then, program, me = job.pop("secret"), job.pop("then"), job.pop("program"), os.getpid()
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(program, "program", "exec"), names)
        if then:
            exec(compile(then, "test", "exec"), names)
    except SystemExit as end:
        if then or end.code not in (None, 0):  # leaving early is no way past a test
            secret = f"SystemExit: {end.code}"
    except BaseException as error:
        secret = "".join(traceback.format_exception_only(error))[-1000:]
    finally:
        try:
            sys.stdout.flush()
        except Exception:
            pass
        if os.getpid() == me:  # a copy of the process that the program forked says nothing
            os.write(report, secret.encode(errors="replace"))
        os._exit(0)


def give_up_rights(uid: int, job: dict) -> None:
    limits = {
        resource.RLIMIT_CPU: job["cpu_s"],
        resource.RLIMIT_AS: job["memory_mb"] * 2**20,
        resource.RLIMIT_NPROC: job["processes"],
        resource.RLIMIT_FSIZE: job["disk_mb"] * 2**20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if uid == NOBODY and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    # Without root's user id the change has dropped all capabilities; a normal user's are dropped here.
    header, none = struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", *[0] * 6)
    call("capset", header, none)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    refuse_calls()


def refuse_calls() -> None:
    """A seccomp filter: the listed calls fail with EPERM, calls of another architecture kill the process."""
    architecture, numbers = REFUSED_CALLS[platform.machine()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    kill, refuse, allow = 0x80000000, 0x00050000 | 1, 0x7FFF0000
    steps = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (answer, 0, 0, kill),
        (load, 0, 0, 0),
        (at_least, len(numbers) + 1, 0, 0x40000000),  # the x32 numbers of x86-64
        *((equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)),
        (answer, 0, 0, allow),
        (answer, 0, 0, refuse),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    call("prctl", PR_SET_SECCOMP, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0)


def call(name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments):
        raise NoSandbox(f"{name} is refused: {os.strerror(ctypes.get_errno())}")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main(sys.argv[1])

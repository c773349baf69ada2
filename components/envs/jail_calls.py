"""The system calls that a jailed process may make: what CPython and libc need, and nothing else.

A list of what is allowed, as Docker's default profile and nsjail's policies are: a call that a later kernel invents is
refused until somebody puts it here. Loaded as a file by `jail_process.py`: imports nothing of the package.
"""

from __future__ import annotations

import struct

# name: number on x86-64, number on arm64; None where there is no such call.
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # files that are open, and those that the file system lets it open
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "open": (2, None), "openat": (257, 56), "close": (3, 57), "close_range": (436, 436), "lseek": (8, 62),
    "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
    "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "readlink": (89, None),
    "readlinkat": (267, 78), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "umask": (95, 166), "utimensat": (280, 88),
    "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47), "fsync": (74, 82), "fdatasync": (75, 83),
    "flock": (73, 32), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "sendfile": (40, 71),
    "copy_file_range": (326, 285), "listxattr": (194, 11), "llistxattr": (195, 12), "getxattr": (191, 8),
    # waiting
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "eventfd2": (290, 19),
    "pipe": (22, None), "pipe2": (293, 59), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "wait4": (61, 260), "waitid": (247, 95), "pause": (34, None), "alarm": (37, None), "getitimer": (36, 102),
    "setitimer": (38, 103), "restart_syscall": (219, 128), "sched_yield": (24, 124),
    # memory of its own
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "brk": (12, 214),
    "madvise": (28, 233), "msync": (26, 227), "mincore": (27, 232),
    # threads and signals
    "futex": (202, 98), "set_robust_list": (273, 99), "get_robust_list": (274, 100), "set_tid_address": (218, 96),
    "rseq": (334, 293), "membarrier": (324, 283), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "tgkill": (234, 131), "tkill": (200, 130),
    "kill": (62, 129), "exit": (60, 93), "exit_group": (231, 94),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    # what the time is, and who it is
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "times": (100, 153), "getrusage": (98, 165), "getrlimit": (97, 163), "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "uname": (63, 160), "sysinfo": (99, 179), "getrandom": (318, 278), "getcpu": (309, 168),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getpgrp": (111, None), "getpgid": (121, 155),
    "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "arch_prctl": (158, None),
}  # fmt: skip

# Allowed with some values of one argument: (call, index of the argument, values of its lower 32 bits).
_ALLOWED_WITH: dict[str, tuple[tuple[int, int], int, list[int]]] = {
    "ioctl": ((16, 29), 1, [0x5401, 0x5413, 0x541B, 0x5450, 0x5451]),  # is it a terminal, its size, FIONREAD, CLOEXEC
    "prctl": ((157, 167), 0, [15, 16, 0x53564D41]),  # names of threads and of memory
    "fcntl": ((72, 25), 1, [0, 1, 2, 3, 4, 1030]),  # duplicate, flags
}

_CLONE = (56, 220)
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020080  # the flags of all new namespaces
_CLONE3 = (435, 435)

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _EPERM, _ENOSYS = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16


def is_supported(machine: str) -> bool:
    """Whether there is a list for `platform.machine()`."""
    return machine in _ARCHITECTURES


def build_filter(machine: str) -> bytes:
    """The BPF program for seccomp: instructions of 8 bytes.

    Calls that are not listed fail with EPERM. `clone` makes threads only, no process and no namespace; `clone3` hides
    its flags in memory, so it "does not exist" (ENOSYS) and libc falls back to `clone`. Calls of another architecture
    kill the process.
    """
    column, architecture = _ARCHITECTURES[machine]
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, architecture),
        (_ANSWER, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, 0x40000000),  # the x32 numbers of x86-64
        (_ANSWER, 0, 0, _EPERM),
        (_EQUAL, 0, 1, _CLONE3[column]),
        (_ANSWER, 0, 0, _ENOSYS),
        (_EQUAL, 0, 6, _CLONE[column]),
        (_LOAD, 0, 0, _ARGUMENTS_AT),
        (_ANY_BIT, 0, 1, _CLONE_NEW),
        (_ANSWER, 0, 0, _EPERM),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_ANSWER, 0, 0, _EPERM),
        (_ANSWER, 0, 0, _ALLOW),
    ]
    for numbers, argument, values in _ALLOWED_WITH.values():
        steps += [
            (_EQUAL, 0, len(values) + 3, numbers[column]),
            (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument),
            *((_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)),
            (_ANSWER, 0, 0, _EPERM),
            (_ANSWER, 0, 0, _ALLOW),
        ]
    for numbers in _ALLOWED.values():
        number = numbers[column]
        if number is not None:
            steps += [(_EQUAL, 0, 1, number), (_ANSWER, 0, 0, _ALLOW)]
    steps.append((_ANSWER, 0, 0, _EPERM))
    return b"".join(struct.pack("HBBI", *step) for step in steps)

"""Runs one program that a model wrote, in a process that can compute and do nothing else.

A script for `python -I`, which `hf_twell.evaluation.sandbox` starts; it imports nothing of the package. Standard input
has a line with a secret, then the program. Standard output gets the secret and how the program ended.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys

# What a computation asks of the kernel, by its numbers on x86_64 and aarch64. All else is refused: sockets, new
# processes and threads, signals, changes to files. openat is let through for reading alone, which the filter sees to.
SYSTEM_CALLS = {
    "read": (0, 63),
    "write": (1, 64),
    "open": (2, None),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "poll": (7, None),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None),
    "select": (23, None),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "exit": (60, 93),
    "uname": (63, 160),
    "getcwd": (79, 17),
    "readlink": (89, None),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "time": (201, None),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "getdents64": (217, 61),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "openat": (257, 56),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "getrandom": (318, 278),
    "statx": (332, 291),
    "rseq": (334, 293),
    "faccessat2": (439, 439),
    "pselect6": (None, 72),
    "ppoll": (None, 73),
}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# <linux/filter.h>, <linux/seccomp.h>: offsets are those of struct seccomp_data on a little-endian machine.
LOAD, JUMP_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_TMPFILE & ~os.O_DIRECTORY


def filter_program(machine: str) -> bytes:
    """The kernel's filter: instructions of code, jumps (if true, if false) and operand."""
    code = [(LOAD, 0, 0, ARCHITECTURE), (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, KILL)]
    code += [(LOAD, 0, 0, NUMBER)]
    for name, (on_x86_64, on_aarch64) in SYSTEM_CALLS.items():
        number = on_x86_64 if machine == "x86_64" else on_aarch64
        if number is None:
            continue
        if name in ("open", "openat"):
            flags = ARGUMENTS + 8 * (name == "openat") + 8
            code += [(JUMP_EQUAL, 0, 4, number), (LOAD, 0, 0, flags), (JUMP_ANY_BIT, 0, 1, WRITING)]
            code += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
        else:
            code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    code += [(RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def confine(memory: int, seconds: int) -> None:
    """Bound this process for good, to so many bytes of address space and seconds of processor time."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # by a signal, then for good
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = filter_program(platform.machine())

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    program = Program(len(code) // 8, code)
    for option, first, second in (
        (PR_SET_PDEATHSIG, signal.SIGKILL, None),
        (PR_SET_NO_NEW_PRIVS, 1, None),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program)),
    ):
        if prctl(option, first, second, 0, 0):
            raise OSError(ctypes.get_errno(), f"the kernel takes no system-call filter (prctl {option})")


def main() -> None:
    secret, program = sys.stdin.buffer.read().decode().split("\n", 1)
    memory, seconds = map(int, sys.argv[1:])
    answer = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    say, leave = os.write, os._exit  # a program may replace the ones in `os`
    try:
        confine(memory, seconds)
    except OSError as error:
        say(answer, f"{secret} unconfined {error}".encode())
        leave(1)
    try:
        exec(compile(program, "program", "exec"), {"__name__": "program"})
        how = "passed"
    except BaseException as error:  # sys.exit and KeyboardInterrupt too: only a program that comes to its end passes
        how = f"raised {type(error).__name__}"
    say(answer, f"{secret} {how}".encode())
    leave(0)


if __name__ == "__main__":
    main()

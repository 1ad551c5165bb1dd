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

# What a computation asks of the kernel, by its number on each machine. All else is refused: sockets, new processes and
# threads, signals, changes to files. openat is let through for reading alone, which the filter sees to.
SYSTEM_CALLS = {
    "x86_64": {
        "read": 0,
        "write": 1,
        "open": 2,
        "close": 3,
        "stat": 4,
        "fstat": 5,
        "lstat": 6,
        "poll": 7,
        "lseek": 8,
        "mmap": 9,
        "mprotect": 10,
        "munmap": 11,
        "brk": 12,
        "rt_sigaction": 13,
        "rt_sigprocmask": 14,
        "rt_sigreturn": 15,
        "pread64": 17,
        "readv": 19,
        "writev": 20,
        "access": 21,
        "select": 23,
        "sched_yield": 24,
        "mremap": 25,
        "madvise": 28,
        "nanosleep": 35,
        "getpid": 39,
        "exit": 60,
        "uname": 63,
        "getcwd": 79,
        "readlink": 89,
        "gettimeofday": 96,
        "getuid": 102,
        "getgid": 104,
        "geteuid": 107,
        "getegid": 108,
        "sigaltstack": 131,
        "gettid": 186,
        "time": 201,
        "futex": 202,
        "sched_getaffinity": 204,
        "getdents64": 217,
        "restart_syscall": 219,
        "clock_gettime": 228,
        "clock_getres": 229,
        "clock_nanosleep": 230,
        "exit_group": 231,
        "openat": 257,
        "newfstatat": 262,
        "readlinkat": 267,
        "faccessat": 269,
        "getrandom": 318,
        "statx": 332,
        "rseq": 334,
        "faccessat2": 439,
    },
    "aarch64": {
        "getcwd": 17,
        "faccessat": 48,
        "openat": 56,
        "close": 57,
        "getdents64": 61,
        "lseek": 62,
        "read": 63,
        "write": 64,
        "readv": 65,
        "writev": 66,
        "pread64": 67,
        "pselect6": 72,
        "ppoll": 73,
        "readlinkat": 78,
        "newfstatat": 79,
        "fstat": 80,
        "exit": 93,
        "exit_group": 94,
        "futex": 98,
        "nanosleep": 101,
        "clock_gettime": 113,
        "clock_getres": 114,
        "clock_nanosleep": 115,
        "sched_getaffinity": 123,
        "sched_yield": 124,
        "restart_syscall": 128,
        "sigaltstack": 132,
        "rt_sigaction": 134,
        "rt_sigprocmask": 135,
        "rt_sigreturn": 139,
        "uname": 160,
        "gettimeofday": 169,
        "getpid": 172,
        "getuid": 174,
        "geteuid": 175,
        "getgid": 176,
        "getegid": 177,
        "gettid": 178,
        "brk": 214,
        "munmap": 215,
        "mremap": 216,
        "mmap": 222,
        "mprotect": 226,
        "madvise": 233,
        "getrandom": 278,
        "statx": 291,
        "rseq": 293,
        "faccessat2": 439,
    },
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
    for name, number in SYSTEM_CALLS[machine].items():
        if name in ("open", "openat"):
            flags = ARGUMENTS + 8 * (name == "openat") + 8
            code += [(JUMP_EQUAL, 0, 4, number), (LOAD, 0, 0, flags), (JUMP_ANY_BIT, 0, 1, WRITING)]
            code += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
        else:
            code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    code += [(RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def confine(memory: int, seconds: int) -> None:
    """Bound this process for good.

    Args:
        memory: address space in bytes.
        seconds: of processor time.
    """
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

"""The seccomp filter: the system calls that a program may make. All others fail.

Not among them is `setsockopt`: larger buffers of sockets are memory that no limit of a process
counts.

A program stays one process: it may start threads, but no process and no other program. That makes
its limits hold for all it does, and leaves nothing to look for at its end.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from .linux_kernel import call_kernel, find_machine_index

_ALLOWED_CALLS = """
access 21 -; alarm 37 -; brk 12 214; capget 125 90; chdir 80 49; clock_getres 229 114
clock_gettime 228 113; clock_nanosleep 230 115; close 3 57; close_range 436 436
copy_file_range 326 285; dup 32 23; dup2 33 -; dup3 292 24; epoll_create 213 -
epoll_create1 291 20; epoll_ctl 233 21; epoll_pwait 281 22; epoll_wait 232 -; eventfd 284 -
eventfd2 290 19; exit 60 93; exit_group 231 94; faccessat 269 48; faccessat2 439 439
fadvise64 221 223; fallocate 285 47; fchdir 81 50; fdatasync 75 83; flock 73 32; fstat 5 80
fstatfs 138 44; fsync 74 82; ftruncate 77 46; futex 202 98; getcpu 309 168; getcwd 79 17
getdents 78 -; getdents64 217 61; getegid 108 177; geteuid 107 175; getgid 104 176
getgroups 115 158; getitimer 36 102; getpeername 52 205; getpgid 121 155; getpgrp 111 -
getpid 39 172; getppid 110 173; getpriority 140 141; getrandom 318 278; getresgid 120 150
getresuid 118 148; getrlimit 97 163; getrusage 98 165; getsid 124 156; getsockname 51 204
getsockopt 55 209; gettid 186 178; gettimeofday 96 169; getuid 102 174; link 86 -; linkat 265 37
lseek 8 62; lstat 6 -; madvise 28 233; membarrier 324 283; mincore 27 232; mkdir 83 -
mkdirat 258 34; mmap 9 222; mprotect 10 226; mremap 25 216; msync 26 227; munmap 11 215
nanosleep 35 101; newfstatat 262 79; pause 34 -; pipe 22 -; pipe2 293 59; poll 7 -; ppoll 271 73
pread64 17 67; preadv 295 69; preadv2 327 286; pselect6 270 72; pwrite64 18 68; pwritev 296 70
pwritev2 328 287; read 0 63; readlink 89 -; readlinkat 267 78; readv 19 65; recvfrom 45 207
rename 82 -; renameat 264 38; renameat2 316 276; restart_syscall 219 128; rmdir 84 -; rseq 334 293
rt_sigaction 13 134; rt_sigpending 127 136; rt_sigprocmask 14 135; rt_sigreturn 15 139
rt_sigsuspend 130 133; rt_sigtimedwait 128 137; sched_get_priority_max 146 125
sched_get_priority_min 147 126; sched_getaffinity 204 123; sched_getparam 143 121
sched_getscheduler 145 120; sched_yield 24 124; select 23 -; sendfile 40 71; sendto 44 206
set_robust_list 273 99; set_tid_address 218 96; setitimer 38 103; setrlimit 160 164
shutdown 48 210; sigaltstack 131 132; stat 4 -; statfs 137 43; statx 332 291
symlink 88 -; symlinkat 266 36; sysinfo 99 179; time 201 -; times 100 153; umask 95 166
uname 63 160; unlink 87 -; unlinkat 263 35; wait4 61 260; waitid 247 95; write 1 64; writev 20 66
"""
# These seem to succeed and do nothing: `shutil.copy` wants them, and Landlock does not cover them.
_PRETENDED_CALLS = """
chmod 90 -; fchmod 91 52; fchmodat 268 53; fchmodat2 452 452; futimesat 261 -; utime 132 -
utimensat 280 88; utimes 235 -
"""
_CONDITIONAL_CALLS = """
clone 56 220; fcntl 72 25; ioctl 16 29; kill 62 129; open 2 -; openat 257 56; prctl 157 167
prlimit64 302 261; socketpair 53 199; tgkill 234 131
"""
_FIRST_NEW = 424  # calls from here on are so new that C libraries can do without them

_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_SET_MODE_FILTER = 1
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16

_CLONE_THREAD = 0x10000
_O_TRUNC, _O_ACCMODE = 0x200, 0x3
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF
_PR_SET_NAME, _PR_GET_NAME = 15, 16
# What asks for the state of a terminal or a pipe, and the flags of a file.
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# Not among them: F_SETOWN and F_SETSIG, which have the kernel send signals to any process.
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032, 1034)

ArgumentCondition = tuple[int, int, tuple[int, ...]]  # argument, mask, and what may be left of it


def install_filter(pid: int) -> None:
    """Confine this process for good to the system calls that a program may make.

    Args:
        pid: the process's own id, the only one that it may send signals to.

    Raises:
        OSError: if the kernel refuses.
    """
    program = _assemble_filter(pid, find_machine_index())
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    call_kernel("seccomp", _SET_MODE_FILTER, 0, header)


def _argument_conditions(pid: int) -> dict[str, list[ArgumentCondition]]:
    """Return what the arguments of conditional system calls must be. Only the low 32 bits count:
    these arguments are C ints, or flags that fit in one."""
    whole = 0xFFFFFFFF
    # To open for reading and truncate needs no right to write from older Landlocks.
    flags = tuple(f | t for t in (0, _O_TRUNC) for f in range(4) if f or not t)
    return {
        "clone": [(0, _CLONE_THREAD, (_CLONE_THREAD,))],
        "fcntl": [(1, whole, _FCNTLS)],
        "ioctl": [(1, whole, _IOCTLS)],
        "kill": [(0, whole, (pid,))],
        "open": [(1, _O_TRUNC | _O_ACCMODE, flags)],
        "openat": [(2, _O_TRUNC | _O_ACCMODE, flags)],
        "prctl": [(0, whole, (_PR_SET_NAME, _PR_GET_NAME))],
        "prlimit64": [(0, whole, (0, pid))],
        # Datagrams can be sent to any Unix socket there is, a connected stream's cannot.
        "socketpair": [(0, whole, (_AF_UNIX,)), (1, _SOCK_TYPE, (_SOCK_STREAM,))],
        "tgkill": [(0, whole, (pid,))],
    }


def _assemble_filter(pid: int, machine: int) -> bytes:
    """Assemble the filter as a BPF program; see
    https://docs.kernel.org/userspace-api/seccomp_filter.html"""
    code = [
        _encode_instruction(_LOAD, _ARCH_OFFSET),
        _encode_instruction(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _encode_instruction(_RETURN, _KILL_PROCESS),  # 32-bit system calls
        _encode_instruction(_LOAD, _NUMBER_OFFSET),
    ]
    for table, answer in ((_ALLOWED_CALLS, _ALLOW), (_PRETENDED_CALLS, _ERRNO | 0)):
        for number in _parse_syscall_table(table, machine).values():
            code.append(_encode_instruction(_JUMP_EQUAL, number, 0, 1))
            code.append(_encode_instruction(_RETURN, answer))
    conditions = _argument_conditions(pid)
    for name, number in _parse_syscall_table(_CONDITIONAL_CALLS, machine).items():
        body = [step for condition in conditions[name] for step in _assemble_condition(*condition)]
        code += [
            _encode_instruction(_JUMP_EQUAL, number, 0, len(body) + 1),
            *body,
            _encode_instruction(_RETURN, _ALLOW),
        ]
    code += [
        _encode_instruction(_JUMP_GREATER_EQUAL, _FIRST_NEW, 1, 0),
        _encode_instruction(_RETURN, _ERRNO | errno.EPERM),
        _encode_instruction(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    return b"".join(code)


def _assemble_condition(argument: int, mask: int, values: tuple[int, ...]) -> list[bytes]:
    """Return instructions that continue if the condition holds, and fail the call otherwise."""
    steps = [
        _encode_instruction(_LOAD, _ARGUMENTS_OFFSET + 8 * argument),
        _encode_instruction(_AND, mask),
    ]
    for i, value in enumerate(values):
        steps.append(_encode_instruction(_JUMP_EQUAL, value, len(values) - i, 0))
    return [*steps, _encode_instruction(_RETURN, _ERRNO | errno.EPERM)]


def _encode_instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def _parse_syscall_table(table: str, machine: int) -> dict[str, int]:
    """Return the system calls of a table that this machine has, with their numbers."""
    entries = (entry.split() for entry in table.replace("\n", ";").split(";") if entry.strip())
    return {name: int(n[machine]) for name, *n in entries if n[machine] != "-"}

"""The supervisor process of one sandboxed program, and the program's process before it runs the
program.

The supervisor is a bare interpreter, started for one program with the arguments of `main`. It reads
a `SandboxedProgram`, moves into namespaces, forks the program's process, waits for its end or the
end of its time, and reports. Its standard input stays open: that it is closed means that the parent
is gone or has had enough, and ends the program.

The processes, with namespaces:

    supervisor --+-- init      process 1 of the PID namespace; all in there dies with it
                 +-- program   process 2, a fork of the supervisor that has given up every right
                 +-- judge     process 3, another such fork, if there are tests: they are in no
                               other process, and two pipes lead to the program and back
"""

# Importing pathlib would take as long as all the rest.
# ruff: noqa: PTH102, PTH106, PTH118, PTH123, PTH208
from __future__ import annotations

import builtins
import fcntl
import gc
import io
import marshal
import os
import resource
import select
import sys
import time
from stat import S_ISDIR

from . import landlock, linux_kernel, namespaces, seccomp

TYPE_CHECKING = False  # importing `typing` would take as long as all the rest
if TYPE_CHECKING:
    from typing import Any

_MIB = 1 << 20
_KILL = 9
_F_ADD_SEALS, _SEAL_EVERYTHING = 1033, 0xF
_HIGHEST_USER = 0x70000000  # that no system gives to anybody
_NOBODY = 65534

_DESCRIPTORS = {
    name: descriptor
    for descriptor, stream in enumerate(("stdin", "stdout", "stderr"))
    for name in (f"/dev/{stream}", f"/dev/fd/{descriptor}", f"/proc/self/fd/{descriptor}")
}
"""`/dev/stdin` and the like, by name, for a program that has neither /proc nor these devices."""


class SandboxedProgram:
    """The message to the supervisor: a program, its input, and how to confine it.

    Attributes:
        source, stdin: the program and what it reads.
        level: `root` (namespaces by right), `user` (in a user namespace) or `none`.
        limits: by the names in `hybridrl.sandbox.python_runner.SandboxLimits`.
        libraries: folders that the program may read.
        search_path: folders beside the standard library that it imports from.
        temporary: where to make its scratch folder if it has no root folder of its own.
        is_judged: whether a judge runs tests of the program, which it reads behind this message.
    """

    source: str
    stdin: bytes
    level: str
    limits: dict[str, Any]
    libraries: list[str]
    search_path: list[str]
    temporary: str
    is_judged: bool

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def main(report_to: int, message: int, memory_entrance: int | None = None) -> None:
    """Supervise one program; returns only in the program's process, after the program has ended.

    Args:
        report_to: the descriptor to write the report to: a marshalled dictionary with `failure`, a
            text, if the program could not be confined, else with what `_wait_for_end` returns.
        message: the descriptor of a file with a `SandboxedProgram`, and with the judge's tests.
        memory_entrance: the descriptor by which the program enters its memory group.
    """
    job = SandboxedProgram(**marshal.loads(linux_kernel.read_message(message)))
    group = () if memory_entrance is None else (memory_entrance,)
    try:
        report = _start_and_watch(job, report_to, message, group)
        if report is None:
            return
    except OSError as error:
        report = {"failure": f"{error.strerror or error} {error.filename or ''}".strip()}
    os.write(report_to, marshal.dumps(report))
    os._exit(0)


def _start_and_watch(
    job: SandboxedProgram, report_to: int, message: int, group: tuple[int, ...]
) -> dict[str, Any] | None:
    """Fork the program's process and return the report on its end; returns None in that process."""
    if job.is_judged:  # now: these import much that is out of reach later
        from . import judge, served_program
    _raise_oom_score()
    user = _find_unused_user() if os.geteuid() == 0 else None
    if user is not None and job.level != "root":
        # In a user namespace, nobody has root's rights.
        linux_kernel.switch_user(user, job.libraries if job.level == "none" else [])
        user = None
    if job.level == "none":
        scratch = _make_scratch(job.temporary)
    else:
        scratch = namespaces.SCRATCH_FOLDER
        namespaces.enter_namespaces(with_user=job.level == "user")
        namespaces.replace_root(job.libraries, job.limits["scratch_mib"] * _MIB)
    alive_read, alive_write = os.pipe()
    started_read, started_write = os.pipe()
    stdin = _make_sealed_file(job.stdin)
    to_judge, from_program = os.pipe() if job.is_judged else (-1, -1)
    to_program, from_judge = os.pipe() if job.is_judged else (-1, -1)
    gc.freeze()  # the program's interpreter need not go through our objects when it ends
    ours = {0, 1, 2, report_to, message, alive_read, alive_write, started_read, started_write}
    ours |= {stdin, *group, to_judge, from_program, to_program, from_judge} - {-1}

    def keep(*kept: int) -> None:
        for descriptor in ours.difference(kept):
            os.close(descriptor)

    init = os.fork() if job.level != "none" else None
    if init == 0:  # it ends when the supervisor does, however that happens
        keep(alive_read)
        os.read(alive_read, 1)
        os._exit(0)
    supervisor = os.getpid()
    of_both = (0, 1, 2, started_write, *group)
    program = os.fork()
    if program == 0:
        os.dup2(stdin, 0)
        keep(*of_both, to_program, from_program)
        if job.is_judged:  # what it prints goes nowhere
            nowhere = os.open("/dev/null", os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        _confine(job, user, scratch, supervisor, started_write, group)
        if not job.is_judged:
            _execute_source(job.source)
            return None
        served_program.serve_program(job.source, to_program, from_program)
    judging = os.fork() if job.is_judged else None
    if judging == 0:
        keep(*of_both, to_judge, from_judge, message)
        _confine(job, user, scratch, supervisor, started_write, group)
        judge.judge_tests(to_judge, from_judge, message)
    keep(0, 1, 2, report_to, alive_write, started_read)
    report = _wait_for_end(program, started_read, job.limits["wall_s"], judging)
    if init is not None:
        os.kill(init, _KILL)
        os.waitpid(init, 0)
    if job.level == "none":
        _remove_scratch(scratch)
    return report


def _wait_for_end(program: int, started: int, wall_s: float, judge: int | None) -> dict[str, Any]:
    """Wait for the end of the program, or of its judge, and bring it about if need be.

    Returns:
        `status` as of `wait`, `cpu_s` and `seconds` used, `stopped` (`wall`, `parent` or None) of
        the one it waits for; `program_cpu_s`, used by a program that is judged, and `was_killed`,
        whether that ended by a signal before; and `landlock`, the version of it.
    """
    waited_for = program if judge is None else judge
    ended = os.pidfd_open(waited_for)
    failure = linux_kernel.read_fully(started, _MIB)
    begin = time.monotonic()
    poll = select.poll()
    poll.register(0, 0)  # reports the closing of the pipe, asked or not
    poll.register(ended, select.POLLIN)
    events = {descriptor for descriptor, _ in poll.poll(wall_s * 1000)}
    if judge is not None and events == {ended} and _has_lost_its_program(judge):
        # The kernel closes the pipes of a process before its parent can see how it ended.
        poll.unregister(ended)
        poll.register(os.pidfd_open(program), select.POLLIN)
        poll.poll(max(0.0, begin + wall_s - time.monotonic()) * 1000)
    gone = os.waitid(os.P_PID, program, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    os.kill(program, _KILL)  # it is not reaped yet, so the id is still its own
    os.kill(waited_for, _KILL)
    _, status, usage = os.wait4(waited_for, 0)
    others = usage if judge is None else os.wait4(program, 0)[2]
    if failure:
        return {"failure": failure.decode()}
    by_us = ended not in events and os.WIFSIGNALED(status) and os.WTERMSIG(status) == _KILL
    return {
        "status": status,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "program_cpu_s": others.ru_utime + others.ru_stime,
        "was_killed": judge is not None and gone is not None and gone.si_code != os.CLD_EXITED,
        "seconds": time.monotonic() - begin,
        "stopped": ("parent" if events else "wall") if by_us else None,
        "landlock": landlock.find_landlock_version(),
    }


def _has_lost_its_program(judge: int) -> bool:
    from .judge import PROGRAM_IS_GONE

    end = os.waitid(os.P_PID, judge, os.WEXITED | os.WNOWAIT)
    return end is not None and (end.si_code, end.si_status) == (os.CLD_EXITED, PROGRAM_IS_GONE)


def _confine(
    job: SandboxedProgram,
    user: int | None,
    scratch: str,
    supervisor: int,
    started: int,
    memory_group: tuple[int, ...],
) -> None:
    """Give up every right, and report that by closing `started`."""
    try:
        for entrance in memory_group:
            os.write(entrance, b"0")
            os.close(entrance)
        if user is not None:
            linux_kernel.switch_user(user, job.libraries)
        linux_kernel.drop_privileges()
        linux_kernel.set_parent_death_signal()
        if job.level == "none" and os.getppid() != supervisor:  # it died before the request
            os._exit(1)
        if job.level == "none" and landlock.find_landlock_version() == 0:
            raise OSError("the kernel has no Landlock, or it is not in use")
        if landlock.find_landlock_version():
            landlock.restrict_files(job.libraries, scratch)
        os.chdir(scratch)
        for library in job.libraries:
            os.scandir(library).close()
        # Beside its threads, the kernel counts the supervisor, the first process, and the judge.
        _set_limits(job.limits, others=3 if job.is_judged else 2)
        seccomp.install_filter(os.getpid())
    except OSError as error:
        os.write(started, f"{error.strerror or error} {error.filename or ''}".encode())
        os._exit(1)
    os.close(started)
    sys.path += job.search_path
    sys.argv = ["program.py"]
    sys.dont_write_bytecode = True
    os.environ.clear()
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as `site` has them
    _open_standard_files()


def _execute_source(source: str) -> None:
    """Run the program as `python program.py` would; the caller ends the interpreter."""
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    try:
        exec(compile(source, "program.py", "exec", dont_inherit=True), vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        own_frame = error.__traceback__
        error.__traceback__ = own_frame and own_frame.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _set_limits(limits: dict[str, Any], others: int) -> None:
    cpu_s = limits["cpu_s"]
    for what, soft, hard in (
        # A program that ignores the signal of the first limit is killed at the second.
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_AS, limits["memory_mib"] * _MIB, None),
        (resource.RLIMIT_NPROC, limits["threads"] + others, None),
        (resource.RLIMIT_FSIZE, limits["file_mib"] * _MIB, None),
        (resource.RLIMIT_NOFILE, limits["open_files"], None),
        (resource.RLIMIT_CORE, 0, None),
        (resource.RLIMIT_MEMLOCK, 0, None),
    ):
        # An ordinary user cannot raise a limit that already is lower than ours.
        bound = resource.getrlimit(what)[1]
        pair = [
            value if bound == resource.RLIM_INFINITY else min(value, bound)
            for value in (soft, soft if hard is None else hard)
        ]
        resource.setrlimit(what, (pair[0], pair[1]))


def _find_unused_user() -> int | None:
    """Return a user id that nobody else has, so that per-user limits count this program alone;
    `nobody` in containers with few users, None if there is not even that one."""
    with open("/proc/self/uid_map") as file:
        ranges = [[int(number) for number in line.split()] for line in file]
    for user in (_HIGHEST_USER + os.getpid(), _NOBODY):
        if any(start <= user < start + count for start, _, count in ranges):
            return user
    return None


def _raise_oom_score() -> None:
    """Raise this process's OOM score, so that the kernel kills the program first."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # a courtesy, no more


def _make_sealed_file(content: bytes) -> int:
    """Return a descriptor of an immutable file in memory, at its beginning."""
    file = os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, _F_ADD_SEALS, _SEAL_EVERYTHING)
    return file


def _open_standard_files() -> None:
    """Make `open` find the standard input and outputs by these names, in `io` as well."""
    plain_open = io.open

    def open(file: Any, *arguments: Any, **options: Any) -> Any:
        name = os.fspath(file) if isinstance(file, os.PathLike) else file
        if isinstance(name, str) and name in _DESCRIPTORS:
            file = os.dup(_DESCRIPTORS[name])
        return plain_open(file, *arguments, **options)

    open.__doc__ = plain_open.__doc__
    builtins.open = io.open = open


def _make_scratch(parent: str) -> str:
    """Make a new folder there that only this user may enter, and return its path."""
    folder = os.path.join(parent, f"hybridrl-program-{os.urandom(8).hex()}")
    os.mkdir(folder, 0o700)
    return folder


def _remove_scratch(folder: str) -> None:
    """Remove a folder that the program has filled, as deep as may be: no recursion, no long paths.

    Folders inside are first moved up, one level at a time, so that all are removed from the top.
    """
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    new_name, moved = os.urandom(8).hex(), 0
    while names := os.listdir(top):
        for name in names:
            if not _is_folder(name, top):
                os.unlink(name, dir_fd=top)
                continue
            os.chmod(name, 0o700, dir_fd=top)  # some are made to keep everybody out
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            for entry in os.listdir(inner):
                if _is_folder(entry, inner):
                    moved += 1
                    os.chmod(entry, 0o700, dir_fd=inner)
                    os.rename(entry, f"{new_name}-{moved}", src_dir_fd=inner, dst_dir_fd=top)
                else:
                    os.unlink(entry, dir_fd=inner)
            os.close(inner)
            os.rmdir(name, dir_fd=top)
    os.close(top)
    os.rmdir(folder)


def _is_folder(name: str, where: int) -> bool:
    return S_ISDIR(os.stat(name, dir_fd=where, follow_symlinks=False).st_mode)

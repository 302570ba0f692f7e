"""Programs that try to get out of the sandbox, at every level of confinement there is.

Each runs under a caller of its own, `Caller`: as root with namespaces, and as an ordinary user with
and without. A program prints ESCAPED if it got anywhere; what it says otherwise is in the failure
message. After each test nothing of it may be left.
"""

import contextlib
import dataclasses
import os
import platform
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from confined_callers import (
    FAST,
    KINDS,
    NOBODY,
    SECRET,
    SOURCE,
    Caller,
    scratch_folders,
    start,
    traces,
    wait_for,
)

from hybridrl.errors import ConfigError
from hybridrl.rewards.reward_pool import RewardPool
from hybridrl.sandbox.python_runner import SandboxLimits

# What it may be installed in and started from.


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "a folder of the user's alone"])
def test_it_works_wherever_the_interpreter_is_installed(caller, place):
    home = contextlib.nullcontext(place)
    if not place.startswith("/"):
        home = tempfile.TemporaryDirectory(dir="/tmp")
    if not place.startswith("/") and (caller.user, caller.level) == (None, "user"):
        pytest.skip("root's programs then run with no namespaces")
    with home as parent, tempfile.TemporaryDirectory(dir=parent) as environment:
        if place.startswith("/"):
            Path(environment).chmod(0o755)
        if caller.user is not None:
            os.chown(environment, caller.user, caller.user)
            os.chown(parent, caller.user, caller.user) if parent != place else None
        make = [caller.python, "-m", "venv", "--without-pip", environment]
        subprocess.run(make, check=True, umask=0o022)
        (packages,) = Path(environment).glob("lib/python3*/site-packages")
        (packages / "installed_there.py").write_text("VALUE = 42\n")
        python = f"{environment}/bin/python"
        other = Caller(caller.folder, caller.level, caller.user, python)
        try:
            said = other.run_well("""
            import installed_there
            expect_failure("change", lambda: open(installed_there.__file__, "a"))
            open("mine", "w").close()
            print("value", installed_there.VALUE)
            """)
        finally:
            other.close()
    assert "value 42" in said


def test_the_callers_umask_does_not_matter(caller):
    other = Caller(caller.folder, caller.level, caller.user, caller.python, umask=0o077)
    try:
        assert other.run_well("print(1)") == "1\n"
    finally:
        other.close()


# How programs end.


def test_what_is_asked_for_is_given(caller):
    program = """
    import os, sys
    text = sys.stdin.read()
    with open("file", "w") as file:
        file.write(text)
    os.makedirs("a/b")
    os.rename("file", "a/b/file")
    print(open("a/b/file").read() + text, os.getcwd() == os.path.realpath("."))
    print("é", file=sys.stderr)
    sys.exit(3)
    """
    outcome = caller.run(program, stdin="in")
    assert (outcome.ended, outcome.code) == ("error", 3)
    assert (outcome.stdout, outcome.stderr) == ("inin True\n", "é\n")
    assert 0 < outcome.seconds < 5


def test_the_standard_library_works(caller):
    caller.run_well("""
    import asyncio, dataclasses, decimal, fractions, heapq, itertools, json, random, re, tempfile
    import collections, datetime, functools, math, shutil, statistics, string, subprocess, typing
    import concurrent.futures, bisect, hashlib, operator, queue, unittest, zoneinfo
    async def nothing():
        await asyncio.sleep(0.001)
    asyncio.run(nothing())
    with tempfile.NamedTemporaryFile() as file:
        shutil.copy(file.name, "copy")
    assert random.random() != random.random()
    """)


def test_a_traceback_names_only_the_program(caller):
    outcome = caller.run("\n1 / 0")
    assert (outcome.ended, outcome.code) == ("error", 1)
    assert outcome.stderr.count("File") == 1
    assert 'File "program.py"' in outcome.stderr
    assert caller.run("def").stderr.rstrip().endswith("SyntaxError: invalid syntax")


def test_each_limit_has_its_name(caller):
    quick = SandboxLimits(wall_s=0.5, cpu_s=3)
    assert caller.run("time.sleep(60)", limits=quick).ended == "wall_time"
    assert (
        caller.run("while True: pass", limits=SandboxLimits(wall_s=60, cpu_s=1)).ended == "cpu_time"
    )
    assert caller.run("x = [0] * 10**9").ended == "memory"
    assert caller.run("while True: print('x' * 1000)").ended == "output"
    outcome = caller.run("os.kill(os.getpid(), signal.SIGSEGV)")
    assert (outcome.ended, outcome.code) == ("signal", signal.SIGSEGV)


# What a program can see.


def test_it_has_no_environment_and_no_descriptors(caller):
    caller.run_well("""
    print("ESCAPED" if os.environ or libc.getenv(b"SECRET") else "", dict(os.environ))
    for descriptor in range(3, 4096):
        expect_failure(descriptor, lambda: os.fstat(descriptor))
    """)


def test_it_reads_none_of_the_machines_files(caller, folder):
    visible = folder / "visible.txt"
    visible.write_text(SECRET)
    visible.chmod(0o644)
    paths = ["/etc/shadow", "/etc/passwd", "/", "/etc", "/tmp/..", "/var", "/home", "/root"]
    paths += [str(visible), str(folder), str(SOURCE / "errors.py")]
    caller.run_well(f"""
    for path in {paths}:
        expect_failure(path, lambda: open(path).read())
    for path in {[*paths[3:8], str(folder)]}:
        expect_failure(path, lambda: os.listdir(path))
    os.symlink({str(visible)!r}, "link")
    expect_failure("symlink", lambda: open("link").read())
    os.symlink({str(folder)!r}, "folder")
    expect_failure("symlink", lambda: open("folder/visible.txt").read())
    expect_failure("symlink", lambda: open("folder/new", "w"))
    expect_failure("link", lambda: os.link({str(visible)!r}, "hard"))
    up = "../" * 20
    expect_failure("up", lambda: open(up + {str(visible)!r}).read())
    """)


def test_it_reads_nothing_in_proc(caller):
    others = ["1", str(caller.process.pid), str(os.getpid())]
    caller.run_well(f"""
    others = {others} + [str(os.getppid())]
    for pid in ["self", "thread-self", *others]:
        for name in ("environ", "mem", "maps", "cmdline", "status", "root/etc/passwd"):
            expect_failure(pid, lambda: open(f"/proc/{{pid}}/{{name}}", "rb").read(1))
        expect_failure(pid, lambda: os.listdir(f"/proc/{{pid}}/root/"))
    for pid in others:
        expect_failure(pid, lambda: open(f"/proc/{{pid}}/cwd/x", "w"))
        expect_failure(pid, lambda: open(f"/proc/{{pid}}/fd/1", "wb"))
        expect_failure(pid, lambda: os.readlink(f"/proc/{{pid}}/exe"))
    for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/dev/kmsg", "/dev/mem",
                 "/proc/self/oom_score_adj", "/dev/tty", "/dev/vda"):
        expect_failure(path, lambda: open(path, "r+b"))
    """)


# What a program can change.


def test_it_writes_only_in_its_scratch_folder(caller, folder):
    places = ["/", "/tmp/..", "/etc", "/var/tmp", "/dev", "/dev/shm", "/usr/lib", str(folder)]
    open_to_all = folder / f"open-to-{caller.level}-{caller.process.pid}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    mine = open_to_all / "mine"
    mine.write_text("untouched")
    mine.chmod(0o666)
    if os.geteuid() == 0:
        os.chown(mine, NOBODY, -1)
    before = mine.stat()
    caller.run_well(f"""
    import encodings
    for place in {[*places, str(open_to_all)]} + [os.path.dirname(encodings.__file__)]:
        expect_failure(place, lambda: open(place + "/sandbox-test", "w"))
        expect_failure(place, lambda: os.mkdir(place + "/sandbox-test"))
        expect_failure(place, lambda: os.symlink("/", place + "/sandbox-test"))
        expect_failure(place, lambda: os.rename("x", place + "/sandbox-test"))
    mine = {str(mine)!r}
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_TRUNC, os.O_APPEND | os.O_WRONLY):
        expect_failure(flags, lambda: os.open(mine, flags))
    expect_failure("truncate", lambda: os.truncate(mine, 0))
    expect_failure("unlink", lambda: os.unlink(mine))
    expect_failure("truncate", lambda: os.open(encodings.__file__, os.O_TRUNC))
    expect_failure("setxattr", lambda: os.setxattr(mine, "user.x", b""))
    expect_failure("chown", lambda: os.chown(mine, os.getuid(), -1))
    open("own", "w").close()
    expect_failure("truncate", lambda: os.open("own", os.O_TRUNC))
    os.chmod(mine, 0o600)  # these do nothing
    os.utime(mine, (0, 0))
    """)
    after = mine.stat()
    assert mine.read_text() == "untouched"
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)
    assert [path.name for path in open_to_all.iterdir()] == ["mine"]


def test_files_are_limited_in_size(caller):
    caller.run_well("""
    size = 0
    with open("huge", "wb") as file:
        try:
            while size < 100 << 20:
                size += file.write(b"x" * (1 << 20))
                file.flush()
        except OSError as error:
            print(error)
    print("ESCAPED" if size > 16 << 20 else "", size)
    expect_failure("truncate", lambda: os.ftruncate(os.open("huge", os.O_RDWR), 1 << 40))
    """)


def test_all_files_together_are_limited(caller):
    if caller.level == "none":
        pytest.skip("without namespaces, the number of files is not limited")
    caller.run_well("""
    size = 0
    try:
        for i in range(100):
            with open(f"large{i}", "wb") as file:
                size += file.write(b"x" * (4 << 20))
    except OSError as error:
        print(error)
    print("ESCAPED" if size > 64 << 20 else "", size)
    """)


def test_thousands_of_files_and_folders_are_removed(caller):
    program = """
    try:
        for i in range(3000):
            open(f"file{i}", "w").close()
        for i in range(1500):  # deeper than any path or recursion
            os.mkdir("folder")
            open("x", "w").close()
            os.symlink("/", "root")
            os.chdir("folder")
        os.mkdir("closed", 0)
        os.umask(0o777)
        os.mkdir("closed too")
    except OSError as error:
        print(error)
    """
    # (3 s are too few where system calls are slow)
    caller.run_well(program, limits=dataclasses.replace(FAST, cpu_s=30))


def test_nothing_stays_in_shared_memory(caller):
    caller.run_well("""
    from multiprocessing import shared_memory
    expect_failure("shm", lambda: shared_memory.SharedMemory("left", create=True, size=100))
    expect_failure("file", lambda: open("/dev/shm/left", "w"))
    expect_failure("memfd", lambda: os.memfd_create("left"))
    expect_errors(
        shmget=libc.shmget(1234, 100, 0o1666), semget=libc.semget(1234, 1, 0o1666),
        msgget=libc.msgget(1234, 0o1666),
    )
    """)
    left = [Path("/proc/sysvipc", kind).read_text() for kind in ("shm", "sem", "msg")]
    assert not any(" 1234 " in text for text in left)


# Whom a program can reach.


def test_it_has_no_network(caller):
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
    ):
        udp.bind(("127.0.0.1", 0))
        name = f"sandbox-test-{os.getpid()}"
        abstract.bind("\0" + name)
        caller.run_well(f"""
        tcp, udp = {tcp.getsockname()[1]}, {udp.getsockname()[1]}
        name = b"\\0" + {name.encode()!r}
        expect_failure("tcp", lambda: socket.create_connection(("127.0.0.1", tcp), 1))
        expect_failure("dns", lambda: socket.getaddrinfo("example.org", 80))
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                expect_failure(family, lambda: socket.socket(family, kind))
                libc.socket(family, kind, 0) < 0 or print("ESCAPED", family, kind)
        expect_failure("pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        for end in socket.socketpair():
            expect_failure("connect", lambda: end.connect(name))
            expect_failure("bind", lambda: end.bind("mine"))
            expect_failure("sendto", lambda: end.sendto(b"x", name))
            expect_failure("sendmsg", lambda: end.sendmsg([b"x"], [], 0, name))
        """)
        for listener in (tcp, udp, abstract):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept() if listener is tcp else listener.recv(1)


def test_it_signals_nobody(caller):
    caller.run_well(f"""
    others = (-1, 0, 1, -os.getpid(), os.getppid(), {caller.process.pid}, {os.getpid()})
    for other in others:
        if other != os.getpid():
            for number in (0, signal.SIGTERM, signal.SIGKILL):
                expect_failure(other, lambda: os.kill(other, number))
            expect_failure(other, lambda: os.killpg(abs(other), signal.SIGKILL))
            info = ctypes.create_string_buffer(128)
            expect_errors(
                rt_sigqueueinfo=libc.syscall(129, other, 9, info),
                tkill=libc.syscall(200 if os.uname().machine == "x86_64" else 130, other, 9),
            )
    expect_failure("pidfd", lambda: os.pidfd_open({caller.process.pid}))
    import fcntl
    reader, writer = os.pipe()
    expect_failure("F_SETOWN", lambda: fcntl.fcntl(reader, fcntl.F_SETOWN, {caller.process.pid}))
    expect_failure("F_SETSIG", lambda: fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL))
    expect_failure("limits", lambda: __import__("resource").prlimit({caller.process.pid}, 0))
    expect_failure("nice", lambda: os.setpriority(os.PRIO_PROCESS, {caller.process.pid}, 19))
    """)


def test_it_traces_nobody(caller):
    caller.run_well(f"""
    for pid in ({caller.process.pid}, os.getppid(), 1):
        buffer = (ctypes.c_size_t * 2)()
        expect_errors(
            attach=libc.ptrace(16, pid, None, None),
            seize=libc.ptrace(0x4206, pid, None, None),
            read=libc.process_vm_readv(pid, buffer, 1, buffer, 1, 0),
            write=libc.process_vm_writev(pid, buffer, 1, buffer, 1, 0),
        )
    expect_errors(traceme=libc.ptrace(0, 0, None, None))
    """)


# How a program can grow or stay.


def test_it_starts_no_process(caller):
    caller.run_well("""
    import multiprocessing, subprocess
    for i in range(1000):
        expect_failure("fork", os.fork)
    expect_failure("vfork", lambda: subprocess.run([sys.executable, "-c", "print('ESCAPED')"]))
    expect_failure("spawn", lambda: os.posix_spawn("/bin/sh", ["sh", "-c", "echo ESCAPED"], {}))
    expect_failure("multiprocessing", lambda: multiprocessing.Process(target=print).start())
    for program in (sys.executable, "/bin/sh", "/usr/bin/env"):
        expect_failure(program, lambda: os.execv(program, [program, "-c", "print('ESCAPED')"]))
    print("ESCAPED" if libc.system(b"exit 0") == 0 else "")
    clone, clone3 = (56 if os.uname().machine == "x86_64" else 220), 435
    new = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17)
    expect_errors(clone=libc.syscall(clone, 17, 0, 0, 0, 0), clone3=libc.syscall(clone3, new, 88))
    """)


def test_no_daemon_stays(caller, folder):
    outcome = caller.run(f"""
    left = "import time; time.sleep(60) # left-by-{folder.name}"
    def daemon():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, "-c", left])
        time.sleep(60)
    expect_failure("setsid", os.setsid)
    expect_failure("setpgid", lambda: os.setpgid(0, 0))
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    daemon()
    """)
    assert outcome.ended == "error"


def test_threads_are_limited(caller):
    printed = caller.run_well(
        """
    started = 1
    try:
        for i in range(200):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            started += 1
    except RuntimeError:
        pass
    print("ESCAPED" if started > 18 else "started", started)
    """,
        limits=dataclasses.replace(FAST, memory_mib=8192, threads=16),
    )
    if caller.level != "none":
        assert int(printed.split()[1]) >= 16


def test_memory_is_limited(caller):
    limits = SandboxLimits(memory_mib=128, wall_s=60, cpu_s=3)
    bombs = (
        "x = bytearray(1 << 30)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import mmap\nx = [mmap.mmap(-1, 1 << 24) for i in range(100)]",
        "x = 'x'\nwhile True: x += x",
    )
    for bomb in bombs:
        outcome = caller.run(bomb, limits=limits)
        assert outcome.ended in ("memory", "error"), outcome


def test_output_is_limited(caller):
    limits = SandboxLimits(output_kib=64, wall_s=60, cpu_s=3)
    for descriptor in (1, 2):
        outcome = caller.run(f"while True: os.write({descriptor}, b'x' * 4096)", limits=limits)
        assert outcome.ended == "output"
        assert len(outcome.stdout if descriptor == 1 else outcome.stderr) == 64 * 1024


def test_ignored_signals_end_it_as_well(caller):
    deaf = """
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True: %s
    """
    assert (
        caller.run(deaf % "time.sleep(60)", limits=SandboxLimits(wall_s=0.5)).ended == "wall_time"
    )
    outcome = caller.run(deaf % "pass", limits=SandboxLimits(wall_s=60, cpu_s=1))
    assert (outcome.ended, outcome.code) == ("cpu_time", signal.SIGKILL)


def test_closing_its_outputs_gives_it_no_more_time(caller):
    outcome = caller.run(
        "for i in range(3): os.close(i)\ntime.sleep(60)", limits=SandboxLimits(wall_s=0.5)
    )
    assert outcome.ended == "wall_time"


def test_input_that_is_not_read_is_no_problem(caller):
    text = "x" * (5 << 20)
    assert caller.run_well("print('done')", stdin=text) == "done\n"
    assert caller.run_well("print(len(sys.stdin.read()))", stdin=text) == f"{len(text)}\n"
    caller.run_well("expect_failure('write', lambda: os.write(0, b'x'))", stdin="x")


# What a program can ask of the kernel.


def test_other_system_calls_fail(caller):
    numbers = {  # on x86-64, on aarch64
        "unshare": (272, 97),
        "setns": (308, 268),
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "chroot": (161, 51),
        "bpf": (321, 280),
        "keyctl": (250, 219),
        "add_key": (248, 217),
        "perf_event_open": (298, 241),
        "userfaultfd": (323, 282),
        "io_uring_setup": (425, 425),
        "open_by_handle_at": (304, 265),
        "name_to_handle_at": (303, 264),
        "init_module": (175, 105),
        "kexec_load": (246, 104),
        "reboot": (169, 142),
        "personality": (135, 92),
        "setuid": (105, 146),
        "setresuid": (117, 147),
        "setgroups": (116, 159),
        "capset": (126, 91),
        "seccomp": (317, 277),
        "fsopen": (430, 430),
        "open_tree": (428, 428),
        "pidfd_getfd": (438, 438),
        "openat2": (437, 437),
        "memfd_secret": (447, 447),
        "inotify_init1": (294, 26),
        "fanotify_init": (300, 262),
        "mknodat": (259, 33),
        "execveat": (322, 281),
        "sched_setaffinity": (203, 122),
        "mlock": (149, 228),
        "mq_open": (240, 180),
    }
    column = 0 if platform.machine() == "x86_64" else 1
    calls = {name: both[column] for name, both in numbers.items()}
    printed = caller.run_well(f"""
    zeros = ctypes.create_string_buffer(256)
    for name, number in {calls}.items():
        for arguments in ((0, 0, 0, 0, 0), (zeros, zeros, zeros, zeros, zeros)):
            result = libc.syscall(number, *arguments)
            refused = result == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS)
            print("refused" if refused else "ESCAPED", name, result, ctypes.get_errno())
    x32 = libc.syscall(0x40000000 + 39)
    print("refused" if x32 == -1 else "ESCAPED", "x32", x32)
    """)
    assert printed.count("refused") == 2 * len(calls) + 1


def test_it_has_no_rights_to_give_or_take(caller):
    caller.run_well("""
    PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_READ, PR_SET_SECUREBITS = 1, 4, 23, 28
    expect_errors(
        keep_alive=libc.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0),
        dumpable=libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0),
        securebits=libc.prctl(PR_SET_SECUREBITS, 0, 0, 0, 0),
    )
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[7] * 6)
    libc.capget(header, data)
    print("ESCAPED" if any(data) else "", list(data))
    print("ESCAPED" if 0 in os.getresuid() or 0 in os.getresgid() else "", os.getresuid())
    import resource
    for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NOFILE):
        soft, hard = resource.getrlimit(kind)
        expect_failure("limit", lambda: resource.setrlimit(kind, (soft, hard + 1)))
    expect_failure("nice", lambda: os.nice(-5))
    """)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="32-bit system calls are of x86-64")
def test_32_bit_system_calls_end_it(caller):
    outcome = caller.run("""
    import mmap
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex("b814000000cd80c3"))  # getpid, by number 20
    code = ctypes.addressof(ctypes.c_char.from_buffer(page))
    print("ESCAPED", ctypes.CFUNCTYPE(ctypes.c_int)(code)())
    """)
    assert (outcome.ended, outcome.code) == ("signal", signal.SIGSYS)


# What callers can do.


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_ends_when_its_caller_dies(folder, kind):
    caller = start(folder, kind)
    before = traces(folder)
    caller.send({"source": "while True: pass", "stdin": "", "limits": {"wall_s": 60, "cpu_s": 60}})
    assert wait_for(lambda: len(psutil.Process(caller.process.pid).children(recursive=True)) > 1)
    time.sleep(0.2)
    assert traces(folder) > before
    caller.close()
    assert wait_for(lambda: traces(folder) == before), (before, traces(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_ends_when_its_supervisor_dies(folder, kind):
    caller = start(folder, kind)
    before = traces(folder)
    caller.send({"source": "while True: pass", "stdin": "", "limits": {"wall_s": 60, "cpu_s": 60}})
    process = psutil.Process(caller.process.pid)
    assert wait_for(lambda: len(process.children(recursive=True)) > 1)
    time.sleep(0.2)
    process.children()[0].kill()
    assert "watches over a sandboxed program died" in caller.receive()["refused"]
    caller.close()
    for path in scratch_folders(folder):
        if str(path) not in before:  # the one thing that is left then
            assert caller.level == "none"
            path.rmdir()
    assert wait_for(lambda: traces(folder) == before), (before, traces(folder))


def test_the_reward_pool_may_kill_its_processes(folder, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(folder / "scratch"))
    before = traces(folder)
    rows = [
        {"prompt": "", "response": response, "answer": "", "tests": ["assert f() == 1"]}
        for response in ("def f(): return 1", "while True: pass", "def f(): return 2")
    ]

    def runs_programs(prompt, response, tests, **row):
        from hybridrl.rewards.code import passes_tests

        return passes_tests(prompt, response, tests)  # which here has more time than a reward

    settings = {"processes": 2, "timeout_s": 5.0, "on_error": "value"}
    with RewardPool([runs_programs], **settings) as pool:
        result = pool.score(rows)
    assert result.scores == [1.0, 0.0, 0.0]
    assert result.timeouts == 1
    assert wait_for(lambda: traces(folder) == before), (before, traces(folder))


def test_a_limit_that_is_not_positive_is_refused():
    with pytest.raises(ConfigError, match=r"`SandboxLimits.cpu_s` is 0, expected a whole number"):
        SandboxLimits(cpu_s=0)
    with pytest.raises(ConfigError, match=r"`SandboxLimits.wall_s` is nan, expected a number"):
        SandboxLimits(wall_s=float("nan"))

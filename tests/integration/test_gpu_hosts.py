"""Host processes on GPUs, of which this machine has none: by vLLM's own class of the CUDA platform,
with a driver library that is imitated, and by a Ray that takes our word for its GPUs."""

import json
import os
import pickle
import subprocess
import sys
import time
import types
from dataclasses import replace
from unittest.mock import Mock

import psutil
import pytest
import torch
from ranks import run_ranks

from hybridrl.errors import ConfigError, HybridRLError
from hybridrl.system import device_traits
from hybridrl.system.host_variables import derive_host_environment

NUMBERS = {"GPU-a": 3, "GPU-b": 1, "GPU-c": 0, "MIG-a": 2, "MIG-b": 5}
"""By name, what the driver numbers as."""


@pytest.fixture
def platform(monkeypatch):
    """vLLM's class of the CUDA platform, as it is with the driver's library."""
    name = "vllm._C_stable_libtorch"  # which only builds for CUDA have
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    from vllm.distributed.device_communicators import custom_all_reduce
    from vllm.platforms import cuda

    for call in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(cuda.pynvml, call, lambda: None)
    monkeypatch.setattr(cuda.pynvml, "nvmlDeviceGetHandleByUUID", NUMBERS.__getitem__)
    monkeypatch.setattr(cuda.pynvml, "nvmlDeviceGetIndex", lambda handle: handle)
    monkeypatch.setattr(custom_all_reduce, "current_platform", cuda.NvmlCudaPlatform)
    return cuda.NvmlCudaPlatform


@pytest.mark.vllm
@pytest.mark.parametrize("shown", ["all", "own"], ids=["NOSET", "by Ray"])
@pytest.mark.parametrize(
    ("of_node", "of_job", "numbers"),
    [
        (None, list("01234567"), list(range(8))),
        (None, list("4567"), [4, 5, 6, 7]),
        ("3", ["3"], [3]),
        ("2,5,6,7", ["5", "7"], [5, 7]),
        ("GPU-a,GPU-b,GPU-c", ["GPU-a", "GPU-c"], [3, 0]),
        ("MIG-a,MIG-b", ["MIG-a", "MIG-b"], [2, 5]),
    ],
    ids=["all", "unset", "one", "several", "UUIDs", "MIG"],
)
def test_vllm_finds_the_gpu_of_each_rank(of_node, of_job, numbers, shown, platform, monkeypatch):
    """`of_node` is the variable that Ray was started with, `of_job` are the names by which it gives
    the hosts their GPUs, and `numbers` the driver's."""
    from vllm.distributed.device_communicators import custom_all_reduce

    for place, number in enumerate(numbers):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        before = of_node if shown == "all" else of_job[place]
        if before is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
        for name, value in derive_host_environment(of_job, place, 8, 8, os.environ).items():
            monkeypatch.setenv(name, value)
        seen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        monkeypatch.setattr(torch.accelerator, "device_count", lambda seen=seen: len(seen))
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
        index = device_traits.set_current_device("cuda", place).index
        # vLLM's worker takes the device of its LOCAL_RANK, which is this index.
        assert platform.logical_device_id_to_visible_device_id(index) == index
        assert platform.visible_device_id_to_physical_device_id(index) == number
        peers = Mock()
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", peers)
        is_whole = of_job[0][:3] != "MIG"
        for tp in (2, 4, 8):  # with one visible GPU it raises IndexError
            for rank in range(tp) if is_whole and tp <= len(of_job) else ():
                custom_all_reduce._can_p2p(rank, tp)
        assert all(a != b and max(a, b) < len(seen) for (a, b), _ in peers.call_args_list)


RAY_JOB = """
import json, os
import ray
from hybridrl.controller import DP, Worker, WorkerGroup, transfer
from hybridrl.ray_backend import ray_executor, ray_host
from hybridrl.ray_backend.connection import ClusterConnection
from hybridrl.system import device_traits

class Host(ray_host.RayHost.__ray_metadata__.modified_class):
    def __init__(self, folder):
        device_traits.open_gpu = lambda place: (f"opened as {place}", 8e10)
        super().__init__(folder)

class Seer(Worker):
    @transfer(DP)
    def see(self) -> list:
        names = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF"
        return [self.context.local_rank, *map(os.environ.get, names)]

groups = {"work": 1, "health": 3, "data": 4}
ray_executor.RayHost = ray.remote(concurrency_groups=groups)(Host)
ray.init(num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)
holder = ray.remote(num_gpus=1, num_cpus=0)(type("Other", (), {"there": lambda self: 0})).remote()
ray.get(holder.there.remote())
with ray_executor.RayExecutor("cuda", 3, connection=ClusterConnection(None)) as executor:
    devices = [(one.index, one.model) for one in executor.cluster.devices]
    seen = WorkerGroup(executor, "seer", Seer, [2, 0, 1]).see().get()
    print(json.dumps([devices, seen]))
"""


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.parametrize("noset", ["0", "1"])
def test_hosts_on_a_node_of_which_another_job_has_a_gpu(noset, monkeypatch):
    for name in ("OMP_NUM_THREADS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", noset)
    program = [sys.executable, "-c", RAY_JOB]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    devices, seen = json.loads(done.stdout.splitlines()[-1])
    assert devices == [[place, f"opened as {place}"] for place in range(3)]
    places, visible, threads, allocators = zip(*seen, strict=True)
    assert places == (2, 0, 1)  # in rank order
    (gpus,) = set(visible)
    gpus = gpus.split(",")
    assert len(gpus) == 3 and gpus == sorted(gpus) and set(gpus) < set("4567")
    assert set(allocators) == {"expandable_segments:True"}
    share = max(1, len(os.sched_getaffinity(0)) // 4)
    assert {int(number) for number in threads} == {share}


@pytest.mark.vllm
def test_what_vllm_changes_in_the_process_and_what_it_may_not_use(monkeypatch, tmp_path):
    from hybridrl.config.schema import RolloutConfig, RolloutParallelConfig
    from hybridrl.rollout import vllm_startup
    from hybridrl.rollout.rollout_engine import EngineSetup

    settings, during = [], []
    inductor = types.SimpleNamespace(compile_threads=1)
    monkeypatch.setattr(torch._inductor, "config", inductor)
    monkeypatch.setattr(vllm_startup, "_COMPILE_THREADS", "7")
    monkeypatch.setattr(vllm_startup, "_name_shared_memory", lambda _: None)
    monkeypatch.setattr(
        vllm_startup, "load_model_config", lambda _: types.SimpleNamespace(architectures=())
    )
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(vllm_startup, "LLM", lambda *_, **__: during.append(list(settings)))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    setup = EngineSetup("model", "model", "bfloat16", (0,), torch.device("cuda", 1), job="job")

    def start(tp):
        config = RolloutConfig(parallel=RolloutParallelConfig(tp))
        vllm_startup.start_vllm(setup, config, {})

    start(1)
    assert during == [[]] and settings == [] and inductor.compile_threads == 7
    start(2)
    off = "max_split_size_mb:64,expandable_segments:False"
    assert during[1] == [off] and settings == [off, os.environ["PYTORCH_ALLOC_CONF"]]
    with pytest.raises(ConfigError, match=r"tp=4: .* shows this process 2 of them .*Set .*tp=2"):
        start(4)


@pytest.fixture
def setup(tmp_path):
    from hybridrl.data.character_tokenizer import build_character_tokenizer
    from hybridrl.models.model_loading import make_tiny_model
    from hybridrl.rollout.rollout_engine import EngineSetup
    from hybridrl.system.shared_memory import remove_shared_memory

    tokenizer, folder = build_character_tokenizer(), tmp_path / "model"
    make_tiny_model(folder, tokenizer, seed=3, hidden_size=64, layers=2, heads=2, context=96)
    ends, cpu = [tokenizer.eos_token_id], torch.device("cpu")
    job = f"hybridrl-{os.getpid()}-9"
    yield EngineSetup(str(folder), str(folder), "float32", ends, cpu, 96, job=job)
    remove_shared_memory(job)  # as a job does when it ends


def two_engines(rank, name, setup):
    """Return the answers of an engine in a process of its own, those of one here, and the exit code
    of that process."""
    from hybridrl.batch.batch import Batch
    from hybridrl.config.schema import RolloutConfig
    from hybridrl.controller import WorkerContext
    from hybridrl.rollout import SamplingSettings
    from hybridrl.workers import engine_process
    from hybridrl.workers.rollout_engines import build_inference_engine

    engine_process.CLOSE_SECONDS = 120.0  # if it is busy here
    config = RolloutConfig(engine=name, kv_cache_gib=0.05)
    prompts = Batch.from_columns({"prompt_ids": [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]})
    asked = prompts, SamplingSettings(12, temperature=0.0), 0
    there = engine_process.EngineProcess(WorkerContext("reward", 1, 2), setup, config)
    try:
        here = build_inference_engine(replace(setup, job=f"{setup.job}9"), config)
        both = [engine.generate(*asked) for engine in (there, here)]
        here.close()
    finally:
        there.close()
    return both, there._process.returncode


@pytest.mark.more
@pytest.mark.parametrize("name", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_an_engine_in_a_process_of_its_own(name, setup, tmp_path):
    (((there, here), code),) = run_ranks(two_engines, tmp_path, 1, name, setup)
    for column in ("response_ids", "rollout_log_probs"):
        rows = zip(there[column].rows(), here[column].rows(), strict=True)
        assert all(torch.equal(*two) for two in rows)
    assert code == 0


HOLDER = """
import os, pickle, signal, sys
from hybridrl.config.schema import RolloutConfig
from hybridrl.controller import WorkerContext
from hybridrl.workers.engine_process import EngineProcess

setup = pickle.load(sys.stdin.buffer)
engine = EngineProcess(WorkerContext("reward", 0, 1), setup, RolloutConfig(engine="transformers"))
print(engine._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.more
def test_an_engine_ends_with_the_process_that_has_it(setup):
    """As it does when a host is killed."""
    program, told = [sys.executable, "-c", HOLDER], pickle.dumps(setup)
    holder = subprocess.run(program, input=told, stdout=subprocess.PIPE, timeout=120)
    until, pid = time.monotonic() + 10, int(holder.stdout)
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)


@pytest.mark.more
def test_an_engine_whose_process_ends(setup):
    from hybridrl.config.schema import RolloutConfig
    from hybridrl.controller import WorkerContext
    from hybridrl.workers.engine_process import EngineProcess

    engine = EngineProcess(
        WorkerContext("reward", 0, 1), setup, RolloutConfig(engine="transformers")
    )
    engine._process.kill()
    with pytest.raises(HybridRLError, match="The process of the engine of `reward` ended"):
        engine.generate(None, None, 0)

"""What a host process on a GPU is given: GPUs of its node, cores, the allocator."""

import os
from pathlib import Path

import pytest
import torch

from hybridrl.doctor import library_check as libraries
from hybridrl.system import device_traits, host_variables
from hybridrl.system.host_variables import (
    bind_to_nearby_cores,
    derive_host_environment,
    parse_core_list,
)


def test_each_host_sees_all_gpus_of_the_job_and_has_its_share_of_the_cores():
    """Four GPUs of eight; Ray has limited the process to its own, and to one thread."""
    given = {"CUDA_VISIBLE_DEVICES": "5", "OMP_NUM_THREADS": "1", "HOME": "/root"}
    assert derive_host_environment(["4", "5", "6", "7"], 1, 128, 8, given) == {
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": "16",
        "TORCHINDUCTOR_COMPILE_THREADS": "16",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


@pytest.mark.parametrize(
    ("name", "value", "without"),
    [
        ("OMP_NUM_THREADS", "3", "OMP_NUM_THREADS"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", "PYTORCH_ALLOC_CONF"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", "PYTORCH_ALLOC_CONF"),
        ("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "CUDA_DEVICE_ORDER"),
    ],
)
def test_what_a_user_has_set_is_kept(name, value, without):
    usual = derive_host_environment(["0"], 0, 8, 1, {})
    found = derive_host_environment(["0"], 0, 8, 1, {name: value})
    assert usual.keys() - found.keys() == {without} and found.items() <= usual.items()


def test_an_instance_of_a_gpu_is_seen_alone():
    gpus = ["MIG-a", "MIG-b"]
    found = [derive_host_environment(gpus, n, 4, 2, {})["CUDA_VISIBLE_DEVICES"] for n in (0, 1)]
    assert found == gpus


def test_fewer_cores_than_gpus():
    assert derive_host_environment(["0", "1"], 1, 1, 2, {})["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("seen", "index"), [(8, 5), (1, 0)])
def test_the_device_of_a_process_is_its_place_or_the_only_one(seen, index, monkeypatch):
    made = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: seen)
    monkeypatch.setattr(torch.accelerator, "set_device_index", made.append)
    assert device_traits.set_current_device("cuda", 5) == torch.device("cuda", index)
    assert made == [index]


def test_lists_of_cores():
    assert parse_core_list("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}


@pytest.mark.parametrize(
    ("listed", "bound"),
    [("{some}\n", True), ("9000-9001", False), ("", False), (None, False)],
    ids=["near", "of others", "none", "unknown"],
)
def test_all_threads_keep_to_the_cores_near_their_gpu(listed, bound, monkeypatch, tmp_path):
    some = min(os.sched_getaffinity(0))
    (tmp_path / "0000:1b:00.0").mkdir()
    if listed is not None:
        (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text(listed.format(some=some))
    monkeypatch.setattr(host_variables, "_PCI_DEVICES", tmp_path)
    set_to = {}
    monkeypatch.setattr(os, "sched_setaffinity", set_to.__setitem__)
    bind_to_nearby_cores("0000:1b:00.0")
    threads = {int(one.name) for one in Path("/proc/self/task").iterdir()}
    assert set_to == ({thread: {some} for thread in threads} if bound else {})


def test_the_doctor_prints_it():
    found = libraries.report_host_environment(2, {"CUDA_VISIBLE_DEVICES": "6,7"})
    assert "CUDA_VISIBLE_DEVICES=6,7 CUDA_DEVICE_ORDER=PCI_BUS_ID OMP_NUM_THREADS=" in found.what

"""Nodes of a cluster: the sentences, and which order they stand in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridrl.controller.failures import (
    HostDeath,
    HostIdentity,
    HostRegistry,
    build_root_cause_error,
)
from hybridrl.controller.group_call import GroupCall, WorkerFailure
from hybridrl.controller.hang_report import HangReport
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.device_pool import folders_of_workers, list_worker_paths
from hybridrl.ray_backend import node_probe
from hybridrl.ray_backend.cluster_nodes import (
    RayNode,
    check_access,
    check_capacity,
    check_node_reports,
    make_node_sort_key,
)
from hybridrl.ray_backend.own_node import cure_of
from hybridrl.system.locations import access_errors, parse_location

SMALL = RayNode("a", "10.0.0.10", cpus=8, gpus=3, free_cpus=8, free_gpus=1)
LARGE = RayNode("b", "10.0.0.9", cpus=8, gpus=5, free_cpus=2, free_gpus=5)


def test_nodes_of_different_size_add_up():
    check_capacity([SMALL, LARGE], "cuda", 8, 1.0)
    check_capacity([SMALL, LARGE], "cpu", 16, 1.0)


@pytest.mark.parametrize(
    ("kind", "devices", "cpus", "room"),
    [("cuda", 9, 1.0, 8), ("cuda", 8, 2.0, 7), ("cpu", 9, 2.0, 8), ("cpu", 3, 5.0, 2)],
)
def test_a_cluster_that_is_too_small_is_shown(kind, devices, cpus, room):
    with pytest.raises(ConfigError) as found:
        check_capacity([SMALL, LARGE], kind, devices, cpus)
    text = str(found.value)
    assert f"num_devices={devices}" in text and f"num_devices={room} or fewer" in text
    assert "  10.0.0.9: 5 of 5 GPUs and 2 of 8 CPUs free\n  10.0.0.10: 1 of 3 GPUs" in text


def test_addresses_are_in_the_order_of_numbers():
    keys = [make_node_sort_key("x", a) for a in ("10.0.0.9", "10.0.0.10", "10.0.1.1")]
    assert keys == sorted(keys)
    assert make_node_sort_key("a", "10.0.0.1") < make_node_sort_key("b", "10.0.0.1")
    assert make_node_sort_key("a", "node-1") != make_node_sort_key("a", "node-2")


HERE = {"Python": "3.11.7", "hybridrl": "0.1.0 (sources 12345678)", "torch": "2.13.0", "vllm": ""}


def test_equal_nodes_are_fine_and_what_the_driver_lacks_is_not_asked_for():
    check_node_reports(HERE, {"10.0.0.1": (HERE | {"vllm": "0.32.0"}, [])}, {})


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"torch": "2.12.0"}, "10.0.0.2 has torch 2.12.0 (the driver: 2.13.0)"),
        ({"hybridrl": ""}, "10.0.0.2 has no hybridrl (the driver: 0.1.0"),
        ({"hybridrl": "0.1.0 (sources 87654321)"}, "10.0.0.2 has hybridrl 0.1.0 (sources 8"),
        ({"Python": "3.12.1"}, "10.0.0.2 has Python 3.12.1"),
    ],
)
def test_a_node_that_differs_is_named(theirs, words):
    reports = {"10.0.0.1": (HERE, []), "10.0.0.2": (HERE | theirs, [])}
    with pytest.raises(ConfigError) as found:
        check_node_reports(HERE, reports, {})
    assert words in str(found.value) and "10.0.0.1" not in str(found.value)


def test_nodes_that_do_not_see_a_file_are_named_by_setting():
    paths = {"run.root": "/runs/1", "model.path": "/models/m"}
    reports = {"n1": (HERE, ["run.root"]), "n2": (HERE, list(paths))}
    with pytest.raises(ConfigError) as found:
        check_node_reports(HERE, reports, paths)
    text = str(found.value)
    assert "  run.root=/runs/1 is not on n1, n2\n  model.path=/models/m is not on n2" in text


def test_the_probe_tells_versions_and_what_is_unseen(tmp_path):
    packages = {"hybridrl": ("hybridrl",), "no_such_package": ("no-such-package",)}
    versions, unseen = node_probe.probe_node(
        packages, {"a": str(tmp_path), "b": str(tmp_path / "b")}
    )
    assert versions["no_such_package"] == "" and versions["hybridrl"].endswith(")")
    assert versions["Python"].startswith("3.") and unseen == ["b"]


def test_workers_need_folders_and_files_but_no_names_of_the_hub(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "score.py").write_text("")
    overrides = ["model.path=Qwen/Qwen2.5-0.5B", f"reward.model={tmp_path}/model"]
    overrides.append(f"reward.function=[exact,{tmp_path}/score.py:score]")
    assert list_worker_paths(load_config(overrides), tmp_path) == {
        "run.root": tmp_path,
        "reward.model": tmp_path / "model",
        "reward.function": tmp_path / "score.py",
    }


IDENTITIES = [HostIdentity("10.0.0.1", 11, "x"), HostIdentity("10.0.0.2", 12, "y")]
IDENTITIES.append(HostIdentity("10.0.0.2", 13, "y"))
ROLES = {0: {"actor": 0}, 1: {"actor": 1, "reward": 0}, 2: {"actor": 2}}
HOSTS = HostRegistry(IDENTITIES, ROLES, None)
UPDATE = GroupCall(7, "actor", "update_actor", [0, 1, 2], [None] * 3)


def test_a_lost_node_comes_before_what_it_made_others_say():
    peer = WorkerFailure("actor", 0, "update_actor", "connection reset", "Traceback", 1.0)
    dead = HostDeath(UPDATE, 2, "killed")
    lost = HostDeath(UPDATE, 1, "", with_node=True)
    text = str(build_root_cause_error([peer, dead, lost], HOSTS))
    assert text.startswith("Node 10.0.0.2 (actor ranks 1 2, reward rank 0) was lost during actor.u")
    assert "num_devices=1" in text and "\n" not in text


def test_a_single_death_is_still_that_of_a_process():
    text = str(build_root_cause_error([HostDeath(UPDATE, 1, "killed")], HOSTS))
    assert text.startswith("actor rank 1 (process 12 on 10.0.0.2) died during actor.update_actor.")


def test_a_death_for_want_of_memory_says_who_uses_it():
    said = (
        "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
        "10.0.0.2, ID: 54be) was 22.41GB used / 23.54GB limit (0.951797)\n"
        "OOM kill reason: Memory usage exceeded\nTop 10 memory users: PID\tMEM(GB)\tCOMMAND\n"
        "77\t17.47\tpython train.py\n12\t0.62\tray::RayHost\nRefer to the documentation\n"
    )
    text = str(build_root_cause_error([HostDeath(UPDATE, 1, said)], HOSTS))
    assert (
        "running out of memory (22.41 GiB used / 23.54 GiB limit). The largest processes:" in text
    )
    assert "17.47 GiB  process 77: python train.py\n" in text and "kill -9" not in text


def test_a_host_that_died_is_named_by_its_role_and_rank_there(tmp_path):
    """A generator's rank 0 on device 2; and of several calls that were queued the one in hand."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "generator-0.log").write_text("out of memory\n")
    first = GroupCall(3, "generator", "generate_sequences", [2], [None])
    queued = GroupCall(4, "reference", "compute_ref_log_prob", [0, 2], [None] * 2)
    roles = {2: {"generator": 0, "reference": 1}}
    found = [HostDeath(queued, 1, "killed"), HostDeath(first, 0, "killed")]
    text = str(build_root_cause_error(found, HostRegistry(IDENTITIES, roles, tmp_path)))
    assert text.startswith("generator rank 0 (process 13 on 10.0.0.2) died during generator.gen")
    assert "generator-0.log:\n  out of memory" in text


def test_a_call_that_takes_too_long_is_named_by_its_rank_not_by_its_device():
    call = GroupCall(3, "generator", "generate_sequences", [2], [None])
    text = str(HangReport({2: (call, 0)}, [2], 5.0, [None] * 3, HOSTS).error())
    assert text.startswith("generator.generate_sequences on rank 0 did not finish within 5 s")


@pytest.mark.parametrize(
    ("message", "cure"),
    [
        ("AF_UNIX path length cannot exceed 107 bytes: /scratch/x", "RAY_TMPDIR=/tmp."),
        ("[Errno 28] No space left on device", "Free space in /tmp/ray and in /dev/shm"),
        ("[Errno 13] Permission denied: '/tmp/ray/session_x'", "has to write to /tmp/ray."),
        ("the object store memory of 40 MB is below the minimum", "docker run --shm-size=8g"),
        ("bind: Address already in use", "Start the job again."),
        ("The current node timed out during startup.", ""),
    ],
)
def test_a_ray_that_cannot_start_is_answered_by_its_cause(message, cure):
    found = cure_of(OSError(message), "/tmp/ray")
    assert cure in found and bool(cure) == bool(found)


def test_folders_are_tried_and_nothing_is_left(tmp_path):
    (file := tmp_path / "file").touch()
    url = f"memory://{tmp_path.name}/steps"
    folders = {"run.root": str(tmp_path), "checkpoint.folder": url}
    folders |= {"fork": str(file), "resume": "nobody://knows/this"}
    errors = access_errors(folders, ["run.root", "checkpoint.folder"])
    assert errors.keys() == {"fork", "resume"} and "Not a directory" in errors["fork"]
    assert list(tmp_path.iterdir()) == [file] and not parse_location(url).is_dir()
    assert access_errors({"run.root": f"{file}/below"}, ["run.root"]).keys() == {"run.root"}


def test_nodes_that_cannot_use_a_folder_are_named():
    check_access({"10.0.0.1": {}}, {})
    errors = {"10.0.0.1": {}, "10.0.0.2": {"checkpoint.folder": "NoCredentialsError: none"}}
    words = "checkpoint.folder=s3://b/c on 10.0.0.2: NoCredentialsError: none"
    with pytest.raises(ConfigError, match=f"(?s)environment of `ray start`.*{words}$"):
        check_access(errors, {"checkpoint.folder": "s3://b/c"})


def test_workers_write_checkpoints_where_their_folder_is(tmp_path):
    config = load_config(["checkpoint.folder=s3://bucket/mine", "checkpoint.every=1"])
    found = folders_of_workers(replace(config, fork="s3://bucket/old"), tmp_path)
    urls = {"checkpoint.folder": "s3://bucket/mine", "fork": "s3://bucket/old"}
    assert found == ({"run.root": str(tmp_path), **urls}, ["run.root", "checkpoint.folder"])
    assert folders_of_workers(load_config(), tmp_path)[1] == ["run.root"]

"""The cluster as plain data: written by hand, as JSON, and measured."""

import json

import pytest
from settings import configured

from hybridrl.cli import main
from hybridrl.errors import ConfigError
from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.machine import cluster_probe, cluster_rates, device_probe
from hybridrl.planner.machine import device_catalog as devices
from hybridrl.planner.machine.device_catalog import GIB, parse_cluster
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.named_models import materialize_named_models
from hybridrl.system.cluster_spec import ClusterSpec, DeviceSlot, DeviceSpec, resolve_devices
from hybridrl.system.timing import measure_seconds


def test_several_kinds_and_their_network():
    cluster = parse_cluster("8xL4,2x4xh100@200Gbps,1xA100@500Mbps")
    assert str(cluster) == "8 x L4, 8 x H100, 1 x A100-80GB"
    assert cluster.nodes == ["node0", "node1", "node2", "node3"]
    assert cluster.devices[12].index == 0  # of its node
    rates = [cluster.hosts[node].network.bandwidth for node in cluster.nodes]
    assert rates == [12.5e9, 25e9, 25e9, 500e6 / 8]
    assert cluster.memory == 22.0 * GIB
    assert cluster.memory_of(8) == 79.1 * GIB
    assert parse_cluster("64xH200").devices_per_node == 8


@pytest.mark.parametrize(
    "text",
    [
        *("8xL4@", "8xL4@0Gbps", "8xL4,", "8xL4@400", "0x8xL4", "8xL4;8xH100"),
        *("8", "8xT1000", "x8xH100", "0xH100", "H100"),
    ],
)
def test_devices_that_are_none(text):
    with pytest.raises(ConfigError, match=r"--devices .*16xH100@400Gbps"):
        parse_cluster(text)


def test_json_and_back(tmp_path):
    cluster = parse_cluster("12xL4,16xH100@400Gbps")
    assert ClusterSpec.from_json(cluster.to_json()) == cluster
    (tmp_path / "mine.json").write_text(cluster.to_json())
    assert parse_cluster(f"{tmp_path}/mine.json") == cluster


@pytest.mark.parametrize(
    "change",
    [
        lambda read: read["devices"][0].update(model="other"),
        lambda read: read["devices"][0].update(kind="tpu"),
        lambda read: read.update(devices=[]),
        lambda read: read["models"]["L4"].update(memory="much"),
        lambda read: read["models"]["L4"].update(speed=3),
        lambda read: read["hosts"]["node0"].pop("network"),
        lambda read: read.pop("models"),
        lambda read: read["models"]["L4"].pop("memory"),
        lambda read: read["models"]["L4"].update(memory=0),
        lambda read: read["models"]["L4"].update(memory=True),
        lambda read: read["models"]["L4"].update(memory={}),
        lambda read: read["models"]["L4"].update(memory=float("inf")),
        lambda read: read["models"]["L4"].update(flops=3e13),
        lambda read: read["models"]["L4"].update(flops={"bfloat16": 0.0}),
        lambda read: read["models"]["L4"].update(measured=5),
        lambda read: read["models"]["L4"].pop("bandwidth"),
        lambda read: read["hosts"]["node0"]["inside"].update(bandwidth=0),
        lambda read: read["hosts"]["node0"].update(disk={}),
        lambda read: read["devices"][0].update(cuont=8),
        lambda read: read["devices"][0].update(count=2.7),
        lambda read: read["devices"][0].update(count=-1),
        lambda read: read["devices"][0].update(count=10**9),
    ],
)
def test_a_file_that_is_no_cluster(tmp_path, change):
    read = json.loads(parse_cluster("2xL4").to_json())
    change(read)
    (tmp_path / "mine.json").write_text(json.dumps(read))
    with pytest.raises(ConfigError, match="This is no cluster"):
        parse_cluster(f"{tmp_path}/mine.json")
    with pytest.raises(ConfigError, match="there is no such file"):
        parse_cluster(f"{tmp_path}/other.json")


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"devices": "\xff"}'])
def test_a_file_that_is_no_text_or_no_json(tmp_path, data):
    (tmp_path / "mine.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"--devices .*mine.json: "):
        parse_cluster(f"{tmp_path}/mine.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda read: read.pop("hosts"),
        lambda read: read.update(hosts={"other": read["hosts"]["node0"]}),
        lambda read: read["models"]["L4"].update(flops={}),
    ],
)
def test_a_file_says_how_fast_its_devices_are(tmp_path, change):
    read = json.loads(parse_cluster("2xL4").to_json())
    change(read)
    (tmp_path / "mine.json").write_text(json.dumps(read))
    with pytest.raises(ConfigError, match="does not say how fast"):
        parse_cluster(f"{tmp_path}/mine.json")


def test_a_precision_that_a_file_says_nothing_of(tmp_path):
    read = json.loads(parse_cluster("2xL4").to_json())
    del read["models"]["L4"]["flops"]["bfloat16"]
    (tmp_path / "mine.json").write_text(json.dumps(read))
    cluster = parse_cluster(f"{tmp_path}/mine.json")
    assert len(DeviceRates.known(cluster, "float32")) == 2
    with pytest.raises(ConfigError, match=r"model.dtype=bfloat16: .* nothing of bfloat16"):
        DeviceRates.known(cluster, "bfloat16")


def test_more_devices_than_anybody_has():
    with pytest.raises(ConfigError, match="up to 10,000 devices"):
        parse_cluster("99999999xH100")


def test_devices_that_differ_are_planned_each_for_itself():
    overrides = ["model.path=llama-7b", "placement=separation", "rollout.parallel.tp=2"]
    cluster = parse_cluster("8xH100,8xL4")
    with materialize_named_models(configured(overrides)) as config:
        plan = build_job_plan(config, cluster, rates=DeviceRates.known(cluster, "bfloat16"))
    of_small = plan.memory[-1]
    assert of_small.devices == tuple(range(8, 16))
    generates = next(phase for phase in of_small.phases if phase.phase == "generate")
    assert 0 < generates.parts["kv_cache"] < 22 * GIB  # a share of its own memory
    assert of_small.filled == of_small.fullest.bytes / (22 * GIB)


def test_whoever_works_together_waits_for_the_slowest():
    def trains(cluster):
        with materialize_named_models(configured(["model.path=llama-7b"])) as config:
            plan = build_job_plan(config, cluster, rates=DeviceRates.known(cluster, "bfloat16"))
        return plan.times.phases["actor", "train"]

    of_weak, mixed, of_strong = (
        trains(parse_cluster(t)) for t in ("16xL4", "8xH100,8xL4", "16xH100")
    )
    assert of_weak == mixed > 2 * of_strong


def test_what_a_probe_measures_is_a_cluster_to_plan_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cluster_probe, "_MATRIX_SIDE", {"cpu": 32})
    monkeypatch.setattr(cluster_probe, "_STORE_BYTES", 1 << 16)
    monkeypatch.setattr(device_probe, "SMALL_OPS", 10)
    monkeypatch.setattr(device_probe, "STREAM", 1 << 20)
    monkeypatch.setitem(measure_seconds.__kwdefaults__, "least", 0.0)
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "probe", "--number=1", "--devices=cpu", "--json", f"--store={tmp_path}"])
    assert not ended.value.code
    found = ClusterSpec.from_json(capsys.readouterr().out)
    assert found.rates_known and found.models["CPU slot"].flops["float32"] > 1e6
    assert found.hosts["localhost"].store.bandwidth > 1e3
    monkeypatch.setattr(cluster_rates, "probe_cluster", None)  # it is not measured again
    rates = cluster_rates.resolve_cluster_rates(ClusterSpec.of_one_node("cpu", 1))
    assert rates.models == found.models
    assert "rates measured" in DeviceRates.known(rates, "float32")[0].source


def test_no_devices_are_not_all_devices():
    with pytest.raises(ConfigError, match="num_devices=0"):
        resolve_devices("cpu", 0, 0, 2)


def test_a_probe_needs_a_folder_to_write_to(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "probe", f"--store={tmp_path}/none"])
    assert ended.value.code == 2
    assert "--store" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA GeForce RTX 4090", 23.5, "RTX4090"),
        ("NVIDIA L40", 44.4, None),
        ("NVIDIA GH200 480GB", 95.0, None),
        ("NVIDIA H100 PCIe", 79.1, None),
    ],
)
def test_makers_figures_are_those_of_the_device(name, gib, known):
    here = ClusterSpec([DeviceSlot("cuda", "n", 0, name)], {name: DeviceSpec(gib * devices.GIB)})
    found = cluster_rates.apply_vendor_rates(here)
    assert (found is None) == (known is None)
    if known:
        assert found.models[name].bandwidth == devices.ACCELERATORS[known][0].bandwidth
        assert found.models[name].memory == gib * devices.GIB


def test_devices_that_differ_have_each_their_own():
    names = {"NVIDIA H100 80GB HBM3": 79.1, "NVIDIA L4": 22.0}
    here = ClusterSpec(
        [DeviceSlot("cuda", name, 0, name) for name in names],
        {name: DeviceSpec(gib * devices.GIB) for name, gib in names.items()},
    )
    found = cluster_rates.apply_vendor_rates(here)
    assert [found.models[name].flops["bfloat16"] for name in names] == [9.89e14, 1.21e14]
    assert devices.add_device_memory(here) is here
    with pytest.raises(ConfigError, match="no GPU here"):
        devices.add_device_memory(ClusterSpec([DeviceSlot("cuda", "n", 0)]))

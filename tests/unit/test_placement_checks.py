"""Cuts that cannot be are refused in a sentence that names the setting."""

import contextlib

import pytest
from settings import configured
from transformers import Qwen2Config

from hybridrl.checks.machine.placement_checks import resolve_placement, resolve_roles
from hybridrl.checks.settings.training_checks import find_ineffective_encodings
from hybridrl.errors import ConfigError
from hybridrl.system.cluster_spec import ClusterSpec, DeviceSlot


@pytest.mark.parametrize(
    ("devices", "overrides", "words"),
    [
        (2, ["actor.parallel.tp=3"], "tp=3 takes 3 devices or a multiple, but there are 2"),
        (2, ["actor.parallel.dp=2", "actor.parallel.tp=2"], "dp=2 x tp=2 makes 4 devices"),
        (4, ["actor.parallel.shards=3"], "shards=3 does not divide the 4 data-"),
        (
            4,
            ["actor.parallel={shards: 1, gradients: int8}"],
            "with actor.parallel.shards=1 none do",
        ),
        (
            4,
            ["actor.parallel={shards: 1, weights: int4_difference}"],
            "with actor.parallel.shards=1 none are",
        ),
        (
            4,
            ["actor.parallel={tp: 2, weights: int4_difference}"],
            "weights=int4_difference does not go with actor.parallel.tp=2",
        ),
        (
            4,
            ["actor.parallel={pp: 2, weights: int4_difference}"],
            "does not go with actor.parallel.pp=2",
        ),
        (2, ["actor.parallel.tp=0"], "tp=0: must be at least 1"),
        (2, ["actor.parallel.chunks=0"], "chunks=0: must be at least 1"),
        (8, ["actor.parallel.tp=8"], "tp=8 does not divide the 4 attention heads"),
        (8, ["actor.parallel.ulysses=8"], "does not divide the model's 4 attention heads"),
        (4, ["actor.parallel.pp=4"], "only 2 layers"),
        (2, ["actor.parallel.pp=2", "actor.parallel.chunks=2"], "only 2 layers"),
        (4, ["rollout.parallel.tp=3"], "rollout.parallel.tp=3 does not divide the 4 devices"),
        (6, ["actor.parallel.tp=2", "rollout.parallel.tp=3"], "one must divide the other"),
        (2, ["recover.min_devices=3"], "min_devices=3: the job has only 2 devices. Set it to 2"),
        (2, ["actor.lora.rank=4", "actor.parallel.tp=2"], "adapters are not cut over devices"),
        (1, ["rollout.routing_replay=true"], "replay=true: the tiny model has no routers"),
        (1, ["actor.router_loss_weight=0.01"], "weight=0.01: the tiny model has no routers"),
        (1, ["rollout.quantization=fp8"], "fp8: the job's devices are CPUs, .* Set rollout.quant"),
        (
            1,
            ["rollout.quantization=int8", "model.tiny.experts=4"],
            "int8 is for models of attention and linear layers, and the tiny model .* Set rollout.",
        ),
    ],
)
def test_what_cannot_be_is_a_sentence(devices, overrides, words):
    with pytest.raises(ConfigError, match=words):
        resolve_placement(configured(overrides), ClusterSpec.of_one_node("cpu", devices))


def test_separation_says_what_it_misses():
    cluster = ClusterSpec.of_one_node("cpu", 2)
    config = configured(["placement=separation", "algorithm=ppo"])
    with pytest.raises(ConfigError, match=r"only reference, reward. Add `actor` to Job\(roles="):
        resolve_placement(config, cluster, ["reference", "reward"])
    assert resolve_placement(config, cluster, ["actor", "reward"]).is_separated
    config.trainer.name = "sft"
    with pytest.raises(ConfigError, match="this trainer generates nothing"):
        resolve_placement(config, cluster)


@pytest.mark.parametrize(
    ("devices", "overrides"),
    [
        (1, []),
        (8, ["actor.parallel.tp=4", "rollout.parallel.tp=2", "actor.parallel.pp=2"]),
        (4, ["rollout.parallel.tp=2"]),
        (8, ["actor.parallel.ring=2", "actor.parallel.ulysses=2", "actor.parallel.shards=2"]),
        (2, ["actor.lora.rank=4", "actor.parallel.ring=2"]),
        (2, ["rollout.quantization=int8", "model.dtype=float32"]),
    ],
)
def test_what_can_be_is_not(devices, overrides):
    resolve_placement(configured(overrides), ClusterSpec.of_one_node("cpu", devices))


def test_adapters_forbid_to_cut_only_the_models_that_have_them(tmp_path):
    Qwen2Config(num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    cluster, adapters = ClusterSpec.of_one_node("cpu", 2), ["algorithm=ppo", "actor.lora.rank=4"]
    reward = [f"reward.model={tmp_path}", "models.reward.parallel.tp=2"]
    resolve_placement(configured([*adapters, *reward]), cluster)
    with pytest.raises(
        ConfigError, match=r"adapters are not cut .* models\.critic\.parallel\.tp=1"
    ):
        resolve_placement(configured([*adapters, "models.critic.parallel.tp=2"]), cluster)


def test_gpus_compute_in_8_bits_beside_16():
    cluster = ClusterSpec.of_one_node("cuda", 1)
    resolve_placement(configured(["rollout.quantization=fp8"]), cluster)
    with pytest.raises(ConfigError, match=r"=int8 with model\.dtype=float32: .* Set model\.dtype="):
        resolve_placement(configured(["rollout.quantization=int8", "model.dtype=float32"]), cluster)


@pytest.mark.parametrize(
    ("devices", "overrides", "said"),
    [
        (1, ["actor.parallel.gradients=auto"], ["actor.parallel.gradients=auto does nothing"]),
        (2, ["actor.parallel.gradients=auto"], []),
        (2, ["actor.parallel={gradients: int8, tp: 2}"], ["one rank of `actor` has all"]),
        (4, ["actor.parallel={gradients: int8, tp: 2}"], []),
        (2, ["actor.parallel={gradients: int8, ring: 2}"], []),
        (1, ["algorithm=ppo"], []),
        (1, ["actor.parallel.weights=int4_difference"], ["weights=int4_difference does nothing"]),
        (2, ["actor.parallel.weights=int4_difference"], []),
        (
            2,
            ["algorithm.kl_coefficient=0.1", "models.reference.parallel.gradients=int8"],
            ["models.reference.parallel.gradients=int8 does nothing in this job: `reference` does"],
        ),
    ],
)
def test_sums_that_there_are_not_are_told(devices, overrides, said):
    config = configured(overrides)
    placement = resolve_placement(config, ClusterSpec.of_one_node("cpu", devices))
    found = find_ineffective_encodings(config, resolve_roles(config, None), placement)
    assert len(found) == len(said)
    for sentence, words in zip(found, said, strict=True):
        assert words in sentence


APART = "placement=separation"


@pytest.mark.parametrize(
    ("nodes", "tp", "overrides", "said"),
    [
        ("aabbbb", 2, [], None),
        ("aabbbb", 3, [], "ranks 0 to 2 of `actor` would .* on different nodes [(]a, b[)]"),
        ("aaabbb", 3, [APART, "placement.generation_devices=3"], None),
        ("aaaaab", 2, [APART, "placement.generation_devices=2"], "0 to 1 of `generator`"),
    ],
)
def test_ranks_that_generate_together_are_on_one_node(nodes, tp, overrides, said):
    cluster = ClusterSpec([DeviceSlot("cpu", node, 0) for node in nodes])
    config = configured([*overrides, f"rollout.parallel.tp={tp}"])
    with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
        resolve_placement(config, cluster)

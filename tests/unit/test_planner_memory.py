"""What a plan says of memory: against what torch allocates, and against what must be."""

from dataclasses import replace

import pytest
import torch
import transformers
from published_models import PUBLISHED
from settings import configured
from tiers import few_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Qwen2Config,
    Qwen3MoeConfig,
)

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import CHECKPOINTING_MODES, LoraAdapterConfig
from hybridrl.models import model_shape, token_bytes
from hybridrl.models.lora import add_adapters
from hybridrl.models.model_loading import make_tiny_config
from hybridrl.models.model_shape import compute_model_shape
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.models.packed_samples import PackedSamples
from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.machine.device_catalog import GIB, add_device_memory, parse_cluster
from hybridrl.planner.step.step_calls import SampleLengths
from hybridrl.system.cluster_spec import ClusterSpec

CONFIG = Qwen2Config(
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=100,
    tie_word_embeddings=False,
)

LORA = LoraAdapterConfig(rank=4)


def model_of(config, lora=None):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    if lora is not None:
        add_adapters(model, lora)
    return model


@pytest.mark.parametrize(
    ("tied", "lora"), few_of([(False, LORA), (True, LORA), (False, None), (True, None)], 3, True)
)
def test_parameters_are_those_of_the_model(tied, lora):
    config = Qwen2Config(**{**CONFIG.to_dict(), "tie_word_embeddings": tied})
    shape, model = compute_model_shape(config, "float32", lora=lora), model_of(config, lora)
    assert shape.parameters.all == sum(p.numel() for p in model.parameters())
    assert shape.parameters.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape.tied is tied


def test_a_rank_of_tensor_parallelism_has_its_part():
    whole, part = (
        compute_model_shape(CONFIG, "float32"),
        compute_model_shape(CONFIG, "float32", tp=2),
    )
    # All matrices are halved; norms and biases are small.
    assert part.layer.all == pytest.approx(whole.layer.all / 2, rel=0.02)
    assert part.embedding.all == whole.embedding.all / 2
    assert part.key_value == whole.key_value / 2


def test_saved_activations_are_what_autograd_saves():
    """Each tensor that a real forward keeps for its backward, counted once, without parameters."""
    tokens, found = 64, []
    for layers in (2, 3):
        given = {**CONFIG.to_dict(), "num_hidden_layers": layers}
        config = Qwen2Config(**{**given, "layer_types": CONFIG.layer_types[:1] * layers})
        model = model_of(config)
        model.set_attn_implementation("hybridrl_packed")
        own = {p.data_ptr() for p in model.parameters()}
        saved = {}

        def keep(tensor, own=own, saved=saved):
            if tensor.data_ptr() not in own:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        rows = [[1] * 16] * (tokens // 16)
        batch = Batch.from_columns({"prompt_ids": rows, "response_ids": [[1]] * len(rows)})
        samples = PackedSamples.of(batch, torch.device("cpu"))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            states = CausalPolicy(model).hidden(samples)
        found.append(sum(saved.values()) / samples.input_ids.numel())
        del states
    shape = compute_model_shape(CONFIG, "float32")
    assert shape.training.per_layer == pytest.approx(found[1] - found[0], rel=0.05)


@pytest.mark.more
def test_checkpointing_keeps_one_state_for_each_layer():
    none, selective, block, full, offload = (
        compute_model_shape(CONFIG, "float32", checkpointing=kept).training
        for kept in CHECKPOINTING_MODES
    )
    assert full.per_layer == 64 * 4 and full.fixed > none.fixed
    assert full.per_layer < block.per_layer <= selective.per_layer < none.per_layer
    assert offload == replace(full, per_layer=0)


def test_checkpointing_by_operation_keeps_what_attention_gives():
    """For each head a number beside its values."""
    full, block = (
        compute_model_shape(CONFIG, "float32", checkpointing=kept).training
        for kept in ("full", "block")
    )
    assert block.per_layer == full.per_layer + 4 * (64 + 4)


def test_between_layers_a_tensor_parallel_rank_has_its_own_tokens():
    whole, own = (
        compute_model_shape(CONFIG, "float32", tp=2, checkpointing="full", splits_tokens=splits)
        for splits in (False, True)
    )
    assert own.training.per_layer == whole.training.per_layer / 2
    # Inside attention and MLPs it has all of them, with half of the heads and columns.
    assert 0.5 < own.training.fixed / whole.training.fixed < 0.9
    # At the peak of a forward two states are held, before and after the norm: half of each is gone.
    assert whole.scoring.fixed - own.scoring.fixed == 2 * 4 * 64 / 2
    assert own.crosswise == (64 * 64 + 64 * 256) / 2  # projections out of attention and MLP


@pytest.mark.parametrize("make", few_of([DeepseekV3Config, Qwen3MoeConfig], [Qwen3MoeConfig]))
def test_tokens_are_counted_as_split_only_where_the_plan_cuts_whole_layers(make):
    """Attention with latent keys is left whole by the plan of transformers, so that every rank has
    all tokens; of a mixture with common attention each has its own."""
    config = make(
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 32},
        **{"num_experts_per_tok": 2, "max_position_embeddings": 64},
        **(
            {"n_routed_experts": 4, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
            | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
            | {"qk_nope_head_dim": 8, "v_head_dim": 16}
            if make is DeepseekV3Config
            else {"num_experts": 4, "head_dim": 16}
        ),
    )
    whole, own = (
        compute_model_shape(config, "float32", tp=2, checkpointing="full", splits_tokens=splits)
        for splits in (False, True)
    )
    factor = 1 if make is DeepseekV3Config else 2
    assert own.training.per_layer == whole.training.per_layer / factor


def plan_of(*overrides, devices=1, lengths=(16, 48), tmp_path):
    config = make_tiny_config(hidden_size=128, layers=2, heads=4, context=128)
    config.vocab_size = 64
    config.save_pretrained(tmp_path)
    overrides = [f"model.path={tmp_path}", "rollout=transformers", *overrides]
    cluster = ClusterSpec.of_one_node("cpu", devices)
    return build_job_plan(
        configured(overrides), add_device_memory(cluster), lengths=SampleLengths.alike(*lengths)
    )


def phases(plan):
    return {(p.role, p.phase): p.parts for device in plan.memory for p in device.phases}


def test_shards_shrink_with_devices_and_copies_do_not(tmp_path):
    one, two = (phases(plan_of(devices=n, tmp_path=tmp_path)) for n in (1, 2))
    at = ("actor", "train")
    for name, factor in {"parameters": 2, "optimizer": 2, "generation copy": 1}.items():
        assert one[at][name] == pytest.approx(factor * two[at][name])


def test_a_generator_in_8_bits_takes_half_of_16(tmp_path):
    options = ["model.dtype=bfloat16", "rollout.engine=vllm"]
    at = ("actor", "generate")
    whole, few = (
        phases(plan_of(*options, f"rollout.quantization={kind}", tmp_path=tmp_path))[at]
        for kind in ("none", "int8")
    )
    shape = compute_model_shape(AutoConfig.from_pretrained(tmp_path), "bfloat16")
    saved = shape.layer.all * shape.layers * (2 - 1 - 4 / 128)  # a scale for each row of 128
    assert whole["generation copy"] - few["generation copy"] == pytest.approx(saved)


def test_a_forward_leaves_nothing_gathered(tmp_path):
    kl = phases(plan_of("algorithm.kl_coefficient=0.1", tmp_path=tmp_path))
    assert kl["reference", "score"]["gathered"] > 0
    assert "gathered" not in kl["actor", "generate"]


@pytest.mark.more
def test_fewer_tokens_and_offloading_take_less():
    cluster = parse_cluster("8xA100")
    base = ["model.path=llama-7b", "model.dtype=bfloat16", "rollout.max_tokens=1024"]
    base += ["data.max_prompt_tokens=1024"]

    def fullest(*overrides):
        from hybridrl.planner.named_models import materialize_named_models

        with materialize_named_models(configured([*base, *overrides])) as config:
            plan = build_job_plan(config, cluster)
        return {k: sum(v.values()) for k, v in phases(plan).items()}["actor", "train"]

    usual = fullest()
    for override in (
        "actor.tokens_per_microbatch=4096",
        "actor.gradient_checkpointing=true",
        "actor.offload_parameters=true",
        "actor.parallel.tp=2",
    ):
        assert fullest(override) < usual


def test_checkpoints_take_memory_of_their_nodes():
    from hybridrl.planner.named_models import materialize_named_models

    base = ["model.path=llama-7b", "algorithm=ppo"]

    def bytes_of(devices, *overrides):
        with materialize_named_models(configured([*base, *overrides])) as config:
            return build_job_plan(config, parse_cluster(devices)).host_bytes

    copy = bytes_of("2x8xA100", "checkpoint.every=1")
    # Of actor and critic, over two nodes. A rank's part of each is one tensor in pinned memory,
    # which takes the next power of two.
    part = 12 * 6.7e9 / 16
    assert 2**32 < part < 2**33 and copy == 2 * 8 * 2**33
    assert bytes_of("2x8xA100") == 0
    assert bytes_of("2x8xA100", "checkpoint.every=1", "checkpoint.asynchronous=false") == 0
    kept = ["checkpoint.every=1", "checkpoint.memory_copies=1"]
    # On two nodes each, the one before and the new one.
    assert bytes_of("2x8xA100", *kept) == pytest.approx(copy + 4 * 16 * part, rel=0.02)
    # One node has all.
    assert bytes_of("8xA100", *kept) == pytest.approx(2 * 8 * 2**34 + 2 * 16 * 2 * part, rel=0.02)


def test_every_node_shares_its_memory_among_its_slots():
    one = add_device_memory(ClusterSpec.of_one_node("cpu", 1))
    assert add_device_memory(ClusterSpec.of_one_node("cpu", 4)).memory == one.memory / 4
    assert one.memory > GIB / 4


@pytest.mark.more
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2", "qwen3_5_text", "deepseek_v3"])
def test_layers_of_several_kinds_are_counted_on_average(family):
    config = AutoConfig.for_model(family)
    shape = compute_model_shape(config, "bfloat16")
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    assert shape.parameters.all == pytest.approx(whole.num_parameters(), rel=0.06)
    assert shape.training.per_layer > shape.scoring.per_layer >= 0


@pytest.mark.more
@pytest.mark.parametrize(
    "name", ["qwen3_5", "qwen3_vl", "gemma3", "gemma4", "mistral3", "glm46v", "glm4_moe"]
)
def test_models_as_they_are_published_are_counted_without_what_is_not_trained(name):
    """Gemma 4 computes with the id of its padding token; Qwen3-VL and Mistral 3 are no class of
    `AutoModelForCausalLM`; the first layers of GLM 4.5 have no experts."""
    published = PUBLISHED[name]
    kind = getattr(transformers, published.architecture)
    described = published.config(lambda token: 1)
    described.get("text_config", described)["vocab_size"] = 320
    config = kind.config_class(**described)
    shape = compute_model_shape(config, "float32")
    with torch.device("meta"):
        whole = kind(config)
    parts = {*whole.get_decoder().parameters(), *whole.get_output_embeddings().parameters()}
    assert shape.parameters.all == sum(p.numel() for p in parts)
    assert shape.training.per_layer > 0


@pytest.mark.more
def test_layers_without_experts_count_as_what_they_are():
    """DeepSeek-V3: 671 billion parameters, three of its 61 layers dense."""
    config = AutoConfig.for_model(
        "deepseek_v3",
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        first_k_dense_replace=3,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        vocab_size=129280,
        tie_word_embeddings=False,
    )
    shape = compute_model_shape(config, "bfloat16", checkpointing="full")
    assert shape.parameters.all == 671_026_404_352
    assert shape.active == pytest.approx(37.5e9, rel=0.01)
    assert shape.key_value == 512 + 64  # latents


@pytest.mark.more
def test_only_layers_that_attend_have_a_cache():
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=4)
    shape = compute_model_shape(config, "bfloat16", checkpointing="full")
    of_layer = 2 * config.head_dim * config.num_key_value_heads
    assert shape.key_value == config.layer_types.count("full_attention") * of_layer / 4


@pytest.mark.more
def test_experts_that_a_token_does_not_meet_are_counted_apart():
    """Qwen3-30B-A3B: 30.5 billion parameters, of which 3.3 are active."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        tie_word_embeddings=False,
    )
    shape = compute_model_shape(config, "bfloat16")
    assert shape.parameters.all == 30_532_122_624
    assert shape.active == pytest.approx(3.35e9, rel=0.005)
    halves = compute_model_shape(config, "bfloat16", tp=2)
    assert halves.parameters.all == pytest.approx(shape.parameters.all / 2, rel=0.01)
    assert halves.active_of_layer == pytest.approx(shape.active_of_layer / 2, rel=0.01)
    dense = compute_model_shape(CONFIG, "bfloat16")
    assert dense.active == dense.parameters.all


@pytest.mark.more
def test_a_model_that_goes_from_token_to_token_is_counted_with_few(monkeypatch):
    """Recurrence in Python makes operations for every token, and each counts alike."""
    config = AutoConfig.for_model(
        "jamba",
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=4,
        use_mamba_kernels=False,
        num_hidden_layers=4,
    )
    ran = []
    run = token_bytes._run
    monkeypatch.setattr(token_bytes, "_run", lambda m, n, **k: (ran.append(n), run(m, n, **k))[1])
    few = compute_model_shape(config, "bfloat16")
    assert max(ran) == 2 * token_bytes.MIN_ROW_TOKENS
    monkeypatch.setattr(token_bytes, "MIN_ROW_TOKENS", 4 * token_bytes.MIN_ROW_TOKENS)
    monkeypatch.setattr(model_shape, "_counted", {})
    monkeypatch.setattr(model_shape, "_few_layers", {})
    more = compute_model_shape(config, "bfloat16")
    assert max(ran) == 2 * token_bytes.MIN_ROW_TOKENS
    assert few.training.per_layer == pytest.approx(more.training.per_layer, rel=0.02)


def test_roles_are_built_beside_those_that_are_there():
    """vLLM takes its share while the actor is built, and sleeps when the reference is."""
    from hybridrl.planner.named_models import materialize_named_models

    base = ["model.path=llama-7b", "model.dtype=bfloat16", "algorithm.kl_coefficient=0.1"]
    cluster = parse_cluster("8xA100")
    with materialize_named_models(configured([*base, "rollout.memory_share=0.5"])) as config:
        found = phases(build_job_plan(config, cluster))
    actor, reference = found["actor", "load"], found["reference", "load"]
    share = actor["generation copy"] + actor["kv_cache"] + actor["vllm"]
    assert share == pytest.approx(cluster.memory / 2)
    assert "kv_cache" not in reference and "optimizer" not in reference
    # One that only scores is held in bfloat16.
    assert reference["parameters"] == pytest.approx(1.5 * actor["parameters"])


def test_differences_of_weights_take_a_copy_on_each_device(tmp_path):
    settings = ["model.dtype=bfloat16", "actor.parallel.weights=int4_difference"]
    plain, ours = (plan_of(*settings[:given], devices=2, tmp_path=tmp_path) for given in (1, 2))
    at = ("actor", "train")
    copy = phases(ours)[at]["parameters"] - phases(plain)[at]["parameters"]
    parts = phases(plain)[at]["parameters"]  # half of the float32 parameters
    assert copy == pytest.approx(parts)  # all of them in bfloat16

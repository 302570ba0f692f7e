"""Plans count the prompt of a group once where updates compute it once."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from settings import configured
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from hybridrl.config.schema import ParallelConfig
from hybridrl.errors import ConfigError, NotPlannedError
from hybridrl.models.model_shape import compute_model_shape
from hybridrl.models.prompt_sharing_gain import LEAST_SAVINGS
from hybridrl.placement import RolePlace
from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.job_roles import load_least_saving
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.memory.model_part import ModelPart
from hybridrl.planner.plan_tables import format_step_sizes
from hybridrl.planner.step.step_calls import PlannedCall, StepSizes, plan_micro_batches
from hybridrl.system.cluster_spec import ClusterSpec, DeviceSlot, DeviceSpec

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
RATES = DeviceRates(5e10, 5e10, 0.0, 0.0, 1e10, 1e9, 1e9, 1.0, 1e-5, "by hand")
CORE = ClusterSpec([DeviceSlot("cpu", "here", 0, "a core")], {"a core": DeviceSpec(1e11)})
SHARED = "prompts computed once for their 8 samples"


def packed(budget, *, prompt=256.0, response=64.0, prompts=1, least="auto", samples=8, **cut):
    """The micro-batches of one rank with samples of as many prompts."""
    sizes = StepSizes(prompts, prompts * 8, prompt, response, response, 1)
    config = SimpleNamespace(actor=SimpleNamespace(tokens_per_microbatch=budget))
    ranks = cut.get("ulysses", 1) * cut.pop("dp", 1)
    place = RolePlace(tuple(range(ranks)), ParallelConfig(**cut))
    call = PlannedCall("actor", "train", prompts * samples)
    return plan_micro_batches(config, sizes, call, place, LEAST_SAVINGS.get(least))


@pytest.mark.parametrize(
    ("options", "count", "tokens", "samples", "total", "together"),
    [
        ({"budget": 768}, 1, 768, 8, 768, 8),  # 256 + 8 x 64
        ({"budget": 767}, 2, 512, 4, 1024, 4),  # a group is cut: twice 256 + 4 x 64
        ({"budget": 1600, "prompts": 3}, 2, 1536, 16, 2304, 8),  # and packed whole
        ({"budget": 384, "ulysses": 2}, 1, 384, 8, 384, 8),
        ({"budget": 768, "dp": 4, "prompts": 2}, 1, 512, 4, 512, 4),  # half a group each
        ({"budget": 640, "least": "false"}, 4, 640, 2, 2560, 1),  # 320 each
        ({"budget": 639, "samples": 1}, 8, 320, 1, 2560, 1),  # one sample of each prompt
        ({"budget": 319}, 8, 320, 1, 2560, 1),
        ({"budget": 9999, "prompt": 8.0}, 1, 576, 8, 576, 1),  # spares 56 of 576: below 64
        ({"budget": 9999, "prompt": 8.0, "least": "true"}, 1, 520, 8, 520, 8),
        ({"budget": 9999, "prompt": 64.0, "response": 999.0}, 1, 8504, 8, 8504, 1),  # a twentieth
    ],
)
def test_a_prompt_counts_once_where_its_samples_share_it(
    options, count, tokens, samples, total, together
):
    if options.get("samples") == 1:
        options = options | {"prompts": 8}
    found = packed(**options)
    assert (found.count, found.tokens, found.samples) == (count, tokens, samples)
    assert (found.total, found.together) == (total, together)


def test_responses_and_what_they_compare_with_stay():
    shared, alone = packed(9999), packed(9999, least="false")
    assert shared.response_share == 512 / 768 and alone.response_share == 512 / 2560
    # Half of 256 x 256 for the prompt; each of 8 x 64 with 256, and with 32 of its response.
    assert shared.length / 2 * 768 == 256 * 128 + 512 * (256 + 32)
    assert alone.length == 320


def planned(folder, prompt, *settings):
    """The plan of an update of one group of 8 samples of 256 tokens."""
    config = configured(
        [
            *("rollout=transformers", "executor=inline", "data.prompts_per_step=1"),
            *("rollout.samples_per_prompt=8", "rollout.max_tokens=256"),
            *("actor.gradient_checkpointing=none", "actor.compile=false", "model.dtype=float32"),
            *(f"model.path={folder}", f"data.max_prompt_tokens={prompt}", *settings),
        ]
    )
    return build_job_plan(config, CORE, rates=[RATES])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    Qwen2Config(**SHAPE, architectures=["Qwen2ForCausalLM"]).save_pretrained(made)
    return made


@pytest.mark.parametrize(("prompt", "measured"), [(256, 1.66), (1024, 2.94)])
def test_updates_are_planned_to_be_as_much_quicker_as_was_measured(folder, prompt, measured):
    """By benchmarks/shared_prompts.py, on a CPU."""
    shared, alone = (
        planned(folder, prompt, f"actor.share_prefixes={x}") for x in ("auto", "false")
    )
    call = "actor", "train"
    ratio = alone.times.phases[call] / shared.times.phases[call]
    assert ratio == pytest.approx(measured, rel=0.15)
    kept = [
        next(p.parts["activations"] for p in plan.memory[0].phases if p.phase == "train")
        for plan in (shared, alone)
    ]
    tokens = (prompt + 8 * 256) / (8 * (prompt + 256))
    assert kept[0] / kept[1] == pytest.approx(tokens, rel=0.1)
    assert SHARED in "".join(format_step_sizes(shared))
    assert "computed once" not in "".join(format_step_sizes(alone))


@pytest.mark.parametrize(
    ("kept", "device", "dtype", "is_kept_twice"),
    [
        ("block", "cuda", "bfloat16", True),
        pytest.param(*("selective", "cuda", "bfloat16", True), marks=pytest.mark.more),
        # Results that were merged are no longer needed.
        pytest.param(*("none", "cuda", "bfloat16", False), marks=pytest.mark.more),
        ("full", "cuda", "bfloat16", False),
        # Rectangles see the prompt and their own at once.
        pytest.param(*("block", "cuda", "float32", False), marks=pytest.mark.more),
        ("block", "cpu", "bfloat16", False),
    ],
)
def test_what_checkpointing_keeps_of_both_kernel_calls_is_planned(
    kept, device, dtype, is_kept_twice
):
    """Responses attend to each other and to the prompt by two calls of flash attention."""
    config = Qwen2Config(**SHAPE)
    shape = compute_model_shape(config, dtype, checkpointing=kept)
    part = ModelPart(shape, 4, (True, True), 1, 1, True, device, False, False, checkpointing=kept)
    batch = replace(packed(9999), tokens=1000 * 768)  # so that activations are the largest part
    alone = part.training(replace(batch, together=1))
    more = part.training(batch)["activations"] - alone["activations"]
    compiled = replace(part, compiled=True)
    assert compiled.training(batch) == compiled.training(replace(batch, together=1))
    width = SHAPE["hidden_size"]
    assert more == pytest.approx(is_kept_twice * 4 * 1000 * 512 * width * 2)


def test_plans_share_where_models_and_jobs_do(folder, tmp_path):
    small = SHAPE | {"vocab_size": 128}
    MistralConfig(**small, sliding_window=64).save_pretrained(tmp_path / "windowed")
    LlamaConfig(**small).save_pretrained(tmp_path / "llama")
    for scalar in (False, True):
        assert load_least_saving("auto", str(tmp_path / "windowed"), scalar) is None
        assert load_least_saving("auto", str(tmp_path / "llama"), scalar) == LEAST_SAVINGS["auto"]
    with pytest.raises(ConfigError, match=r"share_prefixes=true.*windows of 64"):
        load_least_saving("true", str(tmp_path / "windowed"), False)
    one = planned(folder, 256, "rollout.samples_per_prompt=1")
    assert one.batches["actor", "train"].together == 1
    pairs = planned(folder, 256, "algorithm=online_dpo", "preference.loss=simpo")
    assert pairs.batches["actor", "train"].together == 2


def test_a_model_that_cannot_be_built_without_weights_is_not_planned(tmp_path, monkeypatch):
    """Its job starts all the same."""

    def build(*_, **__):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    Qwen2Config(**SHAPE | {"vocab_size": 136}).save_pretrained(tmp_path)
    for module in ("hybridrl.models.model_shape", "hybridrl.planner.job_roles"):
        monkeypatch.setattr(f"{module}.build_meta_language_model", build)
    with pytest.raises(NotPlannedError, match="cannot be called on meta tensors"):
        planned(tmp_path, 256)

"""LoRA: only adapters learn, the model below stays at hand, and weights are merged as by peft."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from small_models import SHAPE, build_seeded
from tiers import few_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Qwen2Config,
    T5Config,
)

from hybridrl.algorithms import (
    BradleyTerryObjective,
    TokenSegments,
    negative_log_likelihood,
    token_weights,
)
from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.config.schema import ActorConfig, LoraAdapterConfig, OptimizerConfig
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
from hybridrl.models.lora import (
    _ALL_LINEAR,
    add_adapters,
    check_lora_targets,
    has_adapters,
    load_adapters,
)
from hybridrl.models.model_loading import load_model, open_model
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy, ScalarModel
from hybridrl.models.packed_samples import PackedSamples
from hybridrl.models.shrunk_config import shrink_config
from hybridrl.workers.reward_model_worker import compute_sample_scores

peft = pytest.importorskip("peft", reason="adapters need peft: pip install peft")

CPU = torch.device("cpu")
VOCABULARY = 19
LENGTHS = [(3, 4), (2, 9), (1, 1), (5, 3)]
LORA = LoraAdapterConfig(rank=4, alpha=8.0)
KINDS = {"qwen2": Qwen2Config, "llama": LlamaConfig}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folder of a tiny language model, by architecture; each is written once."""
    folders = {}
    for name, kind in KINDS.items():
        tied = name == "qwen2"
        config = kind(**SHAPE, vocab_size=VOCABULARY, tie_word_embeddings=tied, pad_token_id=0)
        folders[name] = tmp_path_factory.mktemp(name)
        build_seeded(AutoModelForCausalLM, config).save_pretrained(folders[name])
    return folders


def make_batch():
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(VOCABULARY, (n,), generator=generator)  # noqa: E731
    batch = Batch.from_columns(
        {
            "prompt_ids": [draw(prompt) for prompt, _ in LENGTHS],
            "response_ids": [draw(response) for _, response in LENGTHS],
        }
    )
    cu_seqlens = batch["response_ids"].cu_seqlens
    mask = torch.ones(int(cu_seqlens[-1]), dtype=torch.uint8)
    segments = TokenSegments.from_cu_seqlens(cu_seqlens)
    weights = token_weights(mask, "seq-mean-token-mean", segments=segments)
    columns = {
        "response_mask": RaggedColumn(mask, cu_seqlens),
        "loss_weights": RaggedColumn(weights, cu_seqlens),
    }
    return batch.with_columns(columns)


def make_engine(mesh, model, files=None):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        add_adapters(model.inner, LORA)
    engine = TrainEngine(model, mesh, "float32", ActorConfig(tokens_per_microbatch=20), files)
    engine.start_optimizer(OptimizerConfig(learning_rate=0.02, weight_decay=0.1), updates=20)
    return engine


def policy_engine(mesh, folder):
    model, files = open_model(str(folder))
    return make_engine(mesh, CausalPolicy(model), files)


def learn(engine, steps=3):
    def loss(outputs, columns, segments):
        return negative_log_likelihood(outputs["log_probs"])

    return [engine.update(make_batch(), loss) for _ in range(steps)]


def log_probs(model):
    """Of a plain transformers model."""
    with torch.no_grad():
        return CausalPolicy(model)(PackedSamples.of(make_batch(), CPU))["log_probs"]


def engine_log_probs(engine):
    return engine.forward(make_batch())["log_probs"].values


def whole(engine):
    return {name: tensor.clone() for name, tensor in engine.full_parameters()}


@pytest.mark.parametrize("kind", few_of(KINDS, ["qwen2"]))
def test_only_adapters_learn(kind, base, mesh):
    engine = policy_engine(mesh, base[kind])
    before = whole(engine)
    metrics = learn(engine)
    assert metrics[-1]["loss"] < metrics[0]["loss"] and metrics[0]["grad_norm"] > 0
    after = whole(engine)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    adapters = {name for name in before if ".lora_" in name}
    # Two layers of seven linear modules, each with an A and a B.
    assert changed == adapters and len(adapters) == 2 * 7 * 2
    trained = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    assert len(trained) == len(adapters), "the optimizer has no state for frozen weights"


@pytest.mark.parametrize("first_asked", ["before the first update", "after it"])
def test_without_adapters_the_model_is_the_one_below(first_asked, base, mesh):
    below = log_probs(load_model(str(base["qwen2"]), "float32"))
    engine = policy_engine(mesh, base["qwen2"])
    if first_asked == "before the first update":
        with engine.untrained():
            torch.testing.assert_close(engine_log_probs(engine), below)
    torch.testing.assert_close(engine_log_probs(engine), below)  # new adapters say nothing
    losses = [metrics["loss"] for metrics in learn(engine)]
    for _ in range(2):
        with engine.untrained():
            torch.testing.assert_close(engine_log_probs(engine), below)
        learned = engine_log_probs(engine)
        assert float((learned - below).abs().max()) > 0.1
        # Having been switched off, they still learn.
        losses += [metrics["loss"] for metrics in learn(engine)]
    assert losses == sorted(losses, reverse=True)


def test_an_error_inside_switches_the_adapters_on_again(base, mesh):
    engine = policy_engine(mesh, base["qwen2"])
    learn(engine)
    learned = engine_log_probs(engine)
    with pytest.raises(KeyError), engine.untrained():
        raise KeyError
    assert torch.equal(engine_log_probs(engine), learned)


@pytest.mark.parametrize("kind", few_of(KINDS, ["qwen2"]))
def test_full_weights_are_the_merge_of_peft_under_checkpoint_names(kind, base, mesh, tmp_path):
    engine = policy_engine(mesh, base[kind])
    learn(engine)
    found = {name: tensor.clone() for name, tensor in engine.full_weights()}
    plain = load_model(str(base[kind]), "float32")
    assert found.keys() == dict(plain.named_parameters()).keys()
    engine.save(tmp_path)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(plain), str(tmp_path))
    merged = dict(model.merge_and_unload().named_parameters())
    assert found.keys() == merged.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name])
    linear = [name for name in found if name.endswith("proj.weight")]
    unchanged = dict(plain.named_parameters())
    assert len(linear) == 14
    assert {n for n in found if not torch.equal(found[n], unchanged[n])} == set(linear)


@pytest.mark.parametrize("kind", few_of(KINDS, ["qwen2"]))
def test_a_saved_folder_holds_the_adapters_and_loads_as_the_policy(kind, base, mesh, tmp_path):
    engine = policy_engine(mesh, base[kind])
    learn(engine)
    engine.save(tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert not list(tmp_path.glob("model*.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=PACKED_ATTENTION)
    torch.testing.assert_close(log_probs(loaded), engine_log_probs(engine))


def test_a_scalar_model_learns_its_head_too(base, mesh, tmp_path):
    batch = make_batch()
    model, files = open_model(str(base["qwen2"]), scalar=True, needs_head=False)
    engine = make_engine(mesh, ScalarModel(model, "after"), files)
    before = whole(engine)
    for _ in range(3):
        engine.update(batch, BradleyTerryObjective(), rows_together=2)
    after = whole(engine)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    heads = {name for name in changed if name.startswith("score.")}
    assert len(heads) == 1, "the copy that is trained, not the original"
    assert changed - heads == {name for name in before if ".lora_" in name}
    scores = compute_sample_scores(engine, batch)
    assert float(scores.abs().max()) > 0.01
    engine.save(tmp_path)
    plain = load_model(str(base["qwen2"]), "float32", scalar=True, needs_head=False)
    loaded = peft.PeftModel.from_pretrained(plain, str(tmp_path)).merge_and_unload()
    with torch.no_grad():
        values = ScalarModel(loaded, "after")(PackedSamples.of(batch, CPU))["values"]
    segments = TokenSegments.from_cu_seqlens(batch["response_ids"].cu_seqlens)
    torch.testing.assert_close(segments.last(values), scores)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=1, attn_implementation="eager"
    ).eval()
    for row, score in zip(batch.to_pylist(), scores.tolist(), strict=True):
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            assert float(classifier(input_ids=ids).logits) == pytest.approx(score, abs=1e-4)


def test_targets_can_be_named(base):
    model = load_model(str(base["qwen2"]), "float32")
    add_adapters(model, LoraAdapterConfig(rank=2, targets=["q_proj", "v_proj"]))
    assert has_adapters(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all(".q_proj.lora_" in name or ".v_proj.lora_" in name for name in trained)


def test_targets_that_name_nothing_are_a_sentence(base):
    model = load_model(str(base["qwen2"]), "float32")
    with pytest.raises(ConfigError, match=r"^actor\.lora\.targets=query: .*query"):
        add_adapters(model, LoraAdapterConfig(rank=2, targets="query"))
    config, wrong = model.config, r"=\['v_proj', 'qproj'\]: .* no module `qproj`.* `q_proj`\?"
    with pytest.raises(ConfigError, match=wrong):
        check_lora_targets(config, LoraAdapterConfig(rank=2, targets=["v_proj", "qproj"]))
    for right in (["v_proj", "self_attn.q_proj"], r".*\.q_proj", "all-linear"):
        check_lora_targets(config, LoraAdapterConfig(rank=2, targets=right))
    check_lora_targets(config, LoraAdapterConfig(rank=None, targets=["nope"]))
    check_lora_targets(T5Config(), LoraAdapterConfig(rank=2, targets=["nope"]))


def test_adapters_begin_by_their_seed_and_names_alone(base):
    def drawn(seed, before, **settings):
        torch.manual_seed(before)
        model = load_model(str(base["qwen2"]), "float32")
        add_adapters(model, LoraAdapterConfig(rank=2, **settings), seed)
        after = torch.rand(1)
        named = model.named_parameters()
        return {name: p.detach() for name, p in named if ".lora_" in name}, after

    first, after = drawn(0, before=1)
    again, other_after = drawn(0, before=2)
    assert first and all(torch.equal(first[name], again[name]) for name in first)
    assert after != other_after, "others draw as they would have"
    few, _ = drawn(0, before=1, targets=["v_proj"])
    assert few and all(torch.equal(first[name], few[name]) for name in few)
    other, _ = drawn(1, before=1)
    down = [name for name in first if ".lora_A." in name]
    assert not any(torch.equal(first[name], other[name]) for name in down)
    assert len({float(first[name].sum()) for name in down}) == len(down)
    assert not any(first[name].any() for name in first if ".lora_B." in name)


def test_the_matrices_of_experts_stay_as_they_are():
    config = shrink_config(AutoConfig.for_model("qwen3_moe"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION)
    add_adapters(model, LORA)
    beside = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in adapters_of(model)}
    assert beside == {"q_proj", "k_proj", "v_proj", "o_proj"}


def adapters_of(model):
    return [(name, p) for name, p in model.named_parameters() if ".lora_" in name]


@pytest.fixture(scope="module")
def stage(base, mesh, tmp_path_factory):
    """The folder that a first stage leaves, and its log-probabilities."""
    engine = policy_engine(mesh, base["llama"])
    learn(engine)
    engine.save(folder := tmp_path_factory.mktemp("stage"))
    described = json.loads((folder / "adapter_config.json").read_text())
    described["base_model_name_or_path"] = str(base["llama"])
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder, engine_log_probs(engine)


def test_a_second_stage_begins_where_the_first_ended_and_knows_where_that_was(stage, base, mesh):
    folder, ended = stage
    lora = replace(LORA, path=str(folder))
    model, files = open_model(str(base["llama"]))
    add_adapters(model, lora)
    load_adapters(model, str(folder))
    config = ActorConfig(tokens_per_microbatch=20, lora=lora)
    engine = TrainEngine(CausalPolicy(model), mesh, "float32", config, files)
    engine.start_optimizer(OptimizerConfig(learning_rate=0.02), updates=20)
    torch.testing.assert_close(engine_log_probs(engine), ended)
    learn(engine)
    after = engine_log_probs(engine)
    assert not torch.allclose(after, ended)
    with engine.untrained():
        torch.testing.assert_close(engine_log_probs(engine), ended)
    assert torch.equal(engine_log_probs(engine), after)


def test_a_critic_begins_with_the_adapters_that_the_policy_goes_on_with(stage, base):
    folder, _ = stage
    model, _ = open_model(str(base["llama"]), scalar=True, needs_head=False)
    add_adapters(model, replace(LORA, path=str(folder)))
    load_adapters(model, str(folder))
    stored = load_file(folder / "adapter_model.safetensors")
    found = adapters_of(model)
    assert len(found) == len(stored)
    for name, parameter in found:
        name = f"base_model.model.{name.replace('.default', '')}"
        torch.testing.assert_close(parameter.detach(), stored[name])


@pytest.mark.parametrize("setting", ["model.path", "actor.lora.path"])
def test_adapters_as_a_setting_stand_for_their_model_and_their_shape(stage, base, setting):
    folder, _ = stage
    config = load_config([f"{setting}={folder}"])
    assert config.model.path == str(base["llama"])
    lora = config.actor.lora
    assert (lora.rank, lora.alpha, lora.path) == (4, 8.0, str(folder))
    assert load_config([f"model.path={base['llama']}", f"actor.lora.path={folder}"]) == config
    check_lora_targets(AutoConfig.from_pretrained(base["llama"]), lora)


def test_adapters_that_do_not_fit_are_a_sentence(stage, base, tmp_path):
    folder, _ = stage
    at = f"actor.lora.path={folder}"
    for override, words in [
        ("actor.lora.rank=8", "actor.lora.rank=8: the adapters in .* have 4, with which"),
        ("actor.lora.alpha=4", r"actor.lora.alpha=4.0: the adapters in .* have 8"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load_config([at, override])
    lora = load_config([at]).actor.lora
    other = AutoConfig.from_pretrained(base["llama"])
    other.num_hidden_layers = 1
    with pytest.raises(
        ConfigError, match=r"actor.lora.path=.* adapts `.*layers\.1.*, which the mod"
    ):
        check_lora_targets(other, lora)
    other.num_hidden_layers = 3
    with pytest.raises(ConfigError, match=r"has no `.*layers\.2.*belongs to another model"):
        check_lora_targets(other, replace(lora, targets=_ALL_LINEAR))
    other.num_hidden_layers, other.intermediate_size = 2, 32
    with pytest.raises(ConfigError, match=r"has the shape .* and the model needs"):
        check_lora_targets(other, lora)

    def changed(**settings):
        shutil.copytree(folder, tmp_path / "other", dirs_exist_ok=True)
        described = json.loads((folder / "adapter_config.json").read_text()) | settings
        (tmp_path / "other" / "adapter_config.json").write_text(json.dumps(described))
        return [f"model.path={tmp_path}/other"]

    with pytest.raises(ConfigError, match="adapters of the model /gone, which is not there"):
        load_config(changed(base_model_name_or_path="/gone"))
    for further in ({"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}):
        with pytest.raises(ConfigError, match=f"{next(iter(further))}=.*merge_and_unload"):
            load_config(changed(**further))
    with pytest.raises(ConfigError, match="of the kind 'IA3'"):
        load_config(changed(peft_type="IA3"))
    assert load_config(changed(use_rslora=True)).actor.lora.alpha == 16.0  # 8 / sqrt(4) = 16 / 4
    (tmp_path / "other" / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="could not be read"):
        load_config([f"actor.lora.path={tmp_path}/other"])

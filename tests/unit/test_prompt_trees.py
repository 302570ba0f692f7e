"""A prompt that rows share is computed once, and nothing else is another number for it."""

import runpy

import plain_torch
import pytest
import torch
from flash_kernels import attend, differentiate
from plain_cases import make_folders, settings_of
from tiers import few_of
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Starcoder2Config,
)
from tree_cases import (
    CPU,
    LONGEST,
    TEMPERATURE,
    VOCABULARY,
    loss,
    make_engine,
    make_model,
    make_rows,
    work_out,
)

from hybridrl import main
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import LoraAdapterConfig
from hybridrl.engine.prompt_groups import group_rows
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
from hybridrl.models import packed_attention
from hybridrl.models.activation_checkpointing import KEPT_OPERATIONS
from hybridrl.models.lora import add_adapters
from hybridrl.models.packed_attention import PACKED_ATTENTION, causal_attention
from hybridrl.models.packed_models import CausalPolicy, FeatureModel, ScalarModel
from hybridrl.models.packed_samples import PackedSamples, PackingMetadata, SampleLayout
from hybridrl.models.prompt_sharing_gain import (
    LeastSaving,
    explain_unshareable,
    find_least_saving,
)
from hybridrl.models.prompt_trees import PromptTrees

CLOSE, EVERY = 1e-5, LeastSaving(0.0, 1)


@pytest.fixture
def trees(monkeypatch):
    """The trees that are made."""
    made, make = [], PromptTrees.of.__func__

    def keep(cls, *arguments):
        made.append(make(cls, *arguments))
        return made[-1]

    monkeypatch.setattr(PromptTrees, "of", classmethod(keep))
    return made


def gradient(engine, batch, together=1):
    found = {}
    hook = engine.optimizer.register_step_pre_hook(
        lambda *_: found.update(
            {
                name: parameter.grad.clone()
                for name, parameter in engine.model.inner.named_parameters()
                if parameter.requires_grad
            }
        )
    )
    metrics = engine.update(batch, loss, temperature=TEMPERATURE, rows_together=together)
    hook.remove()
    return metrics, {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in found.items()}


def assert_close(found, expected):
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= CLOSE * tensor.norm().clamp(min=1), name


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective", "block"])
@pytest.mark.parametrize("budget", few_of([LONGEST, 37, 10_000], [37]))
def test_it_is_what_plain_torch_makes_of_each_row(mesh, trees, budget, checkpointing):
    batch = make_rows()
    expected = work_out(batch)
    engine = make_engine(mesh, tokens_per_microbatch=budget, gradient_checkpointing=checkpointing)
    scored = engine.forward(batch, temperature=TEMPERATURE)
    torch.testing.assert_close(scored["log_probs"].values, expected.log_probs, atol=CLOSE, rtol=0)
    torch.testing.assert_close(scored["entropy"].values, expected.entropy, atol=CLOSE, rtol=0)
    metrics, found = gradient(engine, batch)
    assert metrics["loss"] == pytest.approx(expected.loss, rel=CLOSE)
    assert metrics["tokens"] == int(batch["response_mask"].values.sum())
    assert_close(found, expected.gradient)
    assert any(len(tree.starts) for tree in trees)
    assert all(int(tree.bounds[-1]) <= budget for tree in trees)


@pytest.mark.parametrize("together", [1, 2])
def test_rows_need_not_be_neighbours(mesh, trees, together):
    batch = make_rows(shuffled=together == 1, pairs=together == 2)
    expected = work_out(batch)
    engine = make_engine(mesh, tokens_per_microbatch=60)
    scored = engine.forward(batch, temperature=TEMPERATURE)
    torch.testing.assert_close(scored["log_probs"].values, expected.log_probs, atol=CLOSE, rtol=0)
    assert_close(gradient(engine, batch, together)[1], expected.gradient)
    assert trees


def test_adapters_learn_the_same(mesh, trees):
    found = []
    for setting in ("true", "false"):
        model = make_model()
        add_adapters(model, LoraAdapterConfig(rank=2), seed=1)
        found.append(gradient(make_engine(mesh, model, share_prefixes=setting), make_rows())[1])
        assert trees
    assert len(trees) == 1
    assert found[1] and all("lora" in name for name in found[1])
    assert_close(*found)


@pytest.mark.parametrize("reads", ["before", "after"])
@pytest.mark.parametrize(("kind", "labels"), [(ScalarModel, 1), (FeatureModel, 3)])
def test_values_are_read_where_they_were(reads, kind, labels):
    config = LlamaConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24},
        num_labels=labels,
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3},
    )
    torch.manual_seed(0)
    inner = AutoModelForSequenceClassification.from_config(
        config, attn_implementation=PACKED_ATTENTION
    )
    model, batch = kind(inner, reads), make_rows()
    torch.testing.assert_close(
        model(shared(batch))["values"], model(PackedSamples.of(batch, CPU))["values"]
    )


def shared(batch, multiple=1):
    """All rows in one packed row with their trees."""
    groups, is_shared = group_rows(batch, 1, 10_000, EVERY)
    assert [row for group in groups for row in group] == list(range(len(batch)))
    lengths = (batch.ragged(name).lengths for name in ("prompt_ids", "response_ids"))
    trees = PromptTrees.of(*lengths, torch.from_numpy(is_shared), CPU, multiple)
    return PackedSamples.of(batch, CPU, multiple=multiple, trees=trees)


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_shared_prompt_counts_for_each_of_its_samples(multiple):
    batch = make_rows()
    samples = shared(batch, multiple)
    tokens = sum(batch.lengths("prompt_ids") + batch.lengths("response_ids"))
    assert int(samples.packing.real.sum()) == tokens
    assert samples.input_ids.numel() % multiple == 0
    assert torch.equal(samples.input_ids[0, samples.places], samples.targets)


def flash_forward(q, k, v, case):
    return attend(q, k, v, case.query_bounds, case.key_bounds, case.scale, case.causal)


def flash_backward(grad, q, k, v, out, lse, case):
    bounds = case.query_bounds, case.key_bounds
    return differentiate(grad, q, k, v, out, lse, *bounds, case.scale, case.causal)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_flash_attention_merges_what_rectangles_see_at_once(monkeypatch, with_sinks):
    packing = shared(make_rows()).packing
    tokens = int(packing.cu_seqlens[-1])
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 8), (tokens, 4, 8)]
    q, k, v, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    sinks = [torch.randn(4, generator=generator)] if with_sinks else []
    inputs = [x.requires_grad_() for x in (q, k, v, *sinks)]

    def computed():
        out = causal_attention(q, k, v, packing, 0.3, None, *sinks)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    wanted = computed()
    for name, stand_in in (("flash_forward", flash_forward), ("flash_backward", flash_backward)):
        monkeypatch.setattr(packed_attention, name, stand_in)
    monkeypatch.setattr(packed_attention, "fits_flash", lambda q: True)
    for found, other in zip(computed(), wanted, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kept", ["selective", "block"])
def test_results_of_flash_attention_that_checkpointing_keeps_stay_as_they_are(
    monkeypatch, mesh, trees, kept
):
    """The kernel is an operation, whose results are kept for the backward as they were."""
    cases = []

    @torch.library.custom_op(f"hybridrl_tests::flash_of_{kept}", mutates_args=())
    def kernel(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_forward(q, k, v, cases[number])

    def forward(q, k, v, case):
        cases.append(case)
        return kernel(q, k, v, len(cases) - 1)

    operations = (*KEPT_OPERATIONS[kept], f"hybridrl_tests::flash_of_{kept}")
    monkeypatch.setitem(KEPT_OPERATIONS, kept, operations)
    for name, stand_in in (("flash_forward", forward), ("flash_backward", flash_backward)):
        monkeypatch.setattr(packed_attention, name, stand_in)
    monkeypatch.setattr(packed_attention, "fits_flash", lambda q: True)
    batch = make_rows()
    engine = make_engine(mesh, tokens_per_microbatch=10_000, gradient_checkpointing=kept)
    assert_close(gradient(engine, batch)[1], work_out(batch).gradient)
    assert any(len(tree.starts) for tree in trees)


def test_rows_that_share_nothing_are_packed_as_before(mesh):
    batch = make_rows().take([0, 4, 6, 7, 9, 12, 13])
    found = {}
    for setting in ("auto", "false"):
        engine = make_engine(mesh, share_prefixes=setting, tokens_per_microbatch=LONGEST)
        found[setting] = [(one.rows, one.shared) for one in engine._micro_batches(batch)]
    assert found["auto"] == found["false"]
    assert all(one is None for _, one in found["auto"])


def test_rows_that_do_not_fit_are_told_by_their_own_numbers(mesh):
    """What is packed are groups of rows: pairs, and rows that share a prompt."""
    lengths = ([5, 5, 3, 3, 9, 9], [2, 2, 2, 2, 8, 8])
    prompts, responses = ([torch.full((n,), n) for n in part] for part in lengths)
    batch = Batch.from_columns({"prompt_ids": prompts, "response_ids": responses})
    engine = make_engine(mesh, tokens_per_microbatch=20)
    with pytest.raises(ConfigError, match="The group of rows 4 to 5 has 25 tokens"):
        engine._micro_batches(batch, 2)
    engine = make_engine(mesh, tokens_per_microbatch=16)
    with pytest.raises(ConfigError, match="Row 4 has 17 tokens"):
        engine._micro_batches(batch)


def test_auto_leaves_out_what_spares_little():
    batch = make_rows()
    tree = [9, 10, 11]
    for least, is_tree in (((0.1, 18), True), ((0.5, 18), False), ((0.1, 19), False)):
        groups, is_shared = group_rows(batch, 1, 100, LeastSaving(*least))
        assert (tree in groups) is is_tree and is_shared[10] == is_tree
    assert group_rows(batch, 1, 100, None)[0] == [[row] for row in range(len(batch))]


def test_neighbours_of_different_prompts_stay_together_and_share_nothing():
    prompts = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 2, 3]]
    batch = Batch.from_columns(
        {
            "prompt_ids": [torch.tensor(ids) for ids in prompts],
            "response_ids": [torch.tensor([5 + row]) for row in range(4)],
        }
    )
    groups, is_shared = group_rows(batch, 2, 100, EVERY)
    assert groups == [[0, 1], [2, 3]] and is_shared.tolist() == [False, False, False, True]


def test_choices_of_experts_are_repeated_row_by_row():
    batch = make_rows()
    batch = batch.with_columns({"routed_experts": batch["loss_weights"]})
    assert not group_rows(batch, 1, 100, EVERY)[1].any()


def test_models_that_cannot_share_do_not_and_say_why():
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    config = Qwen2Config(**shape, vocab_size=9, num_hidden_layers=2, **windows)
    model = CausalPolicy(AutoModelForCausalLM.from_config(config))
    padded = CausalPolicy(make_model(), SampleLayout.PADDED)
    for one, why in ((model, "windows of 5 tokens"), (padded, "besides attention")):
        assert find_least_saving("auto", one) is None
        with pytest.raises(ConfigError, match=f"actor.share_prefixes=true.*{why}"):
            find_least_saving("true", one)
    assert find_least_saving("false", CausalPolicy(make_model())) is None


@pytest.mark.parametrize("kind", [MistralConfig, MixtralConfig, Phi3Config, Starcoder2Config])
def test_windows_that_only_the_configuration_names_are_known(kind):
    """No layer of these has an attribute for its window."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "pad_token_id": 0, "vocab_size": 40}
    for window, why in ((75, "windows of 75 tokens"), (None, None)):
        config = kind(**shape, num_hidden_layers=2, sliding_window=window)
        with torch.device("meta"):
            model = CausalPolicy(AutoModelForCausalLM.from_config(config))
        assert (explain_unshareable(model) or "").endswith(why or "")
        assert (find_least_saving("auto", model) is None) == (window is not None)


def test_a_window_wider_than_each_part_of_a_sample_is_seen():
    packing = shared(make_rows()).packing
    q = torch.zeros(1, 1, int(packing.cu_seqlens[-1]), 8)
    given = {"attention_mask": None, "packing": packing, "scaling": 1.0}
    with pytest.raises(ValueError, match=r"windows of 75 .*actor\.share_prefixes=false"):
        packed_attention.packed_attention(None, q, q, q, **given, sliding_window=75)


def test_a_window_over_a_shared_prompt_is_an_error():
    packing = shared(make_rows()).packing
    q = torch.zeros(int(packing.cu_seqlens[-1]), 1, 8)
    with pytest.raises(ValueError, match="windows"):
        causal_attention(q, q, q, packing, None, 3)


def test_packing_without_trees_is_as_it_was():
    packing = PackingMetadata.of(torch.tensor([0, 2, 5]), CPU)
    assert packing.position_ids(5).tolist() == [0, 1, 0, 1, 2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        yield make_folders(root)


JOBS = [
    ("grpo", ["temperature", "tool tokens", "dropped samples", "KL in the loss"], 17),
    pytest.param(
        *("grpo", ["temperature", "two updates", "two epochs", "entropy"], 40),
        marks=pytest.mark.more,
    ),
    pytest.param("dpo", [], 40, marks=pytest.mark.more),
    *(
        pytest.param(*case, 25, marks=pytest.mark.more)
        for case in (
            ("ppo", ["temperature", "two updates", "KL in the reward", "kept sets"]),
            ("grpo", ["LoRA", "KL in the loss"]),
            ("reward_model", []),
            ("online_dpo", ["temperature"]),
            ("distillation", ["temperature"]),
        )
    ),
]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("program", "options", "budget"), JOBS)
def test_whole_jobs_share_prompts(tmp_path, folders, trees, program, options, budget):
    settings = [
        *settings_of(program, options, folders),
        *("actor.share_prefixes=true", f"actor.tokens_per_microbatch={budget}"),
    ]
    folder = tmp_path / "run"
    main.run(load_config([*settings, "executor=inline", f"run.directory={folder}"]))
    assert any(len(tree.starts) for tree in trees)
    rewarded = runpy.run_path(folders.program)[
        "holes" if "dropped samples" in options else "digits"
    ]
    found = plain_torch.recompute(folder, rewarded)
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=CLOSE)

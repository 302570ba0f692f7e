"""Routers that are watched, kept in balance, and made to choose what was chosen before."""

import pytest
import torch
from engine_cases import CPU, TEMPERATURE, make_batch
from parallel_cases import assemble, make_engine, make_model
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.algorithms import TokenLoss
from hybridrl.batch.batch import ROUTED_EXPERTS, Batch
from hybridrl.config.schema import CHECKPOINTING_MODES, OptimizerConfig
from hybridrl.errors import ConfigError, DataError
from hybridrl.models.expert_routing import ExpertRouters, check_routers, find_routers
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.models.packed_samples import PackedSamples, SampleLayout

WEIGHT = 0.5
TINY = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny():
    return make_model("qwen3_moe", tied=False)


def nothing(outputs, columns, segments):
    return TokenLoss(0 * outputs["log_probs"], {})


def watched(model, sample):
    """The logits and the choices of each router for one sample that is alone, by transformers."""
    found = []
    hooks = [
        router.register_forward_hook(lambda _, __, out: found.append((out[0], out[2])))
        for router in find_routers(model).values()
    ]
    model.config._attn_implementation = "eager"
    model(sample[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def samples_of(batch):
    return [
        torch.cat([prompt, response])
        for prompt, response in zip(
            batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True
        )
    ]


@pytest.fixture
def expected():
    """The loss of the paper's formula, and its gradient: f and P over all tokens together."""
    model, layers = tiny(), []
    alone = [watched(model, sample) for sample in samples_of(make_batch())]
    for layer in zip(*alone, strict=True):
        probabilities = torch.cat([logits for logits, _ in layer]).softmax(-1)
        chosen = torch.cat([chosen for _, chosen in layer]).flatten()
        share = torch.bincount(chosen, minlength=6) / len(chosen)
        layers.append((share, 6 * (share * probabilities.mean(0)).sum()))
    loss = torch.stack([value for _, value in layers]).mean()
    (WEIGHT * loss).backward()
    share = torch.stack([share for share, _ in layers])
    gradient = {
        n: torch.zeros(p.shape) if p.grad is None else p.grad for n, p in model.named_parameters()
    }
    return {"loss": float(loss.detach()), "share": share, "gradient": gradient}


@pytest.mark.more
@pytest.mark.parametrize("rows", SampleLayout)
@pytest.mark.parametrize("kept", CHECKPOINTING_MODES)
def test_the_balancing_loss_is_that_of_the_paper_however_tokens_are_divided(
    mesh, expected, kept, rows
):
    for budget in (60, 1000):
        engine = make_engine(
            mesh,
            tiny(),
            OptimizerConfig(learning_rate=0.01, max_grad_norm=0.0),
            tokens_per_microbatch=budget,
            router_loss_weight=WEIGHT,
            gradient_checkpointing=kept,
        )
        engine.model.rows = rows
        metrics = engine.update(make_batch(), nothing)
        assert metrics["router_loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert metrics["router_busiest"] == pytest.approx(float(expected["share"].max()))
        entropy = torch.special.entr(expected["share"]).sum(1).mean() / torch.tensor(6.0).log()
        assert metrics["router_entropy"] == pytest.approx(float(entropy), rel=1e-5)
        assert metrics["loss"] == 0
        for name, found in assemble([engine.first_gradient]).items():
            torch.testing.assert_close(found, expected["gradient"][name], rtol=1e-4, atol=1e-7)


def test_without_a_weight_routers_are_counted_and_nothing_is_added(mesh):
    engine = make_engine(mesh, tiny())
    metrics = engine.update(make_batch(), nothing)
    assert metrics["router_loss"] >= 0.9 and metrics["grad_norm"] == 0


def recorded(model, batch):
    """The column of routes as a generation makes it."""
    rows = []
    with torch.no_grad():
        for sample in samples_of(batch):
            chosen = [chosen for _, chosen in watched(model, sample)]
            rows.append(torch.cat(chosen, dim=1)[:-1].to(torch.uint8).flatten())
    return batch.with_columns({ROUTED_EXPERTS: rows})


def scored(model, batch, rows=SampleLayout.PACKED):
    policy = CausalPolicy(model, rows)
    ExpertRouters.of(model)
    with torch.no_grad():
        return policy(PackedSamples.of(batch, CPU, rows), TEMPERATURE)["log_probs"]


@pytest.mark.parametrize("rows", SampleLayout)
def test_routers_choose_again_what_is_recorded(rows):
    batch = make_batch().select(["prompt_ids", "response_ids"])
    own = recorded(tiny(), batch)
    plain = scored(tiny(), batch, rows)
    torch.testing.assert_close(scored(tiny(), own, rows), plain, rtol=1e-5, atol=1e-6)

    other = tiny()
    with torch.no_grad():
        for router in find_routers(other).values():
            router.weight += torch.randn_like(router.weight)
    foreign = recorded(other, batch)
    found = scored(tiny(), foreign, rows)
    assert (found - plain).abs().max() > 0.01
    # By hand: each sample alone, with the choices of the other model.
    model, wanted = tiny(), []
    model.config._attn_implementation = "eager"
    routes = iter(())

    def follow(router, _, output):
        logits, scores, chosen = output
        chosen = torch.cat([next(routes), chosen[-1:]])
        scores = logits.softmax(-1).gather(1, chosen)
        return logits, scores / scores.sum(-1, keepdim=True), chosen

    for router in find_routers(model).values():
        router.register_forward_hook(follow)
    columns = zip(
        batch["prompt_ids"].rows(), samples_of(batch), foreign[ROUTED_EXPERTS].rows(), strict=True
    )
    for prompt, sample, row in columns:
        routes = iter(row.view(-1, 2, 2).long().unbind(1))
        with torch.no_grad():
            logits = model(sample[None], use_cache=False).logits[0] / TEMPERATURE
        log_probs = logits[:-1].log_softmax(-1).gather(1, sample[1:, None])[:, 0]
        wanted.append(log_probs[len(prompt) - 1 :])
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-5, atol=1e-5)


def test_routes_of_other_tokens_are_refused():
    batch = recorded(tiny(), make_batch().select(["prompt_ids", "response_ids"]))
    rows = [*batch[ROUTED_EXPERTS].rows()]
    rows[0], rows[1] = rows[1], rows[0]
    with pytest.raises(DataError, match="does not have as many experts for each token"):
        PackedSamples.of(batch.with_columns({ROUTED_EXPERTS: rows}), CPU)


def test_a_batch_without_rows_has_routes_of_nothing():
    batch = recorded(tiny(), make_batch().select(["prompt_ids", "response_ids"]))
    none = batch.take([])
    assert isinstance(none, Batch) and PackedSamples.of(none, CPU).packing.routes is None


@pytest.mark.parametrize(
    ("kind", "options", "known"),
    [
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16}, True),
        ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 16}, True),
        ("mixtral", {"num_local_experts": 4}, True),
        ("olmoe", {"num_experts": 4}, True),
        ("minimax_m2", {"num_local_experts": 4}, False),
        ("qwen2", {}, False),
    ],
)
def test_routers_are_known_by_trial(kind, options, known):
    chosen = {} if kind == "qwen2" else {"num_experts_per_tok": 2}
    config = AutoConfig.for_model(kind, **TINY, **options, **chosen)
    with torch.device("meta"):
        assert (ExpertRouters.of(AutoModelForCausalLM.from_config(config)) is not None) == known
    if known:
        return check_routers(config, "setting", "path")
    with pytest.raises(ConfigError, match="setting: path has no routers"):
        check_routers(config, "setting", "path")

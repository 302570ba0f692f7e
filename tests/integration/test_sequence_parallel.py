"""Real gloo: dividing the tokens of a micro-batch over ranks never changes the mathematics."""

from dataclasses import replace

import pytest
import torch
from engine_cases import (
    CLIPPED,
    CPU,
    LEARNING,
    LONGEST,
    TEMPERATURE,
    WHOLE_SAMPLES,
    WORLD,
    assert_same_gradient,
    assert_same_metrics,
    deal,
    expectations,
    make_batch,
    make_engine,
    update,
)
from engine_cases import make_model as make_engine_model
from ranks import run_ranks
from sequence_cases import (
    BATCHES,
    LAYOUTS,
    MODELS,
    counted_bytes,
    layout,
    make_model,
    make_samples,
    outputs_and_gradients,
    saved_bytes,
    say,
)

from hybridrl.errors import ConfigError
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.models.packed_samples import PackedSamples
from hybridrl.parallel import fsdp
from hybridrl.parallel.process_group import ParallelMesh

pytestmark = pytest.mark.more

FOUR = ["ulysses2 x ring2", "ring4", "ulysses4"]
DEALS = {1: [(11,)], 2: [(6, 5), (0, 11)]}
STEPS = 8
# A model of which activations, not parameters, are the larger part.
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LONG = [(10 + 3 * i, 50 + 37 * i % 160) for i in range(9)]
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


def cases(name):
    """(deal, tokens per micro-batch and device, objective, small) of a layout's updates."""
    dp, ring, ulysses = LAYOUTS[name]
    least = -(-LONGEST // (ring * ulysses))
    yield DEALS[dp][0], least, CLIPPED, True
    yield DEALS[dp][0], LONGEST, WHOLE_SAMPLES, True
    yield DEALS[dp][-1], 10_000, CLIPPED, False


def updates_and_forwards(place, name):
    found = {}
    for small in (True, False):
        fsdp.SMALL_MODEL_BYTES = 1 << 28 if small else 0
        engine = make_engine(place.mesh)
        for case in cases(name):
            counts, budget, objective, case_small = case
            if case_small is not small:
                continue
            engine.config = replace(engine.config, tokens_per_microbatch=budget)
            batch = make_batch()
            mine = batch.take(deal(batch, counts)[place.dp_rank])
            scored = engine.forward(mine, temperature=TEMPERATURE).to_pylist()
            found[str(case)] = (*update(engine, mine, objective), scored)
    fsdp.SMALL_MODEL_BYTES = 1 << 28
    return found


def curve(mesh, dp=1, dp_rank=0):
    """Losses of updates that learn."""
    engine = make_engine(mesh, optimizer=LEARNING)
    batch = make_batch()
    mine = batch.take(deal(batch, DEALS[dp][0])[dp_rank])
    return [engine.update(mine, CLIPPED, temperature=TEMPERATURE)["loss"] for _ in range(STEPS)]


def exchanged(model, samples, sequence):
    """Bytes that this rank sends, forward and backward."""
    with counted_bytes() as sent:
        outputs = say(model, samples, sequence)
    forward = dict(sent)
    with counted_bytes() as sent:
        sum(x.sum() for x in outputs.values()).backward()
    return forward, sent


def in_windows(sequence):
    model = make_model("qwen2 gqa tied", **WINDOWS)
    try:
        return outputs_and_gradients(model, make_samples(BATCHES["uneven"]), sequence)
    except ConfigError as error:
        return str(error)


def rank_program(rank):
    """What each of four processes does and finds; tests compare."""
    alone = ParallelMesh(RankMesh({"dp": 1}), CPU)
    places = {name: layout(name, rank) for name in LAYOUTS}
    models = {name: make_model(name) for name in MODELS}
    found = {}
    if rank == 0:
        found["curve of one"] = curve(alone)
    for name, place in places.items():
        if place is None:
            continue
        sequence = place.sequence
        found["updates", name] = updates_and_forwards(place, name)
        found["curve", name] = curve(place.mesh, place.dp, place.dp_rank)
        for batch, lengths in BATCHES.items():
            samples = make_samples(lengths)
            for model in MODELS:
                key = ("outputs", name, model, batch)
                found[key] = outputs_and_gradients(models[model], samples, sequence)
        if name in ("ulysses2", "ring2"):
            found["windows", name] = in_windows(sequence)
        if name in FOUR:
            wide, samples = make_model("llama gqa", **WIDE), make_samples(LONG)
            found["saved", name] = saved_bytes(wide, samples, sequence)
            found["sent", name] = exchanged(wide, samples, sequence)
    place = places["ulysses2 x ring2"]
    found["sent", "mqa"] = exchanged(
        make_model("llama mqa tied"), make_samples(LONG), place.sequence
    )
    engine = make_engine(place.mesh, gradient_checkpointing=True)
    found["checkpointing"] = update(engine, make_batch())
    engine = make_engine(place.mesh, "bfloat16")
    scored = engine.forward(make_batch(), temperature=TEMPERATURE).to_pylist()
    found["bfloat16"] = scored, update(engine, make_batch())[0]
    return found


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """What each of four processes found."""
    return run_ranks(rank_program, tmp_path_factory.mktemp("ranks"), WORLD)


def ranks(name):
    dp, ring, ulysses = LAYOUTS[name]
    return range(dp * ring * ulysses)


@pytest.fixture(scope="module")
def plain():
    return expectations()


@pytest.mark.parametrize("name", LAYOUTS)
def test_updates_are_those_of_one_process(name, four_ranks, plain):
    for case in cases(name):
        gradient, metrics = plain("token-mean", case[2])
        for rank in ranks(name):
            found, of_rank, _ = four_ranks[rank]["updates", name][str(case)]
            assert_same_gradient(found, gradient)
            assert_same_metrics(of_rank, metrics)


@pytest.mark.parametrize("name", LAYOUTS)
def test_forward_gives_each_rank_its_rows_in_order(name, four_ranks):
    batch = make_batch()
    exact = CausalPolicy(make_engine_model())(PackedSamples.of(batch, CPU), TEMPERATURE)
    bounds = batch["response_ids"].cu_seqlens.tolist()
    dp = LAYOUTS[name][0]
    for case in cases(name):
        rows_by_rank = deal(batch, case[0])
        for rank in ranks(name):
            rows = rows_by_rank[rank // (len(ranks(name)) // dp)]
            *_, scored = four_ranks[rank]["updates", name][str(case)]
            assert len(scored) == len(rows)
            for row, found in zip(rows, scored, strict=True):
                for output, column in exact.items():
                    wanted = column[bounds[row] : bounds[row + 1]].tolist()
                    assert found[output] == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_many_steps_have_the_losses_of_one_process(name, four_ranks):
    expected = four_ranks[0]["curve of one"]
    assert abs(expected[-1] - expected[0]) > 0.1 * abs(expected[0]), "it learns"
    for rank in ranks(name):
        assert four_ranks[rank]["curve", name] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def assert_same(found, expected, tolerance):
    """Relative to the largest element: small elements are differences of large ones."""
    scale = max(0.01, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)


def assert_same_model(found, expected):
    outputs, gradients = found
    for name, wanted in expected[0].items():
        assert_same(outputs[name], wanted, 1e-5)
    for name, wanted in expected[1].items():
        assert_same(gradients[name], wanted, 1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_says_and_learns_the_same(model, four_ranks):
    for batch, lengths in BATCHES.items():
        expected = outputs_and_gradients(make_model(model), make_samples(lengths))
        for name in LAYOUTS:
            for rank in ranks(name):
                assert_same_model(four_ranks[rank]["outputs", name, model, batch], expected)


def test_windows_work_in_ulysses_and_are_refused_in_a_ring(four_ranks):
    expected = in_windows(None)
    unbounded = outputs_and_gradients(make_model("qwen2 gqa tied"), make_samples(BATCHES["uneven"]))
    assert not torch.allclose(expected[0]["log_probs"], unbounded[0]["log_probs"])
    for rank in (0, 1):
        assert_same_model(four_ranks[rank]["windows", "ulysses2"], expected)
        assert "windows of 5 tokens" in four_ranks[rank]["windows", "ring2"]


def test_gradient_checkpointing_changes_nothing(four_ranks, plain):
    gradient, metrics = plain("token-mean", CLIPPED)
    for found, of_rank in (rank["checkpointing"] for rank in four_ranks):
        assert_same_gradient(found, gradient)
        assert_same_metrics(of_rank, metrics)


def test_half_precision_is_near(four_ranks, plain):
    batch = make_batch()
    exact = CausalPolicy(make_engine_model())(PackedSamples.of(batch, CPU), TEMPERATURE)
    gradient, _ = plain("token-mean", CLIPPED)
    for scored, found in (rank["bfloat16"] for rank in four_ranks):
        for output, column in exact.items():
            flat = [x for row in scored for x in row[output]]
            assert flat == pytest.approx(column.tolist(), rel=0.05, abs=0.2)
        assert float((found - gradient).norm()) <= 0.1 * float(gradient.norm())


@pytest.mark.parametrize("name", FOUR)
def test_a_rank_of_four_keeps_about_a_quarter_of_the_activations(name, four_ranks):
    whole = saved_bytes(make_model("llama gqa", **WIDE), make_samples(LONG))
    for rank in four_ranks:
        assert rank["saved", name] <= 0.35 * whole


def formulas(name, layers, heads, key_value_heads, head_dim):
    """Bytes that all ranks send together, forward and backward, in float32; the docstrings of
    `hybridrl.parallel.ulysses`, `ring_attention` and `sequence`."""
    _, ring, ulysses = LAYOUTS[name]
    tokens, row = sum(map(sum, LONG)), 4 * head_dim
    key_value_heads = max(key_value_heads, ulysses)
    exchange = tokens * (2 * heads + 2 * key_value_heads) * row * (ulysses - 1) // ulysses
    around = 2 * tokens * key_value_heads * row * (ring - 1)
    return (
        {"ulysses": layers * exchange, "ring": layers * around},
        {"ulysses": layers * exchange, "ring": layers * 2 * around},
    )


@pytest.mark.parametrize("name", [*FOUR, "mqa"])
def test_what_is_sent_is_what_the_formulas_say(name, four_ranks):
    if name == "mqa":
        expected = formulas("ulysses2 x ring2", layers=2, heads=4, key_value_heads=1, head_dim=4)
    else:
        expected = formulas(name, layers=2, heads=8, key_value_heads=4, head_dim=8)
    for phase in (0, 1):
        for kind, wanted in expected[phase].items():
            found = sum(rank["sent", name][phase][kind] for rank in four_ranks)
            assert found == pytest.approx(wanted, rel=0.02), (kind, phase)
    responses = sum(response for _, response in LONG)
    gathered = sum(rank["sent", name][0]["gather"] for rank in four_ranks)
    # Two numbers for each token to three others, padded to the rank that reads most of them.
    assert 2 * 4 * 3 * responses <= gathered <= 1.2 * 2 * 4 * 3 * responses
    assert all(rank["sent", name][1]["gather"] == 0 for rank in four_ranks)

"""`hybridrl plan generation`: costs are measured, bits are judged, and a job takes the file."""

import json
from dataclasses import replace

import pytest
import torch
from engine_cases import CPU

from hybridrl import cli
from hybridrl.commands import plan_generation
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.errors import ConfigError
from hybridrl.models.model_loading import load_model, load_model_config, make_tiny_model
from hybridrl.systems.unequal_devices import UnequalDevice
from hybridrl.systems.unequal_generation import cost_probe as generation_probe
from hybridrl.systems.unequal_generation import generation_planning
from hybridrl.systems.unequal_generation.decoder_stage import set_cached_attention
from hybridrl.systems.unequal_generation.generation_plan import (
    GENERATION_BITS,
    load_generation_plan,
)
from hybridrl.systems.unequal_generation.plan_search import search_generation_plan as best_plan

LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = {"hidden_size": 64, "layers": LAYERS, "heads": 2, "context": 64}
    return make_tiny_model(
        tmp_path_factory.mktemp("model"), build_character_tokenizer(), seed=0, **shape
    )


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(generation_probe, "_MIN_TURNS", 1)
    monkeypatch.setattr(generation_probe, "_MIN_SECONDS", 0.0)


@pytest.fixture
def command(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_generation, "_CALIBRATION_SAMPLES", 3)
    monkeypatch.setattr(plan_generation, "_CALIBRATION_TOKENS", 4)

    def call(*words, path=folder):
        given = ["plan", "generation", f"model.path={path}", "model.dtype=float32", *words]
        code = 0
        try:
            cli.main([*given, "data.prompts_per_step=2", "rollout.max_tokens=4", "devices=cpu"])
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err.replace("\n", " ")

    return call


@pytest.mark.more
def test_a_plan_for_described_devices_is_written_and_read(command, tmp_path):
    (tmp_path / "mixed.json").write_text('[{"name": "new"}, {"name": "old", "share": 0.5}]')
    code, out, _ = command("--devices", "mixed.json", "--out", "plan.json")
    assert code == 0
    plan = load_generation_plan("plan.json")
    assert plan.layers == LAYERS
    assert 0 <= plan.kl <= 0.01
    assert f"rollout.parallel.pp={len(plan.stages)} rollout.plan=plan.json" in " ".join(out.split())
    code, out, _ = command("--devices", "mixed.json", "--json")
    assert json.loads(out)["stages"]


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        ("[]", "at least one"),
        ("{", "could not be read as JSON"),
        ('{"name": "x"}', "must be a list"),
        ('[{"share": 0}]', "share=0: must be a number above 0"),
        ('[{"share": NaN}]', "share=nan"),
        ('[{"share": true}]', "share=True"),
        ('[{"memory_gib": "x"}]', "memory_gib='x'"),
        ('[{"speed": 1}]', "has `speed`"),
    ],
)
def test_wrong_descriptions_are_refused(command, tmp_path, devices, sentence):
    (tmp_path / "mixed.json").write_text(devices)
    code, _, said = command("--devices", "mixed.json")
    assert code == cli.EXIT_CONFIG_ERROR
    assert sentence in said


@pytest.mark.more
def test_what_cannot_be_planned_is_refused(command, tmp_path):
    assert "could not be read" in command("--devices", "none.json")[2]
    assert "has to end with .json" in command("--devices", "64xH200")[2]
    assert "model.path=nowhere" in command(path="nowhere")[2]
    (tmp_path / "small.json").write_text('[{"memory_gib": 1e-6}]')
    assert "does not fit" in command("--devices", "small.json")[2]
    assert "numbers of tokens" in command("--lengths", "3+x")[2]


@pytest.mark.more
def test_costs_are_of_every_precision_phase_and_size(folder):
    config = load_model_config(str(folder))
    phases = generation_probe.measure_phase_costs(
        config, "float32", CPU, [5, 2, 5], 6, 4, generation_planning.make_sampling_step
    )
    for costs in phases:
        assert costs.layer.keys() == set(GENERATION_BITS)
        for curve in (*costs.layer.values(), costs.head, costs.stage):
            assert [rows for rows, _ in curve] == [2, 5]
            assert all(seconds >= 0 for _, seconds in curve)
    slow = generation_probe.scale_costs(phases[0], 0.25)
    assert slow.head[0][1] == 4 * phases[0].head[0][1]
    assert slow.layer[8][1][1] == 4 * phases[0].layer[8][1][1]
    assert config.num_hidden_layers == LAYERS  # as it was


@pytest.mark.more
def test_a_plan_that_is_worse_than_its_indicators_said_is_made_again(folder, monkeypatch):
    model = load_model(str(folder), "float32")
    set_cached_attention(model)
    answers = [torch.arange(3, 12), torch.arange(5, 10)]
    described = [UnequalDevice("only", memory=2**30, device="cpu")]
    settings = cli_config(folder)
    problem = generation_planning.build_generation_problem(
        settings, load_model_config(str(folder)), described, (4, 4)
    )
    indicators = generation_planning.calibrate_indicators(model, answers)
    problem = replace(problem, indicators=indicators, max_kl=sum(one[8] for one in indicators))
    some = dict.fromkeys(range(0, LAYERS, 2), 8)
    said = sum(indicators[layer][8] for layer in some)
    assert said == pytest.approx(generation_planning.token_kl(model, answers, some), rel=1e-3)

    cheap = _low_bits_are_cheap(problem)
    assert best_plan(cheap).is_rounded
    honest, asked = generation_planning.token_kl, []

    def worse(model, answers, bits):
        asked.append(bits)
        return 3 * honest(model, answers, bits)

    monkeypatch.setattr(generation_planning, "token_kl", worse)
    plan = generation_planning.find_measured_plan(cheap, model, answers)
    assert len(asked) > 1
    assert plan.kl <= cheap.max_kl
    monkeypatch.setattr(generation_planning, "token_kl", lambda *_: 1e9)
    with pytest.raises(ConfigError, match=r"the last of 5 plans is 1e\+09"):
        generation_planning.find_measured_plan(_only_low(cheap), model, answers)


def cli_config(folder):
    from hybridrl.job.config_resolution import load_config as load_settings

    return load_settings([f"model.path={folder}", "model.dtype=float32", "data.prompts_per_step=1"])


def _low_bits_are_cheap(problem):
    def cheaper(costs):
        return replace(costs, layer={bits: ((1, 1e-3 * bits),) for bits in GENERATION_BITS})

    (device,) = problem.devices
    device = replace(device, prefill=cheaper(device.prefill), decode=cheaper(device.decode))
    return replace(problem, devices=(device,))


def _only_low(problem):
    """With indicators that say that nothing is lost."""
    return replace(
        problem, indicators=tuple(dict.fromkeys(GENERATION_BITS, 0.0) for _ in problem.indicators)
    )

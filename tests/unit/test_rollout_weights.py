"""Weights written box by box, and compared."""

import itertools

import pytest
import torch
from engine_cases import CPU, make_model

from hybridrl.config.schema import RolloutConfig
from hybridrl.layout.boxes import Piece
from hybridrl.rollout.rollout_engine import EngineSetup
from hybridrl.rollout.transformers_engine import TransformersEngine
from hybridrl.rollout.weight_writer import EngineTensor, WeightWriter, find_weight_mismatches

PIECES = {
    "q": (Piece(((2, 4), (0, 3)), "qk", (0, 0)),),
    "k": (Piece(((0, 1), (0, 3)), "qk", (2, 0)),),
    "norm": (Piece(((0, 3),), "norm", (0,)),),
}
WHOLE = {
    "q": torch.arange(12.0).view(4, 3) + 1,
    "k": torch.arange(6.0).view(2, 3) + 50,
    "norm": torch.arange(3.0) + 90,
}


def write_all(parameters):
    writer = WeightWriter(parameters, PIECES)
    writer.write("norm", (1,), WHOLE["norm"][1:])
    writer.write("qk", (2, 0), WHOLE["k"][:1, :2].double())
    writer.write("qk", (0, 0), WHOLE["q"][2:])
    writer.write("qk", (2, 2), WHOLE["k"][:1, 2:])
    return writer


def test_boxes_of_any_size_and_order_make_the_tensors():
    parameters = {"qk": torch.zeros(4, 3), "norm": torch.zeros(3)}
    writer = write_all(parameters)
    with pytest.raises(RuntimeError, match=r"elements missing: \{'norm': 1\}"):
        writer.finish()
    writer.write("norm", (0,), WHOLE["norm"][:1])
    writer.finish()
    with pytest.raises(RuntimeError, match="Elements of norm were written twice"):
        writer.write("norm", (0,), WHOLE["norm"][:1])
    rows = [WHOLE["q"][2], WHOLE["q"][3], WHOLE["k"][0], torch.zeros(3)]
    assert torch.equal(parameters["qk"], torch.stack(rows))
    assert torch.equal(parameters["norm"], WHOLE["norm"])


def test_every_wrong_element_is_found():
    parameters = {"qk": torch.zeros(4, 3), "norm": WHOLE["norm"].clone()}
    write_all(parameters)

    def found():
        forms = lambda name: iter([EngineTensor(name, parameters[name])])  # noqa: E731
        return find_weight_mismatches(iter(WHOLE.items()), PIECES, forms)

    assert found() == []
    for name, tensor in parameters.items():
        for place in itertools.product(*map(range, tensor.shape)):
            before = tensor[place].clone()
            tensor[place] += 1
            sentences = found()
            assert len(sentences) == 1
            padding = name == "qk" and place[0] == 3
            assert ("padding of qk" if padding else "1 of") in sentences[0]
            tensor[place] = before
    assert len(find_weight_mismatches(iter(WHOLE.items()), PIECES, lambda name: iter([]))) == 3


def test_transformers_holds_every_parameter_whole(tmp_path):
    make_model().save_pretrained(tmp_path)
    rollout = TransformersEngine(
        EngineSetup(str(tmp_path), str(tmp_path), "bfloat16", eos_token_ids=[1], device=CPU),
        RolloutConfig(max_sequences=1),
    )
    weights = {name: torch.randn(p.shape) for name, p in make_model().named_parameters()}
    pieces = rollout.pieces({name: tuple(tensor.shape) for name, tensor in weights.items()})
    assert pieces.keys() == weights.keys()
    assert len(rollout.differences(iter(weights.items()))) == len(weights)
    writer = rollout.writer()
    for name, held in pieces.items():
        (piece,) = held
        writer.write(piece.tensor, piece.start, weights[name])
    writer.finish()
    assert rollout.differences(iter(weights.items())) == []

"""Boxes of weights straight into vLLM: its own loaders say which, and nothing else is written."""

from __future__ import annotations

import logging
import math
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import RolloutConfig, RolloutParallelConfig
from hybridrl.layout.boxes import box_numel
from hybridrl.rollout import SamplingSettings
from hybridrl.rollout.rollout_engine import EngineSetup
from hybridrl.rollout.weight_writer import box_slices, group_by_tensor
from hybridrl.system.shared_memory import remove_shared_memory

pytestmark = [pytest.mark.more, pytest.mark.vllm]
PROMPTS = [[5, 6, 14, 7, 8, 17], [9, 10], [11, 12, 13, 20]]
GREEDY = SamplingSettings(max_tokens=12, temperature=0.0)
HEAD_DIM, KV_HEADS, HIDDEN, VOCABULARY = 32, 2, 128, 49


class Case(NamedTuple):
    architecture: str
    options: dict[str, Any]
    dtype: str = "float32"
    quantization: str = "none"


# A dense layer comes last. The CPU's kernels pad experts of 48 columns, or 24, to 64 and 32.
EXPERTS = {
    "tie_word_embeddings": False,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [1],
}
# The vocabulary is padded to 64 rows: of 49 the second of two ranks has 17, of 33 one, of 32 none.
CASES = {
    "qwen2 tied": Case("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 mqa": Case(
        "Qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 1, "vocab_size": 33}
    ),
    "qwen3": Case("Qwen3", {"tie_word_embeddings": False}),
    "qwen3 tied mqa": Case("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama mqa": Case("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "llama tied biases": Case(
        "Llama",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "vocab_size": 32,
        },
    ),
    "rounded": Case("Qwen2", {"tie_word_embeddings": True}, "bfloat16"),
    "experts": Case("Qwen3Moe", EXPERTS),
    "rounded experts": Case("Qwen3Moe", EXPERTS, "bfloat16"),
    "int8": Case("Qwen2", {"tie_word_embeddings": True}, "bfloat16", "int8"),
    "int8 biases": Case("Llama", {"attention_bias": True, "mlp_bias": True}, "float32", "int8"),
}
CASES_OF_RANKS = {
    1: ("qwen2 tied", "qwen3", "llama tied biases", "rounded", "experts", "int8 biases"),
    2: tuple(CASES),
}
AWAITING = "qwen2 tied"
HAS_AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text()
"""On such processors vLLM keeps the biases of a bfloat16 model elsewhere after each loading."""
SHORT = {
    *((1, "qwen3"), (2, "qwen2 mqa"), (2, "qwen3 tied mqa"), (2, "rounded")),
    *((2, "experts"), (2, "int8")),
}
"""(Ranks, case) that are not left to `make test-long`: an engine takes seconds to start."""


def make_model(case: Case, seed: int) -> Any:
    import transformers

    config = getattr(transformers, f"{case.architecture}Config")(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 64,
            "initializer_range": 0.15,
            "eos_token_id": 1,
            "pad_token_id": 0,
            **case.options,
        }
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{case.architecture}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which begin as 1 and 0
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def rank_program(
    rank: int, ranks: int, names: tuple[str, ...], job: str, folder: Path
) -> dict[str, Any]:
    """What each of the processes does and finds; tests compare."""
    found, engines = {}, []  # kept: an engine of vLLM's that goes takes the process group along
    for name in names:
        engines.append(make_rollout(folder / name, CASES[name], ranks, job))
        found[name] = run_case(CASES[name], engines[-1])
    for rollout in engines:
        rollout.close()
    return found


def make_rollout(folder: Path, case: Case, ranks: int, job: str, **options: Any) -> Any:
    from hybridrl.rollout.vllm_engine import VLLMEngine

    parallel = RolloutParallelConfig(ranks)
    return VLLMEngine(
        EngineSetup(
            str(folder),
            str(folder),
            case.dtype,
            context_length=64,
            eos_token_ids=[1],
            device=torch.device("cpu"),
            seed=0,
            job=job,
            **options,
        ),
        RolloutConfig(parallel=parallel, kv_cache_gib=0.01, quantization=case.quantization),
    )


def awaiting_program(rank: int, ranks: int, name: str, job: str, folder: Path) -> dict[str, Any]:
    """Engines whose weights are to come: all of them, and all but one."""
    case = CASES[name]
    weights = dict(make_model(case, 2).named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    rollout = make_rollout(folder / name, case, ranks, job, coming=shapes)
    found: dict[str, Any] = {"awaits": rollout.awaits_weights}
    pieces = rollout.pieces(shapes)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    found["differences"] = [rollout.differences(iter(zeros.items()))]
    write_boxes(rollout, pieces, weights)
    found["differences"].append(rollout.differences(iter(weights.items())))
    found["tokens"] = [greedy(rollout)]
    del shapes["model.norm.weight"]
    other = make_rollout(folder / name, case, ranks, job, coming=shapes)
    found["tokens"].append(greedy(other))
    for each in (rollout, other):
        each.close()
    return found


def run_case(case: Case, rollout: Any) -> dict[str, Any]:
    versions = [dict(make_model(case, seed).named_parameters()) for seed in (1, 2, 3)]
    shapes = {name: tuple(tensor.shape) for name, tensor in versions[0].items()}
    model = rollout._worker.get_model()
    parameters = dict(model.named_parameters())
    found: dict[str, Any] = {"pieces": rollout.pieces(shapes)}
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    found["parameters"] = {n: tuple(p.shape) for n, p in model.raw_parameters.items()}
    found["tokens"] = [greedy(rollout)]
    # What vLLM's own loaders did with the checkpoint is what the pieces say.
    found["differences"] = [rollout.differences(iter(versions[0].items()))]

    # The CPU's kernels for experts are given another tensor each time.
    stay = {n: p for n, p in parameters.items() if p.numel() and "experts" not in n}
    addresses = {n: p.data_ptr() for n, p in stay.items()}
    for parameter in parameters.values():  # as if it had slept: padding is lost, too
        parameter.data.fill_(7)
    found["buffers"] = write_boxes(rollout, found["pieces"], versions[1])
    kept = dict(model.named_parameters())
    found["moved"] = [n for n, address in addresses.items() if kept[n].data_ptr() != address]
    found["differences"].append(rollout.differences(iter(versions[1].items())))
    found["tokens"].append(greedy(rollout))

    rollout.load(iter(versions[2].items()))
    found["differences"].append(rollout.differences(iter(versions[2].items())))
    found["tokens"].append(greedy(rollout))
    wrong = {name: tensor.detach().clone() for name, tensor in versions[2].items()}
    for tensor in wrong.values():
        tensor.view(-1)[-1] += 1
    found["wrong"] = rollout.differences(iter(wrong.items()))

    found["refused"] = refuse(rollout, shapes)
    rollout.load(iter(versions[1].items()))
    found["tokens"].append(greedy(rollout))
    return found


def write_boxes(rollout: Any, pieces: Any, weights: Any) -> int:
    """Writes every piece in two halves, the last ones first; gives the most parameters that were
    at any time in buffers. Nothing that is not in a piece is to be had."""
    writer = rollout.writer()
    most = 0
    for name in reversed(weights):
        for box, tensor, start in pieces[name]:
            values = weights[name].detach()[box_slices(box)].clone()
            half = (len(values) + 1) // 2
            writer.write(tensor, (start[0] + half, *start[1:]), values[half:])
            writer.write(tensor, start, values[:half])
            most = max(most, len(writer._raw))
    writer.finish()
    return most


def greedy(rollout: Any) -> list[list[int]]:
    samples = rollout.generate(Batch.from_columns({"prompt_ids": PROMPTS}), GREEDY, seed=0)
    return [row.tolist() for row in samples["response_ids"].rows()]


def refuse(rollout: Any, shapes: Any) -> tuple[bool, list[str]]:
    """What `pieces` answers, and logs, when a layer's loader changes what it loads."""
    raw = rollout._worker.get_model().raw_parameters["model.layers.1.mlp.down_proj.weight"]
    loader = raw.weight_loader
    raw.weight_loader = lambda parameter, loaded: loader(parameter, loaded * 2)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("hybridrl.rollout.vllm_engine")
    log.addHandler(handler)
    try:
        return rollout.pieces(shapes) is None, lines
    finally:
        log.removeHandler(handler)
        raw.weight_loader = loader


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What the processes found of the cases whose tests run, by tensor parallel size and rank."""
    wanted = {
        tuple(item.callspec.params[name] for name in ("ranks", "name"))
        for item in request.session.items
        if item.path == request.path and "name" in getattr(item, "fixturenames", ())
    }
    folder = tmp_path_factory.mktemp("ranks")
    for name, case in CASES.items():
        make_model(case, 1).save_pretrained(folder / name)
    results = {}
    for ranks, names in CASES_OF_RANKS.items():
        names = tuple(name for name in names if (ranks, name) in wanted)
        job = f"hybridrl-{os.getpid()}-{ranks}"
        results[ranks] = run_ranks(rank_program, folder, ranks, ranks, names, job, folder)
        remove_shared_memory(job)
    return results


@cache
def expected_tokens(name: str, seed: int) -> list[list[int]]:
    model = make_model(CASES[name], seed)
    responses = []
    for prompt in PROMPTS:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        tokens = ids[0, len(prompt) :].tolist()
        responses.append(tokens[: tokens.index(1) + 1] if 1 in tokens else tokens)
    return responses


def is_exact(name: str) -> bool:
    """Whether vLLM's tokens are those of transformers."""
    return CASES[name].dtype == "float32" and CASES[name].quantization == "none"


every_case = pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, marks=() if (ranks, name) in SHORT else pytest.mark.long)
        for ranks, names in CASES_OF_RANKS.items()
        for name in names
    ],
)


@every_case
def test_weights_written_as_boxes_are_those_of_the_trainer(name, ranks, found):
    for of_rank in found[ranks]:
        assert of_rank[name]["differences"] == [[], [], []]
        moved = of_rank[name]["moved"]
        assert [n for n in moved if not (HAS_AMX and "rounded" in name and "bias" in n)] == []
        if is_exact(name):
            expected = [expected_tokens(name, seed) for seed in (1, 2, 3, 2)]
            assert of_rank[name]["tokens"] == expected
            assert expected[0] != expected[1] != expected[2]


@every_case
def test_a_wrong_element_in_each_tensor_is_found(name, ranks, found):
    weights = make_model(CASES[name], 1).named_parameters()
    missed = {tensor for tensor, _ in weights}
    for of_rank in found[ranks]:
        sentences = of_rank[name]["wrong"]
        # In 8 bits it also changes the scale of its row.
        in_8_bits = CASES[name].quantization != "none"
        assert in_8_bits or all("1 of" in sentence for sentence in sentences)
        missed -= {sentence.split(" ")[0] for sentence in sentences}
    assert not missed


@every_case
def test_pieces_fill_each_parameter_and_hold_each_tensor(name, ranks, found):
    shapes = {n: tuple(p.shape) for n, p in make_model(CASES[name], 1).named_parameters()}
    covered = {tensor: torch.zeros(shape, dtype=torch.int64) for tensor, shape in shapes.items()}
    for of_rank in found[ranks]:
        pieces = of_rank[name]["pieces"]
        assert pieces.keys() == shapes.keys()
        for tensor, held in pieces.items():
            for piece in held:
                covered[tensor][box_slices(piece.box)] += 1
        for tensor, held in group_by_tensor(pieces).items():
            filled = sum(box_numel(piece.box) for piece in held)
            room = math.prod(of_rank[name]["parameters"][tensor])
            assert filled == room or "embed_tokens" in tensor or "lm_head" in tensor
    key_heads = CASES[name].options.get("num_key_value_heads", KV_HEADS)
    for tensor, times in covered.items():
        replicated = ("o_proj.bias", "down_proj.bias", "mlp.gate.weight")
        sliced = "norm" not in tensor and not tensor.endswith(replicated)
        if ("k_proj" in tensor or "v_proj" in tensor) and key_heads < ranks:
            sliced = False
        assert times.unique().tolist() == [1 if sliced else ranks], tensor


@every_case
def test_a_loader_that_cannot_be_probed_means_whole_tensors(name, ranks, found):
    for of_rank in found[ranks]:
        refused, (line,) = of_rank[name]["refused"]
        assert refused
        assert "whole tensors" in line
        assert "model.layers.1.mlp.down_proj.weight is not copied" in line


@pytest.mark.parametrize(
    ("ranks", "case"),
    [(1, AWAITING), (2, AWAITING), pytest.param(1, "int8", marks=pytest.mark.long)],
)
def test_a_folder_is_not_read_whose_weights_would_all_be_written_over(ranks, case, tmp_path):
    make_model(CASES[case], 1).save_pretrained(tmp_path / case)
    job = f"hybridrl-{os.getpid()}-awaiting-{ranks}"
    for found in run_ranks(awaiting_program, tmp_path, ranks, ranks, case, job, tmp_path):
        assert found["awaits"]
        assert found["differences"] == [[], []]
        if is_exact(case):
            assert found["tokens"] == [expected_tokens(case, seed) for seed in (2, 1)]
    remove_shared_memory(job)


def test_no_more_than_a_layer_lies_in_a_buffer_at_a_time(found):
    """In the order of the model, or in reverse as here. A layer of experts has two tensors,
    and so has one whose bias is kept elsewhere."""
    for results in found.values():
        for of_rank in results:
            for name, of_case in of_rank.items():
                two = "experts" in name or (HAS_AMX and "rounded" in name)
                assert of_case["buffers"] <= (2 if two else 1)

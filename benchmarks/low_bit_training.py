"""What fewer bits do to what is learned: a language model trained with gradients and weights as
they would travel between four ranks of two nodes.

    python benchmarks/low_bit_training.py [--seeds 0 1 2] [--steps 500] [--keep FILE]

A model of a million parameters learns the source text of Python's own standard library, byte by
byte; every tenth of its files is for validation. Arms of a seed begin with the same weights and see
the same batches:

* full: gradients summed in float32, weights gathered in bfloat16, as FSDP does by default;
* nudged: the same from weights that are off by a millionth, which shows by how much two runs differ
  that nothing distinguishes;
* differences: weights as 4-bit differences (`actor.parallel.weights=int4_difference`);
* direct: the weights themselves in the same 4 bits, which is no setting;
* all: differences, and gradients as `actor.parallel.gradients=two_level_int4` sums them.

The four ranks are one process that computes what each of them would, with the library's codecs and
the library's arithmetic of receivers; the messages are not sent. Nothing here depends on time.
`--keep` notes each run as it ends, and what a file has of them is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from figures import report
from other_codecs import Codec
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybridrl.parallel.compressed_collectives import (
    DIFFERENCE_CODEC,
    INT4_CODEC,
    INT8_CODEC,
    apply_encoded_difference,
)

RANKS, NODES = 4, ((0, 1), (2, 3))
ROWS, LENGTH = 3, 96
"""Of a rank's batch, in bytes of text."""
CONFIG = Qwen2Config(
    vocab_size=256,
    hidden_size=160,
    intermediate_size=448,
    num_hidden_layers=3,
    num_attention_heads=5,
    num_key_value_heads=5,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=True,
)
ARMS = ("full", "nudged", "differences", "direct", "all")
LOOKS = (0.1, 0.5, 0.9)
"""At these shares of the steps of the full arm, gradients are summed in all ways."""

Way = Callable[[Tensor], Tensor]
"""From what the ranks have, [ranks, ranks x part], to the sums of the parts, [ranks, part]."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    known: list[dict[str, Any]] = []
    if options.keep and options.keep.exists():
        known = [json.loads(line) for line in options.keep.read_text().splitlines()]
    runs = {}
    texts = read_texts()
    for seed in options.seeds:
        for arm in ARMS:
            key = {"arm": arm, "seed": seed, "steps": options.steps}
            run = next((one for one in known if key.items() <= one.items()), None)
            if run is None:
                print(f"# training: {arm}, seed {seed}, {options.steps} steps")
                run = key | train(arm, seed, options.steps, texts)
                if options.keep:
                    with options.keep.open("a") as file:
                        file.write(json.dumps(run) + "\n")
            runs[arm, seed] = run
    show(runs, options.seeds)


def show(runs: dict[tuple[str, int], dict[str, Any]], seeds: Sequence[int]) -> None:
    """The figures, losses in nats a byte."""
    loss = {arm: statistics.mean(runs[arm, seed]["loss"] for seed in seeds) for arm in ARMS}
    for seed in seeds:
        for arm in ARMS[1:]:
            ours, full = runs[arm, seed]["loss"], runs["full", seed]["loss"]
            report(f"{arm}, seed {seed}: validation loss", ours, full, "report", "nats/byte")
    goals = {
        "nudged": "report",
        "differences": "<= 1.0015",
        "direct": "report",
        "all": "<= 1.008",
    }
    for arm, goal in goals.items():
        report(f"{arm}: validation loss, mean", loss[arm], loss["full"], goal, "nats/byte")
    harm = {arm: abs(loss[arm] - loss["full"]) for arm in ("direct", "differences")}
    floor = 1e-6 * loss["full"]
    report("direct against differences: change", harm["direct"], max(harm["differences"], floor),
           ">= 10", "nats/byte")  # fmt: skip
    errors = [row for seed in seeds for row in runs["full", seed]["errors"]]
    for better, worse in (("hadamard", "two levels"), ("two levels", "one level")):
        ours, theirs = (statistics.median(row[way] for row in errors) for way in (better, worse))
        report(f"gradient error, {better} against {worse}", ours, theirs, "< 1", "relative")
        count = sum(row[better] < row[worse] for row in errors)
        report(f"matrices where {better} is better", count, len(errors), ">= 0.9", "matrices")


def read_texts() -> tuple[Tensor, Tensor]:
    """Bytes to learn from, and of other files for validation."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [[file.read_bytes() for file in files if file not in files[::10]]]
    parts.append([file.read_bytes() for file in files[::10]])
    learn, judge = (torch.frombuffer(bytearray(b"\n".join(p)), dtype=torch.uint8) for p in parts)
    return learn, judge


def train(arm: str, seed: int, steps: int, texts: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Validation loss at the end, and of the full arm what ways of summing lose."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(CONFIG)
    main = [p.detach() * (1 + 1e-6 * (arm == "nudged")) for p in model.parameters()]
    model.to(torch.bfloat16)
    for weight in main:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(main, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / 50, (steps - n) / (steps - 50))
    )
    held = in_parts(main).bfloat16()
    sum_gradients = two_levels(INT4_CODEC) if arm == "all" else exact
    generator, errors = torch.Generator().manual_seed(seed), []
    for step in range(steps):
        given = torch.stack([gradient(model, draw(texts[0], generator)) for _ in range(RANKS)])
        if arm == "full" and step in [int(share * steps) for share in LOOKS]:
            errors += look(given, model)
        spread(sum_gradients(given) / RANKS, [weight.grad for weight in main])
        torch.nn.utils.clip_grad_norm_(main, 1.0)
        optimizer.step()
        schedule.step()
        gather(arm, in_parts(main).bfloat16(), held)
        spread(held, [p.data for p in model.parameters()])
    return {"loss": judge(model, texts[1]), "errors": errors}


def gather(arm: str, wanted: Tensor, held: Tensor) -> None:
    """Brings what all ranks hold to what each rank's part is now, both [ranks, part]."""
    for new, old in zip(wanted, held, strict=True):
        if arm in ("full", "nudged"):
            old.copy_(new)
        elif arm == "direct":
            old.copy_(
                DIFFERENCE_CODEC.decode(
                    DIFFERENCE_CODEC.encode(new.float()), len(new), torch.float32
                )
            )
        else:
            apply_encoded_difference(old, DIFFERENCE_CODEC.encode(new.float() - old))


def in_parts(tensors: Sequence[Tensor]) -> Tensor:
    """As FSDP lays out a unit: [ranks, part], where a part has a share of each tensor."""
    return torch.cat([tensor.reshape(RANKS, -1) for tensor in tensors], 1)


def spread(parts: Tensor, tensors: Sequence[Tensor]) -> None:
    """The reverse of `in_parts`, into the tensors."""
    sizes = [tensor.numel() // RANKS for tensor in tensors]
    for part, tensor in zip(parts.split(sizes, 1), tensors, strict=True):
        tensor.copy_(part.reshape(tensor.shape))


def draw(text: Tensor, generator: torch.Generator) -> Tensor:
    """Rows of a rank's batch."""
    starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=generator)
    return torch.stack([text[start : start + LENGTH] for start in starts]).long()


def gradient(model: Qwen2ForCausalLM, rows: Tensor) -> Tensor:
    """What a rank brings to the sum, flat."""
    model.zero_grad()
    model(rows, labels=rows).loss.backward()
    return in_parts([p.grad for p in model.parameters()]).float().flatten()


@torch.no_grad()
def judge(model: Qwen2ForCausalLM, text: Tensor) -> float:
    """Nats a byte of text that nobody learned from: 768 pieces of it, all over."""
    starts = torch.linspace(0, len(text) - LENGTH, 768).long()
    rows = torch.stack([text[start : start + LENGTH] for start in starts]).long()
    losses = []
    for some in rows.split(64):
        logits = model(some).logits[:, :-1].float()
        losses.append(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten())
        )
    return float(torch.stack(losses).mean())


def exact(given: Tensor) -> Tensor:
    """Summed in float32."""
    return given.sum(0).view(RANKS, -1)


def hop(given: dict[int, Tensor], ranks: Sequence[int], codec: Codec) -> dict[int, Tensor]:
    """What `hybridrl.parallel.compressed_collectives.ReductionHop` gives each of these ranks."""
    parts = {rank: given[rank].view(len(ranks), -1) for rank in ranks}
    found = {}
    for place, rank in enumerate(ranks):
        found[rank] = torch.zeros_like(parts[rank][place])
        for other in ranks:
            part = parts[other][place]
            if other != rank:
                part = codec.decode(codec.encode(part), len(part), torch.float32)
            found[rank] += part
    return found


def one_level(codec: Codec) -> Way:
    """Each rank sends to each in these bits."""

    def total(given: Tensor) -> Tensor:
        found = hop(dict(enumerate(given)), range(RANKS), codec)
        return torch.stack([found[rank] for rank in range(RANKS)])

    return total


def two_levels(codec: Codec) -> Way:
    """In 8 bits within a node, then the nodes' sums in these."""

    def total(given: Tensor) -> Tensor:
        order = [rank for same in zip(*NODES, strict=True) for rank in same]
        found = dict(enumerate(given.view(RANKS, RANKS, -1)[:, order].flatten(1)))
        for ranks in NODES:
            found |= hop(found, ranks, INT8_CODEC)
        for ranks in zip(*NODES, strict=True):
            found |= hop(found, ranks, codec)
        return torch.stack([found[rank] for rank in range(RANKS)])

    return total


def look(given: Tensor, model: Qwen2ForCausalLM) -> list[dict[str, float]]:
    """For each matrix, how far each way's sum of its gradient is off, over that gradient's norm."""
    plain = replace(INT4_CODEC, hadamard=False)
    ways = {"hadamard": two_levels(INT4_CODEC), "two levels": two_levels(plain)}
    ways["one level"] = one_level(plain)
    whole = exact(given)
    off = {name: way(given) - whole for name, way in ways.items()}
    sizes = [p.numel() // RANKS for p in model.parameters()]
    rows = []
    for number, parameter in enumerate(model.parameters()):
        if parameter.ndim == 2:
            norm = whole.split(sizes, 1)[number].norm()
            errors = {name: one.split(sizes, 1)[number].norm() for name, one in off.items()}
            rows.append({name: float(error / norm) for name, error in errors.items()})
    return rows


if __name__ == "__main__":
    main()

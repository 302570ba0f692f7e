"""How good a learning rate is that is found while training: `actor.optimizer.schedule=auto` against
constant rates and a tuned cosine.

    python benchmarks/auto_learning_rate.py [--tasks sft reward_model text] [--seeds 0 1 2]
                                            [--steps 400] [--prompts N] [--folder FOLDER]

`sft` and `reward_model` are the built-in task and the tiny model. `text` is a model of 8 million
parameters, with a tokenizer made on the spot, that learns the docstrings of Python's standard
library. Of each, arms begin with the same weights and see the same batches:

* constant: eight rates between 1e-5 and 1e-1, each for all steps; the best one counts;
* cosine: the best of these times 1, 2 and 4, falling over all steps; the best one counts;
* auto: the range from 1e-5 to 1e-1 and nothing else, with 0.8 and 0.9 of the steps and with all of
  them, its search included.

What counts is the held-out loss at the end: auto's is to be no higher than those of the others.
With `--folder` runs that are there are not made again. Nothing depends on time.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import statistics
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from figures import SMOKE, report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hybridrl import load_config
from hybridrl.main import run
from hybridrl.trainers import reward_model

AUTO = {"auto": 0.8, "auto_nine_tenths": 0.9, "auto_whole": 1.0}
"""Share of the steps of the others."""
RATES = [10 ** (-5 + 4 * number / 7) for number in range(8)]
FACTORS = (1, 2, 4)
INLINE = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=0"),
    *("eval.every=0", "actor.optimizer.warmup_steps=0"),
]
TASKS = {
    "sft": ["algorithm=sft"],
    "reward_model": ["algorithm=reward_model"],
    "text": ["algorithm=sft", "data=jsonl", "data.prompts_per_step=16", "eval.prompts=64"],
}
SMALLEST = ["data.prompts_per_step=4", "eval.prompts=4"] if SMOKE else []
CHARACTERS = 320
"""Of a row of text."""
VOCABULARY, END = 4096, "<|endoftext|>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=None, help="of a step")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    # Of pairs only accuracy is reported otherwise.
    reward_model.Trainer.evaluate = lambda self, held_out: {
        "eval/loss": self.compute_held_out_loss(held_out)
    }
    for task in options.tasks:
        pairs: dict[tuple[str, str], list[tuple[float, float]]] = {
            pair: [] for pair in product(AUTO, ("constant", "cosine"))
        }
        for seed in options.seeds:
            place = folder / f"{task}-{seed}-{options.steps}"
            fewer = [f"data.prompts_per_step={options.prompts}"] if options.prompts else []
            settings = [*TASKS[task], *fewer, *(write_text(folder) if task == "text" else [])]
            found = compare(place, seed, options.steps, settings)
            for (ours, baseline), losses in pairs.items():
                losses.append((found[ours], found[baseline]))
                name = f"{task}, seed {seed}: loss at {AUTO[ours]} of the steps, against {baseline}"
                report(name, *losses[-1], "report", "nats")
        for (ours, baseline), losses in pairs.items():
            means = map(statistics.mean, zip(*losses, strict=True))
            name = f"{task}: loss at {AUTO[ours]} of the steps, against {baseline}"
            report(name, *means, "<= 1", "nats")


def compare(place: Path, seed: int, steps: int, settings: list[str]) -> dict[str, float]:
    """The held-out loss that each arm ends with."""

    def learn(name: str, number: int, *of_arm: str) -> float:
        own = [*settings, f"trainer.steps={number}", f"run.seed={seed}", *of_arm]
        loss = train(place / name, own)
        print(f"# {place.name}, {name}: held-out loss {loss:.4f}", flush=True)
        return loss

    def of_rate(rate: float, schedule: str) -> float:
        settings = f"actor.optimizer.learning_rate={rate}", f"actor.optimizer.schedule={schedule}"
        return learn(f"{schedule} {rate:.2g}", steps, *settings)

    searched = "actor.optimizer.schedule=auto"
    auto = {
        name: learn(name, max(40, round(share * steps)), searched) for name, share in AUTO.items()
    }
    constant = {rate: of_rate(rate, "constant") for rate in RATES[:: 7 if SMOKE else 1]}
    best = min(constant, key=constant.__getitem__)
    cosine = [of_rate(min(1.0, factor * best), "cosine") for factor in FACTORS]
    return {**auto, "constant": constant[best], "cosine": min(cosine)}


def train(folder: Path, settings: list[str]) -> float:
    """Make a run, unless it is there, and return its last held-out loss."""
    summary = folder / "summary.json"
    if not summary.exists() or json.loads(summary.read_text()).get("interrupted"):
        shutil.rmtree(folder, ignore_errors=True)
        run(load_config([*INLINE, *settings, *SMALLEST, f"run.directory={folder}"]))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses: list[float] = [line["eval/loss"] for line in lines if "eval/loss" in line]
    return losses[-1]


def write_text(folder: Path) -> list[str]:
    """Write rows of text, a tokenizer and a new model, and return the settings that name them."""
    rows, model = folder / "text.jsonl", folder / "text-model"
    if not (model / "config.json").exists():
        texts = [text for text in docstrings() if len(text) > CHARACTERS // 4]
        pieces = [t[n : n + CHARACTERS] for t in texts for n in range(0, len(t), CHARACTERS)]
        pieces = [piece for piece in pieces if len(piece.split()) > 8]
        rows.parent.mkdir(parents=True, exist_ok=True)
        parts = [piece.split(" ", 2) for piece in pieces if piece.count(" ") > 4]
        rows.write_text(
            "".join(
                json.dumps({"prompt": f"{first} {second}", "answer": f" {rest}"}) + "\n"
                for first, second, rest in parts
            )
        )
        make_model(model, pieces)
    return [f"model.path={model}", f"data.path={rows}", "data.response_column=answer"]


def make_model(folder: Path, pieces: list[str]) -> None:
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain.train_from_iterator(
        pieces,
        trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=END, pad_token=END)
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    print(f"# {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")
    model.save_pretrained(folder)


def docstrings() -> Iterator[str]:
    """Yield the docstrings of Python's standard library."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some sources have odd escapes
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                    yield text


if __name__ == "__main__":
    main()

"""HybridRL against TRL's GRPOTrainer: completion tokens per second, end to end.

    python benchmarks/versus_trl.py [--rounds 3] [--venv .trl-venv]

Same model, prompts, number of samples, limits, reward and precision, two cores each, in turn. A
step samples 8 answers to each of 32 prompts, 16 to 512 tokens long, and makes one optimizer update.
The model is random and nearly uniform over 128 tokens, one of which ends the answer, so lengths are
geometric with a long tail: mean about 128. TRL gets an environment of its own, made here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from figures import SMOKE, interleave, report
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybridrl import Job, load_config
from hybridrl.data.character_tokenizer import CHARACTERS, build_character_tokenizer

VOCABULARY = 128
SIZES = {
    "8M": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8},
    "1M": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4},
}
DTYPES = ["float32", "bfloat16"]
"""Of computation, in both arms; weights that are trained are float32."""
MAX_TOKENS = 20 if SMOKE else 512
TORCH = "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TRL = "trl==1.16.*"
REWARD = '''
def score(prompt, response):
    """Share of characters with an even code: any cheap function of the text serves."""
    return sum(ord(c) % 2 == 0 for c in response) / max(1, len(response))
'''


def make_venv(folder: Path) -> Path:
    """TRL's own environment; returns its python."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "-q"]
        index = ["--retries", "0", "--extra-index-url", TORCH_INDEX]
        subprocess.run([*pip, *index, TORCH], check=True)
        subprocess.run([*pip, TRL, "datasets", "accelerate", TORCH], check=True)
    return python


def make_model(folder: Path, size: str) -> None:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        num_attention_heads=SIZES[size]["hidden_size"] // 32,
        num_key_value_heads=SIZES[size]["hidden_size"] // 64,
        max_position_embeddings=1024,
        initializer_range=0.002,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        **SIZES[size],
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    build_character_tokenizer().save_pretrained(folder)


def write_prompts(path: Path) -> None:
    torch.manual_seed(0)
    rows = []
    for _ in range(256):
        length = int(torch.randint(8, 25, ()))
        places = torch.randint(len(CHARACTERS), (length,)).tolist()
        prompt = "".join(CHARACTERS[place] for place in places)
        rows.append(json.dumps({"prompt": prompt}) + "\n")
    path.write_text("".join(rows))


def compare(size: str, dtype: str, python: Path, folder: Path, rounds: int) -> None:
    model, prompts = folder / size, folder / "prompts.jsonl"
    if not model.exists():
        make_model(model, size)
    overrides = [
        f"run.root={folder / 'runs'}",
        f"model.path={model}",
        f"model.dtype={dtype}",
        "data=jsonl",
        f"data.path={prompts}",
        "data.answer_column=null",
        "data.prompts_per_step=32",
        f"reward.function={folder / 'reward.py'}:score",
        "rollout.samples_per_prompt=8",
        f"rollout.max_tokens={MAX_TOKENS}",
        "rollout.min_tokens=16",
        "guard.most_mismatch=10",
        "actor.optimizer.learning_rate=1e-7",
        "actor.tokens_per_microbatch=4096",
        "rollout.kv_cache_gib=1",
    ]
    with Job(load_config(overrides)) as job:
        trainer = job.make_trainer()
        lengths = []

        def ours() -> float:
            begin = time.perf_counter()
            batch, handles = trainer.step()
            for handle in handles:
                handle.get()
            seconds = time.perf_counter() - begin
            lengths.append(batch.collect(["response_ids"]).lengths("response_ids"))
            return lengths[-1].sum() / seconds

        def theirs() -> float:
            command = [python, Path(__file__).with_name("trl_arm.py"), "--steps", "2"]
            command += ["--model", model, "--prompts", prompts, "--dtype", dtype]
            command += ["--max-tokens", str(MAX_TOKENS)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            steps = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
            return steps[-1]["completion_tokens"] / steps[-1]["seconds"]

        ours()
        speeds = interleave(ours, theirs, rounds)
        print(
            f"{size}, {dtype}: {len(lengths[-1])} samples, mean {lengths[-1].mean():.0f} tokens, "
            f"shortest {lengths[-1].min()}, longest {lengths[-1].max()}"
        )
        report(f"tokens/s against TRL, {size} parameters, {dtype}", *speeds, ">= 5", "tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--venv", type=Path, default=Path(".trl-venv"))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    arguments = parser.parse_args()
    python = make_venv(arguments.venv.absolute())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl")
        (folder / "reward.py").write_text(REWARD)
        for size in arguments.sizes[-1:] if SMOKE else arguments.sizes:
            for dtype in arguments.dtypes[:1] if SMOKE else arguments.dtypes:
                compare(size, dtype, python, folder, arguments.rounds)


if __name__ == "__main__":
    main()

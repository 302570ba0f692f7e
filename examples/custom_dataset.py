"""Data of your own: writes prompts.jsonl and a small model, and learns from them.

    python examples/custom_dataset.py executor=inline rollout=transformers

The task: answer with the first letter of the prompt, such as `dcb=` -> `d`. For real work
`data.path` is your file (JSONL or Parquet, columns of any name) and `model.path` your model.
"""

import json
import random
import sys
from pathlib import Path

from hybridrl import load_config
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.main import run
from hybridrl.models.model_loading import make_tiny_model


def write_data(path: Path) -> None:
    random.seed(0)
    words = ["".join(random.sample("abcdef", 3)) for _ in range(500)]
    rows = ({"question": f"{word}=", "solution": word[0]} for word in words)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    folder = Path("custom_dataset")
    folder.mkdir(exist_ok=True)
    write_data(folder / "prompts.jsonl")
    make_tiny_model(
        folder / "model",
        build_character_tokenizer(),
        seed=0,
        hidden_size=64,
        layers=2,
        heads=2,
        context=64,
    )
    run(
        load_config(
            [
                "run.name=first-letter",
                f"model.path={folder / 'model'}",
                "data=jsonl",
                f"data.path={folder / 'prompts.jsonl'}",
                "data.prompt_column=question",
                "data.answer_column=solution",
                "rollout.max_tokens=1",
                "actor.optimizer.learning_rate=1e-3",
                "trainer.steps=60",
                *sys.argv[1:],
            ]
        )
    )

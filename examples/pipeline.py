"""From nothing to RLHF: supervised fine-tuning, a reward model from pairs, then PPO against it.

    python examples/pipeline.py

The task: write a word backwards, such as `dcb=` -> `bcd`. The examples are of mixed quality: half
of them leave the word as it is, and so does the model that learns from them. People (here: a few
lines of Python) prefer the word backwards to anything else, and a reward model learns that from
pairs. PPO sees no right answer, only that reward model. What it gained is measured against the
right answers of words that PPO has not seen. Arguments are settings of all stages.
"""

import itertools
import json
import random
import sys
from pathlib import Path

from hybridrl import load_config
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.main import run
from hybridrl.models.model_loading import make_tiny_model

FOLDER = Path("runs/pipeline")
LETTERS = "abcdefghijklmnop"


def worse_answers(word: str) -> list[str]:
    """The word as it is, and what is sloppy: wrong letters, too little, too much, anything at all.
    What a reward model has never seen it may like, and PPO finds out."""
    right = word[::-1]
    place = random.randrange(len(word))
    return [
        word,
        right[:place] + random.choice(LETTERS) + right[place + 1 :],
        "".join(random.choices(word, k=len(word))),
        right[:place],
        right + "".join(random.choices(LETTERS, k=random.randint(1, 4))),
        "".join(random.choices(LETTERS + "=", k=random.randint(0, 7))),
    ]


def write_data() -> None:
    random.seed(0)
    words = ["".join(letters) for letters in itertools.product(LETTERS, repeat=3)]
    words = [word for word in words if word != word[::-1]]
    random.shuffle(words)
    examples, compared, prompts = words[:500], words[500:2000], words[2000:]
    rows = {
        "examples": [
            {"prompt": f"{word}=", "response": answer}
            for word in examples
            for answer in (word, word[::-1])
        ],
        "pairs": [
            {"prompt": f"{word}=", "chosen": word[::-1], "rejected": worse}
            for word in compared
            for worse in worse_answers(word)
        ],
        "prompts": [{"prompt": f"{word}=", "answer": word[::-1]} for word in prompts],
    }
    for name, part in rows.items():
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def stage(name: str, data: str, model: str, rate: str, steps: int, *more: str) -> tuple[str, dict]:
    """Runs one stage; gives the folder of its model and its summary."""
    settings = [
        *(f"algorithm={name}", f"run.directory={FOLDER / name}", f"model.path={model}"),
        *("data=jsonl", f"data.path={FOLDER / data}.jsonl", "data.prompts_per_step=128"),
        *(f"trainer.steps={steps}", f"actor.optimizer.learning_rate={rate}", "eval.every=100"),
        *("actor.optimizer.warmup_steps=10", "actor.optimizer.schedule=cosine"),
        *("rollout.max_tokens=8", "rollout.max_sequences=512"),
    ]
    summary = run(load_config([*settings, *more, *sys.argv[1:]]))
    return str(FOLDER / name / "model"), summary


def accuracy(model: str) -> float:
    """The share of right greedy answers."""
    return stage("evaluate", "prompts", model, "1e-3", 1)[1]["accuracy_last"]


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_data()
    start = make_tiny_model(
        FOLDER / "start",
        build_character_tokenizer(LETTERS + "="),
        **{"seed": 0, "hidden_size": 128, "layers": 2, "heads": 4, "context": 64},
    )
    sft, _ = stage("sft", "examples", start, "2e-3", 120)
    reward_model, pairs = stage("reward_model", "pairs", sft, "1e-3", 300)
    policy, _ = stage(
        *("ppo", "prompts", sft, "5e-4", 40),
        *("reward.function=[]", f"reward.model={reward_model}", "data.answer_column=null"),
        # What holds the policy where the reward model knows its way: a KL to where it began, and a
        # penalty for an answer that goes on after the word.
        *("algorithm.kl_coefficient=0.01", "algorithm.kl_in_reward=true"),
        *("algorithm.overlong_buffer=3", "algorithm.overlong_factor=5"),
    )
    before, after = accuracy(sft), accuracy(policy)
    print(f"the reward model tells {pairs['pair_accuracy_last']:.2f} of held-out pairs apart")
    print(f"greedy accuracy {before:.2f} -> {after:.2f}")

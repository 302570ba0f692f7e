"""What README.md, docs/quickstart.md and docs/planning.md show does run, from top to bottom: their
commands with fewer steps, their programs as they stand."""

import json
import os
import subprocess
import sys

import pytest
from pages import ROOT, blocks, commands

from hybridrl.data.tasks.arithmetic import CHARACTERS
from hybridrl.data.tasks.character_tokenizer import build_tokenizer
from hybridrl.models import make_tiny_model

MAIN = ("python", "-m", "hybridrl.main")
SHORT = ["trainer.steps=2", "warmup.steps=3", "eval.prompts=16", "data.prompts_per_step=8"]
INSTEAD = {
    "model.path=Qwen/Qwen2.5-0.5B-Instruct": [
        *("model.path=runs/latest/model", "data.chat=false", "warmup.steps=0"),
        "rollout.max_tokens=3",
    ],
}
"""Of words of commands, what follows them here: this machine may not reach the hub."""
NOT_RUN = "make makes the virtual environment that runs this test; pip needs a package index"
"""Why those are not among the commands that are run."""


@pytest.fixture
def shell(tmp_path):
    """Runs a program in a folder of its own; what it wrote."""

    def run(*words):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def settings_of(command):
    """The settings of a command, as they are used here."""
    words = [word for word in command.words[3:] if word != "..."]
    return [*words, *SHORT, *(more for word in words for more in INSTEAD.get(word, []))]


def shown(page):
    """Its blocks of Python and its commands in blocks, in order."""
    of_page = [command for command in commands(page) if command.words[:3] == MAIN]
    for block in blocks(page):
        if block.language == "python":
            yield block
        else:
            last = block.line + block.text.count("\n")
            yield from (one for one in of_page if block.line <= one.line <= last)


@pytest.mark.long
def test_the_quickstart_from_top_to_bottom(shell, tmp_path):
    rows = [{"question": f"{n}+1=", "solution": str(n + 1)} for n in range(2, 40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = 0
    for one in shown(ROOT / "docs" / "quickstart.md"):
        seen += 1
        if hasattr(one, "words"):
            shell(*one.words[1:3], *settings_of(one))
        elif one.text.startswith("def score"):
            (tmp_path / "my_reward.py").write_text(one.text)
        else:
            shell("-c", one.text)
    assert seen >= 6


def test_the_program_of_the_readme(shell, tmp_path):
    few = ["executor=inline", "rollout=transformers", *SHORT]
    said = shell(str(ROOT / "examples" / "grpo_driver.py"), *few)
    assert "step 2: reward" in said
    assert (tmp_path / "runs" / "latest" / "model" / "config.json").is_file()


def test_the_command_of_the_readme(shell, tmp_path):
    """For a model, data and a reward of one's own: looked at, not started."""
    shape = {"hidden_size": 64, "layers": 2, "heads": 2, "context": 64}
    make_tiny_model(tmp_path / "runs/latest/model", build_tokenizer(CHARACTERS), seed=0, **shape)
    rows = [{"question": f"{n}+1=", "solution": str(n + 1)} for n in range(2, 40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_reward.py").write_text("def score(response, answer):\n    return 1.0\n")
    (command,) = (one for one in shown(ROOT / "README.md") if hasattr(one, "words"))
    settings = [*settings_of(command), "run.dry=true"]
    assert "samples_per_prompt" in shell(*command.words[1:3], *settings)


def test_the_program_of_the_planning_page(shell):
    (block,) = (one for one in shown(ROOT / "docs" / "planning.md") if hasattr(one, "text"))
    assert "actor.generate" in shell("-c", block.text)

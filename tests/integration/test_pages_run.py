"""Every block of README.md and docs/ runs: the blocks of a page one after the other, in a folder
with a tiny model and rows, in this process. Commands make two small steps on the inline executor.

What is not run says why, in a comment above its fence: `<!-- excerpt: needs two hosts -->`.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pages import PAGES, PROGRAMS, ROOT, blocks

from hybridrl import cli, main
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.tasks.arithmetic import CHARACTERS
from hybridrl.job.config_resolution import load_config
from hybridrl.models.model_loading import make_tiny_model

pytestmark = pytest.mark.more

MAIN = ["python", "-m", "hybridrl.main"]
SMALL = [
    *("executor=inline", "rollout=transformers", "trainer.steps=2", "warmup.steps=0"),
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "eval.prompts=4"),
    *("rollout.max_tokens=3", "data.max_prompt_tokens=48"),
]
"""What a command gets behind its own settings."""
DRY = [word for word in SMALL if word.partition("=")[0] not in ("executor", "rollout")]
DRY += ["run.dry=true", "num_devices=8"]
FURTHER = {
    "checkpoints.md": ["trainer.steps=40"],
    "data.md": ["data.max_prompt_tokens=500"],
    "environments.md": ["data.max_prompt_tokens=56"],
    "coming_from_verl.md": ["rollout.parallel.tp=1"],
    "parallel.md": DRY,
    "placement.md": DRY,
}
"""What commands of a page get besides; those for several devices are checked and not started."""
INSTEAD = {
    "model.path=Qwen/Qwen2.5-0.5B-Instruct": ["model.path=model", "data.chat=true"],
    "model.path=Qwen/Qwen3-8B": ["model.path=model"],
    "model.path=my-model": ["model.path=model"],
    "model.path=...": ["model.path=model"],
    "model.path=runs/latest": ["model.path=model"],
    "data.sources.gsm.path=gsm8k": ["data.sources.gsm.path=gsm8k.jsonl"],
    "eval.baseline=runs/2026-03-01_09-30-00-grpo": ["eval.baseline=runs/latest"],
    "eval.sets.math.max_tokens=2048": ["eval.sets.math.max_tokens=4"],
    "s3://bucket/runs/mine": ["runs/mine"],
}
"""This machine may not reach a hub or a bucket."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SCORE = "def score(prompt, response, answer, **row):\n    return 1.0\n"
FILES = {
    "my_reward.py": SCORE
    + "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n",
    "passes.py": SCORE,
    "rewards.py": "def reward_len(completions, **kwargs):\n    return [1.0 for _ in completions]\n",
}
"""Programs of the user's that commands name."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model, rows and a run, as a user has them who comes to a page."""
    folder = tmp_path_factory.mktemp("pages")
    tokenizer = build_character_tokenizer(CHARACTERS)
    tokenizer.chat_template = TEMPLATE
    shape = {"hidden_size": 64, "layers": 2, "heads": 4, "context": 512}
    make_tiny_model(folder / "model", tokenizer, seed=0, **shape)
    rows = [
        {"question": f"{n}+1=", "prompt": f"{n}+1=", "solution": str(n + 1), "answer": str(n + 1)}
        for n in range(2, 40)
    ]
    for name in ("prompts", "train", "math", "code", "my"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    of_gsm = [{**row, "answer": f"A sum.\n#### {row['answer']}"} for row in rows]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_gsm))
    for name in ("train", "test"):  # as verl's scripts write them
        of_verl = [
            {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "reward_model": {"ground_truth": row["answer"], "style": "rule"},
                "data_source": "sums",
                "extra_info": {"index": 1},
            }
            for row in rows
        ]
        pq.write_table(pa.Table.from_pylist(of_verl), folder / f"{name}.parquet")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with contextlib.chdir(folder):
        main.run(load_config([*SMALL, "run.directory=runs/a"]))
        for name in ("b", "c"):
            shutil.copytree("runs/a", f"runs/{name}")
    (folder / "runs" / "latest").unlink(missing_ok=True)
    (folder / "runs" / "latest").symlink_to("a")
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A copy of that folder, in which this process is."""
    shutil.copytree(made, tmp_path / "work", symlinks=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "work"


def run_command(line, page):
    """Run a line of a shell."""
    words = shlex.split(line.split(" && ")[0], comments=True)
    words = [more for word in words for more in INSTEAD.get(word, [word])]
    words[0] = words[0].removeprefix(".venv/bin/")
    if words[:3] == MAIN:
        settings = [word for word in words[3:] if word != "..."]
        small = SMALL if FURTHER.get(page) is not DRY else []
        arguments = [*settings, *small, *FURTHER.get(page, [])]
        with program(["hybridrl", *arguments]):
            main.main()
    elif words[0] == "hybridrl":
        with program(words):
            cli.main(words[1:])
    else:
        raise AssertionError(f"{line!r} cannot be run here: mark its block as an excerpt")


@contextlib.contextmanager
def program(words):
    """Arguments for a program that may end by SystemExit, which has to be a success."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        try:
            yield
        except SystemExit as ended:
            assert not ended.code, f"{words} ended with {ended.code}"


def lines_of(block):
    whole = re.sub(r"\\\n\s*", "", block.text)
    return [line for line in whole.splitlines() if line.strip() and not line.startswith("#")]


def has_to_run(block):
    return not block.excerpt and block.language in ("python", "bash")


WITH_BLOCKS = [page for page in PAGES if any(map(has_to_run, blocks(page)))]


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, folder, capsys):
    for block in filter(has_to_run, blocks(page)):
        try:
            if block.language == "python":
                space = {"__name__": "page"}
                exec(compile(block.text, block.name, "exec"), space)
                if "score" in space:  # a file that the next command names
                    (folder / "my_reward.py").write_text(block.text)
            else:
                for line in lines_of(block):
                    run_command(line, page.name)
        except Exception as error:
            said = "".join(capsys.readouterr())[-3000:]
            raise AssertionError(f"{block.name} does not run: {error!r}\n{said}") from error


CONSOLE = [block for page in PAGES for block in blocks(page) if block.language == "console"]


@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: block.name)
def test_a_console_shows_what_is_said(block, folder, capsys):
    """`$ command`, and below it what the command answers; `...` is left out there."""
    command, *answer = block.text.splitlines()
    arguments = shlex.split(command.removeprefix("$ "))
    assert arguments[:3] == MAIN
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sys, "argv", ["hybridrl", *arguments[3:]])
        main.main()
    said = "".join(capsys.readouterr())
    wanted = r"\s+.*".join(map(re.escape, " ".join(answer).split(" ... ")))
    assert re.search(re.sub(r"(\\ )+", r"\\s+", wanted), said), said


def test_the_trainer_of_the_drivers_page_trains(folder):
    (text,) = [b.text for b in blocks(ROOT / "docs" / "drivers.md") if "class Mine(" in b.text]
    (folder / "mine.py").write_text(text)
    main.run(load_config([*SMALL, "trainer.name=mine.py:Mine", "run.directory=runs/mine"]))
    assert (folder / "runs/mine/model/config.json").is_file()


def test_the_program_of_the_readme(tmp_path):
    few = ["executor=inline", "rollout=transformers", "trainer.steps=2", "warmup.steps=3"]
    few += ["eval.prompts=16", "data.prompts_per_step=8"]
    words = [sys.executable, str(ROOT / "examples" / "grpo_driver.py"), *few]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "step 2: reward" in done.stdout
    assert (tmp_path / "runs" / "latest" / "model" / "config.json").is_file()


def test_only_programs_of_the_project_stand_in_blocks_that_run():
    for page in WITH_BLOCKS:
        for block in filter(has_to_run, blocks(page)):
            for line in lines_of(block) if block.language == "bash" else ():
                assert line.removeprefix(".venv/bin/").split()[0] in PROGRAMS, block.name

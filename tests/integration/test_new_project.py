"""`hybridrl new`: what it makes works as its own README says, in another folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hybridrl
from hybridrl import cli

pytestmark = pytest.mark.more

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(hybridrl.__file__).parents[1])}


def new(*words):
    """The exit code of `hybridrl new`."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["new", *map(str, words)])
    return ended.value.code


def make(folder, *words):
    return subprocess.run(
        ["make", *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True
    )


@pytest.mark.parametrize("options", [[], ["--driver"]], ids=["settings", "driver"])
def test_the_test_of_a_new_project_passes_and_it_trains(options, tmp_path, capsys):
    if not shutil.which("make"):
        pytest.skip("there is no make here")
    folder = tmp_path / "demo"
    assert new(folder, *options) == 0
    assert f"next: cd {folder} && make test" in capsys.readouterr().out
    assert (folder / "driver.py").exists() == bool(options)
    tested = make(folder, "test")
    assert tested.returncode == 0 and "2 passed" in tested.stdout, tested.stdout + tested.stderr
    arguments = "ARGS=trainer.steps=1 warmup.steps=1 data.prompts_per_step=2 eval.prompts=4"
    trained = make(folder, "train", arguments)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert (folder / "runs" / "latest" / "model" / "config.json").is_file()
    lines = (folder / "README.md").read_text().splitlines()
    assert lines[0] == "# demo" and len(lines) <= 35
    left = [file for file in folder.iterdir() if file.is_file() and "@" in file.read_text()]
    assert not left


def test_a_new_project_is_clean(tmp_path):
    if not shutil.which("ruff", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"):
        pytest.skip("ruff is not here")
    assert new(tmp_path / "demo", "--driver") == 0
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select=E,F,I,W,UP,B", "--line-length=100", "."],
        cwd=tmp_path / "demo",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout

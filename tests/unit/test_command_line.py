"""The programs themselves: their versions, words that are another's, Ctrl-C while they begin."""

import os
import subprocess
import sys

import pytest

from hybridrl import __version__, cli, main


@pytest.mark.parametrize("program", [main.main, cli.main])
def test_each_program_says_its_version(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "--version"])
    with pytest.raises(SystemExit) as ended:
        program()
    assert not ended.value.code and capsys.readouterr().out == f"hybridrl {__version__}\n"


def test_a_command_of_the_other_program_is_pointed_to(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["main", "plan", "run.name=a b", "--json"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == cli.EXIT_CONFIG_ERROR
    assert "Write: hybridrl plan 'run.name=a b' --json" in capsys.readouterr().err


def test_ctrl_c_while_libraries_are_imported_is_no_traceback(tmp_path):
    (tmp_path / "rich").mkdir()
    library = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "rich" / "__init__.py").write_text(library)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-m", "hybridrl.main", "--cfg", "job"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (main.EXIT_INTERRUPTED, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--role", "reference"], "--role reference is for `hybridrl plan precision`"),
        (["generation", "--role", "actor"], "--role actor is for `hybridrl plan precision`"),
        (["--out", "plan.json"], "--out plan.json is for"),
        (["precision", "--out", "no/such/plan.json"], "no file can be written there"),
        (["generation", "--out", "."], "no file can be written there"),
    ],
)
def test_plans_refuse_words_that_would_do_nothing(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *words])
    assert stopped.value.code == cli.EXIT_CONFIG_ERROR
    assert said in " ".join(capsys.readouterr().err.split())


def test_help_and_wrong_folders_import_nothing_heavy(tmp_path):
    """torch and transformers take ten seconds to import on a busy machine."""
    wrong = str(tmp_path)
    given = [["--help"], *([name, "--help"] for name in cli.COMMANDS)]
    given += [[name, wrong] for name in ("report", "watch", "top", "timeline", "whatif")]
    given += [["report", "no/such"], ["checkpoint", "list", wrong], ["plan", "--backtest", wrong]]
    given += [["plan", "--lengths", wrong], ["plan", "model.pth=x"], ["train"]]
    program = (
        "import sys\nfrom hybridrl import cli\n"
        f"for words in {given}:\n"
        "    try:\n        cli.main(words)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == (0 if '--help' in words else cli.EXIT_CONFIG_ERROR), words\n"
        "    brought = {'torch', 'transformers', 'ray', 'vllm', 'numpy'} & sys.modules.keys()\n"
        "    assert not brought, f'{words} imports {brought}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train"], "There is no command `train`. To train: python -m hybridrl.main. "),
        (["run", "run.name=a b"], "python -m hybridrl.main 'run.name=a b'. "),
        (["reprot"], "Did you mean `report`?"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_the_program_that_trains(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == cli.EXIT_CONFIG_ERROR
    assert said in " ".join(capsys.readouterr().err.split())


def test_words_that_are_no_options_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "trainer.steps=2", "--seacrh"])
    assert stopped.value.code == cli.EXIT_CONFIG_ERROR
    assert "unknown: --seacrh. See hybridrl plan --help." in capsys.readouterr().err

"""The script of `hybridrl completion`, in a real shell."""

import shutil
import subprocess

import pytest

from hybridrl import cli
from hybridrl.commands import completion


def script(shell, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", shell])
    assert not ended.value.code
    return capsys.readouterr().out


def completed(file, folder, *words, function="_hybridrl", before=""):
    """What bash offers for the last word."""
    program = (
        f"{before}source {file}; source {file}; COMP_WORDS=({' '.join(map(repr, words))}); "
        f'COMP_CWORD={len(words) - 1}; {function}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        [shutil.which("bash"), "-c", program], cwd=folder, capture_output=True, text=True
    )
    assert not done.stderr
    return done.stdout.split()


def test_bash_completes_commands_options_runs_and_settings(tmp_path, capsys):
    if not shutil.which("bash"):
        pytest.skip("there is no bash here")
    file = tmp_path / "script"
    file.write_text(script("bash", capsys))
    (tmp_path / "runs" / "one-grpo").mkdir(parents=True)

    def offered(*words, **which):
        return completed(file, tmp_path, *words, **which)

    assert {*cli.COMMANDS} <= {*offered("hybridrl", "")}
    assert offered("hybridrl", "che") == ["checkpoint"]
    assert offered("hybridrl", "checkpoint", "pr") == ["prune"]
    assert offered("hybridrl", "checkpoint", "prune", "--dry") == ["--dry-run"]
    assert "runs/one-grpo" in offered("hybridrl", "whatif", "")
    assert offered("hybridrl", "whatif", "runs/o") == ["runs/one-grpo"]
    assert offered("hybridrl", "plan", "--json", "trainer.st") == ["trainer.steps="]
    assert "algorithm=" in offered("hybridrl", "plan", "algor")
    for value in (["algorithm=da"], ["algorithm", "=", "da"]):  # as zsh and bash cut it
        assert [one[-4:] for one in offered("hybridrl", "plan", *value)] == ["dapo"]
    assert {"vllm", "transformers"} <= {*offered("hybridrl", "plan", "rollout", "=")}
    main = ("python", "-m", "hybridrl.main")
    assert offered(*main, "rollout.max_to", function="_hybridrl_main") == ["rollout.max_tokens="]
    assert offered("python", "rollout.max_to", function="_hybridrl_main") == []
    known = "_python() { COMPREPLY=(of-python); }; complete -F _python python; "
    assert offered("python", "", function="_hybridrl_main", before=known) == ["of-python"]
    assert "algorithm=" in offered(*main, "algo", function="_hybridrl_main", before=known)


def test_fish_knows_what_belongs_to_which_command(capsys):
    lines = script("fish", capsys).splitlines()
    (json,) = [line for line in lines if "-l json" in line and "from prune" in line]
    assert "__fish_seen_subcommand_from checkpoint; and" in json
    (prune,) = [line for line in lines if line.endswith("-a prune")]
    assert "and not __fish_seen_subcommand_from list" in prune


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", "ksh"])
    assert (
        ended.value.code == cli.EXIT_CONFIG_ERROR and "bash, zsh or fish" in capsys.readouterr().err
    )


def test_settings_are_those_of_a_job():
    assert {"trainer.steps=", "algorithm=", "recipe="} <= {*completion.list_setting_completions()}

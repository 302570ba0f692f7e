"""What a result came from is in its summary."""

import subprocess

from hybridrl.run_files.provenance import collect_provenance


def test_command_versions_and_seed_are_known():
    found = collect_provenance(7, ["python", "-m", "hybridrl.main"])
    assert found["seed"] == 7 and found["command"] == ["python", "-m", "hybridrl.main"]
    assert found["versions"].keys() >= {"python", "hybridrl", "torch", "transformers"}


def test_the_commit_is_that_of_the_folder_in_which_the_command_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "git_commit" not in collect_provenance(0, [])
    (tmp_path / "inner").mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.chdir(tmp_path / "inner")
    said = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert collect_provenance(0, [])["git_commit"] == said.stdout.strip()


def test_a_repository_without_commits_is_no_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    assert "git_commit" not in collect_provenance(0, [])

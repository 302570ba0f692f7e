"""What `tests/golden` holds still: figures of tiny jobs, command lines, pages of runs, and run
folders that an earlier version of the code left."""

import shutil

import compare_golden
import pytest
from golden.jobs import JOBS, KEPT, KEPT_JOBS, RESUMED

from hybridrl.cli import main

pytestmark = pytest.mark.usefixtures("process_group")


def differences(found):
    """What `make golden` would say, as one text."""
    return "\n".join([*found, *(["`make golden` says it, and how to expect it."] * bool(found))])


@pytest.mark.more
def test_jobs_give_the_figures_that_they_gave(tmp_path):
    found = list(compare_golden.compare_jobs(JOBS, tmp_path))
    assert not found, f"{compare_golden.how_exactly()}\n{differences(found)}"


@pytest.mark.more
def test_runs_of_earlier_versions_are_resumed(tmp_path):
    found = list(compare_golden.compare_jobs(RESUMED, tmp_path))
    assert not found, f"{compare_golden.how_exactly()}\n{differences(found)}"


def test_command_lines_say_what_they_said(tmp_path):
    found = list(compare_golden.compare_texts(tmp_path))
    assert not found, differences(found)


@pytest.mark.more
def test_pages_of_kept_runs_are_made_of_the_same(tmp_path):
    found = list(compare_golden.compare_reports(tmp_path))
    assert not found, differences(found)


@pytest.mark.parametrize("name", KEPT_JOBS)
def test_checkpoints_of_earlier_versions_are_read(name, tmp_path, monkeypatch, capsys):
    for folder in (name, "elsewhere-checkpoints"):
        shutil.copytree(KEPT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    for action in ("list", "inspect", "verify"):
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", action, name])
        assert not ended.value.code
        said = capsys.readouterr().out
        assert "2" in said and "damaged" not in said

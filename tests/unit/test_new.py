"""What `hybridrl new` refuses; tests/integration runs what it makes."""

from pathlib import Path

import pytest

from hybridrl import cli
from hybridrl.commands.new_command import TEMPLATE_FOLDER
from hybridrl.job.config_resolution import load_config


def refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["new", *map(str, words)])
    assert ended.value.code == cli.EXIT_CONFIG_ERROR
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["1st", "a b", "..", "", "x" * 65, "é"])
def test_names_that_cannot_be_a_project_s(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "a project's name begins with a letter" in refused([name], capsys)
    assert not [*tmp_path.iterdir()]


def test_a_word_of_python_is_said_to_be_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "class is a word of Python" in refused(["class"], capsys)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_there_is_left_alone(tmp_path, capsys):
    (tmp_path / "demo").mkdir()
    assert "is there already" in refused([tmp_path / "demo"], capsys)
    assert not [*(tmp_path / "demo").iterdir()]


def test_a_place_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    def forbidden(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", forbidden)
    said = refused([tmp_path / "demo"], capsys)
    assert f"Cannot write {tmp_path}/demo: this user may not write there" in said
    assert "Set NAME to a folder that you can write to" in said


def test_the_settings_of_a_new_project_are_settings(tmp_path):
    recipe = tmp_path / "settings.yaml"
    recipe.write_text((TEMPLATE_FOLDER / "settings.yaml.in").read_text().replace("@NAME@", "demo"))
    config = load_config([f"recipe={recipe}"])
    assert (config.run.name, config.executor) == ("demo", "inline")

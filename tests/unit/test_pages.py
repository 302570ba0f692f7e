"""What README.md and docs/ show is so: links lead somewhere, settings and options exist, blocks of
Python compile, those that only define something do, sentences of the library are its own."""

import ast
import contextlib
import importlib.util
import re
import shlex
import types

import pytest
from pages import INLINE, PAGES, ROOT, anchors, blocks, commands, links

from hybridrl import cli, main
from hybridrl.commands import plan
from hybridrl.config.aliases import meant
from hybridrl.config.load import load_config
from hybridrl.config.names import leaves
from hybridrl.config.presets import CHOSEN
from hybridrl.config.sweep import jobs
from hybridrl.errors import ConfigError

BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands(page)))
MAIN = ("python", "-m", "hybridrl.main")
NOT_DEFINED = {
    "README.md": "an excerpt of examples/grpo_driver.py, which test_pages_run.py runs",
    "quickstart.md": "test_pages_run.py runs the page",
    "planning.md": "test_pages_run.py runs it",
    "coming_from_trl.md": "needs TRL, which is not installed here",
    "checkpoints.md": "two methods of a worker, without the worker",
    "endpoint.md": "needs a job that serves; test_agents.py looks at the page",
}
"""Pages whose blocks of Python do more than define something, and why that is not done here."""
REFUSED = {
    "actor_rollout_ref.actor.optim.lr=1e-6": "the page shows how it is refused",
    "lr=1e-3": "the page shows how it is refused",
    "num_generations=8": "the page shows how it is refused",
    "trainer.steps=-5": "the page shows how it is refused",
}
"""Commands with these words are shown for what is said of them."""


def test_pages_were_found():
    assert len(PAGES) > 25 and len(PYTHON) > 12 and len(COMMANDS) > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for line, target in links(page):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        where = f"{page.name}:{line}: {target}"
        assert found.exists(), where
        assert found.is_relative_to(ROOT), where
        assert not anchor or anchor in anchors(found), where


def test_every_page_has_its_place_on_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = re.findall(r"- (?:[^:\n]+: )?(\w+\.md)$", navigation, re.M)
    there = {page.name for page in PAGES if page.parent == ROOT / "docs"} | {"index.md"}
    assert sorted(pages) == sorted(there)


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_compiles_and_definitions_define(block):
    program = ast.parse(block.text)
    if block.page.name not in NOT_DEFINED:
        space = {"__name__": "page"}
        exec(compile(program, block.name, "exec"), space)
        assert len(space) > 2


def test_the_program_of_the_readme_is_the_example():
    (block,) = (block for block in PYTHON if block.page.name == "README.md")
    example = (ROOT / "examples" / "grpo_driver.py").read_text()
    assert block.text in example


def test_the_picture_of_the_house_is_that_of_the_imports():
    path = ROOT / "docs" / "draw_house.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    assert house.PICTURE.read_text() == house.picture(), "python docs/draw_house.py draws it anew"


def test_exceptions_are_needed():
    assert {block.page.name for block in PYTHON} >= NOT_DEFINED.keys()
    words = {word for command in COMMANDS for word in command.words}
    assert words >= REFUSED.keys()


@pytest.fixture
def nothing_runs(monkeypatch):
    """The command line parses and does nothing; gives what is left as settings."""
    left = []
    known = cli.command

    def quiet(name):
        return types.SimpleNamespace(
            add_arguments=known(name).add_arguments,
            run=lambda chosen: left.extend(getattr(chosen, "settings", [])) or 0,
        )

    monkeypatch.setattr(cli, "command", quiet)
    return left


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_commands_are_understood(command, monkeypatch, nothing_runs):
    monkeypatch.chdir(ROOT)
    words = command.words[: command.words.index(">")] if ">" in command.words else command.words
    program, *words = words
    words = [re.sub(r"\.\.\.$", "x", word) for word in words if word != "..."]
    if any(re.match(r"\[|.*<\w+>", word) for word in words):  # how it is called, not a command
        assert_options_exist(words)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[0] in targets
    elif command.words[:3] == MAIN:
        assert_settings_compose(words[2:])
    elif program == "hybridrl":
        if all(word.isalpha() for word in words):  # it is only named
            words.append("--help")
        with ends_well():
            cli.main(words)
        assert_settings_compose([word for word in nothing_runs if word not in KINDS])
    elif words[0].endswith(".py"):
        assert_program_takes(words)


KINDS = {plan.GENERATION, plan.PRECISION}


@contextlib.contextmanager
def ends_well():
    with pytest.raises(SystemExit) as ended:
        yield
    assert not ended.value.code


def assert_settings_compose(words):
    chosen, flags = main._parser().parse_known_intermixed_args(words)
    assert not flags
    for settings in jobs(chosen.settings) if chosen.multirun else [chosen.settings]:
        if REFUSED.keys() & set(settings):
            with pytest.raises(ConfigError):
                load_config(settings)
        else:
            load_config(settings)


def assert_options_exist(words):
    """Of a synopsis: some command has them."""
    options = re.findall(r"--[\w-]+", " ".join(words))
    source = "".join(path.read_text() for path in (ROOT / "hybridrl").glob("*.py"))
    source += "".join(path.read_text() for path in (ROOT / "hybridrl/commands").glob("*.py"))
    assert all(f'"{option}"' in source for option in options), words


def assert_program_takes(words):
    path, *others = words
    source = (ROOT / path).read_text()
    for option in re.findall(r"--[\w-]+", shlex.join(others)):
        assert f'"{option}"' in source, f"{path} has no {option}"


GROUPS = {name.partition(".")[0] for name in leaves() if "." in name}
SETTING = re.compile(rf"((?:{'|'.join(sorted(GROUPS))})(?:\.\w+)+)(=|$)")
FREE = re.compile(
    r"(models|reward\.options|cost\.options|rollout\.engine_options|environment\.options|"
    r"algorithm\.loss_options|data\.sources|data\.task_options|data\.sampler_options|eval\.sets|"
    r"placement\.roles|model\.tiny)\b"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_are_named_exist(page):
    known = set(leaves())
    known |= {name.rpartition(".")[0] for name in known}
    named = {
        match[1]
        for span in INLINE.findall(page.read_text(encoding="utf-8"))
        for word in span.split()
        if (match := SETTING.match(word))
    }
    named = {name for name in named if not re.search(r"\.(json|py)$", name)}
    wrong = {name for name in named - known - NO_SETTINGS if not FREE.match(name)}
    if page.name in NAMES_OF_OTHERS:
        wrong = {name for name in wrong if not meant(name)}
    assert not wrong, page.name


NAMES_OF_OTHERS = {"coming_from_verl.md", "settings.md"}
NO_SETTINGS = {"model.chat", "reward.score"}
"""What looks like a setting: a method that an environment calls, and a phase of a call."""


def test_names_of_verl_are_answered_as_the_page_has_them():
    page = (ROOT / "docs" / "coming_from_verl.md").read_text().partition("\n## Programs")[0]
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|", page, re.M)
    assert len(rows) > 30
    for theirs, ours in rows:
        for name in re.findall(r"`([\w.]+)[^`]*`", theirs):
            if "." not in name:
                continue
            said = meant(name)
            assert said, f"{name} is not answered by the command line"
            wanted = re.findall(r"`([\w.]+)", ours)
            is_called = [one for one in wanted if f"`{one}`" in said]
            assert is_called or not wanted or "It is called" not in said, f"{name}: {said}"
        for setting in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", ours):
            assert setting in leaves() or FREE.match(setting) or setting in CHOSEN, setting


def test_names_of_trl_are_answered_as_the_page_has_them():
    page = (ROOT / "docs" / "coming_from_trl.md").read_text()
    page = page.partition("\n## GRPOConfig")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.*?) ?\|", page, re.M)
    assert len(rows) > 25
    for theirs, ours in rows:
        wanted = re.findall(r"`([a-z_]+(?:[.][a-z_]+)*)[=`]", ours)
        for setting in wanted:
            assert setting in leaves() or setting in CHOSEN or FREE.match(setting), setting
        for name in re.findall(r"`([a-z_]+)[^`]*`", theirs):
            if any(setting.split(".")[-1] == name for setting in wanted):
                continue  # the command line finds it by itself
            said = meant(name)
            assert said, f"{name} is not answered by the command line"
            assert not wanted or any(f"`{one}`" in said for one in wanted), f"{name}: {said}"


def test_the_page_of_figures_names_every_benchmark_and_no_other():
    page = (ROOT / "docs" / "performance.md").read_text()
    there = {f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py")}
    assert set(re.findall(r"benchmarks/\w+[.]py", page)) == there


def test_sentences_of_the_troubleshooting_page_are_the_librarys():
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "hybridrl").rglob("*.py"))
    library = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))  # literals over several lines
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = page.partition("## What it says")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (.+) \|$", section, re.M)]
    shown = [row[0] for row in rows if row[0] != "it says"]
    assert len(shown) > 30
    assert not [one for one in shown if one.partition("...")[0] not in library]

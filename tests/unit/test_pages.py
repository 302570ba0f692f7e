"""What README.md and docs/ show is so: links lead somewhere, settings and options exist, blocks of
Python compile, those that only define something do, sentences of the library are its own."""

import contextlib
import importlib
import importlib.util
import json
import re
import shlex
import types

import generate_figures
import generate_migration
import pytest
import yaml
from pages import INLINE, PAGES, ROOT, anchors, blocks, commands, links
from tiers import few_of

import hybridrl
from hybridrl import cli, main
from hybridrl.commands import plan_command as plan
from hybridrl.composition.aliases import explain_alias
from hybridrl.composition.overrides import expand_sweep
from hybridrl.composition.setting_names import list_settings
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config

BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands(page)))
MAIN = ("python", "-m", "hybridrl.main")
LANGUAGES = {"python", "bash", "console", "text", "json", "yaml"}
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


def test_blocks_are_fenced_and_have_a_language():
    """So that one runner knows what to do with each (tests/integration/test_pages_run.py)."""
    wrong = [block.name for block in BLOCKS if block.language not in LANGUAGES]
    assert not wrong, f"name the language of these blocks: {sorted(LANGUAGES)}"
    shown = [block.name for block in BLOCKS if block.excerpt and block.language == "text"]
    assert not shown, "what is only shown (`text`) is not run anyway"


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_compiles(block):
    compile(block.text, block.name, "exec")


DATA = [block for block in BLOCKS if block.language in ("json", "yaml")]


@pytest.mark.parametrize("block", DATA, ids=lambda block: block.name)
def test_data_can_be_read(block):
    assert yaml.safe_load(block.text)


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
    words = {word for command in COMMANDS for word in command.words}
    assert words >= REFUSED.keys()


@pytest.fixture
def nothing_runs(monkeypatch):
    """The command line parses and does nothing; gives what is left as settings."""
    left = []
    known = cli.load_command

    def quiet(name):
        return types.SimpleNamespace(
            add_arguments=known(name).add_arguments,
            run=lambda chosen: left.extend(getattr(chosen, "settings", [])) or 0,
        )

    monkeypatch.setattr(cli, "load_command", quiet)
    return left


@pytest.mark.parametrize("command", few_of(COMMANDS, 8), ids=lambda command: command.name)
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


KINDS = {plan.GENERATION_PLAN, plan.PRECISION_PLAN}


@contextlib.contextmanager
def ends_well():
    with pytest.raises(SystemExit) as ended:
        yield
    assert not ended.value.code


def assert_settings_compose(words):
    chosen, flags = main._build_parser().parse_known_intermixed_args(words)
    assert not flags
    for settings in expand_sweep(chosen.settings) if chosen.multirun else [chosen.settings]:
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


GROUPS = {name.partition(".")[0] for name in list_settings() if "." in name}
SETTING = re.compile(rf"((?:{'|'.join(sorted(GROUPS))})(?:\.\w+)+)(=|$)")
FREE = re.compile(
    r"(models|reward\.options|cost\.options|rollout\.engine_options|environment\.options|"
    r"algorithm\.loss_options|data\.sources|data\.task_options|data\.sampler_options|eval\.sets|"
    r"data\.chat_template_options|"
    r"placement\.roles|model\.tiny)\b"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_are_named_exist(page):
    known = set(list_settings())
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
        wrong = {name for name in wrong if not explain_alias(name)}
    assert not wrong, page.name


ROOMS = {path.parent.name for path in (ROOT / "hybridrl").glob("*/__init__.py")}
MODULE = re.compile(rf"(?:hybridrl\.)?((?:{'|'.join(sorted(ROOMS))})(?:\.[A-Za-z_]\w*)+)")
"""A name within a room, as `trainers.objectives.build_preference_objective`."""


def is_file_of_a_room(path):
    room, name = path.split(".")[:2]
    places = ROOT / "hybridrl" / room
    return (places / f"{name}.py").exists() or (places / name).is_dir()


def resolves(path):
    found = hybridrl
    parts = path.split(".")
    for depth, part in enumerate(parts, 1):
        if not hasattr(found, part):
            with contextlib.suppress(ImportError):
                importlib.import_module(".".join(["hybridrl", *parts[:depth]]))
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_code_exist(page):
    if page.name == "old_names.md":
        return
    named = [
        match[1]
        for span in INLINE.findall(page.read_text(encoding="utf-8"))
        if (match := MODULE.match(span))
        and (span.startswith("hybridrl.") or is_file_of_a_room(match[1]))
    ]
    assert not [name for name in named if not resolves(name)]


def is_defined(path):
    """As `resolves`, without importing what brings Ray or vLLM along."""
    parts = path.split(".")
    for depth in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:depth])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.exists():
            names = re.findall(
                r"^(?:class|def|async def) (\w+)|^(\w+)\b.* = ", file.read_text(), re.M
            )
            return depth == len(parts) or parts[depth] in {name for pair in names for name in pair}
    return False


def test_names_that_took_the_place_of_old_ones_exist():
    page = (ROOT / "docs" / "old_names.md").read_text(encoding="utf-8")
    wrong = []
    for row in re.findall(r"^\| (`.+) \|$", page, re.M):
        module, *_, now = (INLINE.findall(cell) for cell in row.split(" | "))
        for name in now:
            if not is_defined(name if name.startswith("hybridrl.") else f"{module[0]}.{name}"):
                wrong.append(row)
    assert not wrong, "\n".join(wrong)


FILE = re.compile(rf"(?:hybridrl/)?((?:{'|'.join(sorted(ROOMS))})/[\w/]+\.py)$")


def test_files_of_the_code_exist():
    named = {
        f"{page.name}: {match[1]}": ROOT / "hybridrl" / match[1]
        for page in PAGES
        for span in INLINE.findall(page.read_text(encoding="utf-8"))
        if (match := FILE.match(span))
    }
    assert not [name for name, path in named.items() if not path.exists()]


NAMES_OF_OTHERS = {"coming_from_verl.md", "settings.md"}
NO_SETTINGS = {"model.chat", "reward.score"}
"""What looks like a setting: a method that an environment calls, and a phase of a call."""


@pytest.mark.parametrize("library", generate_migration.PAGES)
def test_the_tables_of_other_libraries_are_current(library):
    page = generate_migration.PAGES[library].read_text(encoding="utf-8")
    assert generate_migration.written(page, library) == page, "python docs/generate_migration.py"


OF_GRPO_CONFIG = """
learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
cast_lm_head_to_fp32 remove_unused_columns num_generations num_generations_eval
max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs
chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl
vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high
sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation
scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha
ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min
entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
vllm_importance_sampling_correction vllm_importance_sampling_mode
vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min off_policy_mask_threshold
use_bias_correction_kl log_completions log_multimodal num_completions_to_print log_unique_prompts
log_completions_hub_repo use_transformers_continuous_batching
transformers_continuous_batching_config use_transformers_paged vllm_importance_sampling_cap
"""
"""The fields of `GRPOConfig` of TRL 1.16, without those that it inherits."""
OF_VERL = """
actor_rollout_ref.actor.ppo_epochs data.apply_chat_template_kwargs data.truncation
data.train_files trainer.critic_warmup actor_rollout_ref.rollout.val_kwargs.n data.custom_cls
actor_rollout_ref.rollout.name data.image_key trainer.project_name
actor_rollout_ref.actor.kl_loss_type actor_rollout_ref.actor.strategy
"""


@pytest.mark.parametrize(
    ("names", "page"), [(OF_GRPO_CONFIG, "coming_from_trl.md"), (OF_VERL, "coming_from_verl.md")]
)
def test_every_setting_of_others_has_a_row(names, page):
    text = (ROOT / "docs" / page).read_text()
    for name in names.split():
        rows = re.findall(rf"^\| (?:[^|]*, )?`{name}`(?:, [^|]*)? \| (.+?) \|", text, re.M)
        assert len(rows) == 1, name
        assert rows[0] in ("none", "nothing to set") or rows[0].startswith("`"), name


def test_the_page_of_figures_names_every_benchmark_and_no_other():
    page = (ROOT / "docs" / "performance.md").read_text()
    there = {f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py")}
    assert set(re.findall(r"benchmarks/\w+[.]py", page)) == there


def test_the_tables_of_figures_are_those_of_the_file():
    page = generate_figures.PAGE.read_text(encoding="utf-8")
    assert generate_figures.written(page) == page, "python docs/generate_figures.py"
    figures = json.loads(generate_figures.FIGURES.read_text(encoding="utf-8"))["figures"]
    for figure in figures:
        assert re.fullmatch("[0-9a-f]{7}", figure["commit"]) and figure["command"], figure


def test_sentences_of_the_troubleshooting_page_are_the_librarys():
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "hybridrl").rglob("*.py"))
    library = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))  # literals over several lines
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = page.partition("## Messages, causes and fixes")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (.+) \|$", section, re.M)]
    shown = [row[0] for row in rows if row[0] != "message"]
    assert len(shown) > 30
    assert not [one for one in shown if one.partition("...")[0] not in library]

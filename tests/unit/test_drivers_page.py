"""The tables of docs/drivers.md say what the workers say."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = load(ROOT / "docs" / "generate_tables.py")


def test_the_tables_are_those_of_the_workers():
    page = tables.PAGE.read_text()
    assert tables.written(page) == page, (
        "The tables of docs/drivers.md are out of date: python docs/generate_tables.py"
    )


def test_columns_follow_what_workers_were_built_with():
    found = tables.tables()
    assert "| `compute_reward(batch, verifier)` | `response_ids`" in found
    assert "`costs`, `response`; maybe `cost/*`" in found
    assert "`scores`, `response`" not in found and "`response`, `scores`; maybe `reward/*`" in found
    assert "| `compute_values(batch)` | `prompt_ids`, `response_ids` | `cost_values` |" in found
    pairs = next(line for line in found.splitlines() if "`update_preference(batch)`" in line)
    assert "`ref_log_probs`" in pairs and "`advantages`" not in pairs


def test_every_worker_that_a_role_may_have_is_on_the_page():
    from hybridrl.job.worker_groups import WORKER_BUILDERS

    assert {group.worker for group in tables.GROUPS} == {
        worker for worker, _ in WORKER_BUILDERS.values()
    }


def test_the_page_leads_to_every_program_of_a_page():
    page = tables.PAGE.read_text()
    for name in ("distill", "self_play", "curriculum"):
        program = ROOT / "examples" / f"{name}.py"
        assert f"(../examples/{name}.py)" in page
        assert len(program.read_text().splitlines()) <= 50

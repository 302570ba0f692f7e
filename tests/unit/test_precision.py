"""`model.dtype=auto`: one name for all that read it, by devices and model."""

import pytest
import yaml
from settings import configured

from hybridrl.job.job import Job
from hybridrl.models.model_loading import make_tiny_config
from hybridrl.planner import computation_dtype as precision
from hybridrl.planner.computation_dtype import format_dtype_notice, resolve_dtype
from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.machine.device_catalog import parse_cluster
from hybridrl.system import device_traits as device


@pytest.fixture
def asked(tmp_path):
    """Settings with a model of half a million parameters."""
    config = make_tiny_config(hidden_size=128, layers=2, heads=4, context=128)
    config.vocab_size = 64
    config.save_pretrained(tmp_path)
    return configured([f"model.path={tmp_path}", "rollout=transformers"])


@pytest.mark.parametrize(
    ("kind", "multiplies", "least", "chosen"),
    [
        ("cuda", False, 8_000_000, "bfloat16"),
        ("cpu", True, 8_000_000, "float32"),
        ("cpu", True, 100_000, "bfloat16"),
        ("cpu", False, 100_000, "float32"),
    ],
)
def test_it_depends_on_the_device_and_the_model(
    asked, kind, multiplies, least, chosen, monkeypatch
):
    monkeypatch.setattr(device.torch.cpu, "_is_avx512_bf16_supported", lambda: multiplies)
    monkeypatch.setattr(device.torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(device, "MIN_BFLOAT16_PARAMETERS", {"cpu": least})
    found = resolve_dtype(asked, kind)
    assert found.model.dtype == chosen
    said = format_dtype_notice(asked, found, kind)
    assert bool(said) == (kind == "cpu" and chosen == "bfloat16")
    asked.model.dtype = "float32"
    assert resolve_dtype(asked, kind) is asked


def test_plans_show_it(asked):
    assert build_job_plan(asked, parse_cluster("8xA100")).config.model.dtype == "bfloat16"


@pytest.mark.more
@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_run_has_the_name_in_its_settings_and_plan(tmp_path, monkeypatch, bfloat16):
    if bfloat16:
        monkeypatch.setattr(precision, "min_bfloat16_parameters", lambda _: 100_000)
    chosen = "bfloat16" if bfloat16 else "float32"
    overrides = ["executor=inline", "devices=cpu", "rollout=transformers"]
    with Job(configured([*overrides, f"run.directory={tmp_path}/run"])) as job:
        assert job.config.model.dtype == job.plan.config.model.dtype == chosen
        assert any("model.dtype=" in said for said in job.settings_notices) == bfloat16
        written = yaml.safe_load(job.directory.config_file.read_text())
    assert written["model"]["dtype"] == chosen

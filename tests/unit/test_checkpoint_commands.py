"""`hybridrl checkpoint ...`: for a person, as data, and its exit codes."""

import json
import uuid

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.checkpoint.keep_rule import KeepRule
from hybridrl.checkpoint.store import CheckpointStore, list_checkpoints, resolve_checkpoint_folder
from hybridrl.checkpoint.tensors.file_plan import plan_files
from hybridrl.checkpoint.tensors.rank_manifest import RankManifest, manifest_path
from hybridrl.checkpoint.tensors.tensor_writer import (
    make_header_entries,
    make_written_box,
    write_headers,
    write_parts,
    write_remote_file,
)
from hybridrl.cli import main
from hybridrl.layout.boxes import full_box, make_local_pieces
from hybridrl.layout.tensor_layout import TensorLayout
from hybridrl.run_files.run_reader import open_run
from hybridrl.system.locations import parse_location, write_atomically

SETTINGS = "checkpoint: {every: 10, keep_last: 1, best: accuracy}\nactor: {parallel: {tp: 1}}\n"


def save(folders, step, accuracy, settings=SETTINGS):
    """A step of one role, an embedding of zeros but for `step` in its first values, and a scale."""
    folder = folders.begin(step) / "actor"
    values = {"embed": torch.zeros(100, 4), "scale": torch.ones(7)}
    values["embed"][:step] = step
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    held = {name: make_local_pieces(name, full_box(shape)) for name, shape in shapes.items()}
    plan = plan_files(TensorLayout(shapes, {0: held}), 0, torch.float32, 1 << 30, "model")
    parts, own = [values[part.name] for part in plan.parts], {}
    if folders.path.__class__.__name__ == "RemotePath":
        own, boxes = write_remote_file(folder, 0, plan.parts, parts)
    else:
        folder.mkdir()
        write_headers(folder, plan)
        sums = write_parts(folder.__truediv__, plan.parts, parts)
        boxes = [make_written_box(*found) for found in zip(plan.parts, sums, strict=True)]
    written = RankManifest(boxes, make_header_entries(plan), {}, own).to_json()
    write_atomically(manifest_path(folder, 0), written.encode())
    write_atomically(folder / "config.json", b'{"dtype": "float32", "layers": 1}')
    write_atomically(folder / "training.json", b'{"schedule": 9, "counters": {"updates": 5}}')
    write_atomically(folder.parent / "config.yaml", settings.encode())
    folders.complete(step, {"accuracy": accuracy})


@pytest.fixture(params=["disk", "memory://"])
def run(request, tmp_path):
    """A run, or the URL of its checkpoints: three steps, and one that was never complete."""
    if request.param == "disk":
        place, steps = tmp_path / "run", tmp_path / "run" / "checkpoints"
        place.mkdir()
        (place / "config.yaml").write_text(SETTINGS)
        (place / "metrics.jsonl").write_text('{"step": 10, "reward/mean": 0.25}\n')
    else:
        place = steps = parse_location(f"memory://{uuid.uuid4()}/steps")
    folders = CheckpointStore(steps)
    for step, accuracy in ((10, 0.5), (20, 0.25), (30, 0.375)):
        save(folders, step, accuracy)
    write_atomically(folders.begin(40) / "part", b"some")
    return place, folders


def command(capsys, *words, code=0):
    try:
        main(["checkpoint", *map(str, words)])
    except SystemExit as ended:
        assert ended.code == code
    said = capsys.readouterr()
    return said.out if code != 2 else said.err


def test_list_shows_the_steps_and_what_is_known_of_them(capsys, run):
    place, folders = run
    found = json.loads(command(capsys, "list", place, "--json"))["steps"]
    assert [(row["step"], row["state"]) for row in found] == [
        *((step, "complete") for step in (10, 20, 30)),
        (40, "not complete"),
    ]
    assert [row["step"] for row in found if row.get("best")] == [10]
    assert found[1]["metrics"] == {"accuracy": 0.25} and found[1]["bytes"] > 1600
    folder = folders.at(20) / "actor"
    name = "model.safetensors" if "memory" not in str(folder) else "rank-00000.safetensors"
    write_atomically(folder / name, b"short")
    text = command(capsys, "list", place)
    assert "complete, the best" in text and "damaged: " in text and "not complete" in text
    assert ("reward/mean 0.25" in text) == ("memory" not in str(folder))


def test_inspect_shows_tensors_boxes_and_counters(capsys, run):
    found = json.loads(command(capsys, "inspect", run[0], "--json"))
    assert found["step"] == 30 and found["actor"]["counters"]["counters"] == {"updates": 5}
    embed = found["actor"]["tensors"]["embed"]
    assert embed["shape"] == [100, 4] and embed["dtype"] == "F32"
    assert embed["boxes"] == [{"rank": 0, "box": [[0, 100], [0, 4]]}]
    text = command(capsys, "inspect", run[1].at(10))
    assert "100 x 4" in text and "written by 1 ranks; schedule 9, updates 5" in text


def test_verify_reads_everything_and_its_exit_code_says_so(capsys, run):
    place, folders = run
    assert command(capsys, "verify", place).splitlines() == [
        f"step {step}: as it was written" for step in (10, 20, 30)
    ]
    damage = folders.at(20) / "actor" / "training.json"
    write_atomically(damage, b'{"schedule": 8, "counters": {"updates": 5}}')
    found = json.loads(command(capsys, "verify", place, "--json", code=1))["steps"]
    assert [bool(row["fault"]) for row in found] == [False, True, False]
    assert "step 20: " in command(capsys, "verify", folders.at(20), code=1)
    command(capsys, "verify", folders.at(30))


def test_export_writes_a_model_folder_in_the_dtype_asked_for(capsys, run, tmp_path):
    out = tmp_path / "out"
    command(capsys, "export", run[1].at(20), out, "--dtype", "bfloat16", "--file-gib", "0.0000005")
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)),
        "model.safetensors.index.json",
    ]
    assert json.loads((out / "config.json").read_text()) == {"dtype": "bfloat16", "layers": 1}
    found = load_file(out / "model-00001-of-00002.safetensors")["embed"]
    assert found.dtype == torch.bfloat16 and (found[:20] == 20).all() and not found[20:].any()
    words = command(capsys, "export", run[0], out, code=2)
    assert "is not empty" in words
    words = command(capsys, "export", run[0], tmp_path / "x", "--role", "critic", code=2)
    assert "--role critic: step 30 has actor" in words
    assert "--dtype int4" in command(capsys, "export", run[0], "x", "--dtype", "int4", code=2)


@pytest.mark.parametrize(
    ("model", "stored", "dtype"),
    [
        ("model: {path: null}", "", "float32"),
        ("model: {path: base}", '{"dtype": "float16"}', "float16"),
        ("model: {path: base}", '{"torch_dtype": "bfloat16"}', "bfloat16"),
        ("model: {path: base, save_dtype: float32}", '{"dtype": "float16"}', "float32"),
    ],
)
def test_export_writes_the_dtype_of_the_model_of_the_run(
    capsys, tmp_path, monkeypatch, model, stored, dtype
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(stored)
    folders = CheckpointStore(tmp_path / "run" / "checkpoints")
    folders.path.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(model)
    save(folders, 10, 0.5)
    command(capsys, "export", "run", "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("size", ["nan", "inf", "0"])
def test_a_size_that_is_none_is_refused_and_leaves_nothing(capsys, run, tmp_path, size):
    words = command(capsys, "export", run[0], tmp_path / "out", f"--file-gib={size}", code=2)
    assert "must be a number of more than 0" in words and not (tmp_path / "out").exists()


def test_diff_measures_each_weight_and_names_settings(capsys, run):
    _, folders = run
    save(folders, 50, 0.5, SETTINGS.replace("tp: 1", "tp: 2"))
    words = ["diff", folders.at(10), folders.at(50)]
    found = json.loads(command(capsys, *words, "--json"))
    embed = found["roles"]["actor"]["embed"]
    assert embed["largest"] == 50.0 and embed["changed"] == 0.5
    assert embed["relative"] == pytest.approx(
        (10 * 40**2 + 40 * 50**2) ** 0.5 / (10 * 10**2) ** 0.5
    )
    assert found["roles"]["actor"]["scale"] == {"largest": 0.0, "relative": 0.0, "changed": 0.0}
    assert found["settings"] == ["actor.parallel.tp: 1 -> 2"]
    assert "50.0%" in command(capsys, *words)


def test_prune_follows_the_run_s_rule_unless_another_is_given(capsys, run):
    place, folders = run
    words = ["prune", place, "--json", "--dry-run"]
    assert json.loads(command(capsys, *words))["removed"] == [20]
    assert json.loads(command(capsys, *words, "--keep-last", "3"))["removed"] == []
    assert json.loads(command(capsys, *words, "--best=-accuracy"))["removed"] == [10]
    assert folders.steps() == [10, 20, 30]
    assert "removed: 20" in command(capsys, "prune", place)
    assert folders.steps() == [10, 30] and folders.unfinished() == [40]
    assert "is a single step" in command(capsys, "prune", folders.at(10), code=2)
    for wrong, words in {
        "--keep-last=0": "--keep-last 0: must be 1 or more",
        "--keep-every=-3": "--keep-every -3: must be 0 or more",
        "--best=foo": "no evaluation of this run gives `foo`",
    }.items():
        assert words in command(capsys, "prune", place, wrong, code=2)
    assert folders.steps() == [10, 30]


def test_what_is_no_checkpoint_is_a_sentence(capsys, run, tmp_path):
    assert "there is no such folder" in command(capsys, "list", tmp_path / "gone", code=2)
    (tmp_path / "empty").mkdir()
    assert "is no run with checkpoints" in command(capsys, "list", tmp_path / "empty", code=2)
    words = command(capsys, "inspect", run[1].at(40), code=2)
    assert "no such complete step" in words and "10, 20, 30" in words


@pytest.mark.parametrize("content", [b"{}", b"[]", b"not json"])
def test_a_damaged_list_of_a_step_or_settings_that_are_none_are_a_sentence(
    capsys, run, tmp_path, content
):
    place, folders = run
    write_atomically(folders.at(30) / "complete.json", content)
    for words in (["inspect", place], ["export", place, tmp_path / "new"], ["diff", place, place]):
        said = command(capsys, *words, code=2)
        assert "complete.json could not be read" in said and "name another step" in said
    if place != folders.path:
        (place / "config.yaml").write_text("- one")
        assert "holds no settings. Bring it back" in command(capsys, "list", place, code=2)


def test_the_report_lists_checkpoints_wherever_they_are(tmp_path):
    """As `hybridrl checkpoint list` does, by the settings of the run; a URL it only names."""
    for folder in (None, tmp_path / "elsewhere"):
        run = tmp_path / f"run-{folder is None}"
        run.mkdir()
        named = "null" if folder is None else str(folder)
        (run / "config.yaml").write_text(f"checkpoint: {{folder: {named}, best: accuracy}}\n")
        folders = CheckpointStore(resolve_checkpoint_folder(run, None if folder is None else named))
        for step in (1, 2):
            (folders.begin(step) / "weights").write_bytes(b"x")
            folders.complete(step, {"accuracy": 1 / step})
        folders.prune(KeepRule(best="accuracy"))
        found, where = list_checkpoints(open_run(run))
        assert [(one["step"], one["best"]) for one in found] == [(1, True), (2, False)]
        assert where == ("" if folder is None else named)
    (folders.at(2) / "complete.json").write_text("[" * 10_000)
    assert list_checkpoints(open_run(run))[0][1] == {"step": 2, "damaged": True}
    (run / "config.yaml").write_text("checkpoint: {folder: 's3://bucket/run'}\n")
    assert list_checkpoints(open_run(run)) == ([], "s3://bucket/run")

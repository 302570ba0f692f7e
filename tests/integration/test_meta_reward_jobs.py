"""Reward models that adapt to annotators, through the main program: learning, ranks, resuming on
fewer of them, and what `hybridrl adapt` makes."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from hybridrl import cli
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.reward_adaptation import adapt_reward_model
from hybridrl.main import run
from hybridrl.models.model_loading import make_tiny_model

FEATURES = 4


def pairs_of(name, longer, number, seed):
    """Pairs of an annotator who likes the longer response, or the shorter one."""
    draw, rows = random.Random(seed), []
    for length in draw.choices(range(1, 6), k=number):
        texts = ["".join(draw.choices("0123456789", k=n)) for n in (length, length + 2)]
        chosen, rejected = reversed(texts) if longer else texts
        rows.append({"prompt": "1+1=", "chosen": chosen, "rejected": rejected, "annotator": name})
    return rows


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("annotators")
    tokenizer = build_character_tokenizer("0123456789+=")
    shape = {"hidden_size": 32, "layers": 1, "heads": 2, "context": 32}
    make_tiny_model(folder / "model", tokenizer, seed=0, **shape)
    # Tasks of different sizes, of which one is in two blocks of a step, or in two steps.
    sizes = [*range(2, 14), 31]
    rows = [row for n, size in enumerate(sizes) for row in pairs_of(f"a{n}", n % 2, size, n)]
    held_out = [row for n in range(6) for row in pairs_of(f"new{n}", n % 2, 15, 90 + n)]
    return [
        *("algorithm=meta_reward_model", "data=jsonl", f"model.path={folder / 'model'}"),
        f"data.path={write_rows(folder / 'pairs.jsonl', rows)}",
        f"data.eval_path={write_rows(folder / 'new.jsonl', held_out)}",
        *("data.prompts_per_step=60", f"meta.features={FEATURES}", "meta.support_pairs=4"),
        *("actor.optimizer.learning_rate=3e-3", "devices=cpu", "observe.show_every=0"),
        *("eval.prompts=90", "eval.every=0"),
    ]


def finish(settings, folder, *overrides):
    run(load_config([*settings, f"run.directory={folder}", *overrides]))
    return folder


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def table_of(folder):
    parts = [load_file(file) for file in sorted((folder / "model").glob("task_table*"))]
    rows = [zip(part["numbers"].tolist(), part["state"], strict=True) for part in parts]
    return {number: state for part in rows for number, state in part}


def assert_near(found, expected):
    mine, other = rows_of(found), rows_of(expected)
    for name in ("policy/loss", "policy/grad_norm", "eval/pair_margin"):
        values = [[row[name] for row in rows if name in row] for rows in (mine, other)]
        assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-5) and values[0]
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (found, expected)]
    tables = [table_of(folder) for folder in (found, expected)]
    for first, second in (weights, tables):
        assert first.keys() == second.keys()
        for name, value in second.items():
            torch.testing.assert_close(first[name], value, atol=1e-5, rtol=1e-5)


def test_new_annotators_are_told_right_after_a_few_pairs(settings, tmp_path):
    folder = finish(settings, tmp_path / "run", "executor=inline", "trainer.steps=25")
    figures = [row for row in rows_of(folder) if "eval/pair_accuracy" in row][-1]
    assert figures["eval/pair_accuracy"] > 0.9
    assert 0.2 < figures["eval/shared_pair_accuracy"] < 0.8, "they differ"
    short, long = (
        write_rows(tmp_path / f"{longer}.jsonl", pairs_of("me", longer, 5, seed=77))
        for longer in (0, 1)
    )
    given = ["adapt", str(folder), str(short), str(tmp_path / "short")]
    with pytest.raises(SystemExit, match="0"):
        cli.main(given)
    adapt_reward_model(folder, str(long), tmp_path / "long", None)
    adapt_reward_model(folder, str(short), tmp_path / "known", "a1")
    load = AutoModelForSequenceClassification.from_pretrained
    features = load(folder / "model").score.weight
    heads = {n: load(tmp_path / n).score.weight for n in ("short", "long", "known")}
    assert features.shape == (FEATURES, 32) and heads["short"].shape == (1, 32)
    assert not torch.equal(heads["short"], heads["known"])
    ids = [torch.tensor([[5, 4, 5, 14, *response, 1]]) for response in ([3] * 2, [3] * 7)]
    scores = {}
    for name in ("short", "long"):
        model = load(tmp_path / name)
        hidden = [model.model(one).last_hidden_state[0, -1] for one in ids]
        scores[name] = [model.score(one).item() for one in hidden]
    assert scores["short"][0] > scores["short"][1] and scores["long"][0] < scores["long"][1]
    with pytest.raises(ConfigError, match="has none of this name"):
        adapt_reward_model(folder, str(long), tmp_path / "other", "nobody")
    with pytest.raises(ConfigError, match="is not empty"):
        adapt_reward_model(folder, str(long), tmp_path / "long", None)
    model = settings[2]
    rewarded = ["algorithm=remax", model, "reward.function=null", "rollout=transformers"]
    rewarded += [*("trainer.steps=1", "warmup.steps=0", "executor=inline", "rollout.max_tokens=5")]
    with pytest.raises(ConfigError, match="hybridrl adapt"):
        finish(rewarded, tmp_path / "refused", f"reward.model={folder}")
    rewarded += ["data.prompts_per_step=4", "eval.prompts=4"]
    ended = finish(rewarded, tmp_path / "rewarded", f"reward.model={tmp_path / 'short'}")
    assert any("reward/mean" in row for row in rows_of(ended))


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.slow
def test_two_ranks_are_one_and_one_goes_on_where_two_stopped(settings, tmp_path):
    steps = ["trainer.steps=5", "checkpoint.every=3"]
    one = finish(settings, tmp_path / "one", "executor=inline", *steps)
    two = finish(settings, tmp_path / "two", "num_devices=2", *steps)
    assert len(list((two / "model").glob("task_table*"))) == 2
    assert_near(two, one)
    step = two / "checkpoints" / "step-000003"
    alone = tmp_path / "alone"
    overrides = [f"fork={step}", f"run.directory={alone}", "executor=inline", "num_devices=1"]
    run(load_config(overrides))
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (alone, one)]
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, atol=1e-5, rtol=1e-5)
    tables = table_of(alone), table_of(one)
    assert tables[0].keys() == tables[1].keys()

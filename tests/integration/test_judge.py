"""A judge beside a reward function, over real Ray and vLLM: asked, read, counted where it fails."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from settings import SHORT
from transformers import AutoModelForCausalLM

from hybridrl.data.character_tokenizer import CHARACTERS, build_character_tokenizer
from hybridrl.models.model_loading import make_tiny_model

pytestmark = pytest.mark.more

TEMPLATE = "{prompt}{response},{answer}"
CONTEXT = 17
"""Longest template and grade: what the policy says at greatest length does not fit."""


def make_judge(folder: Path) -> Path:
    """A model that writes the commonest character of what it reads, of equals the one with the
    larger id: attention is the mean over all tokens, which are unit vectors."""
    tokenizer = build_character_tokenizer()
    hidden, size = 128, len(tokenizer)
    make_tiny_model(
        folder, tokenizer, seed=0, hidden_size=hidden, layers=1, heads=4, context=CONTEXT
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    layer = model.model.layers[0]
    attention, unit = layer.self_attn, torch.eye(hidden)
    with torch.no_grad():
        for parameter in (*attention.parameters(), *layer.mlp.parameters()):
            parameter.zero_()  # no scores: every token counts alike
        model.model.embed_tokens.weight.copy_(unit[:size])
        attention.v_proj.weight.copy_(unit[:64])
        # Two heads of 32 read each half of the values: the first of them is copied out. It drowns
        # what the last token itself would say.
        rank = 1e4 * (1 + 1e-3 * torch.arange(64))
        attention.o_proj.weight[:32, :32] = torch.diag(rank[:32])
        attention.o_proj.weight[32:64, 64:96] = torch.diag(rank[32:])
    model.save_pretrained(folder)
    return folder


def expected_grade(row: dict[str, str]) -> float | None:
    """What the judge has to say of a sample; None: no digit, or no room for the question."""
    text = TEMPLATE.format(**row)
    if len(text) > CONTEXT - 1:
        return None
    said = max(Counter(text).items(), key=lambda found: (found[1], CHARACTERS.index(found[0])))[0]
    return int(said) / 9 if said.isdigit() else None


@pytest.mark.ray
@pytest.mark.vllm
def test_a_judge_grades_beside_a_function(run, tmp_path):
    (tmp_path / "template.txt").write_text(TEMPLATE)
    directory = run(
        *(*SHORT, "trainer.steps=1", "observe.samples_every=1", "reward.on_error=drop"),
        f"reward.judge.path={make_judge(tmp_path / 'judge')}",
        *(f"reward.judge.template={tmp_path / 'template.txt'}", "reward.judge.pattern='([0-9])'"),
        *("reward.judge.scale=9", "reward.judge.weight=0.5", "reward.judge.max_tokens=1"),
        f"reward.judge.context={CONTEXT}",
    )
    samples = pq.read_table(directory / "samples" / "step-000001.parquet").to_pylist()
    grades = [expected_grade(row) for row in samples]
    kept = [n for n, grade in enumerate(grades) if grade is not None]
    assert 0 < len(kept) < len(samples) == 64 and len({grades[n] for n in kept}) > 3
    for row, grade in zip(samples, grades, strict=True):
        right = float(row["response"] == row["answer"])
        expected = float("nan") if grade is None else right + 0.5 * grade
        assert row["scores"] == pytest.approx(expected, nan_ok=True), row
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    (metrics,) = [row for row in rows if "policy/loss" in row]
    assert metrics["reward/ungraded"] == len(samples) - len(kept)
    mean = sum(samples[n]["scores"] for n in kept) / len(kept)
    assert metrics["reward/mean"] == pytest.approx(mean)

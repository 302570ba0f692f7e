"""Data that does not fit the model or a micro-batch is refused before anything starts."""

import resource
from types import SimpleNamespace

import numpy as np
import pytest
from settings import configured

from hybridrl.batch.batch import Batch
from hybridrl.checks.data.row_checks import check_eval_column, check_sample_lengths
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.job_data import JobData as Rows
from hybridrl.errors import ConfigError, StorageError
from hybridrl.job.job_inputs import list_data_remarks, load_job_rows, resolve_model_folder

ROWS = Rows(training=None, held_out=None, examples=None, longest_prompt=20, longest_response=30)
MODEL = SimpleNamespace(max_position_embeddings=50)


@pytest.mark.parametrize(
    ("overrides", "kind", "words"),
    [
        ([], "prompts", "has 51 tokens .* but the model takes 50. Lower rollout.max_tokens"),
        ([], "pairs", "but the model takes 50. Lower data.max_response_tokens"),
        (["actor.tokens_per_microbatch=49"], "prompts", "tokens_per_microbatch to 50 or more"),
        (["actor.tokens_per_microbatch=98"], "pairs", "tokens_per_microbatch to 100 or more"),
    ],
)
def test_the_longest_sample_has_to_fit(overrides, kind, words):
    too_long = Rows(None, None, None, 21, 30)
    rows = ROWS if overrides else too_long
    with pytest.raises(ConfigError, match=words):
        check_sample_lengths(configured(overrides), kind, rows, MODEL)


def test_what_fits_is_not_refused():
    check_sample_lengths(configured(["actor.tokens_per_microbatch=50"]), "prompts", ROWS, MODEL)
    shared = ["actor.tokens_per_microbatch=25", "actor.parallel.ring=2"]
    check_sample_lengths(configured(shared), "prompts", ROWS, MODEL)


def test_few_rows_are_told_of():
    few = Rows([1, 2, 3], None, None, 20, 30)
    repeats, unheld = list_data_remarks(configured(["data.prompts_per_step=4"]), "prompts", few)
    assert "data.prompts_per_step=4, and there are 3 prompts" in repeats and "to 3" in repeats
    assert "None of the 3 prompts are held out" in unheld and "data.eval_path" in unheld
    enough = Rows([1, 2, 3], [4], None, 20, 30)
    assert list_data_remarks(configured(["data.prompts_per_step=3"]), "prompts", enough) == []
    assert list_data_remarks(configured(["trainer.name=evaluate"]), "prompts", few) == []


@pytest.mark.parametrize(("labels", "said"), [([1, 1], "good"), ([0, 0], "bad"), ([0, 1], None)])
def test_labels_that_are_all_alike_are_remarked_on(labels, said):
    found = Batch.from_columns({"label": np.float32(labels)})
    rows = Rows(found, found, None, 4, 4)
    config = configured(["algorithm=kto", "data.prompts_per_step=2"])
    remarks = list_data_remarks(config, "responses", rows)
    assert remarks == ([] if said is None else remarks[:1])
    assert said is None or f"All 2 responses to learn from are labelled {said}" in remarks[0]


def test_a_tiny_model_has_heads_that_kernels_take(tmp_path):
    with pytest.raises(ConfigError, match=r"multiple of 32 x model\.tiny\.heads=4"):
        resolve_model_folder(configured(["model.tiny.hidden_size=100"]), tmp_path)


def test_accuracy_by_a_column_that_the_data_lacks_is_refused_before_anything_starts():
    tokenizer = build_character_tokenizer()
    held_out = load_job_rows(configured(), "prompts", tokenizer)[0].held_out
    check_eval_column(configured(["eval.by_column=answer"]), held_out)
    with pytest.raises(ConfigError, match=r"eval\.by_column is `answr`.*Did you mean `answer`"):
        check_eval_column(configured(["eval.by_column=answr"]), held_out)


def test_a_tiny_model_that_cannot_be_written_is_a_sentence(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(StorageError, match=r"initial_model: File too large \(.*run\.root"):
            resolve_model_folder(configured(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

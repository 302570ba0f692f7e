import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.batch.batch import Batch
from hybridrl.data.prompt_loader import PromptLoader
from hybridrl.errors import ConfigError, DataError


def numbered(rows):
    return Batch.from_columns(
        {"number": list(range(rows)), "prompt": [f"p{i}" for i in range(rows)]}
    )


def deal(loader, steps):
    return [batch["number"].tolist() for batch in islice(loader, steps)]


sizes = st.integers(1, 12)


@given(rows=sizes, step=sizes, seed=st.integers(0, 99), shuffle=st.booleans())
def test_every_epoch_deals_every_prompt_once(rows, step, seed, shuffle):
    steps = deal(PromptLoader(numbered(rows), step, seed, shuffle), 3 * rows)
    assert {len(numbers) for numbers in steps} == {step}
    dealt = [number for numbers in steps for number in numbers]
    for start in range(0, len(dealt) - rows + 1, rows):
        epoch = dealt[start : start + rows]
        assert sorted(epoch) == list(range(rows))
        assert shuffle or epoch == list(range(rows))


@given(rows=sizes, step=sizes, before=st.integers(0, 20), seed=st.integers(0, 99))
def test_resume_is_exact(rows, step, before, seed):
    loader = PromptLoader(numbered(rows), step, seed)
    deal(loader, before)
    state = json.loads(json.dumps(loader.state()))
    resumed = PromptLoader(numbered(rows), step, seed)
    resumed.restore(state)
    assert resumed.epoch == loader.epoch
    assert deal(resumed, 10) == deal(loader, 10)


def test_epochs_and_seeds_differ():
    first, second = deal(PromptLoader(numbered(50), 50, seed=1), 2)
    assert first != second
    assert deal(PromptLoader(numbered(50), 50, seed=2), 1) != [first]


def test_whole_rows_are_dealt():
    batch = next(PromptLoader(numbered(5), 3, seed=0))
    assert batch["prompt"] == [f"p{number}" for number in batch["number"].tolist()]


def test_a_step_may_change_its_size_on_resume():
    loader = PromptLoader(numbered(10), 4, seed=0)
    one_by_one = deal(PromptLoader(numbered(10), 1, seed=0), 10)
    expected = [number for numbers in one_by_one for number in numbers][4:]
    deal(loader, 1)
    wider = PromptLoader(numbered(10), 6, seed=0)
    wider.restore(loader.state())
    assert deal(wider, 1) == [expected]


def test_other_data_or_another_seed_cannot_go_on():
    state = PromptLoader(numbered(5), 2, seed=0).state()
    with pytest.raises(DataError, match=r"`number of prompts`"):
        PromptLoader(numbered(6), 2, seed=0).restore(state)
    with pytest.raises(DataError, match=r"`run.seed`"):
        PromptLoader(numbered(5), 2, seed=1).restore(state)


@pytest.mark.parametrize("column", ["prompt_ids", "response_ids", "chosen_ids", "rejected_ids"])
def test_other_rows_of_the_same_number_are_told_of(caplog, column):
    def tokenized(first):
        columns = {"prompt_ids": range(5), column: range(first, first + 5)}
        return Batch.from_columns({k: [np.array([n]) for n in v] for k, v in columns.items()})

    state = PromptLoader(tokenized(0), 2, seed=0).state()
    PromptLoader(tokenized(0), 2, seed=0).restore(state)
    assert not caplog.text
    PromptLoader(tokenized(1), 2, seed=0).restore(state)
    assert "the data has changed" in caplog.text
    del state["rows_crc32"]
    PromptLoader(tokenized(0), 2, seed=0).restore(state)
    assert "of an older version" in caplog.text


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match=r"`data.prompts_per_step` is 0"):
        PromptLoader(numbered(5), 0, seed=0)
    with pytest.raises(ConfigError, match=r"`run.seed` is -1"):
        PromptLoader(numbered(5), 1, seed=-1)
    with pytest.raises(DataError, match="no rows"):
        PromptLoader(numbered(5).slice(0, 0), 1, seed=0)

"""Samples that are continued in later generations: their tokens, and which are waited for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from settings import configured
from transformers import AutoModelForCausalLM

from hybridrl.batch.batch import Batch
from hybridrl.batch.begun_responses import begin_rows, find_complete_groups
from hybridrl.checks.check_list import check
from hybridrl.config.schema import RolloutConfig
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.errors import ConfigError
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.rollout.partial_stream import (
    PartialGenerator,
    PromptQuota,
)
from hybridrl.rollout.rollout_engine import EngineSetup, PartialRollout, SamplingSettings
from hybridrl.rollout.sample_generator import GenerationTask
from hybridrl.rollout.transformers_engine import TransformersEngine
from hybridrl.trainers.partial_rollouts import PartialRollouts

PROMPTS, SAMPLES, LONGEST = 6, 3, 40


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Two versions of a policy with an engine for them."""
    tokenizer = build_character_tokenizer()
    folders = [tmp_path_factory.mktemp("model") for _ in range(2)]
    shape = {"hidden_size": 32, "layers": 1, "heads": 2, "context": 64}
    for seed, folder in enumerate(folders):
        make_tiny_model(folder, tokenizer, seed=seed, **shape)
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders]
    for model in models:  # so that answers are as long as 40 tokens
        model.get_output_embeddings().weight.data *= 3
    setup = EngineSetup(
        *(str(folders[0]), str(folders[0]), "float32"),
        eos_token_ids=[tokenizer.eos_token_id, 5, 6, 7, 8],
        device=torch.device("cpu"),
    )
    return models, TransformersEngine(setup, RolloutConfig(max_sequences=64))


def begun_rows():
    prompts = [torch.tensor([10 + p, 30, 31][: 1 + p % 3]) for p in range(PROMPTS)]
    rows = Batch.from_columns({"prompt_ids": [p for p in prompts for _ in range(SAMPLES)]})
    groups = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    return rows.with_columns({"group_id": groups}) | begin_rows(PROMPTS * SAMPLES)


def continued(policies, share, steps=4):
    """Generate until all prompts are complete, with other weights each time, for those that are not
    yet; yields all rows after each generation."""
    models, engine = policies
    generator, rows, whole = PartialGenerator(engine), begun_rows(), []
    sampling = SamplingSettings(LONGEST, partial=PartialRollout(share, steps))
    for version in range(50):
        engine.load(iter(models[version % 2].named_parameters()))
        seeds = [1000 * version + row for row in range(len(rows))]
        stream = generator.begin(GenerationTask(rows, sampling, seeds, version))
        found, numbers = stream.next_samples(len(rows))
        stream.close()
        rows |= found.take(np.argsort(numbers))
        complete = find_complete_groups(rows["group_id"].tolist(), rows["finish_reason"])
        every = Batch.concat([*whole, rows])
        yield every.take(np.argsort(every["group_id"].numpy(), kind="stable"))
        if complete.all():
            return
        whole.append(rows.take(complete))
        rows = rows.take(~complete)
        rows = rows.with_columns({"carried": rows["carried"] + 1})
    raise AssertionError("samples do not end")


def test_log_probabilities_are_those_of_the_version_that_sampled_a_token(policies):
    models, _ = policies
    *_, rows = continued(policies, 0.5)
    columns = "prompt_ids", "response_ids", "rollout_log_probs", "token_versions"
    mixed = 0
    for prompt, response, log_probs, versions in zip(
        *(rows.ragged(name).rows() for name in columns), strict=True
    ):
        assert len(response) == len(log_probs) == len(versions)
        ids = torch.cat([prompt, response])[None]
        with torch.no_grad():
            said = [torch.log_softmax(model(ids).logits[0].float(), -1) for model in models]
        for place, (token, version) in enumerate(zip(response, versions, strict=True)):
            expected = said[int(version) % 2][len(prompt) + place - 1, token]
            assert log_probs[place].item() == pytest.approx(expected.item(), abs=1e-4)
        mixed += len(set(versions.tolist())) > 1
    assert mixed > 2, "samples of several policies are what this is about"


def test_samples_end_as_they_would_have_and_are_not_touched_afterwards(policies):
    before = None
    for rows in continued(policies, 0.4):
        now = rows.select(["response_ids", "rollout_log_probs", "finish_reason"]).to_pylist()
        for old, new in zip(before or (), now, strict=False):
            length = len(old["response_ids"])
            assert new["response_ids"][:length] == old["response_ids"]
            assert new["rollout_log_probs"][:length] == old["rollout_log_probs"]
            assert old["finish_reason"] == "unfinished" or new == old
        for row in now:
            ended = row["response_ids"][-1:] and row["response_ids"][-1] in (5, 6, 7, 8)
            whole = len(row["response_ids"]) == LONGEST
            expected = "stop" if ended else "length" if whole else "unfinished"
            assert row["finish_reason"] in (expected, "stop")
        before = now


def test_a_sample_is_not_carried_for_longer_than_it_may(policies):
    generations = list(continued(policies, 0.2, steps=2))
    assert len(generations) == 3, "of few prompts each, the last with all that were left"
    done = [
        find_complete_groups(r["group_id"].tolist(), r["finish_reason"]).sum() // SAMPLES
        for r in generations
    ]
    assert 2 <= done[0] < PROMPTS and done[-1] == PROMPTS


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=20),
    st.floats(0.01, 0.99),
    st.randoms(use_true_random=False),
)
def test_a_quota_is_met_when_enough_prompts_are_whole_and_none_is_overdue(rows, share, random):
    groups, carried = [g for g, _ in rows], [c for _, c in rows]
    left = [row for row in range(len(rows)) if random.random() < 0.8]
    quota = PromptQuota(groups, left, carried, PartialRollout(share, 3))
    open_rows = set(left)
    for row in random.sample(left, len(left)):
        lacking = {groups[r] for r in open_rows}
        prompts = set(groups)
        overdue = {groups[r] for r in left if carried[r] >= 3} & lacking
        enough = len(prompts) - len(lacking) >= share * len(prompts) - 1e-6
        assert quota.is_met == (enough and not overdue)
        open_rows.discard(row)
        quota.is_met_with(row)
        quota.is_met_with(row)  # told twice, it counts once
    assert quota.is_met


def test_of_the_smallest_share_a_step_still_has_a_prompt():
    assert not PromptQuota([0], [0], [0], PartialRollout(1e-9, 4)).is_met
    assert PromptQuota([], [], [], PartialRollout(1e-9, 4)).is_met, "a replica without prompts"


def test_what_is_as_long_as_a_lower_limit_is_complete(policies):
    rows = begun_rows().take(range(2 * SAMPLES))
    length = [8, 5, 1, 0, 2, 4]
    rows = rows.with_columns(
        {
            "response_ids": [torch.full((n,), 40) for n in length],
            "rollout_log_probs": [torch.zeros(n) for n in length],
            "token_versions": [torch.zeros(n, dtype=torch.int64) for n in length],
        }
    )
    sampling = SamplingSettings(5, partial=PartialRollout(0.99, 4))
    stream = PartialGenerator(policies[1]).begin(GenerationTask(rows, sampling, range(6), 1))
    found, numbers = stream.next_samples(len(rows))
    found = found.take(np.argsort(numbers))
    assert found["finish_reason"][:2] == ["length", "length"]
    assert [len(row) for row in found.ragged("response_ids").rows()[:2]] == [8, 5]
    assert max(len(row) for row in found.ragged("response_ids").rows()[2:]) <= 5


class Kept:
    """In place of a `BatchRef`."""

    def __init__(self, rows):
        self.collect = lambda: rows


def test_kept_samples_of_another_number_a_prompt_are_refused():
    before = PartialRollouts(configured([*HERE, "rollout.samples_per_prompt=3"]), None, None)
    before._kept = Kept(begun_rows())
    after = PartialRollouts(configured([*HERE, "rollout.samples_per_prompt=2"]), None, None)
    words = r"samples_per_prompt=2: .* 3 of each of 6 prompts\. .*samples_per_prompt=3"
    with pytest.raises(ConfigError, match=words):
        after.load_state(before.state())


HERE = ["executor=inline", "rollout=transformers", "rollout.partial=0.7"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.stop=[x]", r"rollout\.partial=0\.7 with rollout\.stop=\['x'\]: a text may begin"),
        ("guard.on_nan=rewind", r"rollout\.partial=0\.7 with guard\.on_nan=rewind"),
        ("rollout.engine=pipeline", "it generates a batch to its end"),
        ("rollout.partial=1.5", r"rollout\.partial=1\.5: must be"),
        ("actor.updates_per_step=1000", r"1000 is more than the \d+ samples .*rollout\.partial x"),
        ("algorithm=remax", r"rollout\.partial"),
        (
            "algorithm.policy_loss=reinforce algorithm.correction=none",
            r"takes them for the policy's own",
        ),
    ],
)
def test_what_makes_no_sense_together_is_refused(override, words):
    with pytest.raises(ConfigError, match=words):
        check(configured([*HERE, *override.split()]))


def test_a_job_with_it_is_accepted():
    check(configured(HERE))
    assert np.isclose(configured(HERE).rollout.partial, 0.7)

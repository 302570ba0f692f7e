"""What sampling left to choose from, as the trainer reads it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.batch.batch import Batch
from hybridrl.batch.kept_sets import (
    KEPT_SETS,
    WHOLE_VOCABULARY,
    KeptSets,
    TokenSet,
    decode_kept_sets,
    filters_tokens,
    find_token_sets,
    restricts_sampling,
)
from hybridrl.errors import DataError
from hybridrl.models import log_probs as head
from hybridrl.models.kept_tokens import KeptTokens
from hybridrl.models.log_probs import token_log_probs
from hybridrl.rollout import SamplingSettings
from hybridrl.rollout.episode_batch import EpisodeSample, build_episode_batch
from hybridrl.rollout.rollout_engine import EngineOutput
from hybridrl.rollout.transcript import TokenTranscript
from hybridrl.trainers.episode_branches import select_branch_tokens

CPU = torch.device("cpu")


def sets_of(*sets):
    found = KeptSets()
    for one in sets:
        found.add(one)
    return found


def sampled(prompt_ids, token_ids, *sets):
    log_probs = [-0.5] * len(token_ids)
    return EngineOutput(0, prompt_ids, token_ids, log_probs, "stop", kept=sets_of(*sets))


def as_lists(sets):
    return list(sets.counts), list(sets.ids)


def column(masks, lengths):
    """The column of `[tokens, vocabulary]` masks, for rows of these lengths."""
    found = find_token_sets(torch.where(masks, 0.0, -torch.inf))
    rows, start = [], 0
    for length in lengths:
        rows.append(torch.from_numpy(sets_of(*found[start : start + length]).encode()))
        start += length
    return rows


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    vocabulary=st.integers(2, 40),
    soft_cap=st.sampled_from([None, 3.0]),
    most=st.sampled_from([16, 100, 1 << 20]),
)
def test_log_probs_and_entropy_are_over_the_kept_tokens(seed, lengths, vocabulary, soft_cap, most):
    """Forward and backward, by chunks of tokens and blocks of the vocabulary of any size."""
    torch.manual_seed(seed)
    tokens = sum(lengths)
    hidden = torch.randn(tokens, 3, requires_grad=True)
    weight = torch.randn(vocabulary, 3, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    masks = torch.rand(tokens, vocabulary) < torch.rand(tokens, 1) ** 2
    masks[torch.arange(tokens), targets] = True
    batch = Batch.from_columns(
        {
            "response_ids": list(targets.split(lengths)),
            KEPT_SETS: column(masks, lengths),
        }
    )
    kept = KeptTokens.of(batch, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "logits_per_chunk", lambda kind: most)
        found = token_log_probs(hidden, weight, targets, 0.7, None, soft_cap, kept)
        wanted = torch.randn(2, tokens)
        own = torch.autograd.grad(
            (torch.stack(found) * wanted).sum(), [hidden, weight], materialize_grads=True
        )
    logits = hidden @ weight.T
    logits = (logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)) / 0.7
    expected = logits.masked_fill(~masks, -torch.inf).log_softmax(-1).masked_fill(~masks, -1e9)
    log_probs = expected.gather(1, targets[:, None])[:, 0]
    entropy = -(expected.exp() * expected).sum(1)
    plain = torch.autograd.grad(
        (torch.stack([log_probs, entropy]) * wanted).sum(), [hidden, weight], materialize_grads=True
    )
    for one, other in zip((*found, *own), (log_probs, entropy, *plain), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_each_setting_that_leaves_tokens_out_keeps_their_sets():
    """Also a least length, at which the end cannot be chosen, though nothing has to be filtered."""
    assert not restricts_sampling(SamplingSettings(4, temperature=0.5))
    for option in ({"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"min_tokens": 2}):
        sampling = SamplingSettings(4, **option)
        assert restricts_sampling(sampling), option
        assert filters_tokens(sampling) is ("min_tokens" not in option)


def test_few_are_listed_many_are_left_out_all_are_neither():
    log_probs = torch.full((3, 7), -torch.inf)
    log_probs[0, [2, 5]] = log_probs[1, [0, 1, 2, 3, 6]] = log_probs[2] = -1.0
    few, many, every = find_token_sets(log_probs)
    assert (few, many) == (TokenSet(2, [2, 5]), TokenSet(-2, [4, 5]))
    assert (every.size, list(every.ids)) == (0, [])
    assert find_token_sets(log_probs[:0]) == []


def test_sets_of_several_responses_lie_one_after_the_other():
    first, last = sets_of(TokenSet(2, [3, 4]), WHOLE_VOCABULARY), sets_of(TokenSet(-1, [9]))
    values = torch.tensor([*first.encode(), *last.encode()])
    assert [*map(as_lists, decode_kept_sets(values, [2, 0, 1]))] == [
        ([2, 0], [3, 4]),
        ([], []),
        ([-1], [9]),
    ]


def test_sets_that_are_not_those_of_the_tokens_are_an_error():
    short = torch.from_numpy(sets_of(TokenSet(2, [3, 4])).encode())
    batch = Batch.from_columns({"response_ids": [torch.tensor([3, 4])], KEPT_SETS: [short]})
    with pytest.raises(DataError, match="a set for each response token"):
        KeptTokens.of(batch, CPU)


def test_nothing_left_out_anywhere_costs_nothing():
    whole = torch.from_numpy(sets_of(WHOLE_VOCABULARY).encode())
    batch = Batch.from_columns({"response_ids": [torch.tensor([3])], KEPT_SETS: [whole]})
    assert KeptTokens.of(batch, CPU) is None


def test_a_part_of_the_tokens_keeps_its_own_sets():
    masks = torch.rand(6, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    batch = Batch.from_columns(
        {"response_ids": [torch.zeros(6, dtype=torch.int64)], KEPT_SETS: column(masks, [6])}
    )
    some = torch.tensor([1, 2, 5])
    part = KeptTokens.of(batch, CPU).select(some)
    assert torch.equal(part.find_left_out(slice(0, 3), 0, 9), ~masks[some])
    assert torch.equal(part.find_left_out(slice(1, 3), 2, 7), ~masks[some[1:], 2:7])


def test_a_transcript_keeps_the_sets_of_sampled_tokens_and_takes_turns_back():
    transcript = TokenTranscript([1])
    transcript.add_sampled(sampled([1], [5], TokenSet(2, [4, 5])))
    transcript.add_given([7, 7])
    before = transcript.mark()
    transcript.add_sampled(sampled([1, 5, 7, 7], [6], TokenSet(1, [6])))
    assert as_lists(transcript.kept) == ([2, 0, 0, 1], [4, 5, 6])
    transcript.return_to(before)
    assert as_lists(transcript.kept) == ([2, 0, 0], [4, 5])


def test_each_branch_of_an_episode_has_its_own_sets():
    first, last = TokenTranscript([1]), TokenTranscript([2])
    first.add_sampled(sampled([1], [5], TokenSet(2, [4, 5])))
    first.add_given([7])
    last.add_sampled(sampled([2], [6, 8], TokenSet(-1, [3]), WHOLE_VOCABULARY))
    episode = EpisodeSample([first, last], [], 1.0, "stop")
    batch = build_episode_batch([episode], [[1]], keeps_sets=True)
    both = batch.take([0, 0]).with_columns({"branch": torch.tensor([0, 1])})
    found = select_branch_tokens(both).ragged(KEPT_SETS).rows()
    assert [row.tolist() for row in found] == [[2, 0, 4, 5], [-1, 0, 3]]

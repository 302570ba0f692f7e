"""Noise that depends on a sample's seed and place alone."""

import pytest
import torch

from hybridrl.rollout.rollout_engine import SamplingSettings
from hybridrl.rollout.transformers_engine import TokenSampler, gumbel_noise, uniform

QWEN = 151_936
"""The size of a large vocabulary."""


def test_a_row_draws_the_same_beside_any_others():
    seeds, places = torch.tensor([7, 8, 9]), torch.tensor([0, 5, 2])
    together = gumbel_noise(seeds, places, 50)
    for row in range(3):
        alone = gumbel_noise(seeds[row : row + 1], places[row : row + 1], 50)
        assert torch.equal(alone[0], together[row])


def test_draws_follow_the_distribution():
    """A chi-square test of 40,000 draws, over seeds and over places."""
    p = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025])
    n = 40_000
    for seeds, places in (
        (torch.arange(n), torch.zeros(n, dtype=torch.int64)),
        (torch.full((n,), 3), torch.arange(n)),
    ):
        counts = torch.bincount((p.log() + gumbel_noise(seeds, places, 5)).argmax(1), minlength=5)
        assert ((counts - n * p) ** 2 / (n * p)).sum() < 18.5  # p = 0.001 with 4 degrees of freedom


def test_neighbouring_seeds_and_places_are_unrelated():
    seeds = torch.arange(20_000)
    one = gumbel_noise(seeds, torch.zeros_like(seeds), 1)[:, 0]
    for other in (
        gumbel_noise(seeds + 1, torch.zeros_like(seeds), 1)[:, 0],
        gumbel_noise(seeds, torch.ones_like(seeds), 1)[:, 0],
        gumbel_noise(seeds, torch.zeros_like(seeds), 2)[:, 1],
    ):
        assert torch.corrcoef(torch.stack([one, other]))[0, 1].abs() < 0.03


def test_every_uniform_number_lies_between_0_and_1_and_has_finite_noise():
    """For the 2**20 least and greatest of all 64 random bits, whichever sign they have as an
    integer, and for each of the powers of two between."""
    some = torch.arange(2**20)
    powers = 2 ** torch.arange(63)
    as_unsigned = torch.cat([some, powers, powers - 1, -powers, -1 - some, (1 << 62) + some])
    numbers = uniform(as_unsigned)
    assert numbers.dtype == torch.float32
    assert 0 < numbers.min() < 2**-53 and 0.999 < numbers.max() < 1
    assert (-torch.log(-torch.log1p(-numbers))).isfinite().all()
    increasing = uniform(torch.cat([some, some + (1 << 40), (1 << 62) + some, -(2**40) + some]))
    assert (increasing.diff() >= 0).all()
    quarters = uniform(torch.tensor([1 << 62, -(1 << 62)]))
    assert torch.allclose(quarters, torch.tensor([0.25, 0.75]))


def draws(logits, sampling, number, first=0, at_once=25):
    chooser = TokenSampler(sampling, torch.tensor([1]), None)
    for start in range(first, first + number, at_once):
        yield chooser.choose(logits.expand(at_once, -1).clone(), start + torch.arange(at_once), 3)


@pytest.mark.more
def test_no_token_of_a_large_vocabulary_is_drawn_that_has_no_probability():
    """One token has all of it but for 1e-12, of which the others have their share."""
    logits = torch.full((QWEN,), -30.0)
    logits[7] = 10.0
    for sampling in (
        SamplingSettings(8),
        SamplingSettings(8, top_k=1),
        SamplingSettings(8, top_p=0.9),
    ):
        for tokens, log_probs in draws(logits, sampling, 150):
            assert tokens.eq(7).all() and log_probs.abs().max() < 1e-6


@pytest.mark.more
def test_tokens_that_are_filtered_out_are_never_drawn():
    logits = torch.full((QWEN,), -torch.inf)
    logits[5::40_000] = torch.tensor([0.0, -1.0, -2.0, -3.0])
    found = torch.cat([tokens for tokens, _ in draws(logits, SamplingSettings(8), 400)])
    assert set(found.tolist()) <= {5, 40_005, 80_005, 120_005}
    shares = (found == 5).float().mean(), logits[5::40_000].softmax(0)[0]
    assert abs(shares[0] - shares[1]) < 0.1  # four standard deviations


@pytest.mark.more
def test_the_largest_noise_of_a_vocabulary_has_its_distribution():
    """Less the logarithm of their number it is Gumbel noise again: what rare tokens live by."""
    noise = gumbel_noise(torch.arange(100), torch.zeros(100, dtype=torch.int64), QWEN)
    largest = noise.amax(1) - torch.log(torch.tensor(QWEN))
    assert abs(float(largest.mean()) - 0.5772) < 0.51  # four standard deviations, pi / sqrt(6 n)
    assert largest.max() < 12  # with 100 draws, beyond that by a chance of 6e-4

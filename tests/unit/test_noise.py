"""Noise that depends on a sample's seed and place alone."""

import torch

from hybridrl.rollout.noise import gumbel


def test_a_row_draws_the_same_beside_any_others():
    seeds, places = torch.tensor([7, 8, 9]), torch.tensor([0, 5, 2])
    together = gumbel(seeds, places, 50)
    for row in range(3):
        alone = gumbel(seeds[row : row + 1], places[row : row + 1], 50)
        assert torch.equal(alone[0], together[row])


def test_draws_follow_the_distribution():
    """A chi-square test of 40,000 draws, over seeds and over places."""
    p = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025])
    n = 40_000
    for seeds, places in (
        (torch.arange(n), torch.zeros(n, dtype=torch.int64)),
        (torch.full((n,), 3), torch.arange(n)),
    ):
        counts = torch.bincount((p.log() + gumbel(seeds, places, 5)).argmax(1), minlength=5)
        assert ((counts - n * p) ** 2 / (n * p)).sum() < 18.5  # p = 0.001 with 4 degrees of freedom


def test_neighbouring_seeds_and_places_are_unrelated():
    seeds = torch.arange(20_000)
    one = gumbel(seeds, torch.zeros_like(seeds), 1)[:, 0]
    for other in (
        gumbel(seeds + 1, torch.zeros_like(seeds), 1)[:, 0],
        gumbel(seeds, torch.ones_like(seeds), 1)[:, 0],
        gumbel(seeds, torch.zeros_like(seeds), 2)[:, 1],
    ):
        assert torch.corrcoef(torch.stack([one, other]))[0, 1].abs() < 0.03

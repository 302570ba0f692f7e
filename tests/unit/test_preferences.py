"""Losses of pairs against plain loops over the pairs, and the multiplier of a constraint."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from settings import configured

from hybridrl.algorithms import (
    BradleyTerryObjective,
    PreferenceObjective,
    TokenSegments,
    UnpairedPreferenceObjective,
    token_weights,
)
from hybridrl.algorithms.preference_losses import PREFERENCE_LOSSES
from hybridrl.batch.batch import Batch
from hybridrl.checks.settings.role_checks import check_roles, find_ineffective_caches
from hybridrl.config.effective_settings import find_ineffective_settings
from hybridrl.errors import ConfigError
from hybridrl.evaluation.held_out_metrics import compute_label_metrics
from hybridrl.rollout.rollout_engine import ragged
from hybridrl.trainers import dpo, kto, load_roles

# Tokens of the answers of three pairs, the chosen one first.
LENGTHS = [4, 2, 1, 6, 3, 3]
MODE = "seq-mean-token-mean"


def packed(holes=False):
    """The segments of the answers, and a seeded draw of one number per token."""
    generator = torch.Generator().manual_seed(5)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    mask = torch.ones(sum(LENGTHS)).index_fill(0, torch.tensor([1, 3, 8, 13, 18]), 0.0)
    segments = TokenSegments.from_cu_seqlens(cu_seqlens, mask if holes else None)
    return segments, lambda: torch.randn(sum(LENGTHS), generator=generator)


def rows_of(segments, x):
    """The tokens of each sample as a plain list."""
    return [x[(segments.row == row) & segments.mask].tolist() for row in range(segments.rows)]


def weighted(result, segments):
    """The loss of the mini-batch."""
    weights = token_weights(segments.mask, MODE, segments=segments)
    return float((weights * result.loss).sum())


def in_pairs(rows):
    """(chosen, rejected) of each pair."""
    return list(zip(rows[0::2], rows[1::2], strict=True))


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def test_last_has_a_gradient_at_the_last_tokens_only():
    x = torch.full((5,), math.nan).index_fill(0, torch.tensor([1, 3]), 2.0).requires_grad_()
    mask = torch.tensor([1, 1, 0, 1, 0])
    segments = TokenSegments.from_cu_seqlens(torch.tensor([0, 3, 3, 5]), mask)
    last = segments.last(x)
    assert last.tolist() == [2.0, 0.0, 2.0], "what stands elsewhere, NaN included, is not read"
    last.sum().backward()
    assert x.grad.tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("length_normalised", [False, True])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
@pytest.mark.parametrize("nll", [0.0, 0.7])
def test_direct_preference_equals_a_plain_loop(nll, loss, length_normalised, holes):
    beta = 0.3
    segments, draw = packed(holes)
    log_probs, reference = draw(), draw()
    result = PreferenceObjective(beta, loss, length_normalised, nll)(
        {"log_probs": log_probs}, {"ref_log_probs": reference}, segments
    )
    losses, margins = [], []
    differences = in_pairs(rows_of(segments, log_probs - reference))
    likely = in_pairs(rows_of(segments, log_probs))
    for (chosen, rejected), (said, _) in zip(differences, likely, strict=True):
        ratios = [sum(row) / (len(row) if length_normalised else 1) for row in (chosen, rejected)]
        h = ratios[0] - ratios[1]
        losses.append(-log_sigmoid(beta * h) if loss == "sigmoid" else (h - 0.5 / beta) ** 2)
        losses[-1] -= nll * sum(said) / len(said)
        margins.append(beta * h)
    assert weighted(result, segments) == pytest.approx(sum(losses) / 3, rel=1e-5)
    both = torch.tensor(losses).repeat_interleave(2)
    assert torch.allclose(result.loss, segments.spread(both), rtol=1e-5), "0 in the holes"
    assert result.metrics.keys() == {"pair_margin_by_row", "pair_accuracy_by_row"}
    found = result.metrics["pair_margin_by_row"].tolist()
    assert found == pytest.approx([margin for margin in margins for _ in range(2)], rel=1e-4)
    right = result.metrics["pair_accuracy_by_row"].tolist()
    assert right == [float(margin > 0) for margin in margins for _ in range(2)]
    assert {0.0, 1.0} == set(right)


@pytest.mark.parametrize("centre", [0.0, 0.2])
@pytest.mark.parametrize("with_margin", [False, True])
def test_bradley_terry_equals_a_plain_loop(with_margin, centre):
    segments, draw = packed(holes=True)
    values, margins = draw(), torch.tensor([0.5, 0.0, 2.0])
    # As the engine hands it over: on every token of both answers of a pair.
    column = margins.repeat_interleave(2)[segments.row]
    columns = {"margin": column} if with_margin else {}
    result = BradleyTerryObjective(centre)({"values": values}, columns, segments)
    scores = [row[-1] for row in rows_of(segments, values)]
    losses = [
        -log_sigmoid(chosen - rejected - (margin if with_margin else 0.0))
        + centre * (chosen + rejected) ** 2
        for (chosen, rejected), margin in zip(in_pairs(scores), margins.tolist(), strict=True)
    ]
    assert weighted(result, segments) == pytest.approx(sum(losses) / 3, rel=1e-5)
    gaps = [chosen - rejected for chosen, rejected in in_pairs(scores)]
    found = result.metrics["pair_margin_by_row"].tolist()
    assert found == pytest.approx([gap for gap in gaps for _ in range(2)], rel=1e-5)
    right = result.metrics["pair_accuracy_by_row"].tolist()
    assert right == [float(gap > 0) for gap in gaps for _ in range(2)]
    assert {0.0, 1.0} == set(right)


@pytest.mark.parametrize(
    ("objective", "output"),
    [(PreferenceObjective(), "log_probs"), (BradleyTerryObjective(0.1), "values")],
)
def test_the_gradient_is_that_of_the_mean_over_pairs(objective, output):
    segments, draw = packed()
    x, columns = draw().requires_grad_(), {"ref_log_probs": draw()}
    result = objective({output: x}, columns, segments)
    assert not any(metric.requires_grad for metric in result.metrics.values())
    weights = token_weights(segments.mask, MODE, segments=segments)
    (found,) = torch.autograd.grad((weights * result.loss).sum(), x)
    if output == "log_probs":
        rows = [row.sum() for row in (x - columns["ref_log_probs"]).split(LENGTHS)]
    else:
        rows = [row[-1] for row in x.split(LENGTHS)]
    loss = 0.0
    for chosen, rejected in in_pairs(rows):
        beta = 0.1 if output == "log_probs" else 1.0
        loss = loss - F.logsigmoid(beta * (chosen - rejected)) / 3
        if output == "values":
            loss = loss + 0.1 * (chosen + rejected) ** 2 / 3
    (expected,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found, expected)


def loss_without_reference(loss, log_probs, lengths, beta, margin, nll, is_mean):
    """The mean loss over pairs of SimPO, ORPO and CPO, and how far each chosen answer is ahead, by
    torch alone in double precision."""
    losses, margins, rows = [], [], log_probs.double().split(lengths)
    for chosen, rejected in in_pairs(rows):
        means = [row.mean() for row in (chosen, rejected)]
        if loss == "orpo":
            one, other = (x - torch.log(-torch.expm1(x)) for x in means)
            ahead = one - other
            losses.append(-means[0] - beta * F.logsigmoid(ahead))
        else:
            totals = means if loss == "simpo" or is_mean else [chosen.sum(), rejected.sum()]
            ahead = beta * (totals[0] - totals[1])
            losses.append(-F.logsigmoid(ahead - (margin if loss == "simpo" else 0.0)))
            losses[-1] = losses[-1] - nll * means[0]
        margins.append(float(ahead.detach()))
    return sum(losses) / len(losses), margins


def assert_without_reference(loss, log_probs, lengths, nll=0.0, is_mean=False):
    """Compare value, gradient and metrics of the objective with plain torch."""
    beta, margin = {"simpo": 2.0, "orpo": 0.4, "cpo": 0.3}[loss], 0.6
    segments = TokenSegments.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0))
    objective = PreferenceObjective(beta, loss, is_mean, nll, margin)
    assert objective.needs == (), "there is no reference to ask"
    x, y = (log_probs.clone().requires_grad_() for _ in range(2))
    result = objective({"log_probs": x}, {}, segments)
    weights = token_weights(segments.mask, MODE, segments=segments)
    found = (weights * result.loss).sum()
    expected, margins = loss_without_reference(loss, y, lengths, beta, margin, nll, is_mean)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-7)
    gradients = [torch.autograd.grad(value, of)[0] for value, of in ((found, x), (expected, y))]
    assert gradients[0].isfinite().all()
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
    by_row = [margin for margin in margins for _ in range(2)]
    ahead = result.metrics["pair_margin_by_row"].tolist()
    assert ahead == pytest.approx(by_row, rel=1e-4, abs=1e-5)
    assert result.metrics["pair_accuracy_by_row"].tolist() == [float(x > 0) for x in ahead]


@pytest.mark.parametrize("nll", [0.0, 0.7])
@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, [1, 1], [7, 1, 1, 31], []], ids=str)
@pytest.mark.parametrize("loss", ["simpo", "orpo", "cpo"])
def test_losses_without_a_reference_equal_plain_torch(loss, lengths, is_mean, nll):
    generator = torch.Generator().manual_seed(7)
    if not lengths:
        nothing, segments = torch.zeros(0), TokenSegments.from_cu_seqlens(torch.zeros(1).long())
        assert not PreferenceObjective(loss=loss)({"log_probs": nothing}, {}, segments).loss.numel()
        return
    log_probs = -torch.rand(sum(lengths), generator=generator) * 3 - 0.01
    assert_without_reference(loss, log_probs, lengths, nll, is_mean)


# Mean log-probabilities of a chosen and a rejected answer.
EXTREMES = [(-1e-8, -1e-8), (-1e-8, -50.0), (-50.0, -1e-8), (-0.5, -1e-6), (-90.0, -110.0)]


@pytest.mark.parametrize("ends", EXTREMES, ids=str)
@pytest.mark.parametrize("loss", ["simpo", "orpo", "cpo"])
def test_extreme_probabilities_equal_plain_torch(loss, ends):
    lengths = [3, 2]
    log_probs = torch.tensor(ends).repeat_interleave(torch.tensor(lengths))
    assert_without_reference(loss, log_probs, lengths)


def test_the_odds_of_a_certain_answer_are_finite():
    segments = TokenSegments.from_cu_seqlens(torch.tensor([0, 2, 3]))
    for log_probs in ([0.0, 0.0, 0.0], [0.0, 0.0, -1.0], [-1.0, -1.0, 0.0]):
        x = torch.tensor(log_probs, requires_grad=True)
        result = PreferenceObjective(loss="orpo")({"log_probs": x}, {}, segments)
        (gradient,) = torch.autograd.grad(result.loss.sum(), x)
        assert result.loss.isfinite().all() and gradient.isfinite().all()
        assert all(metric.isfinite().all() for metric in result.metrics.values())


def test_an_unknown_preference_loss_is_a_sentence():
    with pytest.raises(ConfigError, match=r"`preference\.loss` is `sigmod`.*`sigmoid`\?"):
        PreferenceObjective(loss="sigmod")


class Here(Batch):
    """A batch that is where the driver is."""

    def select(self, *columns):
        return Here(super().select(columns).table)

    def apply(self, function, columns):
        return Here(function(self.select(*columns)).table)

    def collect(self):
        return self

    def __or__(self, other):
        return Here(super().__or__(other).table)


@pytest.mark.parametrize(("is_mean", "margin"), [(False, 0.5 * (2 - 3)), (True, 0.5 * (1 - 0.75))])
def test_pairs_are_evaluated_by_the_reward_that_is_trained(is_mean, margin):
    def scores(name, rows):
        values = [torch.tensor(row) for row in rows]
        return lambda batch: Here(Batch.from_columns({name: values}).table)

    # The chosen response: two tokens to learn between one of a tool; the rejected one: four.
    masks = [torch.tensor([1, 0, 1], dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)]
    ids = [torch.ones(n, dtype=torch.int64) for n in (3, 4)]
    pair = {"prompt_ids": ids, "response_ids": ids, "response_mask": masks}
    policy = scores("log_probs", [[-1.0, 9.0, -1.0], [-1.0, -1.0, -1.0, -1.0]])
    reference = scores("ref_log_probs", [[-2.0, 0.0, -2.0], [-2.0, -2.0, -2.0, -1.0]])
    config = configured(["algorithm=dpo", f"preference.length_normalised={is_mean}"])
    config.preference.beta = 0.5
    trainer = SimpleNamespace(
        config=config,
        groups={
            "actor": SimpleNamespace(compute_log_prob=policy),
            "reference": SimpleNamespace(compute_ref_log_prob=reference),
        },
    )
    found = dpo.Trainer.evaluate(trainer, Here(Batch.from_columns(pair).table))
    assert found["eval/pair_margin"] == pytest.approx(margin)
    assert found["eval/pair_accuracy"] == float(margin > 0)
    del trainer.groups["reference"]
    odds = -1.0 - math.log(1 - math.exp(-1.0))
    for loss, ahead in (("simpo", 0.0), ("orpo", odds - odds), ("cpo", 0.5 * (-2 + 4))):
        config.preference.loss, config.preference.length_normalised = loss, False
        found = dpo.Trainer.evaluate(trainer, Here(Batch.from_columns(pair).table))
        assert found["eval/pair_margin"] == pytest.approx(ahead), loss


@pytest.mark.parametrize("loss", ["simpo", "orpo", "cpo"])
def test_a_job_without_a_reference_has_no_such_role(loss):
    for job in (
        ["algorithm=dpo"],
        ["algorithm=online_dpo"],
        ["algorithm=dpo", "actor.lora.rank=2"],
    ):
        roles = load_roles(configured([*job, f"preference.loss={loss}"]))
        assert "reference" in load_roles(configured(job)) and "reference" not in roles
        config = configured([*job, f"preference.loss={loss}", "models.reference.path=other"])
        with pytest.raises(ConfigError, match=r"models\.reference is set, .* no role `reference`"):
            check_roles(config)
    config = configured(["algorithm=dpo", f"preference.loss={loss}", "cache.use=[log_probs]"])
    (said,) = find_ineffective_caches(config, load_roles(config))
    assert said.startswith("cache.use=[log_probs]: log_probs does nothing in this job")
    config.preference.loss = "ipo"
    assert not find_ineffective_caches(config, load_roles(config))


@pytest.mark.parametrize(
    ("setting", "losses"),
    [
        ("margin=2.0", {"simpo"}),
        ("length_normalised=true", {"sigmoid", "ipo", "cpo"}),
        ("nll_coefficient=0.5", {"sigmoid", "ipo", "simpo", "cpo"}),
    ],
)
def test_a_setting_that_a_loss_does_not_read_is_told(setting, losses):
    silent = set()
    for loss in PREFERENCE_LOSSES:
        chosen = [f"preference.loss={loss}", f"preference.{setting}"]
        said = find_ineffective_settings(configured(["algorithm=dpo", *chosen]))
        silent |= set() if any("preference." in one for one in said) else {loss}
    assert silent == losses


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("kl", [0.0, 0.8])
def test_labels_are_learned_as_in_a_plain_loop(kl, holes):
    segments, draw = packed(holes)
    x, reference, labels = draw().requires_grad_(), draw(), [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    beta, good, bad = 0.3, 1.5, 0.7
    objective = UnpairedPreferenceObjective(beta, good, bad)
    columns = {"ref_log_probs": reference, "label": torch.tensor(labels)[segments.row]}
    columns["kl"] = torch.full_like(reference, kl)
    result = objective({"log_probs": x}, columns, segments)
    weights = token_weights(segments.mask, MODE, segments=segments)
    (found,) = torch.autograd.grad((weights * result.loss).sum(), x)
    y, loss, right = x.detach().clone().requires_grad_(), 0.0, []
    for row, label in enumerate(labels):
        of = (segments.row == row) & segments.mask
        gap = (y - reference)[of].sum()
        ahead = gap - kl if label else kl - gap
        loss = loss + (good if label else bad) * (1 - torch.sigmoid(beta * ahead)) / len(labels)
        right.append(float(ahead > 0))
    (expected,) = torch.autograd.grad(loss, y)
    assert weighted(result, segments) == pytest.approx(float(loss), rel=1e-5)
    torch.testing.assert_close(found, expected)
    assert result.metrics["label_accuracy_by_row"].tolist() == right and {0.0, 1.0} == set(right)
    torch.testing.assert_close(result.metrics["label_kl_by_row"], torch.full((6,), kl))


def test_the_divergence_of_a_step_is_a_mean_over_its_rows_and_not_negative():
    ids = [torch.ones(n, dtype=torch.uint8) for n in (2, 1)]
    for gaps, expected in (([1.0, 2.0, 6.0], 4.5), ([-1.0, -2.0, 1.0], 0.0)):
        policy = [torch.tensor(gaps[:2]) - 1, torch.tensor(gaps[2:]) - 1]
        columns = {"log_probs": policy, "ref_log_probs": [-x for x in map(torch.ones_like, policy)]}
        found = kto.estimate_divergence(Batch.from_columns({**columns, "response_mask": ids}))
        assert found["kl"].tolist() == [expected, expected]


@pytest.mark.parametrize(
    ("prompts", "own"),
    [("abcd", 0), ("aabbcc", 0), ("abab", 0), ("aabcb", 0), ("abacaa", 2), ("aa", 2), ("", 0)],
)
def test_a_prompt_gets_a_response_to_another_one_where_there_is_one(prompts, own):
    """With pairs in the order of the file, neighbours have the same prompt."""
    prompt_ids = ragged([[ord(prompt)] for prompt in prompts], np.int64)
    response_ids = ragged([[n] for n in range(len(prompts))], np.int64)
    columns = {"prompt_ids": prompt_ids, "response_ids": response_ids}
    found = kto.swap_responses(Batch.from_columns({**columns, "response_mask": response_ids}))
    sources = found.ragged("response_ids").values.tolist()
    assert sorted(sources) == list(range(len(prompts)))
    assert found.ragged("prompt_ids").values.tolist() == prompt_ids.values.tolist()
    assert sum(prompts[n] == prompts[of] for n, of in enumerate(sources)) == own
    if prompts == "abcd":
        assert sources == [3, 0, 1, 2]


def test_figures_of_labels():
    rewards, labels = torch.tensor([1.0, 2.0, 2.0, 5.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    found = compute_label_metrics(rewards, labels)
    assert found == {"eval/label_accuracy": 3.5 / 4, "eval/label_margin": 2.0}
    assert math.isnan(compute_label_metrics(rewards, torch.ones(4))["eval/label_accuracy"])

"""KL estimators and the controllers of their coefficient."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from settings import configured

from hybridrl.algorithms import AdaptiveKLController, FixedKLController, estimate_kl
from hybridrl.algorithms.kl_divergence import REWARD_KL_ESTIMATOR
from hybridrl.config.setting_types import find_invalid_values
from hybridrl.errors import ConfigError
from hybridrl.trainers import load_trainer
from hybridrl.trainers.policy_trainer import KLCoefficient, list_kl_notices

FORMULAS = {
    "k1": lambda x: x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: min(math.exp(-min(max(x, -20), 20)) + min(max(x, -20), 20) - 1, 10.0),
    "abs": abs,
}
ESTIMATORS = [*FORMULAS, *(f"{name}+" for name in FORMULAS)]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(xs=st.lists(st.floats(-50, 50), min_size=1, max_size=8))
def test_values_equal_the_formulas_and_plus_changes_the_gradient_only(estimator, xs):
    ref = torch.full((len(xs),), -1.5, dtype=torch.float64, requires_grad=True)
    log_probs = (torch.tensor(xs, dtype=torch.float64) - 1.5).requires_grad_()
    x = (log_probs - ref).detach()
    value = estimate_kl(log_probs, ref, estimator)
    name = estimator.removesuffix("+")
    expected = torch.tensor([FORMULAS[name](v) for v in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-12)
    value.sum().backward()
    assert ref.grad is None
    if estimator.endswith("+"):
        torch.testing.assert_close(log_probs.grad, x)
    elif name == "k3":
        inside = (x.abs() < 20) & (expected < 10)
        slope = 1 - torch.exp(-x)
        torch.testing.assert_close(log_probs.grad[inside], slope[inside])
        assert (log_probs.grad[(x.abs() > 20) | (expected >= 10)] == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_off_the_mask_value_and_gradient_are_zero(estimator):
    mask = torch.tensor([[1, 0, 0, 0]])
    log_probs = torch.tensor([[-1.0, math.nan, -math.inf, 1e30]], requires_grad=True)
    value = estimate_kl(
        log_probs, torch.tensor([[-2.0, 0.0, -math.inf, math.nan]]), estimator, mask=mask
    )
    value.sum().backward()
    assert (value[0, 1:] == 0).all() and value[0, 0] != 0
    assert (log_probs.grad[0, 1:] == 0).all() and torch.isfinite(log_probs.grad).all()


def test_k3_keeps_small_divergences_in_float32():
    # 2^-14: exact in float32, where exp(-x) - 1 + x would be off by more than its value.
    x = torch.tensor([2.0**-14])
    assert estimate_kl(x, torch.zeros(1), "k3").item() == pytest.approx(2.0**-29, rel=1e-2)


def test_dtype_and_names():
    x = torch.zeros(2, dtype=torch.bfloat16)
    assert estimate_kl(x, x, "k1").dtype == torch.float32
    assert estimate_kl(x.double(), x, "k3+").dtype == torch.float64
    with pytest.raises(ConfigError, match="Did you mean"):
        estimate_kl(x, x, "k4")


def sampled_gradient(estimator, spread):
    """Of a softmax policy near its reference: the exact gradient of the KL, and the exact expected
    gradient of REINFORCE with this estimator as a cost."""
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(50, generator=generator, dtype=torch.float64)
    moved = reference + spread * torch.randn(50, generator=generator, dtype=torch.float64)
    logits = moved.clone().requires_grad_()
    log_probs, ref = logits.log_softmax(-1), reference.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_probs.exp() * (log_probs - ref)).sum(), logits)
    logits = moved.clone().requires_grad_()
    log_probs = logits.log_softmax(-1)
    cost = estimate_kl(log_probs.detach(), ref, estimator)
    (found,) = torch.autograd.grad((log_probs.exp().detach() * cost * log_probs).sum(), logits)
    return exact, found


@pytest.mark.parametrize("spread", [0.03, 0.1, 0.3])
def test_in_the_reward_only_k1_has_the_gradient_of_the_divergence(spread):
    exact, found = sampled_gradient(REWARD_KL_ESTIMATOR, spread)
    torch.testing.assert_close(found, exact)
    for estimator in ("k2", "k3"):
        exact, found = sampled_gradient(estimator, spread)
        assert float(found.norm() / exact.norm()) < 0.25


class Update:
    """A call whose metrics may be asked for, or not yet."""

    def __init__(self, kl=None):
        self.kl = kl

    def get(self):
        assert self.kl is not None, "nobody may wait for this"
        return {"kl": self.kl}


def test_a_fixed_coefficient_waits_for_no_update():
    kl_of_run = KLCoefficient(configured(["algorithm.kl_coefficient=0.1"]))
    update = Update()
    assert kl_of_run.watch(update) is update
    assert kl_of_run.update() == 0.1 and kl_of_run.state() == {}


ADAPTIVE = [
    *("algorithm=ppo", "algorithm.kl_in_reward=true", "algorithm.kl_coefficient=0.1"),
    *("algorithm.kl_target=0.1", "algorithm.kl_horizon=10240"),
]


def test_an_adaptive_coefficient_goes_on_in_a_later_job():
    begun, whole, later = (KLCoefficient(configured(ADAPTIVE)) for _ in range(3))
    for each in (begun, whole):
        each.watch(Update(kl=0.11))
        each.watch(Update(kl=0.13))
    later.load_state(json.loads(json.dumps(begun.state())))
    assert later.update() == whole.update() == pytest.approx(0.1 * (1 + 0.2 * 0.1))


def test_another_estimator_in_the_reward_is_a_notice():
    kl_in_reward = ["algorithm.kl_in_reward=true", "algorithm.kl_coefficient=0.1"]
    for estimator in ("k2", "k3", "abs", "k3+"):
        config = configured([*kl_in_reward, f"algorithm.kl_estimator={estimator}"])
        assert f"algorithm.kl_estimator={estimator} " in list_kl_notices(config)[0]
    for silent in (
        kl_in_reward,
        [*kl_in_reward, "algorithm.kl_estimator=k1"],
        ["algorithm.kl_estimator=k3"],
    ):
        assert list_kl_notices(configured(silent)) == []


def make_trainer(overrides):
    config = configured(overrides)
    return load_trainer(config.trainer.name)(config, {}, None, None)


def test_controllers():
    fixed = FixedKLController(0.1)
    fixed.update(5.0, steps=100)
    assert fixed.coefficient == 0.1

    adaptive = AdaptiveKLController(initial=0.2, target=6.0, horizon=1000)
    adaptive.update(6.6, steps=100)
    assert adaptive.coefficient == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    adaptive.coefficient = 1.0
    adaptive.update(torch.tensor(1e9), steps=100)
    assert adaptive.coefficient == pytest.approx(1.02)
    adaptive.coefficient = 1.0
    adaptive.update(0.0, steps=100)
    assert adaptive.coefficient == pytest.approx(0.98)
    adaptive.update(math.nan, steps=100)
    assert adaptive.coefficient == pytest.approx(0.98)


def test_controllers_refuse_what_cannot_work():
    with pytest.raises(ConfigError, match="target"):
        AdaptiveKLController(0.1, target=0.0, horizon=10)
    with pytest.raises(ConfigError, match="horizon"):
        AdaptiveKLController(0.1, target=1.0, horizon=0)
    with pytest.raises(ConfigError, match="Raise it"):
        AdaptiveKLController(0.1, target=1.0, horizon=10).update(0.5, steps=50)


def test_a_target_for_whole_responses_is_refused():
    wrong = dict(find_invalid_values(configured(["algorithm.kl_target=6"])))
    assert "It is in nats per token" in wrong["algorithm.kl_target"]
    assert not dict(find_invalid_values(configured(["algorithm.kl_target=1"])))

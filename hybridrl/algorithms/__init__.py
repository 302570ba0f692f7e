"""The algorithms as pure functions of tensors: they know nothing of ranks, engines or models.

Tensors come first and by position, options by keyword. ``[rows, time]`` tensors hold response
tokens, left-aligned; a mask is 1 on the tokens the policy chose and may have holes. Results are
exactly 0 off the mask, computed in float32 at least, and no argument is changed.
"""

from hybridrl.algorithms.advantages import (
    gae,
    reinforce_plus_plus,
    remax,
    returns_to_go,
    spread,
)
from hybridrl.algorithms.corrections import importance_weights
from hybridrl.algorithms.credit import least_of, part_advantages, part_numbers, rewards_at
from hybridrl.algorithms.distillation_loss import Distillation
from hybridrl.algorithms.group_advantages import (
    group_relative,
    keep_informative,
    leave_one_out,
    optimal_reward_baseline,
    pass_at_k,
    reinforce_plus_plus_baseline,
)
from hybridrl.algorithms.kl import AdaptiveKL, FixedKL, kl
from hybridrl.algorithms.lagrange import LagrangeMultiplier
from hybridrl.algorithms.loss_weights import token_weights
from hybridrl.algorithms.packed_turns import Turns
from hybridrl.algorithms.policy_losses import cispo, ppo_clip, reinforce, sapo
from hybridrl.algorithms.policy_objective import PolicyObjective
from hybridrl.algorithms.preference_losses import BradleyTerry, DirectPreference
from hybridrl.algorithms.reward_terms import overlong_penalty, shape_rewards, shorter_reward
from hybridrl.algorithms.segments import Segments, divide_by_std, masked_mean, masked_var, whiten
from hybridrl.algorithms.sequence_losses import gmpo, gspo
from hybridrl.algorithms.token_loss import TokenLoss, negative_log_likelihood, value_loss

__all__ = [
    "AdaptiveKL",
    "BradleyTerry",
    "DirectPreference",
    "Distillation",
    "FixedKL",
    "LagrangeMultiplier",
    "PolicyObjective",
    "Segments",
    "TokenLoss",
    "Turns",
    "cispo",
    "divide_by_std",
    "gae",
    "gmpo",
    "group_relative",
    "gspo",
    "importance_weights",
    "keep_informative",
    "kl",
    "least_of",
    "leave_one_out",
    "masked_mean",
    "masked_var",
    "negative_log_likelihood",
    "optimal_reward_baseline",
    "overlong_penalty",
    "part_advantages",
    "part_numbers",
    "pass_at_k",
    "ppo_clip",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "returns_to_go",
    "rewards_at",
    "sapo",
    "shape_rewards",
    "shorter_reward",
    "spread",
    "token_weights",
    "value_loss",
    "whiten",
]

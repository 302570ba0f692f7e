"""The algorithms as pure functions of tensors: they know nothing of ranks, engines or models.

Tensors come first and by position, options by keyword. ``[rows, time]`` tensors hold response
tokens, left-aligned; a mask is 1 on the tokens the policy chose and may have holes. Results are
exactly 0 off the mask, computed in float32 at least, and no argument is changed.
"""

from hybridrl.algorithms.advantages import (
    broadcast_to_tokens,
    gae,
    reinforce_plus_plus,
    remax,
    returns_to_go,
)
from hybridrl.algorithms.credit import (
    min_form_rewards,
    part_advantages,
    part_numbers,
    place_part_rewards,
)
from hybridrl.algorithms.distillation_loss import DistillationObjective, sum_over_chunks
from hybridrl.algorithms.group_advantages import (
    find_informative_rows,
    gdpo,
    group_relative,
    leave_one_out,
    maximum_likelihood,
    optimal_reward_baseline,
    pass_at_k,
    reinforce_plus_plus_baseline,
)
from hybridrl.algorithms.importance_correction import importance_weights, mask_far_negatives
from hybridrl.algorithms.kl_divergence import AdaptiveKLController, FixedKLController, estimate_kl
from hybridrl.algorithms.lagrange import LagrangeMultiplier
from hybridrl.algorithms.packed_turns import PackedTurns
from hybridrl.algorithms.policy_losses import cispo, ppo_clip, reinforce, sapo
from hybridrl.algorithms.policy_objective import PolicyObjective
from hybridrl.algorithms.preference_losses import BradleyTerryObjective, PreferenceObjective
from hybridrl.algorithms.reward_terms import overlong_penalty, relative_length_reward, shape_rewards
from hybridrl.algorithms.segments import (
    TokenSegments,
    divide_by_std,
    masked_mean,
    masked_var,
    whiten,
)
from hybridrl.algorithms.sequence_losses import gmpo, gspo, vespo
from hybridrl.algorithms.token_loss import TokenLoss, negative_log_likelihood, value_loss
from hybridrl.algorithms.token_weighting import token_weights
from hybridrl.algorithms.trust_region_losses import dppo_kl, dppo_tv
from hybridrl.algorithms.unpaired_preference import UnpairedPreferenceObjective

__all__ = [
    "AdaptiveKLController",
    "BradleyTerryObjective",
    "DistillationObjective",
    "FixedKLController",
    "LagrangeMultiplier",
    "PackedTurns",
    "PolicyObjective",
    "PreferenceObjective",
    "TokenLoss",
    "TokenSegments",
    "UnpairedPreferenceObjective",
    "broadcast_to_tokens",
    "cispo",
    "divide_by_std",
    "dppo_kl",
    "dppo_tv",
    "estimate_kl",
    "find_informative_rows",
    "gae",
    "gdpo",
    "gmpo",
    "group_relative",
    "gspo",
    "importance_weights",
    "leave_one_out",
    "mask_far_negatives",
    "masked_mean",
    "masked_var",
    "maximum_likelihood",
    "min_form_rewards",
    "negative_log_likelihood",
    "optimal_reward_baseline",
    "overlong_penalty",
    "part_advantages",
    "part_numbers",
    "pass_at_k",
    "place_part_rewards",
    "ppo_clip",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "relative_length_reward",
    "remax",
    "returns_to_go",
    "sapo",
    "shape_rewards",
    "sum_over_chunks",
    "token_weights",
    "value_loss",
    "vespo",
    "whiten",
]

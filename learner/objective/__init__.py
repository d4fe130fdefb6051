"""The objective: pure functions from log-probs, rewards and masks to a loss and its diagnostics.

In flows a `PolicyBatch` and an `ObjectiveSpec`, out flow a scalar that carries gradient and a `Diagnostics` of floats.
Knows nothing of models, files, processes or configuration.
"""

from .advantage import (
    advantages,
    group_mean,
    group_std,
    leave_one_out,
    shaped_rewards,
    token_penalties,
    weighted_charge,
    zero_signal,
)
from .diagnostics import diagnose
from .importance import correct, importance_weights
from .kl import k1, k2, k3, token_kl
from .loss import normalizer, policy_loss, token_losses
from .ratios import effective_sample_share, learning_rate_scale, log_ratios, log_weights, sequence_log_ratios
from .segments import sum_after, sum_before, sum_from, sum_segments, sum_through
from .spec import ObjectiveSpec
from .strength import adaptive_beta, linear_beta
from .types import Diagnostics, PolicyBatch, concatenate

__all__ = [
    "Diagnostics",
    "ObjectiveSpec",
    "PolicyBatch",
    "adaptive_beta",
    "advantages",
    "concatenate",
    "correct",
    "diagnose",
    "effective_sample_share",
    "group_mean",
    "group_std",
    "importance_weights",
    "k1",
    "k2",
    "k3",
    "learning_rate_scale",
    "leave_one_out",
    "linear_beta",
    "log_ratios",
    "log_weights",
    "normalizer",
    "policy_loss",
    "sequence_log_ratios",
    "shaped_rewards",
    "sum_after",
    "sum_before",
    "sum_from",
    "sum_segments",
    "sum_through",
    "token_kl",
    "token_losses",
    "token_penalties",
    "weighted_charge",
    "zero_signal",
]

"""The objective: pure functions from log-probs, rewards and masks to a loss and its diagnostics.

In flows a `PolicyBatch` and an `ObjectiveSpec`, out flow a scalar that carries gradient and a `Diagnostics` of floats.
Knows nothing of models, files, processes or configuration.
"""

from .advantage import advantages, leave_one_out, shaped_rewards, token_penalties, zero_signal
from .diagnostics import diagnose
from .importance import importance_weights, log_ratios, sequence_log_ratios
from .kl import k1, k3
from .loss import policy_loss, token_losses
from .types import Diagnostics, ObjectiveSpec, PolicyBatch, concatenate, sum_before, sum_segments

__all__ = [
    "Diagnostics",
    "ObjectiveSpec",
    "PolicyBatch",
    "advantages",
    "concatenate",
    "diagnose",
    "importance_weights",
    "k1",
    "k3",
    "leave_one_out",
    "log_ratios",
    "policy_loss",
    "sequence_log_ratios",
    "shaped_rewards",
    "sum_before",
    "sum_segments",
    "token_losses",
    "token_penalties",
    "zero_signal",
]

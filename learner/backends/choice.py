"""The backend that a configuration names."""

from __future__ import annotations

from counterflow.configs.schema import RunConfig
from counterflow.learner.backends.base import Backend
from counterflow.learner.backends.deepspeed_backend import DeepSpeedBackend
from counterflow.learner.backends.torch_backend import TorchBackend
from counterflow.learner.policy import Policy


def open_backend(policy: Policy, config: RunConfig) -> Backend:
    """Wrap a policy, in place, for the ranks of the default process group; for one rank none is needed.

    Raises:
        ConfigError: the backend is not installed.
    """
    learner, moves = config.learner, config.objective.kl.reference_every > 0
    if learner.ranks == 1:
        return TorchBackend(policy, learner, "alone", moves)
    if learner.backend in ("ddp", "fsdp2"):
        return TorchBackend(policy, learner, learner.backend, moves)
    return DeepSpeedBackend(policy, learner, int(learner.backend.removeprefix("zero")))

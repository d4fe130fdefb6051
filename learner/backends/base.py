"""What every backend does: forward, backward, a step, and the weights for those who serve them.

Microbatches flow in, log-probs and whole weights flow out; gradients stay inside. Every call but `begin` is made by all
ranks together, and each makes the same number of them, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from counterflow.learner.batch import Microbatch
from counterflow.learner.logprobs import Projection
from counterflow.learner.policy import Policy, Scores


class Backend(Protocol):
    """One rank's end of the training of one policy. Gradients are summed over microbatches and over ranks."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    """Of this rank; what it holds is the backend's own affair, but that it is empty before the first step."""
    skips: bool
    """Whether a step with a gradient that is not finite changes nothing."""

    def begin(self, first: bool, last: bool) -> None:
        """The forward that follows is of the update's first microbatch, where gradients start from nothing, or of its
        last, after which they are those of all ranks."""

    def forward_logprobs(self, batch: Microbatch, frozen: Projection | None = None) -> Scores:
        """Scores of the batch's targets under the current policy; with the reference's states divergences too."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss of the last forward."""

    def step(self, learning_rate: float, max_norm: float) -> float:
        """Clip, and update if the gradient is finite (see `skips`); returns its norm before clipping."""

    def gather_bucket(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights, whole, under their names, each gathered when it is asked for; tied ones once."""

    def renew_reference(self) -> None:
        """Make the reference a copy of the policy."""

    def state(self) -> dict[str, Any]:
        """`model` and `optimizer`: whole weights and moments by parameter name, on rank 0; empty ones on others.

        `reference` too, where it moves.
        """

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what any number of ranks said of themselves; only rank 0 must have it."""

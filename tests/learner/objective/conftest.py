"""A toy whose every expectation can be written out: tabular autoregressive policies over V symbols and T tokens.

All V^T sequences are one batch; weighting each sequence's token losses by mu(y) turns the production loss into its
own expectation. Fixtures hand out the classes, so that test modules need not import one another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from counterflow.learner.objective import ObjectiveSpec, PolicyBatch, token_losses


@dataclass(frozen=True)
class Toy:
    """Policies pi, ref and mu as logits [contexts, V]; contexts are prefixes, shorter first, then lexicographic."""

    vocabulary: int
    length: int
    pi: Tensor
    ref: Tensor
    mu: Tensor

    @property
    def responses(self) -> list[tuple[int, ...]]:
        """All V^T sequences, lexicographic."""
        return list(itertools.product(range(self.vocabulary), repeat=self.length))

    def logprobs(self, logits: Tensor) -> Tensor:
        """Log-probs of every token of every sequence: float64 [V^T, T]."""
        prefixes = [c for t in range(self.length) for c in itertools.product(range(self.vocabulary), repeat=t)]
        row = {prefix: number for number, prefix in enumerate(prefixes)}
        rows = torch.tensor([[row[y[:t]] for t in range(self.length)] for y in self.responses])
        symbols = torch.tensor(self.responses)
        return torch.log_softmax(logits, dim=-1)[rows, symbols]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probability of every sequence: float64 [V^T]."""
        return self.logprobs(logits).sum(1).exp()

    def batch(self, theta: Tensor, choice: Tensor, group: Tensor, rewards: Tensor) -> PolicyBatch:
        """The sequences `choice` int64 [n] (indices of `responses`), every token masked in; theta carries gradient."""

        def flat(logits: Tensor) -> Tensor:
            return self.logprobs(logits)[choice].flatten()

        return PolicyBatch(
            logprobs=flat(theta),
            behavior_logprobs=flat(self.mu),
            reference_logprobs=flat(self.ref),
            proximal_logprobs=None,
            loss_mask=torch.ones(len(choice) * self.length, dtype=torch.bool),
            sequence=torch.arange(len(choice)).repeat_interleave(self.length),
            rewards=rewards[choice],
            group=group,
        )

    def expected_gradient(
        self, spec: ObjectiveSpec, rewards: Tensor, advantage: Callable[[PolicyBatch], Tensor]
    ) -> Tensor:
        """E_mu[grad of a sequence's loss], float64 [contexts, V], with an advantage from outside."""
        theta = self.pi.clone().requires_grad_()
        everything = torch.arange(len(self.responses))
        batch = self.batch(theta, everything, everything, rewards)
        losses = token_losses(batch, spec, advantage(batch))
        (losses * self.probabilities(self.mu)[batch.sequence]).sum().backward()
        assert theta.grad is not None
        return theta.grad

    def true_gradient(self, beta: float, rewards: Tensor) -> Tensor:
        """grad of E_pi[R] - beta KL(pi || ref), by autograd through the enumeration: float64 [contexts, V]."""
        theta = self.pi.clone().requires_grad_()
        log_pi, log_ref = self.logprobs(theta).sum(1), self.logprobs(self.ref).sum(1)
        (log_pi.exp() * (rewards - beta * (log_pi - log_ref))).sum().backward()
        assert theta.grad is not None
        return theta.grad


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_toy() -> Callable[..., Toy]:
    """Random policies: `make_toy(vocabulary, length, seed)`."""

    def make(vocabulary: int, length: int, seed: int = 0) -> Toy:
        contexts = sum(vocabulary**t for t in range(length))
        draw = np.random.default_rng(seed).normal(size=(3, contexts, vocabulary))
        pi, ref, mu = torch.from_numpy(draw)
        return Toy(vocabulary, length, pi, ref, pi + 0.5 * mu)

    return make


@pytest.fixture
def golden_toy() -> Toy:
    """The chain of kl_v2t2.json: column 1 of a gradient is the gradient in its three logits."""

    def logits(ones: list[float]) -> Tensor:
        p = torch.tensor(ones, dtype=torch.float64)
        return torch.stack([torch.zeros_like(p), torch.logit(p)], dim=1)

    return Toy(2, 2, logits([0.6, 0.3, 0.8]), logits([0.5, 0.5, 0.6]), logits([0.45, 0.4, 0.7]))

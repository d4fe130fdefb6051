"""Policies small enough to write out: logits for every context over V symbols and at most T tokens.

All sequences there are, as one batch, with their probabilities; and the vector fields that the catalogue names, by
differentiating sums over all sequences. Knows the loss only through `PolicyBatch`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .types import PolicyBatch


def contexts(vocabulary: int, length: int) -> int:
    """Number of prefixes shorter than `length`."""
    return sum(vocabulary**t for t in range(length))


@dataclass(frozen=True)
class Tables:
    """pi, mu and ref as float64 logits [contexts, V]; contexts are prefixes, shorter first, then lexicographic."""

    vocabulary: int
    length: int
    pi: Tensor
    mu: Tensor
    ref: Tensor
    eos: int | None = None
    """The symbol that ends a sequence before `length`; None: all sequences are `length` long."""

    def __post_init__(self) -> None:
        shape = (contexts(self.vocabulary, self.length), self.vocabulary)
        for name in ("pi", "mu", "ref"):
            if tuple(getattr(self, name).shape) != shape:
                raise ValueError(
                    f"{name} has shape {list(getattr(self, name).shape)}; vocabulary {self.vocabulary} and length "
                    f"{self.length} need {list(shape)}: one row of logits a context, shorter first, then lexicographic"
                )

    @cached_property
    def responses(self) -> list[tuple[int, ...]]:
        """All sequences, lexicographic, shorter first where one ends early."""
        every = itertools.product(range(self.vocabulary), repeat=self.length)
        if self.eos is None:
            return list(every)
        ended = {y[: y.index(self.eos) + 1] if self.eos in y else y for y in every}
        return sorted(ended, key=lambda y: (len(y), y))

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each token of all responses: its context's row, its symbol, its sequence: int64 [tokens] each."""
        rows, symbols, owners = [], [], []
        for number, response in enumerate(self.responses):
            place = 0
            for at, symbol in enumerate(response):
                rows.append(contexts(self.vocabulary, at) + place)
                symbols.append(symbol)
                owners.append(number)
                place = place * self.vocabulary + symbol
        return torch.tensor(rows), torch.tensor(symbols), torch.tensor(owners)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Of every token of every sequence: float64 [tokens]."""
        rows, symbols, _ = self.places
        return torch.log_softmax(logits, dim=-1)[rows, symbols]

    def divergences(self, logits: Tensor) -> Tensor:
        """KL(policy || ref) of each token's context: float64 [tokens]."""
        return self.state_kl(logits, self.ref)[self.places[0]]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of every sequence: float64 [sequences]."""
        logprobs = self.logprobs(logits)
        return logprobs.new_zeros(len(self.responses)).index_add(0, self.places[2], logprobs).exp()

    @staticmethod
    def state_kl(of: Tensor, against: Tensor) -> Tensor:
        """KL between two policies at each context: float64 [contexts]."""
        log_of, log_against = torch.log_softmax(of, -1), torch.log_softmax(against, -1)
        return (log_of.exp() * (log_of - log_against)).sum(-1)

    def batch(
        self, logprobs: Tensor, behavior: Tensor, divergences: Tensor | None = None, rewards: Tensor | None = None
    ) -> PolicyBatch:
        """All sequences once, each a group of its own: `logprobs` float64 [tokens] of pi, `behavior` logits of mu."""
        count = len(self.responses)
        return PolicyBatch(
            logprobs=logprobs,
            behavior_logprobs=self.logprobs(behavior),
            reference_logprobs=self.logprobs(self.ref),
            proximal_logprobs=logprobs.detach(),
            loss_mask=torch.ones(logprobs.shape[0], dtype=torch.bool),
            sequence=self.places[2],
            rewards=torch.zeros(count, dtype=torch.float64) if rewards is None else rewards,
            group=torch.arange(count),
            reference_divergence=divergences,
        )

    def fields(self) -> dict[str, Tensor]:
        """The named vector fields at pi: G, R_pi, R_mu, F_pi, F_mu, S_pi, K_mu_pi, float64 [contexts, V]."""

        def gradient(value: Callable[[Tensor], Tensor]) -> Tensor:
            theta = self.pi.detach().clone().requires_grad_()
            (found,) = torch.autograd.grad(value(theta), theta)
            return found

        rows, _, owners = self.places
        ref, mu = self.logprobs(self.ref), self.logprobs(self.mu)

        def visits(policy: Tensor) -> Tensor:
            return self.probabilities(policy)[owners]

        def total(policy: Tensor, values: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda theta: (visits(theta if policy is self.pi else policy) * values(theta)).sum()

        def at_states(policy: Tensor, forward: bool) -> Callable[[Tensor], Tensor]:
            weight = visits(policy)
            return lambda theta: (
                weight * (self.state_kl(self.ref, theta) if forward else self.state_kl(theta, self.ref))[rows]
            ).sum()

        return {
            "G": gradient(total(self.pi, lambda theta: self.logprobs(theta) - ref)),
            "R_pi": gradient(at_states(self.pi, forward=False)),
            "R_mu": gradient(at_states(self.mu, forward=False)),
            "F_pi": gradient(at_states(self.pi, forward=True)),
            "F_mu": gradient(at_states(self.mu, forward=True)),
            "S_pi": gradient(total(self.pi, lambda theta: (self.logprobs(theta) - ref).square() / 2)),
            "K_mu_pi": gradient(total(self.mu, lambda theta: mu - self.logprobs(theta))),
        }


def pairs(batch: PolicyBatch) -> tuple[PolicyBatch, Tensor, Tensor]:
    """All ordered pairs of the sequences of `batch`, each pair a group: 2 S^2 sequences of S.

    With the place in `batch` of each of its tokens, and of each of its sequences: int64.
    """
    count = batch.sequences
    drawn = torch.cartesian_prod(torch.arange(count), torch.arange(count)).flatten()
    sizes = torch.bincount(batch.sequence, minlength=count)
    starts, sequence = sizes.cumsum(0) - sizes, torch.arange(len(drawn)).repeat_interleave(sizes[drawn])
    before = sizes[drawn].cumsum(0) - sizes[drawn]
    tokens = (starts[drawn] - before)[sequence] + torch.arange(len(sequence))
    of_tokens = ("logprobs", "behavior_logprobs", "reference_logprobs", "proximal_logprobs", "loss_mask")
    chosen = {name: getattr(batch, name) for name in (*of_tokens, "reference_divergence")}
    paired = replace(
        batch,
        **{name: values[tokens] for name, values in chosen.items() if values is not None},
        sequence=sequence,
        rewards=batch.rewards[drawn],
        group=torch.arange(count**2).repeat_interleave(2),
    )
    return paired, tokens, drawn


def random_tables(
    vocabulary: int, length: int, seed: int, drift: float, distance: float | None, eos: int | None = None
) -> Tables:
    """pi ~ N(0, 1); mu = pi + drift N(0, 1); ref ~ N(0, 1) apart from pi, or pi + distance N(0, 1)."""
    draw = np.random.default_rng(seed).normal(size=(3, contexts(vocabulary, length), vocabulary))
    pi, change, other = torch.from_numpy(draw)
    ref = other if distance is None else pi + distance * other
    return Tables(vocabulary, length, pi, pi + drift * change, ref, eos)

"""The audit: what each row of the catalogue does to the KL's gradient, exactly, by the loss that trains.

The production loss runs over all sequences of a toy, or all pairs of them, each weighted by its probability. In flow
tables of logits, out flow the bias, direction and noise of every row, as plain numbers ready for JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .loss import token_losses
from .numerics import largest_exponent
from .rows import Row, classify
from .segments import sum_segments
from .spec import ObjectiveSpec
from .tables import Tables, pairs, random_tables
from .types import PolicyBatch

MOST_WORK = 400_000
"""The most that length x vocab^(length + 1) may be: the numbers in one row's gradients, token by token."""
TARGETS = ("G", "R_pi", "R_mu", "F_pi")
NEAR = 0.1
"""Standard deviation of ref's logits about pi's in the regime near the reference."""
_NOTHING = 1e-12
"""A gradient whose norm is below it, at beta 1, is 0."""


@dataclass(frozen=True)
class Moments:
    """The gradient of a sampled sequence's KL term: its mean and how far single samples lie from it."""

    mean: Tensor
    """Float64 [contexts, V]."""
    variance: float
    """E ||gradient - mean||^2."""


@dataclass(frozen=True)
class Run:
    """The choice of a run that is audited beside the catalogue."""

    spec: ObjectiveSpec
    row: Row
    on_policy: bool
    """Whether its data is pi's own."""


def catalogue(cap: float, beta: float = 1.0) -> dict[str, ObjectiveSpec]:
    """The spec of each row but `off_5`, which no spec can say; `cap` is that of row 6."""

    def reward(**choices: Any) -> ObjectiveSpec:
        choices.setdefault("reward_to_go", False)
        return ObjectiveSpec(beta=beta, advantage="plain", placement="reward", **choices)

    def loss(estimator: Any, weight: Any = "none", moving: bool = True) -> ObjectiveSpec:
        return replace(
            reward(correction="none", estimator=estimator),
            placement="loss",
            loss_weight=weight,
            differentiate_weight=moving,
        )

    def both(estimator: Any, reward_weight: Any, loss_weight: Any) -> ObjectiveSpec:
        return replace(loss(estimator, loss_weight, moving=False), placement="both", reward_weight=reward_weight)

    return {
        "off_1": reward(correction="importance", level="sequence"),
        "off_2": reward(correction="none", reward_weight="per_decision"),
        "off_3": reward(correction="importance", level="token", reward_to_go=True),
        "off_4": reward(correction="none", reward_to_go=True),
        "off_6": reward(correction="truncated", level="sequence", cap=cap),
        "off_7": reward(correction="importance", level="geometric"),
        "off_8": reward(correction="importance", level="sequence", estimator="k3"),
        "off_9": loss("k1"),
        "off_10": loss("k2"),
        "off_11": loss("k3"),
        "off_12": loss("k3", "token"),
        "off_13": loss("k1", "token"),
        "off_14": loss("k2", "token"),
        "off_15": loss("k2", "prefix", moving=False),
        "off_16": loss("k1", "prefix"),
        "off_17": loss("k3", "prefix"),
        "off_18_k1": both("k1", "sequence", "prefix"),
        "off_18_k3": both("k3", "sequence", "prefix"),
        "on_k1_reward": reward(correction="none"),
        "on_k3_reward": reward(correction="none", estimator="k3"),
        "on_k1_loss": loss("k1"),
        "on_k2_loss": loss("k2"),
        "on_k3_loss": loss("k3"),
        "on_k1_both": both("k1", "none", "none"),
        "on_k3_both": both("k3", "none", "none"),
    }


def moments(tables: Tables, spec: ObjectiveSpec, on_policy: bool = False, rewards: Tensor | None = None) -> Moments:
    """Mean and variance of one sequence's gradient under the production loss, with no baseline.

    Args:
        on_policy: sequences are pi's, not mu's.
        rewards: float64 [sequences]; absent, 0, so that the KL term stands alone.
    """
    spec = replace(spec, advantage="plain", baseline=0.0)
    batch, behavior = _sampled(tables, on_policy, rewards)
    rows, _, owners = tables.places
    slopes = _slopes(tables, batch, spec)
    # No two tokens of a sequence share a context, so squares of a sequence's gradient add up over its tokens.
    chance = tables.probabilities(behavior)[owners, None]
    mean = torch.zeros_like(tables.pi).index_add(0, rows, chance * slopes)
    variance = (chance * slopes.square()).sum() - mean.square().sum()
    return Moments(mean, max(variance.item(), 0.0))


def pair_moments(tables: Tables, spec: ObjectiveSpec, on_policy: bool = False) -> Moments:
    """The same over all pairs of sequences as groups of two, under the spec's own advantage, task rewards alike.

    The mean is that of a sequence in such a group; the variance is twice that of the pair's mean gradient, which makes
    it that of `moments` where the two do not touch. `plain` has its baseline taken off: the KL term stands alone.
    """
    singles, behavior = _sampled(tables, on_policy)
    batch, tokens, drawn = pairs(singles)
    slopes = _slopes(tables, batch, replace(spec, baseline=0.0), tokens) / 2
    chance = tables.probabilities(behavior)[drawn].view(-1, 2).prod(1)
    contexts, group = tables.pi.shape[0], batch.group[batch.sequence]
    by_pair = slopes.new_zeros(len(chance) * contexts, tables.vocabulary)
    by_pair = by_pair.index_add(0, group * contexts + tables.places[0][tokens], slopes).view(len(chance), contexts, -1)
    mean = torch.einsum("p,pcv->cv", chance, by_pair)
    variance = 2 * (chance @ (by_pair - mean).square().sum((1, 2)))
    return Moments(mean, variance.item())


def _sampled(tables: Tables, on_policy: bool, rewards: Tensor | None = None) -> tuple[PolicyBatch, Tensor]:
    """All sequences, with leaves for gradients, and the logits that they are drawn by."""
    behavior = tables.pi if on_policy else tables.mu
    logprobs = tables.logprobs(tables.pi).requires_grad_()
    return tables.batch(logprobs, behavior, tables.divergences(tables.pi).requires_grad_(), rewards), behavior


def _slopes(tables: Tables, batch: PolicyBatch, spec: ObjectiveSpec, places: Tensor | None = None) -> Tensor:
    """The loss's gradient by the logits of each token's context, float64 [tokens, V]; `places`: tokens of the toy."""
    assert batch.reference_divergence is not None
    by_logprob, by_divergence = torch.autograd.grad(
        token_losses(batch, spec).sum(),
        (batch.logprobs, batch.reference_divergence),
        allow_unused=True,
        materialize_grads=True,
    )
    rows, symbols = (of if places is None else of[places] for of in tables.places[:2])
    log_pi = torch.log_softmax(tables.pi, -1)[rows]
    pi = log_pi.exp()
    # The chain from a token's log-prob, and from its state's KL, to the logits of its context.
    score = torch.nn.functional.one_hot(symbols, tables.vocabulary) - pi
    difference = log_pi - torch.log_softmax(tables.ref, -1)[rows]
    slope = pi * (difference - (pi * difference).sum(-1, keepdim=True))
    return by_logprob[:, None] * score + by_divergence[:, None] * slope


def audit(tables: Tables, cap: float, beta: float = 1.0, run: Run | None = None) -> dict[str, Any]:
    """Every row on one toy: {"targets": {name: gradient}, "rows": [...]}, gradients flattened, scaled by beta.

    Rows of the catalogue are of one sequence without a baseline. `run` adds a row named `this_run`, of groups of two
    under the run's own advantage.

    Raises:
        ValueError: logits lie so far apart that weights would be clamped.
    """
    _check_spread(tables)
    fields = tables.fields()
    truth = fields["G"]
    found = []
    for name, spec in catalogue(cap, beta).items():
        on_policy = name.startswith("on_")
        row = classify(spec, on_policy)
        found.append(_line(name, row.expected, row.biased, moments(tables, spec, on_policy), truth, beta))
        if name == "off_4":
            found.append(_line("off_5", "G - grad KL(pi||mu)", True, _frozen(tables, beta), truth, beta))
    if run is not None:
        measured = pair_moments(tables, run.spec, run.on_policy)
        found.append(_line("this_run", run.row.expected, run.row.biased, measured, truth, beta))
    return {"targets": {name: (beta * fields[name]).flatten().tolist() for name in TARGETS}, "rows": found}


def audit_tables(document: Mapping[str, Any], cap: float = 2.0) -> dict[str, Any]:
    """The audit of somebody's own toy: {"vocab", "length", "pi", "mu", "ref"}, logits with one row a context.

    Raises:
        ValueError: the document is not of this form, or more than an audit can be exact on.
    """
    keys = ("vocab", "length", "pi", "mu", "ref")
    if set(document) != set(keys):
        raise ValueError(f"its keys are {', '.join(document)}: give vocab, length, and logits pi, mu and ref, no more")
    vocabulary, length = document["vocab"], document["length"]
    if not (type(vocabulary) is int and type(length) is int):
        shown = [str(size)[:60] for size in (vocabulary, length)]
        raise ValueError(f"vocab is {shown[0]} and length {shown[1]}: they must be whole numbers, such as 2 and 3")
    _check_size(vocabulary, length)
    pi, mu, ref = (_logits(name, document[name]) for name in keys[2:])
    return audit(Tables(vocabulary, length, pi, mu, ref), cap)


def _logits(name: str, rows: Any) -> Tensor:
    """Float64 [contexts, V] of lists of numbers."""
    listed = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    if not listed or not all(type(logit) in (int, float) for row in rows for logit in row):
        raise ValueError(f"{name} is not a list of rows of numbers: give one row of logits for each context")
    try:
        logits = torch.tensor(rows, dtype=torch.float64)
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name} is no table of logits ({error}): give rows of vocab numbers each") from error
    if not logits.isfinite().all():
        raise ValueError(f"{name} holds a logit that is not finite: give finite ones")
    return logits


def audit_toy(
    vocab: int = 3, length: int = 3, seed: int = 0, drift: float = 0.3, cap: float = 2.0
) -> dict[str, dict[str, Any]]:
    """The audit of random policies, {"near": ..., "far": ...}: ref close to pi, and ref that knows nothing of pi.

    mu's logits lie `drift` (a standard deviation) from pi's.
    """
    _check_size(vocab, length)
    if not 0 <= drift < math.inf:
        raise ValueError(f"drift is {drift}: it needs a finite number of 0 or more")
    return {
        "near": audit(random_tables(vocab, length, seed, drift, NEAR), cap),
        "far": audit(random_tables(vocab, length, seed, drift, None), cap),
    }


def _check_size(vocabulary: int, length: int) -> None:
    if vocabulary < 2 or length < 1:
        raise ValueError(f"vocab is {vocabulary} and length {length}: they need at least 2 and 1")
    # In logarithms: the power itself may have a million digits.
    small = max(vocabulary, length) < MOST_WORK
    if not small or math.log(length) + (length + 1) * math.log(vocabulary) > math.log(MOST_WORK):
        raise ValueError(
            f"vocab {vocabulary} and length {length} make too many sequences to write out: length x "
            f"vocab^(length + 1) may be {MOST_WORK:,}, as vocab 3 and length 8, or 19 and 3; take fewer or shorter ones"
        )


def _check_spread(tables: Tables) -> None:
    """Below it no log-ratio of a response and its KL is clamped, and the squares of their products are finite."""
    most = largest_exponent(torch.float64) / (tables.length + 1) - math.log(tables.vocabulary)
    for name in ("pi", "mu", "ref"):
        logits = getattr(tables, name)
        spread = (logits.amax(1) - logits.amin(1)).max().item()
        if not spread <= most:
            raise ValueError(
                f"the logits of one row of {name} lie {spread:.4g} apart: weights would be clamped, and the audit not "
                f"exact; with length {tables.length} they may lie {most:.4g} apart"
            )


def _frozen(tables: Tables, beta: float) -> Moments:
    """Row 5: the reward holds k1 of the actor's log-probs, as if it had been shaped when it was sampled."""
    frozen = tables.logprobs(tables.mu) - tables.logprobs(tables.ref)
    rewards = -beta * sum_segments(frozen, tables.places[2], len(tables.responses))
    spec = ObjectiveSpec(beta=0.0, correction="importance", level="sequence")
    return moments(tables, spec, rewards=rewards)


def _line(name: str, expected: str, biased: bool, found: Moments, truth: Tensor, beta: float) -> dict[str, Any]:
    """One row; `truth` is G at beta 1. Norms are taken at beta 1, where no square underflows."""
    mean = found.mean / beta
    bias, size, true_size = ((mean - truth).norm().item(), mean.norm().item(), truth.norm().item())
    relative = bias / true_size if true_size > _NOTHING else (0.0 if bias < _NOTHING else math.nan)
    nothing = size <= _NOTHING or true_size <= _NOTHING
    cosine = 0.0 if nothing else float((mean * truth).sum()) / (size * true_size)
    return {
        "row": name,
        "expected": expected,
        "biased": biased,
        "gradient": found.mean.flatten().tolist(),
        "bias_abs": beta * bias,
        "bias_rel": None if math.isnan(relative) else relative,
        "cosine": cosine,
        "variance": found.variance,
    }

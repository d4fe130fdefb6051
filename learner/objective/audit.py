"""The audit: what each row of the catalogue does to the KL's gradient, exactly, by the loss that trains.

The production loss runs over all sequences of a toy, each weighted by its probability. In flow tables of logits, out
flow the bias, direction and noise of every row, as plain numbers ready for JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .loss import token_losses
from .rows import Row, classify
from .segments import sum_segments
from .spec import ObjectiveSpec
from .tables import Tables, random_tables

MOST_SEQUENCES = 65_536
TARGETS = ("G", "R_pi", "R_mu", "F_pi")
NEAR = 0.1
"""Standard deviation of ref's logits about pi's in the regime near the reference."""
_NOTHING = 1e-12
"""A gradient whose norm is below it is 0."""


@dataclass(frozen=True)
class Moments:
    """The gradient of one sampled sequence's KL term: its mean and how far single samples lie from it."""

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
    share: float = 1.0
    """What its baseline leaves of the KL in the reward."""


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


def moments(
    tables: Tables,
    spec: ObjectiveSpec,
    on_policy: bool = False,
    rewards: Tensor | None = None,
    share: float = 1.0,
) -> Moments:
    """Mean and variance of a sequence's gradient under the production loss, with no baseline.

    Args:
        on_policy: sequences are pi's, not mu's.
        rewards: float64 [sequences]; absent, 0, so that the KL term stands alone.
        share: what a baseline leaves of the reward and the KL in it.
    """
    spec = replace(spec, advantage="plain", baseline=0.0)
    behavior = tables.pi if on_policy else tables.mu
    logprobs = tables.logprobs(tables.pi).requires_grad_()
    divergences = tables.divergences(tables.pi).requires_grad_()
    batch = tables.batch(logprobs, behavior, divergences, rewards)
    losses = token_losses(batch, spec)
    if share != 1 and spec.placement != "loss":
        losses = losses - (1 - share) * token_losses(batch, replace(spec, placement="reward"))
    by_logprob, by_divergence = torch.autograd.grad(
        losses.sum(), (logprobs, divergences), allow_unused=True, materialize_grads=True
    )
    rows, symbols, owners = tables.places
    log_pi = torch.log_softmax(tables.pi, -1)[rows]
    pi = log_pi.exp()
    # The chain from a token's log-prob, and from its state's KL, to the logits of its context.
    score = torch.nn.functional.one_hot(symbols, tables.vocabulary) - pi
    difference = log_pi - torch.log_softmax(tables.ref, -1)[rows]
    slope = pi * (difference - (pi * difference).sum(-1, keepdim=True))
    chained = by_logprob[:, None] * score + by_divergence[:, None] * slope
    # No two tokens of a sequence share a context, so squares of a sequence's gradient add up over its tokens.
    chance = tables.probabilities(behavior)[owners, None]
    mean = torch.zeros_like(tables.pi).index_add(0, rows, chance * chained)
    variance = (chance * chained.square()).sum() - mean.square().sum()
    return Moments(mean, max(variance.item(), 0.0))


def audit(tables: Tables, cap: float, beta: float = 1.0, run: Run | None = None) -> dict[str, Any]:
    """Every row on one toy: {"targets": {name: gradient}, "rows": [...]}, gradients flattened, scaled by beta.

    `run` adds a row named `this_run`.
    """
    fields = {name: beta * field for name, field in tables.fields().items()}
    truth = fields["G"]
    found = []
    for name, spec in catalogue(cap, beta).items():
        on_policy = name.startswith("on_")
        row = classify(spec, on_policy)
        found.append(_line(name, row.expected, row.biased, moments(tables, spec, on_policy), truth))
        if name == "off_4":
            found.append(_line("off_5", "G - grad KL(pi||mu)", True, _frozen(tables, beta), truth))
    if run is not None:
        measured = moments(tables, run.spec, run.on_policy, share=run.share)
        found.append(_line("this_run", run.row.expected, run.row.biased, measured, truth))
    return {"targets": {name: fields[name].flatten().tolist() for name in TARGETS}, "rows": found}


def audit_tables(document: Mapping[str, Any], cap: float = 2.0) -> dict[str, Any]:
    """The audit of somebody's own toy: {"vocab", "length", "pi", "mu", "ref"}, logits with one row a context.

    Raises:
        ValueError: a key is missing, or a table has not the shape that vocab and length ask for.
    """
    missing = [key for key in ("vocab", "length", "pi", "mu", "ref") if key not in document]
    if missing:
        raise ValueError(f"the tables have no {', '.join(missing)}: give vocab, length, and logits pi, mu and ref")
    vocabulary, length = document["vocab"], document["length"]
    if not (isinstance(vocabulary, int) and isinstance(length, int)):
        raise ValueError(f"vocab is {vocabulary!r} and length {length!r}: they must be whole numbers")
    _check_size(vocabulary, length)
    try:
        pi, mu, ref = (torch.tensor(document[key], dtype=torch.float64) for key in ("pi", "mu", "ref"))
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"a table is not a list of rows of numbers: {error}") from error
    if not all(table.isfinite().all() for table in (pi, mu, ref)):
        raise ValueError("a table holds a logit that is not finite")
    return audit(Tables(vocabulary, length, pi, mu, ref), cap)


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
    if vocabulary**length > MOST_SEQUENCES:
        raise ValueError(
            f"vocab {vocabulary} and length {length} make {vocabulary**length} sequences: too many to write out"
        )


def _frozen(tables: Tables, beta: float) -> Moments:
    """Row 5: the reward holds k1 of the actor's log-probs, as if it had been shaped when it was sampled."""
    frozen = tables.logprobs(tables.mu) - tables.logprobs(tables.ref)
    rewards = -beta * sum_segments(frozen, tables.places[2], len(tables.responses))
    spec = ObjectiveSpec(beta=0.0, correction="importance", level="sequence")
    return moments(tables, spec, rewards=rewards)


def _line(name: str, expected: str, biased: bool, found: Moments, truth: Tensor) -> dict[str, Any]:
    bias, size, true_size = ((found.mean - truth).norm().item(), found.mean.norm().item(), truth.norm().item())
    relative = bias / true_size if true_size > _NOTHING else (0.0 if bias < _NOTHING else math.nan)
    nothing = size <= _NOTHING or true_size <= _NOTHING
    cosine = 0.0 if nothing else float((found.mean * truth).sum()) / (size * true_size)
    return {
        "row": name,
        "expected": expected,
        "biased": biased,
        "gradient": found.mean.flatten().tolist(),
        "bias_abs": bias,
        "bias_rel": None if math.isnan(relative) else relative,
        "cosine": cosine,
        "variance": found.variance,
    }

"""From a run's configuration to its objective: the spec, what it really is in words, and whether it may start.

In flows a `RunConfig`, out flow an `ObjectiveSpec`, lines for the log, and the audit of the run that is to come.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from counterflow.configs.objective import KLSection
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError
from counterflow.learner.objective.audit import NEAR, Run, audit
from counterflow.learner.objective.row_words import LEGEND
from counterflow.learner.objective.rows import Row, cautions, classify, on_cut_support, refusal, sampling_caution
from counterflow.learner.objective.spec import ObjectiveSpec
from counterflow.learner.objective.strength import adaptive_beta, linear_beta
from counterflow.learner.objective.tables import random_tables
from counterflow.learner.unread_options import unread_options

DRIFT_OF_A_VERSION = 0.05
MOST_DRIFT = 1.0
"""Standard deviations, in nats of a logit: what one version is taken to move pi by in an audit, and the most of it."""
AUDIT_VOCABULARY, AUDIT_LENGTH = 3, 3
_EXACT = 1e-12
"""A bias below it, at beta 1, is 0."""


def objective_spec(config: RunConfig) -> ObjectiveSpec:
    """The objective that the configuration asks for, at its first beta.

    Raises:
        ConfigError: values that do not go together.
    """
    objective, kl, importance = config.objective, config.objective.kl, config.objective.importance
    if kl.schedule == "adaptive" and not kl.beta:
        raise ConfigError("objective.kl.beta=0: an adaptive schedule multiplies beta: start it above 0")
    if importance.correction == "masked" and importance.cap < 1:
        raise ConfigError(
            f"objective.importance.cap={importance.cap:g}: masked would drop even weights of 1: give 1 or more"
        )
    return ObjectiveSpec(
        beta=kl.beta,
        correction=importance.correction,
        level=importance.level,
        cap=importance.cap,
        floor=importance.floor,
        clip_low=importance.clip_low,
        clip_high=importance.clip_high,
        trace_cap=importance.trace_cap,
        second_moment=importance.second_moment,
        divergence=importance.divergence,
        estimator=kl.estimator,
        placement=kl.placement,
        reward_to_go=kl.reward_to_go,
        reward_weight=kl.reward_weight,
        loss_weight=kl.loss_weight,
        differentiate_weight=kl.differentiate_weight,
        kl_cap=kl.cap,
        advantage=objective.advantage,
        baseline=objective.baseline,
        reduction=objective.reduction,
    )


def needs_reference(config: RunConfig) -> bool:
    """Whether the reference is read at any step."""
    kl = config.objective.kl
    return bool(kl.beta) or (kl.schedule == "linear" and bool(kl.beta_end))


def on_policy(config: RunConfig) -> bool:
    """Whether every token is trained by the very weights that sampled it."""
    return (
        config.admission.max_lag == 0
        and config.admission.staleness != "downweight"
        and config.learner.updates_per_batch == 1
    )


def judged_spec(config: RunConfig) -> ObjectiveSpec:
    """The spec that names and audits speak of: at the first beta, or the last where the first is 0."""
    spec = objective_spec(config)
    return replace(spec, beta=config.objective.kl.beta_end) if not spec.beta and needs_reference(config) else spec


def row_of(config: RunConfig) -> Row:
    """The row of the catalogue that the run is on."""
    row = classify(judged_spec(config), on_policy(config))
    return on_cut_support(row) if _cuts_support(config) else row


def _cuts_support(config: RunConfig) -> bool:
    return config.sampling.top_p < 1 or config.sampling.top_k > 0


class Announcement(NamedTuple):
    """What the run says of its objective before it starts."""

    lines: list[str]
    """Row, expected gradient, whether it is biased, and why."""
    warnings: list[str]
    """What else bends the gradient, and which options do nothing."""


def announce(config: RunConfig) -> Announcement:
    """The run's objective in words.

    Raises:
        ConfigError: values that do not go together.
    """
    spec, row, sampling = judged_spec(config), row_of(config), config.sampling
    verdict = "biased" if row.biased else "unbiased"
    lines = [
        f"KL objective: row {row.row}: {row.what}",
        f"expected KL gradient: {row.expected} ({verdict}; {LEGEND})",
        f"why: {row.why}",
    ]
    others = [sampling_caution(sampling.top_p, sampling.top_k, spec), _precision_caution(config)]
    bent = cautions(spec, on_policy(config)) + [caution for caution in others if caution]
    return Announcement(
        lines, bent + unread_options(config.objective, needs_reference(config), config.learner.updates_per_batch)
    )


def _precision_caution(config: RunConfig) -> str | None:
    actors, learner = config.actors.dtype, config.learner.dtype
    if actors == learner == "float32":
        return None
    return (
        f"Actors compute in {actors}, the learner in {learner}: mu is not pi even at equal weights, so that ratios at "
        "lag 0 are near 1, not 1, and the weight of a whole response drifts from 1 with its length."
    )


def check_objective(config: RunConfig) -> Announcement:
    """What the run's first lines say of its objective, if it may start.

    Raises:
        ConfigError: the values do not go together, or `strict_kl` refuses a biased row.
    """
    refused = refusal(row_of(config)) if config.objective.strict_kl else None
    if refused:
        raise ConfigError(f"objective.strict_kl: {refused}")
    return announce(config)


def next_beta(kl: KLSection, beta: float, step: int, measured_kl: float) -> float:
    """beta for the step after `step` optimizer steps; `measured_kl` is the last step's KL(pi || ref) per token."""
    match kl.schedule:
        case "fixed":
            return beta
        case "linear":
            return linear_beta(step, kl.beta, kl.beta_end, kl.schedule_steps)
        case "adaptive":
            return adaptive_beta(beta, measured_kl, kl.target, kl.horizon_steps)


def typical_drift(max_lag: float) -> float:
    """How far mu's logits are taken to lie from pi's at that lag: a straight path, up to one nat."""
    return min(DRIFT_OF_A_VERSION * max_lag, MOST_DRIFT) if max_lag else 0.0


def audit_config(config: RunConfig) -> dict[str, Any]:
    """The audit for the run that is about to start: its own row among all others, at its beta, cap and lag.

    {"row", "what", "expected", "biased", "why", "verdict", "warnings", "assumptions", "near", "far"}; `near` and `far`
    are audits whose last row is `this_run`: groups of two under the run's own advantage. Without a KL term they are
    absent.
    """
    row, spec = row_of(config), judged_spec(config)
    drift, cap = typical_drift(config.admission.max_lag), config.objective.importance.cap
    found: dict[str, Any] = {
        "row": row.row,
        "what": row.what,
        "expected": row.expected,
        "biased": row.biased,
        "why": row.why,
        "verdict": f"{row.why} There is nothing to audit.",
        "warnings": announce(config).warnings,
        "assumptions": {
            "beta": spec.beta,
            "cap": _in_json(cap),
            "max_lag": _in_json(config.admission.max_lag),
            "drift": drift,
            "vocab": AUDIT_VOCABULARY,
            "length": AUDIT_LENGTH,
            "advantage": spec.advantage,
            "rewards": 0,
            "groups_of": 2,
        },
    }
    if not spec.beta:
        return found
    # On sequences of one length a reduction by length is a factor only, which says nothing of its bias.
    run = Run(replace(spec, reduction="constant"), row, on_policy(config))
    for regime, distance in (("near", NEAR), ("far", None)):
        tables = random_tables(AUDIT_VOCABULARY, AUDIT_LENGTH, config.run.seed, drift, distance)
        found[regime] = audit(tables, cap, spec.beta, run)
    found["verdict"] = _verdict(config, row, found)
    return found


def _in_json(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _verdict(config: RunConfig, row: Row, found: dict[str, Any]) -> str:
    near, far = (found[regime]["rows"][-1] for regime in ("near", "far"))
    if not row.biased:
        return f"Unbiased: the KL gradient is exactly that of KL(pi || ref). {row.why}"
    unmeasured = ["what is never sampled"] if _cuts_support(config) else []
    if config.objective.reduction != "constant":
        unmeasured.append(f"reduction {config.objective.reduction}")
    beside = f" by {' and '.join(unmeasured)}, which the toy does not measure" if unmeasured else ""
    if max(near["bias_abs"], far["bias_abs"]) < _EXACT * found["assumptions"]["beta"]:
        rest = "; exact otherwise" if unmeasured else " by bounds that no weight of the toy reaches; exact within them"
        return f"Biased{beside}{rest}. {row.why}"

    def share(line: dict[str, Any]) -> str:
        return "undefined" if line["bias_rel"] is None else f"{line['bias_rel']:.0%}"

    turned = [name for name, line in (("near", near), ("far from", far)) if line["cosine"] <= 0]
    harm = f" It does not point to the reference at all {' and '.join(turned)} it." if turned else ""
    return (
        f"Biased{beside}{'; otherwise' if unmeasured else ':'} in groups of two, off by {share(near)} of the true KL "
        f"gradient near the reference (cosine {near['cosine']:.2f}) and by {share(far)} far from it (cosine "
        f"{far['cosine']:.2f}).{harm} {row.why}"
    )

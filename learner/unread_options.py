"""Options of the objective that a configuration sets and does not read: one table of what reads each.

In flows the objective's section, out flow sentences. An option that is not named here is read by every run.
"""

from __future__ import annotations

from collections.abc import Iterator

from counterflow.configs.objective import ObjectiveSection
from counterflow.configs.section import Section

_CLIPPED = ("ppo", "cispo", "gspo", "sequence_mask")
_CAPPED = ("truncated", "masked", "decoupled_ppo", "topr", "vtrace")
_LEVELLED = ("importance", "truncated", "masked")


def unread_options(objective: ObjectiveSection, has_kl: bool, updates: int = 1) -> list[str]:
    """One sentence for each option that was given and has no effect; `has_kl`: beta is above 0 at any step.

    Args:
        updates: optimizer steps on each batch.
    """
    readers = _readers(objective, has_kl, updates)
    return [
        f"objective.{key}={str(value).lower()} has no effect: it is read only with {readers[key][1]}."
        for key, value in _given(objective)
        if key in readers and not readers[key][0]
    ]


def _readers(objective: ObjectiveSection, has_kl: bool, updates: int) -> dict[str, tuple[bool, str]]:
    """Of each option whether this configuration reads it, and what would."""
    kl, correction = objective.kl, objective.importance.correction
    in_reward, in_loss = (has_kl and kl.placement in (place, "both") for place in ("reward", "loss"))
    own_reward = in_reward and kl.reward_weight not in ("importance", "none")
    own_loss = in_loss and kl.loss_weight != "none"

    def corrected(*names: str) -> tuple[bool, str]:
        return correction in names, f"importance.correction {', '.join(names)}"

    # decoupled_ppo clips pi/prox, which is 1 at the first update of a step.
    clipped = corrected(*_CLIPPED, "decoupled_ppo") if updates > 1 else corrected(*_CLIPPED)
    return {
        "kl.estimator": (has_kl, "a KL term: kl.beta above 0"),
        "kl.reference_every": (has_kl, "a KL term: kl.beta above 0"),
        "kl.placement": (has_kl, "a KL term: kl.beta above 0"),
        "kl.schedule": (has_kl, "a KL term: kl.beta above 0"),
        "kl.reward_to_go": (
            in_reward and kl.reward_weight != "per_decision",
            "a KL in the reward, under another weight than per_decision",
        ),
        "kl.reward_weight": (in_reward, "a KL in the reward"),
        "kl.loss_weight": (in_loss, "a KL in the loss"),
        "kl.differentiate_weight": (own_loss, "a KL in the loss, with a kl.loss_weight"),
        "kl.cap": (own_reward or own_loss, "a kl.reward_weight or kl.loss_weight of the KL's own"),
        "kl.beta_end": (kl.schedule == "linear", "kl.schedule linear"),
        "kl.schedule_steps": (has_kl and kl.schedule == "linear", "kl.schedule linear"),
        "kl.target": (kl.schedule == "adaptive", "kl.schedule adaptive"),
        "kl.horizon_steps": (kl.schedule == "adaptive", "kl.schedule adaptive"),
        "importance.level": corrected(*_LEVELLED),
        "importance.cap": corrected(*_CAPPED),
        "importance.floor": corrected("masked"),
        "importance.clip_low": clipped,
        "importance.clip_high": clipped,
        "importance.trace_cap": corrected("vtrace"),
        "importance.second_moment": corrected("m2po"),
        "importance.divergence": corrected("sequence_mask"),
        "baseline": (objective.advantage == "plain", "advantage plain"),
        "length_constant": (objective.reduction == "constant", "reduction constant"),
    }


def _given(section: Section, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The options that were written, or that are not the default where all were, as in a run's own `config.yaml`."""
    fields = type(section).model_fields
    complete = len(section.model_fields_set) == len(fields)
    for name, field in fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _given(value, f"{prefix}{name}.")
        elif name in section.model_fields_set and not (complete and value == field.default):
            yield prefix + name, value

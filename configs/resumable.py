"""Which keys may differ between a run and the same run resumed: those that leave what is trained, and how, alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_FREE_SECTIONS = ("actors", "checkpoint", "evaluation", "metrics", "weight_sync")
_FREE_KEYS = frozenset(
    {
        *(f"run.{name}" for name in ("folder", "name", "overwrite", "ray_address", "pin_cores")),
        *(f"run.{name}_timeout_s" for name in ("placement", "start", "step")),
        *(f"reward.{name}" for name in ("timeout_s", "workers", "memory_bytes")),
        "task.environment_timeout_s",
        *(f"admission.{name}" for name in ("lease_s", "attempts")),
        *(f"buffer.{name}" for name in ("url", "capacity_groups", "capacity_bytes", "archive_segment_bytes")),
        *(f"buffer.{name}_timeout_s" for name in ("connect", "outage")),
        # The last bits of a sum may change with these, and nothing else.
        *(
            f"learner.{name}"
            for name in ("ranks", "backend", "offload", "cpus", "gpus", "max_restarts", "max_skipped_steps")
        ),
        *(f"learner.{name}" for name in ("microbatch_tokens", "packing", "activation_checkpointing")),
        "model.trust_remote_code",
    }
)


def differing_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The keys in which two whole configurations, as plain data, would train differently.

    `run.steps` is one of them only where the learning rate counts on it.
    """
    other, free = dict(_leaves(after)), set(_FREE_KEYS)
    if other.get("learner.schedule") == "constant" or other.get("learner.schedule_steps") is not None:
        free.add("run.steps")
    return [
        key for key in changed_keys(before, after) if key not in free and key.partition(".")[0] not in _FREE_SECTIONS
    ]


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The keys in which two whole configurations, as plain data, differ."""
    one, other = dict(_leaves(before)), dict(_leaves(after))
    return [key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        # Parameters of a task are one value: an empty mapping has no leaf.
        if isinstance(value, Mapping) and prefix + name != "task.parameters":
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value

"""The learner's half of a canary: its own log-probs of what an engine sampled at the same version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from counterflow.buffer.trajectory import Group
from counterflow.learner.batch import microbatches
from counterflow.learner.packing import Packing
from counterflow.learner.policy import Policy
from counterflow.weight_sync.canary import Gap


@torch.no_grad()
def measure(
    policy: Policy,
    groups: Sequence[Group],
    version: int,
    tokens: int,
    pad_token_id: int,
    packing: Packing = Packing.PADDED,
) -> Gap:
    """The gap over all response tokens of these groups.

    Args:
        version: the policy's; responses with a token of another are left out.
        tokens: size of a microbatch.

    Raises:
        ValueError: no response is left.
    """
    same = [
        replace(group, trajectories=kept)
        for group in groups
        if (kept := tuple(t for t in group.trajectories if {span.version for span in t.version_spans} == {version}))
    ]
    if not same:
        raise ValueError(f"no response of version {version} is among the canaries")
    engine, ours, at_1 = [], [], []
    for batch in microbatches(same, tokens, pad_token_id, packing):
        engine.append(batch.behavior_logprobs)
        ours.append(policy.logprobs(batch)[0].cpu())
        at_1.append(ours[-1] if policy.temperature == 1 else policy.logprobs(batch, 1.0)[0].cpu())
    return Gap.between(*(torch.cat(parts).float().numpy() for parts in (engine, ours, at_1)))

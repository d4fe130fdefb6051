"""Groups for tests, whose numbers follow from their arguments."""

from __future__ import annotations

import numpy as np

from counterflow.buffer.trajectory import Group, Trajectory, VersionSpan


def make_group(admission: int = 0, samples: int = 2, tokens: int = 3, version: int = 0) -> Group:
    """A group whose numbers follow from its arguments."""
    return Group(
        group_id=f"group-{admission}",
        admission=admission,
        prompt_id=admission,
        prompt_token_ids=np.arange(4, dtype=np.int32),
        trajectories=tuple(
            Trajectory(
                response_token_ids=np.arange(tokens, dtype=np.int32) + i,
                behavior_logprobs=np.full(tokens, -0.5, np.float32),
                version_spans=(VersionSpan(version, 0, tokens),) if tokens else (),
                reward=float(i),
                finish_reason="stop",
            )
            for i in range(samples)
        ),
        started_at_us=1,
        finished_at_us=2,
    )

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


def uneven_groups(count: int = 6, samples: int = 3, seed: int = 0) -> list[Group]:
    """Groups of prompts and responses of many lengths, some of one token."""
    draw = np.random.default_rng(seed)

    def ids(length: int) -> np.ndarray:
        return draw.integers(3, 16, length).astype(np.int32)

    def trajectory(length: int) -> Trajectory:
        logprobs = (-2.7 + 0.3 * draw.normal(size=length)).astype(np.float32)
        return Trajectory(ids(length), logprobs, (VersionSpan(0, 0, length),), float(draw.integers(0, 3)), "stop")

    return [
        Group(
            f"group-{n}",
            n,
            n,
            ids(1 + 2 * n),
            tuple(trajectory(1 + (7 * n + 5 * i) % 19) for i in range(samples)),
            1,
            2,
        )
        for n in range(count)
    ]

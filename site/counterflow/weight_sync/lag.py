"""Lag: how far off-policy each token was when it was trained. Pure functions on numpy arrays."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from counterflow.buffer.trajectory import VersionSpan


def token_lags(spans: Iterable[VersionSpan], learner_version: int) -> npt.NDArray[np.int64]:
    """Lag of every token, int64 [tokens]: learner version at the update minus the version that sampled the token.

    Raises:
        ValueError: a token comes from a version that the learner has not made.
    """
    pieces = [np.full(span.end - span.start, learner_version - span.version, np.int64) for span in spans]
    lags = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    if lags.size and lags.min() < 0:
        raise ValueError(
            f"a token was sampled by version {learner_version - lags.min()}, the learner is at {learner_version}"
        )
    return lags

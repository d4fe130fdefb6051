"""The lag that a step records: its parts, and the tokens' weights, against numbers worked by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from groups import make_group

from counterflow.buffer.archive import read_steps
from counterflow.buffer.codec import encode
from counterflow.buffer.connection import Address
from counterflow.buffer.producer import Capacity, Producer
from counterflow.buffer.trajectory import Group, Origin, Passage, Trajectory, VersionSpan
from counterflow.configs.schema import RunConfig
from counterflow.learner.learner import Learner


def offer(server: Address, origin: Origin, group: Group) -> None:
    async def main() -> None:
        producer = Producer(server, origin.run_id, capacity=Capacity(9, 1 << 30, 1), lease_s=60, attempts=1)
        leases, _ = await producer.admit(99, wanted=1)
        assert [lease.admission for lease in leases] == [group.admission]
        assert await producer.add(group, encode(group, origin.schema()))
        await producer.close()

    asyncio.run(main())


def stale_group() -> Group:
    """Of versions 0 and 1. Its first response trains the tokens of versions 0, 1, 1, its second one of version 1."""
    first, second, failed = make_group(1, samples=3, tokens=5).trajectories
    mask = np.array([True, False, True, True, False])
    spans = (VersionSpan(0, 0, 2), VersionSpan(1, 2, 5))
    short = Trajectory(
        response_token_ids=second.response_token_ids[:1],
        behavior_logprobs=second.behavior_logprobs[:1],
        version_spans=(VersionSpan(1, 0, 1),),
        reward=1.0,
        finish_reason="stop",
    )
    long = dataclasses.replace(first, loss_mask=mask, version_spans=spans)
    # It would count, were it trained.
    failed = dataclasses.replace(failed, reward=None, version_spans=(VersionSpan(0, 0, 5),))
    return dataclasses.replace(make_group(1), trajectories=(long, short, failed))


def test_parts_of_a_step_are_those_of_another_schedule(
    server: Address, origin: Origin, tmp_path: Path, tiny_model: Path
) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tiny_model)},
            "sampling": {"max_tokens": 8},
            "admission": {"groups_per_step": 1, "max_lag": 8},
            "buffer": {"uses": 2},
            "learner": {"lr": 1e-4},
            "run": {"step_timeout_s": 20},
            "objective": {"reduction": "sequence_mean", "importance": {"correction": "none"}, "kl": {"beta": 0.0}},
        }
    )
    with closing(Learner(tmp_path, config, server, origin, time.time(), cores=None)) as learner:
        offer(server, origin, make_group(0))
        steps = [learner.step().record]
        # Added at version 1, first taken at 2, trained at 2 and 3.
        offer(server, origin, stale_group())
        steps += [learner.step().record for _ in range(3)]
    parts = [
        (s.lag_mean, s.lag_in_flight_mean, s.lag_in_queue_mean, s.lag_in_learner_mean, s.cache_age_mean) for s in steps
    ]
    assert parts[:2] == [(0, 0, 0, 0, 0), (1, 0, 0, 1, 0)]
    # Lags 2, 1, 1 and 1: in flight 1, 0, 0 and 0, the rest in the queue. Then one more, in the learner.
    assert parts[2:] == [(1.25, 0.25, 1, 0, 0), (2.25, 0.25, 1, 1, 0)]
    assert [s.lag_histogram for s in steps] == [[6], [0, 6], [0, 3, 1], [0, 0, 3, 1]]
    # Each token of the first response weighs 1/3, that of the second 1: together 2.
    assert [s.lag_histogram_weighted for s in steps] == [
        [1.0],
        [0.0, 1.0],
        pytest.approx([0, 5 / 6, 1 / 6]),
        pytest.approx([0, 0, 5 / 6, 1 / 6]),
    ]
    passages = [step.passages for step in read_steps(tmp_path / "archive")]
    assert passages == [[Passage(0, 0)]] * 2 + [[Passage(1, 2)]] * 2


def test_weights_are_those_of_other_tokens(server: Address, origin: Origin, tmp_path: Path, tiny_model: Path) -> None:
    """The tokens of version 0 are told a log-prob so high that their ratio, and so their weight, is near 0."""
    group = make_group(1, tokens=4)
    spans = (VersionSpan(0, 0, 1), VersionSpan(1, 1, 4))
    logprobs = np.array([0.0, -30.0, -30.0, -30.0], np.float32)
    trajectories = tuple(
        dataclasses.replace(t, version_spans=spans, behavior_logprobs=logprobs) for t in group.trajectories
    )
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tiny_model)},
            "sampling": {"max_tokens": 8},
            "admission": {"groups_per_step": 1, "max_lag": 8},
            "learner": {"lr": 1e-4},
            "run": {"step_timeout_s": 20},
            "objective": {"importance": {"correction": "masked", "floor": 0.5, "cap": 1e30}, "kl": {"beta": 0.0}},
        }
    )
    with closing(Learner(tmp_path, config, server, origin, time.time(), cores=None)) as learner:
        offer(server, origin, make_group(0))
        learner.step()
        offer(server, origin, dataclasses.replace(group, trajectories=trajectories))
        record = learner.step().record
    assert record.lag_histogram == [6, 2]
    assert record.lag_histogram_weighted == [1.0, 0.0]


@pytest.mark.parametrize(
    ("staleness", "tokens", "trained", "stale"),
    [
        ("mask_tokens", 4, [0, 0, 4], ([0, 0, 1], [0, 0, 2], [0, 0, 4])),
        ("withhold_keep_baseline", 0, [0, 0, 0], ([0, 0, 1], [0, 0, 2], [0, 0, 8])),
        ("downweight", 8, [0, 0, 6], ([0, 0, 1], [0, 0, 2], [0, 0, 4])),
    ],
)
def test_step_trains_what_its_policy_forbids(
    server: Address,
    origin: Origin,
    tmp_path: Path,
    tiny_model: Path,
    staleness: str,
    tokens: int,
    trained: list[float],
    stale: tuple[list[int], ...],
) -> None:
    """The second step, at version 1, reads two responses of two tokens of version 0 and two of version 1."""
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tiny_model)},
            "sampling": {"max_tokens": 8},
            "admission": {"groups_per_step": 1, "max_lag": 0, "run_ahead": 8, "staleness": staleness},
            "learner": {"lr": 1e-2},
            "run": {"step_timeout_s": 20},
        }
    )
    group = make_group(1, tokens=4)
    spans = (VersionSpan(0, 0, 2), VersionSpan(1, 2, 4))
    group = dataclasses.replace(
        group, trajectories=tuple(dataclasses.replace(t, version_spans=spans) for t in group.trajectories)
    )
    with closing(Learner(tmp_path, config, server, origin, time.time(), cores=None)) as learner:
        offer(server, origin, make_group(0))
        assert learner.step().record.stale_tokens == [0, 0, 0]
        offer(server, origin, group)
        result = learner.step()
    record = result.record
    assert (record.tokens, record.offered_tokens, record.trained_tokens) == (tokens, [0, 0, 8], trained)
    assert (record.stale_groups, record.stale_samples, record.stale_tokens) == stale
    assert record.lag_max == (1 if staleness == "downweight" else 0)
    assert (record.grad_norm > 0) == (tokens > 0)
    assert any("nothing is left to train" in note for note in result.notes) == (tokens == 0)


def test_dropped_group_is_not_counted(server: Address, origin: Origin, tmp_path: Path, tiny_model: Path) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tiny_model)},
            "sampling": {"max_tokens": 8},
            "admission": {"groups_per_step": 1, "max_lag": 0, "run_ahead": 8, "staleness": "drop"},
            "run": {"step_timeout_s": 20},
        }
    )
    with closing(Learner(tmp_path, config, server, origin, time.time(), cores=None)) as learner:
        for n in range(3):
            offer(server, origin, make_group(n))
        learner.step()
        offer(server, origin, make_group(3, version=1))
        record = learner.step().record
    assert (record.lag_max, record.offered_tokens, record.trained_tokens) == (0, [0, 0, 18], [0, 0, 6])
    assert (record.stale_groups, record.stale_samples, record.stale_tokens) == ([0, 0, 2], [0, 0, 4], [0, 0, 12])

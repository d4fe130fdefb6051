"""The Arrow form of a group: nothing changes on the way, and nothing that is not a group gets through."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterflow.buffer.trajectory import Group, Origin, Trajectory, VersionSpan, decode, encode
from counterflow.errors import EntryError

ORIGIN = Origin("run", "model", "tokenizer", "{}")
SCHEMA = ORIGIN.schema()

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)
finite = st.floats(-100, 0, width=32)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    tokens = draw(token_ids)
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=3)))
    edges = [0, *cuts, len(tokens)] if tokens else [0]
    spans = tuple(VersionSpan(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(edges)))
    return Trajectory(
        response_token_ids=np.array(tokens, np.int32),
        behavior_logprobs=np.array(draw(st.lists(finite, min_size=len(tokens), max_size=len(tokens))), np.float32),
        version_spans=spans,
        reward=draw(st.none() | st.floats(-10, 10, width=32)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        reward_parts=draw(st.dictionaries(st.text(max_size=5), st.floats(-1, 1, width=32), max_size=2)),
    )


groups = st.builds(
    Group,
    group_id=st.text(max_size=10),
    admission=st.integers(0, 2**60),
    prompt_id=st.integers(0, 2**60),
    prompt_token_ids=token_ids.map(lambda ids: np.array(ids, np.int32)),
    trajectories=st.lists(trajectories(), min_size=1, max_size=5).map(tuple),
    started_at_us=st.integers(0, 2**50),
    finished_at_us=st.integers(0, 2**50),
)


def same(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and bool(np.array_equal(left, right))
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@given(groups)
def test_group_changes_on_the_way(group: Group) -> None:
    assert same(decode(encode(group, SCHEMA), ORIGIN), group)


def test_token_ids_and_logprobs_are_views_of_the_entry(group: Group) -> None:
    decoded = decode(encode(group, SCHEMA), ORIGIN)
    for trajectory in decoded.trajectories:
        assert not trajectory.response_token_ids.flags.owndata
        assert not trajectory.behavior_logprobs.flags.owndata


@given(groups, st.data())
def test_damaged_entry_crashes_the_reader(group: Group, data: st.DataObject) -> None:
    payload = bytearray(encode(group, SCHEMA))
    for _ in range(data.draw(st.integers(1, 8))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for damaged in (bytes(payload), bytes(payload[:cut])):
        with contextlib.suppress(EntryError):
            decode(damaged, ORIGIN)


@pytest.mark.parametrize("field", ["run_id", "model_fingerprint", "tokenizer_fingerprint"])
def test_entry_of_another_origin_is_trained(group: Group, field: str) -> None:
    other = dataclasses.replace(ORIGIN, **{field: "other"})
    with pytest.raises(EntryError, match=f"{field} is 'other'"):
        decode(encode(group, other.schema()), ORIGIN)


def test_entry_of_another_schema_version_is_trained(group: Group) -> None:
    newer = SCHEMA.with_metadata({**SCHEMA.metadata, b"schema_version": b"2"})
    with pytest.raises(EntryError, match="schema version 2, this reader knows 1"):
        decode(encode(group, newer), ORIGIN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"behavior_logprobs": np.zeros(2, np.float32)}, "3 tokens but 2 behaviour log-probs"),
        ({"behavior_logprobs": np.array([0, np.nan, 0], np.float32)}, "not finite"),
        ({"behavior_logprobs": np.array([0, -np.inf, 0], np.float32)}, "not finite"),
        ({"reward": float("nan")}, "reward is not finite"),
        ({"version_spans": (VersionSpan(0, 0, 2),)}, "end at token 2 of 3"),
        ({"version_spans": (VersionSpan(0, 0, 1), VersionSpan(1, 2, 3))}, "does not continue at token 1"),
        ({"version_spans": (VersionSpan(-1, 0, 3),)}, "does not continue"),
    ],
)
def test_group_that_does_not_fit_together_is_trained(group: Group, change: dict[str, object], message: str) -> None:
    broken = dataclasses.replace(group.trajectories[1], **change)  # type: ignore[arg-type]
    group = dataclasses.replace(group, trajectories=(group.trajectories[0], broken))
    with pytest.raises(EntryError, match=f"row 1: .*{message}"):
        decode(encode(group, SCHEMA), ORIGIN)


def test_negative_reward_is_refused(group: Group) -> None:
    negative = dataclasses.replace(group.trajectories[0], reward=-3.0)
    group = dataclasses.replace(group, trajectories=(negative,))
    assert decode(encode(group, SCHEMA), ORIGIN).trajectories[0].reward == -3.0

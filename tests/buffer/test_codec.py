"""The Arrow form of a group: nothing changes on the way, and nothing that is not a group gets through."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import random

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
from groups import make_group
from hypothesis import given
from hypothesis import strategies as st

from counterflow.buffer.codec import decode, encode, from_batch, read_batch, to_batch
from counterflow.buffer.trajectory import Group, Origin, Trajectory, VersionSpan
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
    mask = st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))
    spans = tuple(VersionSpan(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(edges)))
    return Trajectory(
        response_token_ids=np.array(tokens, np.int32),
        behavior_logprobs=np.array(draw(st.lists(finite, min_size=len(tokens), max_size=len(tokens))), np.float32),
        version_spans=spans,
        reward=draw(st.none() | st.floats(-10, 10, width=32)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        reward_parts=draw(st.dictionaries(st.text(max_size=5), st.floats(-1, 1, width=32), max_size=2)),
        loss_mask=draw(st.none() | mask.map(lambda trained: np.array(trained, np.bool_))),
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


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_tensors_are_copies_of_the_entry() -> None:
    payload = encode(large_group(tokens=512), SCHEMA)
    entry = pa.py_buffer(payload)
    group = decode(payload, ORIGIN)
    tokens = [group.prompt_token_ids, *(t.response_token_ids for t in group.trajectories)]
    logprobs = [t.behavior_logprobs for t in group.trajectories]
    for array in (*tokens, *logprobs):
        assert entry.address <= torch.from_numpy(array).data_ptr() < entry.address + entry.size


@given(groups)
def test_kept_group_holds_on_to_its_payload(group: Group) -> None:
    payload = encode(group, SCHEMA)
    entry = pa.py_buffer(payload)
    kept = decode(payload, ORIGIN, keep=True)
    assert same(kept, group)
    for array in (
        kept.prompt_token_ids,
        *(array for t in kept.trajectories for array in (t.response_token_ids, t.behavior_logprobs)),
    ):
        assert not entry.address <= array.ctypes.data < entry.address + entry.size
    assert to_batch(kept, SCHEMA) == to_batch(group, SCHEMA)


def test_group_takes_more_than_ten_bytes_a_token() -> None:
    group = large_group(tokens=512, loss_mask=True)
    assert len(encode(group, SCHEMA)) <= 10 * group.response_tokens


def large_group(tokens: int, loss_mask: bool = False) -> Group:
    half = tokens // 2
    return dataclasses.replace(
        make_group(samples=8, tokens=tokens),
        prompt_token_ids=np.arange(64, dtype=np.int32),
        trajectories=tuple(
            dataclasses.replace(
                t,
                version_spans=(VersionSpan(3, 0, half), VersionSpan(4, half, tokens)),
                reward_parts={"sums": 1.0},
                loss_mask=np.arange(tokens) % 2 == 0 if loss_mask else None,
            )
            for t in make_group(samples=8, tokens=tokens).trajectories
        ),
    )


def test_group_forgets_which_versions_sampled_it() -> None:
    old, new = make_group(version=3, samples=1), make_group(version=7, samples=1)
    empty = Trajectory(np.empty(0, np.int32), np.empty(0, np.float32), (VersionSpan(9, 0, 0),), 0.0, "length")
    group = dataclasses.replace(old, trajectories=(*new.trajectories, empty, *old.trajectories))
    assert (group.oldest_version, group.newest_version) == (3, 7)
    group = dataclasses.replace(group, trajectories=(empty,))
    assert (group.oldest_version, group.newest_version) == (None, None)


def test_slice_of_archived_groups_is_another_group() -> None:
    first, second = large_group(tokens=7, loss_mask=True), large_group(tokens=5)
    table = pa.Table.from_batches([to_batch(first, SCHEMA), to_batch(second, SCHEMA)]).combine_chunks()
    batch = table.to_batches()[0]
    assert same(from_batch(batch.slice(0, 8)), first)
    assert same(from_batch(batch.slice(8)), second)


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
        ({"behavior_logprobs": np.array([0, np.nan, 0], np.float32)}, "behavior_logprobs holds nan"),
        ({"behavior_logprobs": np.array([0, 0, -np.inf], np.float32)}, "behavior_logprobs holds -inf"),
        ({"behavior_logprobs": np.array([0.001, 0, 0], np.float32)}, "behavior_logprobs holds 0.001"),
        ({"response_token_ids": np.array([1, -1, 1], np.int32)}, "response_token_ids holds -1"),
        ({"loss_mask": np.ones(2, np.bool_)}, "3 tokens but a loss mask of 2"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"reward_parts": {"sums": float("inf")}}, "reward part 'sums' is inf"),
        ({"version_spans": (VersionSpan(0, 0, 2),)}, "end at token 2 of 3"),
        ({"version_spans": (VersionSpan(0, 0, 1), VersionSpan(1, 2, 3))}, "does not continue at token 1"),
        ({"version_spans": (VersionSpan(0, 0, 2), VersionSpan(1, 1, 3))}, "does not continue at token 2"),
        ({"version_spans": (VersionSpan(0, 0, 2), VersionSpan(1, 2, 1))}, "does not continue at token 2"),
        ({"version_spans": (VersionSpan(-1, 0, 3),)}, "older than version 0"),
        ({"version_spans": (VersionSpan(2, 0, 1), VersionSpan(1, 1, 3))}, "older than version 2"),
    ],
)
def test_group_that_does_not_fit_together_is_trained(group: Group, change: dict[str, object], message: str) -> None:
    broken = dataclasses.replace(group.trajectories[1], **change)  # type: ignore[arg-type]
    group = dataclasses.replace(group, trajectories=(group.trajectories[0], broken))
    with pytest.raises(EntryError, match=f"row 1: .*{message}"):
        decode(encode(group, SCHEMA), ORIGIN)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("group_id", ["a", "b"], "row 1: group_id differs"),
        ("admission", [0, 1], "row 1: admission differs"),
        ("prompt_id", [0, 1], "row 1: prompt_id differs"),
        ("started_at", [1, 2], "row 1: started_at differs"),
        ("finished_at", [1, 2], "row 1: finished_at differs"),
        ("prompt_token_ids", [[1, 2], [1, 3]], "row 1: prompt_token_ids differs"),
        ("prompt_token_ids", [[1, 2], [1]], "row 1: prompt_token_ids differs"),
        ("prompt_token_ids", [[1, 2], [1, -2]], "row 1: prompt_token_ids holds -2"),
        ("sample_index", [0, 2], "row 1: sample_index is 2"),
        ("sample_index", [1, 0], "row 0: sample_index is 1"),
        ("response_token_ids", [[1, 2, 3], [1, None, 3]], "row 1: response_token_ids holds a null"),
        ("behavior_logprobs", [[0, 0, 0], [0, 0, None]], "row 1: behavior_logprobs holds a null"),
        ("loss_mask", [None, [True, None, True]], "row 1: loss_mask holds a null"),
        ("version_spans", [[(0, 0, 3)], [None]], "row 1: version_spans holds a null"),
        ("version_spans", [[(0, 0, 3)], [(None, 0, 3)]], "row 1: version_spans holds a null"),
        ("response_token_ids", [[1, 2, 3], None], "row 1: response_token_ids is null"),
        ("admission", [0, None], "row 1: admission is null"),
        ("finish_reason", [None, "stop"], "row 0: finish_reason is null"),
        ("reward_parts", [{"sums": 1.0}, {"sums": None}], "row 1: the reward part 'sums' is None"),
    ],
)
def test_rows_of_different_groups_are_trained_as_one(
    group: Group, column: str, values: list[object], message: str
) -> None:
    batch = to_batch(group, SCHEMA)
    at = SCHEMA.get_field_index(column)
    arrays = batch.columns
    arrays[at] = pa.array(values, SCHEMA.field(at).type)
    with pytest.raises(EntryError, match=message):
        decode(written([pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)]), ORIGIN)


def test_group_without_a_trajectory_is_trained(group: Group) -> None:
    with pytest.raises(EntryError, match="no trajectory"):
        decode(encode(dataclasses.replace(group, trajectories=()), SCHEMA), ORIGIN)


def test_entry_of_other_columns_is_trained(group: Group) -> None:
    batch = to_batch(group, SCHEMA).drop_columns(["loss_mask"])
    with pytest.raises(EntryError, match="columns are not those of schema version 1"):
        decode(written([batch]), ORIGIN)


def test_second_group_of_an_entry_is_lost(group: Group) -> None:
    batch = to_batch(group, SCHEMA)
    with pytest.raises(EntryError, match="something follows the record batch"):
        decode(written([batch, batch]), ORIGIN)


def test_bytes_behind_the_group_are_ignored(group: Group) -> None:
    payload = encode(group, SCHEMA)
    with pytest.raises(EntryError, match=f"ends at byte {len(payload)} of {len(payload) + 1}"):
        decode(bytes(payload) + b"!", ORIGIN)


def test_entry_that_is_no_arrow_stream_says_nothing(group: Group) -> None:
    for payload in (b"", b"not Arrow at all", encode(group, SCHEMA)[: len(SCHEMA.serialize())]):
        with pytest.raises(EntryError, match="not an Arrow group: .+"):
            decode(payload, ORIGIN)


def test_entry_that_begins_with_its_record_batch_crashes_the_reader(group: Group) -> None:
    with pytest.raises(EntryError, match="'record batch' where the schema should be"):
        decode(encode(group, SCHEMA)[len(SCHEMA.serialize()) :], ORIGIN)


def test_small_entry_unpacks_to_a_large_group() -> None:
    payload = written([to_batch(large_group(tokens=2**16), SCHEMA)], pa.ipc.IpcWriteOptions(compression="zstd"))
    with pytest.raises(EntryError, match="compressed"):
        decode(payload, ORIGIN)


def written(batches: list[pa.RecordBatch], options: pa.ipc.IpcWriteOptions | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def test_encoder_writes_what_other_arrow_readers_cannot_read(group: Group) -> None:
    payload = encode(group, SCHEMA)
    assert payload == written([to_batch(group, SCHEMA)])
    assert read_batch(payload, ORIGIN) == to_batch(group, SCHEMA)


def test_logprob_rounded_past_zero_is_refused(group: Group) -> None:
    rounded = dataclasses.replace(group.trajectories[0], behavior_logprobs=np.full(3, 1e-5, np.float32))
    group = dataclasses.replace(group, trajectories=(rounded,))
    assert same(decode(encode(group, SCHEMA), ORIGIN), group)


def test_negative_reward_is_refused(group: Group) -> None:
    negative = dataclasses.replace(group.trajectories[0], reward=-3.0)
    group = dataclasses.replace(group, trajectories=(negative,))
    assert decode(encode(group, SCHEMA), ORIGIN).trajectories[0].reward == -3.0


def test_mutated_entry_crashes_the_reader_or_leaks() -> None:
    # In a process of its own, which a crash of Arrow ends by a signal: a negative exit code.
    reader = multiprocessing.get_context("spawn").Process(target=decode_mutations, args=(100_000,), daemon=True)
    reader.start()
    reader.join()
    assert reader.exitcode == 0


def decode_mutations(count: int) -> None:
    """Decode mutated entries; ends with an error where one raises anything but EntryError, or memory is lost."""
    entries = [
        encode(make_group(samples=1), SCHEMA),
        encode(make_group(samples=8, tokens=0), SCHEMA),
        encode(large_group(tokens=16), SCHEMA),
        encode(large_group(tokens=64, loss_mask=True), SCHEMA),
    ]
    chance = random.Random(0)
    process, warm_up = psutil.Process(), count // 20
    allocated, resident, refused = pa.total_allocated_bytes(), 0, 0
    for n in range(count):
        if n == warm_up:
            resident = process.memory_info().rss
        try:
            decode(mutated(entries, chance), ORIGIN)
        except EntryError:
            refused += 1
    assert refused > count / 2
    assert pa.total_allocated_bytes() == allocated
    assert process.memory_info().rss - resident < 64 * 2**20


def mutated(entries: list[memoryview], chance: random.Random) -> bytes:
    entry = bytearray(chance.choice(entries))
    size = len(entry)
    match chance.randrange(5):
        case 0:
            for _ in range(chance.randint(1, 8)):
                entry[chance.randrange(size)] ^= 1 << chance.randrange(8)
        case 1:
            del entry[chance.randrange(size) :]
        case 2:
            other = chance.choice(entries)
            entry[chance.randrange(size) :] = other[chance.randrange(len(other)) :]
        case 3:
            block = chance.choice([1, 4, 8, 64])
            a, b = (chance.randrange(size - block) // block * block for _ in range(2))
            entry[a : a + block], entry[b : b + block] = entry[b : b + block], entry[a : a + block]
        case 4:
            width = chance.choice([1, 2, 4, 8])
            at = chance.randrange(size - width) // width * width
            number = chance.choice([0, 1, -1, 2 ** (8 * width - 1) - 1, -(2 ** (8 * width - 1))])
            entry[at : at + width] = number.to_bytes(width, "little", signed=True)
    return bytes(entry)

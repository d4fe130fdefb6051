"""A learner that was killed, and one in its place: the same weights, no group lost or trained twice."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from groups import make_group

from counterflow.buffer.archive import read_steps
from counterflow.buffer.codec import encode
from counterflow.buffer.connection import Address
from counterflow.buffer.producer import Capacity, Producer
from counterflow.buffer.segment import segments
from counterflow.buffer.store import read_ledger
from counterflow.buffer.trajectory import Group, Origin
from counterflow.configs.schema import RunConfig
from counterflow.errors import BufferUnavailable, ConfigError
from counterflow.learner.checkpoint import versions
from counterflow.learner.learner import Learner

STEPS, PER_STEP = 7, 2

Begin = Callable[..., Learner]


def offer(server: Address, origin: Origin, groups: Sequence[Group]) -> None:
    async def main() -> None:
        capacity = Capacity(groups=1000, bytes=1 << 30, groups_per_step=PER_STEP)
        producer = Producer(server, origin.run_id, capacity=capacity, lease_s=60, attempts=9)
        leases, _ = await producer.admit(10_000, wanted=len(groups))
        by_number = {group.admission: group for group in groups}
        for lease in leases:
            group = by_number[lease.admission]
            assert await producer.add(group, encode(group, origin.schema()))
        await producer.close()

    asyncio.run(main())


def all_groups() -> list[Group]:
    return [make_group(n, samples=3, tokens=2 + n % 4) for n in range(STEPS * PER_STEP)]


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner._trainer.policy.model.parameters()])


@pytest.fixture
def config(tiny_model: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"steps": STEPS, "step_timeout_s": 20},
            "model": {"path": str(tiny_model)},
            "sampling": {"max_tokens": 8},
            "admission": {"groups_per_step": PER_STEP, "samples_per_group": 3, "max_lag": 99},
            "objective": {"kl": {"beta": 0.05, "schedule": "adaptive"}},
            "learner": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2},
            "buffer": {"archive_segment_bytes": 1024},
        }
    )


@pytest.fixture
def begin(server: Address, origin: Origin, tmp_path: Path, config: RunConfig) -> Iterator[Begin]:
    """A learner of this run, which has caught up; it ends when the next one begins."""
    living: list[Learner] = []

    def end() -> None:
        while living:
            learner = living.pop()
            learner._checkpoints.wait(60)
            learner.close()

    def begin(**options: object) -> Learner:
        end()
        learner = Learner(tmp_path / "run", config, server, origin, time.time(), None, **options)  # type: ignore[arg-type]
        living.append(learner)
        learner.standing()
        while learner.catch_up() is not None:
            pass
        return learner

    (tmp_path / "run").mkdir()
    with ExitStack() as stack:
        stack.callback(end)
        yield begin


@pytest.fixture
def uninterrupted(server: Address, origin: Origin, tmp_path: Path, config: RunConfig) -> list[torch.Tensor]:
    """The weights of every version of a run in which nobody dies."""
    own = dataclasses.replace(origin, run_id=f"{origin.run_id}-whole")
    offer(server, own, all_groups())
    (tmp_path / "whole").mkdir()
    learner = Learner(tmp_path / "whole", config, server, own, time.time(), None)
    found = [weights(learner).clone()]
    for _ in range(STEPS):
        learner.step()
        found.append(weights(learner).clone())
    learner.close()
    return found


def steps(learner: Learner, count: int, every: int = 0) -> None:
    for _ in range(count):
        record = learner.step().record
        if every and record.step % every == 0:
            learner.checkpoint()
            assert learner._checkpoints.wait(60)


@pytest.mark.parametrize("every", [0, 2])
def test_weights_after_deaths_are_not_those_of_a_life_without(
    begin: Begin, uninterrupted: list[torch.Tensor], server: Address, origin: Origin, tmp_path: Path, every: int
) -> None:
    offer(server, origin, all_groups())
    done = 0
    for count in (1, 3, 0, 2, 1):
        learner = begin()
        assert torch.equal(weights(learner), uninterrupted[done])
        steps(learner, count, every)
        done += count
    learner = begin()
    assert torch.equal(weights(learner), uninterrupted[STEPS])
    assert versions(tmp_path / "run" / "checkpoints") == ([4, 6] if every else [])
    ledger = read_ledger(server, origin.run_id)
    assert ledger.closes and ledger.trained == STEPS * PER_STEP and not ledger.dropped
    trained = [b.column("admission")[0].as_py() for s in read_steps(tmp_path / "run" / "archive") for b in s.groups]
    assert trained == list(range(STEPS * PER_STEP))


def test_step_that_was_archived_and_not_committed_is_lost_or_trained_twice(
    begin: Begin,
    uninterrupted: list[torch.Tensor],
    server: Address,
    origin: Origin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer(server, origin, all_groups())
    learner = begin()
    steps(learner, 2, every=2)

    def die(*_: object, **__: object) -> None:
        raise BufferUnavailable("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(learner._consumer, "_commit_step", die)
        with suppress(BufferUnavailable):
            learner.step()
    assert read_ledger(server, origin.run_id).policy_version == 2
    learner = begin()
    assert read_ledger(server, origin.run_id).policy_version == 3
    assert torch.equal(weights(learner), uninterrupted[3])
    steps(learner, STEPS - 3)
    assert torch.equal(weights(learner), uninterrupted[STEPS])
    assert read_ledger(server, origin.run_id).trained == STEPS * PER_STEP


def test_damaged_checkpoint_is_passed_over_silently_or_an_older_one_cannot_be_asked_for(
    begin: Begin, uninterrupted: list[torch.Tensor], server: Address, origin: Origin, tmp_path: Path
) -> None:
    offer(server, origin, all_groups())
    steps(begin(), 5, every=2)
    shard = tmp_path / "run" / "checkpoints" / "00000004" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"00000004/__0_0.distcp has .* of .* bytes: .*there are 2, and 0"):
        begin()
    with pytest.raises(ConfigError, match=r"--checkpoint 3: .* has none of that version: choose one of 0, 2, 4"):
        begin(checkpoint=3)
    for asked in (2, 0):
        assert torch.equal(weights(begin(checkpoint=asked)), uninterrupted[5])


def test_what_cannot_be_trained_again_is_lost_silently_or_makes_lag_negative(
    begin: Begin, uninterrupted: list[torch.Tensor], server: Address, origin: Origin, tmp_path: Path
) -> None:
    """The steps of versions 4 and 5 are lost; groups that these versions sampled are in the buffer."""
    groups = all_groups()
    groups[10:] = [make_group(n, samples=3, tokens=4, version=5) for n in range(10, STEPS * PER_STEP)]
    offer(server, origin, groups)
    steps(begin(), 5, every=2)
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints" / "00000004")
    paths = segments(run / "archive")
    assert len(paths) == 5
    for path in paths[3:]:
        path.unlink()
    with pytest.raises(
        ConfigError, match="ends with version 3, the buffer's server knows of 5: restore.*--lose-branch"
    ):
        begin()
    learner = begin(lose_branch=True)
    assert torch.equal(weights(learner), uninterrupted[3]) and learner.standing().version == 5
    lost = {"checkpoint": 2, "regained": 3, "lost_up_to": 5, "archive": "archive-lost-1"}
    assert json.loads((run / "branches.json").read_text()) == [lost]
    learner.checkpoint()
    record = learner.step().record
    assert (record.step, record.lag_max) == (6, 0)
    learner = begin()
    steps(learner, 1)
    ledger = read_ledger(server, origin.run_id)
    assert ledger.closes and ledger.trained == STEPS * PER_STEP and ledger.policy_version == STEPS
    assert [step.learner_version for step in read_steps(run / "archive")] == [5, 6]


def test_hole_in_the_archive_is_jumped(begin: Begin, server: Address, origin: Origin, tmp_path: Path) -> None:
    offer(server, origin, all_groups())
    steps(begin(), 5, every=0)
    segments(tmp_path / "run" / "archive")[2].unlink()
    with pytest.raises(ConfigError, match=r"learner_version 2 to 2 before it are missing.*--lose-branch.*version 2"):
        begin()
    segments(tmp_path / "run" / "archive")[0].unlink()
    with pytest.raises(ConfigError, match="archive begins with the step of learner_version 1"):
        begin()


def test_leases_of_the_dead_keep_the_next_learner_waiting(begin: Begin, server: Address, origin: Origin) -> None:
    async def lease() -> None:
        producer = Producer(server, origin.run_id, capacity=Capacity(9, 1 << 30, 1), lease_s=600, attempts=1)
        leases, _ = await producer.admit(PER_STEP, wanted=PER_STEP)
        assert len(leases) == PER_STEP
        await producer.close()

    asyncio.run(lease())
    learner = begin()
    offer(server, origin, all_groups()[:PER_STEP])
    steps(learner, 1)

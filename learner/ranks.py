"""All ranks as rank 0 sees them: it is one itself, the others are Ray actors that follow its calls.

Each call goes to the others first, then runs here, for both hold collectives that meet; then the others' answers are
read under a deadline. One rank alone needs no Ray and no process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from counterflow.buffer.trajectory import Group
from counterflow.configs.schema import RunConfig
from counterflow.errors import CounterflowError, DeadlineExceeded, LearnerDied, RunFailed, first_line
from counterflow.learner.objective.spec import ObjectiveSpec
from counterflow.learner.plan import Update
from counterflow.learner.rank import Part, Rank
from counterflow.processes import pin
from counterflow.weight_sync.canary import Gap

_BLAME_S = 5.0


def join(config: RunConfig, rank: int, host: str, port: int) -> None:
    """Join the default process group of the learner's ranks, which rank 0 opens with `open_store`."""
    timeout = timedelta(seconds=config.run.step_timeout_s)
    store = TCPStore(host, port, is_master=False, timeout=timeout)
    enter(config, rank, store)


def open_store(config: RunConfig, host: str) -> TCPStore:
    """Where the ranks meet: a server in this process."""
    timeout = timedelta(seconds=config.run.start_timeout_s)
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)


def enter(config: RunConfig, rank: int, store: TCPStore) -> None:
    """Make the default process group; returns when all ranks are there."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if config.learner.gpus else "gloo",
        store=store,
        rank=rank,
        world_size=config.learner.ranks,
        timeout=timedelta(seconds=config.run.step_timeout_s),
    )


class Follower:
    """A rank but the first, as a Ray actor. Its constructor is light; `start` loads the model."""

    def __init__(self, config: RunConfig, rank: int, cores: Sequence[int] | None) -> None:
        if cores:
            pin(cores)
        self._config, self._number = config, rank
        self._rank: Rank

    def ready(self) -> None:
        """Answers once the process is there."""

    def start(self, host: str, port: int) -> None:
        """Join the others and load the model."""
        join(self._config, self._number, host, port)
        self._rank = Rank(self._config)

    def follow(self, call: str, *args: Any) -> Any:
        """Run a method of `Rank`. One that fails leaves the group, so that nobody waits for it in a collective."""
        try:
            return getattr(self._rank, call)(*args)
        except Exception:
            with suppress(RuntimeError):
                dist.destroy_process_group()
            raise


class Ranks:
    """Rank 0 and its followers.

    Args:
        followers: handles of Ray actors of `Follower`, from rank 1 on.
    """

    def __init__(self, config: RunConfig, followers: Sequence[Any]) -> None:
        self._config, self._followers = config, list(followers)
        if len(self._followers) != config.learner.ranks - 1:
            raise ValueError(f"{len(self._followers)} followers for learner.ranks={config.learner.ranks}")
        if not self._followers:
            self.own = Rank(config)
            return
        import ray

        # Whoever cannot even be placed, or imported, is heard of here, not by a wait in a collective.
        self._what, self._asked = "to start", [follower.ready.remote() for follower in self._followers]
        self._answers(config.run.start_timeout_s)
        host = str(ray.util.get_node_ip_address())
        store = open_store(config, host)
        self._asked = [follower.start.remote(host, store.port) for follower in self._followers]
        self._what = "to load the model"
        self.own = self._meet(lambda: self._start(store), config.run.start_timeout_s)[0]

    def begin(self, updates: Sequence[Update], version: int, again: bool, needs_proximal: bool) -> None:
        """See `Rank.begin`."""
        work = [[update.rounds[rank] for update in updates] for rank in range(1 + len(self._followers))]
        self._call("begin", [(own, version, again, needs_proximal) for own in work])

    def accumulate(self, update: int, spec: ObjectiveSpec, divisor: float) -> list[Part]:
        """See `Rank.accumulate`; what every rank found."""
        return self._call("accumulate", [(update, spec, divisor)] * (1 + len(self._followers)))

    def apply(self, learning_rate: float) -> float:
        """See `Rank.apply`."""
        norm: float = self._call("apply", [(learning_rate,)] * (1 + len(self._followers)))[0]
        return norm

    def renew_reference(self) -> None:
        """See `Rank.renew_reference`."""
        self._call("renew_reference", [()] * (1 + len(self._followers)))

    def compare(self, groups: Sequence[Group], version: int) -> Gap:
        """See `Rank.compare`."""
        gap: Gap = self._call("compare", [(groups, version)] * (1 + len(self._followers)))[0]
        return gap

    def state(self) -> dict[str, Any]:
        """See `Rank.state`."""
        state: dict[str, Any] = self._call("state", [()] * (1 + len(self._followers)))[0]
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Rank.load_state`."""
        self._call("load_state", [(state,), *[({},)] * len(self._followers)])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Rank.weights`. To be read to the end: the others take part."""
        self._ask("help_gather", [()] * len(self._followers))
        try:
            yield from self.own.weights()
        except RuntimeError as error:
            raise self._blame(error) from error
        self._answers(self._config.run.step_timeout_s)

    def close(self) -> None:
        """Leave the others."""
        if self._followers and dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    def _start(self, store: TCPStore) -> Rank:
        enter(self._config, 0, store)
        return Rank(self._config)

    def _call(self, call: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        self._ask(call, arguments[1:])
        return self._meet(lambda: getattr(self.own, call)(*arguments[0]), self._config.run.step_timeout_s)

    def _ask(self, call: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        self._what = f"to {call}"
        self._asked = [
            follower.follow.remote(call, *own) for follower, own in zip(self._followers, arguments, strict=True)
        ]

    def _meet(self, own: Any, timeout_s: float) -> list[Any]:
        try:
            found = own()
        except RuntimeError as error:
            raise self._blame(error) from error
        return [found, *self._answers(timeout_s)]

    def _answers(self, timeout_s: float) -> list[Any]:
        if not self._asked:
            return []
        import ray

        try:
            return list(ray.get(self._asked, timeout=timeout_s))
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineExceeded("learner rank 0", f"the other ranks, asked {self._what}", timeout_s) from error
        except ray.exceptions.RayError as error:
            raise self._blame(error) from error

    def _blame(self, error: Exception) -> Exception:
        """Which rank is at fault for an error here: one that died, else one whose call failed, else this one."""
        if not self._followers:
            return error
        import ray

        failed: list[str] = []
        ray.wait(self._asked, num_returns=len(self._asked), timeout=_BLAME_S)
        for rank, asked in enumerate(self._asked, start=1):
            try:
                ray.get(asked, timeout=0)
            except ray.exceptions.RayTaskError as told:
                if isinstance(told.cause, CounterflowError):
                    return told.cause
                failed.append(f"learner rank {rank} failed, asked {self._what}: {first_line(told.cause)}")
            except ray.exceptions.GetTimeoutError:
                pass
            except ray.exceptions.RayError as told:
                reason = str(told).strip().rpartition("\n")[2].strip()
                return LearnerDied(f"learner rank {rank} of {1 + len(self._asked)} died, asked {self._what}: {reason}")
        return RunFailed("; ".join(failed) or f"learner rank 0 failed, asked {self._what}: {first_line(error)}")

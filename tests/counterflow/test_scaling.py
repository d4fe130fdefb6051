"""A wish for more or fewer actors gets lost on its way, or is answered for another."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from counterflow import scaling
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError, DeadlineExceeded
from counterflow.locks import RUN, hold
from counterflow.scaling import FleetStanding, as_it_was, ask, follow, forget


class Supervised:
    """A fleet and a telemetry, as `follow` knows them."""

    def __init__(self) -> None:
        self.wanted, self.serving = 1, [0]
        self.asked: list[int] = []
        self.notes: list[str] = []

    def resize(self, count: int) -> None:
        self.asked.append(count)
        # There is no room for more than four.
        self.wanted = min(count, 4)
        self.serving = list(range(self.wanted))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def event(self, event: str, **fields: object) -> None:
        """Not looked at."""


@pytest.fixture
def living(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Supervised]:
    """A run folder whose run goes on, for as long as the test asks."""
    monkeypatch.setattr(scaling, "_LOOK_AGAIN_S", 0.02)
    monkeypatch.setattr(scaling, "is_held", lambda path: path == run_folder / RUN)
    return run_folder, Supervised()


def while_followed(folder: Path, run: Any, work: Callable[[], object]) -> None:
    async def main() -> None:
        following = asyncio.create_task(follow(folder, run, run))
        await asyncio.to_thread(work)
        following.cancel()

    asyncio.run(main())


def test_wish_is_answered_for_another_or_heard_twice(living: tuple[Path, Supervised]) -> None:
    folder, run = living
    answers: list[FleetStanding] = []
    while_followed(folder, run, lambda: answers.extend(ask(folder, n, 60) for n in (3, 3, 2, 9)))
    assert [answer.wanted for answer in answers] == [3, 3, 2, 4]
    assert run.asked == [3, 3, 2, 9]
    config = RunConfig()
    assert as_it_was(config, folder).actors.count == 4
    forget(folder)
    assert as_it_was(config, folder) == config and not list(folder.glob("*.json*")) + list(folder.glob(".*.json*"))


def test_actors_without_room_keep_a_learner_from_being_begun_again(living: tuple[Path, Supervised]) -> None:
    folder, _ = living
    for standing, placed in (((20, 3), 3), ((20, 0), 2), ((1, 1), 1), ((1, 4), 1)):
        (folder / "fleet.json").write_text(json.dumps({"answers": "", "wanted": standing[0], "serving": standing[1]}))
        config = RunConfig().replacing("actors", count=2)
        assert as_it_was(config, folder).actors.count == placed


def test_slip_of_the_hand_asks_for_a_million_actors(living: tuple[Path, Supervised]) -> None:
    folder, run = living
    with pytest.raises(ConfigError, match="--actors 3000000: ask for 1,000 at most"):
        ask(folder, 3_000_000, 60)
    (folder / "actors.json").write_text(json.dumps({"actors": 3_000_000, "name": "by hand"}))
    while_followed(folder, run, lambda: wait_for_note(run))
    assert not run.asked and "asks for 3000000 actors" in run.notes[0]


def wait_for_note(run: Supervised) -> None:
    while not run.notes:
        time.sleep(0.02)


def test_two_wishes_at_once_both_count(living: tuple[Path, Supervised]) -> None:
    folder, run = living
    ends: list[str] = []

    def wish(actors: int) -> None:
        try:
            ends.append(f"{ask(folder, actors, 60).wanted} of {actors}")
        except ConfigError as error:
            ends.append(str(error))

    def all_at_once() -> None:
        threads = [threading.Thread(target=wish, args=(actors,)) for actors in (1, 2, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    while_followed(folder, run, all_at_once)
    told = [end for end in ends if "another `counterflow scale` asked at the same time" not in end]
    assert len(ends) == 4 and told and all(end in {f"{n} of {n}" for n in (1, 2, 3, 4)} for end in told)
    assert as_it_was(RunConfig(), folder).actors.count == run.asked[-1]


def test_run_that_hears_nothing_is_waited_for(living: tuple[Path, Supervised]) -> None:
    folder, _ = living
    with pytest.raises(DeadlineExceeded, match=r"counterflow scale waited 0\.1 s for the run in .* to take the word"):
        ask(folder, 2, 0.1)


@pytest.mark.parametrize("text", ["{", '{"actors": "3", "name": "x"}', '{"actors": 0, "name": "x"}', "[]"])
def test_damaged_wish_ends_the_run(living: tuple[Path, Supervised], text: str) -> None:
    folder, run = living
    (folder / "actors.json").write_text(text)
    while_followed(folder, run, lambda: ask_when_gone(folder))
    assert run.asked == [2] and any("counterflow scale" in note for note in run.notes)


def ask_when_gone(folder: Path) -> None:
    for _ in range(1000):
        if not (folder / "actors.json").exists():
            break
        threading.Event().wait(0.02)
    ask(folder, 2, 60)


@pytest.mark.parametrize(
    ("actors", "words"), [("2", "no run is going on there; to go on with one that ended"), ("0", "needs one actor")]
)
def test_ended_run_is_scaled(refused: Callable[..., str], run_folder: Path, actors: str, words: str) -> None:
    said = refused("scale", run_folder, "--actors", actors)
    assert words in said
    (run_folder / RUN).touch()
    assert words in refused("scale", run_folder, "--actors", actors)
    assert not (run_folder / "actors.json").exists()


def test_living_run_is_taken_for_an_ended_one(run_folder: Path) -> None:
    lock = hold(run_folder / RUN)
    assert lock is not None
    try:
        (run_folder / "fleet.json").write_text(json.dumps({"answers": "", "wanted": 1, "serving": 1}))
        with pytest.raises(DeadlineExceeded):
            ask(run_folder, 2, 0.1)
    finally:
        lock.close()


def test_folder_of_no_run_is_scaled(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "is no run folder" in refused("scale", tmp_path, "--actors", "2")

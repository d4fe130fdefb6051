"""`counterflow ledger`: of a living run, an ended one and a killed one; sums that do not close are an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from groups import make_group
from typer.testing import CliRunner

from counterflow.buffer.archive import Archive
from counterflow.buffer.codec import encode
from counterflow.buffer.connection import connect
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.producer import Capacity, Producer
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.store import Keys, read_ledger
from counterflow.buffer.trajectory import Origin
from counterflow.cli import app
from counterflow.errors import ConfigError
from counterflow.place import Place, write_place


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {name: run}\n")
    return folder


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
    (run_folder / "buffer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        CliRunner().invoke(app, ["ledger", str(run_folder)], catch_exceptions=False)

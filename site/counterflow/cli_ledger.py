"""`counterflow ledger`: where every group and token of a run is, and whether the sums close.

`ledger` is a typer command: a run folder flows in; a table or JSON, and an exit code, flow out. Asks the run's server
while it lives; else reads what the run wrote at its end; else what a killed run's own server left on the disk.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from counterflow.errors import BufferUnavailable, ConfigError
from counterflow.place import read_json, read_place
from counterflow.records import Ledger

_ANSWER_TIMEOUT_S = 2.0
_START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Finding:
    """A ledger, whence it comes, and what the archive holds beside it."""

    ledger: Ledger
    source: str
    archived_groups: int
    archived_tokens: int
    complaints: list[str]


def ledger(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print where every group of RUN is; exit with 1 when the sums do not close."""
    found = find(folder)
    if as_json:
        typer.echo(json.dumps({**asdict(found), "closes": not found.complaints}))
    else:
        _print(found)
    if found.complaints:
        raise typer.Exit(1)


def find(folder: Path) -> Finding:
    """The ledger of the run in `folder`, checked.

    Raises:
        ConfigError: no run is there, or nothing is left that knows its ledger.
    """
    read, source = _read(folder)
    groups, tokens, uses = 0, 0, 1
    if (folder / "archive").is_dir():
        from counterflow.buffer.archive import read_steps
        from counterflow.configs import load_config

        uses = load_config(folder / "config.yaml").buffer.uses
        for step in read_steps(folder / "archive"):
            # The archive knows of a step before the server does.
            if step.learner_version >= read.policy_version:
                break
            groups += len(step.groups)
            tokens += sum(len(batch.column("response_token_ids").flatten()) for batch in step.groups)
    complaints = list(_complaints(read, groups, tokens, uses))
    return Finding(read, source, groups, tokens, complaints)


def _read(folder: Path) -> tuple[Ledger, str]:
    from counterflow.buffer.connection import Address

    if not folder.is_dir() or not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is no run folder (no config.yaml there): name one that `counterflow run` made")
    place = read_place(folder)
    if place:
        with suppress(BufferUnavailable):
            address = Address(place.url, _ANSWER_TIMEOUT_S, outage_s=0.0)
            return _ask(address, place.run_id), f"its server, {address.shown}"
    summary = read_json(folder / "summary.json", dict) or {}
    if place and summary.get("status") != "completed" and (folder / "buffer").is_dir():
        # A run that died may have seen its server last before the end.
        with suppress(BufferUnavailable):
            return _ask_left_behind(folder / "buffer", place.run_id), "what its server left on the disk"
    if summary.get("ledger"):
        names = {field.name for field in fields(Ledger)}
        return Ledger(**{k: v for k, v in summary["ledger"].items() if k in names}), "the summary that it wrote"
    raise ConfigError(
        f"{folder}: its server does not answer and it left no ledger: start the server that its config.yaml names"
    )


def _ask(address: Any, run_id: str) -> Ledger:
    from counterflow.buffer.connection import discover
    from counterflow.buffer.store import read_ledger

    found = read_ledger(discover(address), run_id)
    if not found.generated:
        raise BufferUnavailable(f"the server at {address.shown} does not know run {run_id}")
    return found


def _ask_left_behind(data: Path, run_id: str) -> Ledger:
    """Read a copy of the data: its own server may be about to come back."""
    from counterflow.buffer.server import EmbeddedServer

    with tempfile.TemporaryDirectory(prefix="counterflow-") as copy:
        shutil.copytree(data, Path(copy) / "buffer")
        with EmbeddedServer(Path(copy) / "buffer", _START_TIMEOUT_S) as server:
            return _ask(replace(server.address, outage_s=0.0), run_id)


def _complaints(ledger: Ledger, archived_groups: int, archived_tokens: int, uses: int) -> Iterator[str]:
    if ledger.missing_groups:
        yield f"{ledger.missing_groups} groups were generated and are nowhere"
    if ledger.missing_tokens:
        yield f"{ledger.missing_tokens} tokens were generated and are nowhere"
    # Each use of a group is archived, while a group counts as trained with its last.
    fewest, most = ledger.trained * uses, (ledger.trained + ledger.buffered + ledger.in_flight) * uses
    if uses > 1 and not fewest <= archived_groups <= most:
        yield f"the archive holds {archived_groups} uses of groups, which should be {fewest} to {most}"
    if uses == 1 and (archived_groups, archived_tokens) != (ledger.trained, ledger.tokens_trained):
        yield (
            f"the archive holds {archived_groups} groups and {archived_tokens} tokens, {ledger.trained} and "
            f"{ledger.tokens_trained} were trained"
        )


def _print(found: Finding) -> None:
    it = found.ledger
    table = Table()
    for heading, justify in (("", "left"), ("groups", "right"), ("tokens", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_row("generated", f"{it.generated:,}", f"{it.tokens_generated:,}", end_section=True)
    table.add_row("trained", f"{it.trained:,}", f"{it.tokens_trained:,}")
    table.add_row("buffered", f"{it.buffered:,}", f"{it.tokens_buffered:,}")
    table.add_row("in flight", f"{it.in_flight:,}", "")
    for reason in sorted(it.dropped.keys() | it.tokens_dropped.keys()):
        groups, tokens = it.dropped.get(reason, 0), it.tokens_dropped.get(reason, 0)
        table.add_row(f"dropped: {reason}", f"{groups:,}", f"{tokens:,}")
    console = Console()
    console.print(f"ledger, by {found.source}", markup=False, highlight=False)
    console.print(table)
    console.print(
        f"archived: {found.archived_groups:,} groups, {found.archived_tokens:,} tokens; leases given out again: "
        f"{it.reissued:,}; groups that a server lost: {it.regenerated:,}; strangers' entries: {it.strangers:,}",
        markup=False,
        highlight=False,
    )
    for complaint in found.complaints:
        console.print(f"does not close: {complaint}", markup=False)
    if not found.complaints:
        console.print("closes")

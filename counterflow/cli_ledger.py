"""`counterflow ledger`: where every group and token of a run is, and whether the sums close.

`ledger` is a typer command: a run folder flows in; a table or JSON, and an exit code, flow out. Asks the run's server
while it lives; else reads what the run wrote at its end; else what a killed run's own server left on the disk.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from counterflow.cli_inspect import printable
from counterflow.errors import BufferUnavailable, ConfigError, first_line
from counterflow.locks import RUN, is_held
from counterflow.place import read_config, read_place
from counterflow.records import Ledger
from counterflow.summary import read_outcome

if TYPE_CHECKING:
    from counterflow.buffer.connection import Address

_ANSWER_TIMEOUT_S = 2.0
_START_TIMEOUT_S = 30.0


class _NoGroupYet(BufferUnavailable):
    """The server answers, and has nothing of the run."""


@dataclass(frozen=True)
class Finding:
    """A ledger, whence it comes, and what the archive holds beside it.

    `uncommitted_steps` are archived past the ledger's policy version: the run was about to tell its server of them.
    """

    ledger: Ledger
    source: str
    archived_groups: int
    archived_tokens: int
    uncommitted_steps: int
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
    buffer = read_config(folder).buffer
    read, source = _read(folder, embedded=buffer.url is None)
    groups, tokens, uncommitted = 0, 0, 0
    if (folder / "archive").exists():
        from counterflow.buffer.archive import read_steps

        for step in read_steps(folder / "archive"):
            # The archive knows of a step before the server does.
            if step.learner_version >= read.policy_version:
                uncommitted += 1
                continue
            groups += len(step.groups)
            tokens += sum(len(batch.column("response_token_ids").flatten()) for batch in step.groups)
    complaints = list(_complaints(read))
    if not (folder / "branches.json").exists():
        # Of a lost branch, groups were trained that no archive holds.
        complaints += _disagreements(read, groups, tokens, buffer.uses)
    return Finding(read, source, groups, tokens, uncommitted, complaints)


def _read(folder: Path, *, embedded: bool) -> tuple[Ledger, str]:
    from counterflow.buffer.connection import Address

    place = read_place(folder)
    trouble = BufferUnavailable("no buffer.json names it: the run ended before that, or the file was lost")
    if place:
        try:
            address = Address(place.url, _ANSWER_TIMEOUT_S, outage_s=0.0)
            return _ask(address, place.run_id, f"the server at {address.shown}"), f"its server, {address.shown}"
        except BufferUnavailable as error:
            trouble = error
    if (place is None or isinstance(trouble, _NoGroupYet)) and is_held(folder / RUN):
        raise ConfigError(f"{folder}: the run is only starting, nothing has been generated yet: ask again later")
    status, written = read_outcome(folder)
    if place and status != "completed" and (folder / "buffer").is_dir():
        # A run that died may have seen its server last before the end.
        try:
            return _ask_left_behind(folder / "buffer", place.run_id), "what its server left on the disk"
        except BufferUnavailable as error:
            trouble = error
    if written:
        # An embedded server ends with its run: that it is silent says nothing.
        why = "" if embedded and status == "completed" else f" (its server was not read: {_short(trouble)})"
        return written, f"the summary that it wrote{why}"
    raise ConfigError(f"{folder}: the run left no ledger, and its server does not tell it: {first_line(trouble)}")


def _short(trouble: BufferUnavailable) -> str:
    if trouble.__cause__ is None:
        return str(trouble).partition(": ")[0]
    # A server that did not start says at the end of its log what ended it.
    return str(trouble.__cause__).strip().rpartition("\n")[2].rstrip(".")


def _ask(address: Address, run_id: str, where: str) -> Ledger:
    from counterflow.buffer.connection import discover
    from counterflow.buffer.store import read_ledger

    try:
        found = read_ledger(discover(address), run_id)
    except ValueError as error:
        raise BufferUnavailable(
            f"what {where} holds of run {run_id} is no ledger: see who else writes there"
        ) from error
    if not found.generated:
        raise _NoGroupYet(f"{where} does not know run {run_id}: it was removed there, or has no group yet")
    return found


def _ask_left_behind(data: Path, run_id: str) -> Ledger:
    """Read a copy of the data: its own server may be about to come back."""
    from counterflow.buffer.server import EmbeddedServer

    try:
        with tempfile.TemporaryDirectory(prefix="counterflow-") as copy:
            shutil.copytree(data, Path(copy) / "buffer")
            with EmbeddedServer(Path(copy) / "buffer", _START_TIMEOUT_S) as server:
                return _ask(replace(server.address, outage_s=0.0), run_id, str(data))
    except OSError as error:
        raise BufferUnavailable(f"{data} cannot be copied ({first_line(error)}): see that it may be read") from error
    except BufferUnavailable as error:
        if error.__cause__ is None:
            raise
        raise BufferUnavailable(f"{data} cannot be read ({_short(error)}): restore it from a copy") from error.__cause__


def _complaints(ledger: Ledger) -> Iterator[str]:
    if ledger.missing_groups:
        yield f"{ledger.missing_groups} groups were generated and are nowhere"
    if ledger.missing_tokens:
        yield f"{ledger.missing_tokens} tokens were generated and are nowhere"


def _disagreements(ledger: Ledger, archived_groups: int, archived_tokens: int, uses: int) -> Iterator[str]:
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
        table.add_row(f"dropped: {printable(reason)}", f"{groups:,}", f"{tokens:,}")
    console = Console(markup=False, highlight=False, emoji=False)
    say = partial(console.print, soft_wrap=True)
    say(f"ledger, by {printable(found.source)}")
    console.print(table)
    say(
        f"archived: {found.archived_groups:,} groups, {found.archived_tokens:,} tokens; leases given out again: "
        f"{it.reissued:,}; groups that a server lost: {it.regenerated:,}; strangers' entries: {it.strangers:,}"
    )
    if found.uncommitted_steps:
        steps = "1 step" if found.uncommitted_steps == 1 else f"{found.uncommitted_steps:,} steps"
        say(f"the archive holds {steps} more than the ledger knows: archived, and not committed yet")
    for complaint in found.complaints:
        say(f"does not close: {complaint}")
    if not found.complaints:
        say("closes")

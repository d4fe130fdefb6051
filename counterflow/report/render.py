"""From a run folder to one self-contained `report.html`.

In: the Parquet records, `summary.json` and `config.yaml`, any of which a killed run may lack. Out: the page's path.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from counterflow.configs.load import load_config
from counterflow.errors import ConfigError, OutputError
from counterflow.recorder import RunRecords, read_run, summarize
from counterflow.report.pictures import pictures_of
from counterflow.report.words import count, duration, interval, percent, short
from counterflow.summary import read_summary

__all__ = ["headline", "write_report"]

UNFINISHED = "There is no summary.json: the run is still going, or was killed. The figures are those of its records."


@dataclass(frozen=True)
class Tile:
    """One number on top of the page, and what it means."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Equation:
    """One line of the ledger: a total and the terms that must add up to it."""

    unit: str
    total: int
    terms: list[tuple[str, int]]

    @property
    def difference(self) -> int:
        """What is missing on the right-hand side."""
        return self.total - sum(part for _, part in self.terms)


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder, from what is there.

    Raises:
        ConfigError: the folder is none, or a file in it is damaged.
        OutputError: the page cannot be written.
    """
    records = read_run(folder)
    summary = _read_summary(folder, records)
    config_file = folder / "config.yaml"
    environment = Environment(
        loader=PackageLoader("counterflow.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template("template.html").render(
        name=folder.resolve().name,
        summary=summary,
        headline=headline(summary).replace(" %", "\u00a0%"),
        tiles=_tiles(summary, records),
        equations=_equations(summary["ledger"]),
        pictures=pictures_of(records, summary),
        evaluations=records.evaluations,
        config=config_file.read_text(encoding="utf-8", errors="replace") if config_file.exists() else None,
    )
    path, temporary = folder / "report.html", folder / ".report.html.tmp"
    try:
        # A folder's name need not be text.
        temporary.write_text(page, encoding="utf-8", errors="replace")
        temporary.replace(path)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror or error}): see that its disk has room and lets this user write"
        ) from error
    return path


def headline(summary: dict[str, Any]) -> str:
    """What happened to held-out accuracy, in one plain sentence that claims no more than the intervals do."""
    before, after = summary["heldout_before"], summary["heldout_after"]
    if before is None:
        return "No held-out evaluation was made, so this run says nothing about accuracy."
    if after is None:
        return f"Held-out accuracy was {interval(before)} before training; it was not measured again."
    if after["low"] > before["high"]:
        return f"Held-out accuracy rose from {interval(before)} to {interval(after)}; the intervals do not overlap."
    if after["high"] < before["low"]:
        return f"Held-out accuracy fell from {interval(before)} to {interval(after)}; the intervals do not overlap."
    if after["rate"] == before["rate"]:
        return f"Held-out accuracy did not change: {interval(before)} before and {interval(after)} after."
    direction = "higher" if after["rate"] > before["rate"] else "lower"
    return (
        f"Held-out accuracy was {interval(before)} before and {interval(after)} after: {direction}, "
        "but the intervals overlap, so this run does not show a change."
    )


def _read_summary(folder: Path, records: RunRecords) -> dict[str, Any]:
    summary = read_summary(folder)
    if summary is not None:
        return summary
    try:
        config = load_config(folder / "config.yaml", [])
    except ConfigError:
        return _summary_of(records, None, None)
    return _summary_of(records, config.admission.max_lag, config.run.seed)


def _summary_of(records: RunRecords, max_lag: float | None, seed: int | None) -> dict[str, Any]:
    wall_s = records.steps[-1].time_s if records.steps else 0.0
    return summarize(
        records, status="interrupted", ledger=None, wall_s=wall_s, max_lag=max_lag, seed=seed, reason=UNFINISHED
    )


def _tiles(summary: dict[str, Any], records: RunRecords) -> list[Tile]:
    before, after, lag, busy = (summary[key] for key in ("heldout_before", "heldout_after", "lag", "busy"))
    latest, evaluated = after or before, "never evaluated"
    if before is not None:
        earlier = f", {percent(before['rate'])} before" if after else ", before training"
        evaluated = f"version {records.evaluations[-1].policy_version}{earlier}" if records.evaluations else earlier[2:]
    bound = "unbounded" if summary["max_lag"] == "inf" else f"max_lag {short(summary['max_lag'])}"
    return [
        Tile("Held-out accuracy", percent(latest and latest["rate"]), evaluated),
        Tile("Steps", count(summary["steps"]), f"policy version {summary['policy_version']}"),
        Tile("Mean lag", short(lag["mean"]), f"p95 {short(lag['p95'])}, largest {short(lag['max'])}; {bound}"),
        Tile("Learner busy", percent(busy["learner"], 0), f"actors {percent(busy['actors'], 0)}"),
        Tile("Overlap", percent(summary["overlap"], 0), "training while generating"),
        Tile("Tokens trained", count(summary["tokens_trained"]), f"{count(summary['tokens_generated'])} generated"),
        Tile("Wall time", duration(summary["wall_s"]), "from start to end"),
        Tile("Seed", short(summary["seed"]), "of the whole run"),
    ]


def _equations(ledger: dict[str, Any] | None) -> list[Equation]:
    if ledger is None:
        return []
    groups = [("trained", ledger["trained"]), ("buffered", ledger["buffered"]), ("in flight", ledger["in_flight"])]
    tokens = [("trained", ledger["tokens_trained"]), ("buffered", ledger["tokens_buffered"])]
    return [
        Equation("groups", ledger["generated"], groups + _dropped(ledger["dropped"])),
        Equation("tokens", ledger["tokens_generated"], tokens + _dropped(ledger["tokens_dropped"])),
    ]


def _dropped(reasons: dict[str, int]) -> list[tuple[str, int]]:
    return [(f"dropped: {reason}", dropped) for reason, dropped in reasons.items()] or [("dropped", 0)]

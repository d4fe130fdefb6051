"""`counterflow audit`: what each choice of the KL term does to its gradient, exactly, on toys or for a configuration.

`audit` is a typer command; arguments flow in, a table, JSON or a picture flow out. Knows no mathematics.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from counterflow.errors import ConfigError


def audit(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file of a run to audit; absent: a toy.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="As learner.lr=3e-4.")] = None,
    vocab: Annotated[int, typer.Option(min=2, help="Toy: symbols.")] = 3,
    length: Annotated[int, typer.Option(min=1, help="Toy: tokens of a sequence.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Toy: seed of its policies.")] = 0,
    drift: Annotated[float, typer.Option(help="Toy: how far mu's logits lie from pi's, standard deviation.")] = 0.3,
    cap: Annotated[float, typer.Option(help="Toy, or your own: cap of the truncated row.")] = 2.0,
    tables: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help='Your own toy: {"vocab", "length", "pi", "mu", "ref"}.')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Also draw bias against noise: FILE.png, .svg or .pdf.")] = None,
) -> None:
    """Print the exact bias, direction and noise of every KL choice, by the production loss over all sequences."""
    if config is not None and tables is not None:
        raise ConfigError("audit takes a CONFIG or --tables, not both")
    toy = ["vocab", "length", "seed", "drift"] + (["cap"] if config is not None else [])
    sources = {name: context.get_parameter_source(name) for name in toy}
    unread = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if unread and (config is not None or tables is not None):
        raise ConfigError(
            f"--{' and --'.join(unread)} would have no effect: {'a CONFIG' if config is not None else '--tables'} "
            "says it itself; leave it out" + (", or override objective.importance.cap" if "cap" in unread else "")
        )
    if not cap > 0:
        raise ConfigError(f"--cap is {cap:g}: it needs a number above 0; inf does not cut")
    if picture is not None:
        _check_picture(picture)
    if config is not None:
        found, regimes, title = _of_config(config, overrides or [])
    elif tables is not None:
        found, regimes, title = _of_tables(tables, cap)
    else:
        found, regimes, title = _of_toy(vocab, length, seed, drift, cap)
    drawn = "" if picture is None else _draw(regimes, picture, title)
    _write((json.dumps(found, allow_nan=False) + "\n") if as_json else _text(found, regimes, title) + drawn)
    if as_json and drawn:
        typer.echo(drawn, err=True, nl=False)


def _check_picture(path: Path) -> None:
    from counterflow.learner.objective.picture import FORMATS

    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--picture {path}: its suffix says the format: give a file name in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--picture {path}: there is no folder {path.parent}: make it first")


def _draw(regimes: dict[str, Any], path: Path, title: str) -> str:
    """What to say of the picture."""
    if not regimes:
        return "picture: none, because beta is 0: there is no KL term to draw\n"
    from counterflow.learner.objective.picture import draw_audit

    try:
        draw_audit(regimes, path, title)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--picture {path}: it cannot be written ({error}): give another path") from error
    return f"picture: {path}\n"


def _of_toy(vocab: int, length: int, seed: int, drift: float, cap: float) -> tuple[dict[str, Any], dict[str, Any], str]:
    from counterflow.learner.objective.audit import audit_toy

    try:
        found = audit_toy(vocab, length, seed, drift, cap)
    except ValueError as error:
        raise ConfigError(f"--vocab {vocab} --length {length} --drift {drift:g}: {error}") from error
    return found, found, f"V = {vocab}, T = {length}, drift {drift:g}, seed {seed}"


def _of_config(path: Path, overrides: list[str]) -> tuple[dict[str, Any], dict[str, Any], str]:
    from counterflow.configs import load_config
    from counterflow.learner.objective_choice import audit_config

    found = audit_config(load_config(path, overrides))
    return found, {regime: found[regime] for regime in ("near", "far") if regime in found}, found["verdict"]


def _of_tables(path: Path, cap: float) -> tuple[dict[str, Any], dict[str, Any], str]:
    from counterflow.learner.objective.audit import audit_tables

    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_without_repeats)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file: check the path") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: it cannot be read as JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: it must hold an object with vocab, length, pi, mu and ref")
    try:
        found = audit_tables(document, cap)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return found, {str(path): found}, str(path)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"a key stands there twice among {', '.join(keys)}: keep one")
    return dict(pairs)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _text(found: dict[str, Any], regimes: dict[str, Any], title: str) -> str:
    from rich.console import Console
    from rich.table import Table

    from counterflow.learner.objective.row_words import LEGEND

    page = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding, errors="backslashreplace")
    console = Console(file=page, width=150, highlight=False, markup=False)
    if "verdict" in found:
        console.print(f"row {found['row']}: {found['what']}")
        console.print(f"verdict: {found['verdict']}")
        for warning in found["warnings"]:
            console.print(f"warning: {warning}")
        assumed = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found["assumptions"].items())
        console.print(f"assumed: {assumed} (drift: standard deviation of mu's logits about pi's)")
        if regimes:
            console.print("this_run: the run's own loss over all groups of two; other rows: one response, no baseline")
    else:
        console.print(title)
    for regime, audited in regimes.items():
        table = Table("row", "expected gradient", "biased", "bias", "relative", "cosine", "variance", title=regime)
        for row in audited["rows"]:
            relative = "undefined" if row["bias_rel"] is None else f"{row['bias_rel']:.4f}"
            numbers = (f"{row['bias_abs']:.3e}", relative, f"{row['cosine']:.4f}", f"{row['variance']:.3e}")
            table.add_row(row["row"], row["expected"], "yes" if row["biased"] else "no", *numbers)
        console.print(table)
    console.print(LEGEND)
    page.seek(0)
    return page.read()

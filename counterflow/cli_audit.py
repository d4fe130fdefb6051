"""`counterflow audit`: what each choice of the KL term does to its gradient, exactly, on toys or for a configuration.

`audit` is a typer command; arguments flow in, a table, JSON or a picture flow out. Knows no mathematics.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from counterflow.errors import ConfigError


def audit(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file of a run to audit; absent: a toy.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="As learner.lr=3e-4.")] = None,
    vocab: Annotated[int, typer.Option(help="Toy: symbols.")] = 3,
    length: Annotated[int, typer.Option(help="Toy: tokens of a sequence.")] = 3,
    seed: Annotated[int, typer.Option(help="Toy: seed of its policies.")] = 0,
    drift: Annotated[float, typer.Option(help="Toy: how far mu's logits lie from pi's, standard deviation.")] = 0.3,
    cap: Annotated[float, typer.Option(help="Toy: cap of the truncated row.")] = 2.0,
    tables: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help='Your own toy: {"vocab", "length", "pi", "mu", "ref"}.')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Also draw bias against noise into this file.")] = None,
) -> None:
    """Print the exact bias, direction and noise of every KL choice, by the production loss over all sequences."""
    if config is not None and tables is not None:
        raise ConfigError("audit takes a CONFIG or --tables, not both")
    try:
        if config is not None:
            found, regimes, title = _of_config(config, overrides or [])
        elif tables is not None:
            found, regimes, title = _of_tables(tables, cap)
        else:
            from counterflow.learner.objective.audit import audit_toy

            found = regimes = audit_toy(vocab, length, seed, drift, cap)
            title = f"V = {vocab}, T = {length}, drift {drift:g}, seed {seed}"
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if picture is not None and regimes:
        from counterflow.learner.objective.picture import draw_audit

        draw_audit(regimes, picture, title)
    if as_json:
        typer.echo(json.dumps(found, allow_nan=False))
        return
    _print(found, regimes, title)
    if picture is not None and regimes:
        typer.echo(f"picture: {picture}")


def _of_config(path: Path, overrides: list[str]) -> tuple[dict[str, Any], dict[str, Any], str]:
    from counterflow.configs import load_config
    from counterflow.learner.objective_choice import audit_config

    found = audit_config(load_config(path, overrides))
    return found, {regime: found[regime] for regime in ("near", "far") if regime in found}, found["verdict"]


def _of_tables(path: Path, cap: float) -> tuple[dict[str, Any], dict[str, Any], str]:
    from counterflow.learner.objective.audit import audit_tables

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file: check the path") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: it cannot be read as JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: it must hold an object with vocab, length, pi, mu and ref")
    found = audit_tables(document, cap)
    return found, {str(path): found}, str(path)


def _print(found: dict[str, Any], regimes: dict[str, Any], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from counterflow.learner.objective.row_words import LEGEND

    console = Console(width=150, highlight=False, markup=False)
    if "verdict" in found:
        console.print(f"row {found['row']}: {found['what']}")
        console.print(f"verdict: {found['verdict']}")
        for warning in found["warnings"]:
            console.print(f"warning: {warning}")
        assumed = ", ".join(f"{name} {value}" for name, value in found["assumptions"].items())
        console.print(f"assumed: {assumed} (drift: standard deviation of mu's logits about pi's)")
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

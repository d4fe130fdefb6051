"""Bias and variance of on-policy KL gradients against length, in two regimes, exactly: the orderings of the literature.

Policies over two symbols with independent logits A (pi) and B (ref): both N(0, 1), or B = A + 0.1 N(0, 1). Every number
is the production loss over all 2^T sequences. Writes a picture and prints the means over seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from counterflow.learner.objective.audit import catalogue, moments
from counterflow.learner.objective.tables import random_tables

REGIMES = {"independent": None, "near": 0.1}
"""Distance of ref from pi; None: it knows nothing of pi."""
ROWS = {
    "on_k1_reward": ("k1 in reward", "#1b7f5c", "-"),
    "on_k3_both": ("k3 in both", "#1b7f5c", "--"),
    "on_k2_loss": ("k2 in loss", "#d08a1d", "-"),
    "on_k3_loss": ("k3 in loss", "#b0413e", "-"),
    "on_k1_loss": ("k1 in loss", "#444444", "-"),
    "on_k3_reward": ("k3 in reward", "#7a4fa3", "-"),
}

Curves = dict[str, dict[str, dict[str, list[float]]]]
"""{regime: {row: {"bias": [one a length], "variance": [...]}}}: bias relative to G; variance over |G|^2."""


def curves(lengths: Sequence[int], seeds: int) -> Curves:
    """Geometric means over seeds."""
    found: Curves = {regime: {row: {"bias": [], "variance": []} for row in ROWS} for regime in REGIMES}
    for regime, distance in REGIMES.items():
        for length in lengths:
            measured: dict[str, list[tuple[float, float]]] = {row: [] for row in ROWS}
            for seed in range(seeds):
                tables = random_tables(2, length, seed, drift=0.0, distance=distance)
                truth = tables.fields()["G"]
                size = truth.norm().item()
                for row in ROWS:
                    sample = moments(tables, catalogue(cap=1.0)[row], on_policy=True)
                    measured[row].append(((sample.mean - truth).norm().item() / size, sample.variance / size**2))
            for row, pairs in measured.items():
                bias, variance = np.exp(np.log(np.maximum(np.array(pairs), 1e-16)).mean(0))
                found[regime][row]["bias"].append(float(bias))
                found[regime][row]["variance"].append(float(variance))
    return found


def draw(found: Curves, lengths: Sequence[int], path: Path) -> None:
    """Two rows of panels, bias above variance; a column a regime."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(found), sharex=True, squeeze=False)
    titles = {"independent": "A, B ~ N(0, 1): far from the reference", "near": "B = A + 0.1 N(0, 1): near it"}
    for column, (regime, rows) in enumerate(found.items()):
        for line, quantity in enumerate(("bias", "variance")):
            axes = panels[line][column]
            for row, values in rows.items():
                label, color, style = ROWS[row]
                # Exact rows lie at rounding error: drawn as zero would be, below all others.
                height = [max(value, 1e-3) if quantity == "bias" else value for value in values[quantity]]
                axes.plot(lengths, height, style, color=color, marker="o", markersize=3.5, label=label)
            axes.set_yscale("log")
            axes.grid(alpha=0.3)
            axes.set_ylabel("|bias| / |G|" if quantity == "bias" else "variance / |G|^2")
        panels[0][column].set_title(titles[regime])
        panels[1][column].set_xlabel("length T")
    panels[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shortest", type=int, default=5)
    parser.add_argument("--longest", type=int, default=11)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--picture", type=Path, default=Path("build/figure1.png"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the curves as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = range(options.shortest, options.longest + 1)
    found = curves(lengths, options.seeds)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(found, lengths, options.picture)
    console = Console(width=140)
    for regime, rows in found.items():
        for quantity in ("bias", "variance"):
            table = Table("estimator", *(f"T = {length}" for length in lengths), title=f"{regime}: {quantity}")
            for row, values in rows.items():
                table.add_row(ROWS[row][0], *(f"{value:.3g}" for value in values[quantity]))
            console.print(table)
    console.print(f"picture: {options.picture}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

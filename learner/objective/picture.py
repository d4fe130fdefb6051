"""The audit as a picture: bias against noise of every row, near the reference and far from it.

In flow the plain numbers of an audit, out flows a file. Imports matplotlib only when it draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_UNBIASED, _BIASED, _OWN = "#1b7f5c", "#b0413e", "#1f4e9c"
_LEAST = 1e-4
"""Relative bias drawn for a row that has none."""


def draw_audit(audits: Mapping[str, Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw regimes, such as {"near": audit, "far": audit}, side by side into `path` (its suffix says the format)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(audits), 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, wrap=True)
    axes = figure.subplots(1, len(audits), squeeze=False)[0]
    for place, (regime, found) in zip(axes, audits.items(), strict=True):
        _draw(place, regime, found["rows"])
    figure.savefig(path, dpi=150)


def _draw(place: Any, regime: str, rows: Sequence[Mapping[str, Any]]) -> None:
    shown = [row for row in rows if row["bias_rel"] is not None]
    for row in shown:
        own = row["row"] == "this_run"
        color = _OWN if own else (_BIASED if row["biased"] else _UNBIASED)
        across, up = max(row["bias_rel"], _LEAST), max(row["variance"], 1e-300)
        hollow = row["row"].startswith("on_")
        place.scatter(
            across,
            up,
            s=140 if own else 36,
            marker="*" if own else "o",
            facecolors="none" if hollow else color,
            edgecolors=color,
            zorder=3,
        )
        name = "this run" if own else row["row"].removeprefix("off_").removeprefix("on_").replace("_", " ")
        place.annotate(name, (across, up), xytext=(5, 3), textcoords="offset points", fontsize=8, color=color)
    place.set_xscale("log")
    place.set_yscale("log")
    place.axvline(1.0, color="#999999", linewidth=0.8, linestyle=":")
    place.set_xlabel("bias, relative to the true KL gradient (exact rows at the left edge)")
    place.set_ylabel("variance of one sample's gradient")
    place.set_title(f"{regime} the reference" if regime == "near" else f"{regime} from the reference")
    place.grid(alpha=0.25, which="both")

"""The audit as a picture: every row's bias and noise, near the reference and far from it.

In flow the plain numbers of an audit, out flows a file. Imports matplotlib only when it draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMATS = (".png", ".svg", ".pdf")
UNBIASED, BIASED, OWN = "#1b7f5c", "#b0413e", "#1f4e9c"
_MOST_BIAS = 3.0
"""Relative biases beyond it are drawn at it, with their number beside."""


def draw_audit(audits: Mapping[str, Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw regimes, such as {"near": audit, "far": audit}, into `path`, whose suffix is one of FORMATS.

    One line a row; filled marks are the first regime, hollow ones the second.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [row["row"] for row in next(iter(audits.values()))["rows"]]
    figure = Figure(figsize=(11.5, 1.6 + 0.27 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, wrap=True, fontsize=11, parse_math=False)
    bias, noise = figure.subplots(1, 2, sharey=True)
    for place, (regime, found) in enumerate(audits.items()):
        for line, row in enumerate(found["rows"]):
            color = OWN if row["row"] == "this_run" else (BIASED if row["biased"] else UNBIASED)
            style = {"s": 38, "edgecolors": color, "facecolors": "none" if place else color, "zorder": 3}
            style["label"] = f"{regime} the reference" if regime == "near" else f"{regime} from the reference"
            relative = row["bias_rel"]
            if relative is not None:
                bias.scatter(min(relative, _MOST_BIAS), line, **style)
                if relative > _MOST_BIAS:
                    bias.annotate(f"{relative:.1f}", (_MOST_BIAS, line), xytext=(6, -3), textcoords="offset points")
            if row["variance"] > 0:
                noise.scatter(row["variance"], line, **style)
    bias.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    bias.invert_yaxis()
    bias.axvline(1.0, color="#999999", linestyle=":", linewidth=1)
    bias.set_xlabel("bias over the true KL gradient (1: as far off as no KL term at all)")
    noise.set_xscale("log")
    noise.set_xlabel("variance of one sample's gradient")
    for axes in (bias, noise):
        axes.grid(alpha=0.3)
    handles, labels = bias.get_legend_handles_labels()
    found_once = dict(zip(labels, handles, strict=True))
    figure.legend(found_once.values(), found_once.keys(), loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(path, dpi=130)

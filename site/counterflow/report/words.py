"""Numbers as people read them. Pure functions from values, some of them unknown, to short texts."""

from __future__ import annotations

__all__ = ["count", "duration", "interval", "percent", "short"]

UNKNOWN = "n/a"


def interval(heldout: dict[str, float]) -> str:
    """A success rate with its interval, in percent."""
    return f"{100 * heldout['rate']:.1f} % [{100 * heldout['low']:.1f}, {100 * heldout['high']:.1f}]"


def percent(share: float | None, digits: int = 1) -> str:
    """A share as percent."""
    return UNKNOWN if share is None else f"{100 * share:.{digits}f} %"


def short(value: float | None) -> str:
    """At most two decimals."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def count(value: int) -> str:
    """Three digits and a letter from ten thousand on."""
    if value < 10_000:
        return str(value)
    for size, letter in ((10**9, "G"), (10**6, "M")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value / 1000:.0f} k"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, two units of them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute} min" if hours else f"{minute} min {second} s"

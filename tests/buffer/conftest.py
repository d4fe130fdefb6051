"""What all tests of the buffer need."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from counterflow.buffer.ahead import Ahead


@pytest.fixture(autouse=True)
def ahead_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Consumers that a test leaves open would fetch ahead to the end of the session, beside all tests after it."""
    begun: list[Ahead] = []
    begin = Ahead.begin

    def noted(ahead: Ahead, look: Callable[[], bool], every_s: float) -> None:
        begun.append(ahead)
        begin(ahead, look, every_s)

    monkeypatch.setattr(Ahead, "begin", noted)
    yield
    for ahead in begun:
        ahead.end()

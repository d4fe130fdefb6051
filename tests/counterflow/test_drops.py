"""Drops under watch: when they end a run, and in which words."""

from __future__ import annotations

import pytest

from counterflow.drops import DropWatch
from counterflow.errors import RunFailed
from counterflow.records import Ledger


def ledger(**dropped: int) -> Ledger:
    return Ledger(0, 0, 0, 0, dropped, 0, 0, 0, {})


def test_run_without_hope_ends_with_every_reason_and_the_last_failure() -> None:
    watch = DropWatch(groups_per_step=2, step_timeout_s=60)
    assert watch.look(0, ledger(poison=20), None) is None
    with pytest.raises(RunFailed, match=r"24 groups .*: 21 poison \(.*\), 3 stale \(.*max_lag\); the last .*: boom"):
        watch.look(0, ledger(poison=21, stale=3), "boom")


def test_a_step_begins_the_count_anew() -> None:
    watch = DropWatch(groups_per_step=2, step_timeout_s=60)
    assert watch.look(3, ledger(poison=500), None) is None
    assert watch.look(3, ledger(poison=520), None) is None
    with pytest.raises(RunFailed):
        watch.look(3, ledger(poison=521), None)


def test_rare_signal_is_told_once_a_step_and_ends_nothing() -> None:
    watch = DropWatch(groups_per_step=2, step_timeout_s=60)
    warning = watch.look(0, ledger(filtered=21), None)
    assert warning is not None and "21 filtered" in warning and "60 s" in warning
    assert watch.look(0, ledger(filtered=5000), None) is None
    assert watch.look(1, ledger(filtered=5001), None) is None
    assert watch.look(1, ledger(filtered=5022), None) is not None


def test_groups_that_may_be_stale_at_once_end_the_run() -> None:
    watch = DropWatch(groups_per_step=2, step_timeout_s=60, groups_ahead=50)
    assert watch.look(0, ledger(stale=70), None) is None
    with pytest.raises(RunFailed, match="71 stale"):
        watch.look(0, ledger(stale=71), None)

"""What a run left in its folder was damaged: one line names the file and what is wrong in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from counterflow.records import Ledger

WHOLE = asdict(Ledger(1, 1, 0, 0, {}, 2, 2, 0, {}, policy_version=1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run: [", "line 1: malformed YAML"),
        ("- run", "must hold sections"),
        ("runs: {}\nactor: {}\n", "runs: there is no such key"),
        ("run: " + "[" * 3000, "cannot be read: maximum recursion depth"),
        ("run: {steps: " + "9" * 5000 + "}", "cannot be read: Exceeds the limit"),
    ],
    ids=["not-yaml", "no-mapping", "unknown-keys", "deep", "long"],
)
def test_damaged_configuration(run_folder: Path, refused: Callable[..., str], text: str, words: str) -> None:
    (run_folder / "config.yaml").write_text(text)
    said = refused("ledger", run_folder)
    assert f"{run_folder}/config.yaml" in said and words in said and "restore it from a copy" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Invalid JSON"),
        ("\xff", "Invalid JSON"),
        ("[" * 100_000, "recursion limit"),
        ("[]", "an object"),
        ('"completed"', "an object"),
        ("{}", "status: Field required"),
        ('{"status": "completed"}', "ledger: Field required"),
        ('{"status": 3, "ledger": null}', "status: Input should be a valid string"),
        ('{"status": "completed", "ledger": [1]}', "ledger: Input should be"),
    ],
    ids=["empty", "bytes", "deep", "list", "text", "nothing", "incomplete", "status", "ledger"],
)
def test_damaged_summary(run_folder: Path, refused: Callable[..., str], text: str, words: str) -> None:
    (run_folder / "summary.json").write_text(text, encoding="latin-1")
    said = refused("ledger", run_folder)
    assert f"{run_folder}/summary.json cannot be read (" in said and words in said and "restore it from a copy" in said


@pytest.mark.parametrize("name", [field.name for field in fields(Ledger)])
def test_ledger_of_a_summary_that_lacks_a_number_or_holds_another_thing(
    run_folder: Path, refused: Callable[..., str], name: str
) -> None:
    wrong: list[object] = [None, "1", True, 1.5, [1], {"stale": "1"}, {"stale": None}]
    without = {key: value for key, value in WHOLE.items() if key != name}
    for ledger in [without, *({**WHOLE, name: value} for value in wrong)]:
        (run_folder / "summary.json").write_text(json.dumps({"status": "completed", "ledger": ledger}))
        assert f"summary.json cannot be read (ledger.{name}" in refused("ledger", run_folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Invalid JSON"),
        ("[]", "an object"),
        ('{"url": "redis://h/0"}', "run_id: Field required"),
        ('{"url": 3, "run_id": "r"}', "url: Input should be a valid string"),
        ('{"url": "redis://h:70000/0", "run_id": "r"}', "url: it is no redis://"),
        ('{"url": "redis://me:secret/0@h:1/0", "run_id": "r"}', "url: it is no redis://"),
        ('{"url": "redis://[::1/0", "run_id": "r"}', "url: it is no redis://"),
        ('{"url": "http://h/0", "run_id": "r"}', "url: it is no redis://"),
        ('{"url": "redis://h/0?colour=red", "run_id": "r"}', "url: it is no redis://"),
    ],
)
def test_damaged_place(run_folder: Path, refused: Callable[..., str], text: str, words: str) -> None:
    (run_folder / "buffer.json").write_text(text)
    said = refused("ledger", run_folder)
    assert f"{run_folder}/buffer.json cannot be read (" in said and words in said and "restore it from a copy" in said
    assert "secret" not in said


def test_folder_where_a_file_should_be(run_folder: Path, refused: Callable[..., str]) -> None:
    for name in ("summary.json", "buffer.json"):
        (run_folder / name).mkdir()
        assert f"{run_folder}/{name} cannot be read (Is a directory)" in refused("ledger", run_folder)
        (run_folder / name).rmdir()

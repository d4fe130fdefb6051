"""`counterflow inspect`: the archived groups of a run, one row a group, and what was said in them.

`inspect` is a typer command: a run folder and filters flow in, a table or JSON flows out. Only reads.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from counterflow.errors import ConfigError, first_line
from counterflow.place import check_run_folder, read_config

if TYPE_CHECKING:
    import pyarrow as pa

    from counterflow.buffer.trajectory import Passage

WIDTH_WITHOUT_TERMINAL = 120

Decode = Callable[[list[int]], str | None]


@dataclass(frozen=True)
class GroupRow:
    """One archived group in a few numbers.

    `step` is the one that trained it, `position` its place there. `tokens` are response tokens. Rewards count only
    samples that have one: None where none has. Lags are those of response tokens: None where there is no token.
    `added_at` and `taken_at` are the learner's versions when the group was added to the buffer and first taken out of
    it: None where the archive does not say.
    """

    step: int
    position: int
    admission: int
    prompt_id: int
    samples: int
    tokens: int
    reward_mean: float | None
    reward_std: float | None
    lag_min: int | None
    lag_max: int | None
    added_at: int | None
    taken_at: int | None
    finish_reasons: dict[str, int]

    @classmethod
    def of(cls, learner_version: int, position: int, group: pa.RecordBatch, passage: Passage | None) -> GroupRow:
        """The row of the group at `position` of the step taken at `learner_version`."""
        rewards = [reward for reward in _rewards(group) if reward is not None]
        spans = [span for spans in group.column("version_spans").to_pylist() for span in spans]
        lags = [learner_version - span["version"] for span in spans if span["end"] > span["start"]]
        return cls(
            step=learner_version + 1,
            position=position,
            admission=group.column("admission")[0].as_py(),
            prompt_id=group.column("prompt_id")[0].as_py(),
            samples=group.num_rows,
            tokens=len(group.column("response_token_ids").flatten()),
            reward_mean=statistics.fmean(rewards) if rewards else None,
            reward_std=statistics.pstdev(rewards) if rewards else None,
            lag_min=min(lags, default=None),
            lag_max=max(lags, default=None),
            added_at=passage.added_at if passage else None,
            taken_at=passage.taken_at if passage else None,
            finish_reasons=dict(Counter(group.column("finish_reason").to_pylist()).most_common()),
        )


@dataclass(frozen=True)
class Filters:
    """Which groups are shown; None lets all pass. Rewards are means of groups, lags their largest."""

    prompt: int | None = None
    step: int | None = None
    min_lag: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None

    def matches(self, row: GroupRow) -> bool:
        """Whether the group is among them."""
        reward, lag = row.reward_mean, row.lag_max
        return (
            self.prompt in (None, row.prompt_id)
            and self.step in (None, row.step)
            and (self.min_lag is None or (lag is not None and lag >= self.min_lag))
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (self.max_reward is None or (reward is not None and reward <= self.max_reward))
        )


def inspect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    prompt: Annotated[int | None, typer.Option(help="Only groups of this prompt id.")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Only groups that this step trained.")] = None,
    min_lag: Annotated[int | None, typer.Option(help="Only groups with a token of this lag or more.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only groups whose mean reward is this or more.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only groups whose mean reward is this or less.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show the first so many of them.")] = 20,
    text: Annotated[bool, typer.Option("--text", help="Show prompts and responses as text, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the groups that a run trained on, in the order of training, from its archive."""
    check_run_folder(run)
    filters = Filters(prompt, step, min_lag, min_reward, max_reward)
    found = list(islice(find_groups(run, filters), min(limit, sys.maxsize - 1) + 1))
    more, found = len(found) > limit, found[:limit]
    decode, trouble = _tokenizer(run) if text and found else (_no_text, None)
    if as_json:
        if trouble is not None:
            typer.echo(f"token ids without text: {printable(trouble)}", err=True)
        rows = [asdict(row) | (_said(group, decode) if text else {}) for row, group in found]
        typer.echo(json.dumps(rows, allow_nan=False))
        return
    if not found:
        archived = next(find_groups(run, Filters()), None) is not None
        typer.echo(f"{run}: {'no archived group matches' if archived else 'no group is archived yet'}")
        return
    _print(found, decode if text else None, trouble)
    if more:
        typer.echo(f"there are more: these are the first {limit} (--limit)")


def find_groups(run: Path, filters: Filters) -> Iterator[tuple[GroupRow, pa.RecordBatch]]:
    """The archived groups of a run that match, in the order of training, read as they are asked for.

    Raises:
        ConfigError: a segment of the archive is damaged, missing or of another version.
    """
    from counterflow.buffer.archive import read_steps

    folder = run / "archive"
    if not folder.exists():
        return
    for archived in read_steps(folder, start=0 if filters.step is None else filters.step - 1):
        if filters.step is not None and archived.learner_version >= filters.step:
            return
        for position, (group, passage) in enumerate(itertools.zip_longest(archived.groups, archived.passages)):
            row = GroupRow.of(archived.learner_version, position, group, passage)
            if filters.matches(row):
                yield row, group
        # The next step may be damaged.
        if archived.learner_version + 1 == filters.step:
            return


def printable(text: str) -> str:
    """The text with everything that a terminal would obey, or not show, as escapes; lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _tokenizer(run: Path) -> tuple[Decode, str | None]:
    """How to turn token ids into text, and why it cannot be done if it cannot."""
    try:
        path = read_config(run).model.path
    except ConfigError as error:
        return _no_text, first_line(error)
    if not path.is_dir():
        return _no_text, f"{path}: there is no such model folder; relative paths start where the command runs"
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises the base class itself
        return _no_text, f"{path}: its tokenizer cannot be loaded ({first_line(error)})"

    def decode(ids: list[int]) -> str | None:
        with suppress(Exception):  # as of ids that no tokenizer gives
            return str(tokenizer.decode(ids))
        return None

    return decode, None


def _no_text(_: list[int]) -> str | None:
    return None


def _rewards(group: pa.RecordBatch) -> list[float | None]:
    rewards = group.column("reward").to_pylist()
    return [reward if reward is not None and math.isfinite(reward) else None for reward in rewards]


def _said(group: pa.RecordBatch, decode: Decode) -> dict[str, Any]:
    prompt = group.column("prompt_token_ids")[0].as_py()
    responses = [
        {"reward": reward, "finish_reason": reason, "token_ids": ids, "text": decode(ids)}
        for ids, reward, reason in zip(
            group.column("response_token_ids").to_pylist(),
            _rewards(group),
            group.column("finish_reason").to_pylist(),
            strict=True,
        )
    ]
    return {"prompt": {"token_ids": prompt, "text": decode(prompt)}, "responses": responses}


def _print(found: list[tuple[GroupRow, pa.RecordBatch]], decode: Decode | None, trouble: str | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 0)).columns
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    table = Table()
    for title in ("step", "position", "admission", "prompt", "samples", "tokens", "reward", "lag"):
        table.add_column(title, justify="right")
    table.add_column("finish reasons")
    for row, _ in found:
        numbers = (row.step, row.position, row.admission, row.prompt_id, row.samples, row.tokens)
        reward = "-" if row.reward_mean is None else f"{row.reward_mean:.3f} ± {row.reward_std:.3f}"
        lag = "-" if row.lag_min is None else f"{row.lag_min}..{row.lag_max}"
        reasons = ", ".join(f"{printable(reason)} {count}" for reason, count in row.finish_reasons.items())
        table.add_row(*map(str, numbers), reward, lag, Text(reasons))
    console.print(table)
    if trouble is not None:
        console.print(f"token ids instead of text: {printable(trouble)}", soft_wrap=True)
    if decode is None:
        return
    for row, group in found:
        said = _said(group, decode)
        heading = f"step {row.step}, position {row.position}, prompt {row.prompt_id}"
        console.print(f"\n{heading}: {_shown(said['prompt'])}", soft_wrap=True)
        for index, response in enumerate(said["responses"]):
            reward = "no reward" if response["reward"] is None else f"reward {response['reward']:g}"
            reason = printable(response["finish_reason"])
            heading = f"  {index}: {reward}, {reason}, {len(response['token_ids'])} tokens"
            console.print(f"{heading}: {_shown(response)}", soft_wrap=True)


def _shown(said: dict[str, Any]) -> str:
    if said["text"] is None:
        return str(said["token_ids"])
    # Indented, so that no response can pass for a line of ours.
    return printable(said["text"]).replace("\n", "\n      ")

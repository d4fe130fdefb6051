"""What benchmarks share: random models of a given shape, and the table of ours, the rival and their ratio."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One comparison. `ratio` is ours over the rival's, turned round where lower is better, so that more is better."""

    name: str
    ours: float
    rival: float
    ratio: float
    better: str
    """`higher` or `lower`: which way `ours` and `rival` are good."""
    goal: float | None


def compare(name: str, ours: float, rival: float, better: str, goal: float | None) -> Row:
    """A row from two measurements made in the same run."""
    return Row(name, ours, rival, ours / rival if better == "higher" else rival / ours, better, goal)


def command_line(doc: str) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as a JSON list")
    return parser


def arguments(doc: str) -> argparse.Namespace:
    """What was given of the options that all benchmarks share."""
    return command_line(doc).parse_args()


def publish(title: str, rows: Sequence[Row], json_file: Path | None) -> None:
    """Print the table, and write it as JSON where asked."""
    table = Table("comparison", "ours", "rival", "ratio", "goal", title=title)
    for row in rows:
        goal = "" if row.goal is None else f">= {row.goal:g}"
        table.add_row(row.name, f"{row.ours:,.4g}", f"{row.rival:,.4g}", f"{row.ratio:.3f}", goal)
    Console(width=140).print(table)
    if json_file:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama with random weights. Its vocabulary is large, so that it hardly ever ends by itself."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int


TINY = Shape(2048, 128, 3, 4, 4, 384)
SMOLLM2_135M = Shape(49_152, 576, 30, 9, 3, 1_536)


def random_model(folder: Path, shape: Shape, dtype: str, device: str = "cpu") -> Path:
    """Write a random model of this shape, made on `device`, with a tokenizer of one token a character, to `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from counterflow.models import sums_tokenizer

    sums_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        **asdict(shape),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int, length: int) -> Path:
    """A JSONL file of different prompts of `length` characters."""
    lines = [json.dumps({"prompt": f"{i:0{length}d}", "answer": "0"}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path

"""Peak memory and time of token log-probs, forward and backward, against log_softmax over the whole matrix.

Prints one table: ours, the rival, the ratio. Each side is measured in a process of its own, in turns; on CPUs memory
is the growth of the resident set at its peak, and time that of the processor, on one thread, so that neighbours do not
count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from common import compare, publish

from counterflow.learner.logprobs import token_logprobs

SIDES = ("ours", "rival")
MOST_MEMORY, MOST_TIME = 0.35, 1.3
"""What ours may take of the rival's."""


def rival_logprobs(hidden: torch.Tensor, head: torch.nn.Module, targets: torch.Tensor) -> torch.Tensor:
    """The plain way: every logit in float32, log_softmax, gather. It makes no entropies; ours does."""
    return torch.log_softmax(head(hidden).float(), dim=-1).gather(-1, targets[:, None]).squeeze(-1)


def resident_bytes(field: str) -> int:
    """VmRSS, what is resident now, or VmHWM, the most since the mark was last cleared (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def measure(side: str, tokens: int, vocabulary: int, width: int, device: str) -> dict[str, float]:
    """Bytes and seconds of one forward and backward, after a small one to load what is loaded once."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = torch.nn.Linear(width, vocabulary, bias=False, device=device)
    hidden = torch.randn(tokens, width, device=device)
    targets = torch.randint(vocabulary, (tokens,), device=device)
    slopes = torch.randn(tokens, device=device)

    def once(count: int) -> None:
        states = hidden[:count].clone().requires_grad_()
        if side == "ours":
            logprobs, _ = token_logprobs(states, head, targets[:count], temperature=1.0)
        else:
            logprobs = rival_logprobs(states, head, targets[:count])
        (logprobs * slopes[:count]).sum().backward()

    once(8)
    head.weight.grad = None
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
        before, began = resident_bytes("VmRSS"), time.process_time()
        once(tokens)
        seconds = time.process_time() - began
        return {"bytes": resident_bytes("VmHWM") - before, "seconds": seconds}
    once(tokens)
    head.weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, began = torch.cuda.memory_allocated(), time.perf_counter()
    once(tokens)
    torch.cuda.synchronize()
    return {"bytes": torch.cuda.max_memory_allocated() - held, "seconds": time.perf_counter() - began}


def in_process(side: str, options: argparse.Namespace) -> dict[str, float]:
    """`measure` in a fresh interpreter."""
    arguments = [f"--{name}={getattr(options, name)}" for name in ("tokens", "vocabulary", "width", "device")]
    ran = subprocess.run(
        [sys.executable, __file__, "--side", side, *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    if ran.returncode:
        sys.exit(f"the {side} side failed:\n{ran.stderr}")
    return {name: float(value) for name, value in json.loads(ran.stdout).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--width", type=int, default=576, help="hidden size; 576 is that of SmolLM2-135M")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as a JSON list")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, options.tokens, options.vocabulary, options.width, options.device)))
        return
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(options.repeats):
        for side in SIDES:
            taken[side].append(in_process(side, options))
    fastest = {side: min(run["seconds"] for run in runs) for side, runs in taken.items()}
    # Peaks of equal runs differ only by what the allocator happens to keep.
    peak = {side: max(run["bytes"] for run in runs) / 2**20 for side, runs in taken.items()}
    rows = [
        compare("peak memory, forward and backward, MiB", peak["ours"], peak["rival"], "lower", 1 / MOST_MEMORY),
        compare("time, forward and backward, s", fastest["ours"], fastest["rival"], "lower", 1 / MOST_TIME),
    ]
    shape = f"{options.tokens:,} tokens x {options.vocabulary:,} vocabulary, hidden {options.width}, {options.device}"
    publish(f"token log-probs in tiles against log_softmax: {shape}", rows, options.json)


if __name__ == "__main__":
    main()

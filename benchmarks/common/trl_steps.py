"""Steps of TRL's GRPOTrainer on given completions, one at a time.

Its own generation and rewards are left out: what it would make of them, prompts, completions, masks and advantages, is
given. Left in is all that its `train` does then: shuffle and split the batch, forward, loss, backward, clip, step, its
metrics.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from counterflow.buffer.trajectory import Group


def available() -> str | None:
    """Why TRL cannot be used here; None where it can."""
    try:
        from trl import GRPOTrainer  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return str(error).strip().splitlines()[-1]
    return None


def as_trl(groups: Sequence[Group], pad_token_id: int) -> dict[str, Any]:
    """What `_generate_and_score_completions` returns: prompts padded on the left, completions on the right."""
    rows = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    prompts = [torch.tensor(group.prompt_token_ids, dtype=torch.int64) for group, _ in rows]
    completions = [torch.tensor(trajectory.response_token_ids, dtype=torch.int64) for _, trajectory in rows]
    prompt_width, width = max(map(len, prompts)), max(map(len, completions))
    lefts, rights = [prompt_width - len(p) for p in prompts], [width - len(c) for c in completions]
    pad = torch.nn.functional.pad
    rewards = torch.tensor([[t.reward for t in group.trajectories] for group in groups])
    return {
        "prompt_ids": torch.stack([pad(p, (n, 0), value=pad_token_id) for p, n in zip(prompts, lefts, strict=True)]),
        "prompt_mask": torch.stack([pad(torch.ones_like(p), (n, 0)) for p, n in zip(prompts, lefts, strict=True)]),
        "completion_ids": torch.stack(
            [pad(c, (0, n), value=pad_token_id) for c, n in zip(completions, rights, strict=True)]
        ),
        "completion_mask": torch.stack(
            [pad(torch.ones_like(c), (0, n)) for c, n in zip(completions, rights, strict=True)]
        ),
        "advantages": (rewards - rewards.mean(1, keepdim=True)).flatten(),
        "num_items_in_batch": torch.tensor(sum(map(len, completions))),
    }


@contextmanager
def trl_steps(path: Path, groups: Sequence[Group], lr: float, microbatches: int, count: int) -> Any:
    """A call that has GRPOTrainer take its next step, of `count` at most, on these groups."""
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    given = as_trl(groups, 0)
    sequences = len(given["advantages"])

    class Given(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return dict(given)

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            done.release()
            go.acquire()

    go, done, failures = threading.Semaphore(0), threading.Semaphore(0), []
    trainer = Given(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(path / "trl"),
            per_device_train_batch_size=sequences // microbatches,
            gradient_accumulation_steps=microbatches,
            num_generations=len(groups[0].trajectories),
            max_completion_length=given["completion_ids"].shape[1],
            max_steps=count,
            learning_rate=lr,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="dr_grpo",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "0"}] * sequences),
        processing_class=AutoTokenizer.from_pretrained(path),
        callbacks=[Turns()],
    )

    def train() -> None:
        # Threads of a thread are its own setting.
        torch.set_num_threads(1)
        go.acquire()
        try:
            trainer.train()
        except Exception as error:
            failures.append(error)
        done.release()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()

    def step() -> None:
        go.release()
        done.acquire()
        if failures:
            raise failures[0]

    yield step
    go.release()
    thread.join(timeout=60)

"""A run of no lag is the synchronous loop: bit for bit that of a few plain lines, whatever the timing or the actors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest_runs import Start, write_inputs
from safetensors.torch import load_file
from transformers import AutoTokenizer

from counterflow.actors.seeds import group_seed
from counterflow.actors.tasks import TaskSet, load_task, prompt_index
from counterflow.actors.transformers_engine import TransformersEngine
from counterflow.buffer.trajectory import Group, Trajectory
from counterflow.configs import RunConfig, load_config
from counterflow.learner.batch import microbatches
from counterflow.learner.objective.loss import normalizer, policy_loss
from counterflow.learner.objective.types import PolicyBatch
from counterflow.learner.objective_choice import objective_spec
from counterflow.learner.policy import Policy, load_model, packing_of

STEPS = 10
OVERRIDES = [
    f"run.steps={STEPS}",
    "run.deterministic=true",
    "admission.max_lag=0",
    "learner.lr=3e-3",
    "learner.warmup_steps=2",
    "evaluation.every=0",
    "weight_sync.canary_every=0",
]
ANSWERS = [str(i % 10) for i in range(14)]

Weights = dict[str, torch.Tensor]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many as the run's learner and engine have: the order of a sum is part of the bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(start: Start, config: Path, name: str, *overrides: str, **environment: str) -> Weights:
    process = start(config.parent, config, *OVERRIDES, f"run.name={name}", *overrides, **environment)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return load_file(config.parent / "runs" / name / "model" / "model.safetensors")


def differing(weights: Weights, others: Weights) -> list[str]:
    return [name for name in {**weights, **others} if not torch.equal(weights[name], others[name])]


def test_synchronous_run_differs_from_a_plain_loop(
    start: Start, tiny_model: Path, tmp_path: Path, one_thread: None
) -> None:
    path = write_inputs(tmp_path, tiny_model, ANSWERS)
    # Whoever imports vLLM in this run fails: it is not needed.
    (tmp_path / "without" / "vllm").mkdir(parents=True)
    (tmp_path / "without" / "vllm" / "__init__.py").write_text("raise ImportError('vLLM is not to be imported')")
    python_path = os.pathsep.join([str(tmp_path / "without"), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = trained(start, path, "run", "actors.engine=transformers", PYTHONPATH=python_path)
    config = load_config(path, [*OVERRIDES, "actors.engine=transformers"])
    first = load_file(tiny_model / "model.safetensors")
    expected = asyncio.run(plain_loop(config))
    assert len(differing(first, expected)) == len(first)
    assert differing(found, expected) == []


async def plain_loop(config: RunConfig) -> Weights:
    """Generate, train, load: no processes, no buffer, no versions."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    task, device = load_task(config, tokenizer), torch.device("cpu")
    engine = await TransformersEngine.start(config)
    model = load_model(config, device)
    policy = Policy(model, load_model(config, device), config.sampling.temperature, torch.float32, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learner.lr, weight_decay=0.0, fused=True)
    spec, width = objective_spec(config), config.admission.groups_per_step
    for step in range(STEPS):
        groups = [await generate(n, engine, task, tokenizer, config) for n in range(step * width, (step + 1) * width)]
        for parameters in optimizer.param_groups:
            parameters["lr"] = config.learner.lr * min((step + 1) / config.learner.warmup_steps, 1.0)
        optimizer.zero_grad()
        sequences = sum(len(group.trajectories) for group in groups)
        tokens = sum(group.response_tokens for group in groups)
        scale = normalizer(spec.reduction, sequences, tokens, config.sampling.max_tokens)
        for batch in microbatches(groups, config.learner.microbatch_tokens, 0, packing_of(config, model)):
            logprobs, _ = policy.logprobs(batch)
            whole = PolicyBatch(
                logprobs=logprobs,
                behavior_logprobs=batch.behavior_logprobs,
                reference_logprobs=policy.reference_logprobs(batch),
                proximal_logprobs=None,
                loss_mask=batch.loss_mask,
                sequence=batch.sequence,
                rewards=batch.rewards,
                group=batch.group,
            )
            policy_loss(whole, spec, scale).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.learner.max_grad_norm)
        optimizer.step()
        engine._model.load_state_dict(model.state_dict())
    engine.shutdown()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


async def generate(n: int, engine: TransformersEngine, task: TaskSet, tokenizer: object, config: RunConfig) -> Group:
    prompt = task.train[prompt_index(n, len(task.train), config.run.seed)]
    completions = await engine.sample(prompt.token_ids, group_seed(config.run.seed, n))
    return Group(
        group_id=str(n),
        admission=n,
        prompt_id=prompt.prompt_id,
        prompt_token_ids=np.asarray(prompt.token_ids, np.int32),
        trajectories=tuple(
            Trajectory(
                response_token_ids=c.token_ids,
                behavior_logprobs=c.logprobs,
                version_spans=c.version_spans,
                reward=float(tokenizer.decode(c.token_ids, skip_special_tokens=True).count(prompt.record["answer"])),  # type: ignore[attr-defined]
                finish_reason=c.finish_reason,
            )
            for c in completions
        ),
        started_at_us=0,
        finished_at_us=0,
    )


@pytest.mark.parametrize("engine", ["transformers"])
def test_timing_or_number_of_actors_changes_a_synchronous_run(
    engine: str, start: Start, tiny_model: Path, tmp_path: Path, three_cores: str
) -> None:
    path = write_inputs(tmp_path, tiny_model, ANSWERS)
    overrides = [f"run.ray_address={three_cores}", f"actors.engine={engine}"]
    once, again, by_two = (
        trained(start, path, f"run{i}", *overrides, f"actors.count={count}") for i, count in enumerate([1, 1, 2])
    )
    assert differing(once, again) == differing(once, by_two) == []

"""Two real gloo processes with half of the groups each add up to the gradient of one process with all of them."""

from __future__ import annotations

import dataclasses
import socket

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from counterflow.learner.objective.loss import normalizer, policy_loss
from counterflow.learner.objective.spec import ObjectiveSpec
from counterflow.learner.objective.types import PolicyBatch

SPECS = [
    ObjectiveSpec(beta=0.1, reward_to_go=True),
    ObjectiveSpec(beta=0.1, correction="m2po", second_moment=0.1, reward_weight="per_decision"),
    ObjectiveSpec(beta=0.1, correction="gspo", advantage="group_std", reduction="sequence_mean"),
    ObjectiveSpec(beta=0.1, estimator="k3", placement="both", loss_weight="prefix", reduction="token_mean"),
]
GROUPS, SAMPLES, FEATURES = 6, 3, 5


def policy_batch(weights: torch.Tensor, groups: range) -> PolicyBatch:
    """The whole groups `groups` of a fixed data set, under a policy with these weights."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 7, (GROUPS * SAMPLES,), generator=draw)
    tokens = int(lengths.sum())
    features = torch.randn(tokens, FEATURES, generator=draw, dtype=torch.float64)
    noise = torch.randn(2, tokens, generator=draw, dtype=torch.float64)
    rewards = torch.randint(0, 3, (GROUPS * SAMPLES,), generator=draw).double()
    group = torch.arange(GROUPS).repeat_interleave(SAMPLES)
    sequence = torch.arange(GROUPS * SAMPLES).repeat_interleave(lengths)
    kept = torch.isin(group, torch.tensor(list(groups)))
    mine = kept[sequence]
    logprobs = torch.nn.functional.logsigmoid(features[mine] @ weights)
    return PolicyBatch(
        logprobs=logprobs,
        behavior_logprobs=logprobs.detach() + 0.4 * noise[0, mine],
        reference_logprobs=logprobs.detach() + 0.4 * noise[1, mine],
        proximal_logprobs=None,
        loss_mask=torch.ones_like(logprobs, dtype=torch.bool),
        sequence=(kept.long().cumsum(0) - 1)[sequence[mine]],
        rewards=rewards[kept],
        group=group[kept],
    )


def gradients(rank: int, ranks: int) -> torch.Tensor:
    """Of every spec, from this rank's groups: float64 [specs, features]."""
    whole = policy_batch(torch.zeros(FEATURES, dtype=torch.float64), range(GROUPS))
    found = []
    for spec in SPECS:
        weights = torch.linspace(-1, 1, FEATURES, dtype=torch.float64).requires_grad_()
        scale = normalizer(spec.reduction, whole.sequences, whole.logprobs.shape[0], length_constant=7)
        loss = policy_loss(policy_batch(weights, range(rank, GROUPS, ranks)), spec, scale)
        found.append(torch.autograd.grad(loss, weights)[0])
    return torch.stack(found)


def work(rank: int, port: int, answers: torch.multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    total = gradients(rank, 2)
    torch.distributed.all_reduce(total)
    if rank == 0:
        answers.put(total.numpy())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_add_up_to_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=work, args=(rank, port, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        total = torch.from_numpy(answers.get(timeout=120))
    finally:
        for process in processes:
            process.join(timeout=30)
            if process.is_alive():
                process.terminate()
    torch.testing.assert_close(total, gradients(0, 1), atol=1e-12, rtol=0)
    assert total.abs().max() > 1e-3


def test_ranks_that_scale_by_their_own_size_would_not_add_up():
    """Why the normalizer is of the whole step: halves of unequal token counts, each over its own, do not add up."""
    spec = dataclasses.replace(SPECS[0], reduction="token_mean")

    def gradient(groups, tokens):
        weights = torch.linspace(-1, 1, FEATURES, dtype=torch.float64).requires_grad_()
        loss = policy_loss(policy_batch(weights, groups), spec, normalizer(spec.reduction, 0, tokens, 7))
        return torch.autograd.grad(loss, weights)[0]

    counts = [policy_batch(torch.zeros(5, dtype=torch.float64), g).logprobs.shape[0] for g in (range(2), range(2, 6))]
    whole = gradient(range(6), sum(counts))
    torch.testing.assert_close(gradient(range(2), sum(counts)) + gradient(range(2, 6), sum(counts)), whole)
    own = (gradient(range(2), counts[0]) + gradient(range(2, 6), counts[1])) / 2
    assert (own - whole).abs().max() > 1e-3

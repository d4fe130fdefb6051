"""Several optimizer steps on one batch: what is of the step's start stays so, and nothing is computed twice."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import uneven_groups
from pydantic import ValidationError
from torch import Tensor

from counterflow.configs.schema import RunConfig
from counterflow.learner.batch import collate
from counterflow.learner.objective.loss import policy_loss
from counterflow.learner.objective.types import PolicyBatch
from counterflow.learner.objective_choice import announce, objective_spec, on_policy
from counterflow.learner.plan import Update, plan
from counterflow.learner.policy import Policy
from counterflow.learner.rank import Rank


def configured(folder: Path, **learner: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "learner": {"lr": 1e-2, "updates_per_batch": 2, **learner},
            "objective": {"kl": {"beta": 0.05}, "importance": {"correction": "decoupled_ppo"}},
        }
    )


def planned(rank: Rank, config: RunConfig) -> list[Update]:
    return plan(uneven_groups(5), config.learner.updates_per_batch, 1, 10_000, rank.packing)


def weights_of(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def by_hand(config: RunConfig, start: Policy, rank: Rank, kept: bool) -> Tensor:
    """The same two updates, written out; `kept`: with proximal log-probs of the start, else of each update's own."""
    spec = objective_spec(config)
    optimizer = torch.optim.AdamW(start.model.parameters(), lr=1e-2, weight_decay=0.0)
    batches = [collate(update.rounds[0][0], 0, rank.packing) for update in planned(rank, config)]
    proximal = [start.logprobs(batch)[0].detach() for batch in batches]
    for batch, old in zip(batches, proximal, strict=True):
        logprobs, _ = start.logprobs(batch)
        policy_batch = PolicyBatch(
            logprobs=logprobs,
            behavior_logprobs=batch.behavior_logprobs,
            reference_logprobs=rank.policy.reference_logprobs(batch),
            proximal_logprobs=old if kept else logprobs.detach(),
            loss_mask=batch.loss_mask,
            sequence=batch.sequence,
            rewards=batch.rewards,
            group=batch.group,
        )
        optimizer.zero_grad()
        policy_loss(policy_batch, spec, 50.0).backward()
        torch.nn.utils.clip_grad_norm_(start.model.parameters(), 1.0)
        optimizer.step()
    return weights_of(start.model)


def test_second_update_keeps_the_log_probs_of_the_steps_start(tiny_model: Path) -> None:
    config = configured(tiny_model)
    rank = Rank(config)
    copies = [Policy(copy.deepcopy(rank.policy.model), None, 1.0, torch.float32, torch.device("cpu")) for _ in range(2)]
    updates = planned(rank, config)
    assert [len(update.order) for update in updates] == [2, 3]
    rank.begin([update.rounds[0] for update in updates], 0, again=False, needs_proximal=True)
    for index in range(2):
        rank.accumulate(index, objective_spec(config), 50.0)
        rank.apply(1e-2)
    found = weights_of(rank.policy.model)
    right, wrong = by_hand(config, copies[0], rank, kept=True), by_hand(config, copies[1], rank, kept=False)
    moved = (right - wrong).norm()
    assert moved > 0.01 and (found - right).norm() < 0.01 * moved


def test_reference_is_run_once_for_a_batch_that_is_trained_again(tiny_model: Path) -> None:
    config = configured(tiny_model)
    rank = Rank(config)
    runs: list[int] = []
    rank.policy.frozen.register_forward_hook(lambda *_: runs.append(1))
    rounds = [update.rounds[0] for update in planned(rank, config)]
    for again in (False, True):
        rank.begin(rounds, 0, again=again, needs_proximal=False)
        for index in range(2):
            part = rank.accumulate(index, objective_spec(config), 50.0)
            assert part.batch is not None and part.batch.reference_logprobs is not None
    assert len(runs) == 2


def test_several_updates_are_off_policy_and_clip_the_proximal_ratio(tiny_model: Path) -> None:
    config = configured(tiny_model).model_dump()
    config["admission"]["max_lag"] = 0
    config["objective"]["importance"]["clip_low"] = 0.3
    assert not on_policy(RunConfig.model_validate(config))
    assert not any("clip_low" in warning for warning in announce(RunConfig.model_validate(config)).warnings)
    config["learner"]["updates_per_batch"] = 1
    assert on_policy(RunConfig.model_validate(config))
    # Given alone, as a file would: an option written out in full is never called unread.
    config["objective"]["importance"] = {"correction": "decoupled_ppo", "clip_low": 0.3}
    assert any("clip_low" in warning for warning in announce(RunConfig.model_validate(config)).warnings)


def test_more_updates_than_groups_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ValidationError, match=r"updates_per_batch=33 is above admission\.groups_per_step=32"):
        configured(tiny_model, updates_per_batch=33)

"""The objective in the learner: splits and padding change nothing, lag is corrected, the log says what is trained."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
import math
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from counterflow.buffer.store import Producer
from counterflow.buffer.trajectory import Group, Trajectory, VersionSpan, encode
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError
from counterflow.learner.batch import microbatches
from counterflow.learner.learner import Learner
from counterflow.learner.objective import ObjectiveSpec, PolicyBatch, policy_loss
from counterflow.learner.objective_choice import audit_config, check_objective, next_beta, objective_spec, row_of
from counterflow.learner.policy import Policy

CPU = torch.device("cpu")
CHOICES = {
    "default": ObjectiveSpec(beta=0.05, kl_return="to_go"),
    "per_decision": ObjectiveSpec(beta=0.05, reward_weight="per_decision"),
    "k3_both": ObjectiveSpec(beta=0.05, estimator="k3", placement="both", level="sequence", loss_weight="prefix"),
    "rao_blackwell": ObjectiveSpec(beta=0.05, estimator="rao_blackwell", placement="both", loss_weight="prefix"),
    "gspo": ObjectiveSpec(beta=0.05, correction="gspo"),
    "m2po": ObjectiveSpec(beta=0.05, correction="m2po", second_moment=0.02),
    "group_std": ObjectiveSpec(beta=0.05, advantage="group_std", reduction="sequence_mean"),
}


def make_groups(count=4, samples=3, seed=0):
    """Groups of prompts and responses of all lengths, one of them empty, with the log-probs of a random model."""
    draw = np.random.default_rng(seed)

    def tokens(length):
        return draw.integers(3, 16, length).astype(np.int32)

    def trajectory(length):
        return Trajectory(
            response_token_ids=tokens(length),
            behavior_logprobs=(-2.7 + 0.3 * draw.normal(size=length)).astype(np.float32),
            version_spans=(VersionSpan(0, 0, length),) if length else (),
            reward=float(draw.integers(0, 3)),
            finish_reason="stop",
        )

    return [
        Group(
            group_id=f"group-{n}",
            admission=n,
            prompt_id=n,
            prompt_token_ids=tokens(2 + 3 * n),
            trajectories=tuple(trajectory(0 if (n, i) == (1, 1) else 1 + (5 * n + 3 * i) % 11) for i in range(samples)),
            started_at_us=1,
            finished_at_us=2,
        )
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def models(tiny_model):
    """A model, and a reference some way off: float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    reference = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.eval(), reference.eval()


def gradient(models, dtype, spec, groups, tokens):
    """The gradient in all weights, of microbatches of at most `tokens` padded tokens: float64 [weights]."""
    model, reference = (copy.deepcopy(m).to(dtype) for m in models)
    policy = Policy(model, reference, 0.9, dtype, CPU)
    for batch in microbatches(groups, tokens, pad_token_id=0):
        divergences = policy.statistics(batch)[0].divergences if spec.needs_divergence else None
        logprobs, _ = policy.logprobs(batch)
        loss = policy_loss(
            PolicyBatch(
                logprobs=logprobs,
                behavior_logprobs=batch.behavior_logprobs,
                reference_logprobs=policy.reference_logprobs(batch),
                proximal_logprobs=None,
                loss_mask=torch.ones_like(logprobs, dtype=torch.bool),
                sequence=batch.sequence,
                rewards=batch.rewards,
                group=batch.group,
                reference_divergence=divergences,
            ),
            spec,
            100.0,
        )
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_gradient_does_not_depend_on_microbatches_or_padding(models, name, dtype, tolerance):
    """Microbatches of one group are padded to 8 to 23 tokens, a single one to 23; and two ranks sum their halves."""
    groups = make_groups()
    whole = gradient(models, dtype, CHOICES[name], groups, 10_000)
    assert whole.abs().max() > 1e-3
    for tokens in (1, 150):
        torch.testing.assert_close(
            gradient(models, dtype, CHOICES[name], groups, tokens), whole, atol=tolerance, rtol=0
        )
    ranks = [gradient(models, dtype, CHOICES[name], groups[rank::2], 10_000) for rank in range(2)]
    torch.testing.assert_close(sum(ranks), whole, atol=tolerance, rtol=0)


def configured(tiny_model, lr=3e-3, **objective):
    return RunConfig.model_validate(
        {
            "model": {"path": str(tiny_model)},
            "sampling": {"max_tokens": 16},
            "admission": {"groups_per_step": 4, "samples_per_group": 3, "max_lag": 8},
            "learner": {"lr": lr},
            "run": {"step_timeout_s": 20},
            "objective": objective,
        }
    )


def offer(server, origin, groups):
    async def main():
        producer = Producer(server, origin.run_id, capacity_groups=1000, lease_s=60, attempts=1)
        for group in groups:
            assert await producer.admit(10_000) is not None
            await producer.add(group.admission, group.response_tokens, encode(group, origin.schema()))
        await producer.close()

    asyncio.run(main())


def steps(server, origin, config, count, recorded=None):
    """Records of `count` steps on groups that version 0 sampled: the batch of step n has a lag of n - 1."""
    learner = Learner(config, server, origin, time.time(), cores=None)
    try:
        groups = []
        for step in range(count):
            for group in make_groups(seed=0):
                groups.append(dataclasses.replace(group, admission=step * 4 + group.admission))
        batches = microbatches(groups, 1 << 20, 0)
        with torch.no_grad():
            logprobs = torch.cat([learner._policy.logprobs(batch)[0] for batch in batches]).numpy()
        placed, at = [], 0
        for group in groups:
            own = []
            for trajectory in group.trajectories:
                length = len(trajectory.response_token_ids)
                own.append(dataclasses.replace(trajectory, behavior_logprobs=logprobs[at : at + length]))
                at += length
            placed.append(dataclasses.replace(group, trajectories=tuple(own)))
        offer(server, origin, placed)
        return [learner.step().record for _ in range(count)]
    finally:
        learner.close()


@pytest.mark.parametrize("correction", ["truncated", "ppo", "decoupled_ppo"])
def test_cut_fraction_responds_to_lag_with_one_update_a_batch(server, origin, tiny_model, correction):
    """If the old log-probs were those of the step's start, every ratio would be 1, however stale the batch."""
    config = configured(tiny_model, 3e-4, importance={"correction": correction, "cap": 1.2}, kl={"beta": 0.01})
    records = steps(server, origin, config, 5)
    assert [record.lag_max for record in records] == [0, 1, 2, 3, 4]
    cut = [record.truncated_weights for record in records]
    assert cut[0] == 0
    assert 0 < cut[1] < cut[4], cut
    assert records[0].kl_behavior_k3 == pytest.approx(0, abs=1e-6)
    assert records[4].kl_behavior_k3 > 1e-3


def test_first_lines_name_the_row_and_the_clamps_are_told(server, origin, tiny_model, caplog):
    config = configured(tiny_model, kl={"beta": 0.01, "estimator": "rao_blackwell", "placement": "both"})
    with caplog.at_level(logging.INFO, logger="counterflow"):
        records = steps(server, origin, config, 2)
    text = caplog.text
    assert "KL objective: row unlisted: the full-vocabulary KL in reward and loss" in text
    assert "expected KL gradient" in text and "biased" in text and "why:" in text
    assert all(math.isfinite(record.loss) for record in records)


def test_adaptive_beta_and_scaled_learning_rate_reach_the_step(server, origin, tiny_model):
    config = configured(
        tiny_model,
        kl={"beta": 0.01, "schedule": "adaptive", "target": 10.0, "horizon_steps": 1},
        importance={"scale_learning_rate": True},
    )
    records = steps(server, origin, config, 3)
    assert records[0].learning_rate == pytest.approx(3e-3)
    assert records[2].learning_rate == pytest.approx(3e-3 * math.sqrt(records[2].ess_sequence))
    assert records[2].learning_rate < 3e-3
    kl = config.objective.kl
    assert next_beta(kl, 0.01, 1, measured_kl=0.0) == pytest.approx(0.008)
    linear = kl.model_copy(update={"schedule": "linear", "beta_end": 0.0, "schedule_steps": 4})
    assert next_beta(linear, 0.123, 1, 0.0) == pytest.approx(0.0075)


def test_existing_keys_keep_their_meaning():
    config = RunConfig.model_validate(
        {
            "objective": {
                "kl": {"beta": 0.02, "estimator": "k1", "placement": "reward"},
                "importance": {"correction": "truncated", "level": "sequence", "cap": 3.0},
                "advantage": "rloo",
                "length_constant": 7,
            }
        }
    )
    assert objective_spec(config) == ObjectiveSpec(beta=0.02, level="sequence", cap=3.0, kl_return="to_go")
    assert objective_spec(RunConfig()) == ObjectiveSpec(beta=0.001, kl_return="to_go")
    assert row_of(RunConfig()).row == "off_3"


def test_full_vocabulary_statistics_agree_with_the_sampled_ones(models):
    policy = Policy(*models, 0.9, torch.float64, CPU)
    (batch,) = microbatches(make_groups(), 10_000, pad_token_id=0)
    found, reference = policy.statistics(batch)
    logprobs, entropies = policy.logprobs(batch)
    torch.testing.assert_close(found.logprobs, logprobs)
    torch.testing.assert_close(found.entropies, entropies)
    torch.testing.assert_close(reference, policy.reference_logprobs(batch))
    assert (found.divergences > 0).all() and not reference.requires_grad


SEQUENCE = {"correction": "importance", "level": "sequence"}
BOTH = {"placement": "both", "reward_weight": "sequence", "loss_weight": "prefix", "differentiate_weight": False}


@pytest.mark.parametrize(
    ("row", "kl", "importance"),
    [
        ("off_1", {}, SEQUENCE),
        ("off_2", {"reward_weight": "per_decision"}, {}),
        ("off_3", {}, {}),
        ("off_4", {}, {"correction": "none"}),
        ("off_6", {}, {"level": "sequence"}),
        ("off_7", {}, {"level": "geometric"}),
        ("off_7", {}, {"correction": "gspo"}),
        ("off_8", {"estimator": "k3"}, SEQUENCE),
        ("off_9", {"placement": "loss"}, {}),
        ("off_10", {"placement": "loss", "estimator": "k2"}, {}),
        ("off_11", {"placement": "loss", "estimator": "k3"}, {"correction": "ppo"}),
        ("off_12", {"placement": "loss", "estimator": "k3", "loss_weight": "token"}, {"correction": "sequence_mask"}),
        ("off_13", {"placement": "loss", "loss_weight": "token"}, {}),
        ("off_14", {"placement": "loss", "estimator": "k2", "loss_weight": "token"}, {}),
        (
            "off_15",
            {"placement": "loss", "estimator": "k2", "loss_weight": "prefix", "differentiate_weight": False},
            {},
        ),
        ("off_16", {"placement": "loss", "loss_weight": "prefix"}, {}),
        ("off_17", {"placement": "loss", "estimator": "k3", "loss_weight": "prefix"}, {}),
        ("off_18_k1", BOTH, {}),
        ("off_18_k3", BOTH | {"estimator": "k3"}, {}),
    ],
)
def test_rows_are_reached_as_the_documentation_says(row, kl, importance):
    assert row_of(with_objective(kl={"beta": 0.1, **kl}, importance=importance)).row == row


def with_objective(max_lag=4, sampling=None, **objective):
    return RunConfig.model_validate(
        {"objective": objective, "admission": {"max_lag": max_lag}, "sampling": sampling or {}}
    )


def test_strict_kl_refuses_biased_rows_and_says_what_to_do():
    with pytest.raises(ConfigError, match=r"strict_kl.*off_9.*per_decision"):
        check_objective(with_objective(strict_kl=True, kl={"placement": "loss"}))
    with pytest.raises(ConfigError, match="off_3"):
        check_objective(with_objective(strict_kl=True))
    with pytest.raises(ConfigError, match="sequence_mean"):
        check_objective(with_objective(max_lag=0, strict_kl=True, reduction="sequence_mean"))
    for fine in (
        with_objective(max_lag=0, strict_kl=True),
        with_objective(strict_kl=True, kl={"reward_weight": "per_decision"}),
        with_objective(strict_kl=True, importance={"correction": "importance", "level": "sequence"}),
        with_objective(strict_kl=True, kl={"beta": 0.0}),
    ):
        assert any("unbiased" in line for line in check_objective(fine).lines)


def test_truncated_sampling_with_weights_is_warned_of():
    warnings = check_objective(with_objective(sampling={"top_p": 0.9, "top_k": 5})).warnings
    (caution,) = [warning for warning in warnings if "top_p" in warning]
    assert "top_k 5" in caution and "E_mu[rho_t]" in caution
    unweighted = with_objective(sampling={"top_p": 0.9}, importance={"correction": "none"})
    assert not any("top_p" in line for line in check_objective(unweighted).warnings)


def test_truncated_sampling_is_never_called_unbiased():
    for config in (
        with_objective(max_lag=0, sampling={"top_p": 0.9}, strict_kl=True),
        with_objective(sampling={"top_k": 5}, strict_kl=True, kl={"reward_weight": "per_decision"}),
    ):
        with pytest.raises(ConfigError, match="top_p 1 and top_k 0"):
            check_objective(config)
        assert audit_config(config)["verdict"].startswith("Biased by what is never sampled")
    assert not row_of(with_objective(sampling={"top_p": 0.9}, kl={"beta": 0.0})).biased


def test_values_that_do_not_go_together_are_a_config_error():
    with pytest.raises(ConfigError, match="floor"):
        check_objective(with_objective(importance={"correction": "masked", "cap": 0.7}))
    with pytest.raises(ConfigError, match="adaptive"):
        check_objective(with_objective(kl={"beta": 0.0, "schedule": "adaptive"}))


def test_audit_of_a_configuration_speaks_of_the_run_itself():
    found = audit_config(with_objective(kl={"beta": 0.1, "placement": "loss", "estimator": "k1"}))
    assert (found["row"], found["biased"]) == ("off_9", True)
    assert "does not point to the reference at all" in found["verdict"]
    own, same = found["near"]["rows"][-1], next(row for row in found["near"]["rows"] if row["row"] == "off_9")
    assert own == {**same, "row": "this_run"}
    exact = audit_config(with_objective(kl={"beta": 0.1, "reward_weight": "per_decision"}))
    assert exact["verdict"].startswith("Unbiased") and exact["far"]["rows"][-1]["bias_abs"] < 1e-12
    synchronous = audit_config(with_objective(max_lag=0))
    assert synchronous["verdict"].startswith("Unbiased") and synchronous["assumptions"]["drift"] == 0
    default, stale = audit_config(with_objective()), audit_config(with_objective(max_lag=16))
    assert default["far"]["rows"][-1]["bias_rel"] < stale["far"]["rows"][-1]["bias_rel"]
    assert "near" not in audit_config(with_objective(kl={"beta": 0.0}))
    refused = audit_config(with_objective(strict_kl=True))
    assert refused["biased"] and refused["near"]["rows"][-1]["row"] == "this_run"

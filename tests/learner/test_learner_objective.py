"""The objective in the learner: splits and padding change nothing, lag is corrected, the log says what is trained."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import math
import time
import typing

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from counterflow.buffer.codec import encode
from counterflow.buffer.producer import Capacity, Producer
from counterflow.buffer.store import read_ledger
from counterflow.buffer.trajectory import Group, Trajectory, VersionSpan
from counterflow.configs import dump, load_config
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError, RunFailed
from counterflow.learner.batch import microbatches
from counterflow.learner.learner import Learner
from counterflow.learner.objective.loss import policy_loss
from counterflow.learner.objective.spec import ObjectiveSpec
from counterflow.learner.objective.types import PolicyBatch
from counterflow.learner.objective_choice import audit_config, check_objective, next_beta, objective_spec, row_of
from counterflow.learner.policy import Policy

CPU = torch.device("cpu")
CHOICES = {
    "default": ObjectiveSpec(beta=0.05, reward_to_go=True),
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


def test_a_group_of_failed_samples_alone_leaves_no_microbatch_and_breaks_none():
    first, second, *_ = make_groups()
    failed = [dataclasses.replace(t, reward=None) for t in first.trajectories]
    first = dataclasses.replace(first, trajectories=tuple(failed))
    assert microbatches([first], 1, 0) == []
    for tokens in (1, 10_000):
        (batch,) = microbatches([first, second], tokens, 0)
        assert batch.group.tolist() == [1, 1, 1]


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


def statistics(policy, batch):
    """Scores with the divergences of whole vocabularies, and the reference's log-probs, as a rank has them."""
    frozen, reference = policy.frozen_projection(batch)
    return policy.scorer(batch, policy.temperature, frozen), reference


def gradient(models, dtype, spec, groups, tokens):
    """The gradient in all weights, of microbatches of at most `tokens` padded tokens: float64 [weights]."""
    model, reference = (copy.deepcopy(m).to(dtype) for m in models)
    policy = Policy(model, reference, 0.9, dtype, CPU)
    for batch in microbatches(groups, tokens, pad_token_id=0):
        divergences = statistics(policy, batch)[0].divergences if spec.needs_divergence else None
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


def configured(tiny_model, lr=3e-3, learner=None, **objective):
    return RunConfig.model_validate(
        {
            "model": {"path": str(tiny_model)},
            "sampling": {"max_tokens": 16},
            "admission": {"groups_per_step": 4, "samples_per_group": 3, "max_lag": 8},
            "learner": {"lr": lr, **(learner or {})},
            "run": {"step_timeout_s": 20},
            "objective": objective,
        }
    )


def offer(server, origin, groups):
    async def main():
        capacity = Capacity(groups=1000, bytes=1 << 30, groups_per_step=4)
        producer = Producer(server, origin.run_id, capacity=capacity, lease_s=60, attempts=1)
        leases, closed = await producer.admit(10_000, len(groups))
        assert closed is None and [lease.admission for lease in leases] == [group.admission for group in groups]
        for group in groups:
            assert await producer.add(group, encode(group, origin.schema()))
        await producer.close()

    asyncio.run(main())


@pytest.fixture
def start(server, origin, tmp_path):
    """`start(config)` makes a learner, closed at the end; `offer` fills the buffer it reads."""
    with contextlib.ExitStack() as stack:

        def make(config):
            learner = Learner(tmp_path, config, server, origin, time.time(), cores=None)
            stack.callback(learner.close)
            return learner

        yield make


def batches_of(count, seed=0):
    """The groups of `count` steps, four a step, all alike and admitted in this order."""
    return [
        dataclasses.replace(group, admission=4 * step + group.admission)
        for step in range(count)
        for group in make_groups(seed=seed)
    ]


def steps(start, server, origin, config, count):
    """Records of `count` steps on groups that version 0 sampled: the batch of step n has a lag of n - 1."""
    learner = start(config)
    groups = batches_of(count)
    with torch.no_grad():
        found = [learner._trainer.policy.logprobs(batch)[0] for batch in microbatches(groups, 1 << 20, 0)]
    logprobs, at = torch.cat(found).numpy(), 0
    placed = []
    for group in groups:
        own = []
        for trajectory in group.trajectories:
            length = len(trajectory.response_token_ids)
            own.append(dataclasses.replace(trajectory, behavior_logprobs=logprobs[at : at + length]))
            at += length
        placed.append(dataclasses.replace(group, trajectories=tuple(own)))
    offer(server, origin, placed)
    return [learner.step().record for _ in range(count)]


def logprobs_by_hand(model, group, trajectory, temperature):
    """Of the response's tokens, from a forward of this sequence alone, without padding."""
    prompt, response = (torch.from_numpy(ids).long() for ids in (group.prompt_token_ids, trajectory.response_token_ids))
    logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(-1, response[:, None]).squeeze(-1)


def loss_by_hand(model, reference, groups, config, beta):
    """The default objective as the papers write it, one response after the other; and KL(pi || ref) per token by k3."""
    temperature, cap = config.sampling.temperature, config.objective.importance.cap
    total, sequences, k3 = torch.zeros(()), 0, []
    for group in groups:
        kept = [t for t in group.trajectories if t.reward is not None]
        ours = [logprobs_by_hand(model, group, t, temperature) for t in kept]
        theirs = [logprobs_by_hand(reference, group, t, temperature).detach() for t in kept]
        k1 = [(o - r).detach() for o, r in zip(ours, theirs, strict=True)]
        returns = [t.reward - beta * float(k.sum()) for t, k in zip(kept, k1, strict=True)]
        for i, trajectory in enumerate(kept):
            others = [r for j, r in enumerate(returns) if j != i]
            past = torch.cat([torch.zeros(1), k1[i].cumsum(0)])[:-1]
            advantage = returns[i] - sum(others) / len(others) + beta * past
            ratio = (ours[i].detach() - torch.from_numpy(trajectory.behavior_logprobs)).exp().clamp(max=cap)
            total = total - (ratio * advantage * ours[i]).sum()
            k3.append((-k1[i]).expm1() + k1[i])
        sequences += len(kept)
    return total / (sequences * config.objective.length_constant), torch.cat(k3).mean().item()


@pytest.mark.parametrize("microbatch_tokens", [1, 60, 10_000])
def test_two_steps_descend_the_gradient_that_is_written_out_by_hand(
    start, server, origin, tiny_model, microbatch_tokens
):
    """The whole way: buffer, microbatches, reference, divisor, beta of the step, sign of the update."""
    kl = {"beta": 0.6, "schedule": "linear", "beta_end": 0.2, "schedule_steps": 2}
    options = {"microbatch_tokens": microbatch_tokens, "max_grad_norm": math.inf}
    config = configured(tiny_model, 1e-3, options, kl=kl, length_constant=7)
    learner = start(config)
    generator = torch.Generator().manual_seed(3)
    model, reference = learner._trainer.policy.model, learner._trainer.policy.reference
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    groups = batches_of(2)
    failed = [dataclasses.replace(groups[2].trajectories[0], reward=None), *groups[2].trajectories[1:]]
    groups[2] = dataclasses.replace(groups[2], trajectories=tuple(failed))
    offer(server, origin, groups)
    for step, beta in enumerate((0.6, 0.4)):
        before = copy.deepcopy(model)
        loss, kl_reference = loss_by_hand(before, reference, groups[4 * step : 4 * step + 4], config, beta)
        expected = torch.autograd.grad(loss, list(before.parameters()))
        record = learner.step().record
        assert record.loss == pytest.approx(loss.item(), rel=1e-4)
        assert record.kl_reference == pytest.approx(kl_reference, rel=1e-3)
        assert record.grad_norm == pytest.approx(math.hypot(*(g.norm().item() for g in expected)), rel=1e-3)
        moved = 0.0
        for old, new, gradient in zip(before.parameters(), model.parameters(), expected, strict=True):
            torch.testing.assert_close(new.grad, gradient, atol=1e-5, rtol=1e-3)
            moved += float(((new - old).detach() * gradient).sum())
        assert moved < 0
        assert record.sequences == 12 - (step == 0)


@pytest.mark.parametrize("correction", ["truncated", "ppo", "decoupled_ppo"])
def test_cut_fraction_responds_to_lag_with_one_update_a_batch(start, server, origin, tiny_model, correction):
    """If the old log-probs were those of the step's start, every ratio would be 1, however stale the batch."""
    config = configured(tiny_model, 3e-4, importance={"correction": correction, "cap": 1.2}, kl={"beta": 0.01})
    records = steps(start, server, origin, config, 5)
    assert [record.lag_max for record in records] == [0, 1, 2, 3, 4]
    cut = [record.truncated_weights for record in records]
    assert cut[0] == 0
    assert 0 < cut[1] < cut[4], cut
    assert records[0].kl_behavior_k3 == pytest.approx(0, abs=1e-6)
    assert records[4].kl_behavior_k3 > 1e-3


def test_first_lines_name_the_row(tiny_model):
    both = {"estimator": "rao_blackwell", "placement": "both"}
    told = "\n".join(check_objective(configured(tiny_model, kl={"beta": 0.01, **both})).lines)
    assert "KL objective: row unlisted: the full-vocabulary KL in reward and loss" in told
    assert "expected KL gradient: not G: no closed form (biased; G = " in told
    assert "why: " in told


def test_clamped_ratios_are_told(start, server, origin, tiny_model):
    groups = batches_of(1)
    first, *rest = groups[0].trajectories
    told = np.full_like(first.behavior_logprobs, -91.0)
    groups[0] = dataclasses.replace(groups[0], trajectories=(dataclasses.replace(first, behavior_logprobs=told), *rest))
    learner = start(configured(tiny_model, kl={"beta": 0.01}))
    offer(server, origin, groups)
    result = learner.step()
    assert any(f"step 1: {len(told)} tokens had a ratio outside their precision" in note for note in result.notes)
    assert math.isfinite(result.record.loss)


def test_a_gradient_that_is_not_finite_names_what_was_measured(start, server, origin, tiny_model):
    learner = start(configured(tiny_model, learner={"max_skipped_steps": 0}))
    offer(server, origin, batches_of(1))
    with torch.no_grad():
        next(learner._trainer.policy.model.parameters())[:] = math.nan
    with pytest.raises(RunFailed, match=r"step 1 is not finite \(loss nan.*lower learner.lr if"):
        learner.step()


def test_a_gradient_that_is_not_finite_changes_weights_or_stops_the_run(start, server, origin, tiny_model):
    learner = start(configured(tiny_model, learner={"max_skipped_steps": 2}))
    offer(server, origin, batches_of(5))
    assert learner.step().record.skipped_updates == 0
    weight = next(learner._trainer.policy.model.parameters())
    sound = weight.detach().clone()
    others = [p.detach().clone() for p in learner._trainer.policy.model.parameters()][1:]
    with torch.no_grad():
        weight[:] = math.nan
    for _ in range(2):
        result = learner.step()
        assert result.record.skipped_updates == 1 and not math.isfinite(result.record.grad_norm)
        assert any("the step is skipped, its groups are used up" in note for note in result.notes)
    assert all(
        torch.equal(a, b) for a, b in zip(list(learner._trainer.policy.model.parameters())[1:], others, strict=True)
    )
    with torch.no_grad():
        weight[:] = sound
    assert learner.step().record.policy_version == 4
    with torch.no_grad():
        weight[:] = math.nan
    assert learner.step().record.skipped_updates == 1, "skips are counted in a row"
    assert read_ledger(server, origin.run_id).trained == 20


def test_scaled_learning_rate_reaches_the_step(start, server, origin, tiny_model):
    config = configured(
        tiny_model,
        kl={"beta": 0.01},
        importance={"scale_learning_rate": True},
    )
    records = steps(start, server, origin, config, 3)
    assert records[0].learning_rate == pytest.approx(3e-3)
    assert records[2].learning_rate == pytest.approx(3e-3 * math.sqrt(records[2].ess_sequence))
    assert records[2].learning_rate < 3e-3


def test_beta_of_the_next_step_follows_its_schedule():
    adaptive = with_objective(kl={"beta": 0.01, "schedule": "adaptive", "target": 10.0, "horizon_steps": 1})
    assert next_beta(adaptive.objective.kl, 0.01, 1, measured_kl=0.0) == pytest.approx(0.008)
    linear = with_objective(kl={"beta": 0.01, "schedule": "linear", "beta_end": 0.0, "schedule_steps": 4})
    assert next_beta(linear.objective.kl, 0.123, 1, 0.0) == pytest.approx(0.0075)
    assert next_beta(with_objective().objective.kl, 0.123, 1, 0.0) == 0.123


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
    assert objective_spec(config) == ObjectiveSpec(beta=0.02, level="sequence", cap=3.0)
    assert objective_spec(RunConfig()) == ObjectiveSpec(beta=0.001)
    assert row_of(RunConfig()).row == "off_3"


def test_full_vocabulary_statistics_agree_with_the_sampled_ones(models):
    policy = Policy(*models, 0.9, torch.float64, CPU)
    (batch,) = microbatches(make_groups(), 10_000, pad_token_id=0)
    found, reference = statistics(policy, batch)
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


def with_objective(max_lag=4, sampling=None, sections=None, **objective):
    admission = {"max_lag": max_lag, "samples_per_group": 4}
    return RunConfig.model_validate(
        {"objective": objective, "admission": admission, "sampling": sampling or {}, **(sections or {})}
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


GROUP_MEAN_IN_REWARD = (
    {"kl": {"reward_weight": "per_decision"}},
    {"importance": SEQUENCE},
    {"kl": BOTH | {"estimator": "k3"}},
    {"kl": BOTH | {"estimator": "rao_blackwell", "reward_weight": "per_decision"}},
    {"max_lag": 0},
)


@pytest.mark.parametrize("choice", GROUP_MEAN_IN_REWARD)
def test_strict_kl_refuses_a_kl_in_the_reward_under_the_group_mean(choice):
    """With leave-one-out each of these choices is exact. The audit's groups of 2 keep half of the KL in the reward."""
    assert not row_of(with_objective(**choice)).biased
    with pytest.raises(ConfigError, match="advantage rloo"):
        check_objective(with_objective(strict_kl=True, advantage="group_mean", **choice))
    found = audit_config(with_objective(advantage="group_mean", **choice))
    assert found["biased"] and found["expected"].startswith("(1 - 1/G) ")
    own = found["far"]["rows"][-1]
    assert own["biased"] and own["expected"] == found["expected"]
    alone = found["expected"] == "(1 - 1/G) G"
    assert (own["bias_rel"] == pytest.approx(0.5) and own["cosine"] == pytest.approx(1)) or not alone
    assert own["bias_rel"] > 0.01


def test_group_mean_leaves_a_kl_in_the_loss_whole():
    check_objective(
        with_objective(strict_kl=True, advantage="group_mean", kl={"placement": "loss", "loss_weight": "prefix"})
    )


def test_bounds_that_nothing_reads_are_no_reason_to_refuse():
    for kl, importance in (
        ({"cap": 0.5}, {}),
        ({"reward_weight": "none"}, {"cap": 0.5}),
        ({"reward_weight": "sequence"}, {"cap": 0.5}),
    ):
        check_objective(with_objective(max_lag=0, strict_kl=True, kl=kl, importance=importance))
    with pytest.raises(ConfigError, match=r"0\.5 G"):
        check_objective(with_objective(max_lag=0, strict_kl=True, importance={"cap": 0.5}))


def test_half_precision_is_warned_of():
    for sections in ({"actors": {"dtype": "bfloat16"}}, {"learner": {"dtype": "bfloat16"}}):
        warnings = check_objective(with_objective(max_lag=0, importance=SEQUENCE, sections=sections)).warnings
        assert sum("bfloat16" in warning and "near 1" in warning for warning in warnings) == 1
    assert not any("compute in" in warning for warning in check_objective(with_objective()).warnings)


def test_truncated_sampling_with_weights_is_warned_of():
    warnings = check_objective(with_objective(sampling={"top_p": 0.9, "top_k": 5})).warnings
    (caution,) = [warning for warning in warnings if "top_p" in warning]
    assert "top_k 5" in caution and "E_mu[rho_t]" in caution and "kept, below 1" in caution
    (bounded,) = [w for w in check_objective(with_objective(sampling={"top_p": 0.8})).warnings if "top_p" in w]
    assert "between 0.8 and 1 a token" in bounded
    unweighted = with_objective(sampling={"top_p": 0.9}, importance={"correction": "none"})
    assert not any("top_p" in line for line in check_objective(unweighted).warnings)


def test_truncated_sampling_is_never_called_unbiased():
    for config in (
        with_objective(max_lag=0, sampling={"top_p": 0.9}, strict_kl=True),
        with_objective(sampling={"top_k": 5}, strict_kl=True, kl={"reward_weight": "per_decision"}),
    ):
        with pytest.raises(ConfigError, match="top_p 1 and top_k 0"):
            check_objective(config)
        found = audit_config(config)
        assert found["verdict"].startswith("Biased by what is never sampled, which the toy does not measure; exact")
        for regime in ("near", "far"):
            own = found[regime]["rows"][-1]
            assert (own["biased"], own["expected"]) == (True, found["expected"])
    assert not row_of(with_objective(sampling={"top_p": 0.9}, kl={"beta": 0.0})).biased


def test_verdict_names_what_biases_the_run():
    def verdict(**choice):
        return audit_config(with_objective(**choice))["verdict"]

    exact = {"reward_weight": "per_decision"}
    for reduction in ("token_mean", "sequence_mean"):
        found = verdict(reduction=reduction, kl=exact)
        assert found.startswith(f"Biased by reduction {reduction}, which the toy does not measure; exact otherwise.")
        assert "sampled, which" not in found
    assert "token_mean, which the toy does not measure; otherwise in groups of two, off by" in verdict(
        reduction="token_mean"
    )
    assert verdict(kl=exact | {"cap": 1e6}).startswith(
        "Biased by bounds that no weight of the toy reaches; exact within"
    )
    assert verdict(kl=exact | {"cap": 1.01}).startswith("Biased: in groups of two, off by")
    together = verdict(reduction="token_mean", kl=exact, sampling={"top_p": 0.9})
    assert together.startswith("Biased by what is never sampled and reduction token_mean, which")


def test_schema_and_spec_offer_the_same_choices_with_the_same_defaults():
    """The spec repeats them, because the mathematics knows no configuration."""
    sections = {
        name: RunConfig.model_fields["objective"].annotation.model_fields[name] for name in ("kl", "importance")
    }
    fields = {name: section.annotation.model_fields for name, section in sections.items()}
    own = RunConfig.model_fields["objective"].annotation.model_fields
    hints = typing.get_type_hints(ObjectiveSpec)
    compared = []
    for field in dataclasses.fields(ObjectiveSpec):
        section, name = ("kl", field.name.removeprefix("kl_")) if field.name.startswith("kl_") else (None, field.name)
        places = [fields[section]] if section else [fields["importance"], fields["kl"], own]
        found = next(place[name] for place in places if name in place)
        assert typing.get_args(hints[field.name]) == typing.get_args(found.annotation), field.name
        assert field.name == "beta" or field.default == found.default, field.name
        compared.append(field.name)
    assert {"estimator", "reward_to_go", "kl_cap", "cap", "reduction"} <= set(compared)


def test_values_that_do_not_go_together_are_a_config_error():
    with pytest.raises(ConfigError, match=r"objective\.importance\.cap=0\.7: masked would drop even weights of 1"):
        check_objective(with_objective(importance={"correction": "masked", "cap": 0.7}))
    with pytest.raises(ConfigError, match="adaptive"):
        check_objective(with_objective(kl={"beta": 0.0, "schedule": "adaptive"}))


def test_audit_of_a_configuration_speaks_of_the_run_itself():
    found = audit_config(with_objective(kl={"beta": 0.1, "placement": "loss", "estimator": "k1"}))
    assert (found["row"], found["biased"]) == ("off_9", True)
    far = audit_config(with_objective(max_lag=0, kl={"estimator": "k3"}))["verdict"]
    assert "does not point to the reference at all near and far from it" in far
    own, same = found["near"]["rows"][-1], next(row for row in found["near"]["rows"] if row["row"] == "off_9")
    assert own["row"] == "this_run" and own["expected"] == same["expected"]
    for number in ("bias_rel", "cosine", "variance"):
        assert own[number] == pytest.approx(same[number], rel=1e-9)
    exact = audit_config(with_objective(kl={"beta": 0.1, "reward_weight": "per_decision"}))
    assert exact["verdict"].startswith("Unbiased") and exact["far"]["rows"][-1]["bias_abs"] < 1e-12
    synchronous = audit_config(with_objective(max_lag=0))
    assert synchronous["verdict"].startswith("Unbiased") and synchronous["assumptions"]["drift"] == 0
    default, stale = audit_config(with_objective()), audit_config(with_objective(max_lag=16))
    assert default["far"]["rows"][-1]["bias_rel"] < stale["far"]["rows"][-1]["bias_rel"]
    assert "near" not in audit_config(with_objective(kl={"beta": 0.0}))
    refused = audit_config(with_objective(strict_kl=True))
    assert refused["biased"] and refused["near"]["rows"][-1]["row"] == "this_run"


@pytest.mark.parametrize("beta", [1e-300, 1e-3, 1e6])
def test_audit_of_a_configuration_is_of_its_own_baseline_and_any_beta(beta):
    """Off G by pairs, at lag 8, far from the reference: an independent enumeration of all groups of two."""
    for importance, away in (
        ({"correction": "ppo"}, 0.918),
        ({"correction": "gspo"}, 0.651),
        ({"correction": "none"}, 0.542),
        ({"correction": "cispo"}, 0.440),
        ({}, 0.459),
    ):
        found = audit_config(with_objective(max_lag=8, kl={"beta": beta}, importance=importance))
        assert (found["assumptions"]["rewards"], found["assumptions"]["groups_of"]) == (0, 2)
        assert found["far"]["rows"][-1]["bias_rel"] == pytest.approx(away, abs=6e-4)
        assert "exact" not in found["verdict"].partition(".")[0]


def test_a_beta_beyond_reason_is_refused():
    with pytest.raises(ValueError, match="less than or equal to 1000000"):
        with_objective(kl={"beta": 1e160})


UNREAD = (
    ("kl.cap", {"kl": {"cap": 10.0}}),
    ("kl.loss_weight", {"kl": {"loss_weight": "prefix"}}),
    ("kl.differentiate_weight", {"kl": {"differentiate_weight": False}}),
    ("kl.differentiate_weight", {"kl": {"placement": "loss", "differentiate_weight": False}}),
    ("kl.reward_weight", {"kl": {"placement": "loss", "reward_weight": "per_decision"}}),
    ("kl.reward_to_go", {"kl": {"reward_weight": "per_decision", "reward_to_go": False}}),
    ("kl.reward_to_go", {"kl": {"placement": "loss", "reward_to_go": False}}),
    ("kl.beta_end", {"kl": {"beta_end": 1.0}}),
    ("kl.schedule_steps", {"kl": {"schedule_steps": 3}}),
    ("kl.target", {"kl": {"target": 9.0}}),
    ("kl.horizon_steps", {"kl": {"schedule": "linear", "horizon_steps": 99}}),
    ("kl.estimator", {"kl": {"beta": 0.0, "estimator": "k3"}}),
    ("importance.level", {"importance": {"correction": "ppo", "level": "sequence"}}),
    ("importance.level", {"importance": {"correction": "gspo", "level": "sequence"}}),
    ("importance.cap", {"importance": {"correction": "importance", "cap": 9.0}}),
    ("importance.cap", {"importance": {"correction": "cispo", "cap": 9.0}}),
    ("importance.floor", {"importance": {"floor": 0.5}}),
    ("importance.clip_low", {"importance": {"clip_low": 0.9}}),
    ("importance.clip_high", {"importance": {"correction": "decoupled_ppo", "clip_high": 9.0}}),
    ("importance.trace_cap", {"importance": {"trace_cap": 9.0}}),
    ("importance.second_moment", {"importance": {"second_moment": 9.0}}),
    ("importance.divergence", {"importance": {"divergence": 9.0}}),
    ("baseline", {"baseline": 5.0}),
    ("length_constant", {"reduction": "token_mean", "length_constant": 5}),
)


def unread(config):
    return [warning for warning in check_objective(config).warnings if "has no effect" in warning]


@pytest.mark.parametrize(("key", "choice"), UNREAD)
def test_an_option_that_nothing_reads_is_told(key, choice):
    (warning,) = unread(with_objective(**choice))
    assert warning.startswith(f"objective.{key}=") and "read only with" in warning


def test_options_that_are_read_are_not_told():
    for choice in (
        {},
        {"kl": {"reward_weight": "sequence", "cap": 10.0}},
        {"kl": BOTH | {"cap": 3.0}},
        {"kl": {"beta": 0.0, "schedule": "linear", "beta_end": 0.1, "schedule_steps": 3, "estimator": "k3"}},
        {"kl": {"schedule": "adaptive", "target": 0.1, "horizon_steps": 2}},
        {"importance": {"correction": "masked", "level": "sequence", "floor": 0.1, "cap": 3.0}},
        {"importance": {"correction": "sequence_mask", "clip_low": 0.1, "clip_high": 0.3, "divergence": 0.2}},
        {"importance": {"correction": "vtrace", "cap": 1.5, "trace_cap": 1.1}},
        {"importance": {"correction": "m2po", "second_moment": 0.1}},
        {"advantage": "plain", "baseline": 0.5},
        {"length_constant": 7},
    ):
        assert not unread(with_objective(**choice)), choice


def test_an_option_is_told_as_given_in_a_file_and_not_for_a_run_written_out_in_full(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("objective:\n  kl: {cap: inf}\n")
    assert len(unread(load_config(path, ["objective.baseline=0.0"]))) == 2
    path.write_text(dump(load_config(None, ["objective.importance.floor=0.7"])))
    (warning,) = unread(load_config(path))
    assert warning.startswith("objective.importance.floor=0.7 ")


@pytest.mark.parametrize(
    ("importance", "left"),
    [
        ({"correction": "masked", "floor": 1.0, "cap": 1.0}, "0 "),
        ({"correction": "m2po", "second_moment": 1e-30}, "0 "),
        ({"cap": 1e-9}, "1e-09 "),
        ({"correction": "ppo", "clip_low": 0.0, "clip_high": 0.0}, "0.5 "),
        ({"correction": "vtrace", "trace_cap": 1e-9}, "0.5 "),
    ],
)
def test_bounds_that_kill_the_tasks_gradient_are_told(importance, left):
    (warning,) = [w for w in check_objective(with_objective(importance=importance)).warnings if "Bounds" in w]
    assert f"leave {left}of the task's gradient" in warning


def test_published_bounds_are_not_called_deadly():
    for importance in (
        *({"correction": name} for name in typing.get_args(typing.get_type_hints(ObjectiveSpec)["correction"])),
        {"correction": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        {"correction": "topr", "cap": 1.0},
        {"correction": "cispo", "clip_low": 1.0, "clip_high": 0.28},
    ):
        warnings = check_objective(with_objective(importance=importance)).warnings
        assert not any("Bounds" in warning for warning in warnings), importance

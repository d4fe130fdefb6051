"""What real batches do to a loss: splits, padding, missing samples, half precision, and log-probs that break exp."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.learner.objective.advantage import advantages, group_mean, group_std, leave_one_out
from counterflow.learner.objective.diagnostics import diagnose, remarks
from counterflow.learner.objective.importance import correct
from counterflow.learner.objective.loss import policy_loss, token_losses
from counterflow.learner.objective.spec import ObjectiveSpec
from counterflow.learner.objective.types import PolicyBatch, concatenate

CORRECTIONS = ("ppo", "decoupled_ppo", "cispo", "gspo", "topr", "m2po", "sequence_mask", "vtrace")
IN_REWARD = [
    ObjectiveSpec(beta=0.1, correction=correction, level=level, cap=cap, reward_to_go=to_go)
    for (correction, level), cap, to_go in itertools.product(
        [("none", "token"), ("truncated", "token"), ("truncated", "sequence")], (2.0, math.inf), (False, True)
    )
]
IN_REWARD += [
    ObjectiveSpec(beta=0.1, correction=correction, level=level)
    for correction, level in itertools.product(("importance", "masked"), ("token", "prefix", "sequence", "geometric"))
]
IN_REWARD += [ObjectiveSpec(beta=0.1, correction=correction) for correction in CORRECTIONS]
IN_REWARD += [
    ObjectiveSpec(beta=0.1, estimator=estimator, reward_weight=weight, kl_cap=cap, reward_to_go=True)
    for estimator, weight, cap in itertools.product(
        ("k1", "k3", "rao_blackwell"), ("none", "prefix", "per_decision", "sequence"), (2.0, math.inf)
    )
]
IN_REWARD += [
    ObjectiveSpec(beta=0.1, advantage=advantage, reward_to_go=to_go, reward_weight=weight)
    for advantage, to_go, weight in itertools.product(
        ("group_mean", "group_std"), (False, True), ("importance", "per_decision")
    )
]
SPECS = [
    *IN_REWARD,
    *(
        ObjectiveSpec(
            beta=0.1,
            estimator=estimator,
            placement=placement,
            loss_weight=weight,
            differentiate_weight=moving,
            kl_cap=cap,
        )
        for estimator, placement, (weight, moving), cap in itertools.product(
            ("k1", "k2", "k3", "rao_blackwell"),
            ("loss", "both"),
            (("none", False), ("token", True), ("prefix", False), ("prefix", True), ("sequence", True)),
            (2.0, math.inf),
        )
    ),
    ObjectiveSpec(beta=0.1, advantage="plain", baseline=0.3),
    ObjectiveSpec(beta=0.1, reduction="sequence_mean"),
    ObjectiveSpec(beta=0.1, reduction="token_mean"),
]
OPTIONAL = ("reference_logprobs", "proximal_logprobs", "reference_divergence")
LOGPROBS = ("logprobs", "behavior_logprobs", *OPTIONAL)


def make_batch(lengths, group, seed=0, dtype=torch.float64):
    """Random sequences of `lengths` tokens, every one of them in the mask."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    logprobs, noise, reference, proximal, divergence = -torch.rand(5, tokens, dtype=torch.float64, generator=generator)
    return PolicyBatch(
        logprobs=logprobs.to(dtype).requires_grad_(),
        behavior_logprobs=(logprobs + noise).to(dtype),
        reference_logprobs=(logprobs + reference).to(dtype),
        proximal_logprobs=(logprobs + 0.1 * proximal).to(dtype),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        sequence=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        rewards=torch.randint(0, 2, (len(lengths),), generator=generator).to(dtype),
        group=torch.tensor(group),
        reference_divergence=(-divergence).to(dtype).requires_grad_(),
    )


def weights_of(batch, spec):
    return correct(batch, spec, torch.ones_like(batch.logprobs)).weight


def gradient(batch, spec, divisor=10.0):
    """In the log-probs, and in the full-vocabulary KLs, which have their own way to the weights: float [2, tokens]."""
    leaves = (batch.logprobs, batch.reference_divergence)
    loss = policy_loss(batch, spec, divisor)
    return torch.stack(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def part(batch, chosen_groups):
    """The whole groups `chosen_groups` of a batch, sequences renumbered, and which tokens they are."""
    sequences = torch.isin(batch.group, torch.tensor(chosen_groups))
    tokens = sequences[batch.sequence]
    renumbered = sequences.long().cumsum(0) - 1
    return tokens, PolicyBatch(
        logprobs=batch.logprobs.detach()[tokens].requires_grad_(),
        behavior_logprobs=batch.behavior_logprobs[tokens],
        reference_logprobs=batch.reference_logprobs[tokens],
        proximal_logprobs=batch.proximal_logprobs[tokens],
        loss_mask=batch.loss_mask[tokens],
        sequence=renumbered[batch.sequence[tokens]],
        rewards=batch.rewards[sequences],
        group=batch.group[sequences],
        reference_divergence=batch.reference_divergence.detach()[tokens].requires_grad_(),
    )


@settings(max_examples=150)
@given(data=st.data(), spec=st.sampled_from(SPECS))
def test_gradient_does_not_depend_on_the_split(data, spec):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    group = [7 * number for number, size in enumerate(sizes) for _ in range(size)]
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=len(group), max_size=len(group)))
    owner = data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    batch = make_batch(lengths, group)
    whole = gradient(batch, spec)
    pieces = torch.full_like(whole, math.nan)
    parts = []
    for microbatch in sorted(set(owner)):
        tokens, piece = part(batch, [7 * number for number, owned in enumerate(owner) if owned == microbatch])
        pieces[:, tokens] = gradient(piece, spec)
        parts.append(piece)
    torch.testing.assert_close(pieces, whole, atol=1e-12, rtol=0)
    together, alone = diagnose(concatenate(parts), spec), diagnose(batch, spec)
    assert dataclasses.astuple(together) == pytest.approx(dataclasses.astuple(alone))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_tokens_contribute_exactly_nothing(spec, rubbish):
    """Prompt tokens and padding may hold anything; an engine has no log-prob for them."""
    clean = make_batch([2, 3, 1, 2], [0, 0, 1, 1])
    dirty_at = torch.tensor([True, False] * 8)[: 2 * 8]
    position = torch.arange(8)

    def interleave(values, filler):
        out = torch.full((16,), filler, dtype=values.dtype)
        out[~dirty_at] = values.detach()
        return out

    for dirty in LOGPROBS:
        fillers = dict.fromkeys(LOGPROBS, -1.0) | {dirty: rubbish}
        values = {name: interleave(getattr(clean, name), fillers[name]) for name in LOGPROBS}
        batch = PolicyBatch(
            **(values | {name: values[name].requires_grad_() for name in ("logprobs", "reference_divergence")}),
            loss_mask=~dirty_at,
            sequence=clean.sequence[position].repeat_interleave(2),
            rewards=clean.rewards,
            group=clean.group,
        )
        found = gradient(batch, spec)
        assert found[:, dirty_at].eq(0).all()
        torch.testing.assert_close(found[:, ~dirty_at], gradient(clean, spec), atol=1e-15, rtol=1e-14)
        assert torch.equal(token_losses(batch, spec)[dirty_at], torch.zeros(8, dtype=torch.float64))
        assert weights_of(batch, spec)[dirty_at].eq(0).all()
        assert dataclasses.astuple(diagnose(batch, spec)) == pytest.approx(dataclasses.astuple(diagnose(clean, spec)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spec", SPECS)
def test_ratios_of_e_to_the_89_stay_finite(spec, dtype):
    """Log-prob -2 against -91 overflows float32; the reference is 60 nats below, then above, the policy."""
    for reference in (-62.0, -91.0, -0.5):
        batch = PolicyBatch(
            logprobs=torch.tensor([-2.0, -2.0, -62.0, -0.1], dtype=dtype, requires_grad=True),
            behavior_logprobs=torch.tensor([-91.0, -91.0, -0.1, -0.1], dtype=dtype),
            reference_logprobs=torch.tensor([reference, -2.0, -0.5, -0.1], dtype=dtype),
            proximal_logprobs=torch.tensor([-2.0, -91.0, -62.0, -0.1], dtype=dtype),
            loss_mask=torch.ones(4, dtype=torch.bool),
            sequence=torch.tensor([0, 0, 1, 1]),
            rewards=torch.tensor([1.0, 0.0], dtype=dtype),
            group=torch.tensor([0, 0]),
            reference_divergence=torch.tensor([60.0, 0.0, 0.1, 0.0], dtype=dtype, requires_grad=True),
        )
        assert torch.isfinite(token_losses(batch, spec)).all()
        assert torch.isfinite(gradient(batch, spec)).all()
        assert torch.isfinite(weights_of(batch, spec).square()).all()
        assert all(math.isfinite(value) for value in dataclasses.astuple(diagnose(batch, spec)))


def test_a_sequence_of_thousands_of_drifted_tokens_stays_finite():
    batch = make_batch([4096, 4096], [0, 0], dtype=torch.float32)
    batch = dataclasses.replace(batch, behavior_logprobs=batch.logprobs.detach() - 1.0)
    for spec in SPECS:
        assert torch.isfinite(gradient(batch, spec)).all()
        found = diagnose(batch, spec)
        assert found.ess_sequence == pytest.approx(1)
        assert found.chi2 == pytest.approx(math.exp(2) - 1, rel=1e-5)


def test_half_precision_is_computed_in_float32():
    batch = make_batch([3, 2, 4], [0, 0, 0], dtype=torch.bfloat16)
    wide = dataclasses.replace(
        batch,
        logprobs=batch.logprobs.detach().float().requires_grad_(),
        behavior_logprobs=batch.behavior_logprobs.float(),
        reference_logprobs=batch.reference_logprobs.float(),
        proximal_logprobs=batch.proximal_logprobs.float(),
        rewards=batch.rewards.float(),
        reference_divergence=batch.reference_divergence.detach().float().requires_grad_(),
    )
    for spec in SPECS:
        assert torch.equal(policy_loss(batch, spec, 10.0), policy_loss(wide, spec, 10.0))
        assert torch.equal(gradient(batch, spec), gradient(wide, spec).bfloat16())


def test_a_weight_never_passes_its_cap_and_carries_no_gradient():
    batch = make_batch([3, 2, 4], [0, 0, 0])
    batch = dataclasses.replace(batch, behavior_logprobs=batch.behavior_logprobs - 2.0)
    for level in ("token", "sequence"):
        weights = weights_of(batch, ObjectiveSpec(beta=0, level=level, cap=1.25))
        assert weights.max().item() == 1.25
        assert not weights.requires_grad


def test_kl_term_uses_current_not_recorded_logprobs():
    batch = make_batch([3, 2], [0, 0])
    spec = ObjectiveSpec(beta=0.5, correction="none")
    other = dataclasses.replace(batch, behavior_logprobs=batch.behavior_logprobs - 3.0)
    assert torch.equal(advantages(batch, spec), advantages(other, spec))


def test_empty_response_counts_in_the_baseline():
    batch = make_batch([2, 0, 3], [0, 0, 0])
    batch = dataclasses.replace(batch, rewards=torch.tensor([0.0, 3.0, 0.0], dtype=torch.float64))
    spec = ObjectiveSpec(beta=0, correction="none")
    assert advantages(batch, spec).tolist() == [-1.5] * 5
    torch.testing.assert_close(gradient(batch, spec, 1.0)[0], torch.full((5,), 1.5, dtype=torch.float64))


def test_batch_without_a_single_token_has_zero_loss():
    batch = make_batch([0, 0], [0, 0])
    for spec in SPECS:
        assert policy_loss(batch, spec, 10.0).item() == 0
        assert all(math.isfinite(value) for value in dataclasses.astuple(diagnose(batch, spec)))


def test_groups_may_be_incomplete_and_a_group_of_one_teaches_nothing():
    rewards = torch.tensor([1.0, 0.0, 0.0, 5.0, 1.0, 0.0])
    group = torch.tensor([4, 4, 4, 9, 2, 2])
    assert leave_one_out(rewards, group).tolist() == [1.0, -0.5, -0.5, 0.0, 1.0, -1.0]
    for spec in IN_REWARD:
        lone = make_batch([3], [8])
        assert torch.equal(gradient(lone, spec), torch.zeros(2, 3, dtype=torch.float64))
        measured = diagnose(lone, spec)
        assert measured.lone_sequences == 1
        assert any("alone in their group" in remark for remark in remarks(measured, spec))


def test_return_to_go_leaves_out_the_past_of_its_own_sequence_only():
    batch = make_batch([2, 0, 3], [0, 0, 0])
    penalty = 0.5 * (batch.logprobs.detach() - batch.reference_logprobs)
    whole, to_go = (advantages(batch, ObjectiveSpec(beta=0.5, reward_to_go=chosen)) for chosen in (False, True))
    past = torch.stack([0 * penalty[0], penalty[0], 0 * penalty[0], penalty[2], penalty[2] + penalty[3]])
    torch.testing.assert_close(to_go - whole, past, atol=1e-12, rtol=0)


def test_order_of_a_groups_sequences_does_not_matter():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0])
    group = torch.tensor([0, 1, 0, 1, 0])
    shuffled = torch.tensor([4, 3, 2, 1, 0])
    torch.testing.assert_close(
        leave_one_out(rewards, group)[shuffled], leave_one_out(rewards[shuffled], group[shuffled])
    )


@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 17))
def test_equal_rewards_give_no_rounding_noise(reward, size):
    rewards = torch.full((size,), reward)
    assert leave_one_out(rewards, torch.zeros(size, dtype=torch.int64)).eq(0).all()


def test_zero_signal_is_judged_by_the_task_reward_alone():
    batch = make_batch([2, 3, 2, 1], [0, 0, 1, 1])
    batch = dataclasses.replace(batch, rewards=torch.tensor([0.1, 0.1, 0.0, 1.0], dtype=torch.float64))
    spec = ObjectiveSpec(beta=0.5)
    assert advantages(batch, spec)[0] != 0
    assert diagnose(batch, spec).zero_signal_groups == 0.5


def test_on_policy_weights_at_a_cap_of_one_are_not_called_truncated():
    batch = make_batch([2, 3], [0, 0])
    batch = dataclasses.replace(batch, behavior_logprobs=batch.logprobs.detach())
    assert diagnose(batch, ObjectiveSpec(beta=0, cap=1.0)).truncated_weights == 0


def test_reference_may_be_missing_only_without_a_kl_term():
    batch = dataclasses.replace(make_batch([2, 3], [0, 0]), reference_logprobs=None)
    assert torch.isfinite(policy_loss(batch, ObjectiveSpec(beta=0), 10.0))
    assert math.isnan(diagnose(batch, ObjectiveSpec(beta=0)).kl_reference)
    with pytest.raises(ValueError, match="reference_logprobs"):
        policy_loss(batch, ObjectiveSpec(beta=0.1), 10.0)


def test_bad_data_inside_the_mask_shows_in_the_loss():
    batch = make_batch([2, 3], [0, 0])
    batch = dataclasses.replace(batch, logprobs=torch.full((5,), math.nan, requires_grad=True))
    assert not torch.isfinite(policy_loss(batch, ObjectiveSpec(beta=0.1), 10.0))


def test_misshapen_input_is_refused():
    batch = make_batch([2, 3], [0, 0])
    with pytest.raises(ValueError, match="behavior_logprobs"):
        dataclasses.replace(batch, behavior_logprobs=torch.zeros(4))
    with pytest.raises(ValueError, match="loss_mask"):
        dataclasses.replace(batch, loss_mask=torch.ones(5))
    with pytest.raises(ValueError, match="group"):
        dataclasses.replace(batch, group=torch.zeros(3))
    with pytest.raises(ValueError, match="divisor"):
        policy_loss(batch, ObjectiveSpec(beta=0), 0.0)
    with pytest.raises(ValueError, match="beta"):
        ObjectiveSpec(beta=-1.0)
    with pytest.raises(ValueError, match="cap"):
        ObjectiveSpec(beta=0.0, cap=0.0)


def test_equal_rewards_under_std_leave_the_kl_term_at_its_own_scale():
    """The trap: normalised after shaping, a group of equal rewards is KL noise of unit variance, whatever beta is."""
    batch = make_batch([3, 2, 4], [0, 0, 0])
    batch = dataclasses.replace(batch, rewards=torch.ones(3, dtype=torch.float64))
    faint, strong = (advantages(batch, ObjectiveSpec(beta=beta, advantage="group_std")) for beta in (1e-6, 1e-2))
    assert 0 < faint.abs().max() < 1e-5
    torch.testing.assert_close(strong, 1e4 * faint)
    alone = advantages(batch, ObjectiveSpec(beta=0, advantage="group_std"))
    assert alone.eq(0).all()
    assert diagnose(batch, ObjectiveSpec(beta=1e-6, advantage="group_std")).zero_signal_groups == 1


def test_group_std_divides_by_the_spread_of_its_own_group():
    """0, 1, 5 have mean 2 and, with n - 1, variance 7; 0 and 4 have mean 2 and variance 8; one alone has neither."""
    rewards = torch.tensor([0.0, 4.0, 1.0, 0.0, 5.0, 9.0], dtype=torch.float64)
    group = torch.tensor([0, 1, 0, 1, 0, 2])
    expected = [-0.75592894602, 0.70710678119, -0.37796447301, -0.70710678119, 1.13389341903, 0.0]
    assert group_std(rewards, group).tolist() == pytest.approx(expected, abs=1e-6)


def test_std_normalises_the_task_reward_only():
    batch = make_batch([3, 2, 4], [0, 0, 0])
    batch = dataclasses.replace(batch, rewards=torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64))
    task = torch.tensor([-0.75592894602, -0.37796447301, 1.13389341903], dtype=torch.float64)[batch.sequence]
    kl = advantages(batch, ObjectiveSpec(beta=0.5)) - advantages(batch, ObjectiveSpec(beta=0.0))
    found = advantages(batch, ObjectiveSpec(beta=0.5, advantage="group_std"))
    torch.testing.assert_close(found, task + kl, atol=1e-6, rtol=0)


def test_group_mean_is_leave_one_out_shrunk():
    rewards = torch.tensor([1.0, 0.0, 0.0, 5.0, 1.0, 0.0])
    group = torch.tensor([4, 4, 4, 9, 2, 2])
    size = torch.tensor([3, 3, 3, 1, 2, 2])
    torch.testing.assert_close(group_mean(rewards, group), leave_one_out(rewards, group) * (1 - 1 / size))
    assert group_std(rewards, group)[3] == 0


def test_plain_baseline_is_taken_from_every_reward_even_alone():
    batch = make_batch([2, 1], [3, 4])
    spec = ObjectiveSpec(beta=0, advantage="plain", baseline=0.25)
    torch.testing.assert_close(advantages(batch, spec), (batch.rewards - 0.25)[batch.sequence])


@pytest.mark.parametrize(("current", "reference", "clamped"), [(-2.0, -62.0, 0), (-62.0, -2.0, 1)])
def test_a_reference_sixty_nats_away_keeps_its_pull_and_is_told(current, reference, clamped):
    """60 nats below pi nothing overflows; 60 above, ref / pi does in float32, and the token is still pulled."""
    batch = PolicyBatch(
        logprobs=torch.tensor([current, -0.5], requires_grad=True),
        behavior_logprobs=torch.tensor([current, -0.5]),
        reference_logprobs=torch.tensor([reference, -0.5]),
        proximal_logprobs=None,
        loss_mask=torch.ones(2, dtype=torch.bool),
        sequence=torch.tensor([0, 1]),
        rewards=torch.zeros(2),
        group=torch.tensor([0, 0]),
    )
    for estimator, placement in itertools.product(("k1", "k2", "k3"), ("reward", "loss", "both")):
        spec = ObjectiveSpec(beta=0.1, estimator=estimator, placement=placement)
        loss = policy_loss(batch, spec, 1.0)
        (slope,) = torch.autograd.grad(loss, batch.logprobs)
        measured = diagnose(batch, spec)
        assert torch.isfinite(loss) and torch.isfinite(slope).all()
        # k3 in both is r - 1 + k1 from the reward and 1 - r from the loss: past float32, only the remark is left.
        assert slope[0] != 0 or (estimator, placement, clamped) == ("k3", "both", 1)
        assert measured.bounded_exponents == (clamped if estimator == "k3" else 0)
        assert any("clamped" in remark for remark in remarks(measured, spec)) == bool(measured.bounded_exponents)


@pytest.mark.parametrize(
    ("options", "alone", "equal"),
    [
        ({"beta": 0.1}, "teach nothing", "only the KL term teaches"),
        ({"beta": 0.0}, "teach nothing", "nothing teaches"),
        ({"beta": 0.1, "placement": "loss"}, "only the KL in the loss teaches", "only the KL term teaches"),
        ({"beta": 0.1, "advantage": "plain"}, None, None),
        ({"beta": 0.0, "advantage": "plain"}, None, None),
    ],
)
def test_remarks_say_what_teaches_and_the_gradient_agrees(options, alone, equal):
    spec = ObjectiveSpec(**options)
    lone = make_batch([3], [8])
    lone = dataclasses.replace(lone, rewards=torch.ones(1, dtype=torch.float64))
    same = make_batch([3, 2], [0, 0])
    same = dataclasses.replace(same, rewards=torch.ones(2, dtype=torch.float64))
    for batch, words in ((lone, alone), (same, equal)):
        found = [r for r in remarks(diagnose(batch, spec), spec) if "alone" in r or batch is same]
        assert [r.split(": ")[1].removesuffix(" there") for r in found] == ([words] if words else [])
        assert bool(gradient(batch, spec).ne(0).any()) == (words not in ("teach nothing", "nothing teaches"))


def test_a_ratio_of_e_to_the_89_is_told():
    batch = make_batch([2, 3], [0, 0], dtype=torch.float32)
    behavior = batch.behavior_logprobs.clone()
    behavior[0] = -91.0
    batch = dataclasses.replace(batch, behavior_logprobs=behavior)
    assert diagnose(batch, ObjectiveSpec(beta=0.1)).bounded_exponents == 1
    assert diagnose(batch, ObjectiveSpec(beta=0.1, level="prefix")).bounded_exponents == 2
    assert diagnose(batch, ObjectiveSpec(beta=0.1, correction="none")).bounded_exponents == 0


def test_weights_that_vanish_are_told():
    """A product over 4,096 tokens that mu found likelier is 0 in float32: no gradient, and not in silence."""
    batch = make_batch([4096, 3], [0, 0], dtype=torch.float32)
    batch = dataclasses.replace(batch, behavior_logprobs=batch.logprobs.detach() + 0.1)
    spec = ObjectiveSpec(beta=0.1, correction="importance", level="prefix")
    weights = weights_of(batch, spec)
    measured = diagnose(batch, spec)
    assert weights[4095] == 0
    assert measured.bounded_exponents == pytest.approx(4096 - 873, abs=2)
    assert any("or is 0" in remark for remark in remarks(measured, spec))
    assert diagnose(batch, ObjectiveSpec(beta=0.1)).bounded_exponents == 0


def test_running_products_of_four_thousand_tokens_are_those_of_float64():
    batch = make_batch([4096, 7], [0, 0], dtype=torch.float32)
    small = dataclasses.replace(batch, behavior_logprobs=(batch.logprobs.detach() - 1e-3).float())
    weights = weights_of(small, ObjectiveSpec(beta=0, correction="importance", level="prefix"))
    expected = (small.logprobs.detach() - small.behavior_logprobs).double()[:4096].cumsum(0).exp()
    torch.testing.assert_close(weights[:4096].double(), expected, rtol=1e-5, atol=0)
    for spec in SPECS:
        assert torch.isfinite(gradient(batch, spec)).all()


def test_float32_split_agrees_to_a_millionth():
    batch = make_batch([5, 3, 4, 6], [0, 0, 1, 1], dtype=torch.float32)
    for spec in SPECS:
        whole, pieces = gradient(batch, spec), torch.full((2, 18), math.nan)
        for chosen in ([0], [1]):
            tokens, piece = part(batch, chosen)
            pieces[:, tokens] = gradient(piece, spec)
        torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("advantage", ["rloo", "group_mean"])
def test_a_small_kl_survives_beside_large_rewards(advantage):
    """Equal rewards teach nothing, whatever they are; the penalties beside them are far below their rounding."""
    batch = make_batch([4, 4], [0, 0], dtype=torch.float32)
    spec = ObjectiveSpec(beta=1e-3, advantage=advantage)
    alone = gradient(dataclasses.replace(batch, rewards=torch.zeros(2)), spec)
    assert alone.ne(0).any()
    for reward in (1e2, 1e4, 1e6, 1e30):
        torch.testing.assert_close(gradient(dataclasses.replace(batch, rewards=torch.full((2,), reward)), spec), alone)


def test_advantages_of_huge_rewards_are_those_of_small_ones():
    batch = make_batch([2, 2, 2, 2], [0, 0, 0, 0], dtype=torch.float32)
    small = torch.tensor([0.0, 1.0, 1.0, 0.0])
    for scale in (1e20, 1.5e38):
        huge = dataclasses.replace(batch, rewards=small * scale)
        std = advantages(huge, ObjectiveSpec(beta=0, advantage="group_std"))
        like = ObjectiveSpec(beta=0, advantage="group_std")
        expected = advantages(dataclasses.replace(batch, rewards=small), like)
        torch.testing.assert_close(std, expected, rtol=1e-5, atol=0)
        mean = advantages(dataclasses.replace(huge, rewards=(small - 0.5) * 2 * scale), ObjectiveSpec(beta=0))
        assert mean.dtype == torch.float32 and mean.isfinite().all() and mean.ne(0).all()

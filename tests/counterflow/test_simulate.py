"""Simulated runs: under any latencies, publishing delays and crashes the bound holds, and no run locks up."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from counterflow.learner.staleness import Policy, Rule
from counterflow.lengths import bucket, distance
from counterflow.simulate import Outcome, Setting, World, simulate

POLICIES = ["wait", "drop", "mask_tokens", "withhold_keep_baseline", "downweight"]


@st.composite
def settings_of_runs(draw: st.DrawFn, policies: tuple[Policy, ...]) -> Setting:
    policy, order = draw(st.sampled_from(policies)), draw(st.sampled_from(["admission", "ready", "freshest"]))
    max_lag = draw(st.integers(0, 4))
    ahead = max_lag if policy == "wait" else draw(st.integers(max_lag, max_lag + 6) | st.just(math.inf))
    return Setting(
        rule=Rule(policy, max_lag),
        order=order,
        run_ahead=ahead,
        groups_per_step=draw(st.integers(1, 7)),
        steps=draw(st.integers(1, 12)),
        actors=draw(st.integers(1, 3)),
        groups_in_flight=draw(st.integers(1, 40)),
        lease_s=draw(st.floats(0.5, 200)),
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Every delay is drawn from a few, so that all orders of events come up, ties among them.

    No group takes no time: under `drop`, actors that wait for a version would sample stale ones without end.
    """
    groups = draw(st.lists(st.sampled_from([0.5, 1.0, 3.0, 10.0, 100.0]), min_size=1, max_size=30))
    delays = st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0])
    publishes, steps = (draw(st.lists(delays, min_size=1, max_size=30)) for _ in range(2))
    crashes = draw(st.lists(st.tuples(st.floats(0, 300), st.integers(0, 2)), max_size=6))
    return World(
        latency_s=lambda n, attempt: groups[(n + 7 * attempt) % len(groups)],
        publish_s=lambda version, actor: publishes[(3 * version + actor) % len(publishes)],
        train_s=lambda version: steps[version % len(steps)],
        crashes=tuple(crashes),
    )


def run(setting: Setting, world: World) -> Outcome:
    crashes = tuple((time_s, actor % setting.actors) for time_s, actor in world.crashes)
    return simulate(setting, World(world.latency_s, world.publish_s, world.train_s, world.prompt_tokens, crashes))


def check(setting: Setting, outcome: Outcome) -> None:
    """Every step was taken on groups trained once, the ledger closes and the parts of the lag add up."""
    assert Counter(t.version for t in outcome.trained) == dict.fromkeys(range(setting.steps), setting.groups_per_step)
    numbers = [t.admission for t in outcome.trained]
    assert len(set(numbers)) == len(numbers) and not set(numbers) & set(outcome.dropped)
    assert outcome.closes
    for trained in outcome.trained:
        lags = trained.lags
        parts = (lags.in_flight, lags.in_queue, lags.in_learner)
        assert all((part >= 0).all() for part in parts) and (sum(parts) == lags.total).all()


@settings(deadline=None, max_examples=300)
@given(settings_of_runs(("wait", "drop")), worlds())
def test_token_is_trained_past_the_bound_or_a_run_locks_up(setting: Setting, world: World) -> None:
    outcome = run(setting, world)
    check(setting, outcome)
    assert max(int(t.lags.total.max()) for t in outcome.trained) <= setting.rule.max_lag
    if setting.rule.policy == "wait" and setting.order == "admission":
        assert not outcome.dropped


@settings(deadline=None, max_examples=200)
@given(settings_of_runs(("mask_tokens", "withhold_keep_baseline", "downweight")), worlds())
def test_policy_trains_what_it_should_not_or_a_run_locks_up(setting: Setting, world: World) -> None:
    outcome = run(setting, world)
    check(setting, outcome)
    assert not outcome.dropped
    for trained in outcome.trained:
        past = trained.lags.total > setting.rule.max_lag
        if setting.rule.policy == "downweight":
            assert ((trained.shares < 1) == past).all()
        else:
            assert not (trained.shares > 0)[past].any()
        assert past.any() or (trained.shares == 1).all()


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_run_whose_groups_are_all_stale_at_once_stops(policy: Policy) -> None:
    """All groups of the run start at version 0, and after the second step all that are left are past the bound."""
    setting = Setting(Rule(policy, max_lag=1), run_ahead=math.inf, groups_per_step=2, steps=10)
    world = World(latency_s=lambda n, k: 1.0, publish_s=lambda v, a: 0.0, train_s=lambda v: 1.0)
    outcome = simulate(setting, world)
    check(setting, outcome)
    stale = [t for t in outcome.trained if t.lags.total.max() > 1]
    if policy == "drop":
        # Each time two steps are trained, and all that were sampled with them are dropped.
        assert not stale and len(outcome.dropped) >= 16
    else:
        assert len(stale) == 16 and not outcome.dropped


def lengths(policy: Policy, order: str) -> tuple[float, Outcome]:
    """The distance of trained from offered prompt lengths where latency is log-normal and grows with the prompt's."""
    dice = random.Random(0)
    prompts = [round(2 ** dice.uniform(4, 11)) for _ in range(20_000)]
    seconds = [length / 40 * dice.lognormvariate(0, 0.7) for length in prompts]
    setting = Setting(Rule(policy, max_lag=2), order=order, groups_per_step=8, steps=250)  # type: ignore[arg-type]
    world = World(
        latency_s=lambda n, attempt: seconds[n],
        publish_s=lambda version, actor: 0.1,
        train_s=lambda version: 1.0,
        prompt_tokens=lambda n: prompts[n],
    )
    outcome = simulate(setting, world)
    trained = Counter(bucket(prompts[t.admission]) for t in outcome.trained)
    offered = trained + Counter(bucket(prompts[n]) for n in outcome.dropped)
    return distance([offered[i] for i in range(12)], [trained[i] for i in range(12)]), outcome


def test_dropping_hides_that_it_starves_long_prompts() -> None:
    apart, outcome = lengths("drop", "ready")
    assert apart > 0.15 and len(outcome.dropped) > 500
    waiting, outcome = lengths("wait", "admission")
    assert waiting < 0.01 and not outcome.dropped


@example(max_lag=0)
@given(max_lag=st.integers(0, 3))
def test_skipped_publishes_lock_a_run_up(max_lag: int) -> None:
    """Each second version arrives long after the next one: it is overtaken, and never served."""
    setting = Setting(Rule("wait", max_lag), groups_per_step=3, steps=9, groups_in_flight=2)
    world = World(lambda n, k: 1.0, lambda v, a: 50.0 if v % 2 else 0.5, lambda v: 0.2)
    check(setting, simulate(setting, world))

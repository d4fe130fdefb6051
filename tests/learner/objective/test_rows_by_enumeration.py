"""Every choice of the KL term against its closed form: all sequences of a toy, each weighted by its chance.

The closed forms are written out here as loops over sequences and states, apart from the code they check.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.learner.objective.audit import audit, audit_tables, audit_toy, catalogue, moments
from counterflow.learner.objective.rows import cautions, classify
from counterflow.learner.objective.spec import ObjectiveSpec
from counterflow.learner.objective.tables import Tables, random_tables

GOLDEN = json.loads((Path(__file__).parent / "kl_v2t2.json").read_text())
SIZES = [(v, t) for v in (2, 3, 4) for t in (1, 2, 3, 4)]
GOLDEN_ROWS = {
    "on_k1_loss": "on_k1_loss",
    "on_k2_loss_token": "on_k2_loss",
    "on_k3_loss": "on_k3_loss",
    "on_k3_reward": "on_k3_reward",
    "off_3_k1_reward_token_rtg": "off_3",
    "off_4_k1_reward_no_is": "off_4",
    "off_5_k1_frozen_at_mu": "off_5",
    "off_6_tis_1.2": "off_6",
    "off_7_geometric": "off_7",
    "off_9_k1_loss_no_is": "off_9",
    "off_11_k3_loss_no_is": "off_11",
    "off_12_rho_k3_loss": "off_12",
}
EXACT = ("off_1", "off_2", "off_16", "off_17", "off_18_k1", "off_18_k3", "on_k1_reward", "on_k1_both", "on_k3_both")


class ByHand:
    """Expectations over a toy's sequences, by recursion over prefixes in plain Python."""

    def __init__(self, tables):
        self.tables = tables
        self.p = {n: torch.softmax(getattr(tables, n), -1).tolist() for n in ("pi", "mu", "ref")}
        self.rows = {y: i for i, y in enumerate(self.prefixes(tables.vocabulary, tables.length))}

    @staticmethod
    def prefixes(vocabulary, length):
        return [c for t in range(length) for c in itertools.product(range(vocabulary), repeat=t)]

    def expectation(self, samples, coefficient):
        """E over `samples` of sum_t c_t g_t; `coefficient` makes c_t of the facts of a sequence's tokens, and t."""
        vocabulary, rows = self.tables.vocabulary, len(self.rows)
        total = [[0.0] * vocabulary for _ in range(rows)]
        for response in self.tables.responses:
            chance, facts = 1.0, []
            for t, symbol in enumerate(response):
                row = self.rows[response[:t]]
                pi, mu, ref = (self.p[n][row][symbol] for n in ("pi", "mu", "ref"))
                chance *= self.p[samples][row][symbol]
                facts.append(
                    {"row": row, "y": symbol, "k1": math.log(pi / ref), "rho": pi / mu, "m": math.log(mu / ref)}
                )
            for t, fact in enumerate(facts):
                c = chance * coefficient(facts, t)
                for v in range(vocabulary):
                    total[fact["row"]][v] += c * ((v == fact["y"]) - self.p["pi"][fact["row"]][v])
        return torch.tensor(total, dtype=torch.float64)


def product(facts, upto):
    return math.prod(fact["rho"] for fact in facts[:upto])


def r(fact):
    return math.exp(-fact["k1"])


def k3(fact):
    return r(fact) - 1 + fact["k1"]


def forms(cap):
    """Each row's expected gradient as (samples, coefficient of g_t)."""

    def k1_to_go(f, t):
        return sum(x["k1"] for x in f[t:])

    def all_k1(f):
        return sum(x["k1"] for x in f)

    def all_k3(f):
        return sum(k3(x) for x in f)

    def w(f):
        return product(f, len(f))

    true = ("pi", k1_to_go)
    missing_forward = ("pi", lambda f, t: sum(k3(x) for x in f[t:]))
    r_mu = ("mu", lambda f, t: f[t]["rho"] * f[t]["k1"])
    return {
        "off_1": true,
        "off_2": true,
        "off_3": ("mu", lambda f, t: f[t]["rho"] * k1_to_go(f, t)),
        "off_4": ("mu", k1_to_go),
        "off_5": ("mu", lambda f, t: w(f) * sum(x["m"] for x in f)),
        "off_6": ("mu", lambda f, t: min(w(f), cap) * all_k1(f)),
        "off_7": ("mu", lambda f, t: w(f) ** (1 / len(f)) * all_k1(f)),
        "off_8": missing_forward,
        "off_9": ("mu", lambda f, t: 1.0),
        "off_10": ("mu", lambda f, t: f[t]["k1"]),
        "off_11": ("mu", lambda f, t: 1 - r(f[t])),
        "off_12": r_mu,
        "off_13": r_mu,
        "off_14": ("mu", lambda f, t: f[t]["rho"] * (f[t]["k1"] ** 2 / 2 + f[t]["k1"])),
        "off_15": ("pi", lambda f, t: f[t]["k1"]),
        "off_16": true,
        "off_17": true,
        "off_18_k1": true,
        "off_18_k3": true,
        "on_k1_reward": ("pi", lambda f, t: all_k1(f)),
        "on_k3_reward": ("pi", lambda f, t: all_k3(f)),
        "on_k1_loss": ("pi", lambda f, t: 0.0),
        "on_k2_loss": ("pi", lambda f, t: f[t]["k1"]),
        "on_k3_loss": ("pi", lambda f, t: -r(f[t])),
        "on_k1_both": true,
        "on_k3_both": true,
    }


@pytest.mark.parametrize("eos", [None, 0])
@pytest.mark.parametrize(("vocabulary", "length"), SIZES)
def test_every_row_has_the_gradient_it_is_named_for(vocabulary, length, eos):
    tables = random_tables(vocabulary, length, seed=vocabulary * 10 + length, drift=0.7, distance=None, eos=eos)
    by_hand, cap = ByHand(tables), 1.3
    found = {row["row"]: row["gradient"] for row in audit(tables, cap)["rows"]}
    assert set(found) == set(forms(cap))
    for name, (samples, coefficient) in forms(cap).items():
        expected = by_hand.expectation(samples, coefficient).flatten()
        torch.testing.assert_close(
            torch.tensor(found[name], dtype=torch.float64),
            expected,
            atol=1e-9,
            rtol=0,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("eos", [None, 1])
def test_named_fields_are_those_of_the_loops(eos):
    tables = random_tables(3, 3, seed=5, drift=0.7, distance=None, eos=eos)
    by_hand = ByHand(tables)
    loops = {
        "G": ("pi", lambda f, t: sum(x["k1"] for x in f[t:])),
        "R_pi": ("pi", lambda f, t: f[t]["k1"]),
        "R_mu": ("mu", lambda f, t: f[t]["rho"] * f[t]["k1"]),
        "F_pi": ("pi", lambda f, t: -r(f[t])),
        "F_mu": ("mu", lambda f, t: -f[t]["rho"] * r(f[t])),
        "K_mu_pi": ("mu", lambda f, t: -1.0),
        "S_pi": ("pi", lambda f, t: f[t]["k1"] + sum(x["k1"] ** 2 / 2 for x in f[t:])),
    }
    fields = tables.fields()
    assert set(fields) == set(loops)
    for name, (samples, coefficient) in loops.items():
        torch.testing.assert_close(fields[name], by_hand.expectation(samples, coefficient), atol=1e-9, rtol=0)


def choices():
    """Every combination of the KL term's own options, and every correction for a KL that shares it, cut and uncut."""
    for estimator, to_go in itertools.product(("k1", "k2", "k3", "rao_blackwell"), (False, True)):
        base = ObjectiveSpec(beta=1.0, estimator=estimator, reward_to_go=to_go, correction="none", advantage="plain")
        yield from own_weights(base)
        for kl_cap in (0.5, 1.3) if to_go else ():
            yield from own_weights(dataclasses.replace(base, kl_cap=kl_cap))
        for correction, level in itertools.product(
            ("importance", "truncated", "masked"), ("token", "prefix", "sequence", "geometric")
        ):
            yield dataclasses.replace(base, correction=correction, level=level, cap=1.3)
            # A cap that the KL's own weights do not read, beside one that nothing reads.
            own = dataclasses.replace(base, reward_weight="none", correction=correction, level=level, cap=1.3)
            yield dataclasses.replace(own, kl_cap=0.5)
        for correction in ("ppo", "decoupled_ppo", "cispo", "gspo", "topr", "m2po", "sequence_mask", "vtrace"):
            yield dataclasses.replace(base, correction=correction)
            for cap in (0.5, 1.3):
                yield dataclasses.replace(base, correction=correction, cap=cap, trace_cap=1.3)
                yield dataclasses.replace(base, correction=correction, cap=cap, reward_weight="sequence")
        for level in ("token", "prefix", "sequence", "geometric"):
            yield dataclasses.replace(base, correction="truncated", level=level, cap=0.5)
            yield dataclasses.replace(base, correction="truncated", level=level, cap=0.5, placement="both")
            yield dataclasses.replace(base, correction="truncated", level=level, cap=0.5, placement="loss")
        yield dataclasses.replace(base, correction="vtrace", trace_cap=0.5)
        for level in ("token", "sequence"):
            yield dataclasses.replace(base, correction="masked", level=level, floor=0.0, cap=math.inf)


def own_weights(base):
    """Every placement of the KL with every weight of its own."""
    losses = [("none", False), *itertools.product(("token", "prefix", "sequence"), (True, False))]
    for loss_weight, moving in losses:
        chosen = dataclasses.replace(base, loss_weight=loss_weight, differentiate_weight=moving)
        yield dataclasses.replace(chosen, placement="loss")
        for reward_weight in ("none", "token", "prefix", "per_decision", "sequence", "geometric"):
            yield dataclasses.replace(chosen, placement="both", reward_weight=reward_weight)
    for reward_weight in ("none", "token", "prefix", "per_decision", "sequence", "geometric"):
        yield dataclasses.replace(base, reward_weight=reward_weight)


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("eos", [None, 0])
def test_every_choice_has_the_gradient_that_its_name_promises(on_policy, eos):
    """A formula, where one is printed, is exact; a choice called biased is not G; one called unbiased is."""
    tables = random_tables(3, 3, seed=11, drift=0.8, distance=None, eos=eos)
    fields = tables.fields()
    if on_policy:
        del fields["R_mu"], fields["F_mu"], fields["K_mu_pi"]
    tested = 0
    for spec in choices():
        row = classify(spec, on_policy)
        gradient = moments(tables, spec, on_policy).mean
        away = (gradient - fields["G"]).abs().max()
        assert row.biased == bool(away > 1e-6), (spec, row, away)
        if row.combination is not None:
            expected = sum(
                (factor * fields[name] for name, factor in row.combination.items()), torch.zeros_like(gradient)
            )
            torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=0, msg=lambda m, s=spec: f"{s}: {m}")
            tested += 1
    assert tested > 100


@settings(max_examples=25)
@given(
    vocabulary=st.integers(2, 3),
    length=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    drift=st.floats(0, 2),
    distance=st.floats(0, 3),
    eos=st.sampled_from([None, 0]),
)
def test_exact_rows_are_exact_on_any_tables(vocabulary, length, seed, drift, distance, eos):
    tables = random_tables(vocabulary, length, seed, drift, distance, eos)
    fields = tables.fields()
    for name in EXACT:
        found = moments(tables, catalogue(2.0)[name], name.startswith("on_")).mean
        torch.testing.assert_close(found, fields["G"], atol=1e-9, rtol=1e-9)
    for name, field in (("off_12", "R_mu"), ("off_13", "R_mu"), ("off_15", "R_pi")):
        torch.testing.assert_close(moments(tables, catalogue(2.0)[name]).mean, fields[field], atol=1e-9, rtol=1e-9)


def golden_tables():
    def logits(ones):
        p = torch.tensor(ones, dtype=torch.float64)
        return torch.stack([torch.zeros_like(p), torch.logit(p)], dim=1)

    return Tables(2, 2, *(logits(GOLDEN[name]) for name in ("pi", "mu", "ref")))


def test_every_golden_gradient():
    tables = golden_tables()
    rows = {row["row"]: row["gradient"][1::2] for row in audit(tables, cap=1.2)["rows"]}
    rows["G"] = tables.fields()["G"][:, 1].tolist()
    k2_in_reward = ObjectiveSpec(beta=1.0, estimator="k2", correction="none")
    rows["on_k2_reward"] = moments(tables, k2_in_reward, on_policy=True).mean[:, 1].tolist()
    for name, expected in GOLDEN["gradients"].items():
        # The golden numbers are printed with 8 decimals.
        assert rows[GOLDEN_ROWS.get(name, name)] == pytest.approx(expected, abs=6e-9), name
    assert rows["off_1"] == pytest.approx(GOLDEN["gradients"]["G"], abs=6e-9)


def test_on_policy_limit_joins_the_off_policy_rows_to_the_on_policy_ones():
    tables = random_tables(3, 3, seed=2, drift=0.0, distance=None)
    found = {row["row"]: torch.tensor(row["gradient"]) for row in audit(tables, cap=1.0)["rows"]}
    pairs = {f"off_{n}": "on_k1_reward" for n in (1, 2, 3, 4, 5, 6, 7, 16, 17)}
    pairs |= {"off_8": "on_k3_reward", "off_9": "on_k1_loss", "off_10": "on_k2_loss", "off_12": "on_k2_loss"}
    pairs |= {"off_11": "on_k3_loss", "off_13": "on_k2_loss", "off_15": "on_k2_loss", "off_18_k3": "on_k3_both"}
    for off, on in pairs.items():
        torch.testing.assert_close(found[off], found[on], atol=1e-12, rtol=0, msg=lambda m, n=off: f"{n}: {m}")


def test_at_the_reference_every_term_but_the_harmful_ones_vanishes():
    tables = random_tables(3, 3, seed=3, drift=0.5, distance=0.0)
    for row in audit(tables, cap=2.0)["rows"]:
        vanishes = torch.tensor(row["gradient"]).abs().max().item() < 1e-12
        assert vanishes == (row["row"] not in ("off_5", "off_9")), row["row"]


def test_cap_and_clip_limits_leave_the_uncut_weight():
    tables = random_tables(3, 3, seed=4, drift=0.5, distance=None)

    def gradient(**options):
        return moments(tables, ObjectiveSpec(beta=1.0, advantage="plain", **options)).mean

    token, sequence = gradient(correction="importance"), gradient(correction="importance", level="sequence")
    free = {"clip_low": 1.0, "clip_high": math.inf}
    for options in (
        {"correction": "truncated", "cap": math.inf},
        {"correction": "masked", "floor": 0.0, "cap": math.inf},
        {"correction": "ppo", **free},
        {"correction": "cispo", **free},
        {"correction": "m2po", "second_moment": math.inf},
        {"correction": "sequence_mask", "divergence": math.inf, **free},
        {"correction": "decoupled_ppo", "cap": math.inf, **free},
    ):
        torch.testing.assert_close(gradient(**options), token, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient(level="sequence", cap=math.inf), sequence, atol=1e-12, rtol=0)
    own = gradient(correction="none", reward_weight="sequence", kl_cap=math.inf)
    torch.testing.assert_close(own, sequence, atol=1e-12, rtol=0)
    errors = [(gradient(level="sequence", cap=cap) - sequence).norm().item() for cap in (1.0, 4.0, 16.0, 1e6)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.01 > 1e-9 > errors[-1]


def test_one_token_cannot_tell_the_fields_apart_and_two_can():
    one = random_tables(3, 1, seed=6, drift=0.5, distance=None).fields()
    for same in ("R_pi", "R_mu"):
        torch.testing.assert_close(one[same], one["G"], atol=1e-12, rtol=0)
    two = random_tables(3, 2, seed=6, drift=0.5, distance=None).fields()
    for first, second in itertools.combinations(("G", "R_pi", "R_mu", "F_pi"), 2):
        assert (two[first] - two[second]).abs().max() > 1e-3, (first, second)


def test_rho_times_k3_differentiated_is_rho_times_k2_constant_sample_by_sample():
    tables = random_tables(3, 3, seed=7, drift=0.6, distance=None)
    moving = catalogue(2.0)["off_12"]
    constant = dataclasses.replace(moving, estimator="k2", differentiate_weight=False)
    assert moments(tables, moving).variance == pytest.approx(moments(tables, constant).variance, rel=1e-12)
    assert classify(constant).row == classify(moving).row == "off_12"


def test_per_decision_and_to_go_have_less_variance_than_the_whole_sequence():
    tables = random_tables(3, 4, seed=8, drift=0.4, distance=None)
    rows = catalogue(2.0)
    whole = moments(tables, rows["off_1"]).variance
    assert moments(tables, rows["off_2"]).variance < whole
    assert moments(tables, dataclasses.replace(rows["off_1"], reward_to_go=True)).variance < whole


def test_rao_blackwell_is_exact_in_both_and_quieter_than_one_sample():
    tables = random_tables(4, 3, seed=9, drift=0.4, distance=0.5)
    truth = tables.fields()["G"]
    both = ObjectiveSpec(
        beta=1.0,
        estimator="rao_blackwell",
        placement="both",
        reward_to_go=True,
        correction="none",
        reward_weight="per_decision",
        loss_weight="prefix",
        differentiate_weight=False,
    )
    found = moments(tables, both)
    torch.testing.assert_close(found.mean, truth, atol=1e-9, rtol=0)
    assert found.variance < moments(tables, catalogue(2.0)["off_2"]).variance
    on_policy = moments(tables, both, on_policy=True)
    torch.testing.assert_close(on_policy.mean, truth, atol=1e-9, rtol=0)
    assert on_policy.variance < moments(tables, catalogue(2.0)["on_k1_reward"], on_policy=True).variance


def test_audit_rows_are_classified_as_what_they_are_called():
    for name, spec in catalogue(2.0).items():
        assert classify(spec, name.startswith("on_")).row == name
    exact = {name for name, spec in catalogue(2.0).items() if not classify(spec, name.startswith("on_")).biased}
    assert exact == set(EXACT)


def test_words_tell_the_return_apart_where_it_matters():
    tables = random_tables(3, 3, seed=2, drift=0.6, distance=None)
    fourth = catalogue(2.0)["off_4"]
    whole = dataclasses.replace(fourth, reward_to_go=False)
    assert (moments(tables, fourth).mean - moments(tables, whole).mean).abs().max() > 1e-2
    assert "k1 to go" in classify(fourth).expected
    assert "whole response" in classify(whole).expected and "to go" not in classify(whole).expected
    sixth = catalogue(2.0)["off_6"]
    to_go = dataclasses.replace(sixth, reward_to_go=True)
    assert classify(to_go).row == classify(sixth).row == "off_6"
    assert "return to go" in classify(to_go).what and "whole return" in classify(sixth).what


def test_a_cap_is_named_as_the_cause_where_it_is():
    exact = catalogue(2.0)
    cut = {
        "off_1": {"correction": "truncated"},
        "off_2": {"kl_cap": 5.0},
        "off_16": {"kl_cap": 5.0},
        "off_18_k1": {"reward_weight": "importance", "correction": "truncated", "level": "sequence"},
        "off_18_k3": {"kl_cap": 5.0},
        "off_8": {"correction": "truncated"},
    }
    for name, options in cut.items():
        assert "cut" not in classify(exact[name]).why.lower()
        why = classify(dataclasses.replace(exact[name], **options)).why
        assert "Cutting weights biases it" in why, name
    masked = dataclasses.replace(exact["off_1"], correction="masked")
    assert "cut or masked biases it" in classify(masked).why
    halved = classify(dataclasses.replace(exact["off_3"], correction="truncated", cap=0.5))
    assert "0.5 G at pi = mu" in halved.expected


def test_bounds_that_nothing_reads_change_no_verdict_on_policy():
    first = ObjectiveSpec(beta=1.0)
    for idle in (
        {"kl_cap": 0.5},
        {"cap": 0.5, "reward_weight": "none"},
        {"cap": 0.5, "reward_weight": "sequence"},
        {"kl_cap": 0.5, "estimator": "rao_blackwell", "placement": "both"},
        {"cap": 0.5, "reward_weight": "none", "estimator": "rao_blackwell", "placement": "both"},
    ):
        row = classify(dataclasses.replace(first, **idle), on_policy=True)
        assert (row.expected, row.biased) == ("G", False), idle
    for read in ({"cap": 0.5}, {"kl_cap": 0.5, "reward_weight": "sequence"}):
        row = classify(dataclasses.replace(first, **read), on_policy=True)
        assert (row.expected, row.biased) == ("0.5 G", True), read
    task = cautions(dataclasses.replace(first, cap=0.5, reward_weight="none"), on_policy=True)
    assert any("even on-policy" in caution for caution in task)
    assert cautions(first, on_policy=True) == []


def test_audit_of_tables_has_the_promised_shape():
    tables = golden_tables()
    document = {"vocab": 2, "length": 2, **{name: getattr(tables, name).tolist() for name in ("pi", "mu", "ref")}}
    found = json.loads(json.dumps(audit_tables(document, cap=1.2)))
    assert list(found) == ["targets", "rows"]
    assert list(found["targets"]) == ["G", "R_pi", "R_mu", "F_pi"]
    assert found["targets"]["G"][1::2] == pytest.approx(GOLDEN["gradients"]["G"], abs=6e-9)
    names = [row["row"] for row in found["rows"]]
    off = [f"off_{n}" for n in range(1, 18)] + ["off_18_k1", "off_18_k3"]
    on = [f"on_{n}" for n in ("k1_reward", "k3_reward", "k1_loss", "k2_loss", "k3_loss", "k1_both", "k3_both")]
    assert names == off + on
    for row in found["rows"]:
        assert list(row) == ["row", "expected", "biased", "gradient", "bias_abs", "bias_rel", "cosine", "variance"]
        assert row["biased"] == (row["bias_abs"] > 1e-9)
    with pytest.raises(ValueError, match="has shape"):
        audit_tables({**document, "pi": [[0.0, 1.0]]})
    for broken in (None, [2], {}, math.inf, 2.5):
        with pytest.raises(ValueError, match="whole numbers"):
            audit_tables({**document, "vocab": broken})
    for broken in (None, {}, "pi", [[0.0, [1.0]]], 3.0):
        with pytest.raises(ValueError, match="list of rows|no table of logits|has shape"):
            audit_tables({**document, "mu": broken})
    for broken in (math.inf, math.nan, -1.0):
        with pytest.raises(ValueError, match="drift"):
            audit_toy(drift=broken)
    with pytest.raises(ValueError, match="its keys are vocab, length, pi, mu: give"):
        audit_tables({key: value for key, value in document.items() if key != "ref"})
    with pytest.raises(ValueError, match="too many"):
        audit_toy(vocab=50, length=8)


def test_near_the_reference_k1_in_the_loss_is_the_noisiest_for_its_size():
    found = {row["row"]: row["variance"] for row in audit_toy(vocab=3, length=4)["near"]["rows"]}
    on = {name: variance for name, variance in found.items() if name.startswith("on_") and "both" not in name}
    assert max(on, key=on.get) == "on_k1_loss"

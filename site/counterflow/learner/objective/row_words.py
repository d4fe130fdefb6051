"""Sentences about the rows of the catalogue: what is computed, what its expected gradient is, and why.

Plain text and the choice of it. In flow a spec and its classification, out flow words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .spec import ObjectiveSpec

ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "rao_blackwell": "the full-vocabulary KL"}
PLACES = {"reward": "the reward", "loss": "the loss", "both": "reward and loss"}
WEIGHTS = {
    "none": "no weight",
    "token": "the token ratio rho_t",
    "prefix": "the running product W_<=t",
    "per_decision": "each token's KL weighted by its own W_<=t",
    "sequence": "the sequence weight W",
    "geometric": "the geometric mean W^(1/T)",
    "topr": "W for negative advantages only",
    "vtrace": "V-trace's capped ratios of this and later tokens",
}
FIELDS = {"K_mu_pi": "grad KL(mu||pi)", "S_pi": "grad E_pi[k2]"}
LEGEND = "G = grad KL(pi||ref), the true one; R_d, F_d = reverse, forward KL of each state with the states frozen at d"

_WITHOUT_FORM = {
    "off_7": "not G: the weight W^(1/T) corrects no mean",
    "off_10": "E_mu[k1_t g_t], a pull to ref that is not reverse KL",
    "off_11": "E_mu[(1 - r_t) g_t], the gradient of no divergence",
    "off_14": "E_mu[rho_t (k2_t + k1_t) g_t], not a KL's",
}
_WHY = {
    "off_1": "Samples of mu weighted by W stand for samples of pi, for every token and its whole future.",
    "off_2": "Each token's KL is weighted by the chance of reaching it, which is all that its mean needs.",
    "off_3": "rho_t corrects the token, not the state before it nor the future after it; the error grows with lag.",
    "off_4": "Tokens of mu are counted as if pi had drawn them; the error grows with lag.",
    "off_6": "Samples of mu weighted by W would stand for samples of pi.",
    "off_7": "A geometric mean of ratios is close to 1 and has less variance, but it is the weight of no distribution.",
    "off_8": "The derivative of k3 itself is missing, which is F_pi; weighting by W does not cure it.",
    "off_9": "The gradient of k1 is g_t whatever ref is: ref drops out, and pi is pushed off its own data.",
    "off_10": "Without a weight the tokens are mu's, so the pull is not that of pi's KL.",
    "off_11": "1 - r_t has mean 0 under pi only; on data of mu it is the gradient of no divergence, zero at pi = ref.",
    "off_12": "Sample by sample it is rho_t k1_t g_t: the per-state reverse KL, at the states that mu visited.",
    "off_13": "Its mean is that of row 12, with the noise of rho_t g_t on top.",
    "off_14": "Differentiating rho_t adds k2_t g_t, which belongs to no KL.",
    "off_15": "W_<=t moves the states to pi, but how pi changes which states it reaches is left out.",
    "off_16": "Differentiating W_<=t adds how pi changes which states it reaches.",
    "off_17": "Differentiating W_<=t adds how pi changes which states it reaches.",
    "off_18_k1": "The reward gives G, and k1 in the loss has mean 0.",
    "off_18_k3": "The reward gives G - F_pi, and k3 in the loss gives the F_pi that is missing.",
    "on_k1_reward": "The score function of the sequence's own KL.",
    "on_k3_reward": "The derivative of k3 itself is missing: it vanishes near ref and collapses far from it.",
    "on_k1_loss": "Its derivative is g_t, of mean 0: pure noise, whatever ref is.",
    "on_k2_loss": "It pulls each state's distribution to ref, and leaves out how pi changes which states it reaches.",
    "on_k3_loss": "Its derivative is that of the forward KL at the states visited: stable, and of another divergence.",
    "on_k1_both": "The reward gives G, and k1 in the loss has mean 0.",
    "on_k3_both": "The reward gives G - F_pi, and k3 in the loss gives the F_pi that is missing.",
}
_WHY_FORM = {
    "0": "The terms cancel in the mean: what is left is noise.",
    "G": "Its terms add up to the gradient of the sequence's KL.",
    "R_pi": "It leaves out how pi changes which states it reaches.",
    "R_mu": "It pulls each state's distribution to ref at the states that mu visited, and leaves out the future.",
    "F_pi": "It is the forward KL of each state.",
    "F_mu": "It is the forward KL of each state, at the states that mu visited.",
    "G - R_pi": "Only how pi changes which states it reaches is there; the KL of each state is not differentiated.",
}


def formula(combination: Mapping[str, float]) -> str:
    """`G - F_pi` of {"G": 1, "F_pi": -1}; `0` of {}."""
    text = ""
    for field, factor in combination.items():
        size = "" if abs(factor) == 1 else f"{abs(factor):g} "
        sign = (" - " if text else "-") if factor < 0 else (" + " if text else "")
        text += f"{sign}{size}{FIELDS.get(field, field)}"
    return text or "0"


def shrunk_formula(reward: Mapping[str, float], loss: Mapping[str, float]) -> str:
    """`(1 - 1/G) (G - F_pi) + F_pi`: the KL in the reward less its share in the group mean, and the KL in the loss."""
    inner, rest = formula(reward), formula(loss)
    text = f"(1 - 1/G) {inner}" if len(reward) == 1 else f"(1 - 1/G) ({inner})"
    if not loss:
        return text
    return f"{text} - {rest[1:]}" if rest.startswith("-") else f"{text} + {rest}"


def expected_in_words(spec: ObjectiveSpec, row: str, exact: str | None, limit: str | None, at_one: float) -> str:
    """The expected gradient: `exact`, a formula, or words where it has none.

    `limit` is the formula at an infinite cap, `at_one` what bounds leave of a weight of 1 in the reward.
    """
    if spec.reduction != "constant":
        return "not G: divided by a number that depends on the samples"
    if exact is not None:
        return exact
    shrunk = ", the KL in the reward times 1 - 1/G" if spec.shrinks_kl else ""
    if limit is not None:
        return f"not {limit}, but tends to it as the cap grows"
    if row == "off_3":
        return f"a local surrogate, {formula({'G': at_one})} at pi = mu{shrunk}"
    if row == "off_4":
        what = "its k1 to go" if spec.reward_to_go else "the k1 of the whole response"
        return f"not G: E_mu[sum_t g_t times {what}], with states and futures of mu{shrunk}"
    return _WITHOUT_FORM.get(row, "not G: no closed form") + shrunk


def reason(spec: ObjectiveSpec, row: str, uncut: str | None, limit: str | None, cut: bool) -> str:
    """Why the expected gradient is what it is.

    `uncut` is its formula without bounds and baseline, `limit` that of an infinite cap where the cap alone is in its
    way; `cut`: a weight that would make it exact is bounded or masked.
    """
    if spec.reduction != "constant":
        return f"The reduction {spec.reduction} divides by a length that depends on what was sampled."
    why = _WHY.get(row) or _WHY_FORM.get(uncut or "", "Its mean is no gradient that has a name here.")
    if limit is not None:
        why += " Cutting weights biases it: less so as the cap grows, with more variance."
    elif cut:
        why += " What is cut or masked biases it."
    if spec.shrinks_kl:
        why += " The group mean holds the response itself and leaves 1 - 1/G of the KL in the reward, in groups of G."
    return why


def weighting_in_words(spec: ObjectiveSpec, kind: str, capped: bool) -> str:
    """The weights of the KL in the reward and in the loss."""
    words = []
    if spec.kl_in_reward:
        bound, of = "", ""
        if capped and spec.reward_weight != "importance":
            bound = f" cut at {spec.kl_cap:g}"
        elif capped:
            bound = f" cut at {spec.cap:g}" if spec.correction == "truncated" else f" as {spec.correction} cuts it"
        if kind != "per_decision":
            of = f" on the {'return to go' if spec.reward_to_go else 'whole return'}"
        words.append(WEIGHTS[kind] + bound + of)
    if spec.kl_in_loss:
        how = ""
        if spec.loss_weight != "none":
            how = ", differentiated" if spec.differentiate_weight else ", constant"
            how += "" if math.isinf(spec.kl_cap) else f", cut at {spec.kl_cap:g}"
        words.append(("in the loss " if words else "") + WEIGHTS[spec.loss_weight] + how)
    return "; ".join(words)

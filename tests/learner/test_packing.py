"""Packed sequences see nothing of each other, count like padded ones, and every rank gets its part."""

from __future__ import annotations

import copy

import pytest
import torch
from groups import make_group, uneven_groups
from hypothesis import given
from hypothesis import strategies as st
from llamas import save_llama
from transformers import AutoModelForCausalLM

from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError
from counterflow.learner.batch import Microbatch, collate, microbatches
from counterflow.learner.packing import Packing, lengths_of, place, shares, split
from counterflow.learner.policy import Policy, checkpoint_activations, leak, packing_of

CPU = torch.device("cpu")
PACKED = [Packing.ROWS, Packing.ONE_ROW]


@pytest.fixture(scope="module")
def model(tiny_model) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def run(model: torch.nn.Module, batches: list[Microbatch]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all tokens, and the gradient of their sum weighted by their rewards."""
    model = copy.deepcopy(model)
    policy = Policy(model, None, 0.9, torch.float32, CPU)
    found = []
    for batch in batches:
        logprobs, _ = policy.logprobs(batch)
        (logprobs * (1 + batch.rewards[batch.sequence])).sum().backward()
        found.append(logprobs.detach())
    return torch.cat(found), torch.cat([p.grad.flatten() for p in model.parameters()])


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).norm() <= 1e-5 * theirs.norm())


@pytest.mark.parametrize("packing", PACKED)
def test_packed_sequences_are_scored_and_differentiated_as_padded_ones(model, packing) -> None:
    groups = uneven_groups()
    padded, packed = (microbatches(groups, 10_000, 0, how) for how in (Packing.PADDED, packing))
    assert packed[0].position_ids is not None
    assert packed[0].input_ids.numel() < 0.8 * padded[0].input_ids.numel()
    (logprobs, gradient), (expected, direction) = run(model, packed), run(model, padded)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    assert close(gradient, direction)


@pytest.mark.parametrize("packing", list(Packing))
def test_budget_of_a_microbatch_does_not_change_the_gradient(model, packing) -> None:
    groups = uneven_groups()
    logprobs, whole = run(model, microbatches(groups, 10_000, 0, packing))
    for budget in (1, 60, 150):
        batches = microbatches(groups, budget, 0, packing)
        assert len(batches) > 1
        found, gradient = run(model, batches)
        torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=0)
        assert close(gradient, whole)


@pytest.mark.parametrize("packing", PACKED)
def test_another_sequence_of_the_row_changes_nothing(model, packing) -> None:
    """Other tokens in every second sequence, of the same lengths, so that nothing moves."""
    first, second = uneven_groups(seed=0), uneven_groups(seed=1)
    mixed = [own if n % 2 else other for n, (own, other) in enumerate(zip(first, second, strict=True))]
    ours, theirs = (collate(groups, 0, packing) for groups in (first, mixed))
    assert ours.position_ids is not None and torch.equal(ours.position_ids, theirs.position_ids)
    kept = torch.isin(ours.group[ours.sequence] % 2, torch.tensor([1]))
    (before, _), (after, _) = run(model, [ours]), run(model, [theirs])
    torch.testing.assert_close(before[kept], after[kept], atol=1e-6, rtol=0)
    assert (before[~kept] - after[~kept]).abs().max() > 1e-2


def test_rows_of_one_sequence_cost_no_mask() -> None:
    assert collate([make_group(0, samples=4)], 0, Packing.ROWS).position_ids is None


@given(st.lists(st.integers(1, 40), max_size=60), st.sampled_from(list(Packing)))
def test_no_two_sequences_lie_on_each_other(lengths: list[int], packing: Packing) -> None:
    taken: set[tuple[int, int]] = set()
    for (row, start), length in zip(place(lengths, packing), lengths, strict=True):
        cells = {(row, column) for column in range(start, start + length)}
        assert not taken & cells
        taken |= cells
    rows = {row for row, _ in taken}
    assert rows == set(range(len(rows)))
    if packing is Packing.ROWS and lengths:
        # First fit: no two rows are half empty.
        used = [sum(1 for r, _ in taken if r == row) for row in rows]
        assert sum(2 * n <= max(lengths) for n in used) <= 1 and max(used) <= max(lengths)


@given(st.integers(1, 400), st.sampled_from(list(Packing)))
def test_split_keeps_every_group_whole_and_within_its_budget(budget: int, packing: Packing) -> None:
    groups = uneven_groups()
    parts = split(groups, budget, packing)
    assert [group for part in parts for group in part] == groups
    for part in parts:
        lengths = [length for group in part for length in lengths_of(group)]
        size = len(lengths) * max(lengths) if packing is Packing.PADDED else sum(lengths)
        assert size <= budget or len(part) == 1


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 6))
def test_ranks_share_every_group_once_and_evenly(tokens: list[int], ranks: int) -> None:
    found = shares(tokens, ranks)
    assert sorted(index for own in found for index in own) == list(range(len(tokens)))
    assert len(found) == ranks and all(own == sorted(own) for own in found)
    loads = [sum(tokens[index] for index in own) for own in found]
    assert max(loads) - min(loads) <= max(tokens, default=0)
    assert shares(tokens, 1) == [list(range(len(tokens)))]


def test_a_microbatch_of_nothing_has_a_gradient_of_zero(model) -> None:
    """What a rank without groups runs so that the others do not wait for it."""
    logprobs, gradient = run(model, [collate([], 0, Packing.ROWS)])
    assert logprobs.shape == (0,) and not gradient.any()


def test_a_model_that_ignores_positions_is_not_packed(tmp_path, model) -> None:
    assert leak(model) < 1e-5
    config = RunConfig.model_validate({"model": {"path": str(tmp_path)}})
    assert packing_of(config, model) is Packing.ROWS

    class Forgetful(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.config = model, model.config
            self.base_model = lambda input_ids, position_ids=None, use_cache=False: model.base_model(
                input_ids=input_ids, use_cache=use_cache
            )

        def get_input_embeddings(self) -> torch.nn.Module:
            return model.get_input_embeddings()

    with pytest.raises(ConfigError, match=r"learner\.packing=true: Forgetful .* set learner\.packing=false"):
        packing_of(config, Forgetful())


def test_checkpointed_activations_change_no_gradient_and_bring_no_dropout(tmp_path) -> None:
    plain = save_llama(
        tmp_path,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        attention_dropout=0.5,
    ).eval()
    checkpointed = copy.deepcopy(plain)
    checkpoint_activations(checkpointed)
    passes = []
    for layer in checkpointed.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    batches = microbatches(uneven_groups(), 10_000, 0, Packing.ROWS)
    (logprobs, gradient), (expected, direction) = run(checkpointed, batches), run(plain, batches)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(gradient, direction)
    # Forward, and once more in backward.
    assert len(passes) == 2 * 2 * len(batches)

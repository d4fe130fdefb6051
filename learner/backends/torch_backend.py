"""Torch alone: one process, DDP (a copy of the model on every rank) or FSDP2 (a part of it on every rank).

A policy and an optimizer's settings flow in; the policy is wrapped in place. Gradients are sums, never means: the loss
is already divided by the size of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from counterflow.configs.learner import LearnerSection
from counterflow.learner.batch import Microbatch
from counterflow.learner.logprobs import Projection
from counterflow.learner.lora import trained_weights
from counterflow.learner.policy import Policy, Scores
from counterflow.weight_sync.collective import gathered


class TorchBackend:
    """Meets `Backend`.

    Args:
        ways: `alone`, or how the ranks of the default process group share the work.
        reference_moves: whether the reference is a part of the state.
    """

    def __init__(
        self,
        policy: Policy,
        learner: LearnerSection,
        ways: Literal["alone", "ddp", "fsdp2"],
        reference_moves: bool = False,
    ) -> None:
        self.policy, self.skips = policy, True
        self._moving = policy.reference if reference_moves else None
        several = ways != "alone"
        adapted = learner.lora is not None
        self._whole = StateDictOptions(
            full_state_dict=several, cpu_offload=several, ignore_frozen_params=adapted, strict=not adapted
        )
        self._copies: DistributedDataParallel | None = None
        if ways == "ddp":
            # Buffers are constants; every parameter is used by every forward.
            self._copies = DistributedDataParallel(
                policy.scorer, forward_sync_buffers=False, gradient_as_bucket_view=True
            )
            self._copies.register_comm_hook(None, lambda _, bucket: _summed(bucket))
            policy.scorer = self._copies
        elif ways == "fsdp2":
            shard(policy.scorer)
            if policy.frozen is not None and policy.frozen is not policy.scorer:
                shard(policy.frozen)
        self.optimizer: torch.optim.Optimizer = adamw(policy.model, learner)

    def begin(self, first: bool, last: bool) -> None:
        """FSDP2 sums each microbatch's gradients at once, so that no rank ever holds them whole."""
        if first:
            self.optimizer.zero_grad(set_to_none=True)
        if self._copies is not None:
            self._copies.require_backward_grad_sync = last

    def forward_logprobs(self, batch: Microbatch, frozen: Projection | None = None) -> Scores:
        """See `Backend`."""
        return Scores(*self.policy.scorer(batch, self.policy.temperature, frozen))

    def backward(self, loss: Tensor) -> None:
        """See `Backend`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float, max_norm: float) -> float:
        """See `Backend`."""
        total = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), max_norm)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        return norm

    def gather_bucket(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend`."""
        return gathered(trained_weights(self.policy.model))

    @torch.no_grad()
    def renew_reference(self) -> None:
        """See `Backend`."""
        policy = self.policy
        assert policy.reference is not None
        for scorer in (policy.scorer, policy.frozen):
            if isinstance(scorer, FSDPModule):
                # A forward without backward leaves what is in no layer whole.
                scorer.reshard()
        for old, new in zip(policy.reference.parameters(), policy.model.parameters(), strict=True):
            old.copy_(new)

    def state(self) -> dict[str, Any]:
        """See `Backend`."""
        model = self.policy.model
        moments = get_optimizer_state_dict(model, self.optimizer, options=self._whole)
        state = {"model": get_model_state_dict(model, options=self._whole), "optimizer": moments.get("state", {})}
        if self._moving is not None:
            state["reference"] = get_model_state_dict(self._moving, options=self._whole)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Backend`."""
        model, options = self.policy.model, replace(self._whole, broadcast_from_rank0=self._whole.full_state_dict)
        # A collective where there are ranks.
        groups = get_optimizer_state_dict(model, self.optimizer, options=self._whole).get("param_groups", [])
        moments = {"state": state["optimizer"], "param_groups": groups} if state else {}
        set_model_state_dict(model, state.get("model", {}), options=options)
        if self._moving is not None:
            set_model_state_dict(self._moving, state.get("reference", {}), options=options)
        set_optimizer_state_dict(model, self.optimizer, optim_state_dict=moments, options=options)


def adamw(model: torch.nn.Module, learner: LearnerSection) -> torch.optim.AdamW:
    """The optimizer that all backends use."""
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=learner.lr,
        betas=learner.betas,
        weight_decay=learner.weight_decay,
        fused=True,
    )


def shard(scorer: torch.nn.Module) -> None:
    """Spread a scorer's weights over the ranks, in place, layer by layer; what is in none stays whole while in use."""
    layers = set(getattr(scorer.model, "_no_split_modules", None) or ())
    for module in list(scorer.modules()):
        if type(module).__name__ in layers:
            _as_sums(fully_shard(module))
    _as_sums(fully_shard(scorer, reshard_after_forward=False))
    register_fsdp_forward_method(scorer, "states")


def _as_sums(module: FSDPModule) -> None:
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _summed(bucket: Any) -> Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    summed: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed

"""DeepSpeed: ZeRO 1, 2 and 3, with a torch optimizer, whose own kernels need no compiler.

A policy and an optimizer's settings flow in; the policy is wrapped in place. Nothing imports DeepSpeed but this, when
a configuration asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.configs.learner import LearnerSection
from counterflow.errors import ConfigError
from counterflow.learner.backends.torch_backend import adamw
from counterflow.learner.batch import Microbatch
from counterflow.learner.logprobs import Projection
from counterflow.learner.policy import Policy, Scores
from counterflow.weight_sync.layout import named_weights

_MOMENTS = ("exp_avg", "exp_avg_sq")
_OFFLOADED = {
    "nothing": (),
    "optimizer": ("offload_optimizer",),
    "weights": ("offload_optimizer", "offload_param"),
}


class DeepSpeedBackend:
    """Meets `Backend`, over the ranks of the default process group. The reference stays whole on each.

    Args:
        stage: what is spread over the ranks: 1 the optimizer, 2 gradients too, 3 weights too.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """

    def __init__(self, policy: Policy, learner: LearnerSection, stage: int) -> None:
        try:
            import deepspeed
        except ImportError as error:
            raise ConfigError(
                f"learner.backend={learner.backend} needs DeepSpeed, which cannot be imported here ({error}): "
                "pip install 'counterflow[deepspeed]', or use fsdp2"
            ) from error
        self._deepspeed, self.policy, self._stage, self.skips = deepspeed, policy, stage, False
        self._ranks = dist.get_world_size()
        self.optimizer: torch.optim.Optimizer = adamw(policy.model, learner)
        # The rank's own GPU is the only one it sees.
        os.environ.setdefault("LOCAL_RANK", "0")
        cuda = policy.device.type == "cuda"
        deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", auto_mpi_discovery=False)
        if stage == 3:
            # The head is used outside its own forward.
            head = policy.model.get_output_embeddings()  # type: ignore[operator]
            for parameter in head.parameters():
                deepspeed.zero.register_external_parameter(policy.scorer, parameter)
        self._engine, *_ = deepspeed.initialize(
            model=policy.scorer,
            optimizer=self.optimizer,
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": learner.max_grad_norm if learner.max_grad_norm < float("inf") else 0.0,
                "zero_optimization": {
                    "stage": stage,
                    **{part: {"device": "cpu"} for part in _OFFLOADED[learner.offload]},
                },
                "zero_force_ds_cpu_optimizer": False,
            },
        )
        self._engine.eval()
        policy.scorer = self._engine

    def begin(self, first: bool, last: bool) -> None:
        """See `Backend`."""
        self._engine.set_gradient_accumulation_boundary(last)

    def forward_logprobs(self, batch: Microbatch, frozen: Projection | None = None) -> Scores:
        """See `Backend`."""
        return Scores(*self._engine(batch, self.policy.temperature, frozen))

    def backward(self, loss: Tensor) -> None:
        """See `Backend`."""
        # It takes the mean over ranks, where the gradient of the whole step is their sum.
        self._engine.backward(loss * self._ranks)

    def step(self, learning_rate: float, max_norm: float) -> float:
        """See `Backend`. DeepSpeed clips to the norm it was made with, and does step where it is not finite."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def gather_bucket(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend`."""
        if self._stage < 3:
            yield from named_weights(self.policy.model)
            return
        for name, parameter in self.policy.model.named_parameters():
            with self._deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().clone()

    def renew_reference(self) -> None:
        """See `Backend`.

        Raises:
            ConfigError: always. A configuration that asks for it is refused.
        """
        raise ConfigError("objective.kl.reference_every must be 0 with DeepSpeed, which spreads the policy alone")

    def state(self) -> dict[str, Any]:
        """See `Backend`."""
        found: dict[str, Any] = {"model": {}, "optimizer": {}}
        for name, parameter in self.policy.model.state_dict(keep_vars=True).items():
            with self._whole(parameter):
                self._note(found["model"], name, parameter)
        flat = next(iter(self.optimizer.state), None)
        for name, parameter in self.policy.model.named_parameters():
            moments = found["optimizer"].setdefault(name, {}) if self._first else {}
            if flat is None:
                # DeepSpeed has none before the first step, and what a checkpoint is read into must have a place for it.
                shape = getattr(parameter, "ds_shape", parameter.shape)
                self._note(moments, "step", torch.tensor(0.0))
                for key in _MOMENTS:
                    self._note(moments, key, torch.zeros(shape))
                continue
            self._note(moments, "step", self.optimizer.state[flat]["step"])
            for key in _MOMENTS:
                self._note(moments, key, self._deepspeed.utils.safe_get_full_optimizer_state(parameter, key))
        return found

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Backend`."""
        weights, optimizer = state.get("model", {}), state.get("optimizer", {})
        steps = next((float(moments["step"]) for moments in optimizer.values()), 0.0)
        taken = torch.tensor(steps, device=self.policy.device)
        dist.broadcast(taken, 0)
        if taken:
            self._make_moments(taken)
        for name, parameter in self.policy.model.named_parameters():
            told = self._told(weights.get(name), parameter)
            with self._whole(parameter), torch.no_grad():
                parameter.copy_(told)
            self._set(parameter, told)
            for key in _MOMENTS if taken else ():
                self._set(parameter, self._told(optimizer.get(name, {}).get(key), parameter), key)

    @property
    def _first(self) -> bool:
        return dist.get_rank() == 0

    def _whole(self, parameter: Tensor) -> AbstractContextManager[None]:
        """While it is open the parameter is whole on this rank; what is done to it on rank 0 is done on all."""
        if self._stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[None] = self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
        return gathered

    def _note(self, found: dict[str, Any], name: str, tensor: Tensor) -> None:
        if self._first:
            found[name] = tensor.detach().cpu().clone()

    def _told(self, tensor: Tensor | None, parameter: Tensor) -> Tensor:
        """What rank 0 has, of the shape of a whole parameter."""
        told = torch.empty(getattr(parameter, "ds_shape", parameter.shape), device=parameter.device)
        if tensor is not None:
            told.copy_(tensor)
        dist.broadcast(told, 0)
        return told

    def _make_moments(self, taken: Tensor) -> None:
        """The optimizer's state after so many steps, its moments zero: DeepSpeed has none before the first."""
        zero = self._engine.optimizer
        for flat in zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups:
            moments = {key: torch.zeros_like(flat) for key in _MOMENTS}
            self.optimizer.state[flat] = {"step": taken.to(flat.device, copy=True), **moments}
        if self._stage < 3:
            # As in its first step: parameters learn where their moments lie.
            zero._lazy_init_hp_params_optimizer_state()

    def _set(self, parameter: Tensor, whole: Tensor, key: str | None = None) -> None:
        """Give this rank its part of a parameter's master weights, or of a moment."""
        extent, part = "full", whole
        if self._stage == 3:
            # Its own call for whole tensors knows nothing of the padding of the last rank's part.
            size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            padded = torch.nn.functional.pad(whole.flatten(), (0, size * self._ranks - whole.numel()))
            extent, part = "local", padded[dist.get_rank() * size :][:size]
        if key is None:
            getattr(self._deepspeed.utils, f"safe_set_{extent}_fp32_param")(parameter, part)
        else:
            getattr(self._deepspeed.utils, f"safe_set_{extent}_optimizer_state")(parameter, part, key)

"""The optimizer, its ranks, and what of the model it trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from counterflow.configs.section import Decay, Section, Text


class LoraSection(Section):
    """Low-rank matrices that are trained in the place of the model's weights."""

    rank: int = Field(16, ge=1, le=4096, description="Rank of the two matrices beside each layer.")
    alpha: float = Field(32.0, gt=0, le=1e6, description="Their product counts by alpha / rank in the layer's weight.")
    targets: list[Text] | None = Field(
        None,
        min_length=1,
        description="Names of linear layers, as [q_proj, v_proj]. Absent: all of them but the output layer.",
    )


class LearnerSection(Section):
    """The optimizer and its process."""

    ranks: int = Field(1, ge=1, description="Processes that share the learner's work, with the gradient of one.")
    backend: Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"] = Field(
        "fsdp2",
        description="How several ranks do it: `ddp` keeps the whole model on each, `fsdp2` a part of its weights, "
        "gradients and optimizer. `zero1`, `zero2`, `zero3`: DeepSpeed spreads the optimizer, gradients too, weights "
        "too.",
    )
    offload: Literal["nothing", "optimizer", "weights"] = Field(
        "nothing",
        description="What DeepSpeed keeps in the memory of the host, not the GPU: the `optimizer`, whose step is then "
        "the CPU's, or, with zero3, the `weights` as well. Smaller on the GPU, and slower.",
    )
    cpus: int = Field(1, ge=1, description="CPU cores of each rank.")
    gpus: int = Field(0, ge=0, le=1, description="GPUs of each rank.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of forward and backward; master weights are float32."
    )
    lora: LoraSection | None = Field(
        None,
        description="Train low-rank adapters by peft and leave the model as it is, which is the reference then. Only "
        "they travel to the actors. Absent: all weights are trained.",
    )
    lr: float = Field(1e-6, gt=0, allow_inf_nan=False, description="Peak learning rate of AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises linearly.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="The learning rate after the warm-up: `constant`, or a `linear` or `cosine` fall."
    )
    schedule_steps: int | None = Field(
        None, ge=1, description="`linear`, `cosine`: the step at which the fall ends. Absent: `run.steps`."
    )
    lr_floor: float = Field(0.0, ge=0, le=1, description="`linear`, `cosine`: where the fall ends, as a share of lr.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="AdamW's moment decays.")
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="AdamW's decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient norm is clipped to this; `inf` does not clip.")
    max_restarts: int = Field(
        3, ge=0, description="How often, in a run, a learner that died is begun again, and the actors with it."
    )
    max_skipped_steps: int = Field(
        3,
        ge=0,
        description="A step whose gradient is not finite changes nothing and uses up its groups; after so many in "
        "a row the run stops.",
    )
    updates_per_batch: int = Field(
        1,
        ge=1,
        description="Optimizer steps on each batch, every one on a part of its groups; together they make one version.",
    )
    microbatch_tokens: int = Field(
        16_384,
        ge=1,
        description="Most tokens in one forward, without packing those of padding too; a group is never split.",
    )
    packing: bool = Field(
        True,
        description="Put short responses into one row where they fit, without attention between them; false pads each "
        "to the longest of its microbatch.",
    )
    activation_checkpointing: bool = Field(
        False, description="Keep the inputs of the model's layers only and compute the rest again in backward."
    )

    @property
    def by_deepspeed(self) -> bool:
        """Whether DeepSpeed shares the work: one rank needs nobody to."""
        return self.ranks > 1 and self.backend.startswith("zero")

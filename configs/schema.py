"""What a run can be told: one pydantic model a section, a sentence a key; here what the sections ask of each other.

Unknown keys are refused. `counterflow.configs.load` reads YAML and overrides into a `RunConfig`.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from counterflow.configs.buffer import AdmissionSection, BufferSection
from counterflow.configs.generation import ActorsSection, RewardSection, SamplingSection, TaskSection
from counterflow.configs.learner import LearnerSection
from counterflow.configs.objective import ObjectiveSection
from counterflow.configs.run import CheckpointSection, EvaluationSection, MetricsSection, ModelSection, RunSection
from counterflow.configs.section import Section
from counterflow.configs.weight_sync import WeightSyncSection


class RunConfig(Section):
    """Everything a run can be told."""

    run: RunSection = Field(default_factory=RunSection, description="The run as a whole.")
    model: ModelSection = Field(default_factory=ModelSection, description="The policy and its frozen reference.")
    task: TaskSection = Field(default_factory=TaskSection, description="Where prompts and answers come from.")
    reward: RewardSection = Field(default_factory=RewardSection, description="How a response is scored.")
    sampling: SamplingSection = Field(default_factory=SamplingSection, description="How responses are sampled.")
    admission: AdmissionSection = Field(default_factory=AdmissionSection, description="Which groups may start.")
    actors: ActorsSection = Field(default_factory=ActorsSection, description="The rollout actors.")
    buffer: BufferSection = Field(default_factory=BufferSection, description="The stream of trajectories.")
    objective: ObjectiveSection = Field(default_factory=ObjectiveSection, description="What the learner maximises.")
    learner: LearnerSection = Field(default_factory=LearnerSection, description="The optimizer and its process.")
    checkpoint: CheckpointSection = Field(
        default_factory=CheckpointSection, description="What a resumed run goes on from."
    )
    weight_sync: WeightSyncSection = Field(
        default_factory=WeightSyncSection, description="The way of the weights back."
    )
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection, description="The held-out set.")
    metrics: MetricsSection = Field(default_factory=MetricsSection, description="Prometheus metrics.")

    def replacing(self, section: str, **values: Any) -> Self:
        """The configuration with other values in one section, which are known to be sound: they are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    @model_validator(mode="after")
    def room_for_a_step(self) -> Self:
        capacity, needed = self.buffer.capacity_groups, self.admission.groups_per_step
        if capacity < needed:
            raise ValueError(
                f"buffer.capacity_groups={capacity} is below admission.groups_per_step={needed}, so that no step could "
                f"ever be filled: raise the first to {needed} or more"
            )
        return self

    @model_validator(mode="after")
    def groups_for_updates(self) -> Self:
        updates, groups = self.learner.updates_per_batch, self.admission.groups_per_step
        if updates > groups:
            raise ValueError(
                f"learner.updates_per_batch={updates} is above admission.groups_per_step={groups}, and no group is "
                f"split: lower the first to {groups} or less"
            )
        return self

    @model_validator(mode="after")
    def order_that_repeats(self) -> Self:
        if self.run.deterministic and self.buffer.order != "admission":
            raise ValueError(
                f"run.deterministic=true with buffer.order={self.buffer.order}: timing would choose the groups of a "
                "batch, use buffer.order=admission"
            )
        return self

    @model_validator(mode="after")
    def room_for_uses(self) -> Self:
        if self.buffer.uses > 1 and self.buffer.order != "admission":
            raise ValueError(
                f"buffer.uses={self.buffer.uses} with buffer.order={self.buffer.order}: a group might become stale "
                "between two uses, use buffer.order=admission"
            )
        if self.admission.max_lag < self.buffer.uses - 1:
            raise ValueError(
                f"admission.max_lag={self.admission.max_lag:g} is too low for buffer.uses={self.buffer.uses}: the last "
                f"use of a group comes {self.buffer.uses - 1} versions after the first, raise it to that or more"
            )
        return self

    @model_validator(mode="after")
    def staleness_that_can_act(self) -> Self:
        admission, order = self.admission, self.buffer.order
        policy, ahead, bound = admission.staleness, admission.versions_ahead, admission.max_lag
        if policy == "wait" and ahead != bound:
            raise ValueError(
                f"admission.run_ahead={ahead:g} is not read with admission.staleness=wait, where admission keeps "
                "admission.max_lag: leave it out, or choose another admission.staleness"
            )
        if ahead < bound:
            raise ValueError(
                f"admission.run_ahead={ahead:g} is below admission.max_lag={bound:g}: raise it, or leave it out"
            )
        if policy != "wait" and (bound == float("inf") or (order == "admission" and ahead == bound)):
            raise ValueError(
                f"admission.staleness={policy} has nothing to act on: no token can pass admission.max_lag={bound:g} "
                f"with buffer.order={order} and admission.run_ahead={ahead:g}. Set buffer.order=ready, where slow "
                "groups are overtaken, or admission.run_ahead above a finite admission.max_lag"
            )
        if policy == "drop" and self.buffer.uses > 1:
            raise ValueError(
                f"admission.staleness=drop with buffer.uses={self.buffer.uses} might drop a group between two uses: "
                "choose another of the two"
            )
        return self

    @model_validator(mode="after")
    def schedule_that_falls(self) -> Self:
        learner, last = self.learner, self.learner.schedule_steps or self.run.steps
        if learner.schedule != "constant" and learner.warmup_steps >= last:
            raise ValueError(
                f"learner.warmup_steps={learner.warmup_steps} leaves learner.schedule={learner.schedule} no step to "
                f"fall in, which ends at step {last}: warm up for fewer"
            )
        return self

    @model_validator(mode="after")
    def offload_that_can_be_done(self) -> Self:
        learner = self.learner
        able = learner.by_deepspeed and (learner.offload != "weights" or learner.backend == "zero3")
        if learner.offload != "nothing" and not able:
            needed = "zero3" if learner.offload == "weights" else "zero1, zero2 or zero3"
            raise ValueError(
                f"learner.offload={learner.offload} with learner.backend={learner.backend} on {learner.ranks} rank(s): "
                f"it needs learner.backend={needed} on several, or set learner.offload=nothing"
            )
        return self

    @model_validator(mode="after")
    def adapters_that_can_be_trained(self) -> Self:
        learner = self.learner
        if learner.lora is not None and learner.by_deepspeed:
            raise ValueError(
                f"learner.lora with learner.backend={learner.backend}: frozen weights are spread by fsdp2 alone; set "
                "learner.backend=fsdp2 or ddp"
            )
        return self

    @model_validator(mode="after")
    def reference_that_can_move(self) -> Self:
        learner, every = self.learner, self.objective.kl.reference_every
        if every and learner.lora is not None:
            raise ValueError(
                f"objective.kl.reference_every={every} with learner.lora, whose reference is the model, which stays as "
                "it is: leave one of them out"
            )
        if every and learner.by_deepspeed:
            raise ValueError(
                f"objective.kl.reference_every={every} with learner.backend={learner.backend}, whose weights are "
                "spread otherwise than the reference: set learner.backend=fsdp2 or ddp"
            )
        return self

    @model_validator(mode="after")
    def transport_that_reaches(self) -> Self:
        sync = self.weight_sync
        if sync.transport == "nccl" and not (self.learner.gpus and self.actors.gpus):
            raise ValueError(
                "weight_sync.transport=nccl broadcasts between GPUs: give learner.gpus and actors.gpus, or set "
                "weight_sync.transport=gloo"
            )
        if sync.folder is not None and sync.transport != "disk":
            raise ValueError(
                f"weight_sync.folder is read by weight_sync.transport=disk alone, which is {sync.transport}: set the "
                "one or leave out the other"
            )
        if sync.host is not None and sync.transport in ("shared_memory", "disk"):
            raise ValueError(
                f"weight_sync.host is read by broadcasts alone, weight_sync.transport is {sync.transport}: set gloo or "
                "nccl, or leave it out"
            )
        if not sync.recompute and sync.in_flight != "keep":
            raise ValueError(
                f"weight_sync.recompute=false has no effect with weight_sync.in_flight={sync.in_flight}, which keeps "
                "no response: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def one_device(self) -> Self:
        if self.actors.engine == "transformers" and self.actors.gpus > 1:
            raise ValueError(
                f"actors.gpus={self.actors.gpus} needs actors.engine=vllm: transformers answers on one device, set "
                "actors.gpus to 0 or 1"
            )
        return self

    @model_validator(mode="after")
    def bounded_memory(self) -> Self:
        if self.actors.kv_cache_bytes is None and self.actors.gpus == 0:
            raise ValueError(
                "actors.kv_cache_bytes=null lets vLLM take nearly all memory of the machine while actors.gpus=0: give "
                "a number of bytes, such as 268435456"
            )
        return self

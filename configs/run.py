"""The run as a whole: what it is called, what it trains on which model, how it is watched."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from counterflow.configs.section import PositiveSeconds, Section


class RunSection(Section):
    """The run as a whole."""

    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", description="Name of the run; its folder is `folder`/`name`."
    )
    folder: Path = Field(Path("runs"), description="Where run folders are made.")
    steps: int = Field(100, ge=1, description="Optimizer steps to take.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of the prompt order, of sampling and of the learner.")
    deterministic: bool = Field(
        False,
        description="Sample each response from a seed made of `seed`, its group's admission number and its place in "
        "the group. With actors.engine=transformers a group then depends on weights alone, and a run of "
        "admission.max_lag=0 can be repeated bit for bit on machines of one kind; vLLM's batches may change last bits.",
    )
    overwrite: bool = Field(False, description="Replace a run folder of this name instead of refusing to start.")
    ray_address: str = Field(
        "local", description="Ray cluster to run on: `local` starts one for this run, `auto` joins the one here."
    )
    placement_timeout_s: PositiveSeconds = Field(
        30.0, description="Longest wait, in seconds, for Ray to place the actors and the learner."
    )
    start_timeout_s: PositiveSeconds = Field(
        300.0, description="Longest wait, in seconds, for an engine or the learner to start."
    )
    step_timeout_s: PositiveSeconds = Field(
        600.0, description="Longest wait, in seconds, for one step or one evaluation."
    )
    pin_cores: bool = Field(True, description="On a local CPU run, give each actor and the learner cores of their own.")


class ModelSection(Section):
    """The policy and its frozen reference."""

    path: Path = Field(Path(".cache/models/sums"), description="Folder with a Hugging Face model and its tokenizer.")
    context_length: int = Field(
        2048, ge=2, description="Most tokens of prompt and response together. Absent: fewer where the model has fewer."
    )
    trust_remote_code: bool = Field(False, description="Let the model folder run code of its own.")


class CheckpointSection(Section):
    """What a resumed run goes on from. Steps taken after it are taken again, on the archived groups."""

    every: int = Field(
        25, ge=0, description="Steps between two checkpoints; 0 makes none, so that resuming takes all steps again."
    )
    keep: int = Field(2, ge=1, description="How many checkpoints stay: the newest ones.")


class EvaluationSection(Section):
    """The held-out set, decoded greedily at one policy version."""

    prompts: int = Field(512, ge=1, description="Held-out prompts.")
    every: int = Field(25, ge=0, description="Steps between evaluations; 0 evaluates before and after only.")
    success: float = Field(1.0, allow_inf_nan=False, description="Smallest reward that counts as a success.")


class MetricsSection(Section):
    """Prometheus metrics."""

    host: str = Field("127.0.0.1", description="Address the metrics server binds to.")
    port: int = Field(0, ge=0, le=65_535, description="Its port; 0 takes a free one. It is printed at the start.")

"""Where groups come from: the task, its rewards, sampling, and the actors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from counterflow.configs.section import PositiveSeconds, Section, Text


class TaskSection(Section):
    """Where prompts and answers come from."""

    kind: Literal["jsonl", "reasoning_gym"] = Field(
        "jsonl",
        description="`jsonl`: a file with `prompt` and `answer` a line. `reasoning_gym`: a task of that library.",
    )
    path: Path | None = Field(None, description="`jsonl`: the training file.")
    heldout_path: Path | None = Field(
        None,
        description="`jsonl`: the held-out file. Absent: up to `evaluation.prompts` lines of `path`, a quarter of them "
        "at most, chosen by `run.seed`.",
    )
    name: str | None = Field(None, description="`reasoning_gym`: the task's name, as `letter_counting`.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="`reasoning_gym`: the task's own parameters.")
    size: int = Field(10_000, ge=1, description="`reasoning_gym`: how many different prompts to train on.")
    chat: bool | None = Field(
        None, description="Wrap text prompts as a user's chat message. Absent: where the tokenizer has a chat template."
    )
    system_prompt: str | None = Field(None, description="System message put before every chat prompt.")
    environment: str | None = Field(
        None,
        description="What answers the model between the turns of a response: `calculator`, or your own as "
        "`package.module:Class`. Absent: a response is one turn.",
    )
    turns: int = Field(
        4, ge=1, description="`environment`: most turns that the model takes; sampling.max_tokens bounds all together."
    )
    environment_timeout_s: PositiveSeconds = Field(
        10.0, description="`environment`: longest wait, in seconds, for an answer; past it the sample is failed."
    )
    overlong: Literal["refuse", "drop"] = Field(
        "refuse",
        description="A prompt that leaves no room for a response: refuse to start, or drop it and say how many.",
    )


class RewardSection(Section):
    """How a response is scored."""

    name: str = Field(
        "exact",
        description="`exact`, `math_verify`, `reasoning_gym`, or your own as `package.module:function`, which reads "
        "the last turn; what `task.environment` gives is added. `environment`: that alone.",
    )
    parts: dict[Text, Annotated[float, Field(allow_inf_nan=False)]] | None = Field(
        None,
        min_length=1,
        description="Several rewards by name, each with its weight: the reward is their weighted sum, and each part is "
        "stored. `environment` among them weighs what that gives, 1 otherwise. Absent: `name` alone, with weight 1.",
    )
    timeout_s: PositiveSeconds = Field(
        10.0, description="Deadline of one sample's reward, all its parts, in seconds; past it the sample is failed."
    )
    workers: int = Field(1, ge=1, description="Processes that compute rewards, for each actor.")
    memory_bytes: int = Field(4 << 30, ge=1 << 28, description="Address space of one reward process, in bytes.")
    shuffle: bool = Field(
        False, description="Permute the rewards within each group: a control that must not learn anything."
    )
    truncated: Literal["train", "mask", "zero_reward"] = Field(
        "train",
        description="A response cut at its longest length (finish reason `length`): `train` it as any other; `mask` "
        "its tokens, which then carry no gradient, its reward staying in the baseline; or train it with `zero_reward`.",
    )

    @model_validator(mode="after")
    def one_way_of_naming(self) -> Self:
        if self.parts and self.name != type(self).model_fields["name"].default and self.name not in self.parts:
            raise ValueError(
                f"name={self.name} is not read where parts are given: put it among them with its weight, or leave one "
                "of the two out"
            )
        return self


class SamplingSection(Section):
    """How responses are sampled in training. Evaluation is greedy."""

    temperature: float = Field(
        1.0, gt=0, le=10, description="Sampling temperature; the learner's log-probs use it too."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass. Below 1 the importance weights are biased.")
    top_k: int = Field(
        0, ge=0, description="Most likely tokens kept; 0 keeps all. Above 0 the importance weights are biased."
    )
    max_tokens: int = Field(64, ge=1, description="Longest response, in tokens.")
    stop: list[Text] = Field(default_factory=list, description="Texts that end a response.")


class ActorsSection(Section):
    """The rollout actors and their engines."""

    engine: Literal["vllm", "transformers"] = Field(
        "vllm",
        description="What generates: `vllm`, or `transformers` where vLLM cannot be installed, which is many times "
        "slower: it answers one prompt at a time, on one device.",
    )
    count: int = Field(1, ge=1, description="Rollout actors, each with an engine of its own.")
    cpus: int = Field(1, ge=1, description="CPU cores of one actor.")
    gpus: int = Field(0, ge=0, description="GPUs of one actor; more than one means tensor parallelism (`vllm`).")
    groups_in_flight: int = Field(64, ge=1, description="Most groups that one actor generates at once.")
    max_restarts: int = Field(
        3,
        ge=0,
        description="How often an actor that died or got no weights is replaced by a new one, counted anew where the "
        "learner is begun again. Past it the run goes on without, to the last actor.",
    )
    heartbeat_timeout_s: PositiveSeconds = Field(
        60.0,
        description="Longest silence of an engine that is not loading weights, in seconds; its actor is replaced then.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Precision of the engine.")
    kv_cache_bytes: int | None = Field(
        256 << 20,
        ge=1 << 20,
        description="Key-value cache of one `vllm` engine, in bytes. null: let vLLM size it (GPUs only).",
    )
    gpu_memory_share: float = Field(
        0.85, gt=0, le=1, description="Share of a GPU's memory that its `vllm` engine may take."
    )
    enforce_eager: bool = Field(True, description="Run `vllm` without compilation or CUDA graphs.")

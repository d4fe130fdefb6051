"""What a run can be told: one pydantic model a section, a sentence a key. Data only: no logic but bounds.

Unknown keys are refused. `counterflow.configs.load` reads YAML and overrides into a `RunConfig`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A section of the configuration: frozen, strict about names."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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


class TaskSection(Section):
    """Where prompts and answers come from."""

    kind: Literal["jsonl", "reasoning_gym"] = Field(
        "jsonl",
        description="`jsonl`: a file with `prompt` and `answer` a line. `reasoning_gym`: a task of that library.",
    )
    path: Path | None = Field(None, description="`jsonl`: the training file.")
    heldout_path: Path | None = Field(
        None,
        description="`jsonl`: the held-out file. Absent: `evaluation.prompts` lines of `path`, chosen by `run.seed`.",
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


class AdmissionSection(Section):
    """Which groups may start, and how stale they may become."""

    groups_per_step: int = Field(32, ge=1, description="B: groups trained by one optimizer step.")
    samples_per_group: int = Field(8, ge=2, description="G: responses sampled for one prompt; a baseline needs two.")
    max_lag: float = Field(
        4,
        ge=0,
        description="Most versions that a token may be behind when it is trained. Group n may start only when "
        "floor(n/B) <= version + max_lag. 0 is synchronous, `inf` unbounded.",
    )
    staleness: Literal["wait", "drop", "mask_tokens", "withhold_keep_baseline", "downweight"] = Field(
        "wait",
        description="What keeps tokens past max_lag from the gradient. `wait`: groups start no earlier. When read: "
        "`drop` the group; `mask_tokens` past it alone; `withhold_keep_baseline`, the whole response, its reward "
        "staying in the group's baseline; `downweight` each token by `decay` for every version past it.",
    )
    run_ahead: float | None = Field(
        None,
        ge=0,
        description="Versions that admission may run ahead, in the place of max_lag, where staleness is not `wait`: "
        "group n may start when floor(n/B) <= version + run_ahead. Absent: max_lag.",
    )
    decay: float = Field(
        0.5, ge=0, lt=1, description="`downweight`: factor on a token's gradient a version past max_lag."
    )
    lease_s: PositiveSeconds = Field(
        300.0,
        description="A group not back so many seconds after its admission, or whose actor died, is given out again.",
    )
    attempts: int = Field(3, ge=1, description="How often a group is tried before it is dropped as poison.")

    @property
    def versions_ahead(self) -> float:
        """The bound of admission, which is that of consumption unless the one was given apart."""
        return self.max_lag if self.run_ahead is None else self.run_ahead

    @field_validator("max_lag", "run_ahead")
    @classmethod
    def whole_lag(cls, value: float | None) -> float | None:
        if value is not None and value != float("inf") and value != int(value):
            raise ValueError("it counts versions: a whole number, or inf")
        return value


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
        description="How often, in a run, an actor that died or got no weights is replaced by a new one. Past it the "
        "run goes on without, to the last actor.",
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


class BufferSection(Section):
    """The stream of trajectories."""

    url: str | None = Field(
        None,
        description="Redis 7+ or Valkey 8+ URL, without a password. Absent: a server embedded in the run. "
        "User and password come from COUNTERFLOW_REDIS_USERNAME and COUNTERFLOW_REDIS_PASSWORD (or "
        "COUNTERFLOW_REDIS_PASSWORD_FILE), certificates from COUNTERFLOW_REDIS_{CA,CERT,KEY}_FILE.",
    )
    capacity_groups: int = Field(
        4096, ge=1, description="Groups, those being generated included, at which admission pauses."
    )
    capacity_bytes: int = Field(
        4 << 30, ge=1, description="Bytes of groups, those being generated estimated, at which admission pauses."
    )
    order: Literal["admission", "ready", "freshest"] = Field(
        "admission",
        description="Which groups make a batch: the next by `admission` number, those that are `ready` first, or those "
        "with the `freshest` tokens. The last two let groups overtake others, which may become stale: see "
        "admission.staleness; under `wait` they are dropped.",
    )
    uses: int = Field(1, ge=1, description="Steps that train each group; each use counts its own lag.")
    drop_equal_rewards: bool = Field(
        False, description="Drop groups whose task rewards are all equal; other groups are generated in their place."
    )
    connect_timeout_s: PositiveSeconds = Field(5.0, description="Longest wait, in seconds, for the server to answer.")
    outage_timeout_s: PositiveSeconds = Field(
        30.0, description="Longest wait, in seconds, for a server that went away, or is full, to come back."
    )
    archive_segment_bytes: int = Field(
        64 << 20, ge=1 << 10, description="Size, in bytes, at which the archive of trained groups begins a new segment."
    )


class KLSection(Section):
    """The pull towards the reference."""

    beta: float = Field(0.001, ge=0, le=1e6, description="Strength of the KL term; 0 leaves it out.")
    estimator: Literal["k1", "k2", "k3", "rao_blackwell"] = Field(
        "k1",
        description="KL estimator per token: k1 = log pi - log ref, k2 = k1^2/2, k3 = ref/pi - 1 + k1, or "
        "rao_blackwell, the KL of the whole vocabulary at the token's context.",
    )
    placement: Literal["reward", "loss", "both"] = Field(
        "reward",
        description="Where the estimator sits: in the `reward`, where k1 is unbiased on data of pi itself or with the "
        "right weights; in the `loss`, which differentiates it; or in `both`.",
    )
    reward_to_go: bool = Field(
        True, description="Charge a token for its own and later tokens' KL; false: for that of its whole response."
    )
    reward_weight: Literal["importance", "none", "token", "prefix", "per_decision", "sequence", "geometric"] = Field(
        "importance",
        description="Weight of the KL in the reward: `importance` shares that of the task's reward; `per_decision` and "
        "`sequence` are exact off-policy for k1 with cap inf; `none`, `token`, `prefix` and `geometric` are not.",
    )
    loss_weight: Literal["none", "token", "prefix", "sequence"] = Field(
        "none",
        description="Weight of the KL in the loss: none, or the ratio pi/mu of the token, so far, or of the response.",
    )
    differentiate_weight: bool = Field(True, description="Let the gradient pass through the KL's weight in the loss.")
    cap: float = Field(
        float("inf"),
        gt=0,
        description="Upper bound of the KL's own weights, in reward and loss; `inf` does not truncate.",
    )
    schedule: Literal["fixed", "linear", "adaptive"] = Field(
        "fixed", description="beta over the run: `fixed`, `linear` from beta to beta_end, `adaptive` towards target."
    )
    beta_end: float = Field(0.0, ge=0, le=1e6, description="`linear`: beta after schedule_steps.")
    schedule_steps: int = Field(100, ge=1, description="`linear`: steps from beta to beta_end.")
    target: float = Field(
        0.01, gt=0, allow_inf_nan=False, description="`adaptive`: KL(pi || ref) to hold, in nats per token."
    )
    horizon_steps: float = Field(
        10.0, ge=1, allow_inf_nan=False, description="`adaptive`: beta changes by at most 20 % / this at a step."
    )
    reference_every: int = Field(
        0, ge=0, description="Versions after which the policy, as it is then, becomes the reference. 0: it never moves."
    )


class ImportanceSection(Section):
    """The correction from the behaviour to the current policy."""

    correction: Literal[
        "none",
        "importance",
        "truncated",
        "masked",
        "ppo",
        "decoupled_ppo",
        "cispo",
        "gspo",
        "topr",
        "m2po",
        "sequence_mask",
        "vtrace",
    ] = Field(
        "truncated",
        description="`truncated`: weights min(ratio, cap). `none`: no weights. `importance`: uncapped. `masked`: 0 "
        "outside floor and cap (IcePop). `ppo`: clipped. `decoupled_ppo`: min(prox/mu, cap) and a clip on pi/prox. "
        "`cispo`: clipped weights. `gspo`: clipped ratio of the response. `topr`: capped on negative advantages only. "
        "`m2po`: masked by second moment. `sequence_mask`: ppo without far negative responses (DeepSeek-V3.2). "
        "`vtrace`: cap on the token's ratio, trace_cap on later ones.",
    )
    level: Literal["token", "prefix", "sequence", "geometric"] = Field(
        "token",
        description="Ratio that `importance`, `truncated` and `masked` use: of one token, of the response so far, of "
        "the whole response, or the geometric mean over it.",
    )
    cap: float = Field(2.0, gt=0, description="Upper bound of a weight; `inf` does not truncate.")
    floor: float = Field(0.5, ge=0, le=1, description="`masked`: weights below it become 0.")
    clip_low: float = Field(
        0.2, ge=0, le=1, description="`ppo`, `cispo`, `gspo`, `sequence_mask`: ratios count down to 1 - this."
    )
    clip_high: float = Field(0.2, ge=0, description="The same: ratios count up to 1 + this.")
    trace_cap: float = Field(1.0, gt=0, description="`vtrace`: upper bound of the ratios of later tokens.")
    second_moment: float = Field(
        0.04, gt=0, description="`m2po`: the furthest tokens are masked until the mean of log^2 ratio is at most this."
    )
    divergence: float = Field(
        0.1, ge=0, description="`sequence_mask`: mean log(mu/pi) past which a negative response is masked, in nats."
    )
    scale_learning_rate: bool = Field(
        False, description="Multiply the learning rate by sqrt(ESS/N) of the step's whole-response weights (VCPO)."
    )


class ObjectiveSection(Section):
    """What the learner maximises: E[R] - beta KL(pi || ref)."""

    kl: KLSection = Field(default_factory=KLSection, description="The pull towards the reference.")
    importance: ImportanceSection = Field(default_factory=ImportanceSection, description="The off-policy correction.")
    advantage: Literal["rloo", "group_mean", "group_std", "plain"] = Field(
        "rloo",
        description="Baseline: `rloo`, the mean of the group's other samples; `group_mean`, itself included, which "
        "biases a KL in the reward; `group_std`, that over the group's spread of task rewards; `plain`, `baseline`.",
    )
    baseline: float = Field(0.0, allow_inf_nan=False, description="`plain`: what is taken from every task reward.")
    reduction: Literal["constant", "sequence_mean", "token_mean"] = Field(
        "constant",
        description="The sum over tokens is divided by a `constant`; `sequence_mean` (by each response's length) and "
        "`token_mean` (by the step's tokens) are biased.",
    )
    length_constant: int | None = Field(
        None, ge=1, description="`constant`: divides by sequences x this. Absent: `sampling.max_tokens`."
    )
    strict_kl: bool = Field(
        False, description="Refuse to start where the expected gradient of the KL term is not that of KL(pi || ref)."
    )


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


class CheckpointSection(Section):
    """What a resumed run goes on from. Steps taken after it are taken again, on the archived groups."""

    every: int = Field(
        25, ge=0, description="Steps between two checkpoints; 0 makes none, so that resuming takes all steps again."
    )
    keep: int = Field(2, ge=1, description="How many checkpoints stay: the newest ones.")


class WeightSyncSection(Section):
    """The way of the weights back to the actors."""

    transport: Literal["auto", "shared_memory", "gloo", "nccl", "disk"] = Field(
        "auto",
        description="How weights travel: `shared_memory` on one host, broadcast by `gloo` or, between GPUs, `nccl`, "
        "or files on a `disk` that all hosts see. `auto`: nccl where learner and actors have GPUs, else shared memory "
        "where all are on one host, else gloo.",
    )
    in_flight: Literal["keep", "wait", "abort"] = Field(
        "keep",
        description="What an update does to responses that are being sampled: `keep` goes on with them under the new "
        "weights, `wait` lets them end first, `abort` samples them again from the start.",
    )
    recompute: bool = Field(
        True,
        description="Whether kept responses recompute their key-value cache under the new weights; else they attend to "
        "what older weights made. New responses never do.",
    )
    timeout_s: PositiveSeconds = Field(
        120.0,
        le=86_400,
        description="The most, in seconds, that each call of an update may take: to stage, prepare, send, load or "
        "serve a version. Each part of a broadcast has a third of it.",
    )
    bucket_bytes: int = Field(
        64 << 20, ge=1 << 10, description="The most that a broadcast sends at once; two such buckets are held."
    )
    host: str | None = Field(
        None,
        min_length=1,
        description="Address at which actors on other hosts reach the learner. Absent: loopback on one host, else the "
        "learner's address on Ray.",
    )
    canary_every: int = Field(
        25,
        ge=0,
        description="Versions between two comparisons of every engine's log-probs with the learner's at the same "
        "version; 0 leaves them out.",
    )
    canary_prompts: int = Field(4, ge=1, description="Held-out prompts that each engine answers for a comparison.")
    canary_limit: float = Field(
        0.2, gt=0, description="Mean difference of the two, in nats a token, at which the run stops."
    )
    folder: Path | None = Field(
        None,
        description="Where `disk` writes versions: a folder that all hosts see. Absent: `weights` in the run folder.",
    )

    @field_validator("host")
    @classmethod
    def one_address(cls, host: str | None) -> str | None:
        if host in ("0.0.0.0", "::"):
            raise ValueError(f"{host} is every address of a host: name one at which actors reach the learner")
        return host

    @property
    def caches_are_recomputed(self) -> bool:
        """Whether no token attends to key-value cache of older weights than its own."""
        # Where requests are not kept, no cache is of use.
        return self.recompute or self.in_flight != "keep"


class EvaluationSection(Section):
    """The held-out set, decoded greedily at one policy version."""

    prompts: int = Field(512, ge=1, description="Held-out prompts.")
    every: int = Field(25, ge=0, description="Steps between evaluations; 0 evaluates before and after only.")
    success: float = Field(1.0, allow_inf_nan=False, description="Smallest reward that counts as a success.")


class MetricsSection(Section):
    """Prometheus metrics."""

    host: str = Field("127.0.0.1", description="Address the metrics server binds to.")
    port: int = Field(0, ge=0, le=65_535, description="Its port; 0 takes a free one. It is printed at the start.")


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

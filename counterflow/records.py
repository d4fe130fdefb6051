"""What a run reports about itself: frozen records that flow from the learner and actors to metrics, table and report.

Plain data, importable without torch, Ray or vLLM. Times are seconds since the run's start.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as the learner and the supervisor saw it."""

    step: int
    """1 for the first optimizer step."""
    policy_version: int
    """Version after the step."""
    time_s: float
    groups: int
    sequences: int
    tokens: int
    """Response tokens that carried gradient."""
    reward_mean: float
    lag_mean: float
    lag_p50: float
    lag_p95: float
    lag_max: int
    lag_in_flight_mean: float
    lag_in_queue_mean: float
    lag_in_learner_mean: float
    """Parts of the mean lag, which they add up to; see `weight_sync/lag.py`."""
    lag_histogram: list[int]
    """Trained tokens by lag: entry i counts tokens of lag i."""
    lag_histogram_weighted: list[float]
    """The same, each token counted by its weight in the loss, of sum 1; empty where no token has weight."""
    cache_age_mean: float
    """How many versions older than itself a key-value cache may be that a token attended to."""
    kl_reference: float
    """KL(pi || ref) per token by k3, nats."""
    kl_behavior_k1: float
    kl_behavior_k3: float
    """KL(mu || pi) per token by k1 and k3, nats."""
    ess_token: float
    ess_sequence: float
    """Effective sample size over N, of token ratios and of sequence ratios, in (0, 1]."""
    chi2: float
    """E[rho^2] - 1 over tokens."""
    truncated_weights: float
    """Share of tokens whose importance weight was capped, clipped or masked."""
    entropy: float
    grad_norm: float
    learning_rate: float
    loss: float
    zero_signal_groups: float
    """Share of groups whose task rewards are all equal."""
    truncated_responses: float
    failed_samples: int
    response_tokens_mean: float
    wait_s: float
    train_s: float
    tokens_generated: int
    """Response tokens that arrived in the buffer since the run began."""
    learner_tokens_per_s: float
    actors_tokens_per_s: float
    buffer_groups: int
    publish_debt: int
    """Versions made by the learner that the actors do not serve yet."""
    offered_tokens: list[int] = field(default_factory=list)
    """By bucket of prompt length (`counterflow/lengths.py`): response tokens that came to be trained, or dropped."""
    trained_tokens: list[float] = field(default_factory=list)
    """The same, each by the share of its loss that the policies for stale and truncated samples left."""
    stale_groups: list[int] = field(default_factory=list)
    stale_samples: list[int] = field(default_factory=list)
    stale_tokens: list[int] = field(default_factory=list)
    """By bucket of prompt length: what the staleness policy touched, or dropped since the step before."""
    skipped_updates: int = 0
    """Optimizer steps whose gradient was not finite, which left the weights as they were."""
    reference_version: int = 0
    """Version that the reference is of."""


@dataclass(frozen=True)
class EvaluationRecord:
    """The held-out set, decoded greedily at one policy version."""

    step: int
    policy_version: int
    time_s: float
    successes: int
    n: int
    low: float
    high: float
    """95 % Wilson interval of the success rate."""
    duration_s: float

    @property
    def rate(self) -> float:
        """Successes over n."""
        return self.successes / self.n if self.n else 0.0


@dataclass(frozen=True)
class Interval:
    """Something a process did, from `start_s` to `end_s`."""

    owner: str
    """`learner`, `actor 0`, ..."""
    activity: str
    """`train`, `wait`, `stage` of the learner; `generate`, `update`, `evaluate` of an actor."""
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Ledger:
    """Where every group is. Closes when generated = trained + buffered + in_flight + dropped, in groups and tokens."""

    generated: int
    trained: int
    buffered: int
    in_flight: int
    dropped: dict[str, int]
    tokens_generated: int
    tokens_trained: int
    tokens_buffered: int
    tokens_dropped: dict[str, int]
    policy_version: int = 0
    """Version that the last committed step made."""
    bytes_buffered: int = 0
    """Size of the groups that are buffered, as Arrow."""
    reissued: int = 0
    """Leases that ran out and were given out again."""
    regenerated: int = 0
    """Groups that a server, started again, had lost, and that are generated again."""
    strangers: int = 0
    """Entries on the stream that no actor of this run had added; the latest are in quarantine."""

    @property
    def missing_groups(self) -> int:
        """Groups that were generated and are nowhere; negative: that are somewhere and were not generated."""
        return self.generated - self.trained - self.buffered - self.in_flight - sum(self.dropped.values())

    @property
    def missing_tokens(self) -> int:
        """The same of tokens."""
        return self.tokens_generated - self.tokens_trained - self.tokens_buffered - sum(self.tokens_dropped.values())

    @property
    def closes(self) -> bool:
        """Whether both equations hold."""
        return self.missing_groups == self.missing_tokens == 0

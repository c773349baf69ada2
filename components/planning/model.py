"""The inputs of a plan: how fast the parts are (`Calibration`) and how they are run (`Settings`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import Config, ConfigError, derive
from ..config.derived import published_as_pulled, publishes_as_pulled
from ..replay.admission import AdmissionRule
from .lengths import Distribution


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a job is run. Letters as in docs/staleness.md; `pull_every` counts optimizer steps.

    `generators` are engines of `gpus_per_generator` devices each, `trainers` are ranks of one device each.
    """

    groups_per_step: int  # P
    group_size: int  # G
    generators: int = 1
    trainers: int = 1
    gpus_per_generator: int = 1
    max_policy_lag: int = 2  # L
    target_policy_lag: int = 2  # T
    reorder_window: int = 1  # W
    updates_per_batch: int = 1  # u
    publish_every: int = 1  # n
    pull_every: int = 1
    publishes_as_pulled: bool = False  # as far as the lag allows: `config.derived`
    in_flight: str = "recompute"
    max_groups_in_flight: int | None = None  # of one generator

    @property
    def rule(self) -> AdmissionRule:
        """Raises ValueError if the rule cannot hold."""
        return AdmissionRule(
            groups_per_batch=self.groups_per_step,
            updates_per_batch=self.updates_per_batch,
            publish_every=self.publish_every,
            reorder_window=self.reorder_window,
            target_lag=self.target_policy_lag,
            max_lag=self.max_policy_lag,
        )

    @property
    def max_outstanding_groups(self) -> int:
        return self.rule.num_admissible(published=0)

    @property
    def least_publish_every(self) -> int:
        """With the smallest lags."""
        return 1 if self.publishes_as_pulled else self.publish_every

    @property
    def num_gpus(self) -> int:
        return self.generators * self.gpus_per_generator + self.trainers

    def is_possible(self) -> bool:
        try:
            return self.rule is not None
        except ValueError:
            return False

    def with_lag(self, max_policy_lag: int) -> Settings:
        """The same settings with another bound. The target follows it, unless it was set lower on purpose."""
        aimed_lower = self.target_policy_lag < self.max_policy_lag
        target = min(self.target_policy_lag, max_policy_lag) if aimed_lower else max_policy_lag
        return replace(self, max_policy_lag=max_policy_lag, target_policy_lag=target)._published()

    def with_window(self, reorder_window: int) -> Settings:
        """The same settings with another window."""
        return replace(self, reorder_window=reorder_window)._published()

    def _published(self) -> Settings:
        """As often as a run with this bound and window publishes."""
        if not self.publishes_as_pulled:
            return self
        P, u, W, T = self.groups_per_step, self.updates_per_batch, self.reorder_window, self.target_policy_lag
        return replace(self, publish_every=published_as_pulled(self.pull_every, P, u, W, T))

    @classmethod
    def of(cls, config: Config) -> Settings:
        """The settings of a run of `async_rl` with this config. Raises ConfigError where devices are shared."""
        numbers = derive(config)
        if config.cluster.shares_devices:
            raise ConfigError(
                "cluster.placement",
                got=config.cluster.placement,
                expected="separate: only runs whose engines and trainer have devices of their own can be predicted",
                fix="plan with cluster.placement=separate",
            )
        gpus = numbers.gpus["generator"] // config.rollout.num_generators
        return cls(
            groups_per_step=config.train.groups_per_step,
            group_size=max(1, round(config.samplings.mean_group_size)),
            generators=config.rollout.num_generators,
            trainers=config.train.num_ranks,
            gpus_per_generator=max(1, gpus),
            max_policy_lag=numbers.max_policy_lag,
            target_policy_lag=numbers.target_policy_lag,
            reorder_window=numbers.reorder_window,
            updates_per_batch=config.train.updates_per_batch,
            publish_every=numbers.publish_every,
            pull_every=config.rollout.pull_every,
            publishes_as_pulled=publishes_as_pulled(config),
            in_flight=config.staleness.in_flight,
            max_groups_in_flight=config.rollout.max_groups_in_flight,
        )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How fast the parts are; seconds and tokens. The defaults are an ideal machine: everything else takes no time.

    One engine: a forward pass takes `pass_s` + `token_s` per token in it, at most `max_sequences` run at a
    time, at most `prefill_budget` tokens of prompts are in a pass.
    `generate_slowdown` >= 1: how much longer an engine takes while the trainer computes (they share a machine).
    `latency_s`: a group's fixed delay, however busy the engine is (to the engine and back). `environment_s`: seconds
    that a group spends outside the engine, without using it. `kept_frac`: share of generated groups that are not
    filtered.

    The trainer: `train_token_s` per token of prompts and responses on one rank, `train_slowdown` >= 1 times as long
    while an engine generates (they share a machine), `optim_s` once per step, `publish_s` (copying the weights, scoring
    the canary) once per version, `overhead_s` between steps. `train_factors`: how the time of equal batches was seen to
    vary, mean 1. Weights: `upload_s` during the next step, then an engine pauses for `pause_s`, and its new tokens are
    withheld for `canary_s` and, where something is running, two passes. `hand_off_s`: from the last group of a batch to
    the trainer's start on it.

    `settings` are those of the measured run; `measured_step_s` is its step time (None: nothing was measured).
    """

    settings: Settings
    lengths: Distribution
    prompt_tokens: float = 0.0
    shared_prompt_tokens: float = 0.0  # of these, prefilled once per group (whole blocks of the prefix cache)
    pass_s: float
    token_s: float
    max_sequences: int = 256
    prefill_budget: int = 2048
    generate_slowdown: float = 1.0
    latency_s: float = 0.0
    environment_s: Distribution | None = None
    kept_frac: float = 1.0
    train_token_s: float
    train_slowdown: float = 1.0
    train_factors: tuple[float, ...] = (1.0,)
    optim_s: float = 0.0
    publish_s: float = 0.0
    overhead_s: float = 0.0
    upload_s: float = 0.0
    pause_s: float = 0.0
    canary_s: float = 0.0
    hand_off_s: float = 0.0
    measured_step_s: float | None = None

    def faster_generators(self, factor: float) -> Calibration:
        """The same calibration with engines that are `factor` times as fast (below 1: slower)."""
        return replace(self, pass_s=self.pass_s / factor, token_s=self.token_s / factor)

    def prefill_tokens(self, group_size: int) -> float:
        """Prompt tokens that a group's start puts through the engine."""
        return self.shared_prompt_tokens + (self.prompt_tokens - self.shared_prompt_tokens) * group_size

    def train_tokens(self, group_size: int) -> float:
        """Mean tokens of a group in the trainer's passes."""
        return (self.prompt_tokens + self.lengths.mean) * group_size

"""Sections for what passes between generators and trainer: rollouts, the staleness bound, the buffer, the weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ..algorithms.mix import MixedIn
from ..section import Partial, Section
from ..weights import Checksum, Tolerance
from .effect import ANY, ONE_RUN, ROLLOUTS, SAMPLED, OnlyWith
from .engines import HIGHEST_TEMPERATURE, LEAST_TEMPERATURE, EngineOptions, name_of, options_of
from .inputs import TaskSource
from .names import PRIORITIES
from .plugins import OperatorName
from .transports import transport_kind

REUSED = OnlyWith(lambda c: c.replay.max_uses > 1, "replay.max_uses is above 1")
OPERATED = OnlyWith(lambda c: bool(c.replay.operators), "replay.operators is set")
POOLED = OnlyWith(lambda c: c.replay.operator_processes > 0, "replay.operator_processes is above 0")
CALIBRATED = OnlyWith(
    lambda c: c.param_server.served_tolerance == "auto" and c.model.dtype != "float32",
    "param_server.served_tolerance is auto and model.dtype bfloat16 or float16",
)
FROM_FEW = OnlyWith(
    lambda c: c.rollout.top_k is not None,
    "rollout.top_k is set: which tokens were left is kept for each token, and there may be no more than that",
)
RANKED = OnlyWith(lambda c: c.replay.sampling == "priority", "replay.sampling is priority")


MAX_TOP_K = 512
"""The ids of all of these travel with each token."""


class RolloutConfig(Section):
    """How completions are generated."""

    num_generators: PositiveInt = Field(default=1, description="number of engines, each in its own process")
    temperature: Annotated[float, SAMPLED] = Field(
        default=1.0,
        ge=LEAST_TEMPERATURE,
        le=HIGHEST_TEMPERATURE,
        description="sampling temperature, 0.01 to 2 (vLLM's range); the trainer divides its logits by it too",
    )
    max_prompt_tokens: PositiveInt = Field(default=1024, description="longest prompt allowed; see overlong_prompts")
    overlong_prompts: Literal["drop", "truncate", "refuse"] = Field(
        default="drop",
        description="what happens to tasks with longer prompts: left out, cut at the beginning (both "
        "are counted), or the run ends",
    )
    max_response_tokens: Annotated[PositiveInt, SAMPLED] = Field(
        default=1024, description="longest response; longer ones are cut"
    )
    min_response_tokens: Annotated[NonNegativeInt, ROLLOUTS] = Field(
        default=0, description="shortest answer of training: nothing that ends it is sampled before; of each turn"
    )
    top_k: Annotated[PositiveInt | None, ROLLOUTS] = Field(
        default=None,
        le=MAX_TOP_K,
        description="training answers are sampled from the K likeliest tokens; the trainer renormalises over the same "
        "ones; null: from all",
    )
    top_p: Annotated[float, ROLLOUTS, FROM_FEW] = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="with top_k: of these, from the likeliest that hold this much of their probability",
    )
    max_model_len: Annotated[PositiveInt, ANY] = Field(
        default=2048, description="maximum length of prompt plus response"
    )
    timeout_s: PositiveFloat = Field(
        default=600.0,
        description="seconds a group may take before it is retried; waiting in the engine's queue does not count",
    )
    retries: NonNegativeInt = Field(default=2, description="how often a group is retried before it fails for good")
    max_groups_in_flight: PositiveInt | None = Field(
        default=None,
        description="groups, with their environments, that one generator works on at a time; null: as many as the lag "
        "bound and the engine have room for",
    )
    engine_stall_s: PositiveFloat = Field(
        default=300.0,
        description="an engine that has work but gives neither a token nor an answer for this many seconds counts as "
        "hung, and is started again (cluster.restarts)",
    )
    sleep_level: Annotated[Literal[1, 2], OnlyWith(lambda c: c.cluster.in_turns, "cluster.placement is turns")] = Field(
        default=2,
        description="what an engine gives back while the trainer has its devices: 1: its KV cache (and on a GPU it "
        "moves its weights to the CPU's memory); 2: KV cache and weights",
    )
    pull_every: PositiveInt = Field(
        default=1,
        description="pull weights at most once every N optimizer steps, unless a group needs newer ones",
    )
    pull: Literal["newest", "oldest"] = Field(
        default="newest",
        description="which published version a pull takes: the newest or, to study lag, the oldest that "
        "waiting groups may start under",
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="name: the inference engine: vllm (the default), hf, or your own pkg.module:Class; the rest: "
        "its own settings (for vllm, the arguments of AsyncEngineArgs)",
    )

    @property
    def engine_name(self) -> str:
        return name_of(self.engine)

    @property
    def engine_options(self) -> EngineOptions:
        """The engine's own settings: all of `engine` but its name."""
        return options_of(self.engine)


class StalenessConfig(Section):
    """How far the generating policy may lag behind the trainer."""

    max_policy_lag: Annotated[NonNegativeInt, ROLLOUTS] = Field(
        default=2, description="hard bound, in optimizer steps: no older token is ever trained on; 0 is synchronous RL"
    )
    target_policy_lag: NonNegativeInt | None = Field(
        default=None, description="the lag that admission aims for; null: max_policy_lag"
    )
    reorder_window: PositiveInt | None = Field(
        default=None,
        description="1 + how often a slow group may be overtaken; null: 1, or groups_per_step where replay.sampling or "
        "replay.sampler chooses and the bound allows it",
    )
    in_flight: Literal["recompute", "keep", "off"] = Field(
        default="recompute",
        description="what happens to running requests at a pull: rebuild their KV cache (recompute, "
        "exact), keep it (keep, faster), or let them finish first (off)",
    )


class AuxiliaryBuffer(Partial, TaskSource, MixedIn):
    """One of `replay.buffers`. How its rows are read comes from `task`, where it does not set that."""

    batch_size: PositiveInt = Field(default=64, description="answers, or groups, in each optimizer step")
    epochs: PositiveFloat | None = Field(
        default=None, description="passes over its samples, after which it is left out; null: without end"
    )

    def source(self) -> dict[str, Any]:
        """The settings of where its samples come from: those that are set."""
        own = {*MixedIn.model_fields, "batch_size", "epochs"}
        return {"limit": None, "order": "shuffle", "difficulty_key": None} | self.model_dump(exclude=own)


class ReplayConfig(Section):
    """The buffer between generators and trainer."""

    max_uses: PositiveInt = Field(
        default=1,
        description="in how many batches a group may be used, each within the lag bound; a batch has groups_per_step / "
        "max_uses new groups",
    )
    cooldown: Annotated[NonNegativeInt, REUSED] = Field(
        default=0, description="number of batches between two uses of a group"
    )
    sampling: Literal["admission", "priority"] = Field(
        default="admission",
        description="which groups are trained on first, within the reorder window and among those that "
        "may be reused: the "
        "oldest (admission), or those with the highest priority",
    )
    priority: Annotated[str, RANKED] = Field(
        default="spread",
        description=f"sampling=priority: how groups are ranked: {', '.join(PRIORITIES)}, or pkg.mod:function",
    )
    priority_decay: Annotated[NonNegativeFloat, RANKED] = Field(
        default=0.1, description="subtracted from a group's priority each time it is used"
    )
    sampler: str | None = Field(
        default=None,
        description="your own torchrl Sampler, which chooses among the groups that may come next: pkg.mod:function, "
        "called with the most groups it will hold; null: replay.sampling alone",
    )
    storage: str | None = Field(
        default=None,
        description="your own torchrl Storage of ragged TensorDicts, one per group: pkg.mod:function, called with the "
        "most groups it will hold; null: in memory",
    )
    buffers: dict[str, AuxiliaryBuffer] = Field(
        default_factory=dict,
        description="further samples in every optimizer step, by name: expert answers, or stored experiences; outside "
        "of the lag bound, and counted by themselves",
    )
    keep_groups: Annotated[bool, ONE_RUN] = Field(
        default=False,
        description="keep the groups that were trained on, on disk for good: groups/ in the run's folder (of a train "
        "job: in explorer.folder), which task.name=store reads",
    )
    operators: list[OperatorName | dict[OperatorName, dict[str, Any]]] = Field(
        default_factory=list,
        description="operators applied to finished groups, in order: names, or {name: {option: value}}",
    )
    operator_processes: Annotated[NonNegativeInt, OPERATED] = Field(
        default=0,
        description="processes that apply the operators, beside the buffer, on the driver's machine; 0: the buffer "
        "itself does, and answers nobody meanwhile",
    )
    operator_timeout_s: Annotated[PositiveFloat, POOLED] = Field(
        default=300.0,
        description="with operator_processes: seconds that the operators may take for one group; then the run ends and "
        "names the operator",
    )

    @property
    def chooses(self) -> bool:
        """Whether the order of admission does not decide alone which groups come next."""
        return self.sampling != "admission" or self.sampler is not None


CALIBRATED_LARGEST, CALIBRATED_MEAN = 3.0, 0.3
"""Nats. The faults that the canary alone can see (tensors exchanged within a layer, an old prefix cache) are larger."""
RESOLUTION = {"bfloat16": 2**-7, "float16": 2**-10}
"""Relative distance of neighbouring numbers, by type: a calibration takes no gap for smaller, in nats."""


class ParamServerConfig(Section):
    """How weights travel from the trainer to the engines."""

    publish_every: PositiveInt | None = Field(
        default=None,
        description="optimizer steps between published versions (null: rollout.pull_every, where lag bound and "
        "evaluations leave room for it, else 1)",
    )
    transport: str = Field(
        default="object_store",
        description="how weights travel: object_store (Ray's), files (a folder others may read), broadcast (from rank "
        "0's memory), ipc (shared memory of one machine), or pkg.mod:Class",
    )
    transport_options: dict[str, Any] = Field(
        default_factory=dict,
        description="options of the transport; files: folder (of the run by default), keep (versions, 2), fsync "
        "(true); broadcast: backend (socket, gloo; nccl, where each end has a GPU); ipc: memory (host; device, by "
        "CUDA IPC, where trainer and engine share one GPU)",
    )
    delta: bool = Field(
        default=False,
        description="send only what changed since the version that an engine has, over any transport; for bfloat16 and "
        "small learning rates, at the cost of one more copy of the weights in rank 0 and in each collector",
    )
    checksum: Checksum | None = Field(
        default=None,
        description="how bytes are checked: xxh3_128 finds accidents, sha256 (slower) forgeries; null: by transport",
    )
    bucket_mb: PositiveInt = Field(
        default=256,
        description="size in MB of the buckets in which weights leave the trainer (a larger tensor gets "
        "its own bucket); rank 0 of several needs memory for one",
    )
    canary_prompts: PositiveInt = Field(
        default=4,
        description="at most this many prompts, cut at 160 tokens, check the weights an engine serves after each pull",
    )
    canary_frac: PositiveFloat = Field(
        default=0.05,
        description="share of a step's computation that the trainer may spend on these prompts: where that is not "
        "enough for all of them, fewer are scored, but always one of each kind",
    )
    canary_tokens: PositiveInt | None = Field(
        default=None,
        description="tokens in each context that checks the prefix cache; must be more than one of its blocks; null: "
        "one block plus 16 tokens, or 160 where the engine's block is not known",
    )
    read_back: bool = Field(
        default=True,
        description="after each load, beside generation, compare every weight in the engine with what was published",
    )
    quarantine_pulls: NonNegativeInt = Field(
        default=2,
        description="how many more pulls an engine gets to recover after it fails a check",
    )
    served_tolerance: PositiveFloat | Literal["auto"] = Field(
        default="auto",
        description="largest allowed logprob gap between engine and trainer, in nats; auto: 1e-4 if model.dtype is "
        "float32, else a multiple of the gap that each engine's own loads have shown",
    )
    tolerance_factor: Annotated[float, CALIBRATED] = Field(
        default=2.0,
        ge=1.0,
        description="served_tolerance=auto: that multiple, of the mean gap; of the largest 3 times it",
    )

    def tolerance_in(self, dtype: str) -> Tolerance:
        """Of canary gaps where trainer and engine compute in this type."""
        if self.served_tolerance != "auto":
            return Tolerance(self.served_tolerance)
        if dtype == "float32":
            return Tolerance(1e-4)
        return Tolerance(
            largest=CALIBRATED_LARGEST,
            mean=CALIBRATED_MEAN,
            factor=self.tolerance_factor,
            least=RESOLUTION[dtype],
        )

    @property
    def checked_with(self) -> Checksum:
        return self.checksum or transport_kind(self.transport).checksum

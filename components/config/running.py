"""Sections for how a run is watched and where its processes live."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from ..section import Section
from .effect import GENERATION, ROLLOUTS, TRAINING, OnlyWith
from .names import check_name
from .paths import folder_name

WATCHED = OnlyWith(lambda c: c.monitor.suspects, "monitor.suspects is true")
TO_WANDB = OnlyWith(lambda c: c.monitor.wandb != "off", "monitor.wandb is not off")
TAGGED = OnlyWith(
    lambda c: {c.monitor.wandb, c.monitor.mlflow} != {"off"}, "monitor.wandb or monitor.mlflow is not off"
)
LOGGED = OnlyWith(
    lambda c: {c.monitor.wandb, c.monitor.mlflow, c.monitor.trackio} != {"off"},
    "monitor.wandb, monitor.mlflow or monitor.trackio is not off",
)
RESTARTED = OnlyWith(lambda c: c.cluster.restarts > 0, "cluster.restarts is above 0")
NOT_IN_TURNS = OnlyWith(lambda c: not c.cluster.in_turns, "cluster.placement is not turns")
JOINED = OnlyWith(lambda c: c.cluster.address is not None, "cluster.address is set")
ON_CPU = OnlyWith(lambda c: c.cluster.device == "cpu", "cluster.device is cpu")


class MonitorConfig(Section):
    """What a run shows while it runs, in addition to metrics.jsonl."""

    console: Literal["auto", "live", "plain", "off"] = Field(
        default="auto",
        description="progress in the terminal: a bar (live), lines (plain), neither (off); auto: a bar on a terminal, "
        "lines elsewhere",
    )
    wandb: Literal["off", "offline", "online"] = Field(default="off", description="also log to Weights & Biases")
    mlflow: str = Field(
        default="off",
        pattern=r"^(off|local|https?://[^\s@]+)$",
        description="also log to MLflow: off, local (files under mlruns/ in the stage's folder), or the address of a "
        "server (without a password: MLflow reads MLFLOW_TRACKING_USERNAME, _PASSWORD and _TOKEN)",
    )
    trackio: str = Field(
        default="off",
        pattern=r"^(off|local|https?://[^\s@?]+|[\w.-]+/[\w.-]+)$",
        description="also log to trackio: off, local (its own folder, TRACKIO_DIR), OWNER/SPACE of Hugging Face, or "
        "the address of a server (trackio reads TRACKIO_WRITE_TOKEN)",
    )
    tensorboard: bool = Field(default=False, description="also log to TensorBoard files")
    sinks: list[str] = Field(
        default_factory=list, description='more places for metrics: your own classes as "pkg.mod:Class" (leeway.Sink)'
    )
    id: Annotated[str | None, LOGGED] = Field(
        default=None,
        pattern=r"^[\w-]+$",
        description="name of this run in wandb, MLflow and trackio; a run there that has it is continued. null: they "
        "make one, and a resumed run continues that",
    )
    entity: Annotated[str | None, TO_WANDB] = Field(
        default=None, description="user or team of wandb; null: its default"
    )
    group: Annotated[str | None, LOGGED] = Field(
        default=None, description="group of the run in wandb and trackio, a tag in MLflow; e.g. the runs of one study"
    )
    tags: Annotated[list[str], TAGGED] = Field(default_factory=list, description="tags of the run in wandb and MLflow")
    table_every: Annotated[NonNegativeInt, ROLLOUTS, LOGGED] = Field(
        default=20, description="steps between two tables of rollouts in wandb, MLflow and trackio; 0: none"
    )
    rollouts_per_step: Annotated[NonNegativeInt, ROLLOUTS] = Field(
        default=16,
        description="trajectories written to rollouts/ per step, one whole group among them if that is at most half; "
        "0: none",
    )
    suspects: Annotated[bool, ROLLOUTS] = Field(
        default=True,
        description="count full-score answers that look as if they were rewarded without a solution, and list them in "
        "suspects.jsonl",
    )
    suspects_warn_frac: Annotated[float, WATCHED] = Field(
        default=0.05, ge=0.0, le=1.0, description="share of such answers among full scores above which the run warns"
    )

    @field_validator("sinks")
    @classmethod
    def _can_be_found(cls, names: list[str]) -> list[str]:
        for name in names:
            check_name("monitor.sinks", name, (), kind="Class")
        return names


class ClusterConfig(Section):
    """Processes, cores, GPUs and deadlines."""

    address: str | None = Field(
        default=None, description="Ray cluster to join (docs/cluster.md); null: start one on this machine"
    )
    device: Literal["cuda", "cpu"] = Field(default="cuda", description="what engines and trainers run on")
    placement: Annotated[Literal["separate", "turns", "together"], ROLLOUTS] = Field(
        default="separate",
        description="separate: engines and trainer have devices of their own; turns: the same ones, and while one side "
        "computes the other has given its memory back; together: the same ones at the same time, with room for both "
        "(rollout.engine.gpu_memory_utilization)",
    )
    cpus_per_generator: Annotated[PositiveInt, GENERATION] = Field(default=1, description="cores per engine")
    cpus_per_trainer: Annotated[PositiveInt, TRAINING] = Field(default=1, description="cores per trainer rank")
    pin_cores: Annotated[bool, ON_CPU] = Field(
        default=True,
        description="pin engines and trainers to separate cores, and keep collectors, buffer and parameter server off "
        "the engines' cores, driver and Ray's own processes too where the trainer has room for them (device cpu); a "
        "collector with engine hf shares those of its engine where no core is free",
    )
    engine_cores: Annotated[list[NonNegativeInt] | None, GENERATION] = Field(
        default=None,
        description="cores for engines, on each machine of a joined cluster; null: those before the trainers'",
    )
    trainer_cores: Annotated[list[NonNegativeInt] | None, TRAINING] = Field(
        default=None, description="cores for trainers, on each machine of a joined cluster; null: the last ones"
    )
    kv_cache_gib: Annotated[PositiveFloat, ON_CPU] = Field(
        default=1.0, description="KV cache per engine in GiB (device cpu)"
    )
    object_store_mb: int | None = Field(
        default=None, ge=80, description="Ray object store in MB; null: what Ray takes (a third of memory)"
    )
    restarts: Annotated[NonNegativeInt, GENERATION, NOT_IN_TURNS] = Field(
        default=10,
        description="how often a stage starts generators again that died, hang or are stopped; what they held is "
        "issued again; 0: the first death ends the run, as it does with placement turns",
    )
    restart_backoff_s: Annotated[PositiveFloat, GENERATION, RESTARTED] = Field(
        default=1.0,
        description="wait before a generator is started again that has not served since its last start; doubled each "
        "time, up to a minute",
    )
    silent_s: Annotated[PositiveFloat, JOINED] = Field(
        default=30.0,
        description="seconds without an answer after which a machine of a joined cluster counts as lost, and what its "
        "generators held is issued again; Ray itself takes about 65 s for a link that is cut",
    )
    start_timeout_s: PositiveFloat = Field(
        default=300.0,
        description="seconds within which every process must have started; a generator that takes the place of a lost "
        "one waits for room before, for as long as the others go on",
    )
    step_timeout_s: PositiveFloat = Field(
        default=3600.0, description="seconds that any single wait may last without progress"
    )
    stop_timeout_s: PositiveFloat = Field(
        default=600.0,
        description="seconds after an interrupt to finish the current step and save; then everything is killed",
    )

    @property
    def shares_devices(self) -> bool:
        return self.placement != "separate"

    @property
    def in_turns(self) -> bool:
        return self.placement == "turns"


class ServeConfig(Section):
    """An OpenAI-compatible address for clients outside of the run."""

    host: str = Field(
        default="127.0.0.1", description="address that it listens on; 0.0.0.0: reachable from other machines"
    )
    port: int = Field(default=8000, ge=0, le=65535, description="its port; 0: a free one")
    token_variable: str | None = Field(
        default=None,
        description="environment variable with the tokens of the clients, separated by commas, at least 16 characters "
        "each; every client sees its own answers alone; null: one token is made and printed",
    )
    model: str | None = Field(default=None, description="name of the model for clients; null: that of its folder")
    timeout_s: PositiveFloat = Field(default=600.0, description="seconds within which an answer must be complete")
    max_requests: PositiveInt = Field(
        default=256, description="requests of one client at a time, and choices (n) that are sampled for it"
    )
    keep_tokens: PositiveInt = Field(
        default=1_000_000,
        description="tokens of past conversations that are kept, to be continued, rewarded and committed; where there "
        "are more, the oldest of the client that has the most are forgotten",
    )


class ExplorerConfig(Section):
    """How the jobs of one run, `explore` and `train`, find each other and tell that the other is gone."""

    name: Annotated[str, AfterValidator(folder_name)] = Field(
        default="explorer", description="name of this job among the run's explorers"
    )
    tasks: Literal["trainer", "own"] = Field(
        default="trainer",
        description="whose tasks it works on: those that the trainer hands out, or its own (task.*), each of which is "
        "trained on once",
    )
    folder: str | None = Field(
        default=None,
        description="folder that both jobs reach, where they meet; null: meeting/ in the run's own (output_dir, "
        "project and name)",
    )
    wait_s: PositiveFloat = Field(
        default=86400.0, description="seconds that a job waits for the other one, at its start and whenever it is gone"
    )
    silent_s: PositiveFloat = Field(
        default=30.0,
        description="seconds without a sign of life after which an explorer counts as lost, and what it held is issued "
        "again; it may come back",
    )


class LogConfig(Section):
    """The logs under logs/, and the spans under spans/."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="lowest level that is logged"
    )
    spans: bool = Field(
        default=True, description="record what every part does and when, for `leeway trace` and `leeway watch`"
    )
    ray_timeline: bool = Field(
        default=False,
        description="at the end, also keep what Ray recorded of its calls; `leeway trace` puts it beside the spans",
    )

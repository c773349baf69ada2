"""The whole tree. Sections are named after the parts of the system that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PrivateAttr, model_validator

from ..redaction import hide
from ..section import Section
from .algorithm import AlgorithmConfig, with_preset
from .effect import GENERATION, GROUPS, JOBS, ROLLOUTS, SERVING, STUDY, TRAINING, OnlyWith
from .engines import ADDRESS_ENGINE
from .flow import ParamServerConfig, ReplayConfig, RolloutConfig, StalenessConfig
from .inputs import EnvConfig, EvalConfig, ModelConfig, TaskConfig, with_dtype
from .learning import CheckpointConfig, CriticConfig, FrontierConfig, OptimizerConfig, TrainConfig
from .paths import folder_name, user_path
from .plugins import use_folders
from .running import ClusterConfig, ExplorerConfig, LogConfig, MonitorConfig, ServeConfig
from .sampling import Samplings, samplings
from .secrets import fingerprints, secret_values, without_secrets

CRITIC = OnlyWith(lambda c: c.algorithm.needs_critic, "the advantage is a critic's (algorithm.name=ppo)")
FolderName = Annotated[str, AfterValidator(folder_name)]


class Config(Section):
    """Every setting of one recipe's run. Numbers that follow from several settings are in `derive(config)`."""

    project: FolderName = Field(default="leeway", description="folder of related runs")
    name: FolderName = Field(default="run", description="folder of this run")
    seed: NonNegativeInt = Field(default=0, description="seed for tasks, sampling and initial weights")
    output_dir: str = Field(default="runs", min_length=1, description="where runs are kept")
    plugins: Annotated[list[str], AfterValidator(use_folders)] = Field(
        default_factory=list, description="folders whose modules may be named in settings; sent to every machine"
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="the policy")
    task: TaskConfig = Field(default_factory=TaskConfig, description="where prompts come from")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="held-out evaluation")
    env: Annotated[EnvConfig, GENERATION] = Field(default_factory=EnvConfig, description="environment and reward")
    rollout: Annotated[RolloutConfig, GENERATION] = Field(default_factory=RolloutConfig, description="generation")
    staleness: Annotated[StalenessConfig, ROLLOUTS] = Field(
        default_factory=StalenessConfig, description="how far off-policy"
    )
    replay: Annotated[ReplayConfig, ROLLOUTS] = Field(default_factory=ReplayConfig, description="the buffer")
    param_server: Annotated[ParamServerConfig, ROLLOUTS] = Field(
        default_factory=ParamServerConfig, description="weight transfer"
    )
    algorithm: Annotated[AlgorithmConfig, GROUPS] = Field(default_factory=AlgorithmConfig, description="objective")
    critic: Annotated[CriticConfig, ROLLOUTS, CRITIC] = Field(
        default_factory=CriticConfig, description="value function, with algorithm.name=ppo"
    )
    optimizer: Annotated[OptimizerConfig, TRAINING] = Field(default_factory=OptimizerConfig, description="AdamW")
    train: Annotated[TrainConfig, TRAINING] = Field(default_factory=TrainConfig, description="steps and batches")
    frontier: Annotated[FrontierConfig, STUDY] = Field(
        default_factory=FrontierConfig, description="what the recipe frontier compares"
    )
    checkpoint: Annotated[CheckpointConfig, TRAINING] = Field(
        default_factory=CheckpointConfig, description="saved weights"
    )
    serve: Annotated[ServeConfig, SERVING] = Field(
        default_factory=ServeConfig, description="the address of `leeway serve`"
    )
    explorer: Annotated[ExplorerConfig, JOBS] = Field(
        default_factory=ExplorerConfig, description="jobs of their own for generation and training"
    )
    monitor: MonitorConfig = Field(default_factory=MonitorConfig, description="progress and loggers")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="processes and hardware")
    log: LogConfig = Field(default_factory=LogConfig, description="logs")
    stages: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="recipes to run in sequence, each with the settings that differ"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, tree: Any) -> Any:
        return with_dtype(with_preset(tree))

    _elsewhere: Literal["trainer", "generators"] | None = PrivateAttr(default=None)
    _references: dict[str, str] = PrivateAttr(default_factory=dict)
    """Dotted key -> text, of the settings that come from the environment; see `secrets`."""

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """A process that is sent the settings hides their secrets from then on."""
        super().__setstate__(state)
        hide(secret_values(self.model_dump(mode="json"), self._references))

    def from_environment(self, references: dict[str, str]) -> Config:
        """The same settings, of which these come from the environment."""
        self._references = references
        return self

    def written(self, *, loads_again: bool = False) -> dict[str, Any]:
        """All settings as JSON data without secrets: what may be logged, shown and kept.

        `loads_again`: as the run's own config.yaml, which also has the values of ordinary `env.variables`.
        """
        return without_secrets(
            self.model_dump(mode="json", exclude={"stages"}), self._references, loads_again=loads_again
        )

    def fingerprints(self) -> dict[str, str]:
        """Dotted key -> reference and mark of the value, of our own settings that come from the environment."""
        return fingerprints(self.model_dump(mode="json"), self._references)

    def of_half(self, elsewhere: Literal["trainer", "generators"]) -> Config:
        """The same settings, of a job that is one half of the run of this name; `elsewhere`: the other one.

        Weights travel in files, unless something else than the default was chosen.
        """
        p = self.param_server
        if p.transport == ParamServerConfig.model_fields["transport"].default:
            p = p.model_copy(update={"transport": "files"})
        half = self.model_copy(update={"param_server": p})
        half._elsewhere = elsewhere
        return half

    @property
    def samplings(self) -> Samplings:
        """How answers are sampled for training, by taskset."""
        return samplings(self.rollout, self.algorithm, self.task)

    @property
    def elsewhere(self) -> Literal["trainer", "generators"] | None:
        """The half of the run that is another job."""
        return self._elsewhere

    @property
    def run_dir(self) -> Path:
        """The folder of the whole run; a stage's own files are under `Stage.dir`. An explorer has its own in it."""
        folder = user_path(self.output_dir) / self.project / self.name
        return folder / "explorers" / self.explorer.name if self._elsewhere == "trainer" else folder

    @property
    def meeting_folder(self) -> Path:
        """Where the jobs of a run meet."""
        if self.explorer.folder is not None:
            return user_path(self.explorer.folder)
        return user_path(self.output_dir) / self.project / self.name / "meeting"

    def evaluated_at_address(self) -> Config:
        """The same settings, where the answers of `eval.address` are asked for: nothing is computed here."""
        evaluation, rollout = self.eval, self.rollout
        engine = {
            "name": ADDRESS_ENGINE,
            "url": evaluation.address,
            "model": evaluation.model,
            "key_variable": evaluation.key_variable,
            "timeout_s": rollout.timeout_s,
        }
        here = self.cluster.model_copy(update={"device": "cpu"})
        return self.model_copy(update={"rollout": rollout.model_copy(update={"engine": engine}), "cluster": here})

    def with_model_path(self, path: str | Path) -> Config:
        """The same settings, starting from the weights at `path` (the previous stage's)."""
        model = self.model.model_copy(update={"path": str(path), "init": None})
        return self.model_copy(update={"model": model})

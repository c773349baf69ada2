"""What a trainer rank is made from. Apart from the trainer: who starts ranks elsewhere loads neither it nor torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.flow import ParamServerConfig
from ..config.inputs import ModelConfig
from ..config.learning import CheckpointConfig, CriticConfig, OptimizerConfig, TrainConfig
from ..config.running import ClusterConfig
from ..lazy import torch

if TYPE_CHECKING:
    from ..algorithms.objective import Objective
    from ..weights import CanaryPrompts


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """What a rank is made from, the same for all ranks: its sections of the config, and what follows from others.

    `critic` None: there is no critic. `objective` is minimised for `total_steps`, over which the learning rate runs.
    `max_policy_lag` None: batches carry no policy tokens (supervised training). `max_length`: of the longest sequence,
    where a model's rotary embedding goes by that. `reference_path` None: where an objective needs a reference policy,
    it is the weights at `model.path`. `num_threads` 0: as many as torch takes.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    param_server: ParamServerConfig
    cluster: ClusterConfig
    critic: CriticConfig | None = None
    objective: Objective
    canary: CanaryPrompts
    total_steps: int
    max_policy_lag: int | None
    max_length: int | None = None
    reference_path: str | None = None
    num_threads: int
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        """What passes compute in, and what is published."""
        return getattr(torch, self.model.dtype)

    @property
    def head_dtype(self) -> torch.dtype | None:
        """What the output head computes in; None: in `dtype`."""
        return None if self.model.head_dtype is None else getattr(torch, self.model.head_dtype)

    def path_of(self, model: str | None) -> str:
        """The folder or hub id of another model of this run; None: the policy's own."""
        assert self.model.path is not None, "a model is built before ranks start"
        return self.model.path if model is None else os.path.expanduser(model)

"""Real trainers of tiny random models, what they are given, and what plain transformers says of it.

The fixtures `model_path` and `make` of tests/conftest.py are made of these.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.objective import Loss, Objective, PolicyObjective
from leeway.config.flow import ParamServerConfig
from leeway.config.inputs import ModelConfig
from leeway.config.learning import CheckpointConfig, OptimizerConfig, TrainConfig
from leeway.config.running import ClusterConfig
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.trainer.settings import TrainerSettings
from leeway.trainer.trainer import Trainer
from leeway.types import NO_VERSION, TrainBatch, Trajectory, batch_trajectories
from leeway.weights import CanaryPrompts, Manifest, check_bucket, read_bucket

VOCAB = 64
CANARY = CanaryPrompts(
    scored=[[5, 9, 33, 2, 60, 7, 7, 1], [1, 2, 3], [63, 0, 63, 0, 11, 12, 13, 50, 4, 4, 4]],
    cached=[[i * 7 % VOCAB for i in range(25)], [i * 5 % VOCAB for i in range(40)]],
)
# A large eps makes Adam's step nearly proportional to the gradient, so that weights tell small differences of it apart.
OPTIMIZER = OptimizerConfig(lr=0.5, eps=1.0, weight_decay=0.1, max_grad_norm=1e9, max_skipped_steps=0)
SECTIONS = {
    "model": ModelConfig(dtype="float32", attn="sdpa"),
    "optimizer": OPTIMIZER,
    # So that every test has several chunks.
    "train": TrainConfig(max_tokens_per_microbatch=10_000, logprob_chunk_tokens=7),
    "checkpoint": CheckpointConfig(),
    "param_server": ParamServerConfig(bucket_mb=1, canary_frac=10.0),  # the whole canary, however small the batches
    "cluster": ClusterConfig(device="cpu", step_timeout_s=40.0),
}


def save_model(folder: Path, *, tied: bool) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)  # zeros would hide a bias that is not published
    model.save_pretrained(folder)
    build_tokenizer(["12 + 34 = 46"]).save_pretrained(folder)
    return folder


def settings_of(path: Path, *, bucket_bytes: int = 1 << 20, **changes: Any) -> TrainerSettings:
    """Each change goes to the section that has a field of its name, else to the settings themselves.

    `bucket_bytes`: buckets may be smaller than a megabyte here.
    """
    changes |= {"path": str(path), "bucket_mb": bucket_bytes / 2**20}
    own: dict[str, Any] = {
        name: changes.pop(name, section).model_copy(
            update={field: changes.pop(field) for field in type(section).model_fields if field in changes}
        )
        for name, section in SECTIONS.items()
    }
    defaults: dict[str, Any] = {
        "objective": PolicyObjective(
            policy_loss=PPOClip(clip_low=0.2, clip_high=0.28), aggregation="seq_mean_token_mean"
        ),
        "canary": CANARY,
        "total_steps": 100,
        "max_policy_lag": 2,
        "num_threads": 1,
        "seed": 0,
    }
    return TrainerSettings(**own, **(defaults | changes))


def free_address() -> str:
    """Where ranks meet: at a file, because a port that is free now may be another's when they come."""
    return f"file://{_meetings().name}/{uuid.uuid4().hex}"


@functools.cache
def _meetings() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="leeway-meetings-")


SHARDED: dict[str, Any] = {"forward_prefetch": 1}
"""Settings with which FSDP shards a rank that is alone, as it otherwise does not on a CPU."""


def one_rank_trainer(path: Path, **changes: Any) -> Trainer:
    """For fixtures: `group_of_one_rank` ends what it leaves."""
    return Trainer(settings_of(path, **changes), rank=0, init_method=free_address())


def end_group() -> None:
    """Trainers of one rank share a process group, which stays: ranks that meet somewhere else need it gone."""
    if dist.is_initialized():
        dist.destroy_process_group()


def random_trajectories(seed: int, number: int, *, version: int = 0) -> list[Trajectory]:
    rng = random.Random(seed)
    out = []
    for _ in range(number):
        prompt, response = rng.randint(1, 9), rng.randint(1, 14)
        masked = rng.randint(0, response - 1) if rng.random() < 0.3 else 0
        out.append(
            Trajectory(
                prompt_tokens=[rng.randrange(VOCAB) for _ in range(prompt)],
                response_tokens=[rng.randrange(VOCAB) for _ in range(response)],
                loss_mask=[False] * masked + [True] * (response - masked),
                behavior_logprobs=[0.0] * masked + [rng.uniform(-5, -3) for _ in range(response - masked)],
                policy_versions=[NO_VERSION] * masked + [version] * (response - masked),
                reward=0.0,
                finish_reason="stop",
                text="",
            )
        )
    return out


def in_pairs(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Every second trajectory answers the prompt of the one before it."""
    return [
        dataclasses.replace(t, prompt_tokens=trajectories[i - i % 2].prompt_tokens) for i, t in enumerate(trajectories)
    ]


def batch_of(
    trajectories: Sequence[Trajectory], *, share: slice = slice(None), seed: int = 1, temperature: float = 1.0
) -> TrainBatch:
    """One rank's share of a step made of all `trajectories`."""
    rng = random.Random(seed)
    advantages = [rng.uniform(-2, 2) for _ in trajectories]
    return batch_trajectories(
        trajectories[share],
        advantages[share],
        num_sequences=len(trajectories),
        num_tokens=sum(sum(t.loss_mask) for t in trajectories),
        temperature=temperature,
    )


@dataclasses.dataclass
class Recorder(Objective):
    """An objective that writes down what it is given."""

    num_sums: int = 1
    num_maxima: int = 0
    seen: dict[int, float] = dataclasses.field(default_factory=dict)  # by place in the batch
    entropies: dict[int, float] = dataclasses.field(default_factory=dict)

    def loss(self, logprobs, entropy, tokens: Any, *, policy_version, num_sequences, num_tokens) -> Loss:
        places = tokens.batch_positions.tolist()
        assert not self.seen.keys() & set(places), "a token was trained on twice"
        self.seen |= dict(zip(places, logprobs.tolist(), strict=True))
        self.entropies |= dict(zip(places, entropy.tolist(), strict=True))
        return Loss(logprobs.sum() * 0.0, torch.zeros(1, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))

    def metrics(self, sums, maxima) -> dict[str, float]:
        return {}

    def of(self, trajectories: Sequence[Trajectory], index: int, which: str = "seen") -> list[float]:
        start = sum(len(t.response_tokens) for t in trajectories[:index])
        return [getattr(self, which)[start + i] for i in range(len(trajectories[index].response_tokens))]


def reference_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def reference_logprobs(model: Any, sequence: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-softmax [T, V] of one sequence alone, unpadded, in float64 from the logits on."""
    return torch.log_softmax(model(torch.tensor([sequence])).logits[0].double() / temperature, dim=-1)


def all_rows(tensor: torch.Tensor) -> torch.Tensor:
    """All rows of a tensor of the trainer's, sharded or not (a collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: all_rows(p.grad).clone() for name, p in trainer._model.named_parameters() if p.grad is not None}


def published(trainer: Trainer) -> tuple[Manifest, list[np.ndarray], dict[str, torch.Tensor]]:
    """What an engine would load."""
    trainer.publish()
    publication = trainer.publication()
    manifest, buckets = publication.manifest, publication.bucket_refs
    tensors = {}
    for index, bucket in enumerate(buckets):
        check_bucket(manifest, index, bucket)
        tensors |= dict(read_bucket(manifest, index, torch.from_numpy(bucket)))
    return manifest, buckets, tensors

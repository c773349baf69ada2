"""TRL's formulas and ours on the same completions: its trainers without their constructors, ours from settings."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from leeway.config import find_recipe, load_config
from leeway.config.objective import objective_of

f64 = torch.float64
LENGTHS = [4, 1, 6, 3, 5, 2]
N, WIDTH, GROUP = len(LENGTHS), 6, 3
MAX_LENGTH, EOS = 8, 0
REWARDS = [1.0, 0.0, 0.5, 0.0, 0.0, 1.0]
SAME = {"rtol": 0, "atol": 1e-9}
CLOSE = {"rtol": 0, "atol": 1e-6}  # where TRL goes through float32


class Case:
    """Six ragged sequences in two groups, one with a token of an environment; ratios on all sides of a clip."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.real = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]
        self.mask = self.real.clone()
        self.mask[2, 2] = False
        self.logprobs = self._rounded(-torch.rand(N, WIDTH, generator=generator, dtype=f64) * 3 - 0.1)
        self.prox = self.logprobs - self._log_ratios(generator)
        self.mu = self._rounded(self.prox - self._log_ratios(generator) / 2)
        self.reference = self.logprobs + 0.5 * torch.randn(N, WIDTH, generator=generator, dtype=f64)
        self.entropy = torch.rand(N, WIDTH, generator=generator, dtype=f64)

    def _log_ratios(self, generator: torch.Generator) -> torch.Tensor:
        choice = torch.randint(0, 7, (N, WIDTH), generator=generator)
        return torch.tensor([0.3, 0.7, 0.95, 1.05, 1.1, 1.5, 4.0], dtype=f64)[choice].log()

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        """What float32 holds exactly: TRL keeps the engine's logprobs in it."""
        return values.float().double()


# ------------------------------------------------------------------------------------------------------- TRL's side


def accelerator() -> Any:
    def same(value: Any, **_: Any) -> Any:
        return value

    return SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        is_main_process=True,
        gather=same,
        gather_for_metrics=same,
        reduce=same,
        autocast=contextlib.nullcontext,
        unwrap_model=same,
    )


class Everything(defaultdict):
    """TRL's logs: lists under any name, at any depth."""

    def __init__(self) -> None:
        super().__init__(list)


class Model(torch.nn.Module):
    """A module, for they ask whether it is one of peft's."""

    is_gradient_checkpointing = False


def bare(trainer: type, **attributes: Any) -> Any:
    """A trainer of TRL's without its constructor, which loads models and data: what its formulas ask for, no more."""
    self = object.__new__(trainer)
    shared: dict[str, Any] = {
        "accelerator": accelerator(),
        "model": Model(),
        "args": SimpleNamespace(
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
            per_device_train_batch_size=N,
            steps_per_generation=1,
            delta=None,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "_metrics": {"train": Everything()},
        "_logs": defaultdict(list, rewards=Everything(), extra=Everything()),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_tp_size": 1,
        "_total_train_tokens": 0,
    }
    for name, value in (shared | attributes).items():
        setattr(self, name, value)
    return self


@dataclass
class Trl:
    """TRL's trainers, imported when the first test asks: that takes seconds."""

    grpo: type
    rloo: type
    dpo: type
    sft: type
    gkd: type
    add_head: Any

    def batch(self, case: Case, trainer: type | None = None, **options: Any) -> tuple[Any, dict[str, Any]]:
        """(trainer, what its own code makes of these completions): advantages, masks, importance ratios."""
        cut = options.pop("cut_rows", ())
        sampled = [[7] * (n - 1) + [5 if i in cut else EOS] for i, n in enumerate(LENGTHS)]
        mask = [row[:n].long().tolist() for row, n in zip(case.mask, LENGTHS, strict=True)]
        logps = [row[:n].tolist() for row, n in zip(case.mu, LENGTHS, strict=True)]
        is_rloo = trainer is self.rloo
        settings: dict[str, Any] = {
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "loss_type": "grpo",
            "importance_sampling_level": "token",
            "off_policy_mask_threshold": None,
            "top_entropy_quantile": 1.0,
            "max_completion_length": MAX_LENGTH,
            "num_iterations": 2,  # so that they keep the logprobs under which a batch begins
            "use_vllm": False,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_min": None,
            "vllm_importance_sampling_clip_max": 2.0,
            "scale_rewards": "group",
            "multi_objective_aggregation": "sum_then_normalize",
            "mask_truncated_completions": bool(cut),
            "eos_token_ids": [EOS],
            "normalize_advantages": False,
            "reward_clip_range": None,
            "_entropy_bonus_enabled": False,
            "use_adaptive_entropy": False,
            "entropy_coef": 0.0,
            # what generates, and what it asks about that
            "num_generations": GROUP,
            "environment_factories": None,
            "environments": None,
            "tools": None,
            "reward_funcs": [None],
            "reward_func_names": ["reward"],
            "reward_weights": torch.ones(1),
            "ref_model": "reference",
            "pad_to_multiple_of": None,
            "_tokenizer": SimpleNamespace(pad_token_id=0),
            "log_multimodal": False,
            "rewards": REWARDS,
        } | options
        rewards = torch.tensor(settings.pop("rewards"), dtype=torch.float32)[:, None]
        arguments = {k[5:]: settings.pop(k) for k in list(settings) if k.startswith("args_")}
        self_ = bare(trainer or self.grpo, **settings)
        vars(self_.args).update(arguments)
        self_._calculate_rewards = lambda *_: rewards
        generated = ([[1]] * N, sampled, mask, ["x"] * N, logps, {}, None, [])
        self_._generate = lambda prompts: (generated[0], sampled, generated[3]) if is_rloo else generated

        def score(model: Any, *_: Any, **__: Any) -> Any:
            """The logprobs of a model, which here is its name, or the tensor that is differentiated."""
            if not isinstance(model, torch.Tensor):
                model = case.reference if model == "reference" else case.prox
            return model.masked_fill(~case.real, 0.0), case.entropy, None

        self_._get_per_token_logps_and_entropies = score
        inputs = self_._generate_and_score_completions([{"prompt": "p"}] * N)
        kept = torch.tensor([[i not in cut] for i in range(N)])
        assert inputs["completion_mask"].bool().equal(case.real & kept)
        return self_, inputs

    def loss(self, case: Case, **options: Any) -> tuple[float, torch.Tensor]:
        """Value, and gradient by the logprobs [N, WIDTH]."""
        self_, inputs = self.batch(case, **options)
        logprobs = case.logprobs.clone().requires_grad_()
        total = self_._compute_loss(logprobs, inputs)
        total.backward()
        assert logprobs.grad is not None
        return total.item(), logprobs.grad


def load_trl() -> Trl:
    # It warns of vLLM's version, which its formulas do not touch, and sets vLLM's log level for every later process.
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")
        from trl.experimental.gkd.gkd_trainer import GKDTrainer
        from trl.trainer.dpo_trainer import DPOTrainer
        from trl.trainer.grpo_trainer import GRPOTrainer
        from trl.trainer.rloo_trainer import RLOOTrainer
        from trl.trainer.sft_trainer import SFTTrainer
        from trl.trainer.utils import add_fused_lm_head

    return Trl(GRPOTrainer, RLOOTrainer, DPOTrainer, SFTTrainer, GKDTrainer, add_fused_lm_head)


# ------------------------------------------------------------------------------------------------------- our side


def settings(*overrides: str) -> Any:
    """The quickstart's settings with these of `algorithm`."""
    on_policy = ["staleness.max_policy_lag=0"] if "name=rloo" in overrides else []
    several = [] if not any(o.startswith("correction.name=") for o in overrides) else ["train.updates_per_batch=2"]
    return load_config(
        "quickstart",
        [f"rollout.max_response_tokens={MAX_LENGTH}", *several, *on_policy, *(f"algorithm.{o}" for o in overrides)],
    )


def packed(case: Case, rows: list[int] | None = None) -> tuple[torch.Tensor, Any]:
    """(real places [N, WIDTH], our tokens of them laid end to end), of all sequences or of these."""
    real = case.real.clone()
    if rows is not None:
        real[[i for i in range(N) if i not in rows]] = False
    segments = torch.arange(N)[:, None].expand(N, WIDTH)[real]
    return real, SimpleNamespace(
        segments=torch.unique(segments, return_inverse=True)[1],
        mask=case.mask[real],
        policy_versions=torch.where(case.mask[real], 0, -1),
        behavior_logprobs=case.mu[real],
        proximal_logprobs=case.prox[real],
        reference_logprobs=case.reference[real],
    )


def ours(case: Case, *overrides: str, rewards: list[float] = REWARDS) -> tuple[float, torch.Tensor]:
    """Value and gradient of our objective with these settings, everything through the names that a user writes."""
    config = settings(*overrides)
    algorithm = config.algorithm
    advantage: Any = algorithm.advantage
    groups = torch.arange(N) // GROUP
    advantages = advantage(torch.tensor(rewards, dtype=torch.float32), groups).double()
    logprobs = case.logprobs.clone().requires_grad_()
    real, tokens = packed(case)
    if algorithm.correction.name == "none":  # the policy that both sides clip around
        tokens.behavior_logprobs = case.prox[real]
    tokens.advantages = advantages[:, None].expand(N, WIDTH)[real]
    entropy = case.entropy[real]
    loss = objective_of(config, find_recipe("async_rl")).loss(
        logprobs[real], entropy, tokens, policy_version=1, num_sequences=N, num_tokens=int(case.mask.sum())
    )
    loss.total.backward()
    assert logprobs.grad is not None
    return loss.total.item(), logprobs.grad


def equal(got: tuple[float, torch.Tensor], expected: tuple[float, torch.Tensor], **tolerance: Any) -> None:
    tolerance = tolerance or CLOSE
    assert got[0] == pytest.approx(expected[0], abs=tolerance["atol"])
    torch.testing.assert_close(got[1], expected[1], **tolerance)
    assert float(expected[1].abs().max()) > 0.01, "there is something to compare"

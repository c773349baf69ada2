"""A trainer with a critic in addition to the policy: it computes advantages from the critic's values.

batch --> estimate: values (once, under the weights that took it), GAE, whitening over the batch
  each step ---> critic: forward_backward, optim_step
            \\--> policy: as in `Trainer`, with these advantages   (not while the critic warms up)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..algorithms.critic import gae, outcome_rewards, value_metrics, whitened, whitening_sums
from .checkpoint import SavedModules
from .critic import NUM_SUMS, Critic, Estimates
from .settings import TrainerSettings
from .sharding import make_mesh
from .trainer import Trainer
from .vocabulary import check_vocabulary

if TYPE_CHECKING:
    from ..types import TrainBatch


class ActorCriticTrainer(Trainer):
    """`batch.advantages` holds the reward of each token's trajectory; see `advantages.GAE`.

    Versions keep counting while the critic warms up, and the learning rates follow them: they count the run's steps.
    """

    def __init__(self, settings: TrainerSettings, **place: Any) -> None:
        assert settings.critic is not None
        super().__init__(settings, **place)
        self._critic_settings = settings.critic
        self._warmup_steps = settings.critic.warmup_steps
        path, mesh = (
            settings.path_of(settings.critic.path),
            make_mesh(settings.cluster.device, settings.train.num_ranks, settings.train.shards),
        )
        self._critic = Critic(path, settings, mesh, device=self._device)
        check_vocabulary("critic.path", path, self._critic.model.lm, policy=self._model.lm)
        if not self._critic.model.is_packed:  # both see the same passes
            self._packing = "padded"

    @property
    def is_warming_up(self) -> bool:
        """Whether the next step leaves the policy unchanged."""
        return self.policy_version < self._warmup_steps

    def estimate(self, batches: Sequence[TrainBatch]) -> list[Estimates]:
        """Values, returns and advantages of this rank's shares of all steps of a batch, under the current weights.

        A collective. If configured, advantages are whitened over the whole batch and all ranks.
        """
        made = [self._estimate(batch) for batch in batches]
        if not self._critic_settings.whiten:
            return made
        own = [whitening_sums(e.advantages, b.loss_mask) for e, b in zip(made, batches, strict=True)]
        sums = self._reduce(torch.stack(own).sum(0), dist.ReduceOp.SUM)
        return [
            Estimates(values=e.values, returns=e.returns, advantages=whitened(e.advantages, b.loss_mask, sums))
            for e, b in zip(made, batches, strict=True)
        ]

    def forward_backward(
        self,
        batch: TrainBatch,
        *,
        proximal_logprobs: torch.Tensor | None = None,
        estimates: Estimates | None = None,
        logprobs_out: torch.Tensor | None = None,
    ) -> dict[str, float]:
        """As `Trainer.forward_backward`, plus the critic's; `estimates` were made when the batch was taken.

        None: it was taken under the current weights, and is a whole batch. `logprobs_out` stays as it is while the
        critic warms up: no policy computes then.
        """
        self._check_versions(batch)
        started = time.monotonic()
        estimates = estimates or self.estimate([batch])[0]
        num_tokens = int(batch.num_tokens)
        sums = self._critic.forward_backward(self._passes(batch), estimates, num_tokens=num_tokens)
        sums = self._reduce(sums, dist.ReduceOp.SUM).cpu()
        assert len(sums) == NUM_SUMS
        elapsed = time.monotonic() - started
        own = {"train/loss/value": sums[0].item(), **value_metrics(sums[1:]), "step/critic_s": elapsed}
        if self.is_warming_up:
            return own | {
                "step/forward_backward_s": 0.0,
                "train/tokens_per_s": num_tokens / elapsed,
                "train/tokens_in_pass": self._reduced_tokens_in_pass(),
            }
        batch = batch.clone(recurse=False)
        batch.advantages = estimates.advantages
        policy = super().forward_backward(batch, proximal_logprobs=proximal_logprobs, logprobs_out=logprobs_out)
        return policy | own

    def optim_step(self) -> dict[str, float]:
        """One step of both, or of the critic alone while it warms up; `policy_version` grows by one either way."""
        started = time.monotonic()
        own = self._critic.optim_step(self.policy_version)
        elapsed = time.monotonic() - started
        if self.is_warming_up:
            self.policy_version += 1
            return own | {"train/lr": 0.0, "step/optim_s": elapsed}
        metrics = super().optim_step() | own
        return metrics | {"step/optim_s": metrics["step/optim_s"] + elapsed}

    def measure(self, batch: TrainBatch) -> dict[str, float]:
        self._warmup_steps = 0  # what is to be known is a step of both
        times = super().measure(batch)
        self._warmup_steps = self._critic_settings.warmup_steps
        self._critic.forget_gradient()
        return times

    def _estimate(self, batch: TrainBatch) -> Estimates:
        """Before whitening."""
        c = self._critic_settings
        values = self._critic.values(self._passes(batch), len(batch.response_tokens))
        lengths = batch.response_lengths
        where = {
            "mask": batch.loss_mask,
            "segments": torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        }
        rewards = outcome_rewards(batch.advantages, **where)
        advantages = gae(values, rewards, **where, gamma=c.gamma, lam=c.gae_lambda)
        if c.value_lambda == c.gae_lambda:
            returns = advantages + values
        else:
            returns = gae(values, rewards, **where, gamma=c.gamma, lam=c.value_lambda) + values
        return Estimates(values=values, returns=returns, advantages=advantages)

    def _saved_modules(self) -> SavedModules:
        return {**super()._saved_modules(), "critic.": (self._critic.model, self._critic.optimizer)}


def make_trainer(settings: TrainerSettings, **place: Any) -> Trainer:
    """The trainer for these settings; `place` as for `Trainer`. On the ranks of an earlier one, which must be gone."""
    return (Trainer if settings.critic is None else ActorCriticTrainer)(settings, **place)


def step_inputs(trainer: Trainer, batches: Sequence[TrainBatch], *, needs_proximal: bool) -> list[dict[str, Any]]:
    """What `forward_backward` needs for each step of a batch in addition to its tokens, under the current weights."""
    inputs: list[dict[str, Any]] = [{} for _ in batches]
    if needs_proximal:
        for step, batch in zip(inputs, batches, strict=True):
            step["proximal_logprobs"] = trainer.token_logprobs(batch)
    if isinstance(trainer, ActorCriticTrainer):
        for step, estimates in zip(inputs, trainer.estimate(batches), strict=True):
            step["estimates"] = estimates
    return inputs

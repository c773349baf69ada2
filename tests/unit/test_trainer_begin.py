"""Another run on the same ranks starts exactly as a new process would."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.distributed.tensor import DTensor

from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.objective import PolicyObjective
from leeway.trainer.trainer import StalenessError, Trainer

from ..trainers import OPTIMIZER, batch_of, published, random_trajectories, save_model, settings_of

# The first step's learning rate differs from the second's, and AdamW's moments matter.
WARMED = dataclasses.replace(OPTIMIZER, lr=0.1, eps=1e-8, warmup_steps=2)


def two_steps(trainer: Trainer) -> tuple[list[dict[str, float]], str]:
    """What they say (but for times), and the digest of the weights after them."""
    said = []
    for seed in (1, 2):
        metrics = trainer.forward_backward(batch_of(random_trajectories(seed, 8))) | trainer.optim_step()
        said.append({name: value for name, value in metrics.items() if not name.endswith(("_s", "_gib"))})
    return said, published(trainer)[0].digest


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    parameters = trainer._model.named_parameters()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in parameters}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_trainer_that_begins_again_is_a_new_trainer_bit_for_bit(make, model_path, tmp_path, tied):
    other = {
        "path": save_model(tmp_path, tied=tied),
        "objective": PolicyObjective(policy_loss=PPOClip(clip_low=0.1, clip_high=0.1), aggregation="token_mean"),
        "optimizer": WARMED,
        "temperature": 0.7,
        "seed": 5,
    }
    used = make()  # of other settings, in mid-run
    two_steps(used)
    used.forward_backward(batch_of(random_trajectories(3, 8)))  # its gradient is not the next run's
    used.publish()
    used.begin(settings_of(**other))
    assert used.policy_version == 0
    begun = weights(used)
    after = two_steps(used)
    new = make(**other)
    assert begun.keys() == weights(new).keys()
    assert [name for name, tensor in weights(new).items() if not torch.equal(tensor, begun[name])] == []
    assert after == two_steps(new)


def test_the_settings_of_the_new_run_are_the_ones_that_hold(make, model_path):
    trainer = make(max_policy_lag=2)
    two_steps(trainer)
    trainer.begin(settings_of(model_path, max_policy_lag=0))
    trainer.forward_backward(batch_of(random_trajectories(1, 4)))
    trainer.optim_step()
    with pytest.raises(StalenessError, match="max_policy_lag is 0"):
        trainer.forward_backward(batch_of(random_trajectories(1, 4)))
    with pytest.raises(AssertionError):
        trainer.begin(settings_of(model_path, num_ranks=2))

"""Another run on the same ranks starts exactly as a new process would."""

from __future__ import annotations

import pytest
import torch

from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.objective import PolicyObjective
from leeway.trainer.trainer import StalenessError, Trainer

from ..trainers import all_rows, batch_of, published, random_trajectories, save_model

# The first step's learning rate differs from the second's, and AdamW's moments matter.
WARMED = {"lr": 0.1, "eps": 1e-8, "warmup_steps": 2}


def two_steps(trainer: Trainer) -> tuple[list[dict[str, float]], str]:
    """What they say (but for times), and the digest of the weights after them."""
    said = []
    for seed in (1, 2):
        metrics = trainer.forward_backward(batch_of(random_trajectories(seed, 8))) | trainer.optim_step()
        said.append({name: value for name, value in metrics.items() if not name.endswith(("_s", "_gib"))})
    return said, published(trainer)[0].digest


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    parameters = trainer._model.named_parameters()
    return {n: all_rows(p).detach().clone() for n, p in parameters}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_trainer_after_another_on_the_same_ranks_is_that_of_a_new_process_bit_for_bit(make, tmp_path, tied):
    other = {
        "path": save_model(tmp_path, tied=tied),
        "objective": PolicyObjective(policy_loss=PPOClip(clip_low=0.1, clip_high=0.1), aggregation="token_mean"),
        **WARMED,
        "seed": 5,
    }
    used = make()  # of other settings, in mid-run
    two_steps(used)
    used.forward_backward(batch_of(random_trajectories(3, 8)))  # its gradient is not the next run's
    used.publish()
    del used
    again = make(**other)
    assert again.policy_version == 0
    begun = weights(again)
    after = two_steps(again)
    del again
    new = make(**other)
    assert begun.keys() == weights(new).keys()
    assert [name for name, tensor in weights(new).items() if not torch.equal(tensor, begun[name])] == []
    assert after == two_steps(new)


@pytest.mark.slow
def test_the_settings_of_the_new_run_are_the_ones_that_hold(make):
    two_steps(make(max_policy_lag=2))
    trainer = make(max_policy_lag=0)
    trainer.forward_backward(batch_of(random_trajectories(1, 4)))
    trainer.optim_step()
    with pytest.raises(StalenessError, match="max_policy_lag is 0"):
        trainer.forward_backward(batch_of(random_trajectories(1, 4)))
    with pytest.raises(AssertionError):
        make(num_ranks=2)

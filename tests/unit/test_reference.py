"""The trainer's frozen reference policy and its entropy gradient, against plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from leeway.algorithms.objective import KLPenalty, PolicyObjective
from leeway.trainer.reference import load_reference
from leeway.types import TrainBatch

from .test_trainer import (  # noqa: F401  (fixtures)
    batch_of,
    in_pairs,
    make,
    model_path,
    random_trajectories,
    save_model,
    settings_of,
)


def objective_of(**changes) -> PolicyObjective:
    return PolicyObjective(clip_low=0.2, clip_high=0.28, aggregation="token_mean", **changes)


def gradients(trainer) -> torch.Tensor:
    return torch.cat([p.grad.full_tensor().flatten() for p in trainer._model.parameters() if p.grad is not None])


def test_the_reference_stays_where_training_started(make) -> None:  # noqa: F811
    trainer = make(objective=objective_of(kl=KLPenalty(coefficient=0.1, estimator="k1", target=0.001)))
    batch = batch_of(random_trajectories(1, 6))
    start = trainer.token_logprobs(batch)
    assert trainer.forward_backward(batch)["train/reference_kl/mean"] == pytest.approx(0.0, abs=1e-6)
    trainer.optim_step()
    moved = trainer.token_logprobs(batch)
    metrics = trainer.forward_backward(batch)
    expected = (moved - start)[batch.loss_mask].mean().item()
    assert abs(expected) > 1e-3
    assert metrics["train/reference_kl/mean"] == pytest.approx(expected, abs=1e-5)
    # At the first step there was no KL, so the coefficient fell by 2 % and this step used the lower one.
    assert metrics["train/reference_kl/coefficient"] == pytest.approx(0.098)


def test_no_reference_is_loaded_where_nobody_asks(make) -> None:  # noqa: F811
    assert make(objective=objective_of())._reference is None


def test_the_reference_may_be_another_model(make, model_path: Path, tmp_path: Path) -> None:  # noqa: F811
    save_model(tmp_path, tied=False)
    objective = objective_of(kl=KLPenalty(coefficient=0.1, estimator="k1"))
    batch = batch_of(random_trajectories(1, 6))
    teacher = make(path=tmp_path).token_logprobs(batch)
    trainer = make(objective=objective, reference_path=str(tmp_path))
    expected = (trainer.token_logprobs(batch) - teacher)[batch.loss_mask].mean().item()
    assert abs(expected) > 1e-3
    assert trainer.forward_backward(batch)["train/reference_kl/mean"] == pytest.approx(expected, abs=1e-5)


def test_a_reference_that_cannot_be_packed_is_scored_padded(make, monkeypatch) -> None:  # noqa: F811
    def padded(*args, **options):
        return load_reference(*args, **options | {"packing": "padded"})

    monkeypatch.setattr("leeway.trainer.trainer.load_reference", padded)
    trainer = make(objective=objective_of(kl=KLPenalty(coefficient=0.1, estimator="abs")))
    metrics = trainer.forward_backward(batch_of(in_pairs(random_trajectories(1, 6))))
    assert metrics["train/reference_kl/mean"] == pytest.approx(0.0, abs=1e-6)


def test_another_run_has_its_own_reference_and_coefficient(make, model_path: Path, tmp_path: Path) -> None:  # noqa: F811
    trainer = make(objective=objective_of(kl=KLPenalty(coefficient=0.1, estimator="k1", target=0.001)))
    batch = batch_of(random_trajectories(1, 6))
    trainer.forward_backward(batch)
    assert trainer._objective.kl.coefficient < 0.1
    trainer.begin(trainer._settings)
    assert trainer._objective.kl.coefficient == 0.1
    save_model(tmp_path, tied=False)
    trainer.begin(settings_of(model_path, objective=trainer._objective, reference_path=str(tmp_path)))
    assert abs(trainer.forward_backward(batch)["train/reference_kl/mean"]) > 1e-3


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_the_coefficient_and_the_first_reference(make, tmp_path: Path) -> None:  # noqa: F811
    objective = objective_of(kl=KLPenalty(coefficient=0.1, estimator="k1", target=0.001))
    batch = batch_of(random_trajectories(1, 6))

    def step(trainer) -> float:
        kl = trainer.forward_backward(batch)["train/reference_kl/mean"]
        trainer.optim_step()
        return kl

    first = make(objective=objective)
    step(first)
    first.save_state(str(tmp_path / "state"))
    expected = first._objective.kl.coefficient, step(first)
    second = make(objective=objective)
    second.load_state(str(tmp_path / "state"))
    assert (second._objective.kl.coefficient, step(second)) == expected
    assert expected[0] != 0.1
    assert abs(expected[1]) > 1e-3


def test_measuring_speed_leaves_the_coefficient_alone(make) -> None:  # noqa: F811
    trainer = make(objective=objective_of(kl=KLPenalty(coefficient=0.1, target=0.5)))
    trainer.measure(batch_of(random_trajectories(2, 3)))
    assert trainer._objective.kl.coefficient == 0.1


def without_advantages(batch: TrainBatch) -> TrainBatch:
    batch.advantages = torch.zeros_like(batch.advantages)
    return batch


def test_the_entropy_bonus_reaches_the_weights(make, model_path: Path) -> None:  # noqa: F811
    trajectories = random_trajectories(3, 4)
    trainer = make(objective=objective_of(entropy_coefficient=0.3), logprob_chunk_tokens=3)
    assert sum(len(t.response_tokens) for t in trajectories) > 3  # else nothing is ever computed in chunks
    trainer.forward_backward(without_advantages(batch_of(trajectories)))
    got = gradients(trainer)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    total, count = torch.zeros(()), sum(sum(t.loss_mask) for t in trajectories)
    for t in trajectories:
        logits = model(torch.tensor([[*t.prompt_tokens, *t.response_tokens]])).logits[0]
        logprobs = torch.log_softmax(logits[len(t.prompt_tokens) - 1 : -1], -1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        total = total - 0.3 * entropy[torch.tensor(t.loss_mask)].sum() / count
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert got.norm() > 1e-3
    plain = make(objective=objective_of())
    plain.forward_backward(without_advantages(batch_of(trajectories)))
    assert gradients(plain).norm() == 0.0

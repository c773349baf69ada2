"""The trainer's frozen reference policy and its entropy gradient, against plain transformers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.kl import K1, Abs, KLPenalty
from leeway.algorithms.objective import PolicyObjective
from leeway.config import Stage, find_recipe, load_config
from leeway.driver.checks import examine
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.trainer.reference import load_reference
from leeway.types import TrainBatch

from ..trainers import all_rows, batch_of, in_pairs, random_trajectories, save_model


def objective_of(**changes) -> PolicyObjective:
    return PolicyObjective(policy_loss=PPOClip(clip_low=0.2, clip_high=0.28), aggregation="token_mean", **changes)


def gradients(trainer) -> torch.Tensor:
    return torch.cat([all_rows(p.grad).flatten() for p in trainer._model.parameters() if p.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize("where", [{}, {"cpu_offload_reference": True, "fsdp_units": ["Qwen2MLP"]}])
def test_the_reference_stays_where_training_started(make, where) -> None:
    trainer = make(objective=objective_of(kl=KLPenalty(coef=0.1, estimator=K1(), target=0.001)), **where)
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


@pytest.mark.slow
def test_a_teacher_that_knows_fewer_tokens_is_refused_at_load(make, tmp_path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    small = AutoConfig.for_model("qwen2", vocab_size=48, **sizes, **heads)
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"algorithm\.reference_path: got .* knows 48 tokens, expected the policy's 64"
    ):
        make(objective=objective_of(kl=KLPenalty(coef=0.1)), reference_path=str(tmp_path))


@pytest.mark.slow
def test_a_teacher_whose_tokens_mean_something_else_is_refused_before_anything_starts(tmp_path) -> None:
    """With as many tokens it would load, and score other texts than those that were sampled."""
    for name, words in {"policy": "a b c", "teacher": "c b a", "family": "a b c"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "qwen2", "head_dim": 32}')
        (tmp_path / name / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        build_tokenizer(words.split()).save_pretrained(tmp_path / name)
    swapped = json.loads((tmp_path / "teacher/tokenizer.json").read_text())
    vocabulary = swapped["model"]["vocab"]
    vocabulary["a"], vocabulary["c"] = vocabulary["c"], vocabulary["a"]
    (tmp_path / "teacher/tokenizer.json").write_text(json.dumps(swapped))

    def found(key: str, teacher: str, *overrides: str) -> tuple[str, ...]:
        options = ["model.init=null", f"model.path={tmp_path}/policy", "task.limit=20", *overrides]
        options += [f"{key}={tmp_path}/{teacher}", f"output_dir={tmp_path}/runs"]
        config = load_config("quickstart", options, recipe="async_rl")
        stage = Stage(name="async_rl", recipe=find_recipe("async_rl"), config=config, dir=tmp_path / "runs")
        found = examine([stage], tmp_path / "runs/new")
        assert not found.missing
        return found.wrong

    kl, ppo = ["algorithm.kl.coef=0.1"], ["algorithm.name=ppo"]
    assert found("algorithm.reference_path", "family", *kl) == ()
    (line,) = found("algorithm.reference_path", "teacher", *kl)
    assert re.match(r"algorithm\.reference_path: got .*/teacher, for which token \d+ is '[ac]', expected", line)
    (line,) = found("critic.path", "teacher", *ppo)
    assert line.startswith("critic.path: got ")


def test_no_reference_is_loaded_where_nobody_asks(make) -> None:
    assert make(objective=objective_of())._reference is None


@pytest.mark.slow
def test_the_reference_may_be_another_model(make, model_path: Path, tmp_path: Path) -> None:
    save_model(tmp_path, tied=False)
    objective = objective_of(kl=KLPenalty(coef=0.1, estimator=K1()))
    batch = batch_of(random_trajectories(1, 6))
    teacher = make(path=tmp_path).token_logprobs(batch)
    trainer = make(objective=objective, reference_path=str(tmp_path))
    expected = (trainer.token_logprobs(batch) - teacher)[batch.loss_mask].mean().item()
    assert abs(expected) > 1e-3
    assert trainer.forward_backward(batch)["train/reference_kl/mean"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_reference_that_cannot_be_packed_is_scored_padded(make, monkeypatch) -> None:
    def padded(path, settings, *args, **options):
        train = settings.train.model_copy(update={"packing": "padded"})
        return load_reference(path, replace(settings, train=train), *args, **options)

    monkeypatch.setattr("leeway.trainer.trainer.load_reference", padded)
    trainer = make(objective=objective_of(kl=KLPenalty(coef=0.1, estimator=Abs())))
    metrics = trainer.forward_backward(batch_of(in_pairs(random_trajectories(1, 6))))
    assert metrics["train/reference_kl/mean"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_another_run_has_its_own_reference_and_coefficient(make, model_path: Path, tmp_path: Path) -> None:
    trainer = make(objective=objective_of(kl=KLPenalty(coef=0.1, estimator=K1(), target=0.001)))
    batch = batch_of(random_trajectories(1, 6))
    trainer.forward_backward(batch)
    assert trainer._objective.kl.coef < 0.1
    trainer = make(objective=trainer._settings.objective)
    assert trainer._objective.kl.coef == 0.1
    save_model(tmp_path, tied=False)
    trainer = make(objective=trainer._objective, reference_path=str(tmp_path))
    assert abs(trainer.forward_backward(batch)["train/reference_kl/mean"]) > 1e-3


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_the_coefficient_and_the_first_reference(make, tmp_path: Path) -> None:
    objective = objective_of(kl=KLPenalty(coef=0.1, estimator=K1(), target=0.001))
    batch = batch_of(random_trajectories(1, 6))

    def step(trainer) -> float:
        kl = trainer.forward_backward(batch)["train/reference_kl/mean"]
        trainer.optim_step()
        return kl

    first = make(objective=objective)
    step(first)
    first.save_state(str(tmp_path / "state"))
    expected = first._objective.kl.coef, step(first)
    second = make(objective=objective)
    second.load_state(str(tmp_path / "state"))
    assert (second._objective.kl.coef, step(second)) == expected
    assert expected[0] != 0.1
    assert abs(expected[1]) > 1e-3


@pytest.mark.slow
def test_measuring_speed_leaves_the_coefficient_alone(make) -> None:
    trainer = make(objective=objective_of(kl=KLPenalty(coef=0.1, target=0.5)))
    trainer.measure(batch_of(random_trajectories(2, 3)))
    assert trainer._objective.kl.coef == 0.1


def without_advantages(batch: TrainBatch) -> TrainBatch:
    batch.advantages = torch.zeros_like(batch.advantages)
    return batch


@pytest.mark.slow
def test_the_entropy_bonus_reaches_the_weights(make, model_path: Path) -> None:
    trajectories = random_trajectories(3, 4)
    trainer = make(objective=objective_of(entropy_coef=0.3), logprob_chunk_tokens=3)
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

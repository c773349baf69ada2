"""DPO: the loss from its formula, pairs that stay together, and a trainer that raises the margin."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from leeway.algorithms.preference import DPO, PreferenceObjective
from leeway.config import ConfigError, derive, find_recipe, load_config
from leeway.config.objective import objective_of
from leeway.monitor.series import Series
from leeway.recipes.dpo import batches_of, held_out_pairs
from leeway.recipes.sft import num_steps
from leeway.tasks.examples import check_examples
from leeway.tasks.taskset import build_taskset
from leeway.trainer.microbatch import Packing, split_into_microbatches
from leeway.types import Task, batch_trajectories

from ..trainers import gradients, in_pairs, random_trajectories

f64 = torch.float64


def formula(margin: float, beta: float, smoothing: float) -> float:
    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))

    return -(1 - smoothing) * log_sigmoid(beta * margin) - smoothing * log_sigmoid(-beta * margin)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_formula(smoothing: float) -> None:
    margins = [-900.0, -3.0, -0.1, 0.0, 0.5, 7.0, 900.0]
    x = torch.tensor(margins, dtype=f64, requires_grad=True)
    got = DPO(beta=0.3, label_smoothing=smoothing)(x)
    assert got.tolist() == pytest.approx([formula(m, 0.3, smoothing) for m in margins], abs=1e-12)
    assert torch.autograd.gradcheck(lambda x: DPO(beta=0.3, label_smoothing=smoothing)(x), (x,))
    assert DPO(beta=0.1)(torch.zeros(1)).item() == pytest.approx(math.log(2))


def tokens_of(rng: random.Random, lengths: list[int]) -> Any:
    segments = [i for i, n in enumerate(lengths) for _ in range(n)]
    return SimpleNamespace(
        segments=torch.tensor(segments),
        mask=torch.tensor([rng.random() < 0.8 for _ in segments]),
        reference_logprobs=torch.tensor([rng.uniform(-3, 0) for _ in segments], dtype=f64),
    )


def test_the_objective_compares_whole_answers_with_the_reference() -> None:
    rng = random.Random(0)
    objective = PreferenceObjective(dpo=DPO(beta=0.5))
    tokens = tokens_of(rng, [3, 5, 1, 2])
    logprobs = torch.tensor([rng.uniform(-3, 0) for _ in tokens.segments], dtype=f64, requires_grad=True)

    def total(x: torch.Tensor) -> torch.Tensor:
        return objective.loss(x, x.detach(), tokens, policy_version=0, num_sequences=6, num_tokens=99).total

    gains = [
        sum(
            (logprobs[i] - tokens.reference_logprobs[i]).item()
            for i in range(len(tokens.segments))
            if tokens.segments[i] == s and tokens.mask[i]
        )
        for s in range(4)
    ]
    margins = [gains[0] - gains[1], gains[2] - gains[3]]
    # Two of the step's three pairs are in this microbatch.
    assert total(logprobs).item() == pytest.approx(sum(formula(m, 0.5, 0.0) for m in margins) / 3)
    assert torch.autograd.gradcheck(total, (logprobs,))
    loss = objective.loss(logprobs, logprobs, tokens, policy_version=0, num_sequences=6, num_tokens=99)
    metrics = objective.metrics(loss.sums, loss.maxima)
    assert metrics["train/preference/margin"] == pytest.approx(0.5 * sum(margins) / 2)
    assert metrics["train/preference/accuracy"] == sum(m > 0 for m in margins) / 2
    none = torch.zeros(0, dtype=f64, requires_grad=True)
    empty = tokens_of(rng, [])
    empty.mask, empty.segments = torch.zeros(0).bool(), torch.zeros(0).long()
    objective.loss(none, none, empty, policy_version=0, num_sequences=6, num_tokens=9).total.backward()


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["shared", "packed", "padded"])
def test_pairs_stay_together_in_their_order(packing: Packing) -> None:
    for seed in range(20):
        trajectories = random_trajectories(seed, 12)
        limit = random.Random(seed).randint(10, 150)
        if seed % 2:
            trajectories = in_pairs(trajectories)  # as real ones are: two answers to one prompt
        batch = batch_trajectories(trajectories, [0.0] * 12, num_sequences=12, num_tokens=1)
        found = []
        for piece in split_into_microbatches(batch, max_tokens=limit, packing=packing, unit=2):
            count = int(piece.segments.max()) + 1
            assert count % 2 == 0
            assert piece.input_ids.numel() <= limit or count == 2
            answers = [piece.targets[piece.segments == i].tolist() for i in range(count)]
            found += [tuple(map(tuple, answers[i : i + 2])) for i in range(0, count, 2)]
        expected = [tuple(tuple(t.response_tokens) for t in trajectories[i : i + 2]) for i in range(0, 12, 2)]
        assert sorted(found) == sorted(expected)


@pytest.mark.slow
def test_training_raises_the_margin_from_log_2(make) -> None:
    trajectories = in_pairs(random_trajectories(1, 8))
    batch = batch_trajectories(trajectories, [0.0] * 8, num_sequences=8, num_tokens=40)
    results = []
    for limit, packing in ((10_000, "auto"), (40, "auto"), (40, "padded")):
        trainer = make(
            objective=PreferenceObjective(dpo=DPO(beta=0.1)),
            max_policy_lag=None,
            max_tokens_per_microbatch=limit,
            packing=packing,
        )
        metrics = []
        for _ in range(4):
            metrics.append(trainer.forward_backward(batch))
            trainer.optim_step()
        results.append(metrics)
    assert results[0][0]["train/loss/dpo"] == pytest.approx(math.log(2), abs=1e-6)
    margins = [m["train/preference/margin"] for m in results[0]]
    assert margins[0] == pytest.approx(0.0, abs=1e-6)
    assert margins == sorted(margins)
    assert margins[-1] > 0.1
    for other in results[1:]:
        assert [m["train/preference/margin"] for m in other] == pytest.approx(margins, rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_what_is_held_out_is_measured_and_not_learned(make) -> None:
    trajectories = in_pairs(random_trajectories(2, 8))
    batch = batch_trajectories(trajectories, [0.0] * 8, num_sequences=8, num_tokens=40)
    trainer = make(
        objective=PreferenceObjective(dpo=DPO(beta=0.1)),
        max_policy_lag=None,
        max_tokens_per_microbatch=40,
    )
    trainer.forward_backward(batch)
    trainer.optim_step()
    measured = trainer.evaluate(batch)
    assert not gradients(trainer)
    assert trainer.evaluate(batch) == measured
    expected = trainer.forward_backward(batch)
    assert measured == pytest.approx({name: expected[name] for name in measured}, rel=1e-6)
    assert measured["train/preference/margin"] > 0
    assert trainer.policy_version == 1


class Characters:
    """A prompter of character codes."""

    def encode_example(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        return [ord(c) for c in prompt], [*(ord(c) for c in answer), 0]


@pytest.fixture
def file(tmp_path: Path) -> str:
    rows = [{"question": f"q{i}", "answer": f"good{i}", "rejected": f"bad{i}"} for i in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {{path: org/model}}\ntask: {{path: {tmp_path}/pairs.jsonl}}\ntrain: {{steps: 3, batch_size: 8}}\n"
    )
    return str(config)


def test_batches_hold_pairs_whole_and_every_rank_gets_its_share(file: str) -> None:
    config = load_config(file, ["train.num_ranks=2"], recipe="dpo")
    taskset: Any = build_taskset(config.task, seed=0, split="train", eval_config=config.eval)
    prompter: Any = Characters()
    shares = next(batches_of(config, taskset, prompter))
    seen = []
    for share in shares:
        answers = [
            "".join(map(chr, a[:-1])) for a in torch.split(share.response_tokens, share.response_lengths.tolist())
        ]
        assert [a[:-1] for a in answers] == ["good", "bad"] * 2
        assert all(answers[i][-1] == answers[i + 1][-1] for i in range(0, len(answers), 2))
        assert (int(share.num_sequences), share.loss_mask.all().item()) == (8, True)
        seen += answers
    assert len(set(seen)) == 8
    first: Any = build_taskset(config.task, seed=0, split="train", eval_config=config.eval)
    batches = batches_of(config, first, prompter)
    expected = [next(batches), next(batches)]
    state = json.loads(json.dumps(batches.state_dict()))
    expected.append(next(batches))
    again: Any = build_taskset(config.task, seed=0, split="train", eval_config=config.eval)
    resumed = next(batches_of(config, again, prompter, start=state))
    for share, other in zip(resumed, expected[2], strict=True):
        assert torch.equal(share.response_tokens, other.response_tokens)
    assert num_steps(config, 2 * len(taskset)) == 3


def test_held_out_pairs_are_whole_and_no_training_batch_has_them(file: str) -> None:
    config = load_config(file, ["train.num_ranks=2", "task.holdout_frac=0.5"], recipe="dpo")
    prompter: Any = Characters()
    shares = held_out_pairs(config, prompter)["held_out"]
    held_out = [bytes(p.tolist()).decode() for s in shares for p in prompts_of(s)]
    taskset: Any = build_taskset(config.task, seed=0, split="train", eval_config=config.eval)
    trained = {task.prompt for task in taskset.tasks}
    assert len(held_out) == 2 * len(set(held_out)) == int(shares[0].num_sequences)
    assert set(held_out) | trained == {f"q{i}" for i in range(6)}
    assert not set(held_out) & trained
    nothing = load_config(file, ["train.num_ranks=2"], recipe="dpo")
    assert held_out_pairs(nothing, prompter) == {}


def prompts_of(batch: Any) -> Any:
    return torch.split(batch.prompt_tokens, batch.prompt_lengths.tolist())


def test_a_line_without_a_rejected_answer_is_refused_by_name() -> None:
    good = Task(task_id="a", prompt="q", answer="x", info={"rejected": "y"})
    check_examples([good], None, rejected_key="rejected")
    with pytest.raises(ValueError, match=r"task b: got \['other'\].*'rejected'.*task.rejected_key"):
        check_examples(
            [good, Task(task_id="b", prompt="q", answer="x", info={"other": "y"})], None, rejected_key="rejected"
        )
    with pytest.raises(ValueError, match=r"task c: .*the same"):
        check_examples(
            [Task(task_id="c", prompt="q", answer="x", info={"rejected": "x"})], None, rejected_key="rejected"
        )


def test_the_recipe_needs_no_engine_and_whole_pairs(file: str) -> None:
    config = load_config(file, ["algorithm.dpo.beta=0.3"], recipe="dpo")
    numbers = derive(config, find_recipe("dpo"))
    assert (numbers.processes["generator"], numbers.sequences_per_step) == (0, 8)
    assert objective_of(config, find_recipe("dpo")) == PreferenceObjective(dpo=DPO(beta=0.3))
    with pytest.raises(ConfigError, match=r"train.batch_size: got 7.*even.*use 8"):
        load_config(file, ["train.batch_size=7"], recipe="dpo")


@pytest.mark.slow
def test_the_picture_of_a_dpo_stage_shows_loss_and_margin() -> None:
    from leeway.monitor.curves import build_figure

    steps = np.arange(1.0, 30.0)
    metrics = {
        "train/loss/dpo": Series(steps=steps, values=0.7 - 0.01 * steps),
        "train/preference/margin": Series(steps=steps, values=0.1 * steps),
    }
    [axes] = build_figure([("dpo", metrics)], title="t", max_policy_lag=2).axes
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["loss", "margin"]


def test_the_example_says_what_it_should() -> None:
    config = load_config(
        str(Path(__file__).resolve().parents[2] / "examples/dpo.yaml"), ["model.path=org/model"], recipe="dpo"
    )
    assert (config.algorithm.dpo.beta, config.train.batch_size) == (0.5, 128)

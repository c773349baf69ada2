"""Tokens that were drawn from some of the vocabulary: what travels with them, and what the trainer computes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leeway.collector.checks import checked
from leeway.config import ConfigError
from leeway.config.sampling import Sampling, Samplings, kept_width
from leeway.config.stages import plan_run
from leeway.envs.transcript import Transcript
from leeway.jobs.fit import must_be_equal
from leeway.samples import laid
from leeway.sampling_masks import BARRED, KEPT, check_masks, rows_of
from leeway.train_batch import TrainBatch, batch_trajectories
from leeway.trainer import scoring
from leeway.trainer.scoring import entropy_of, masked_logprobs
from leeway.types import Completion, Trajectory

from ..fakes import PROMPTER, Answer, FakeEngine, play_to_the_end
from ..trainers import (
    VOCAB,
    Recorder,
    end_group,
    gradients,
    one_rank_trainer,
    random_trajectories,
    reference_logprobs,
    reference_model,
    save_model,
)

# ----------------------------------------------------------------------------------------------------- the formula


def test_logprobs_and_entropy_are_those_of_what_was_left() -> None:
    logits = torch.randn(4, 11, requires_grad=True)
    kept = torch.tensor([[3, 5, -1], [0, 1, 2], [7, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    targets = torch.tensor([5, 0, 7, 4])
    logprobs, left = masked_logprobs(logits, targets, kept, None)
    entropy = entropy_of(left)
    for row, (ids, target) in enumerate(zip([[3, 5], [0, 1, 2], [7], [4]], targets.tolist(), strict=True)):
        own = logits[row, ids].log_softmax(-1)
        assert logprobs[row].item() == pytest.approx(own[ids.index(target)].item(), abs=1e-6)
        assert entropy[row].item() == pytest.approx(-(own.exp() * own).sum().item(), abs=1e-6)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert logits.grad[0, [3, 5]].sum().item() == pytest.approx(0, abs=1e-6)
    assert not logits.grad[3].any(), "nobody drew it"
    assert not logits.grad[1, 3:].any(), "what was cut off is not pushed"


def test_what_is_barred_is_left_out_of_the_sum() -> None:
    logits = torch.randn(2, 6)
    barred = torch.tensor([[0, 5], [-1, -1]], dtype=torch.int32)
    logprobs, _ = masked_logprobs(logits, torch.tensor([2, 0]), None, barred)
    assert logprobs[0].item() == pytest.approx(logits[0, 1:5].log_softmax(-1)[1].item(), abs=1e-6)
    assert logprobs[1].item() == pytest.approx(logits[1].log_softmax(-1)[0].item(), abs=1e-6)


# ----------------------------------------------------------------------------------------------------- the trainer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module", autouse=True)
def group_of_one_rank() -> Iterator[None]:
    yield
    end_group()


def with_kept(trajectories: list[Trajectory]) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for t in trajectories:
        rows = []
        for token, sampled in zip(t.response_tokens, t.loss_mask, strict=True):
            others = torch.randperm(VOCAB, generator=generator)[: 2 + token % 3].tolist()
            rows.append(list(dict.fromkeys([token, *others])) if sampled else [])
        made.append(replace(t, token_tensors={KEPT: rows_of(rows, 6)}))
    return made


def batch_of_kept(trajectories: list[Trajectory], temperature: float = 0.7) -> TrainBatch:
    advantages = [1.0 if i % 2 else -0.5 for i in range(len(trajectories))]
    counts = {"num_sequences": len(trajectories), "num_tokens": sum(sum(t.loss_mask) for t in trajectories)}
    return batch_trajectories(trajectories, advantages, **counts, temperature=temperature)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"packing": "padded"}, {"logprob_chunk_tokens": 8}])
def test_the_trainer_renormalises_over_what_was_kept(model_path: Path, settings: dict[str, Any]) -> None:
    trajectories = with_kept(random_trajectories(4, 6))
    recorder = Recorder()
    trainer = one_rank_trainer(model_path, objective=recorder, max_tokens_per_microbatch=60, **settings)
    trainer.forward_backward(batch_of_kept(trajectories))
    model = reference_model(model_path)
    for i, t in enumerate(trajectories):
        every = reference_logprobs(model, t.prompt_tokens + t.response_tokens, 0.7)
        rows = every[len(t.prompt_tokens) - 1 : -1]
        for got, row, token, ids in zip(
            recorder.of(trajectories, i), rows, t.response_tokens, t.token_tensors[KEPT].tolist(), strict=True
        ):
            among = [k for k in ids if k >= 0]
            expected = (row[token] - row[among].logsumexp(-1)).item() if among else 0.0
            assert got == pytest.approx(expected, abs=1e-5)


def test_the_gradient_is_the_same_however_many_logits_exist_at_once(model_path: Path) -> None:
    trajectories = with_kept(random_trajectories(4, 6))
    both = []
    for chunk in (None, 4):
        trainer = one_rank_trainer(model_path, logprob_chunk_tokens=chunk)
        trainer.forward_backward(batch_of_kept(trajectories))
        both.append(gradients(trainer))
    for name, value in both[0].items():
        assert bool(value.isfinite().all())
        torch.testing.assert_close(both[1][name], value, rtol=1e-4, atol=1e-6)


def test_logits_that_all_fit_are_computed_once(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    head_logits = scoring.head_logits

    def counted(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(len(hidden))
        return head_logits(hidden, *args)

    monkeypatch.setattr(scoring, "head_logits", counted)
    trajectories = with_kept(random_trajectories(4, 6))
    trainer = one_rank_trainer(model_path, logprob_chunk_tokens=None, max_tokens_per_microbatch=1000)
    trainer.forward_backward(batch_of_kept(trajectories))
    assert len(calls) == 1, "one microbatch, and not again on the way back"


# ------------------------------------------------------------------------------------------- from engine to trainer


class Masking(FakeEngine):
    """Draws 7, then the end; says from what."""

    async def generate(self, prompt_tokens: list[int], *, clock: Any = None, **sampling: Any) -> list[Any]:
        found = await super().generate(prompt_tokens, clock=clock, **sampling)
        for s in found:
            s.kept = [[7, 9], [0]] if sampling.get("top_k") else None
            s.barred = [5] if sampling.get("min_tokens") else ()
        return found


def sampled(**own: Any) -> Samplings:
    return Samplings(default=Sampling(group_size=2, temperature=0.7, **own), by_taskset={}, shares={})


def test_what_a_token_was_drawn_from_reaches_the_group() -> None:
    rig = play_to_the_end(Answer(), engine=Masking, samplings=sampled(top_k=2, top_p=0.9), greedy_baseline=True)
    (group,) = [g for batch in rig.out for g in batch]
    rows = group.samples["token_tensors"][KEPT]
    assert rows.shape == (4, kept_width(2))
    assert [[i for i in row if i >= 0] for row in rows.tolist()] == [[7, 9], [0], [7, 9], [0]]
    asked = [(r["temperature"], r.get("top_k"), r.get("top_p")) for r in rig.engine.requests]
    assert sorted(asked, key=str) == [(0.0, None, None), (0.7, 2, 0.9)]


def test_only_the_first_tokens_of_an_answer_had_something_barred() -> None:
    rig = play_to_the_end(Answer(), engine=Masking, samplings=sampled(min_tokens=1))
    (group,) = [g for batch in rig.out for g in batch]
    assert group.samples["token_tensors"][BARRED].tolist() == [[5], [-1], [5], [-1]]
    assert rig.engine.requests[0]["min_tokens"] == 1


class Forgets(Answer):
    async def rollout(self, task: Any, policy: Any) -> list[Trajectory]:
        return [replace(t, token_tensors={}) for t in await super().rollout(task, policy)]


def test_an_environment_that_loses_it_is_refused_in_one_line() -> None:
    rig = play_to_the_end(Forgets(), engine=Masking, samplings=sampled(top_k=2), retries=0)
    assert rig.out == []
    assert "token_tensors['kept_tokens']" in rig.slots.failures[0]
    assert "\n" not in rig.slots.failures[0]


@pytest.mark.parametrize(
    ("rows", "names", "said"),
    [
        ([[8], [3]], [KEPT], "was sampled that it says could not be"),
        ([[7], [3]], [BARRED], "was sampled that it says could not be"),
        ([[7], [3]], [], "expected none"),
    ],
)
def test_a_mask_that_its_own_tokens_contradict_is_refused(rows: list[list[int]], names: list[str], said: str) -> None:
    t = Trajectory(
        prompt_tokens=[1], response_tokens=[7, 3], loss_mask=[True] * 2, behavior_logprobs=[-1.0] * 2,
        policy_versions=[0] * 2, reward=0.0, finish_reason="stop", text="",
        token_tensors={(names or [KEPT])[0]: rows_of(rows, 2)},
    )  # fmt: skip
    with pytest.raises(ValueError, match=said):
        check_masks(laid([t]), names)
    with pytest.raises(ValueError, match="cannot be trained on"):
        checked([t], group_size=1, temperature=1.0, max_model_len=9, versions={0}, masks=names)


def test_a_conversation_keeps_the_rows_of_every_turn_and_has_none_for_the_environments_tokens() -> None:
    def turn(*tokens: int) -> Completion:
        rows = rows_of([[t, t + 1] for t in tokens], 3)
        return Completion(
            tokens=[*tokens], logprobs=[-0.1] * len(tokens), policy_versions=[0] * len(tokens), finish_reason="stop",
            text="", token_tensors={KEPT: rows},
        )  # fmt: skip

    prompter = SimpleNamespace(**vars(PROMPTER), has_template=False, encode_next_turn=lambda *_: [8, 8])
    transcript = Transcript(prompter, "ab")
    transcript.sampled(turn(3, 4))
    other = transcript.copy()
    transcript.observed("c")
    transcript.sampled(turn(5))
    t = transcript.trajectory(reward=0.0)
    assert t.token_tensors[KEPT].tolist() == [[3, 4, -1], [4, 5, -1], [-1] * 3, [-1] * 3, [5, 6, -1]]
    assert len(other.trajectory(reward=0.0).token_tensors[KEPT]) == 2
    check_masks(laid([t]), [KEPT])


# ------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.top_p=0.9"], "rollout.top_p: got 0.9, expected nothing: it has an effect only where rollout.top_k"),
        (["rollout.top_k=0"], "rollout.top_k: got 0"),
        (["rollout.top_k=1000"], "rollout.top_k: got 1000"),
        (["rollout.min_response_tokens=9"], "at most rollout.max_response_tokens 8"),
        (["rollout.top_k=5", "replay.buffers={demos: {path: x.jsonl}}"], "rollout.top_k: got 5"),
    ],
)
def test_what_cannot_be_renormalised_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match="expected") as refused:
        plan_run("quickstart", "async_rl", overrides)
    assert said in str(refused.value)


def test_both_jobs_of_a_run_draw_alike() -> None:
    *_, stage = plan_run("quickstart", "async_rl", ["rollout.top_k=5", "rollout.top_p=0.9"])
    equal = must_be_equal(stage.config)
    assert (equal["rollout.top_k"], equal["rollout.top_p"]) == (5, 0.9)
    assert stage.config.samplings.default.masks == (KEPT,)
    assert math.isclose(stage.config.samplings.default.top_p, 0.9)

"""The loop of supervised finetuning, without Ray: how long it trains, and what it says of it."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.config import load_config
from leeway.recipes import sft
from leeway.runtime.supervisor import Supervisor
from leeway.types import NO_VERSION, Trajectory, batch_trajectories

TOKENS = 3


class FakeRank:
    """A trainer rank whose loss falls by 0.1 at every step, from `first_loss`."""

    def __init__(self, first_loss: float) -> None:
        self.losses = (first_loss - 0.1 * i for i in itertools.count())
        self.train_step = SimpleNamespace(remote=self._step)

    async def _step(self, batch: Any, publish: bool) -> dict[str, float]:
        assert not publish, "nothing is published in supervised training"
        return {"train/loss/sft": next(self.losses)}


class Recorder:
    """Stands for the monitor and for the checkpoints."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.saved_after: list[int] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    async def after_step(self, step: int) -> dict[str, float]:
        self.saved_after.append(step)
        return {}


def train(
    monkeypatch: pytest.MonkeyPatch, *, stop_below: str, first_loss: float, total_steps: int = 50, earlier: Any = ()
) -> Any:
    monkeypatch.setattr(sft.ray, "put", lambda batch: batch)
    config = load_config("quickstart", [f"stages.sft.train.stop_below_loss={stop_below}"], recipe="sft")
    example = Trajectory(
        prompt_tokens=[1],
        response_tokens=[2] * TOKENS,
        loss_mask=[True] * TOKENS,
        behavior_logprobs=[0.0] * TOKENS,
        policy_versions=[NO_VERSION] * TOKENS,
        reward=0.0,
        finish_reason="stop",
        text="",
    )
    batch = batch_trajectories([example], [0.0], num_sequences=1, num_tokens=TOKENS)
    launcher: Any = SimpleNamespace(parts=SimpleNamespace(trainers=[FakeRank(first_loss)], supervisor=Supervisor()))
    recorder: Any = Recorder()
    record = sft.Record(config, "sft", recorder, name="sft", loss_name="train/loss/sft", earlier=earlier)
    first_step = len(earlier)
    steps = sft._train(
        config, launcher, record, recorder, itertools.repeat([batch]), total_steps, first_step=first_step
    )
    last_step = asyncio.run(steps)
    assert recorder.steps == recorder.saved_after == list(range(first_step + 1, last_step + 1))
    assert record.num_tokens == TOKENS * last_step
    return SimpleNamespace(num_steps=last_step, loss=record.loss)


def test_without_a_target_all_steps_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = train(monkeypatch, stop_below="null", first_loss=4.0)
    assert trained.num_steps == 50
    last = [4.0 - 0.1 * i for i in range(50 - sft.LOSS_WINDOW, 50)]
    assert trained.loss == pytest.approx(sum(last) / sft.LOSS_WINDOW)


def test_it_ends_with_the_first_step_whose_running_loss_is_below_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    # The mean of the last 20 of 4.0, 3.9, ... is 4.0 - 0.1 * (steps - 10.5): first below 1.42 after 37 steps.
    trained = train(monkeypatch, stop_below="1.42", first_loss=4.0)
    assert trained.num_steps == 37
    assert trained.loss < 1.42


def test_a_few_good_steps_at_the_start_do_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = train(monkeypatch, stop_below="1.0", first_loss=0.5)
    assert trained.num_steps == sft.LOSS_WINDOW, "the mean is taken over a full window"


def test_what_an_earlier_part_trained_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of the loss, and the tokens: a run that was stopped ends where it would have ended."""
    rows = [
        {"step": i + 1, "role": "trainer", "train/loss/sft": 4.0 - 0.1 * i, "train/response_tokens/total": TOKENS}
        for i in range(30)
    ]
    trained = train(monkeypatch, stop_below="1.42", first_loss=4.0 - 0.1 * 30, earlier=rows)
    assert trained.num_steps == 37
    again = [*rows, *({**rows[0], "step": i, "train/loss/sft": 1.0} for i in range(31, 61))]
    assert train(monkeypatch, stop_below="1.42", first_loss=0.1, total_steps=90, earlier=again).num_steps == 60

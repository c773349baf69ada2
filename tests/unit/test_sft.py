"""The loop of supervised finetuning, without Ray: how long it trains, and what it says of it."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.config import load_config
from leeway.driver import offline
from leeway.monitor.series import read_series
from leeway.recipes import sft
from leeway.runtime.supervisor import Supervisor
from leeway.tasks import Prompter
from leeway.tasks.taskset import build_taskset
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.trainer.actor import TrainedStep
from leeway.types import NO_VERSION, Trajectory, batch_trajectories

TOKENS = 3
PROMPTER = Prompter(build_tokenizer(["q0123456789 a"]))


class FakeRank:
    """A trainer rank whose loss falls by 0.1 at every step, from `first_loss`."""

    def __init__(self, first_loss: float) -> None:
        self.losses = (first_loss - 0.1 * i for i in itertools.count())
        self.train_step = SimpleNamespace(remote=self._step)

    async def _step(self, batch: Any, publish: bool) -> TrainedStep:
        assert not publish, "nothing is published in supervised training"
        return TrainedStep({"train/loss/sft": next(self.losses)}, {})


class Recorder:
    """Stands for the monitor and for the checkpoints."""

    run_dir = Path("run")

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.saved_after: list[int] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: dict[str, float], *, role: str = "") -> None:
        if role == "evaluation":
            self.evaluations.append((step, metrics))
        else:
            self.steps.append(step)

    async def after_step(self, step: int) -> dict[str, float]:
        self.saved_after.append(step)
        return {}


def train(
    monkeypatch: pytest.MonkeyPatch, *, stop_below: str, first_loss: float, total_steps: int = 50, earlier: Any = ()
) -> Any:
    monkeypatch.setattr(offline.ray, "put", lambda batch: batch)
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
    record = offline.OfflineReport(config, recorder, name="sft", loss_name="train/loss/sft", earlier=earlier)
    first_step = len(earlier)
    feed: Any = SimpleNamespace(next=lambda step: ([batch], TOKENS, {}))
    steps = sft._train(config, launcher, record, recorder, feed, total_steps, first_step=first_step)
    last_step = asyncio.run(steps)
    assert recorder.steps == recorder.saved_after == list(range(first_step + 1, last_step + 1))
    assert record.num_tokens == TOKENS * last_step
    return SimpleNamespace(num_steps=last_step, loss=record.loss)


def test_without_a_target_all_steps_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = train(monkeypatch, stop_below="null", first_loss=4.0)
    assert trained.num_steps == 50
    last = [4.0 - 0.1 * i for i in range(50 - offline.LOSS_WINDOW, 50)]
    assert trained.loss == pytest.approx(sum(last) / offline.LOSS_WINDOW)


def test_it_ends_with_the_first_step_whose_running_loss_is_below_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    # The mean of the last 20 of 4.0, 3.9, ... is 4.0 - 0.1 * (steps - 10.5): first below 1.42 after 37 steps.
    trained = train(monkeypatch, stop_below="1.42", first_loss=4.0)
    assert trained.num_steps == 37
    assert trained.loss < 1.42


def test_a_few_good_steps_at_the_start_do_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = train(monkeypatch, stop_below="1.0", first_loss=0.5)
    assert trained.num_steps == offline.LOSS_WINDOW, "the mean is taken over a full window"


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


def questions(path: Path, *numbers: int) -> Path:
    path.write_text("".join(json.dumps({"question": f"q{n}", "answer": f"a{n}"}) + "\n" for n in numbers))
    return path


def settings(tmp_path: Path, *overrides: str) -> Any:
    lines = questions(tmp_path / "t.jsonl", *range(20))
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: org/model}}\ntask: {{path: {lines}}}\ntrain: {{steps: 4, batch_size: 2, num_ranks: 2}}\n"
    )
    return load_config(str(tmp_path / "c.yaml"), list(overrides), recipe="sft")


def texts(shares: Any) -> list[str]:
    lengths = [share.prompt_lengths.tolist() for share in shares]
    return [
        "".join(PROMPTER.decode(tokens.tolist()))
        for share, n in zip(shares, lengths, strict=True)
        for tokens in share.prompt_tokens.split(n)
    ]


def test_what_is_held_out_is_measured_and_never_trained_on(tmp_path: Path) -> None:
    more = questions(tmp_path / "more.jsonl", 3, 50)
    config = settings(
        tmp_path, "task.holdout_frac=0.4", f"eval.tasksets={{more: {{name: jsonl, path: {more}}}}}", "eval.num_tasks=5"
    )
    measured = sft.held_out_examples(config, PROMPTER)
    taskset: Any = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval)
    batch = next(sft._batches(config, taskset, PROMPTER))
    assert {name: len(texts(shares)) for name, shares in measured.items()} == {"held_out": 5, "more": 2}
    assert set(texts(measured["more"])) == {"q3", "q50"}
    assert [int(share.num_sequences) for share in measured["held_out"]] == [5, 5], "of all ranks together"
    assert not {t for shares in measured.values() for t in texts(shares)} & {t.prompt for t in taskset.tasks}
    assert len(batch) == 2
    assert sft.held_out_examples(settings(tmp_path), PROMPTER) == {}


def test_the_held_out_loss_is_told_when_the_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offline.ray, "put", lambda batch: batch)
    config = settings(tmp_path, "task.holdout_frac=0.4", "eval.every=2", "train.num_ranks=1")
    rank, recorder = FakeRank(4.0), Recorder()

    async def evaluate(batch: Any) -> dict[str, float]:
        return {"train/loss/sft": float(len(batch.prompt_lengths)), "train/entropy/mean": 2.0}

    rank.evaluate = SimpleNamespace(remote=evaluate)  # type: ignore[attr-defined]
    launcher: Any = SimpleNamespace(parts=SimpleNamespace(trainers=[rank], supervisor=Supervisor()))
    measured = sft.held_out_examples(config, PROMPTER)
    context: Any = SimpleNamespace(name="warm-up", config=config)
    measure = offline.Measure(context, launcher, recorder, measured)  # type: ignore[arg-type]
    record: Any = offline.OfflineReport(config, recorder, name="sft", loss_name="train/loss/sft")  # type: ignore[arg-type]
    taskset: Any = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval)

    async def run() -> dict[str, Any]:
        feed = offline.Feed(sft._batches(config, taskset, PROMPTER), taskset, first_step=0)
        await sft._train(config, launcher, record, recorder, feed, 6, measure=measure)  # type: ignore[arg-type]
        return await measure(6)

    after = asyncio.run(run())
    count = float(len(texts(measured["held_out"])))
    assert after == {"loss_sft": count, "entropy_mean": 2.0}
    numbers = {"eval/held_out/loss_sft": count, "eval/held_out/entropy_mean": 2.0}
    assert recorder.evaluations == [(2, numbers), (4, numbers), (6, numbers)]
    assert f"warm-up: held out at step 4: loss sft {count:.3f}, entropy mean 2.000" in capsys.readouterr().out
    rows = [{"step": 0, "role": "evaluation", **numbers, "eval/more/loss_sft": 1.5}]
    resumed = offline.OfflineReport(config, recorder, name="sft", loss_name="train/loss/sft", earlier=rows)  # type: ignore[arg-type]
    assert resumed.first_evaluation() == {**after, "tasksets": {"more": {"loss_sft": 1.5}}}
    assert offline.changes({"loss_sft": 2.0}, after) == [f"held out: loss sft 2.000 -> {count:.3f}"]


@pytest.mark.slow
def test_the_picture_shows_the_held_out_loss() -> None:
    from leeway.monitor.curves import build_figure

    rows = [{"step": i, "train/loss/sft": 3.0 - 0.1 * i} for i in range(1, 9)]
    rows += [{"step": i, "eval/held_out/loss_sft": 3.0 - 0.1 * i} for i in (0, 8)]
    [axes] = build_figure([("sft", read_series(rows))]).axes
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["training loss (2.2 at the end)", "held-out loss"]

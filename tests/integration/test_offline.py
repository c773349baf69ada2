"""`leeway run offline_rl` as a user starts it: rows of right and wrong answers, without logprobs or an engine."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT

GROUPS = 1_500


@pytest.mark.timeout(600)
def test_the_policy_learns_from_stored_rewards_and_prefers_answers_that_it_was_not_trained_on(
    start: Any, warm: Path, tmp_path: Path
) -> None:
    make_pairs = runpy.run_path(str(ROOT / "examples/preference_pairs.py"))["pairs"]
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for pair in list(make_pairs(3 * GROUPS))[:GROUPS]:
            for answer, reward in ((pair["answer"], 1.0), (pair["rejected"], 0.0)):
                file.write(json.dumps({"question": pair["question"], "answer": answer, "reward": reward}) + "\n")
    settings = [
        f"task.path={rows}",
        "task.name=jsonl",
        "task.holdout_frac=0.1",
        f"model.path={warm}",
        "model.init=null",
    ]
    settings += ["train.epochs=3", "train.steps=null", "train.groups_per_step=100"]
    settings += ["optimizer.lr=1e-4", "optimizer.warmup_steps=5"]
    settings += ["cluster.cpus_per_trainer=1", "monitor.console=plain"]
    run = start("offline_rl", *settings, config="quickstart", name="run").wait(400)
    assert run.code == 0, run.output
    assert "groups had no logprobs; those of the initial weights stand for them" in run.output
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in lines if "train/loss/policy" in row]
    sequences = [row["train/sequences"] for row in steps]
    held_out = GROUPS - sum(sequences) / 2 / 3
    assert 0.07 * GROUPS < held_out < 0.13 * GROUPS, "each of the others was trained on, once in each epoch"
    assert sequences[:-1] == [200.0] * (len(steps) - 1)
    assert steps[0]["train/kl/mean"] == pytest.approx(0.0, abs=1e-4), (
        "the policy that is compared with is the first one"
    )
    assert steps[-1]["train/kl/mean"] > 1e-3
    assert not [name for row in lines for name in row if "policy_lag" in name]
    before, after = (row["eval/held_out/loss_policy"] for row in lines if "eval/held_out/loss_policy" in row)
    assert before == pytest.approx(0.0, abs=1e-3)
    assert after < -0.003, "right answers to questions that it was not trained on have become likelier"
    assert run.summary["learned"] is True

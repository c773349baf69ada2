"""The job itself: the reward rises, trainer and engine agree, the bound holds, and all that a run promises is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TOLERANCE = 1e-4
SAMPLED = (
    "eval.tasksets={sampled: {name: reasoning_gym, dataset: chain_sum, options: {min_terms: 2, max_terms: 2, "
    "min_digits: 2, max_digits: 2}, size: 200, num_tasks: 48, samples: 4, temperature: 1}}"
)


@pytest.mark.timeout(700)
def test_asynchronous_rl_learns_within_the_bound(start: Any, from_warm: list[str]) -> None:
    small = [f"stages.async_rl.train.{size}" for size in ("steps=60", "groups_per_step=48")]
    own = (*small, "staleness.in_flight=recompute", "monitor.tensorboard=true")
    command = start("async_rl", *from_warm, *own, SAMPLED)
    run = command.wait(450)
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["status"] == "completed"
    assert summary["steps"] == 60

    # It learns: sampled reward in training, greedy accuracy on questions that it never trained on.
    assert 0.2 <= summary["reward_first"] <= 0.55
    assert summary["reward_last"] >= summary["reward_first"] + 0.08
    assert summary["eval"]["after"]["exact_match"] > summary["eval"]["before"]["exact_match"] + 0.05

    # It is asynchronous, and inside the bound at every step.
    assert max(run.series("train/policy_lag/max")) in (1, 2)
    assert summary["max_policy_lag_observed"] <= 2
    assert summary["dropped_stale"] == 0
    assert run.series("replay/groups_taken")[-1] == 60 * 48

    # Served = trained, at every one of the pulls.
    assert summary["pulls"] >= 30
    assert 0 < summary["served_gap_max"] <= TOLERANCE

    # Every trained trajectory that was written down carries a version and a logprob for every token.
    rows = [json.loads(line) for f in run.dir.glob("stages/async_rl/rollouts/*.jsonl") for line in f.open()]
    assert len(rows) == 60 * 16
    assert len({(r["group_id"], r["sequence_id"]) for r in rows}) == len(rows), "a trajectory was trained on twice"
    for row in rows:
        assert len(row["policy_versions"]) == len(row["behavior_logprobs"]) == len(row["response_tokens"])
        assert min(row["policy_versions"]) >= 0

    for name in ("config.yaml", "summary.json", "curves.png"):
        assert (run.dir / name).stat().st_size > 0
    assert list(run.dir.glob("stages/async_rl/tensorboard/*tfevents*"))
    assert {"trainer-0", "generator-0", "replay", "param_server"} <= set(summary["processes"])
    assert summary["versions"]["vllm"]
    assert command.left_over(grace_s=10) == []

    _weights_load_and_evaluate_the_same(start, run.dir, summary)


def _weights_load_and_evaluate_the_same(start: Any, run_dir: Path, summary: dict[str, Any]) -> None:
    """The saved weights serve on their own what the last version served in the run."""
    from transformers import AutoModelForCausalLM

    folder = run_dir / "stages/async_rl/checkpoints/step-000060/hf"
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "qwen2"
    saved = f"eval.checkpoints={run_dir}/stages/async_rl"
    own = ("stages.sft=null", "model.init=null", f"model.path={folder}", saved, SAMPLED)
    again = start("evaluate", *own, name="again").wait(200)
    assert again.code == 0, again.output
    sampled, sampled_alone = summary["eval"]["after"]["tasksets"]["sampled"], again.summary["eval"]["sampled"]
    assert sampled_alone == sampled, "what is drawn depends on weights, seed and task alone"
    assert sampled["pass_at_4"] > sampled["pass_at_1"] == pytest.approx(sampled["mean_at_4"])
    assert list(again.summary["checkpoints"]) == ["60"]
    after, alone = summary["eval"]["after"], again.summary["eval"]["held_out"]
    assert alone["exact_match"] == after["exact_match"]
    assert alone["response_tokens_mean"] == after["response_tokens_mean"]

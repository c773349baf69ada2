"""A real run that trains an adapter: one driver, engine and trainer, and long answers that outlive several versions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import DIGITS_LAST

pytestmark = pytest.mark.timeout(600)
BOUND, STEPS = 3, 6


@pytest.mark.parametrize("engine", [pytest.param("hf", marks=pytest.mark.long("the other engine")), "vllm"])
def test_a_run_with_an_adapter_keeps_its_promises(
    start: Any, from_untrained: list[str], of_sums: list[str], engine: str
) -> None:
    command = start(
        "async_rl",
        *from_untrained,
        *of_sums,
        *DIGITS_LAST,
        f"rollout.engine.name={engine}",
        "rollout.engine.max_num_seqs=32",
        "model.lora.rank=4",
        f"stages.async_rl.train.steps={STEPS}",
        "stages.async_rl.train.groups_per_step=4",
        "stages.async_rl.optimizer.lr=1e-3",
        "stages.async_rl.optimizer.warmup_steps=0",
        "rollout.max_response_tokens=32",
        f"staleness.max_policy_lag={BOUND}",
        "rollout.pull_every=1",
        "staleness.reorder_window=null",
        "staleness.in_flight=recompute",
        "train.audit_every=1",
        "eval.at_start=false",
        "eval.num_tasks=16",
        name=f"lora-{engine}",
    )
    run = command.wait(500)
    assert run.code == 0, run.output
    assert max(run.series("train/policy_lag/max")) <= BOUND
    assert set(run.series("collector/pause_s")) == {0.0}
    assert set(run.series("collector/drain_s")) == {0.0}
    [published] = set(run.series("param_server/bytes"))
    saved = run.dir / "stages/async_rl/checkpoints" / f"step-{STEPS:06}"
    assert 8 * published < (saved / "hf/model.safetensors").stat().st_size
    assert (saved / "adapter/adapter_config.json").exists()
    # Trained tokens, each scored again under exactly the version that it names.
    assert max(run.series("train/audit_gap/max")) < 1e-4
    rollouts = (run.dir / "stages/async_rl/rollouts").glob("*.jsonl")
    rows = [json.loads(line) for file in rollouts for line in file.read_text().splitlines()]
    versions = [{version for version in row["policy_versions"] if version >= 0} for row in rows]
    assert max(len(row["response_tokens"]) for row in rows) == 32
    assert all(len(of_one) == 1 for of_one in versions)
    assert len(set.union(*versions)) > 2

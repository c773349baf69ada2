"""GRPO with a training loop of one's own: torchrl's loss on a plain transformers model, in one process.

    leeway run examples/torchrl_grpo.py --config quickstart train.steps=40

Leeway's engines, buffer and parameter server do the rest, within the same `staleness.max_policy_lag`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss
from transformers import AutoTokenizer

from leeway import driver
from leeway.config import Recipe
from leeway.config.rules import OWN_LOOP_RULES


async def run(context: driver.StageContext) -> driver.StageResult:
    config = context.config
    async with driver.Rollouts(context) as rollouts:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        # Without pad_output, memory grows with the square of the batch (docs/torchrl.md).
        form: Any = {"input_mode": "tokens", "generate": False, "pad_output": True}
        actor = TransformersWrapper(rollouts.model, tokenizer=tokenizer, **form)
        # "generic": its mask is the attention's; what was not sampled is left out by its log-probability, which is NaN.
        loss = GRPOLoss(actor, clip_epsilon=0.2, entropy_bonus=False, masking_strategy="generic")
        optimizer = torch.optim.AdamW(rollouts.model.parameters(), lr=config.optimizer.lr, weight_decay=0.0)

        def step(batch: Any) -> dict[str, float]:
            out = loss(batch)
            out.loss_objective.backward()
            optimizer.step()
            optimizer.zero_grad()
            return {"train/loss/policy": float(out.loss_objective), "train/kl/mean": float(out.kl_approx)}

        before = await rollouts.evaluate()
        async for batch in rollouts.batches():
            await rollouts.publish(await asyncio.to_thread(step, batch))
        after = await rollouts.evaluate()

    folder = context.dir / "model"
    rollouts.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    result = {"steps": rollouts.version, "eval": {"before": before, "after": after}}
    return driver.StageResult(summary=result, model_path=str(folder), goodbye=[driver.in_one_line(before, after)])


RECIPE = Recipe(run=run, generates=True, trains_on="rollouts", rules=OWN_LOOP_RULES)

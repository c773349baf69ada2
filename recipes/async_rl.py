"""Train with RL: engines generate while the trainer learns, within staleness.max_policy_lag.

The driver wires the parts, watches them, and holds the loop below. P groups of rollouts are a batch, U optimizer steps
are taken on it, v is the policy version (the number of optimizer steps in the weights), N engines generate, M ranks
train.

    taskset --> admit() --> Collector[N] --> ReplayBuffer ------------> Trainer[M ranks] ----> ParameterServer
                  | (group, task, min version) ^  | take_batch(P groups)  | train_step             |
                  | env + vLLM, per-token v    |  | in admission order    |                        |
                  | put(group)                 |  v                       |                        |
                  |                            +--+-- published(v+1) <----+------------------------+
                  +<------- pull(v+1) when behind: fetch, pause, load, resume, proof -------+

The collectors' loops run in their actors. Around this loop, `driver.RLStage` starts the parts, evaluates and saves, and
`driver.RLRun` is the verbs. Synchronous RL is the same code with `staleness.max_policy_lag=0`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from leeway import driver
from leeway.config import Recipe
from leeway.config.rules import RL_RULES


async def train(run: driver.RLRun) -> None:
    """Consumes batches; waits for complete ones; unblocked by collectors' puts; produces policy versions."""
    async for batch in run.batches():  # [U][M] shares of P groups; the next batch is collected meanwhile
        await run.score(batch)  # audits, proximal policy, critic: under the weights at the batch's start
        for update, shares in enumerate(batch.steps, start=1):
            publish = run.publishes(run.version + 1)
            await run.step(shares, publish=publish)
            if publish:
                await run.publish()  # version v is handed out beside step v + 1
            if update == len(batch.steps):  # between batches: none is ever half trained on resume
                await run.checkpoint()
            await run.evaluate_if_due()
            await run.log()


async def run(context: driver.StageContext) -> driver.StageResult:
    """GRPO with generation and training side by side. What to turn, by config section:

    - `staleness.max_policy_lag`: how many optimizer steps the generating policy may lag; 0 is synchronous RL
    - `train.groups_per_step`, `train.updates_per_batch`, `algorithm.*`, `optimizer.*`: what is learned from a batch
    - `rollout.num_generators`, `train.num_ranks`: how the machine is split
    - `env.name`, `env.reward`, `task.*`: what is learned
    - `eval.*`: reward and accuracy on held-out tasks before, during and after
    """
    launcher = driver.Launcher(
        context.config, context.recipe, run_dir=context.dir, supervisor=driver.Supervisor(context.watch)
    )
    try:
        result = await driver.RLStage(context, launcher).run(train)
    finally:
        await launcher.parts.stop()
    advice = await asyncio.to_thread(driver.advice_after, context.config, context.dir)
    if advice is None:
        return result
    return replace(result, summary=result.summary | {"advice": advice}, goodbye=[*result.goodbye, advice])


RECIPE = Recipe(run=run, generates=True, trains_on="rollouts", rules=RL_RULES)

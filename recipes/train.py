"""Train with RL on what explorers generate, which are jobs of their own: `leeway run explore`.

The other half of `explore`, and the same loop as async_rl. Explorers come and go at any time, from anywhere that
reaches `explorer.folder`; admission, order, the lag bound and exactly-once are decided here.

    taskset --> admit() --> [explorer a] [explorer b] ... --> ReplayBuffer ------> Trainer[M ranks] --> folder/weights
                  | calls as files                              | groups on disk                             |
                  +<------ published(v + 1) -------------------- -+-- pulled by each explorer <--------------+
"""

from __future__ import annotations

from leeway import driver
from leeway.config import Recipe
from leeway.config.rules import JOB_RULES
from leeway.recipes.async_rl import train


async def run(context: driver.StageContext) -> driver.StageResult:
    """As async_rl without engines. It waits for explorers, and a step waits for them as for slow engines.

    - `explorer.folder`: where they are met; by default in the run's folder
    - `explorer.wait_s`: how long to go on without any
    - `explorer.silent_s`: when one of them counts as lost
    """
    launcher = driver.Launcher(
        context.config, context.recipe, run_dir=context.dir, supervisor=driver.Supervisor(context.watch)
    )
    try:
        return await driver.RLStage(context, launcher).run(train)
    finally:
        await launcher.parts.stop()


RECIPE = Recipe(run=run, generates=False, trains_on="rollouts", elsewhere="generators", rules=JOB_RULES)

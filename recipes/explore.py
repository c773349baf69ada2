"""Generate rollouts for a train job elsewhere: engines and environments that join it, serve it, and may leave or die.

The other half of `train`. Any number, each under its own `explorer.name`, with its own engines and environment:

    leeway run train --config X.yaml
    leeway run explore --config X.yaml explorer.name=a
    leeway run explore --config X.yaml explorer.name=b rollout.num_generators=4

They find the train job by output_dir, project and name, or by `explorer.folder`, in any order of starting.
"""

from __future__ import annotations

from leeway import driver
from leeway.config import Recipe
from leeway.config.rules import JOB_RULES


async def run(context: driver.StageContext) -> driver.StageResult:
    """It waits for the train job, and ends with it. Ctrl-C leaves: what it holds is issued to others.

    - `explorer.name`, `explorer.tasks`: which explorer this is, and whose tasks it works on
    - `rollout.num_generators`, `rollout.engine`, `env.*`: what it generates with
    - `explorer.wait_s`: how long to wait while the train job is away
    """
    return await driver.ExploreStage(context).run()


RECIPE = Recipe(run=run, generates=True, trains_on="rollouts", elsewhere="trainer", rules=JOB_RULES)

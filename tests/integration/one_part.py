"""A recipe whose run has one part, and does nothing: to end it. What watches over it is there as in every run."""

from __future__ import annotations

import asyncio

from leeway import driver
from leeway.config import Recipe


async def run(context: driver.StageContext) -> driver.StageResult:
    supervisor = driver.Supervisor(context.watch)
    launcher = driver.Launcher(context.config, context.recipe, run_dir=context.dir, supervisor=supervisor)
    try:
        await launcher.param_server()
        driver.say("its part is ready")
        await supervisor.wait(asyncio.sleep(300), what="nothing", timeout_s=300)
    finally:
        await launcher.parts.stop()
    raise AssertionError("nobody ended it")


RECIPE = Recipe(run=run, generates=False, reads="heldout")

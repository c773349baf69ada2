"""From Python, in a notebook or a script: start a run with a handle, open one as tables and figures.

    job = leeway.run("async_rl", "quickstart", {"seed": 1})     # a process of its own
    run = leeway.open_run("runs/leeway/quickstart")             # finished, dead, or still running
    run.metrics["train/reward/mean"].plot()

Importing loads neither pandas nor matplotlib: each is loaded by what gives one of its objects.
"""

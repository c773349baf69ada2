"""What to say at the end of a run: one line, from what the run has just written."""

from __future__ import annotations

from pathlib import Path

from ..config import Config, ConfigError
from .calibration import Run, calibrate
from .search import advise


def advice_after(config: Config, stage_dir: Path) -> str | None:
    """The best single change to the settings of a run of `async_rl`, or that none is worth making.

    `stage_dir` holds its metrics.jsonl and rollouts/. None where the run was too short to tell. Takes about a second.
    """
    try:
        return advise(calibrate(Run(config, stage_dir)))
    except ConfigError:
        return None

"""The advice printed at the end of a run: one line, computed from what the run has just written."""

from __future__ import annotations

import logging
from pathlib import Path

from ..config import Config, ConfigError
from .calibration import Run, calibrate
from .search import advise

logger = logging.getLogger(__name__)


def advice_after(config: Config, stage_dir: Path) -> str | None:
    """The best single change to the settings of a run of `async_rl`, or a note that no change is worth making.

    `stage_dir` holds its metrics.jsonl and rollouts/. None if the run was too short to tell. Takes about a second. If
    the simulation fails, the line reports that instead, because the run itself has succeeded. None too where engines
    and trainer share devices, which those of the simulation do not.
    """
    if config.cluster.shares_devices:
        return None
    try:
        return advise(calibrate(Run(config, stage_dir)))
    except ConfigError:
        return None
    except Exception as error:
        logger.exception("the closing simulation failed")
        return (
            f"no advice: the simulation of this run failed ({type(error).__name__}: {error}); the simulation has a bug"
        )

"""Several runs that are compared: which they are, running them on the same parts, what they say.

A study stands on the driver, as recipes do, and nothing stands on it but the recipe that starts it. Each name is loaded
when it is first used, as in `driver`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import offered

if TYPE_CHECKING:  # for editors and type checkers
    from .lag_picture import draw_frontier as draw_frontier
    from .lag_report import FrontierRun as FrontierRun
    from .lag_report import Interval as Interval
    from .lag_report import conclusions as conclusions
    from .lag_report import summarise as summarise
    from .lag_report import write_csv as write_csv
    from .lag_trials import LAG_STUDY_RULES as LAG_STUDY_RULES
    from .lag_trials import Trial as Trial
    from .lag_trials import lag_trials as lag_trials
    from .running import run_trials as run_trials

__getattr__, __dir__, __all__ = offered(__name__)

"""One typed, strict tree of settings: YAML files and `key=value` overrides in, a frozen `Config` out.

What reads files is loaded at its first use: a part that takes its section needs pydantic alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import offered

if TYPE_CHECKING:
    from .check import Problem as Problem
    from .check import check_run as check_run
    from .derived import Derived as Derived
    from .derived import derive as derive
    from .errors import ConfigError as ConfigError
    from .hardware import Hardware as Hardware
    from .hardware import this_machine as this_machine
    from .load import bundled_configs as bundled_configs
    from .load import config_path as config_path
    from .load import load_config as load_config
    from .load import to_yaml as to_yaml
    from .recipe import ONLINE_RL as ONLINE_RL
    from .recipe import Needs as Needs
    from .recipe import Recipe as Recipe
    from .recipe import bundled_recipe_path as bundled_recipe_path
    from .recipe import bundled_recipes as bundled_recipes
    from .recipe import find_recipe as find_recipe
    from .schema import Config as Config
    from .stages import Stage as Stage
    from .stages import plan_run as plan_run
    from .stages import resolve_stages as resolve_stages
    from .stages import run_yaml as run_yaml

__getattr__, __dir__, __all__ = offered(__name__)

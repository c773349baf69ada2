"""One typed, strict tree of settings: YAML files and `key=value` overrides in, a frozen `Config` out."""

from .check import Problem, check_run
from .derived import Derived, derive
from .errors import ConfigError
from .find_recipe import bundled_recipe_path, bundled_recipes, find_recipe
from .hardware import Hardware, this_machine
from .load import bundled_configs, config_path, load_config, to_yaml
from .recipe import ONLINE_RL, Needs, Recipe
from .schema import Config
from .stages import Stage, plan_run, resolve_stages, run_yaml
from .study import Cell, frontier_cells

__all__ = [
    "ONLINE_RL",
    "Cell",
    "Config",
    "ConfigError",
    "Derived",
    "Hardware",
    "Needs",
    "Problem",
    "Recipe",
    "Stage",
    "bundled_configs",
    "bundled_recipe_path",
    "bundled_recipes",
    "check_run",
    "config_path",
    "derive",
    "find_recipe",
    "frontier_cells",
    "load_config",
    "plan_run",
    "resolve_stages",
    "run_yaml",
    "this_machine",
    "to_yaml",
]

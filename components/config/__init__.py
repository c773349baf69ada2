"""One typed, strict tree of settings: YAML files and `key=value` overrides in, a frozen `Config` out."""

from .check import Problem, check_run
from .derived import Derived, derive
from .errors import ConfigError
from .hardware import Hardware, this_machine
from .load import bundled_configs, config_path, load_config, to_yaml
from .names import RECIPES
from .schema import Config
from .stages import Stage, plan_run, resolve_stages, run_yaml
from .study import Cell, frontier_cells

__all__ = [
    "RECIPES",
    "Cell",
    "Config",
    "ConfigError",
    "Derived",
    "Hardware",
    "Problem",
    "Stage",
    "bundled_configs",
    "check_run",
    "config_path",
    "derive",
    "frontier_cells",
    "load_config",
    "plan_run",
    "resolve_stages",
    "run_yaml",
    "this_machine",
    "to_yaml",
]

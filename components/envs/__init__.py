"""Environments and rewards. Loads nothing heavy beyond the shared types."""

from .base import Environment, Policy
from .registry import build_environment
from .rewards import Reward, resolve_reward
from .single_turn import SingleTurn

__all__ = ["Environment", "Policy", "Reward", "SingleTurn", "build_environment", "resolve_reward"]

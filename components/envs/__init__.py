"""Environments and rewards. Loads nothing heavy beyond the shared types."""

from .agent import AgentEnvironment, Endpoint
from .base import Environment, Policy
from .registry import build_environment
from .rewards import Reward, resolve_reward
from .scoring import Score, score
from .single_turn import SingleTurn
from .step import Observation, Step, StepEnvironment
from .transcript import Transcript

__all__ = [
    "AgentEnvironment",
    "Endpoint",
    "Environment",
    "Observation",
    "Policy",
    "Reward",
    "Score",
    "SingleTurn",
    "Step",
    "StepEnvironment",
    "Transcript",
    "build_environment",
    "resolve_reward",
    "score",
]

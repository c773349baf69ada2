"""Options of the built-in environments. They live here so that `leeway validate` can check them without loading any."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from ..section import Section
from .errors import ConfigError, in_our_words, words

M = TypeVar("M", bound=BaseModel)


class SingleTurnOptions(Section):
    """One prompt, one answer: nothing to set."""


class TurnsOptions(Section):
    """Options shared by all multi-turn environments."""

    max_turns: PositiveInt = Field(default=4, description="completions per conversation, at most")
    max_tokens_per_turn: PositiveInt | None = Field(
        default=None, description="longest completion; null: rollout.max_response_tokens"
    )


class MultiTurnOptions(TurnsOptions):
    """A dialogue with feedback: the policy answers until the reward reaches `solved` or the turns are used up."""

    feedback: str = Field(
        default="That is not right. Try again.",
        description='reply to a wrong answer ("{reward}" is replaced), or your function as "pkg.mod:function"',
    )
    solved: float = Field(default=1.0, description="reward at which the conversation ends")
    decay: PositiveFloat = Field(
        default=1.0, le=1.0, description="factor on a reward above 0 for each turn after the first"
    )


class ToolUseOptions(TurnsOptions):
    """Tools that the policy may call; the reward scores its first turn without a call."""

    max_turns: PositiveInt = Field(default=8, description="completions per conversation, at most")
    tools: list[str] = Field(
        default=["calculator"], description='"calculator", "search", or your own as "pkg.mod:ToolClass"'
    )
    corpus: str | None = Field(default=None, description="search: folder of .txt and .md files, or a .jsonl with text")
    result_role: Literal["user", "tool"] = Field(default="user", description="role of the messages that carry results")
    max_result_chars: PositiveInt = Field(default=2000, description="longer results are cut")
    describe: bool = Field(default=True, description="put the tools and the call format into the system message")
    call_penalty: NonNegativeFloat = Field(default=0.0, description="taken from the reward for every failed call")


class FrozenLakeOptions(TurnsOptions):
    """A walk over ice: reach the goal without falling into a hole. Pays 1.0 at the goal, nothing before."""

    max_turns: PositiveInt = Field(default=20, description="moves, at most")
    max_tokens_per_turn: PositiveInt | None = Field(default=8, description="longest completion for one move")
    size: int = Field(default=4, ge=2, le=16, description="rows and columns of the lake")
    holes_frac: float = Field(default=0.2, ge=0.0, le=0.6, description="share of the fields that are holes")
    slip: float = Field(default=0.0, ge=0.0, lt=1.0, description="probability of slipping to a side")


class TorchRLOptions(TurnsOptions):
    """Your own torchrl environment, one conversation per object."""

    make: str = Field(description='your function as "pkg.mod:function"; returns a torchrl EnvBase')
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of that function")
    query_key: str = Field(default="query", description="ChatEnv and reset: where the task's prompt goes")
    observation_key: str = Field(default="observation", description="not for ChatEnv: where the text is read")
    action_key: str = Field(default="action", description="not for ChatEnv: where the completion's text goes")


class GymnasiumOptions(TurnsOptions):
    """A gymnasium environment with text observations; needs the package gymnasium."""

    id: str = Field(description="what gymnasium.make is given")
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of gymnasium.make")
    actions: list[str] | None = Field(
        default=None, description="words for the discrete actions 0, 1, ...; null: the text itself is the action"
    )
    illegal_reward: float = Field(default=0.0, description="paid when no word of `actions` is in the text")


ENVIRONMENT_OPTIONS: dict[str, type[Section]] = {
    "single_turn": SingleTurnOptions,
    "multi_turn": MultiTurnOptions,
    "tool_use": ToolUseOptions,
    "frozen_lake": FrozenLakeOptions,
    "torchrl": TorchRLOptions,
    "gymnasium": GymnasiumOptions,
}


def checked_options(model: type[M], options: dict[str, Any], *, key: str, whose: str) -> M:
    """Parse `options` as `model`. Raises a one-line ConfigError: the option, its value, what is expected, its owner."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        details = error.errors(include_url=False)
        first = details[0]
        name = ".".join([key, *map(str, first["loc"])])
        takes = ", ".join(model.model_fields) or "no options"
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                name, got=words("an unknown option"), expected=f"an option of {whose}", fix=f"it takes {takes}"
            ) from None
        missing = first["type"] == "missing"
        raise ConfigError(
            name,
            got=None if missing else first["input"],
            expected=in_our_words(first["msg"]),
            fix=f"{whose} takes {takes}",
        ) from None

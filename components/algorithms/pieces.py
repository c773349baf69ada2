"""The replaceable pieces of an objective by name: registered ones, or a user's own "package.module:function".

A mistake in a user's function is refused with the function's name and what was expected. Its signature and its result
on a small example are checked before anything starts (`check_pieces`), its results at every step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .advantages import ADVANTAGES, AdvantageFunction
from .policy_loss import cispo_loss, clipped_ratio_loss, gspo_loss, sapo_loss
from .reinforce import opmd_kimi_loss, opmd_loss, rec_loss, reinforce_loss, sppo_loss, topr_loss
from .turns import TURN_ADVANTAGES, TurnAdvantage, Turns

POLICY_LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "clip": clipped_ratio_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "reinforce": reinforce_loss,
    "topr": topr_loss,
    "opmd": opmd_loss,
    "opmd_kimi": opmd_kimi_loss,
    "sppo": sppo_loss,
    "rec": rec_loss,
}
CLIPS = {"clip": "gradient", "gspo": "gradient", "cispo": "weight"}
"""What the clip range does to a token outside of it; losses that are not named have no such range."""

GIVEN_TO_LOSSES = ("mask", "segments", "clip_low", "clip_high", "dual_clip")
GIVEN_TO_ADVANTAGES = ("eps", "turns")
LOSS_SIGNATURE = (
    "a function (logprobs, old_logprobs, advantages, *, [mask, segments, clip_low, clip_high], [options]) that returns "
    "the loss of each token"
)
ADVANTAGE_SIGNATURE = (
    "a function (rewards, groups, *, [options]) of a whole take, or a leeway.algorithms.advantages.per_group function "
    "(rewards, *, [options]) of one group, that returns one advantage per reward; or, asking for turns by keyword, a "
    "function (rewards, groups, *, turns, [options]) that returns one per turn"
)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A policy loss with its options filled in. `given` names the items of GIVEN_TO_LOSSES that it asks for."""

    name: str
    function: Callable[..., torch.Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()

    @property
    def clips(self) -> str:
        return CLIPS.get(self.name, "")

    def __call__(
        self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        wanted = {name: given[name] for name in self.given}
        losses = self.function(logprobs, old_logprobs, advantages, **wanted, **self.options)
        return losses if self.name in POLICY_LOSSES else _checked(losses, like=logprobs, who=f"policy loss {self.name}")


def policy_loss_of(name: str, options: Mapping[str, Any] | None = None) -> PolicyLoss:
    """The loss called `name` with its options. Raises ValueError in one line."""
    key = "algorithm.policy_loss"
    function = POLICY_LOSSES.get(name) or _users(name, key=key, expected=LOSS_SIGNATURE)
    wanted = _keywords(function, name, 3, GIVEN_TO_LOSSES, options or {}, key=key, expected=LOSS_SIGNATURE)
    return PolicyLoss(name=name, function=function, options=dict(options or {}), given=wanted)


def advantage_of(
    name: str, options: Mapping[str, Any] | None = None, *, eps: float = 1e-6
) -> AdvantageFunction | TurnAdvantage:
    """The advantage function called `name` with its options. Raises ValueError in one line."""
    key = "algorithm.advantage"
    function = ADVANTAGES.get(name) or TURN_ADVANTAGES.get(name) or _users(name, key=key, expected=ADVANTAGE_SIGNATURE)
    of_group = getattr(function, "of_group", None)
    wanted = _keywords(
        of_group or function,
        name,
        1 if of_group else 2,
        GIVEN_TO_ADVANTAGES,
        options or {},
        key=key,
        expected=ADVANTAGE_SIGNATURE,
    )
    bound = functools.partial(function, **({"eps": eps} if "eps" in wanted else {}), **(options or {}))
    if "turns" in wanted:

        def of_turns(rewards: torch.Tensor, groups: torch.Tensor, *, turns: Turns) -> torch.Tensor:
            return _checked(bound(rewards, groups, turns=turns), like=turns.rewards, who=f"advantage {name}")

        return TurnAdvantage(of_turns)
    if name in ADVANTAGES:
        return bound

    def checked(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return _checked(bound(rewards, groups), like=rewards, who=f"advantage {name}")

    return checked


def check_pieces(algorithm: Any) -> None:
    """Import and try the pieces that the `algorithm` section names; ValueError in one line for a user's mistake."""
    segments = torch.tensor([0, 0, 1, 1, 1, 2])
    mask = torch.tensor([True, True, True, False, True, True])
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -0.7, -3.0], requires_grad=True)
    old_logprobs = torch.tensor([-0.6, -1.0, -1.5, 0.0, -0.9, -2.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 0.0])
    loss = policy_loss_of(algorithm.policy_loss, algorithm.policy_loss_options)
    given = {"mask": mask, "segments": segments, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}
    losses = _tried(lambda: loss(logprobs, old_logprobs, advantages, **given), f"policy loss {loss.name}")
    if not losses.requires_grad:
        raise ValueError(f"policy loss {loss.name}: its result does not depend on logprobs; expected a gradient to it")
    advantage = advantage_of(algorithm.advantage, algorithm.advantage_options, eps=algorithm.advantage_eps)
    rewards, groups = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 0.5]), torch.tensor([0, 0, 0, 1, 1, 2])
    if isinstance(advantage, TurnAdvantage):
        owners, states = torch.tensor([0, 0, 1, 2, 2, 3, 4, 5]), torch.tensor([0, 1, 0, 0, 2, 3, 3, 4])
        turns = Turns(trajectories=owners, states=states, rewards=torch.tensor([0.0, 0, 1, 0.5, 0.5, 0, 0, 0.5]))
        _tried(lambda: advantage(rewards, groups, turns), f"advantage {algorithm.advantage}")
    else:
        _tried(lambda: advantage(rewards, groups), f"advantage {algorithm.advantage}")


def _users(name: str, *, key: str, expected: str) -> Callable[..., Any]:
    from ..envs.importing import import_user_object, is_user_name  # loads all of envs, which few losses need

    if not is_user_name(name):
        raise ValueError(f"{key}: got {name!r}; expected a registered name, or package.module:function")
    function = import_user_object(name, key=key, expected=expected)
    if not callable(function):
        raise ValueError(f"{key}: {name} is a {type(function).__name__}; expected {expected}")
    return function


def _keywords(
    function: Callable[..., Any],
    name: str,
    num_tensors: int,
    given: tuple[str, ...],
    options: Mapping[str, Any],
    *,
    key: str,
    expected: str,
) -> tuple[str, ...]:
    """Which of `given` the function asks for; refuses a signature that cannot be called with `options`."""
    parameters = list(inspect.signature(function).parameters.values())
    kinds = inspect.Parameter
    tensors = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    named = {p.name: p for p in parameters[num_tensors:] if p.kind in (kinds.KEYWORD_ONLY, kinds.POSITIONAL_OR_KEYWORD)}
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    missing = [n for n, p in named.items() if p.default is kinds.empty and n not in given and n not in options]
    if len(tensors) < num_tensors or missing:
        got = f"({', '.join(str(p).split(':')[0] for p in parameters)})"
        needs = f", whose {', '.join(missing)} nothing gives: set {key}_options" if missing else ""
        raise ValueError(f"{key}: {name} has the signature {got}{needs}; expected {expected}")
    own = [n for n in named if n not in given]
    for option in options:
        if option not in own and not takes_any:
            raise ValueError(
                f"{key}_options.{option}: {name} does not take it; it takes {', '.join(own) or 'no options'}"
            )
    return tuple(n for n in given if n in named)


def _checked(result: Any, *, like: torch.Tensor, who: str) -> torch.Tensor:
    expected = f"expected a finite tensor of shape {list(like.shape)}"
    if not isinstance(result, torch.Tensor):
        raise ValueError(f"{who} returned a {type(result).__name__}; {expected}")
    if result.shape != like.shape:
        raise ValueError(f"{who} returned shape {list(result.shape)}; {expected}")
    if not bool(torch.isfinite(result).all()):
        raise ValueError(f"{who} returned nan or inf at {int((~torch.isfinite(result)).sum())} places; {expected}")
    return result


def _tried(call: Callable[[], torch.Tensor], who: str) -> torch.Tensor:
    try:
        return call()
    except ValueError as error:
        raise error if str(error).startswith(who) else ValueError(f"{who} failed on a small example: {error}") from None
    except Exception as error:
        raise ValueError(f"{who} failed on a small example: {type(error).__name__}: {error}") from error


CLIP = policy_loss_of("clip")
"""The default policy loss."""

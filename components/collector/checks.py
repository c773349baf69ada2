"""What an environment may take, and what it must return: checked here, so that a wrong group fails by itself."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

from ..types import Trajectory

logger = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_S = 5.0
"""So long a rollout that is cancelled may take to clean up; then it is left to itself, and its group goes on."""


class TookTooLong(Exception):
    """The deadline passed; the work was cancelled."""


async def within(timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled after `timeout_s`. Raises TookTooLong, also where it will not end."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if done:
        return task.result()
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE_S)
    if not task.done():
        logger.error("a rollout goes on after it was cancelled; it must let asyncio.CancelledError through")
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    elif not task.cancelled():
        task.exception()  # asked for, so that nobody warns about it
    raise TookTooLong


def checked(trajectories: Any, *, group_size: int, max_model_len: int, versions: set[int]) -> list[Trajectory]:
    """What an environment returned, if it is what it must be; raises TypeError or ValueError that says what is wrong.

    Sampled tokens must have a finite logprob and one of the `versions` that this rollout's own requests came back with:
    any other would break the lag bound, or be waited for.
    """
    if not isinstance(trajectories, list) or not all(isinstance(t, Trajectory) for t in trajectories):
        raise TypeError(f"rollout() returned {type(trajectories).__name__}; expected a list of leeway.Trajectory")
    if len(trajectories) != group_size:
        raise ValueError(
            f"rollout() returned {len(trajectories)} trajectories; expected policy.group_size = {group_size}"
        )
    for t in (conversation for trajectory in trajectories for conversation in trajectory.conversations()):
        length = len(t.prompt_tokens) + len(t.response_tokens)
        if length > max_model_len:
            raise ValueError(
                f"rollout() returned a trajectory of {length} tokens; rollout.max_model_len is {max_model_len}"
            )
        # Whole lists at a time: this runs on the event loop, for every token.
        tokens = [*t.prompt_tokens, *t.response_tokens]
        if set(map(type, tokens)) != {int} or min(tokens) < 0:
            raise TypeError("rollout() returned tokens that are no whole numbers from 0; expected token ids (int)")
        if not math.isfinite(sum(itertools.compress(t.behavior_logprobs, t.loss_mask))):
            worst = next(p for p in t.behavior_logprobs if not math.isfinite(p))
            raise ValueError(f"rollout() returned a token with logprob {worst}; expected what generate() gave")
        unknown = set(itertools.compress(t.policy_versions, t.loss_mask)) - versions
        if unknown:
            raise ValueError(
                f"rollout() returned a sampled token of version {min(unknown)}; expected what generate() gave in this "
                f"rollout: {sorted(versions)}"
            )
    if not any(any(t.loss_mask) for t in trajectories):
        raise ValueError(
            "rollout() returned trajectories of which no token was sampled by the policy; nothing to train on"
        )
    return trajectories

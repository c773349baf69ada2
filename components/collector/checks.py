"""What an environment may take, and what it must return: checked here, so that a wrong group fails by itself."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch

from ..envs.base import ended_by_own_code
from ..samples import TOKEN_FIELDS, Samples, end_to_end, laid
from ..sampling_masks import check_masks
from ..types import Trajectory

logger = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_S = 5.0
"""How long a cancelled rollout may take to clean up. After that nobody waits for it, and its group continues."""


class TookTooLong(Exception):
    """The deadline passed; the work was cancelled."""


class Ended(Exception):
    """What ended a rollout, `error`, was no ordinary exception. This one is, and so the rollout's own failure."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


async def within(
    timeout_s: float,
    rollout: Callable[[], Awaitable[T]],
    *,
    counted_s: Callable[[], float],
    going_on: set[asyncio.Task[Any]],
) -> T:
    """What `rollout` returns; it is cancelled when `counted_s` has grown by `timeout_s`.

    Raises TookTooLong then, and what the rollout raised, always as an ordinary exception: in asyncio a CancelledError
    would pass for a cancelled group, and a SystemExit would end the event loop. A rollout that continues although it
    was cancelled is in `going_on` until it ends.
    """
    begun_s = counted_s()
    _contain_new_tasks(asyncio.get_running_loop())
    task = asyncio.create_task(_contained(rollout))
    try:
        while not task.done() and (left_s := timeout_s - (counted_s() - begun_s)) > 0:
            await asyncio.wait({task}, timeout=max(left_s, min(1.0, timeout_s / 20)))
    except asyncio.CancelledError:
        await _cancel(task, going_on)
        raise
    if not task.done():
        await _cancel(task, going_on)
        raise TookTooLong
    if task.cancelled():
        raise Ended(asyncio.CancelledError("the rollout cancelled itself"))
    error = task.exception()
    if error is None or isinstance(error, Exception):
        return task.result()
    raise Ended(error) from error


async def _cancel(task: asyncio.Task[Any], going_on: set[asyncio.Task[Any]]) -> None:
    """Cancel, and wait for the end; after `GRACE_S` the rollout is left to itself."""
    task.cancel()
    going_on.add(task)
    task.add_done_callback(going_on.discard)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else asks
    await asyncio.wait({task}, timeout=GRACE_S)
    if not task.done():
        logger.error("a rollout still runs after it was cancelled; it must let asyncio.CancelledError through")


async def until_ended(going_on: set[asyncio.Task[Any]]) -> None:
    """Wait for rollouts that were cancelled, for at most `GRACE_S`."""
    if going_on:
        await asyncio.wait(going_on, timeout=GRACE_S)


async def _contained(rollout: Callable[[], Awaitable[T]]) -> T:
    _in_rollout.set(True)
    try:
        return await rollout()
    except BaseException as error:
        if ended_by_own_code(error) and not isinstance(error, Exception):
            raise Ended(error) from error
        raise


_in_rollout: ContextVar[bool] = ContextVar("leeway_in_rollout", default=False)


def _contain_new_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, tasks that rollouts start do not end the event loop by a SystemExit or KeyboardInterrupt either."""
    if not isinstance(loop.get_task_factory(), _ContainingFactory):
        loop.set_task_factory(_ContainingFactory(loop.get_task_factory()))


class _ContainingFactory:
    def __init__(self, make: Callable[..., asyncio.Future[Any]] | None) -> None:
        self._make = make

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        inner = work
        if _in_rollout.get():
            work = _without_exit(work)
        task = asyncio.Task(work, loop=loop, **options) if self._make is None else self._make(loop, work, **options)
        if work is not inner:
            task.add_done_callback(lambda _: inner.close())  # cancelled before it began, it would never be awaited
        return task


async def _without_exit(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise Ended(error) from error


def reason_of(error: BaseException) -> str:
    """Type, message and place of an exception; of what `Ended` stands for, if it is one."""
    while isinstance(error, Ended):
        error = error.error
    hint = ""
    if isinstance(error, asyncio.CancelledError):
        hint = "" if str(error) else "something that it waited for was cancelled"
    elif not isinstance(error, Exception):
        hint = "an environment must not end its process"
    said = ": ".join(filter(None, [type(error).__name__, str(error), hint]))
    frames = traceback.extract_tb(error.__traceback__)
    return f"{said} ({frames[-1].filename}:{frames[-1].lineno})" if frames else said


def checked(
    trajectories: Any,
    *,
    group_size: int,
    temperature: float,
    max_model_len: int,
    versions: set[int],
    sampled: Sequence[tuple[list[int], list[float]]] | None = None,
    vocab_size: int | None = None,
    masks: Sequence[str] = (),
) -> Samples:
    """What an environment returned, sampled at this temperature, as tensors; raises TypeError or ValueError that says
    what is wrong with it.

    Sampled tokens must have a finite logprob and one of the `versions` that this rollout's own requests came back with:
    any other would break the lag bound, or be waited for. Each must be one of the `sampled`, (tokens, logprobs) of
    each answer, with its logprob (None: whoever made the trajectories took them from there). Tokens are below
    `vocab_size` (None: not known): the trainer has no row for another. `masks`: the `sampling_masks` that sampled
    tokens come with.
    """
    if not isinstance(trajectories, list) or not all(isinstance(t, Trajectory) for t in trajectories):
        raise TypeError(f"rollout() returned {type(trajectories).__name__}; expected a list of leeway.Trajectory")
    if len(trajectories) != group_size:
        raise ValueError(
            f"rollout() returned {len(trajectories)} trajectories; expected policy.group_size = {group_size}"
        )
    for t in trajectories:
        if wrong := [name for name, value in t.metrics.items() if not isinstance(value, Real)]:
            raise TypeError(
                f"rollout() returned the metric {wrong[0]} = {t.metrics[wrong[0]]!r:.40}; expected a number"
            )
        if not isinstance(t.text, str) or not isinstance(t.finish_reason, str):
            raise TypeError("rollout() returned a trajectory whose text or finish_reason is not text")
    for t in (conversation for trajectory in trajectories for conversation in trajectory.conversations()):
        length = len(t.prompt_tokens) + len(t.response_tokens)
        if length > max_model_len:
            raise ValueError(
                f"rollout() returned a trajectory of {length} tokens; rollout.max_model_len is {max_model_len}"
            )
    try:
        samples = laid(trajectories, temperature=temperature)
    except (OverflowError, TypeError) as error:
        raise TypeError(f"{_NO_TOKENS} ({error})") from None
    # numpy from here on: of a call over so few numbers, torch takes five times as long.
    fields = {name: samples[name].numpy() for name in ("prompt_tokens", *TOKEN_FIELDS)}
    ids = fields["prompt_tokens"], fields["response_tokens"]
    if any(own.min(initial=0) < 0 for own in ids):
        raise TypeError(_NO_TOKENS)
    largest = max(int(own.max(initial=0)) for own in ids)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(f"rollout() returned token id {largest}; the model's vocabulary has {vocab_size}")
    is_sampled = fields["loss_mask"]
    logprobs = fields["behavior_logprobs"][is_sampled]
    if not np.isfinite(logprobs).all():
        worst = logprobs[~np.isfinite(logprobs)][0].item()
        raise ValueError(f"rollout() returned a token with logprob {worst}; expected what generate() gave")
    try:
        check_masks(samples, masks)
    except ValueError as error:
        raise ValueError(f"rollout() returned trajectories that cannot be trained on: {error}") from None
    if unknown := set(fields["policy_versions"][is_sampled].tolist()) - versions:
        raise ValueError(
            f"rollout() returned a sampled token of version {min(unknown)}; expected what generate() gave in "
            f"this rollout: {sorted(versions)}"
        )
    if not len(logprobs):
        raise ValueError(
            "rollout() returned trajectories of which no token was sampled by the policy; nothing to train on"
        )
    if sampled is not None and not (is_sampled.all() and _are_answers(trajectories, sampled)):
        _check_drawn(fields["response_tokens"][is_sampled], logprobs, sampled)
    return samples


def _are_answers(trajectories: Sequence[Trajectory], sampled: Sequence[tuple[list[int], list[float]]]) -> bool:
    """Whether each conversation is one answer, in order: as it mostly is, and quick to see."""
    conversations = [c for t in trajectories for c in t.conversations()]
    return len(conversations) == len(sampled) and all(
        c.response_tokens == tokens and c.behavior_logprobs == logprobs
        for c, (tokens, logprobs) in zip(conversations, sampled, strict=True)
    )


def _check_drawn(tokens: np.ndarray, logprobs: np.ndarray, sampled: Sequence[tuple[list[int], list[float]]]) -> None:
    """Raises ValueError for a token that the engine did not draw, or not with this logprob: its ratio would be wrong
    from the first step on.
    """
    own = _with_logprobs(tokens, logprobs)
    drawn = _with_logprobs(
        end_to_end([its for its, _ in sampled], torch.int32).numpy(),
        end_to_end([its for _, its in sampled], torch.float32).numpy(),
    )
    if np.array_equal(own, drawn):  # as they mostly are: in the order in which they came
        return
    other = np.isin(own, drawn, invert=True).nonzero()[0]
    if len(other):
        at = int(other[0])
        raise ValueError(
            f"rollout() returned token {int(tokens[at])} with logprob {logprobs[at].item():.4g} as sampled, which "
            "generate() did not give in this rollout; expected its tokens and logprobs as they are, and loss_mask "
            "False for all others"
        )


def _with_logprobs(tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """int32 [N], float32 [N] -> int64 [N]: both, bit for bit."""
    return (tokens.astype(np.int64) << 32) | logprobs.view(np.uint32)


_NO_TOKENS = (
    "rollout() returned tokens that are no whole numbers from 0, or one without a logprob, version or mask; "
    "expected token ids (int), and what generate() gave for each"
)

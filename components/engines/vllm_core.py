"""Calls that vLLM's engine core answers beside its own.

    stand_still   pause; answers when what is to finish has finished
    take_staged   then, in the engine's own turn: load what was staged, name the version, go on
    add_groups    requests that were sent together, as if each had come alone

The first two are sent one after the other, without waiting: the engine would stand idle while its answer, and the next
call, wait for a turn of a process that shares its core with others.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

STAND_STILL, TAKE_STAGED, ADD_GROUPS = "leeway_stand_still", "leeway_take_staged", "leeway_add_groups"

_PAUSES = "_leeway_pauses"


@dataclass
class _Pauses:
    """How many there were; the last one, until something was loaded in it."""

    num: int = 0
    still: Future[None] | None = None


def add_calls() -> None:
    """In the engine's process, before it is asked for anything."""
    from vllm.v1.engine.core import EngineCoreProc

    setattr(EngineCoreProc, STAND_STILL, _stand_still)
    setattr(EngineCoreProc, TAKE_STAGED, _take_staged)
    setattr(EngineCoreProc, ADD_GROUPS, _add_groups)


def _add_groups(core: EngineCoreProc, requests: list[bytes]) -> list[tuple[int, str]]:
    """Each of these, encoded as one that comes alone. Returns the places of those that were not added, and why."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder

    decoder = MsgpackDecoder(EngineCoreRequest)
    failed = []
    for place, encoded in enumerate(requests):
        try:
            added, wave = core.preprocess_add_request(decoder.decode(encoded))
            if not core._reject_add_in_shutdown(added):
                core.add_request(added, wave)
        except Exception as error:
            failed.append((place, f"{type(error).__name__}: {error}"))
    return failed


def _stand_still(core: EngineCoreProc, mode: str, clear_cache: bool) -> Future[None]:
    pauses: _Pauses = vars(core).setdefault(_PAUSES, _Pauses())
    pauses.num, pauses.still = pauses.num + 1, None
    still = core.pause_scheduler(mode, clear_cache)  # type: ignore[arg-type]
    if still is None:
        still = Future()
        still.set_result(None)
    pauses.still = still
    return still


def _take_staged(core: EngineCoreProc, version: str) -> Future[tuple[list[Any], float]]:
    """(what each rank's `load_staged` answers, seconds). Where one failed, it stands still until a later load.

    Fails without a pause of its own, and where another pause came before the end of that one: the load was given up.
    """
    from vllm.v1.engine import EngineCoreRequestType

    taken: Future[tuple[list[Any], float]] = Future()
    pauses: _Pauses = vars(core).setdefault(_PAUSES, _Pauses())
    asked, still, pauses.still = pauses.num, pauses.still, None

    def take(still: Future[None]) -> None:
        try:
            still.result()
            if pauses.num != asked:
                raise RuntimeError("the engine was asked to stand still for something else before it loaded")
            since = time.monotonic()
            answers = core.collective_rpc("load_staged", args=(version,))
            if all(failure is None for _, failure in answers):
                core.set_weight_version(version)
                core.resume_scheduler()
                # One that was idle has looked for work before it called this, and waits for a message now.
                core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
            taken.set_result((answers, time.monotonic() - since))
        except Exception as error:
            taken.set_exception(error)

    if still is None:
        taken.set_exception(RuntimeError("the engine was not asked to stand still before it was told to load"))
    else:
        still.add_done_callback(take)
    return taken

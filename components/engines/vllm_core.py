"""Two calls that vLLM's engine core answers beside its own, so that nothing is waited for between a drain and the load.

    stand_still   pause; answers when what is to finish has finished
    take_staged   then, in the engine's own turn: load what was staged, name the version, go on

Sent one after the other, without waiting: the engine would stand idle while its answer, and the next call, wait for a
turn of a process that shares its core with others.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

STAND_STILL, TAKE_STAGED = "leeway_stand_still", "leeway_take_staged"


def add_calls() -> None:
    """In the engine's process, before it is asked for anything."""
    from vllm.v1.engine.core import EngineCoreProc

    setattr(EngineCoreProc, STAND_STILL, _stand_still)
    setattr(EngineCoreProc, TAKE_STAGED, _take_staged)


def _stand_still(core: EngineCoreProc, mode: str, clear_cache: bool) -> Future[None]:
    core._leeway_still = None  # type: ignore[attr-defined]
    still = core.pause_scheduler(mode, clear_cache)  # type: ignore[arg-type]
    if still is None:
        still = Future()
        still.set_result(None)
    core._leeway_still = still  # type: ignore[attr-defined]
    return still


def _take_staged(core: EngineCoreProc, version: str) -> Future[tuple[list[Any], float]]:
    """(what each rank's `load_staged` answers, seconds). Where one failed, it stands still until a later load."""
    from vllm.v1.engine import EngineCoreRequestType

    taken: Future[tuple[list[Any], float]] = Future()

    def take(still: Future[None]) -> None:
        try:
            still.result()
            since = time.monotonic()
            answers = core.collective_rpc("load_staged")
            if all(failure is None for _, failure in answers):
                core.set_weight_version(version)
                core.resume_scheduler()
                # One that was idle has looked for work before it called this, and waits for a message now.
                core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
            taken.set_result((answers, time.monotonic() - since))
        except Exception as error:
            taken.set_exception(error)

    still: Future[None] | None = getattr(core, "_leeway_still", None)
    if still is None:
        taken.set_exception(RuntimeError("the engine was not asked to stand still before it was told to load"))
    else:
        still.add_done_callback(take)
    return taken

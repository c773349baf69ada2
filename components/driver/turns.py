"""Whose turn it is on devices that engines and trainer share (`cluster.placement`: turns).

    engines  generate | sleep                                     wake: load | generate, prove ...
    trainer  away     |       come back, steps, publish v + 1, leave                | away ...

One side gives its memory back before the other takes it. Where each side has its own devices, nothing happens here.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from ..config import Config
from ..runtime.launch import Parts
from ..runtime.supervisor import together


class Turns:
    """Begins as the launcher leaves things: the engines have the devices.

    `sent`: waits until nothing that was published is still on its way out of the trainer.
    """

    def __init__(self, config: Config, parts: Parts, *, sent: Callable[[], Awaitable[None]]) -> None:
        self._shared = config.cluster.in_turns
        self._parts = parts
        self._timeout_s = config.cluster.step_timeout_s
        self._sent = sent
        self._trainer_has_it = False
        self._metrics: dict[str, float] = {}

    async def trainer(self) -> None:
        """Engines stop between two tokens, or when what is in flight has finished (`staleness.in_flight=off`)."""
        if not self._shared or self._trainer_has_it:
            return
        started, wait = time.monotonic(), self._parts.supervisor.wait
        sleeping = together(g.call(lambda actor: actor.sleep.remote()) for g in self._parts.generators)
        released = await wait(sleeping, what="generators", timeout_s=self._timeout_s)
        coming = together([t.onload.remote() for t in self._parts.trainers])
        await wait(coming, what="trainer", timeout_s=self._timeout_s)
        self._trainer_has_it = True
        self._add("turns/to_trainer_s", time.monotonic() - started)
        self._metrics["turns/released_gib"] = sum(released) / 2**30

    async def engines(self) -> None:
        """They wake by the newest version; `Publishing.wait_engines_at` waits for its proof."""
        if not self._shared or not self._trainer_has_it:
            return
        await self._sent()
        started, wait = time.monotonic(), self._parts.supervisor.wait
        leaving = together([t.offload.remote() for t in self._parts.trainers])
        offloaded = await wait(leaving, what="trainer", timeout_s=self._timeout_s)
        waking = together(g.call(lambda actor: actor.wake.remote()) for g in self._parts.generators)
        await wait(waking, what="generators", timeout_s=self._timeout_s)
        self._trainer_has_it = False
        self._add("turns/to_engines_s", time.monotonic() - started)
        self._metrics["turns/offloaded_gib"] = sum(offloaded)

    def metrics(self) -> dict[str, float]:
        """Of the turns since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _add(self, name: str, seconds: float) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + seconds

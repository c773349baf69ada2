"""The door for inference engines: all that a collector and its weight sync ask of one.

    settings -> start -> [stage -> load_weights -> read_back, score] (version 0) -> generate ... -> [...] (version 1)

Where the trainer takes turns with it (`cluster.placement`), `sleep` comes before the trainer's turn and a load after.

An implementation is a class with `start`, named in `config/engines.py` or by a user as "pkg.module:Class". Ours are
`engines/vllm_engine.py` and `engines/hf_engine.py`; `tests/engine_contract.py` is what each is held to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..config.engines import engine_kind
from ..config.inputs import LoraConfig
from ..importing import import_user_object
from ..transports.transport import Place
from ..weights import Canary, CanaryGap, Manifest
from .clock import RolloutClock
from .progress import Progress


class EngineLost(RuntimeError):
    """The engine died, or hangs; nothing that it was generating can be finished here."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Everything an engine is started with. `cores`: CPU cores for its compute threads (empty: not pinned). One that
    computes in its collector's process pins each of these threads to exactly `cores`: all others there are moved off.

    `name`: what `rollout.engine.name` says; `options`: the rest of `rollout.engine`. `head_dtype`: what the output head
    computes in (None: in `dtype`); an engine that cannot do that raises `Refused`. `initial_version`: that of the
    weights in `model_path`, which it serves from its start (None: it serves nothing before a verified load).
    `seeded`: some requests have a seed.
    `lora`: what it loads are adapters of this form, up to `num_versions` of them at a time, see `HoldsVersions`.
    `num_kept`: the most ids that `SampledTokens.kept` may have for a token (0: no request has top_k).
    `read_back`: whether `Engine.read_back` compares anything. `sleep_level`: of `Engine.sleep` (None: it is never
    called). `max_model_len`: tokens of a prompt and its response. `kv_cache_gib`: memory for keys and values on a CPU,
    in GiB. `seed`: of what is drawn for requests without one; no two engines of a run may draw the same numbers.
    """

    model_path: str
    dtype: str
    device: str
    max_model_len: int
    seed: int
    options: dict[str, Any]
    cores: list[int]
    kv_cache_gib: float
    name: str = "vllm"
    head_dtype: str | None = None
    initial_version: int | None = None
    seeded: bool = False
    num_kept: int = 0
    read_back: bool = True
    sleep_level: int | None = None
    lora: LoraConfig | None = None
    num_versions: int = 1


@dataclass(frozen=True)
class SampledTokens:
    """One completion; one entry per sampled token, a stop token included.

    `logprobs`: in nats, under the distribution that the token was drawn from. `policy_versions`: of the weights that
    drew it. `finish_reason`: "stop" after a stop token, "length" at the limit of tokens. `kept`: with top_k, the ids
    that each token was drawn from (None: from all). `barred`: with min_tokens, the ids that none of the first
    min_tokens tokens could be.
    """

    tokens: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    finish_reason: str
    kept: list[list[int]] | None = None
    barred: Sequence[int] = ()


@dataclass(frozen=True)
class LoadTimes:
    """`ahead_s`: spent on the load beside generation. `drain_s`: until the engine stood still (it generates to the end
    of its pass, with "off" of all requests), and of one in another process until it is heard to go on. `pause_s`: how
    long it stood still.
    """

    drain_s: float
    pause_s: float
    ahead_s: float = 0.0


Heard = Callable[[int, list[int], list[float], int], None]
"""(index of the completion, its next tokens, their logprobs, the version that drew them), pass by pass."""


class Generates(Protocol):
    """The one verb that a policy needs."""

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        *,
        n: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        seed: int | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        min_tokens: int = 0,
        clock: RolloutClock | None = None,
        heard: Heard | None = None,
        version: int | None = None,
    ) -> list[SampledTokens]:
        """Sample n completions of one prompt. Cancelling the call aborts them.

        `temperature` 0: n times the likeliest one. `top_k`: from the likeliest tokens alone (0: from all), and of these
        from the likeliest that hold `top_p` of their probability. `min_tokens`: none of `stop_token_ids` before.
        `seed` makes the samples a function of (weights, prompt, seed), whatever else is being generated. `clock` is
        notified of the passes that worked on them. `heard` is told of tokens on the way (at temperature 0, of
        completion 0 alone). `version`: the adapter for all of its tokens; only passed to an engine that holds several.
        Raises EngineLost.
        """
        ...


class OnDevice(Protocol):
    """A version in memory of the device that its engine computes on."""

    async def check(self) -> None:
        """Check every byte, beside generation. Raises WeightSyncError, or NotKept."""
        ...


@dataclass(frozen=True)
class StagedWeights:
    """Memory of one version from which its engine loads: `buckets` are uint8, of the manifest's sizes.

    Whoever staged it fills it and has it checked, and calls `release` when the version was read back or given up.
    `name`: of the memory, for the engine itself.
    `opened`: of a version that lies in memory of a device: there are no `buckets` then, it is filled, and the engine
    checks it where it computes.
    """

    manifest: Manifest
    buckets: list[np.ndarray]
    release: Callable[[], None] = lambda: None
    name: str = ""
    opened: OnDevice | None = None


class LoadsWeights(Protocol):
    """What a weight sync needs. One version is on its way at a time: staged, loaded, read back."""

    def stage(self, manifest: Manifest, places: Sequence[Place] = ()) -> StagedWeights:
        """Memory for a version, beside generation. Called in a thread of its own.

        `places`: where its buckets are already: they are mapped or opened, not copied. All of them are files, or (only
        for engines with `EngineKind.device_memory`) all on a device. Raises OSError, NotKept, WeightSyncError.
        """
        ...

    async def load_weights(
        self,
        staged: StagedWeights,
        *,
        in_flight: str,
        paused: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> LoadTimes:
        """Replace the weights by what was staged, and checked, in flight.

        Requests in flight are kept and continue under the new weights: with "recompute" their KV cache is rebuilt
        first, with "keep" it is not, with "off" they finish before the load. `paused()` is entered while nothing is
        generated. Raises `WeightSyncError` with the check "load" unless every weight of the engine was published. The
        engine stays paused then, until a later load succeeds.
        """
        ...

    async def sleep(self, *, in_flight: str) -> int:
        """Generate nothing and give memory back until the next load; returns how many bytes.

        `EngineSettings.sleep_level`: 1: of keys and values; 2: of the weights too. Requests in flight are kept, and new
        ones accepted, as in a load. Of an engine that sleeps, nothing more is released.
        """
        ...

    async def read_back(self, staged: StagedWeights) -> None:
        """Compare what the engine computes with to what was loaded, while it generates.

        Raises `WeightSyncError` with the check "load" for weights that differ. Cancelling it ends it.
        """
        ...

    async def score(self, canary: Canary) -> CanaryGap:
        """Largest |logprob difference| between this engine and the canary's own numbers, in nats, by two routes.

        1. The scored prompts, each computed at once: the weights compute the same function.
        2. The token after a cached prompt, by the way that responses are generated: no keys or values of an earlier
           version are read.
        """
        ...


class HoldsVersions(LoadsWeights, Protocol):
    """What a weight sync needs of an engine that serves adapters. A load adds a version, and changes no other one.

    `load_weights`: nothing pauses, and no request is touched; the engine samples under the version only when asked to.
    `read_back` also compares the weights that adapters are added to with `Manifest.base`, and raises `WeightSyncError`
    with the check "base" where they differ.
    """

    async def score(self, canary: Canary, *, version: int | None = None) -> CanaryGap:
        """See `LoadsWeights.score`, under this version."""
        ...

    async def drop(self, version: int) -> None:
        """Forget a version that no request is of; nothing happens if it is not there."""
        ...


class Engine(Generates, LoadsWeights, Protocol):
    """An engine that runs. `progress` is notified of every request, call and pass: what it works on, and whether it is
    alive.

    `places`: sequences that it works on at the same time. `cache_tokens`: what fits into its KV cache (0: not known).
    """

    progress: Progress
    places: int
    cache_tokens: int

    @classmethod
    async def start(cls, settings: EngineSettings) -> Engine: ...

    def process_ids(self) -> list[int]:
        """Processes that it started, for those who watch over a run's processes."""
        ...

    def shutdown(self) -> None: ...


async def start_engine(settings: EngineSettings) -> Engine:
    """The engine that `settings.name` says, up and ready for a load (or serving its own weights)."""
    cls = import_user_object(
        engine_kind(settings.name).target, key="rollout.engine.name", expected="a class like leeway's Engine"
    )
    return await cls.start(settings)

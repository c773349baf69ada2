"""Copies of an auxiliary model as Ray actors: inference engines or classifiers. The first one serves them all.

environments  --HTTP-->  first copy: Service -> LeastLoaded  --its own, or an actor call-->  copies
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from ..collector.engine import Engine, EngineSettings, SampledTokens, start_engine
from ..config.engines import name_of, options_of
from ..config.inputs import AuxiliaryModel
from ..envs.server import Server, body_room
from ..failures import PartFailed, Watched, as_text
from ..monitor.logs import log_to_file, tail
from ..tasks.prompting import Prompter
from .classifier import Classifier
from .service import LeastLoaded, Service


class AuxiliaryActor(Watched):
    """`start` brings the copy up; `serve` gives the address of all copies, which holds the key:
    http://:KEY@host:port/v1.
    """

    def __init__(self, model: AuxiliaryModel, *, role: str, log_file: Path, log_level: str) -> None:
        self.role = role
        self._model = model
        self._log_file = log_file
        self._engine: Engine | None = None
        self._classifier: Classifier | None = None
        log_to_file(log_file, log_level)

    @as_text
    async def start(self, *, dtype: str, device: str, kv_cache_gib: float) -> dict[str, Any]:
        model = self._model
        try:
            if model.kind == "classify":
                self._classifier = Classifier(self._path, device=device, dtype=dtype)
            else:
                self._engine = await start_engine(
                    EngineSettings(
                        name=name_of(model.engine),
                        model_path=self._path,
                        dtype=dtype,
                        device=device,
                        max_model_len=model.max_model_len,
                        seed=secrets.randbits(31),
                        options=options_of(model.engine).model_dump(),
                        cores=[],
                        kv_cache_gib=kv_cache_gib,
                        initial_version=0,
                    )
                )
        except Exception as error:
            raise PartFailed(self.role, f"the model did not start: {error}", tail(self._log_file)) from None
        return {
            "pid": os.getpid(),
            "node": ray.util.get_node_ip_address(),
            "engine_pids": [] if self._engine is None else self._engine.process_ids(),
        }

    @as_text
    async def serve(self, others: Sequence[Any]) -> str:
        """`others`: the actors of the other copies."""
        model = self._model
        assert model.path is not None
        copies = LeastLoaded([self._engine or self._classifier, *map(_Remote, others)])
        service = Service(
            model=model.path,
            engine=copies if self._engine else None,
            classifier=copies if self._classifier else None,
            prompter=Prompter.load(self._path) if self._engine else None,
            max_model_len=model.max_model_len,
        )
        # Ray's own address of this machine: loopback, unless the run has joined a cluster.
        self._server = Server()
        await self._server.start(ray.util.get_node_ip_address())
        key = self._server.open(service.routes(), max_body_bytes=body_room(model.max_model_len)).key
        return f"http://:{key}@{self._server.address}/v1"

    async def generate(self, prompt_tokens: list[int], **sampling: Any) -> list[SampledTokens]:
        assert self._engine is not None
        return await self._engine.generate(prompt_tokens, **sampling)

    async def classify(self, text: str) -> list[float]:
        assert self._classifier is not None
        return await self._classifier.classify(text)

    async def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    @property
    def _path(self) -> str:
        assert self._model.path is not None
        return os.path.expanduser(self._model.path)


class _Remote:
    """A copy in another actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def generate(self, prompt_tokens: list[int], **sampling: Any) -> list[SampledTokens]:
        return await self._actor.generate.remote(prompt_tokens, **sampling)

    async def classify(self, text: str) -> list[float]:
        return await self._actor.classify.remote(text)


# Ray's overloads do not name max_concurrency.
AuxiliaryRemote = ray.remote(num_cpus=0, max_concurrency=1000)(AuxiliaryActor)  # type: ignore[call-overload]

"""An auxiliary model as a Ray actor: an inference engine or a classifier, served at its own address."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray

from ..collector.engine import Engine, EngineSettings, start_engine
from ..config.engines import split_options
from ..config.inputs import AuxiliaryModel
from ..envs.server import Server, body_room
from ..failures import PartFailed, Watched, as_text
from ..monitor.logs import log_to_file, tail
from ..tasks.prompting import Prompter
from .classifier import Classifier
from .service import Service


class AuxiliaryActor(Watched):
    """`start` brings the model up and gives its address, which holds the key: http://:KEY@host:port/v1."""

    def __init__(self, *, role: str, log_file: Path, log_level: str) -> None:
        self.role = role
        self._log_file = log_file
        self._engine: Engine | None = None
        log_to_file(log_file, log_level)

    @as_text
    async def start(self, model: AuxiliaryModel, *, dtype: str, device: str, kv_cache_gib: float) -> dict[str, Any]:
        assert model.path is not None
        path = os.path.expanduser(model.path)
        try:
            if model.kind == "classify":
                service = Service(model=model.path, classifier=Classifier(path, device=device, dtype=dtype))
            else:
                name, options = split_options(model.engine)
                self._engine = await start_engine(
                    EngineSettings(
                        name=name,
                        model_path=path,
                        dtype=dtype,
                        device=device,
                        max_model_len=model.max_model_len,
                        seed=0,
                        options=options,
                        cores=[],
                        kv_cache_gib=kv_cache_gib,
                        load_weights=True,
                    )
                )
                service = Service(
                    model=model.path,
                    engine=self._engine,
                    prompter=Prompter.load(path),
                    max_model_len=model.max_model_len,
                )
        except Exception as error:
            raise PartFailed(self.role, f"the model did not start: {error}", tail(self._log_file)) from None
        # Ray's own address of this machine: loopback, unless the run has joined a cluster.
        host = ray.util.get_node_ip_address()
        self._server = Server()
        await self._server.start(host)
        key = self._server.open(service.routes(), max_body_bytes=body_room(model.max_model_len)).key
        return {
            "url": f"http://:{key}@{self._server.address}/v1",
            "pid": os.getpid(),
            "node": host,
            "engine_pids": [] if self._engine is None else self._engine.process_ids(),
        }

    async def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


# Ray's overloads do not name max_concurrency.
AuxiliaryRemote = ray.remote(num_cpus=0, max_concurrency=1000)(AuxiliaryActor)  # type: ignore[call-overload]

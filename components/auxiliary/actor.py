"""An auxiliary model as a Ray actor: an inference engine or a classifier, served at its own address."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import ray

from ..collector.engine import Engine, EngineSettings, start_engine
from ..config.auxiliary import AuxiliaryModel
from ..config.engines import split_options
from ..envs.http import serve
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
        path, key = os.path.expanduser(model.path), secrets.token_hex(16)
        try:
            if model.kind == "classify":
                service = Service(key=key, model=model.path, classifier=Classifier(path, device=device, dtype=dtype))
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
                    key=key,
                    model=model.path,
                    engine=self._engine,
                    prompter=Prompter.load(path),
                    max_model_len=model.max_model_len,
                )
        except Exception as error:
            raise PartFailed(self.role, f"the model did not start: {error}", tail(self._log_file)) from None
        host = ray.util.get_node_ip_address()
        self._server = await serve(service.answer, host)
        port = self._server.sockets[0].getsockname()[1]
        return {
            "url": f"http://:{key}@{host}:{port}/v1",
            "pid": os.getpid(),
            "node": host,
            "engine_pids": [] if self._engine is None else self._engine.process_ids(),
        }

    async def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


# Ray's overloads do not name max_concurrency.
AuxiliaryRemote = ray.remote(num_cpus=0, max_concurrency=1000)(AuxiliaryActor)  # type: ignore[call-overload]

"""Serve a model behind one OpenAI-compatible address, until it is interrupted: `leeway serve`.

clients -> envs.server -> serving.Front -> Router -> a generator's actor -> engine
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from typing import Any

from ..collector.engine import SampledTokens
from ..collector.open_requests import Piece
from ..config import Config
from ..config.paths import user_path
from ..config.running import ServeConfig
from ..envs.server import Server, body_room
from ..failures import Refused
from ..monitor.logs import say
from ..redaction import MASK, hide
from ..runtime.generators import Generator
from ..runtime.launch import Launcher
from ..runtime.supervisor import Supervisor
from ..serving.front import Front, FrontSettings
from ..serving.group_folder import GroupFolder
from ..serving.router import EngineGone, Router
from ..tasks.prompting import Prompter
from .context import StageContext, StageResult, timed

FOREVER_S = 1e9
LEAST_TOKEN = 16


async def serve(context: StageContext, version: int) -> StageResult:
    """Serve `model.path`, whose weights have this version, until this is cancelled."""
    config = context.config
    assert config.model.path is not None
    tokens = client_tokens(config.serve)
    launcher = Launcher(config, context.recipe, run_dir=context.dir, supervisor=Supervisor(context.watch))
    parts = launcher.parts
    address: Address | None = None
    try:
        starting = launcher.generators(initial_version=version)
        await timed(context.name, "engines ready", starting, see=f"{context.dir / 'logs'}/")
        parts.generators.always(lambda actor: actor.watch_engine.remote())
        prompter = await asyncio.to_thread(Prompter.load, config.model.path)
        address = Address(config, Engines(parts.generators), prompter, newest_version=lambda: version)
        await address.open(tokens)
        print_address(address, config)
        await parts.supervisor.wait(asyncio.Event().wait(), what="serving", timeout_s=FOREVER_S)
    finally:
        if address is not None:
            await address.close()
        await parts.stop()
    return StageResult(summary={}, model_path=None)


def client_tokens(serve: ServeConfig) -> list[str]:
    """One for each client: those of the user's variable, else a new one. Raises Refused."""
    if serve.token_variable is None:
        made = secrets.token_hex(24)
        hide({made: MASK})
        return [made]
    tokens = [token.strip() for token in os.environ.get(serve.token_variable, "").split(",")]
    if not all(len(token) >= LEAST_TOKEN and token.isascii() for token in tokens) or len({*tokens}) < len(tokens):
        raise Refused(
            f"serve.token_variable: got {serve.token_variable}, expected a variable with different tokens of at least "
            f"{LEAST_TOKEN} characters, separated by commas; export it"
        )
    hide({token: f"${{oc.env:{serve.token_variable}}}" for token in tokens})
    return tokens


class Address:
    """What listens: one `Front` for all clients."""

    def __init__(self, config: Config, engines: Engines, prompter: Prompter, *, newest_version: Any) -> None:
        serve = config.serve
        self.model = serve.model or "policy"
        self._serve, self._max_model_len = serve, config.rollout.max_model_len
        settings = FrontSettings(
            model=self.model,
            max_model_len=config.rollout.max_model_len,
            max_response_tokens=config.rollout.max_response_tokens,
            temperature=config.rollout.temperature,
            timeout_s=serve.timeout_s,
            keep_tokens=serve.keep_tokens,
            group_size=config.algorithm.group_size,
            max_policy_lag=config.staleness.max_policy_lag,
        )
        groups = None if serve.groups is None else GroupFolder(user_path(serve.groups))
        self.front = Front(settings, Router(engines), prompter, keep=groups, newest_version=newest_version)
        self._server = Server({"/health": self.front.health})
        self.tokens: list[str] = []

    async def open(self, tokens: Sequence[str]) -> None:
        """Raises Refused where it cannot listen."""
        serve = self._serve
        try:
            await self._server.start(serve.host, serve.port)
        except OSError as error:
            raise Refused(
                f"serve.port: got {serve.host}:{serve.port}, which cannot be listened on ({error.strerror or error}); "
                "set serve.port=0 for a free one"
            ) from None
        self.tokens = [*tokens]
        for number, token in enumerate(tokens):
            self._server.open(
                self.front.routes(f"client {number}"),
                max_body_bytes=body_room(self._max_model_len),
                key=token,
                max_requests=serve.max_requests,
            )

    @property
    def url(self) -> str:
        return f"http://{self._server.address}/v1"

    async def close(self) -> None:
        await self._server.stop()


def print_address(address: Address, config: Config) -> None:
    number = config.rollout.num_generators
    engines = f"{number} engine" if number == 1 else f"{number} engines"
    say(f"serving {address.model} at {address.url}, {engines} of {config.rollout.engine_name}; end it with Ctrl-C")
    if config.serve.token_variable is None:  # to the terminal alone: logs keep no secrets
        print(f"leeway: token: {address.tokens[0]}", flush=True)
    if not config.serve.host.startswith("127."):
        say("warning: it is reachable from other machines, without encryption: put a proxy with TLS before it")


class Engines:
    """The generators of a stage, as many as there are at the moment, for a `Router`."""

    def __init__(self, generators: Any) -> None:
        self._generators = generators

    def __call__(self) -> list[ServedGenerator]:
        return [ServedGenerator(generator) for generator in self._generators]


class ServedGenerator:
    """See `serving.router.ServedEngine`."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    @property
    def name(self) -> str:
        return self._generator.role

    @property
    def is_up(self) -> bool:
        return self._generator.is_up

    async def sample(self, name: str, prompt_tokens: list[int], **sampling: Any) -> list[SampledTokens]:
        return await self._ask(lambda actor: actor.sample.remote(name, prompt_tokens, **sampling))

    async def heard(self, name: str, *, within_s: float) -> list[Piece]:
        return await self._ask(lambda actor: actor.heard.remote(name, within_s))

    async def end(self, name: str) -> None:
        await self._generator.call_now(lambda actor: actor.end.remote(name))

    async def _ask(self, ask: Any) -> Any:
        answer = await self._generator.call_now(ask)
        if answer is None:
            raise EngineGone(self.name)
        return answer

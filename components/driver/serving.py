"""Serve a model, or the policy of a running train job, behind one OpenAI-compatible address: `leeway serve`.

clients -> envs.server -> serving.Front -> Router -> a generator's actor -> engine
                                        \\-> commit -> jobs.link -> the train job
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ray.exceptions import RayActorError

from ..collector.engine import SampledTokens
from ..collector.open_requests import Piece
from ..config import Config
from ..config.running import ServeConfig
from ..envs.server import Refusal, Server, body_room
from ..failures import Refused
from ..group import Group
from ..monitor.logs import say
from ..redaction import MASK, hide
from ..runtime.generators import Generator
from ..runtime.launch import Launcher, Parts
from ..runtime.supervisor import Supervisor, together
from ..serving.front import Front, FrontSettings, Give, Unanswered
from ..serving.router import EngineGone, Router
from ..tasks.prompting import Prompter
from .context import StageContext, StageResult, timed
from .explore_stage import ExploreStage

FOREVER_S = 1e9
LEAST_TOKEN = 16
COMMIT_S = 60.0
"""How long a client that commits waits for the train job."""


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
        prompter = await asyncio.to_thread(Prompter.of, config.model)
        address = Address(config, Engines(lambda: parts.generators), prompter, newest_version=lambda: version)
        await address.open(tokens)
        print_address(address, config)
        await parts.supervisor.wait(asyncio.Event().wait(), what="serving", timeout_s=FOREVER_S)
    finally:
        if address is not None:
            await address.close()
        await parts.stop()
    return StageResult(summary={}, model_path=None)


async def serve_train_job(context: StageContext) -> StageResult:
    """Serve the policy of a running train job as it learns; what clients commit is trained on. Ends with that job."""
    served = _Served(context.config)
    stage = ExploreStage(context, served.work, clients=True)
    served.newest_version = lambda: stage.version
    try:
        return await stage.run()
    finally:
        await served.close()


class _Served:
    """One address for as long as the job lives, though its engines may start again."""

    def __init__(self, config: Config) -> None:
        self._tokens = client_tokens(config.serve)
        self._parts: Parts | None = None
        self._address: Address | None = None
        self.newest_version: Callable[[], int] = lambda: -1

    async def work(self, config: Config, parts: Parts) -> None:
        await together(g.call(lambda actor: actor.until_verified.remote(0)) for g in parts.generators)
        self._parts = parts
        try:
            if self._address is None:
                assert config.model.path is not None
                prompter = await asyncio.to_thread(Prompter.of, config.model)
                version = self.newest_version
                self._address = Address(
                    config, Engines(self._generators), prompter, newest_version=version, give=self._give
                )
                await self._address.open(self._tokens)
                print_address(self._address, config)
            else:
                self._address.front.forget()
            await parts.buffer.until_over.remote()
        finally:
            self._parts = None

    async def close(self) -> None:
        if self._address is not None:
            await self._address.close()

    def _generators(self) -> Iterable[Generator]:
        return () if self._parts is None else self._parts.generators

    async def _give(self, group: Group, commit: str, prompt: str) -> None:
        if self._parts is None:
            raise Unanswered
        try:
            answer = await self._parts.buffer.give.remote(group, commit, prompt, within_s=COMMIT_S)
        except RayActorError:
            raise Unanswered from None
        if not answer.get("taken"):
            raise _refusal(answer)


def _refusal(answer: dict[str, Any]) -> Exception:
    if answer.get("ended"):
        return Refusal(409, "commit: the run has all the groups that it will train on", "ended")
    if "needs" not in answer:
        return Unanswered()
    oldest, needs, published = answer["oldest"], answer["needs"], answer["published"]
    got = f"ids: a token is of version {oldest}, expected {needs} or newer (staleness.max_policy_lag)"
    if needs > published:
        return Refusal(429, f"{got}: there are enough groups until version {needs} is served; ask again then", "full")
    return Refusal(409, f"{got}; ask again, and commit earlier", "too_old")


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


def _masked(config: Config) -> str:
    rollout = config.rollout
    if rollout.top_k is not None:
        return f"rollout.top_k {rollout.top_k}"
    return f"rollout.min_response_tokens {rollout.min_response_tokens}" if rollout.min_response_tokens else ""


class Address:
    """What listens: one `Front` for all clients."""

    def __init__(
        self,
        config: Config,
        engines: Engines,
        prompter: Prompter,
        *,
        newest_version: Callable[[], int],
        give: Give | None = None,
    ) -> None:
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
            max_requests=serve.max_requests,
            masked=_masked(config),
        )
        self.front = Front(settings, Router(engines), prompter, give=give, newest_version=newest_version)
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

    def __init__(self, generators: Callable[[], Iterable[Any]]) -> None:
        self._generators = generators

    def __call__(self) -> list[ServedGenerator]:
        return [ServedGenerator(generator) for generator in self._generators()]


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

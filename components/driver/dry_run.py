"""Try the user's own environments, rewards and operators before any process starts, while mistakes are cheap."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from typing import Any

from ..config import Config
from ..config.names import user_names
from ..types import Completion, Task, Trajectory

DRY_RUN_S = 20.0
_PROGRAMMING_ERRORS = (TypeError, NameError, AttributeError, ImportError)


def check_plugins(config: Config) -> None:
    """Import and build everything the settings name. Raises a one-line ValueError: file, line, what was expected."""
    from ..envs.registry import build_environment
    from ..monitor import own_sinks
    from ..replay.operators import check_operators
    from ..replay.reuse import priority_of
    from ..transports.transport import Fetches, WeightTransport

    engine, transport = config.rollout.engine_name, config.param_server.transport
    verbs = ("start", "generate", "load_weights", "score", "process_ids", "shutdown")
    _check_verbs("rollout.engine.name", engine, verbs, "a class with the verbs of leeway.collector.engine.Engine")
    expected = "a class with the methods of leeway.transports.transport.WeightTransport, and open(settings)"
    methods = [name for kind in (Fetches, WeightTransport) for name in vars(kind) if callable(getattr(kind, name))]
    methods = ["open", *(name for name in methods if not name.startswith("_"))]
    _check_verbs("param_server.transport", transport, methods, expected)
    own_sinks(config.monitor)
    build_environment(config.env)
    check_operators(config.replay.operators)
    priority_of(config.replay.priority)
    if config.replay.sampler or config.replay.storage:
        from torchrl.data.replay_buffers.samplers import Sampler
        from torchrl.data.replay_buffers.storages import Storage

        from ..replay.storage import own_part

        own_part("replay.sampler", config.replay.sampler, Sampler, 1)
        own_part("replay.storage", config.replay.storage, Storage, 1)


def _check_verbs(key: str, name: str, verbs: Sequence[str], expected: str) -> None:
    from ..importing import import_user_object

    if user_names(name):
        own = import_user_object(name, key=key, expected=expected)
        if missing := [verb for verb in verbs if not callable(getattr(own, verb, None))]:
            raise ValueError(f"{key}: got {name}, which has no {missing[0]}(); expected {expected}")


def dry_run(config: Config, task: Task) -> None:
    """Play one task with the user's own environment and rewards against a policy that gives the task's answer, without
    an engine.

    Raises a one-line ValueError if one returns what it must not, or fails because of a mistake in its code. Other
    exceptions are ignored: it may need something that only a run provides.
    """
    _try_rewards(config, task)
    if not user_names(config.env.name):
        return
    from ..envs.registry import build_environment

    environment = build_environment(config.env)
    try:
        returned = asyncio.run(asyncio.wait_for(environment.rollout(task, _AnswerKeyPolicy(task)), DRY_RUN_S))
    except _PROGRAMMING_ERRORS as error:
        raise _fails("env.name", config.env.name, task, error) from error
    except Exception:
        return
    _check_returned(returned, environment)


def _try_rewards(config: Config, task: Task) -> None:
    """Those of the task's taskset that call no other model."""
    source = config.env.parts().get(str(task.info.get("taskset")), config.env)
    key, names = ("env.rewards", source.rewards) if source.rewards else ("env.reward", (source.reward,))
    if not (own := [name for name in names if user_names(name)]):
        return
    from ..envs.rewards import resolve_reward, takes_models
    from ..envs.scoring import NoNumber, score

    tokens = [*task.answer.encode()]  # any: to load a tokenizer takes seconds
    said = Completion(
        tokens=tokens,
        logprobs=[0.0] * len(tokens),
        policy_versions=[0] * len(tokens),
        finish_reason="stop",
        text=task.answer,
    )
    for name in own:
        reward = resolve_reward(name, source.reward_options.get(name), key=key)
        if takes_models(reward):
            continue
        try:
            asyncio.run(asyncio.wait_for(score(reward, task, said.text, said), DRY_RUN_S))
        except NoNumber as error:
            raise ValueError(f"{key}: {' '.join(str(error).split())}") from error
        except Exception as error:
            if isinstance(error.__cause__, _PROGRAMMING_ERRORS):
                raise _fails(key, name, task, error.__cause__) from error


def _fails(key: str, name: str, task: Task, error: BaseException) -> ValueError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if frame.filename in str(error) else f" ({frame.filename}:{frame.lineno})"
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ValueError(f"{key}: {name} fails on task {task.task_id}: {what}{place}")


def _check_returned(returned: Any, environment: Any) -> None:
    code = type(environment).rollout.__code__
    where = f"env.name: {type(environment).__name__}.rollout ({code.co_filename}:{code.co_firstlineno})"
    if not isinstance(returned, list) or not all(isinstance(t, Trajectory) for t in returned):
        raise ValueError(f"{where} returned {repr(returned)[:80]}; expected a list of leeway.Trajectory")
    if len(returned) != _AnswerKeyPolicy.group_size:
        raise ValueError(
            f"{where} returned {len(returned)} trajectories; expected policy.group_size = {_AnswerKeyPolicy.group_size}"
        )


class _AnswerKeyPolicy:
    """A policy that says the task's answer in every turn."""

    group_size = 2
    max_model_len = 100_000

    def __init__(self, task: Task) -> None:
        from ..tasks.prompting import Prompter
        from ..tasks.tiny_tokenizer import build_tokenizer

        self._answer = task.answer
        self.prompter = Prompter(build_tokenizer([task.answer]))

    def encode(self, prompt: Any) -> list[int]:
        return self.prompter.encode(prompt)

    def conversation(self, index: int) -> _AnswerKeyPolicy:
        return self

    async def generate(self, prompt: Any, *, n: int | None = None, max_tokens: int | None = None) -> list[Completion]:
        tokens = [*self.prompter.encode_plain(self._answer), self.prompter.stop_token_ids[0]]
        said = Completion(
            tokens=tokens,
            logprobs=[0.0] * len(tokens),
            policy_versions=[0] * len(tokens),
            finish_reason="stop",
            text=self._answer,
        )
        return [said] * (self.group_size if n is None else n)

"""The token sequences that every published version of a run is proven on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from ..config import Config
from ..config.engines import options_of
from ..config.model_files import model_config
from ..tasks.prompting import Prompter
from ..types import Task
from ..weights import CanaryPrompts

SCORED_TOKENS = 160
"""The most tokens of one prompt and its answer that are scored."""


def canary_prompts(config: Config, prompter: Prompter, tasks: Sequence[Task]) -> CanaryPrompts:
    """Real prompts with their answers, one by one and (for the prefix cache) one after the other."""
    server, room = config.param_server, config.rollout.max_model_len - 1
    length = min(server.canary_tokens or _more_than_a_block(config), room)
    examples = [
        prompter.encode(task.prompt) + prompter.encode_plain(task.answer)
        for task in itertools.islice(itertools.cycle(tasks), max(server.canary_prompts, length))
    ]
    scored = [example[: min(SCORED_TOKENS, room)] for example in examples[: server.canary_prompts]]
    chains = [
        itertools.chain.from_iterable(examples[i:] + examples[:i]) for i in range(max(1, server.canary_prompts // 2))
    ]
    return CanaryPrompts(scored=scored, cached=[list(itertools.islice(chain, length)) for chain in chains])


def _more_than_a_block(config: Config) -> int:
    engine, path = options_of(config.rollout.engine), config.model.path
    model = model_config(Path(path).expanduser()) if path is not None else {}
    return engine.cache_block(model, on_cpu=config.cluster.device == "cpu") + 16

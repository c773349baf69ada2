"""The token sequences that every published version of a run is proven on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..config import Config
from ..tasks.prompting import Prompter
from ..types import Task
from ..weights import CanaryPrompts


def canary_prompts(config: Config, prompter: Prompter, tasks: Sequence[Task]) -> CanaryPrompts:
    """Real prompts with their answers, one by one and (for the prefix cache) one after the other."""
    server, room = config.param_server, config.rollout.max_model_len - 1
    length = min(server.canary_tokens, room)
    examples = [
        prompter.encode(task.prompt) + prompter.encode_plain(task.answer)
        for task in itertools.islice(itertools.cycle(tasks), max(server.canary_prompts, length))
    ]
    scored = [example[:length] for example in examples[: server.canary_prompts]]
    chains = [
        itertools.chain.from_iterable(examples[i:] + examples[:i]) for i in range(max(1, server.canary_prompts // 2))
    ]
    return CanaryPrompts(scored=scored, cached=[list(itertools.islice(chain, length)) for chain in chains])

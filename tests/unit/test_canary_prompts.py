"""On what a version is proven: real prompts, and contexts that fill more than a block of the engine's prefix cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leeway.config import load_config
from leeway.config.engines import LARGE_BLOCK, SMALL_BLOCK
from leeway.driver.canary import SCORED_TOKENS, canary_prompts
from leeway.engines.hf_cache import BLOCK
from leeway.engines.vllm_blocks import LEAST
from leeway.types import Task

TASKS = [Task(task_id=f"t{i}", prompt="p" * (7 + i), answer="a") for i in range(5)]


class Letters:
    """A token for each letter."""

    def encode(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]

    encode_plain = encode


def prompts(folder: Path, *overrides: str, tasks: list[Task] = TASKS, **model: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 2, **model}))
    config = load_config("quickstart", ["stages.sft=null", "model.init=null", f"model.path={folder}", *overrides])
    return canary_prompts(config, Letters(), tasks)  # type: ignore[arg-type]


def lengths(found: Any) -> set[int]:
    return {len(context) for context in found.cached}


LONG = "rollout.max_model_len=400"
FOUR = "param_server.canary_prompts=4"


@pytest.mark.parametrize(
    ("overrides", "model", "expected"),
    [
        (["rollout.engine.name=hf"], {}, SMALL_BLOCK + 16),
        (["rollout.engine.name=vllm"], {}, SMALL_BLOCK + 16),
        (["rollout.engine.name=vllm"], {"mamba_d_state": 4}, LARGE_BLOCK + 16),
        (["rollout.engine.name=vllm"], {"global_head_dim": 4}, LARGE_BLOCK + 16),
        (["rollout.engine.name=vllm", "rollout.engine.block_size=64"], {}, 80),
        (["rollout.engine.name=vllm", "param_server.canary_tokens=50"], {}, 50),
        (["rollout.engine.name=hf", "rollout.max_model_len=40"], {}, 39),
    ],
)
def test_a_context_is_a_block_of_the_engines_cache_and_some_more(tmp_path, overrides, model, expected) -> None:
    assert lengths(prompts(tmp_path, LONG, *overrides, **model)) == {expected}


def test_a_block_is_no_larger_than_is_promised() -> None:
    assert BLOCK <= SMALL_BLOCK
    assert 2 * LEAST <= SMALL_BLOCK, "`vllm_blocks.block_size`"


def test_a_prompt_is_scored_with_its_answer_however_short_the_contexts_are(tmp_path: Path) -> None:
    found = prompts(tmp_path, LONG, FOUR, "rollout.engine.name=hf", "param_server.canary_tokens=5")
    assert found.scored == [[*map(ord, task.prompt), ord("a")] for task in TASKS[:4]]
    long = [Task(task_id="long", prompt="p" * 1000, answer="a")]
    found = prompts(tmp_path, LONG, FOUR, "rollout.engine.name=hf", tasks=long)
    assert [len(sequence) for sequence in found.scored] == [SCORED_TOKENS] * 4

"""Play one task against a real engine and print the whole exchange: `leeway env try`.

task -> Collector (environment, engine with the model's own weights) -> terminal
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from ..config import Recipe
from ..failures import printable
from ..monitor.logs import say
from ..runtime.launch import Launcher
from ..runtime.supervisor import Supervisor
from ..tasks.prompting import Prompter
from ..tasks.taskset import build_taskset
from ..types import Task, Trajectory
from .context import StageContext, StageResult


@dataclass(frozen=True)
class Choice:
    """Which task (by its place in the taskset), and how many times."""

    index: int = 0
    times: int = 2


def recipe_of(choice: Choice) -> Recipe:
    """A recipe that plays what was chosen."""
    return Recipe(run=partial(run, choice), generates=True, name="try")


async def run(choice: Choice, context: StageContext) -> StageResult:
    """Start an engine with the model's own weights, play, and print."""
    config = context.config
    tasks = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval).tasks
    if choice.index >= len(tasks):
        raise ValueError(f"--task: got {choice.index}, expected less than the {len(tasks)} tasks")
    task = tasks[choice.index]
    assert config.model.path is not None
    prompter = Prompter.of(config.model)
    launcher = Launcher(config, context.recipe, run_dir=context.dir, supervisor=Supervisor(context.watch))
    try:
        say(f"starting an engine with {config.model.path}")
        await launcher.generators(initial_version=0)
        call = launcher.parts.generators[0].call(
            lambda actor: actor.rollouts.remote([task], config.samplings.of(task).temperature, choice.times)
        )
        trajectories = await launcher.parts.supervisor.wait(
            call, what="the environment", timeout_s=config.rollout.timeout_s + 60, deadline="rollout.timeout_s"
        )
    finally:
        await launcher.parts.stop()
    print(printable("\n".join(exchange(task, trajectories, prompter))))
    return StageResult(summary={"rewards": [t.reward for t in trajectories]}, model_path=None)


def exchange(task: Task, trajectories: list[Trajectory], prompter: Prompter) -> Iterator[str]:
    """Lines that show who wrote which token, with logprob and version for the policy's tokens."""
    yield f"task {task.task_id}, answer {task.answer!r}, info {str(task.info)[:300]}"
    for number, t in enumerate(trajectories, start=1):
        metrics = ", ".join(f"{name} {value:g}" for name, value in t.metrics.items())
        yield ""
        yield f"== trajectory {number} of {len(trajectories)}: reward {t.reward:g}, finish {t.finish_reason}, {metrics}"
        yield f"-- prompt, {len(t.prompt_tokens)} tokens"
        yield from _text(prompter, t.prompt_tokens)
        for sampled, group in groupby(range(len(t.response_tokens)), key=lambda i: t.loss_mask[i]):
            places = list(group)
            tokens = [t.response_tokens[i] for i in places]
            if not sampled:
                yield f"-- environment, {len(tokens)} tokens, masked"
                yield from _text(prompter, tokens)
                continue
            versions = sorted({t.policy_versions[i] for i in places})
            yield f"-- policy, {len(tokens)} tokens, trained on, version {', '.join(map(str, versions))}"
            yield from _text(prompter, tokens)
            yield from (_token(prompter, t, i) for i in places)
    rewards = [t.reward for t in trajectories]
    yield ""
    yield f"rewards: {', '.join(f'{r:g}' for r in rewards)}" + (
        "; all equal: a group like this teaches nothing" if len(set(rewards)) == 1 and len(rewards) > 1 else ""
    )


def _text(prompter: Prompter, tokens: list[int]) -> Iterator[str]:
    text: Any = prompter.tokenizer.decode(tokens)
    yield from (f"   | {line}" for line in text.split("\n"))


def _token(prompter: Prompter, t: Trajectory, i: int) -> str:
    token = t.response_tokens[i]
    text = prompter.tokenizer.decode([token])
    return f"     {token:>7}  {t.behavior_logprobs[i]:>8.4f}  v{t.policy_versions[i]}  {text!r}"

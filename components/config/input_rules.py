"""Rules on inputs: tasks, environments, rewards, operators. Each rule's name is the sentence it enforces."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable

from .auxiliary import AuxiliaryModel
from .environments import ENVIRONMENT_OPTIONS, checked_options
from .errors import ConfigError, words
from .inputs import EnvConfig, TaskConfig
from .names import ENVIRONMENTS, OPERATORS, REWARDS, check_name
from .schema import Config

Named = Callable[[str], str]
"""Where a key was set: "train.steps", or "stages.sft.train.steps"."""

_SOURCES = {
    "jsonl": ("path", "data/train.jsonl"),
    "parquet": ("path", "data/train.parquet"),
    "hf": ("path", "data/my_dataset"),
    "python": ("path", "my_tasks:generate"),
    "sql": ("path", "data/tasks.sqlite"),
    "queue": ("path", "data/queue.jsonl"),
    "reasoning_gym": ("dataset", "chain_sum"),
    "mix": ("mix", "'{a: {name: jsonl, path: a.jsonl}, b: {...}}'"),
}


def task_source_is_complete(config: Config, named: Named) -> None:
    if config.task.name == "queue" and config.train.epochs is not None:
        raise ConfigError(
            named("train.epochs"),
            got=config.train.epochs,
            expected="train.steps, because task.name is queue: its length is unknown",
            fix="set train.steps=1000 train.epochs=null; the run ends before that when the queue is closed",
        )
    source_is_complete(config.task, named, "task")
    for name, own in config.task.mix.items():
        key = f"task.mix.{name}"
        weight = own.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ConfigError(named(f"{key}.weight"), got=weight, expected="a number above 0", fix="set 1")
        shared = config.task.model_dump(exclude={"mix", "name", "path", "dataset", "options"})
        settings = {**shared, **{k: v for k, v in own.items() if k != "weight"}}
        part = checked_options(TaskConfig, settings, key=named(key), whose="a taskset of task.mix")
        if part.name == "mix":
            raise ConfigError(
                named(f"{key}.name"),
                got="mix",
                expected="a source",
                fix="mixes cannot be nested; list all sources on one level",
            )
        source_is_complete(part, named, key)


def source_is_complete(task: TaskConfig, named: Named, where: str) -> None:
    needed, example = _SOURCES[task.name]
    if not getattr(task, needed):
        raise ConfigError(
            named(f"{where}.{needed}"),
            got=getattr(task, needed),
            expected=f"a value, because {where}.name is {task.name}",
            fix=f"set {where}.{needed}={example}",
        )
    for key in ("path", "dataset", "mix"):
        value = getattr(task, key)
        if key != needed and value:
            raise ConfigError(
                named(f"{where}.{key}"),
                got=value,
                expected=f"null, because {where}.name is {task.name}",
                fix=f"add {where}.{key}=null, or write {where}.name={_source_of(key)} for tasks from there",
            )
    if (task.name == "sql") != (task.query is not None):
        raise ConfigError(
            named(f"{where}.query"),
            got=task.query,
            expected="a SELECT with task.name=sql, and with nothing else",
            fix=f"set {where}.query='select question, answer from tasks', or leave it out",
        )
    if task.name == "queue" and (task.holdout_frac or where != "task"):
        raise ConfigError(
            named(f"{where}.name"),
            got="queue",
            expected="tasks that are known before the run: holding out, mixing and evaluating need that",
            fix="set task.holdout_frac=0 and eval.path=FILE, and let the queue be the only source",
        )
    if task.name == "queue" and task.order != "sequential":
        raise ConfigError(
            named(f"{where}.order"),
            got=task.order,
            expected=f"sequential, because {where}.name is queue: its future tasks are unknown",
            fix=f"leave it out, or set {where}.order=sequential",
        )
    if task.name == "python":
        check_name(named(f"{where}.path"), str(task.path), (), kind="function")
    if task.order == "easy_to_hard" and task.difficulty_key is None:
        raise ConfigError(
            named(f"{where}.difficulty_key"),
            got=None,
            expected=f"a key whose value is a number, because {where}.order is easy_to_hard",
            fix=f"set {where}.difficulty_key=level",
        )


def _source_of(key: str) -> str:
    """The source that a user who sets `key` most likely means."""
    return {"path": "jsonl", "dataset": "reasoning_gym", "mix": "mix"}[key]


def prompt_template_holds_the_prompt(config: Config, named: Named) -> None:
    template = config.task.prompt_template
    if template is not None and "{prompt}" not in template:
        raise ConfigError(
            named("task.prompt_template"),
            got=template,
            expected="text with {prompt}",
            fix="put {prompt} where it belongs",
        )


def environment_and_reward_exist(config: Config, named: Named) -> None:
    env = config.env
    check_name(named("env.name"), env.name, ENVIRONMENTS, kind="Class")
    names = {f"env.rewards.{name}": name for name in env.rewards} or {"env.reward": env.reward}
    for key, name in names.items():
        check_name(named(key), name, REWARDS, kind="function")
        if name == "reasoning_gym" and config.task.name not in ("reasoning_gym", "mix"):
            raise ConfigError(
                named(key),
                got=name,
                expected=f"a reward that can score tasks of {config.task.name}",
                fix=f"use {key.removesuffix('.reasoning_gym')}=math_verify or exact_match, or task.name=reasoning_gym",
            )
    for name in env.reward_options:
        if name not in names.values():
            raise ConfigError(
                named(f"env.reward_options.{name}"),
                got=env.reward_options[name],
                expected=f"options of a reward that is used ({', '.join(names.values())})",
                fix=f"leave it out, or add {name} to env.rewards",
            )


def environment_options_are_valid(config: Config, named: Named) -> None:
    """Options of built-in environments. A user's own class checks its options itself before anything starts."""
    model = ENVIRONMENT_OPTIONS.get(config.env.name)
    if model is not None:
        checked_options(model, config.env.options, key=named("env.options"), whose=f"env.name={config.env.name}")


def environment_variables_are_the_users(config: Config, named: Named) -> None:
    for name in config.env.variables:
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or name.startswith(("RAY_", "VLLM_", "OMP_", "CUDA_", "LEEWAY_")):
            raise ConfigError(
                named(f"env.variables.{name}"),
                got=config.env.variables[name],
                expected="a variable of your own (not RAY_*, VLLM_*, OMP_*, CUDA_*, LEEWAY_*)",
                fix="leave it out",
            )


def auxiliary_models_are_valid(config: Config, named: Named) -> None:
    for name, own in config.env.models.items():
        key = f"env.models.{name}"
        model = checked_options(AuxiliaryModel, own, key=named(key), whose="a model of env.models")
        if (model.url is None) == (model.path is None):
            raise ConfigError(
                named(key),
                got=words("neither url nor path" if model.url is None else "both url and path"),
                expected="exactly one of them",
                fix=f"set {key}.url=http://host:8000/v1, or {key}.path=FOLDER",
            )
        if model.url is not None and not re.match(r"https?://[^/]+", model.url):
            raise ConfigError(
                named(f"{key}.url"), got=model.url, expected="http://host:port/v1 or https://...", fix="fix it"
            )
        if model.key_variable is not None and model.key_variable not in os.environ:
            raise ConfigError(
                named(f"{key}.key_variable"),
                got=model.key_variable,
                expected="an environment variable that is set and holds the key",
                fix=f"export {model.key_variable}=..., or leave it out",
            )
    for name in {*config.env.rewards, config.env.reward} & {"judge", "rubric", "reward_model"}:
        asked = config.env.reward_options.get(name, {}).get("model")
        if config.env.rewards and name not in config.env.rewards:
            continue
        if asked not in config.env.models:
            raise ConfigError(
                named(f"env.reward_options.{name}.model"),
                got=asked,
                expected=f"a model of env.models ({', '.join(config.env.models) or 'none yet'})",
                fix="write env.models={judge: {url: http://host:8000/v1}} and name it",
            )


def environments_by_taskset_are_valid(config: Config, named: Named) -> None:
    for name, own in config.env.by_taskset.items():
        key = f"env.by_taskset.{name}"
        known = [*config.task.mix, *config.eval.tasksets]
        if name not in known:
            raise ConfigError(
                named(key),
                got=own,
                expected=f"a taskset of task.mix or eval.tasksets ({', '.join(known)})",
                fix="rename it",
            )
        shared = config.env.model_dump(exclude={"by_taskset"})
        env = checked_options(EnvConfig, {**shared, **own}, key=named(key), whose="the env section")
        part = config.model_copy(update={"env": env})
        inside = functools.partial(_inside, named, key)
        for rule in (environment_and_reward_exist, environment_options_are_valid):
            rule(part, inside)


def _inside(named: Named, key: str, inner: str) -> str:
    return named(inner.replace("env.", f"{key}.", 1))


def operators_exist(config: Config, named: Named) -> None:
    for step in config.replay.operators:
        if isinstance(step, dict) and len(step) != 1:
            raise ConfigError(
                named("replay.operators"),
                got=step,
                expected="one operator per list item",
                fix="write - name: {option: value}",
            )
        check_name(
            named("replay.operators"), step if isinstance(step, str) else next(iter(step)), OPERATORS, kind="function"
        )

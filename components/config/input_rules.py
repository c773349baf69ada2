"""Rules on inputs: tasks, environments, rewards, operators, evaluation. A rule's name is the sentence it enforces."""

from __future__ import annotations

import os
import re

from .environments import ENVIRONMENT_OPTIONS, checked_options
from .errors import ConfigError, words
from .inputs import TaskConfig, TaskSource
from .names import ENVIRONMENTS, OPERATORS, REWARDS, check_name
from .schema import Config

_SOURCES = {
    "jsonl": ("path", "data/train.jsonl"),
    "parquet": ("path", "data/train.parquet"),
    "hf": ("path", "openai/gsm8k"),
    "python": ("path", "my_tasks:generate"),
    "sql": ("path", "data/tasks.sqlite"),
    "queue": ("path", "data/queue.jsonl"),
    "store": ("path", "runs/leeway/first"),
    "reasoning_gym": ("dataset", "chain_sum"),
    "mix": ("mix", "'{a: {name: jsonl, path: a.jsonl}, b: {...}}'"),
}


def task_source_is_complete(config: Config) -> None:
    if config.task.name == "queue" and config.train.epochs is not None:
        raise ConfigError(
            "train.epochs",
            expected="train.steps, because task.name is queue: its length is unknown",
            fix="set train.steps=1000 train.epochs=null; the run ends before that when the queue is closed",
        )
    source_is_complete(config.task, "task")
    for name, part in config.task.parts().items():
        source_is_complete(part, f"task.mix.{name}")


def source_is_complete(task: TaskSource | TaskConfig, where: str) -> None:
    if task.name == "mix" and where != "task":
        raise ConfigError(
            f"{where}.name", expected="a source", fix="mixes cannot be nested; list all sources on one level"
        )
    needed, example = _SOURCES[task.name]
    if not getattr(task, needed):
        raise ConfigError(
            f"{where}.{needed}",
            expected=f"a value, because {where}.name is {task.name}",
            fix=f"set {where}.{needed}={example}",
        )
    for key in ("path", "dataset", "mix"):
        value = getattr(task, key, None)
        if key != needed and value:
            raise ConfigError(
                f"{where}.{key}",
                expected=f"null, because {where}.name is {task.name}",
                fix=f"add {where}.{key}=null, or write {where}.name={_source_of(key)} for tasks from there",
            )
    for key in ("subset", "split"):
        if where != "task" and key in task.model_fields_set and task.name != "hf":
            raise ConfigError(
                f"{where}.{key}",
                expected=f"nothing: it has an effect only where {where}.name is hf",
                fix=f"leave it out, or set {where}.name=hf, which reads hub ids and folders",
            )
    if (task.name == "sql") != (task.query is not None):
        raise ConfigError(
            f"{where}.query",
            expected="a SELECT with task.name=sql, and with nothing else",
            fix=f"set {where}.query='select question, answer from tasks', or leave it out",
        )
    if task.name == "queue" and (task.holdout_frac or where != "task"):
        raise ConfigError(
            f"{where}.name",
            expected="tasks that are known before the run: holding out, mixing and evaluating need that",
            fix="set task.holdout_frac=0 and eval.path=FILE, and let the queue be the only source",
        )
    if task.name == "queue" and task.order != "sequential":
        raise ConfigError(
            f"{where}.order",
            expected=f"sequential, because {where}.name is queue: its future tasks are unknown",
            fix=f"leave it out, or set {where}.order=sequential",
        )
    if task.name == "python":
        check_name(f"{where}.path", str(task.path), (), kind="function")
    if task.order == "easy_to_hard" and task.difficulty_key is None:
        raise ConfigError(
            f"{where}.difficulty_key",
            expected=f"a key whose value is a number, because {where}.order is easy_to_hard",
            fix=f"set {where}.difficulty_key=level",
        )


def _source_of(key: str) -> str:
    """The source that a user who sets `key` most likely means."""
    return {"path": "jsonl", "dataset": "reasoning_gym", "mix": "mix"}[key]


def prompt_template_holds_the_prompt(config: Config) -> None:
    template = config.task.prompt_template
    if template is not None and "{prompt}" not in template:
        raise ConfigError("task.prompt_template", expected="text with {prompt}", fix="put {prompt} where it belongs")


def environment_and_reward_exist(config: Config) -> None:
    env = config.env
    check_name("env.name", env.name, ENVIRONMENTS, kind="Class")
    names = {f"env.rewards.{name}": name for name in env.rewards} or {"env.reward": env.reward}
    for key, name in names.items():
        check_name(key, name, REWARDS, kind="function")
        if name == "reasoning_gym" and config.task.name not in ("reasoning_gym", "mix"):
            raise ConfigError(
                key,
                got=name,
                expected=f"a reward that can score tasks of {config.task.name}",
                fix=f"use {key.removesuffix('.reasoning_gym')}=math_verify or exact_match, or task.name=reasoning_gym",
            )
    for name in env.reward_options:
        if name not in names.values():
            raise ConfigError(
                f"env.reward_options.{name}",
                expected=f"options of a reward that is used ({', '.join(names.values())})",
                fix=f"leave it out, or add {name} to env.rewards",
            )


def environment_options_are_valid(config: Config) -> None:
    """Options of built-in environments. A user's own class checks its options itself before anything starts."""
    model = ENVIRONMENT_OPTIONS.get(config.env.name)
    if model is not None:
        checked_options(model, config.env.options, key="env.options", whose=f"env.name={config.env.name}")


def environment_variables_are_the_users(config: Config) -> None:
    for name in config.env.variables:
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or name.startswith(("RAY_", "VLLM_", "OMP_", "CUDA_", "LEEWAY_")):
            raise ConfigError(
                f"env.variables.{name}",
                expected="a variable of your own (not RAY_*, VLLM_*, OMP_*, CUDA_*, LEEWAY_*)",
                fix="leave it out",
            )


def auxiliary_models_are_valid(config: Config) -> None:
    for name, model in config.env.models.items():
        key = f"env.models.{name}"
        if (model.url is None) == (model.path is None):
            raise ConfigError(
                key,
                got=words("neither url nor path" if model.url is None else "both url and path"),
                expected="exactly one of them",
                fix=f"set {key}.url=http://host:8000/v1, or {key}.path=FOLDER",
            )
        by_an_engine = model.path is not None and model.kind == "generate"
        for option, has_effect in (("engine", by_an_engine), ("num_engines", model.path is not None)):
            if option in model.model_fields_set and not has_effect:
                raise ConfigError(
                    f"{key}.{option}",
                    got=getattr(model, option),
                    expected="a model that the run serves" + (" with kind generate" if option == "engine" else ""),
                    fix=f"leave {option} out",
                )
        if model.key_variable is not None and model.key_variable not in os.environ:
            raise ConfigError(
                f"{key}.key_variable",
                expected="an environment variable that is set and holds the key",
                fix=f"export {model.key_variable}=..., or leave it out",
            )
    for name in {*config.env.rewards, config.env.reward} & {"judge", "rubric", "reward_model"}:
        asked = config.env.reward_options.get(name, {}).get("model")
        if config.env.rewards and name not in config.env.rewards:
            continue
        if asked not in config.env.models:
            raise ConfigError(
                f"env.reward_options.{name}.model",
                got=asked,
                expected=f"a model of env.models ({', '.join(config.env.models) or 'none yet'})",
                fix="write env.models={judge: {url: http://host:8000/v1}} and name it",
            )


def environments_by_taskset_are_valid(config: Config) -> None:
    for name, own in config.env.by_taskset.items():
        key = f"env.by_taskset.{name}"
        known = [*config.task.mix, *config.eval.tasksets]
        if name not in known:
            raise ConfigError(
                key,
                got=own.model_dump(),
                expected=f"a taskset of task.mix or eval.tasksets ({', '.join(known)})",
                fix="rename it",
            )
        part = config.model_copy(update={"env": config.env.model_copy(update=dict(config.env.part(name)))})
        for rule in (environment_and_reward_exist, environment_options_are_valid):
            try:
                rule(part)
            except ConfigError as error:
                raise error.where_set(lambda inner, key=key: inner.replace("env.", f"{key}.", 1), part) from None


def operators_exist(config: Config) -> None:
    for step in config.replay.operators:
        if isinstance(step, dict) and len(step) != 1:
            raise ConfigError(
                "replay.operators", got=step, expected="one operator per list item", fix="write - name: {option: value}"
            )
        check_name("replay.operators", step if isinstance(step, str) else next(iter(step)), OPERATORS, kind="function")


def evaluation_tasksets_are_valid(config: Config) -> None:
    for name, own in config.eval.tasksets.items():
        key = f"eval.tasksets.{name}"
        if name == "held_out":
            raise ConfigError(
                key, got=name, expected="another name: held_out means the held-out tasks", fix="rename it"
            )
        part = config.task.evaluated(own)
        source_is_complete(part, key)
        env = config.env.part(name)
        rewards = env.rewards or {env.reward: 1.0}
        if "reasoning_gym" in rewards and part.name != "reasoning_gym":
            raise ConfigError(
                f"env.by_taskset.{name}.reward",
                got="reasoning_gym",
                expected=f"a reward that can score tasks of {part.name}, which is where {key} comes from",
                fix=f"set env.by_taskset.{name}.reward=exact_match (or math_verify)",
            )


def evaluation_samples_suffice(config: Config) -> None:
    for name in (None, *config.eval.tasksets):
        key = "eval" if name is None else f"eval.tasksets.{name}"
        sampling = config.eval.sampling(name)
        if sampling.k and max(sampling.k) > sampling.samples:
            raise ConfigError(
                f"{key}.k",
                got=sampling.k,
                expected=f"numbers up to {key}.samples {sampling.samples}",
                fix=f"set {key}.samples={max(sampling.k)}",
            )
        if sampling.samples > 1 and sampling.temperature == 0:
            raise ConfigError(
                f"{key}.temperature",
                got=0,
                expected=f"more than 0, because {key}.samples is {sampling.samples}: greedy samples are all identical",
                fix=f"set {key}.temperature=1",
            )
        longest = config.rollout.max_model_len
        if sampling.max_tokens is not None and sampling.max_tokens >= longest:
            raise ConfigError(
                f"{key}.max_tokens",
                got=sampling.max_tokens,
                expected=f"less than rollout.max_model_len {longest}",
                fix="lower it",
            )

"""Trinity-RFT's `buffer` section: task sets, workflows and rewards by name, evaluation, reuse."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from . import common
from .table import Fate, Theirs, Unusable, number_of, shown
from .trinity_keys import DATA, EVAL, SETS, T, is_offline, kind_of


def to_reuse(t: Theirs) -> Fate:
    on = any(t.flag(f"{DATA}.{key}") for key in ("use_priority_queue", "replay_buffer.enable"))
    if not on:
        return Fate("ignored", {}, "every experience is trained once, there and here")
    ours: dict[str, Any] = {"replay.sampling": "priority", "replay.priority": "newest"}
    for key in ("replay_buffer.priority_fn_args.decay", "replay_buffer_kwargs.decay"):
        if t.is_given(f"{DATA}.{key}"):
            ours["replay.priority_decay"] = t.number(f"{DATA}.{key}")
    given = (t.get(f"{DATA}.{key}") for key in ("replay_buffer.priority_fn", "replay_buffer_kwargs.priority_fn"))
    if other := next((name for name in given if name not in (None, "linear_decay")), None):
        return Fate("refused", {}, f"no priority {shown(other)} here: write replay.priority=pkg.mod:function")
    why = "the newest come first, within the reorder window; reuse is replay.max_uses, in batches rather than seconds"
    return Fate("approximate", ours, why)


WORKFLOWS: dict[str, tuple[str, str]] = {
    "simple_workflow": ("single_turn", "exact_match"),
    "math_workflow": ("single_turn", "math_verify"),
    "math_boxed_workflow": ("single_turn", "boxed"),
    "math_eval_workflow": ("single_turn", "math_verify"),
    "on_policy_distill_workflow": ("single_turn", ""),
    "on_policy_distill_math_workflow": ("single_turn", "math_verify"),
    "frozen_lake_workflow": ("frozen_lake", ""),
}
REWARDS = {
    "math_reward": "math_verify",
    "math_boxed_reward": "boxed",
    "math_dapo_reward": "math_verify",
    "accuracy_reward": "math_verify",
    "countdown_reward": "countdown",
    "format_reward": "format",
}


def to_environment(t: Theirs) -> Fate:
    if is_offline(t):
        return Fate("ignored", {}, "nothing is rolled out")
    name = _workflow(t)
    rewards = (f"{T}.default_reward_fn_type", "buffer.explorer_input.default_reward_fn_type",
               "buffer.default_reward_fn_type", "buffer.explorer_input.tasksets[0].default_reward_fn_type")  # fmt: skip
    reward = next((str(v) for key in rewards if (v := t.given.get(key)) is not None), "")
    if not name:
        return Fate("ignored", {}, "no workflow is named")
    if name not in WORKFLOWS:
        fix = "write it as an environment (docs/environments.md) and name it: env.name=pkg.mod:Class"
        return Fate("refused", {}, f"no workflow {shown(name)} here; {fix}")
    env, own = WORKFLOWS[name]
    ours: dict[str, Any] = {} if env == "single_turn" else {"env.name": env}
    if env == "frozen_lake":
        return Fate("approximate", ours, "our own lake: its size, slipping and texts are env.options")
    if reward and reward not in REWARDS:
        return Fate("refused", ours, f"no reward {shown(reward)} here; write env.reward=pkg.mod:function")
    ours["env.reward"] = REWARDS.get(reward, own)
    why = "without the workflow's own system prompt: set task.system_prompt"
    return Fate("approximate", ours | _shaped(t), why)


def _workflow(t: Theirs) -> str:
    keys = (f"{T}.default_workflow_type", "buffer.explorer_input.default_workflow_type", "buffer.default_workflow_type",
            "buffer.explorer_input.tasksets[0].default_workflow_type")  # fmt: skip
    return next((str(v) for key in keys if (v := t.given.get(key)) is not None), "").removeprefix("async_")


ARGUMENTS = {
    "frozen_lake": ("env_max_steps", "agent_max_steps", "is_slippery"),
    "single_turn": ("use_base", "with_think"),
}
"""Of workflows, by environment."""


def to_options(t: Theirs) -> Fate:
    """Arguments of workflows that are here: of all task sets alike."""
    env, _ = WORKFLOWS.get(_workflow(t), ("", ""))
    args: dict[str, Any] = {}
    for prefix in (T, DATA) if t.index is None else (EVAL, SETS):
        args |= t.below(f"{prefix}.workflow_args")
    unknown = [name for name in args if name not in ARGUMENTS.get(env, ())]
    if unknown:
        why = f"an environment's settings are env.options, of your own class: {', '.join(map(shown, unknown))}"
        return Fate("refused", {}, why)
    if env == "single_turn":
        return Fate(
            "approximate", {}, "without the workflow's own prompts: set task.system_prompt, task.prompt_template"
        )
    turns = [n for key in ("env_max_steps", "agent_max_steps") if (n := number_of(args.get(key))) and n >= 1]
    ours: dict[str, Any] = {"env.options.max_turns": int(min(turns))} if turns else {}
    if str(args.get("is_slippery", False)).lower() == "true":
        ours["env.options.slip"] = 2 / 3
    return Fate(
        "approximate", ours if t.index is None else {}, "moves; a slippery lake lets one move in three go as meant"
    )


def _shaped(t: Theirs) -> dict[str, Any]:
    """The penalty on long answers that DAPO's reward has."""
    args = f"{T}.reward_fn_args"
    if not t.flag(f"{args}.enable_overlong_penalty"):
        return {}
    longest, last = t.integer(f"{args}.max_response_length", least=1), t.integer(f"{args}.cache_length", least=1)
    return {"algorithm.overlong_buffer_frac": last / longest}


def _source(t: Theirs, prefix: str) -> dict[str, Any]:
    """The settings of a task source, without `task.`"""
    path, kind = t.get(f"{prefix}.path"), str(t.get(f"{prefix}.storage_type") or "file").lower()
    if path is None:
        raise Unusable(f"{t.key(prefix)}.path: none given; expected where the tasks are")
    if kind == "sql":
        raise Unusable(f"{t.key(prefix)}.storage_type: sql needs task.query, the SELECT whose rows are tasks")
    ours: dict[str, Any] = {"name": "queue", "path": path} if kind == "queue" else common.source(str(path))
    if ours["name"] == "hf":
        ours["split"] = t.text(f"{prefix}.split", "train")
        if (subset := t.get(f"{prefix}.subset_name")) is not None:
            ours["subset"] = subset
    return ours


def _columns(t: Theirs, prefix: str) -> dict[str, Any]:
    form = f"{prefix}.format"
    ours: dict[str, Any] = {}
    kind = str(t.get(f"{form}.prompt_type") or ("messages" if is_offline(t) else "plaintext")).lower()
    if kind == "messages" and is_offline(t):
        ours["messages_key"] = t.get(f"{form}.messages_key") or "message"
    else:
        ours["prompt_key"] = t.get(f"{form}.prompt_key") or "prompt"
        ours["answer_key"] = t.get(f"{form}.response_key") or "response"
    for key in ("system_prompt", "system_prompt_key", "tools_key"):
        if (value := t.get(f"{form}.{key}")) is not None:
            ours[key] = value
    if kind_of(t) == "dpo":
        ours |= {"answer_key": t.get(f"{form}.chosen_key") or "chosen"}
        ours |= {"rejected_key": t.get(f"{form}.rejected_key") or "rejected"}
        ours["prompt_key"] = ours.get("prompt_key") or ours.pop("messages_key")
    return ours


def _marked(path: str, ours: Mapping[str, Any]) -> dict[str, Any]:
    """GSM8K's answers end with their number behind a mark."""
    is_gsm8k = re.search(r"gsm8k", path, re.IGNORECASE) and ours.get("answer_key") == "answer"
    return {"answer_after": "####"} if is_gsm8k else {}


def to_task(t: Theirs) -> Fate:
    prefix = DATA if is_offline(t) else T
    if not t.below(prefix):
        return Fate("ignored", {}, "given as tasksets") if t.items("buffer.explorer_input.tasksets") else _no_tasks(t)
    where, columns = _source(t, prefix), _columns(t, prefix)
    found = {f"task.{k}": v for k, v in (where | columns | _marked(str(where["path"]), columns)).items()}
    order = (
        t.get(f"{prefix}.data_selector.selector_type") or t.get(f"{prefix}.task_selector.selector_type") or "sequential"
    )
    orders = {"sequential": "sequential", "shuffle": "shuffle", "random": "shuffle"}
    return Fate("exact", found | {"task.order": common.one_of(orders, "selector_type", str(order))})


def _no_tasks(t: Theirs) -> Fate:
    return Fate("refused", {}, "no taskset is given: set task.path")


def to_mix(t: Theirs) -> Fate:
    if is_offline(t):
        return Fate("ignored", {}, "nothing is rolled out")
    ours: dict[str, Any] = {"task.name": "mix"}
    shared: dict[str, Any] | None = None
    for i in t.items("buffer.explorer_input.tasksets"):
        item = t.at(i)
        name = common.word(item.get(f"{SETS}.name", f"tasks_{i}"))
        where, columns = _source(item, SETS), _columns(item, SETS)
        ours |= {f"task.mix.{name}.{k}": v for k, v in (where | columns | _sampled(item)).items()}
        shared = columns if shared is None else shared
    return Fate("approximate", ours, "drawn by weight (task.mix.NAME.weight), not in turn")


def _sampled(t: Theirs) -> dict[str, Any]:
    """Of one of several tasksets. A repeat of 1 is what it has where nothing is given: the run's own holds then."""
    ours: dict[str, Any] = {}
    if (temperature := t.get(f"{SETS}.rollout_args.temperature")) is not None:
        ours["temperature"] = temperature
    if (repeat := t.get(f"{SETS}.repeat_times")) is not None and t.integer(f"{SETS}.repeat_times", least=1) > 1:
        ours["group_size"] = int(number_of(repeat) or 1)
    return ours


def to_eval_taskset(t: Theirs) -> Fate:
    if is_offline(t):
        return Fate("ignored", {}, "evaluated by a job of its own: leeway run evaluate")
    name = common.word(t.get(f"{EVAL}.name", "heldout")).replace("held_out", "heldout")
    where, columns = _source(t, EVAL), _columns(t, EVAL)
    ours = where | columns | _marked(str(where["path"]), columns)
    samples = int(number_of(t.get(f"{EVAL}.rollout_args.n")) or t.integer(f"{EVAL}.repeat_times", least=1))
    ours["num_tasks"] = 100_000
    own = t.get(f"{EVAL}.rollout_args.temperature")
    ours["temperature"] = own if own is not None else t.number("model.temperature")
    if samples > 1:
        ours["samples"] = samples
    if (top_p := t.get(f"{EVAL}.rollout_args.top_p")) is not None:
        ours["top_p"] = top_p
    if number_of(t.get(f"{EVAL}.rollout_args.top_k", -1)) not in (-1.0, 0.0):
        return Fate("approximate", {f"eval.tasksets.{name}.{k}": v for k, v in ours.items()}, "without top_k")
    workflow = t.get(f"{EVAL}.default_workflow_type")
    kind, why = "exact", ""
    if workflow is not None and str(workflow).removeprefix("async_") in WORKFLOWS:
        reward = WORKFLOWS[str(workflow).removeprefix("async_")][1]
        why = f"scored with the run's reward; env.by_taskset.{name}.reward={reward} would be the workflow's"
        kind = "approximate"
    return Fate(kind, {f"eval.tasksets.{name}.{k}": v for k, v in ours.items()}, why)


def to_evaluation(t: Theirs) -> Fate:
    if not t.items("buffer.explorer_input.eval_tasksets") or is_offline(t):
        return Fate("ignored", {}, "no evaluation in this job")
    every, n = t.integer("explorer.eval_interval"), t.integer("synchronizer.sync_interval", least=1)
    ours: dict[str, Any] = {"eval.at_start": t.flag("explorer.eval_on_startup"), "eval.every": -(-every // n) * n}
    if every % n:
        return Fate("approximate", ours, f"only published weights are evaluated: the next multiple of {n} steps")
    return Fate("exact", ours, "optimizer steps, both")


def taskset_keys(prefix: str) -> tuple[str, ...]:
    names = ("name", "path", "storage_type", "split", "subset_name", "format.prompt_type", "format.prompt_key",
             "format.response_key", "format.system_prompt", "format.system_prompt_key", "format.messages_key",
             "format.tools_key",
             "format.chosen_key", "format.rejected_key", "data_selector.selector_type", "task_selector.selector_type",
             "data_selector.seed", "task_selector.seed")  # fmt: skip
    return tuple(f"{prefix}.{name}" for name in names)


def in_tasksets(*names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names for prefix in (T, EVAL, SETS, DATA))

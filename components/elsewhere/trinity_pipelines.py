"""Trinity-RFT's data pipelines: its operators on experiences, on tasks, and its further buffers."""

from __future__ import annotations

import re
from typing import Any

from .table import Fate, Theirs, Unusable, number_of, shown
from .trinity_keys import AUX, recipe

EXPERIENCES, TASKS = "data_processor.experience_pipeline", "data_processor.task_pipeline"
NOT_NEEDED = ("invalid_reward_filter", "low_quality_filter", "pass_rate_calculator")
"""Rewards that are no numbers are refused anyhow, and pass rates are measured: see task.order=adaptive."""
_STD = ("algorithm.advantage_fn_args.std_threshold", "algorithm.advantage_fn_args.reward_std_threshold")
_FURTHER = ("inputs", "reward_shaping")


def to_operators(t: Theirs) -> Fate:
    """Its operators on experiences, in their order."""
    for name in _FURTHER:
        if t.below(f"{EXPERIENCES}.{name}") or t.items(f"{EXPERIENCES}.{name}"):
            why = {"inputs": "further inputs of the trainer are replay.buffers"}.get(
                name, "rewards are shaped by replay.operators: shape_reward, or an operator of your own"
            )
            return Fate("refused", {}, why)
    if t.given.get(f"{EXPERIENCES}.operators"):
        return Fate("refused", {}, "operators: got names, expected a list of {name, args}")
    operators: list[Any] = ["filter_zero_variance"] if any(t.is_given(key) for key in _STD) else []
    why = ""
    for index in t.items(f"{EXPERIENCES}.operators"):
        own = f"{EXPERIENCES}.operators[{index}]"
        name, args = t.text(f"{own}.name", ""), tree(t.below(f"{own}.args"))
        if name in NOT_NEEDED:
            continue
        if name == "reward_std_filter":
            operators += ["filter_zero_variance"] if "filter_zero_variance" not in operators else []
            why = why or ("a threshold above 0 counts as 0" if args.get("threshold") else "")
        elif name == "data_juicer" and isinstance(args.get("operators"), list):
            operators.append({"data_juicer": {"process": [_step(step) for step in args["operators"]]}})
            why = "filters on the text of each answer; what does not pass is masked"
        else:
            return Fate("refused", {}, _REASONS.get(name, f"no operator {shown(name)} here: write your own function"))
    if not operators or recipe(t) not in ("async_rl", "train"):
        return Fate("ignored", {}, "rollouts are always written, and nothing else changes what is trained on")
    return Fate("approximate" if why else "exact", {"replay.operators": operators}, why)


_REASONS = {
    "data_juicer": "the file is not beside this one: put its `process` under replay.operators: "
    "[{data_juicer: {process: [...]}}]",
    "reward_filter": "single answers are not left out by their reward (filter_reward goes by the mean of a group): "
    "write an operator of your own",
    "reward_shaping_mapper": "its statistics are Data-Juicer's: write an operator of your own that has them",
}


def to_prepared(t: Theirs) -> Fate:
    """Its pipeline for tasks, which is a command of its own here."""
    own = t.below(TASKS)
    works = [key for key in own if key.startswith(("operators[", "config_path", "priority_weights"))]
    if not any(own[key] not in (None, "") for key in works) and (number_of(own.get("top_k", -1)) or -1) < 0:
        return Fate("ignored", {}, "no operators there: the tasks are those of task.path")
    return Fate(
        "refused",
        {},
        "tasks are prepared before a run: `leeway prepare` with Data-Juicer's operators, `leeway run score_tasks` for "
        "their difficulty, task.limit for the first of them; leave it out here",
    )


def to_buffers(t: Theirs, *, mixes: bool) -> Fate:
    """Its auxiliary buffers, of which mix alone reads one."""
    for name in sorted({key.split(".")[0] for key in t.below(AUX)}):
        if t.text(f"{AUX}.{name}.storage_type", "file").lower() == "sql":
            return Fate("refused", {}, f"{name}: rows of its databases are serialized objects; write them as jsonl")
    if mixes:
        return Fate("exact", {}, "replay.buffers")
    return Fate(
        "refused",
        {},
        "nothing there reads it but mix; here replay.buffers mixes any number of files, databases and stored "
        "experiences into every step",
    )


def tree(flat: dict[str, Any]) -> Any:
    """`{"a[0].b": 1}` -> `{"a": [{"b": 1}]}`."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        steps = [int(at) if at else name for name, at in re.findall(r"([^.\[\]]+)|\[(\d+)\]", key)]
        node: Any = found
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            fresh: Any = value if after is None else ([] if isinstance(after, int) else {})
            if isinstance(node, dict) and isinstance(step, str):
                node.setdefault(step, fresh)
            elif isinstance(node, list) and isinstance(step, int) and step <= len(node):
                node += [fresh] if step == len(node) else []
            else:  # a name that looks like an index, or the other way round
                raise Unusable(f"{shown(key)}: got a name where a list or a mapping has none like it")
            node = node[step]
    return found


def _step(step: Any) -> Any:
    """Theirs may be {name, args}, where Data-Juicer has {name: args}."""
    if isinstance(step, dict) and "name" in step:
        return {step["name"]: step.get("args") or {}}
    return step

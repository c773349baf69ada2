"""Rules on evaluation. Each rule's name is the sentence it enforces."""

from __future__ import annotations

from .environments import checked_options
from .errors import ConfigError
from .evalsets import SAMPLING_KEYS, evalset_sampling, evalset_settings
from .input_rules import Named, source_is_complete
from .inputs import EvalSampling, TaskConfig
from .schema import Config


def evaluation_tasksets_are_valid(config: Config, named: Named) -> None:
    for name, own in config.eval.tasksets.items():
        key = f"eval.tasksets.{name}"
        if name == "held_out":
            raise ConfigError(
                named(key), got=name, expected="another name: held_out means the held-out tasks", fix="rename it"
            )
        sampling = {k: v for k, v in own.items() if k in SAMPLING_KEYS}
        checked_options(EvalSampling, sampling, key=named(key), whose="a taskset of eval.tasksets")
        part = checked_options(
            TaskConfig, evalset_settings(config.task, own), key=named(key), whose="a taskset of eval.tasksets"
        )
        if "name" not in own or part.name == "mix":
            raise ConfigError(
                named(f"{key}.name"),
                got=own.get("name"),
                expected="a source other than mix",
                fix=f"set {key}.name=jsonl and {key}.path=FILE",
            )
        source_is_complete(part, named, key)
        env = config.env.model_dump() | config.env.by_taskset.get(name, {})
        rewards = env["rewards"] or {env["reward"]: 1.0}
        if "reasoning_gym" in rewards and part.name != "reasoning_gym":
            raise ConfigError(
                named(f"env.by_taskset.{name}.reward"),
                got="reasoning_gym",
                expected=f"a reward that can score tasks of {part.name}, which is where {key} comes from",
                fix=f"set env.by_taskset.{name}.reward=exact_match (or math_verify)",
            )


def evaluation_samples_suffice(config: Config, named: Named) -> None:
    for name in (None, *config.eval.tasksets):
        key = "eval" if name is None else f"eval.tasksets.{name}"
        sampling = evalset_sampling(config.eval, name)
        if sampling.k and max(sampling.k) > sampling.samples:
            raise ConfigError(
                named(f"{key}.k"),
                got=sampling.k,
                expected=f"numbers up to {key}.samples {sampling.samples}",
                fix=f"set {key}.samples={max(sampling.k)}",
            )
        if sampling.samples > 1 and sampling.temperature == 0:
            raise ConfigError(
                named(f"{key}.temperature"),
                got=0,
                expected=f"more than 0, because {key}.samples is {sampling.samples}: greedy samples are all identical",
                fix=f"set {key}.temperature=1",
            )
        longest = config.rollout.max_model_len
        if sampling.max_tokens is not None and sampling.max_tokens >= longest:
            raise ConfigError(
                named(f"{key}.max_tokens"),
                got=sampling.max_tokens,
                expected=f"less than rollout.max_model_len {longest}",
                fix="lower it",
            )

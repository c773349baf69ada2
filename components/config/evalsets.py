"""The settings of each taskset in `eval.tasksets`, split in two: where its tasks come from, how they are answered."""

from __future__ import annotations

from typing import Any

from .inputs import EvalConfig, EvalSampling, TaskConfig

SAMPLING_KEYS = frozenset(EvalSampling.model_fields)


def evalset_sampling(config: EvalConfig, name: str | None) -> EvalSampling:
    """How the tasks of a taskset are answered (None: the held-out ones). Anything it does not set comes from `eval`."""
    own = {} if name is None else {k: v for k, v in config.tasksets[name].items() if k in SAMPLING_KEYS}
    shared = config.model_dump(include=set(SAMPLING_KEYS))
    return EvalSampling.model_validate({**shared, **own})


def evalset_settings(task: TaskConfig, own: dict[str, Any]) -> dict[str, Any]:
    """The task settings of a taskset. Anything it does not set comes from `task`, except where tasks come from.

    All of its rows are evaluated on, so `holdout_frac` does not apply.
    """
    shared = task.model_dump(
        exclude={
            "mix",
            "name",
            "path",
            "query",
            "dataset",
            "options",
            "limit",
            "holdout_frac",
            "order",
            "difficulty_key",
        }
    )
    return {**shared, **{k: v for k, v in own.items() if k not in SAMPLING_KEYS}}


def ks(sampling: EvalSampling) -> list[int]:
    """The values of k for pass@k and best@k: those requested, or powers of two up to `samples`, plus `samples`."""
    if sampling.k is not None:
        return sorted(set(sampling.k))
    powers = [2**i for i in range(sampling.samples.bit_length()) if 2**i < sampling.samples]
    return [*powers, sampling.samples]

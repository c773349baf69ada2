"""Inference engines by name: where each one is, which settings it takes, and what it needs here.

An engine more is a file in `engines/` and an `EngineKind` in `ENGINES`. A user's own is named as "pkg.module:Class".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, NonNegativeFloat

from .errors import ConfigError
from .model_files import head_size, model_config
from .names import check_name, cpu_head_sizes, engine_options, nearest
from .paths import is_folder

if TYPE_CHECKING:
    from .schema import Config

Problems = Callable[["Config"], Iterator[tuple[str, str]]]
"""(key, text) of what keeps an engine from running this model on this machine."""


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """`target`: its class, "module:Class". `package`: what must be installed, and `without`: what must not be loaded
    into the process of its collector, because another library would.

    `options` names the settings that it takes beside `name` (empty: any), `what` calls them in a message. `refused`
    maps settings to what to do instead; `not_reproducible` would change its probabilities. `parallel` multiply its
    devices.
    """

    target: str
    what: str
    package: str | None = None
    without: tuple[str, ...] = ()
    options: Callable[[], set[str]] = set
    refused: Mapping[str, str] = field(default_factory=dict)
    not_reproducible: tuple[str, ...] = ()
    parallel: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    problems: Problems = lambda config: iter(())


OWNED_BY_LEEWAY = {
    "model": "use model.path",
    "tokenizer": "use model.path",
    "dtype": "use model.dtype",
    "max_model_len": "use rollout.max_model_len",
    "seed": "use seed",
    "logprobs_mode": "leave it out: behaviour logprobs always come from the sampled distribution",
    "scheduling_policy": "leave it out: a canary must overtake waiting requests",
    "weight_transfer_config": "leave it out: Leeway moves the weights itself (section param_server)",
    "trust_remote_code": "leave it out: code from a model's folder is never run",
    "worker_extension_cls": "leave it out: Leeway's own worker loads the weights",
}
"""Arguments of vLLM that Leeway sets itself, and what to do instead."""
NOT_REPRODUCIBLE = (
    "quantization",
    "quantization_config",
    "kv_cache_dtype",
    "enable_lora",
    "logits_processors",
    "override_generation_config",
    "speculative_config",
)
"""Arguments that make vLLM's probabilities differ from those of the trainer's weights."""


def is_local_path(path: str) -> bool:
    """Whether `path` is written as a path of this machine rather than as a hub id."""
    return path.startswith(("/", ".", "~")) or path.endswith("/") or path.count("/") > 1 or is_folder(path)


def _vllm_problems(config: Config) -> Iterator[tuple[str, str]]:
    """On a CPU, vLLM supports only some widths of attention heads."""
    if config.cluster.device != "cpu" or not (sizes := cpu_head_sizes()):
        return
    if config.model.init is not None:
        key, size = "model.init.options", head_size(config.model.init.options)
    elif config.model.path is not None and is_local_path(config.model.path):
        key, size = "model.path", head_size(model_config(Path(config.model.path).expanduser()))
    else:
        return
    if size is not None and size not in sizes:
        yield (
            key,
            f"got attention heads of size {size}, expected one of {', '.join(map(str, sizes))}: vLLM on a CPU has no "
            "others; use another model, rollout.engine.name=hf, or cluster.device=cuda",
        )


ENGINES = {
    "vllm": EngineKind(
        target="leeway.engines.vllm_engine:VllmEngine",
        what="an argument of vLLM's AsyncEngineArgs",
        package="vllm",
        options=engine_options,
        refused=OWNED_BY_LEEWAY,
        not_reproducible=NOT_REPRODUCIBLE,
        parallel=("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        problems=_vllm_problems,
    ),
    "hf": EngineKind(
        target="leeway.engines.hf_engine:HfEngine",
        what="a setting of the engine hf, which has max_num_seqs alone (cluster.kv_cache_gib limits its memory)",
        without=("vllm",),
        options=lambda: {"max_num_seqs"},
        counts=("max_num_seqs",),
    ),
}
DEFAULT = "vllm"

LEAST_TEMPERATURE = 0.01
"""vLLM raises a temperature between 0 and this value to this value, and so samples from a different distribution."""
HIGHEST_TEMPERATURE = 2.0
"""vLLM refuses a request above it."""


def _is_sampled_as_it_says(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"0 (greedy) or at least {LEAST_TEMPERATURE}, which is vLLM's lowest")
    if value > HIGHEST_TEMPERATURE:
        raise ValueError(f"at most {HIGHEST_TEMPERATURE:g}, which is vLLM's highest")
    return value


Temperature = Annotated[NonNegativeFloat, AfterValidator(_is_sampled_as_it_says)]
"""A sampling temperature that may be 0: greedy."""


def engine_kind(name: str) -> EngineKind:
    """Of a name that is in `ENGINES`, or of a user's own "pkg.module:Class", whose settings are its own affair."""
    return ENGINES[name] if name in ENGINES else EngineKind(target=name, what="what that class takes")


def devices_of(name: str, options: Mapping[str, Any]) -> int:
    """How many devices one engine computes on."""
    number = 1
    for parallel in engine_kind(name).parallel:
        number *= options.get(parallel, 1)
    return number


def check_engine(section: str, name: Any, options: Mapping[str, Any], *, on_cpu: bool) -> None:
    """Raise ConfigError for the first setting in `section` that its engine does not take."""
    if not isinstance(name, str):
        raise ConfigError(
            f"{section}.name",
            got=name,
            expected=f'one of {", ".join(ENGINES)}, or "pkg.mod:Engine"',
            fix=f"leave it out for {DEFAULT}",
        )
    check_name(f"{section}.name", name, ENGINES, kind="Engine")
    kind = engine_kind(name)
    for option, value in options.items():
        key = f"{section}.{option}"
        if option in kind.refused:
            raise ConfigError(key, got=value, expected="an argument that Leeway does not set", fix=kind.refused[option])
        if option in kind.not_reproducible:
            raise ConfigError(
                key, got=value, expected="what the trainer can reproduce token by token", fix=f"leave {option} out"
            )
    known = kind.options() if options else set()
    for option, value in options.items():
        key = f"{section}.{option}"
        if known and option not in known:
            guess = nearest(option, known)
            fix = f"nearest: {section}.{guess}" if guess else "leave it out"
            raise ConfigError(key, got=value, expected=kind.what, fix=fix)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if option in (*kind.parallel, *kind.counts) and not is_count:
            raise ConfigError(key, got=value, expected="a whole number from 1", fix="set 1")
        if option in kind.parallel and value > 1 and on_cpu:
            raise ConfigError(
                key,
                got=value,
                expected="1 where cluster.device is cpu: engines of several processes are not supported on CPU yet",
                fix=f"leave {option} out, and raise rollout.num_generators for more engines",
            )


def split_options(engine: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name, the engine's own options) of a section like `rollout.engine`."""
    return engine.get("name", DEFAULT), {option: value for option, value in engine.items() if option != "name"}

"""Inference engines by name: where each one is, which settings it takes, and what it needs here.

An engine more is a file in `engines/`, a class of its settings and an `EngineKind` in `ENGINES`. A user's own is named
as "pkg.module:Class".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, NonNegativeFloat, PositiveInt

from ..section import Partial
from .environments import checked_options
from .errors import ConfigError
from .model_files import head_size, of_the_text, only_attends
from .names import WORD_OF_TYPE, check_name, cpu_head_sizes, is_of, nearest, vllm_arguments
from .paths import is_folder

LARGE_BLOCK = 144
"""Tokens in a block of a prefix cache, where nothing else is known: more than vLLM's usual 16 to 128."""
SMALL_BLOCK = 32
"""The most in one of engine `hf`, and on a CPU in one of vLLM where all layers keep keys and values alike."""


class EngineOptions(Partial):
    """What `rollout.engine` holds beside `name`. Of a user's own engine: anything, which is its own affair."""

    model_config = ConfigDict(extra="allow")

    @property
    def places(self) -> int:
        """Sequences that it works on at a time."""
        return int((self.model_extra or {}).get("max_num_seqs", 256))

    @property
    def devices(self) -> int:
        """How many devices one engine computes on; on a CPU, how many processes compute."""
        return 1

    @property
    def shares_rows(self) -> bool:
        """Whether answers to one prompt are one row of a pass until they differ."""
        return False

    def cache_block(self, model: Mapping[str, Any], *, on_cpu: bool) -> int:
        """At most so many tokens are a block of its prefix cache; `model`: its config.json, {} if unknown."""
        return LARGE_BLOCK

    def loads_ahead(self, *, on_cpu: bool) -> bool:
        """Whether an engine loads beside generation, into a second copy of the weights."""
        return False

    def slot_rank(self, rank: int) -> int:
        """The rank that an adapter of `rank` takes the memory of."""
        return rank


class HfOptions(EngineOptions):
    """Its memory is limited by cluster.kv_cache_gib."""

    model_config = ConfigDict(extra="forbid")

    max_num_seqs: PositiveInt = Field(default=256, description="sequences that it works on at a time")

    @property
    def places(self) -> int:
        return self.max_num_seqs

    @property
    def shares_rows(self) -> bool:
        return True

    def cache_block(self, model: Mapping[str, Any], *, on_cpu: bool) -> int:
        return SMALL_BLOCK


SLOT_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has slots for; a smaller adapter lies in the next larger one."""


class VllmOptions(EngineOptions):
    """Its other settings are arguments of vLLM's AsyncEngineArgs."""

    tensor_parallel_size: PositiveInt = Field(default=1, description="processes that share each matrix")
    pipeline_parallel_size: PositiveInt = Field(default=1, description="GPUs that share the layers")
    data_parallel_size: PositiveInt = Field(default=1, description="copies of the model in one engine")
    double_buffer: bool | None = Field(
        default=None,
        description="before the pause, have a second copy of the weights where the engine computes; null: on a CPU, "
        "not on a GPU",
    )

    @property
    def devices(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def cache_block(self, model: Mapping[str, Any], *, on_cpu: bool) -> int:
        block = (self.model_extra or {}).get("block_size")
        if isinstance(block, int):
            return block
        return SMALL_BLOCK if on_cpu and only_attends(dict(model)) else LARGE_BLOCK

    def loads_ahead(self, *, on_cpu: bool) -> bool:
        return on_cpu if self.double_buffer is None else self.double_buffer

    def slot_rank(self, rank: int) -> int:
        return min(size for size in SLOT_RANKS if size >= rank)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of AsyncEngineArgs, as far as they are set."""
        return {name: value for name, value in self.model_dump().items() if name != "double_buffer"}


@dataclass(frozen=True, kw_only=True)
class Served:
    """An engine and its model. `section`, `model_key`: where they are set; `model`: its config.json, {} if unknown."""

    section: str
    name: str
    options: EngineOptions
    model_key: str
    model: Mapping[str, Any]
    on_cpu: bool


Problems = Callable[[Served], Iterator[tuple[str, str]]]
"""(key, text) of what keeps an engine from running this model on this machine."""


@dataclass(frozen=True)
class Processes:
    """Of an engine's own: which modules they and their collector load, and in which environment, by the engine's
    settings, on a CPU.
    """

    modules: tuple[str, ...]
    environ: Callable[[EngineOptions], dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """`target`: its class, "module:Class". `package`: what must be installed, and `without`: what must not be loaded
    into the process of its collector, because another library would. `options`: its settings beside `name`. `adapters`:
    it serves several versions of an adapter at once (`model.lora`). `device_memory`: it opens weights in memory of its
    device, see `Engine.stage`. `processes`: those that it starts beside its collector's.
    """

    target: str
    options: type[EngineOptions] = EngineOptions
    package: str | None = None
    without: tuple[str, ...] = ()
    adapters: bool = False
    device_memory: bool = False
    processes: Processes | None = None
    problems: Problems = lambda served: iter(())


OWNED_BY_LEEWAY = {
    "model": "use model.path",
    "tokenizer": "use model.path",
    "dtype": "use model.dtype",
    "max_model_len": "use rollout.max_model_len",
    "seed": "use seed",
    "logprobs_mode": "leave it out: behaviour logprobs always come from the sampled distribution",
    "scheduling_policy": "leave it out: a canary must overtake waiting requests",
    "scheduler_cls": "leave it out: Leeway's own scheduler takes whole groups",
    "weight_transfer_config": "leave it out: Leeway moves the weights itself (section param_server)",
    "trust_remote_code": "leave it out: code from a model's folder is never run",
    "worker_extension_cls": "leave it out: Leeway's own worker loads the weights",
    "enable_lora": "set model.lora for the policy",
    "max_loras": "use model.lora.max_versions",
    "max_cpu_loras": "use model.lora.max_versions",
    "max_lora_rank": "use model.lora.rank",
    "lora_target_modules": "use model.lora.target_modules",
    "lora_dtype": "leave it out: adapters have model.dtype",
    "fully_sharded_loras": "leave it out: an engine that holds adapters has one rank",
}
"""Arguments of vLLM that Leeway sets itself, and what to do instead."""
NOT_REPRODUCIBLE = (
    "quantization",
    "quantization_config",
    "kv_cache_dtype",
    "logits_processors",
    "override_generation_config",
    "speculative_config",
)
"""Arguments that make vLLM's probabilities differ from those of the trainer's weights."""
AT_LEAST_ONE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
)
"""Arguments of vLLM that are numbers of something; what is wrong with them it finds when an engine starts."""
VOCABULARY_BLOCK = 64
"""vLLM fills a vocabulary up to a multiple of this before it is divided."""


def is_local_path(path: str) -> bool:
    """Whether `path` is written as a path of this machine rather than as a hub id."""
    return path.startswith(("/", ".", "~")) or path.endswith("/") or path.count("/") > 1 or is_folder(path)


def _vllm_problems(served: Served) -> Iterator[tuple[str, str]]:
    """On a CPU, vLLM supports only some widths of attention heads; several ranks take equal shares of a model."""
    size, sizes = head_size(dict(served.model)), cpu_head_sizes()
    if served.on_cpu and sizes and size is not None and size not in sizes:
        yield (
            served.model_key,
            f"got attention heads of size {size}, expected one of {', '.join(map(str, sizes))}: vLLM on a CPU has no "
            "others; use another model, rollout.engine.name=hf, or cluster.device=cuda",
        )
    assert isinstance(served.options, VllmOptions)
    text, ranks = of_the_text(dict(served.model)), served.options.tensor_parallel_size
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if not isinstance(number := text.get(what), int):
            continue
        if what == "vocab_size":
            number += -number % VOCABULARY_BLOCK
        # Fewer heads of keys and values than ranks: several ranks have the same one.
        if number % ranks and (what != "num_key_value_heads" or ranks % number):
            yield (
                f"{served.section}.tensor_parallel_size",
                f"got {ranks}, expected a number that divides {what} {number} of the model ({served.model_key}); set 1",
            )
            return


def vllm_variables(environ: Mapping[str, str], *, device: str, eager: bool) -> dict[str, str]:
    """What vLLM reads as it is loaded, or later; `environ`: of the process that it is loaded in."""
    variables = {"VLLM_LOGGING_LEVEL": environ.get("VLLM_LOGGING_LEVEL", "WARNING"), "VLLM_NO_USAGE_STATS": "1"}
    if eager:
        # "eager" still compiles a few small functions, which costs 16 s at the first request on a CPU and gains
        # nothing.
        variables["TORCH_COMPILE_DISABLE"] = "1"
    if device == "cpu":
        # Without this, the "uni" executor silently becomes "mp" on CPU, whose worker process spins on a core even when
        # idle.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return variables


def _vllm_process_variables(options: EngineOptions) -> dict[str, str]:
    return vllm_variables(os.environ, device="cpu", eager=bool(options.model_dump().get("enforce_eager")))


ENGINES = {
    "vllm": EngineKind(
        target="leeway.engines.vllm_engine:VllmEngine",
        options=VllmOptions,
        package="vllm",
        adapters=True,
        device_memory=True,
        processes=Processes(
            modules=(
                "vllm.v1.engine.core",
                "vllm.v1.worker.cpu_worker",
                "vllm.model_executor.model_loader.reload.layerwise",
                "leeway.engines.vllm_scheduler",
                "vllm.v1.engine.async_llm",
                "leeway.engines.vllm_engine",
                "leeway.collector.collector",
            ),
            environ=_vllm_process_variables,
        ),
        problems=_vllm_problems,
    ),
    "hf": EngineKind(
        target="leeway.engines.hf_engine:HfEngine",
        options=HfOptions,
        without=("vllm",),
        adapters=True,
        device_memory=True,
    ),
}
DEFAULT = "vllm"
ADDRESS_ENGINE = "leeway.engines.address_engine:AddressEngine"
"""What stands for `eval.address`."""

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
    """Of a name that is in `ENGINES`, or of a user's own "pkg.module:Class"."""
    return ENGINES[name] if name in ENGINES else EngineKind(target=name)


def name_of(engine: Mapping[str, Any]) -> str:
    """The engine that a section like `rollout.engine` chooses."""
    return engine.get("name", DEFAULT)


def options_of(engine: Mapping[str, Any], section: str = "rollout.engine") -> EngineOptions:
    """The engine's own settings in such a section. Raises ConfigError for one that it does not take."""
    options = {option: value for option, value in engine.items() if option != "name"}
    return checked_options(
        engine_kind(name_of(engine)).options, options, key=section, whose=f"{section}.name={name_of(engine)}"
    )


def check_engine(section: str, engine: Mapping[str, Any], *, on_cpu: bool) -> None:
    """Raise ConfigError for the first setting in `section` that its engine does not take."""
    name = name_of(engine)
    if not isinstance(name, str):
        raise ConfigError(
            f"{section}.name",
            got=name,
            expected=f'one of {", ".join(ENGINES)}, or "pkg.mod:Engine"',
            fix=f"leave it out for {DEFAULT}",
        )
    check_name(f"{section}.name", name, ENGINES, kind="Engine")
    options = options_of(engine, section)
    if isinstance(options, VllmOptions):
        _check_vllm(section, options, on_cpu=on_cpu)


def check_adapters(section: str, options: EngineOptions, *, rank: int) -> None:
    """Raise ConfigError for the first setting with which vLLM does not hold adapters of this rank."""
    if not isinstance(options, VllmOptions):
        return
    for option in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if (value := getattr(options, option)) > 1:
            raise ConfigError(
                f"{section}.{option}",
                got=value,
                expected="1 where model.lora is set: a divided adapter cannot be read back",
                fix=f"leave {option} out, and raise rollout.num_generators",
            )
    if "double_buffer" in options.model_fields_set:
        raise ConfigError(
            f"{section}.double_buffer",
            got=options.double_buffer,
            expected="nothing where model.lora is set: an adapter is always loaded beside generation",
            fix="leave it out",
        )
    if rank > SLOT_RANKS[-1]:
        raise ConfigError(
            "model.lora.rank",
            got=rank,
            expected=f"at most {SLOT_RANKS[-1]}, the largest that vLLM has slots for",
            fix="lower it, or set rollout.engine.name=hf",
        )


def _check_vllm(section: str, options: VllmOptions, *, on_cpu: bool) -> None:
    known = vllm_arguments()
    for option, value in (options.model_extra or {}).items():
        key = f"{section}.{option}"
        if option in OWNED_BY_LEEWAY:
            raise ConfigError(
                key, got=value, expected="an argument that Leeway does not set", fix=OWNED_BY_LEEWAY[option]
            )
        if option in NOT_REPRODUCIBLE:
            raise ConfigError(
                key, got=value, expected="what the trainer can reproduce token by token", fix=f"leave {option} out"
            )
        if known and option not in known:
            guess = nearest(option, known | VllmOptions.model_fields.keys())
            fix = f"nearest: {section}.{guess}" if guess else "leave it out"
            raise ConfigError(key, got=value, expected="an argument of vLLM's AsyncEngineArgs", fix=fix)
        if (types := known.get(option)) and not is_of(value, types):
            expected = " or ".join(sorted(WORD_OF_TYPE[t] for t in types))
            raise ConfigError(key, got=value, expected=expected, fix=f"leave {option} out")
        if value is None:
            continue
        if option in AT_LEAST_ONE and value < 1:
            raise ConfigError(key, got=value, expected="a number of at least 1", fix=f"leave {option} out")
        if option == "gpu_memory_utilization" and not 0 < value <= 1:
            raise ConfigError(key, got=value, expected="more than 0 and at most 1", fix=f"leave {option} out")
    for option in ("pipeline_parallel_size", "data_parallel_size"):
        if on_cpu and (value := getattr(options, option)) > 1:
            raise ConfigError(
                f"{section}.{option}",
                got=value,
                expected="1 where cluster.device is cpu",
                fix=f"leave {option} out, and raise {section}.tensor_parallel_size or rollout.num_generators",
            )

"""What can still prevent a run with valid settings on this machine: hardware, files, an earlier run in the folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from .derived import derive
from .engines import Served, engine_kind, is_local_path, name_of, options_of
from .hardware import Hardware
from .model_files import damage, model_config
from .names import find_module
from .paths import is_file, is_folder
from .recipe import Needs
from .schema import Config

_DATA_FILES = {"jsonl": "a .jsonl file", "queue": "a .jsonl file", "parquet": "a .parquet file", "sql": "a SQLite file"}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What keeps a run from starting. `anywhere`: on every machine, so `validate` refuses it as `run` does; else
    `validate` names it among what this machine lacks.
    """

    key: str
    text: str
    anywhere: bool = False

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


Found = Iterator[tuple[str, str]]
"""(key, text) of each problem."""


def check_run(config: Config, recipe: Needs, hardware: Hardware) -> list[Problem]:
    """Everything that keeps `recipe` from running here, in the order in which a user would fix it."""
    engines = _engines(config) if recipe.generates else ()
    unfit = chain.from_iterable(engine_kind(engine.name).problems(engine) for engine in engines)
    here = chain(_missing_hardware(config, recipe, hardware), _missing_packages(config, recipe))
    return [
        *(Problem(key=key, text=text) for key, text in _missing_files(config)),
        *(Problem(key=key, text=text, anywhere=True) for key, text in unfit),
        *(Problem(key=key, text=text) for key, text in here),
    ]


def _engines(config: Config) -> Iterator[Served]:
    """Each engine that the run starts, with its model."""

    def of(section: str, engine: Mapping[str, Any], model_key: str, path: str | None) -> Served:
        name, options = name_of(engine), options_of(engine, section)
        model = model_config(Path(path).expanduser()) if path is not None and is_local_path(path) else {}
        on_cpu = config.cluster.device == "cpu"
        return Served(section=section, name=name, options=options, model_key=model_key, model=model, on_cpu=on_cpu)

    policy = of("rollout.engine", config.rollout.engine, "model.path", config.model.path)
    init = config.model.init
    yield policy if init is None else replace(policy, model_key="model.init.options", model=init.options)
    for name, own in config.env.models.items():
        if own.path is not None and own.kind == "generate":
            yield of(f"env.models.{name}.engine", own.engine, f"env.models.{name}.path", own.path)


def earlier_run(config: Config, folder: Path | None = None) -> Problem | None:
    """Whether `folder` (the run's own) already holds a run, whose files would be mixed with the new ones."""
    folder = folder or config.run_dir
    if config.checkpoint.resume == "auto" or config.elsewhere == "trainer":  # an explorer comes and goes
        return None
    found = [name for name in ("summary.json", "config.yaml", "metrics.jsonl") if is_file(folder / name)]
    if not found:
        return None
    return Problem(
        key="name",
        text=f"{folder} holds another run ({found[0]}), expected an empty folder; "
        f"choose another name=... or output_dir=..., set checkpoint.resume=auto, or remove it: rm -r {folder}",
    )


def _missing_files(config: Config) -> Found:
    models = {"model.path": config.model.path, "algorithm.reference_path": config.algorithm.reference_path}
    models |= {"critic.path": config.critic.path}
    models |= {f"env.models.{name}.path": own.path for name, own in config.env.models.items()}
    for key, model in models.items():
        if model is None or not is_local_path(model):
            continue
        if not is_file(f"{model}/config.json"):
            what = "a folder without config.json" if is_folder(model) else "nothing there"
            yield (
                key,
                f"missing model path: got {model} ({what}), expected a folder with a Hugging Face model; "
                f"set {key}=/path/to/model or a hub id org/name",
            )
        elif (what := damage(Path(model).expanduser())) is not None:
            yield key, f"damaged weights: got {what}, expected whole files; copy the model again"
    resume = config.checkpoint.resume
    # The folder dcp is of an earlier version, and read later.
    is_there = is_file(f"{resume}/trainer/state.json") or is_folder(f"{resume}/dcp")
    if resume not in ("never", "auto") and not is_there:
        yield (
            "checkpoint.resume",
            f"no checkpoint: got {resume}, expected never, auto, or a folder like checkpoints/step-000050 with "
            "trainer/state.json in it",
        )
    paths = [("task.path", config.task.name, config.task.path), ("eval.path", "jsonl", config.eval.path)]
    for name, own in config.replay.buffers.items():
        source = config.task.filled(own.source())
        paths += [(f"replay.buffers.{name}.path", source.name, source.path)]
    paths += [(f"task.mix.{n}.path", own.name, own.path) for n, own in config.task.mix.items()]
    paths += [(f"eval.tasksets.{n}.path", own.name, own.path) for n, own in config.eval.tasksets.items()]
    for path in paths:
        yield from _missing_data(*path)


def _missing_data(key: str, kind: str | None, path: str | None) -> Found:
    """Whether the file or folder that tasks of this kind are read from is missing."""
    if path is None or (kind == "hf" and not is_local_path(path)):
        return
    if kind == "hf":
        expected, there = "a file or a folder", is_file(path) or is_folder(path)
    elif kind in _DATA_FILES:
        expected, there = _DATA_FILES[kind], is_file(path)
    else:
        return
    if not there:
        what = "a folder" if is_folder(path) else "nothing there"
        yield key, f"missing file: got {path[:120]} ({what}), expected {expected}; set {key}=FILE"


def _missing_hardware(config: Config, recipe: Needs, hardware: Hardware) -> Found:
    cluster = config.cluster
    if cluster.address is not None:  # the cluster's nodes are elsewhere; Ray's placement reports what is missing
        return
    need = derive(config, recipe)
    if need.gpus_needed > hardware.num_gpus:
        split = " + ".join(f"{count} for {role}s" for role, count in need.gpus.items() if count)
        yield (
            "cluster.device",
            f"missing hardware: got {hardware.num_gpus} GPUs, expected {need.gpus_needed} ({split}); lower "
            "rollout.num_generators and train.num_ranks, or set cluster.device=cpu (slow)",
        )
    absent = sorted({*(cluster.engine_cores or ()), *(cluster.trainer_cores or ())} - set(hardware.cores))
    if absent:
        yield (
            "cluster.engine_cores" if absent[0] in (cluster.engine_cores or ()) else "cluster.trainer_cores",
            f"missing hardware: got core {absent[0]}, expected cores of this machine "
            f"({', '.join(map(str, hardware.cores))}); change it, or set it to null",
        )
    if cluster.device != "cpu":
        return
    for role, key in (("generator", "rollout.num_generators"), ("trainer", "train.num_ranks")):
        each = need.devices_per_engine if role == "generator" else 1
        if need.processes[role] * each > hardware.num_cpus:
            of_ranks = f" of {each} ranks" if each > 1 else ""
            yield (
                key,
                f"missing hardware: got {hardware.num_cpus} cores for {need.processes[role]} {role}s{of_ranks}, "
                f"expected a core for each; set {key}={hardware.num_cpus // each} or less",
            )
            break
    engines = need.processes["generator"] + need.processes.get("auxiliary model", 0)
    cache_gib = engines * cluster.kv_cache_gib
    if cache_gib > 0.8 * hardware.memory_gib:
        yield (
            "cluster.kv_cache_gib",
            f"missing hardware: got {hardware.memory_gib:.1f} GiB of memory, expected more than the {cache_gib:.1f} "
            "GiB of the KV caches; lower cluster.kv_cache_gib",
        )


def _missing_packages(config: Config, recipe: Needs) -> Found:
    needed = {}
    engine = engine_kind(config.rollout.engine_name)
    if recipe.generates and engine.package is not None:
        needed[engine.package] = ("cluster.device", "cpu" if config.cluster.device == "cpu" else "cuda")
    if config.monitor.wandb != "off":
        needed["wandb"] = ("monitor.wandb", "monitor")
    if config.monitor.tensorboard:
        needed["tensorboard"] = ("monitor.tensorboard", "monitor")
    if config.monitor.mlflow != "off":
        needed["mlflow"] = ("monitor.mlflow", "mlflow")
    if config.monitor.trackio != "off":
        needed["trackio"] = ("monitor.trackio", "trackio")
    for package, (key, extra) in needed.items():
        if find_module(package) is None:
            yield key, f'missing package {package}; install it: pip install "leeway[{extra}]"'

"""What can still prevent a run with valid settings on this machine: hardware, files, an earlier run in the folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .derived import derive
from .engines import engine_kind, is_local_path
from .hardware import Hardware
from .model_files import damage
from .names import find_module
from .paths import is_file, is_folder
from .recipe import Needs
from .schema import Config

_DATA_FILES = {"jsonl": "a .jsonl file", "queue": "a .jsonl file", "sql": "a SQLite file"}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is missing here. `validate` prints it; `run` refuses because of it."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def check_run(config: Config, recipe: Needs, hardware: Hardware) -> list[Problem]:
    """Everything that keeps `recipe` from running here, in the order in which a user would fix it."""
    return [
        *_missing_files(config),
        *_of_the_engine(config, recipe),
        *_missing_hardware(config, recipe, hardware),
        *_missing_packages(config, recipe),
    ]


def earlier_run(config: Config, folder: Path | None = None) -> Problem | None:
    """Whether `folder` (the run's own) already holds a run, whose files would be mixed with the new ones."""
    folder = folder or config.run_dir
    if config.checkpoint.resume == "auto":
        return None
    found = [name for name in ("summary.json", "config.yaml", "metrics.jsonl") if is_file(folder / name)]
    if not found:
        return None
    return Problem(
        key="name",
        text=f"{folder} holds another run ({found[0]}), expected an empty folder; "
        f"choose another name=... or output_dir=..., set checkpoint.resume=auto, or remove it: rm -r {folder}",
    )


def _missing_files(config: Config) -> list[Problem]:
    problems = []
    models = {"model.path": config.model.path, "algorithm.reference_path": config.algorithm.reference_path}
    models |= {"critic.path": config.critic.path}
    models |= {f"env.models.{name}.path": own.get("path") for name, own in config.env.models.items()}
    for key, model in models.items():
        if model is None or not is_local_path(model):
            continue
        if not is_file(f"{model}/config.json"):
            what = "a folder without config.json" if is_folder(model) else "nothing there"
            problems.append(
                Problem(
                    key=key,
                    text=f"missing model path: got {model} ({what}), expected a folder with a Hugging Face model; "
                    f"set {key}=/path/to/model or a hub id org/name",
                )
            )
        elif (what := damage(Path(model).expanduser())) is not None:
            problems.append(
                Problem(key=key, text=f"damaged weights: got {what}, expected whole files; copy the model again")
            )
    resume = config.checkpoint.resume
    is_there = is_file(f"{resume}/trainer/state.json") or is_folder(
        f"{resume}/dcp"
    )  # of an earlier version: read later
    if resume not in ("never", "auto") and not is_there:
        problems.append(
            Problem(
                key="checkpoint.resume",
                text=f"no checkpoint: got {resume}, expected never, auto, or a folder like checkpoints/step-000050 "
                "with trainer/state.json in it",
            )
        )
    paths = [("task.path", config.task.name, config.task.path), ("eval.path", "jsonl", config.eval.path)]
    expert = config.algorithm.expert
    paths += [("algorithm.expert.path", "jsonl", None if expert is None else expert.path)]
    paths += [(f"task.mix.{n}.path", p.get("name", "jsonl"), p.get("path")) for n, p in config.task.mix.items()]
    paths += [(f"eval.tasksets.{n}.path", p.get("name"), p.get("path")) for n, p in config.eval.tasksets.items()]
    problems += [problem for path in paths for problem in _missing_data(*path)]
    return problems


def _missing_data(key: str, kind: str | None, path: str | None) -> list[Problem]:
    """Whether the file or folder that tasks of this kind are read from is missing."""
    if path is None or (kind == "hf" and not is_local_path(path)):
        return []
    if kind in ("parquet", "hf"):
        expected, there = "a file or a folder", is_file(path) or is_folder(path)
    elif kind in _DATA_FILES:
        expected, there = _DATA_FILES[kind], is_file(path)
    else:
        return []
    if there:
        return []
    what = "a folder" if is_folder(path) else "nothing there"
    return [Problem(key=key, text=f"missing file: got {path[:120]} ({what}), expected {expected}; set {key}=FILE")]


def _of_the_engine(config: Config, recipe: Needs) -> list[Problem]:
    if not recipe.generates:
        return []
    kind = engine_kind(config.rollout.engine_name)
    return [Problem(key=key, text=text) for key, text in kind.problems(config)]


def _missing_hardware(config: Config, recipe: Needs, hardware: Hardware) -> list[Problem]:
    if config.cluster.address is not None:  # the cluster's nodes are elsewhere; Ray's placement reports what is missing
        return []
    need = derive(config, recipe)
    problems = []
    if need.gpus_needed > hardware.num_gpus:
        split = " + ".join(f"{count} for {role}s" for role, count in need.gpus.items() if count)
        problems.append(
            Problem(
                key="cluster.device",
                text=f"missing hardware: got {hardware.num_gpus} GPUs, expected {need.gpus_needed} ({split}); "
                "lower rollout.num_generators and train.num_ranks, or set cluster.device=cpu (slow)",
            )
        )
    cores = [*(config.cluster.engine_cores or []), *(config.cluster.trainer_cores or [])]
    absent = sorted(set(cores) - set(hardware.cores))
    if absent:
        problems.append(
            Problem(
                key="cluster.engine_cores"
                if absent[0] in (config.cluster.engine_cores or [])
                else "cluster.trainer_cores",
                text=f"missing hardware: got core {absent[0]}, expected cores of this machine "
                f"({', '.join(map(str, hardware.cores))}); change it, or set it to null",
            )
        )
    crowded = [role for role in ("generator", "trainer") if need.processes[role] > hardware.num_cpus]
    if config.cluster.device == "cpu" and crowded:
        key = "rollout.num_generators" if crowded[0] == "generator" else "train.num_ranks"
        problems.append(
            Problem(
                key=key,
                text=f"missing hardware: got {hardware.num_cpus} cores for {need.processes[crowded[0]]} {crowded[0]}s, "
                f"expected a core for each; set {key}={hardware.num_cpus} or less",
            )
        )
    cache_gib = need.processes["generator"] * config.cluster.kv_cache_gib
    if config.cluster.device == "cpu" and cache_gib > 0.8 * hardware.memory_gib:
        problems.append(
            Problem(
                key="cluster.kv_cache_gib",
                text=f"missing hardware: got {hardware.memory_gib:.1f} GiB of memory, expected more than the "
                f"{cache_gib:.1f} GiB of the KV caches; lower cluster.kv_cache_gib",
            )
        )
    return problems


def _missing_packages(config: Config, recipe: Needs) -> list[Problem]:
    needed = {}
    engine = engine_kind(config.rollout.engine_name)
    if recipe.generates and engine.package is not None:
        needed[engine.package] = ("cluster.device", "cpu" if config.cluster.device == "cpu" else "cuda")
    if config.monitor.wandb != "off":
        needed["wandb"] = ("monitor.wandb", "monitor")
    if config.monitor.tensorboard:
        needed["tensorboard"] = ("monitor.tensorboard", "monitor")
    return [
        Problem(key=key, text=f'missing package {package}; install it: pip install "leeway[{extra}]"')
        for package, (key, extra) in needed.items()
        if find_module(package) is None
    ]

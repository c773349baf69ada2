"""What the tables have in common: names of losses and of files, sources of tasks, the lag that a schedule needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from ..config.derived import least_target_policy_lag
from ..config.running import ClusterConfig
from .table import Fate, Row, Theirs, Unusable, joint, shown

AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "fixed_length",
}
ESTIMATORS = {
    "k1": "k1",
    "kl": "k1",
    "k2": "k2",
    "mse": "k2",
    "k3": "k3",
    "low_var_kl": "k3",
    "abs": "abs",
    "corrected_k3": "corrected_k3",
}
NO_NEED = "it says how the work is divided or looked at, not what is learned"
MEMORY = "memory and speed only; see `leeway plan --model` for what fits"
LORA = "with rollouts: engines of one device each, apart from the trainer's"
DIVIDED = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""What an engine that holds adapters has no more than one of; see docs/lora.md."""
NO_SUCH_ADAPTER = "plain adapters of linear layers (model.lora): without dropout, DoRA or quantized weights"
REMOTE_CODE = "code from a model's folder is never run: a model that needs it is refused when it is loaded"
CHECKPOINT_DIR = "checkpoints, logs and metrics are under output_dir/project/name"


def folder(value: Any) -> str:
    """A name that may be that of a folder."""
    return re.sub(r"[^\w.\-]+", "-", re.sub(r"\$\{[^}]*\}", "", str(value))).strip("-.")[:100] or "run"


def word(value: Any) -> str:
    """A name that may be part of a dotted key."""
    return re.sub(r"\W+", "_", str(value)).strip("_")[:60] or "tasks"


def one_of(names: Mapping[str, str], key: str, value: str) -> str:
    if value not in names:
        raise Unusable(f"{key}: {shown(value)} has no counterpart here; known are {', '.join(names)}")
    return names[value]


def source(path: str) -> dict[str, Any]:
    """The source of tasks for a path or a hub id. `split` and `subset` belong to hub ids and to folders."""
    default = re.sub(r"^\$\{oc\.env:\w+,?([^}]*)\}$", r"\1", path)
    ending = PurePosixPath(default).suffix.lower()
    kind = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl"}.get(ending, "hf")
    return {"name": kind, "path": path}


def files(value: Any, key: str) -> list[str]:
    found = value if isinstance(value, list) else [value]
    if not found or not all(isinstance(item, str) and item for item in found):
        raise Unusable(f"{key}: got {shown(value)}, expected a file or a list of files")
    return found


def by_name(paths: list[str]) -> dict[str, str]:
    """Taskset name -> path: what tells one file from the others."""
    named: dict[str, str] = {}
    for path in paths:
        plain = PurePosixPath(re.sub(r"\$\{[^}]*\}", "", path))
        name = word(plain.parent.name if plain.parent.name and len(paths) > 1 else plain.stem)
        number = 2
        unique = name
        while unique in named:
            unique, number = f"{name}_{number}", number + 1
        named[unique] = path
    return named


def lag_of(groups: int, updates: int, publish_every: int, uses: int = 1) -> int:
    """The least bound under which batches are made and trained in turn."""
    return least_target_policy_lag(groups, updates, publish_every, 1) + updates * (uses - 1)


def schedule(name: str, key: str, min_frac: float) -> dict[str, Any]:
    """A learning-rate schedule. The least rate means something only where it decays."""
    found = one_of({"constant": "constant", "cosine": "cosine", "linear": "linear"}, key, name)
    return {"optimizer.schedule": found} | ({} if found == "constant" else {"optimizer.min_lr_frac": min_frac})


def loggers(names: list[str]) -> Fate:
    ours: dict[str, Any] = {}
    left = []
    for name in names:
        if name == "wandb":
            ours["monitor.wandb"] = "online"
        elif name == "tensorboard":
            ours["monitor.tensorboard"] = True
        elif name == "mlflow":
            ours["monitor.mlflow"] = "local"
        elif name == "trackio":
            ours["monitor.trackio"] = "local"
        elif name not in ("console", "file"):
            left.append(name)
    if left:
        return Fate("approximate", ours, f"no logger {', '.join(map(shown, left))}: metrics.jsonl is always written")
    return Fate("exact", ours, "metrics.jsonl is always written")


RENORMALISED = "the trainer renormalises over the tokens that were left; there it takes all of them"


def top_k_and_top_p(top_k: float | None, top_p: float | None) -> Fate:
    """Of rollouts. None, -1 and 0, or 1: off."""
    few, part = top_k is not None and top_k > 0, top_p is not None and top_p < 1
    if not few:
        return Fate("refused", {}, "top_p needs rollout.top_k here: set it") if part else Fate("exact", {})
    assert top_k is not None
    ours: dict[str, Any] = {"rollout.top_k": int(top_k)}
    return Fate("approximate", ours | ({"rollout.top_p": top_p} if part else {}), RENORMALISED)


def template_kwargs(t: Theirs) -> Fate:
    given = t.below("data.apply_chat_template_kwargs")
    return Fate("exact", {f"model.chat_template_kwargs.{name}": value for name, value in given.items()})


def adapters(rank: float, alpha: float, targets: Any = None, *, online: bool) -> Fate:
    """LoRA of every linear layer, or of `targets`. `online`: with rollouts."""
    if isinstance(targets, str) and targets != "all-linear":
        targets = [name for name in re.split(r"[\[\]'\",\s]+", targets) if name]
    ours: dict[str, Any] = {"model.lora.rank": int(rank), "model.lora.alpha": alpha}
    if targets not in (None, "", "all-linear", ["all-linear"]):
        ours["model.lora.target_modules"] = targets
    if online:
        return Fate("approximate", ours, LORA)
    return Fate("exact", ours)


def possible_together(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without what an engine that holds adapters does not take."""
    if "model.lora.rank" not in settings:
        return dict(settings)
    excluded = {"cluster.placement", *(f"rollout.engine.{option}" for option in DIVIDED)}
    return {k: v for k, v in settings.items() if k not in excluded}


def timeout(seconds: float) -> dict[str, Any]:
    """Of a group, with a deadline of a step that outlasts it."""
    ours: dict[str, Any] = {"rollout.timeout_s": seconds}
    if seconds >= ClusterConfig.model_fields["step_timeout_s"].default:
        ours["cluster.step_timeout_s"] = 2 * seconds
    return ours


def remote_code(*theirs: str) -> Row:
    """`trust_remote_code`: most models that others set it for are transformers' own by now."""

    def convert(t: Theirs) -> Fate:
        return Fate("approximate", {}, REMOTE_CODE) if truth(t, *theirs) else Fate("exact", {}, "off")

    return joint(theirs, (), REMOTE_CODE, convert, kind="approximate")


def truth(t: Theirs, *keys: str) -> bool:
    return any(t.flag(key) for key in keys)

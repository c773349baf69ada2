"""A run's folder as a run would have left it, made in a moment: for tests of `leeway watch`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CONFIG = "name: made\nstaleness:\n  max_policy_lag: 2\n  reorder_window: 4\ntrain:\n  steps: 40\nmodel:\n  path: null\n"


def make_run(
    folder: Path, *, steps: int = 40, status: str | None = "completed", cause: str = "all steps were done"
) -> Path:
    """A run of one stage; its trainer waits for the engines, and its entropy collapses."""
    stage = folder / "stages/async_rl"
    (stage / "rollouts").mkdir(parents=True)
    (stage / "logs").mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "run.json").write_text(json.dumps({"recipe": "async_rl", "parts": [{"command": "leeway run"}]}))
    if status is not None:
        (folder / "summary.json").write_text(json.dumps({"status": status, "cause": cause, "warnings": []}))
    (stage / "logs/generator-0.log").write_text("started\nEngineDead: out of memory\n")
    append_lines(stage / "metrics.jsonl", (row for step in range(1, steps + 1) for row in rows_of(step)))
    for step in range(1, steps + 1):
        write_rollouts(stage, step)
    return folder


def rows_of(step: int) -> list[dict[str, Any]]:
    at = 1_700_000_000.0 + step
    return [
        {
            "step": step,
            "time": at,
            "role": "trainer",
            "train/reward/mean": step / 100,
            "train/entropy/mean": 3.0 * 0.8**step,
            "train/policy_lag/mean": 1.0,
            "train/policy_lag/max": 2.0,
            "step/total_s": 1.0,
            "step/wait_for_batch_s": 0.6,
            "step/forward_backward_s": 0.3,
            "limit/efficiency": 0.5,
        },
        {
            "step": step,
            "time": at,
            "role": "collector",
            "collector/generate_frac": 0.9,
            "collector/interval_s": 1.0,
            "collector/wait_for_slot_frac": 0.02,
        },
    ]


def rollout_row(step: int, sequence: int, **more: Any) -> dict[str, Any]:
    """One of group 10 x step, with a turn of the environment in its middle."""
    return {
        "group_id": 10 * step,
        "task_id": f"task-{step % 5}",
        "sequence_id": sequence,
        "prompt_tokens": [1, 2],
        "response_tokens": [3, 4, 5, 6],
        "text": f"answer {sequence} of step {step}",
        "reward": float(sequence % 2),
        "advantage": 0.5 if sequence % 2 else -0.5,
        "finish_reason": "length" if sequence == 3 else "stop",
        "environment_s": 0.1,
        "policy_versions": [step - 1, step - 2, step - 2, step - 2],
        "behavior_logprobs": [-0.1, -3.0, -0.2, -0.5],
        "trainer_logprobs": [-0.1, -9.0, -0.4, -0.48],
        "loss_mask": [True, False, True, True],
        "metrics": {"exact_match": float(sequence % 2)},
        **more,
    }


def write_rollouts(stage: Path, step: int, rows: Iterable[Mapping[str, Any]] | None = None) -> None:
    own = [rollout_row(step, i) for i in range(4)] if rows is None else rows
    text = "".join(json.dumps(row) + "\n" for row in own)
    (stage / f"rollouts/step-{step:06d}.jsonl").write_text(text)


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_tokenizer(folder: Path) -> None:
    """A byte-level vocabulary of seven pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"a": 0, "Ġask": 1, "Ġwhat": 2, "Ġone": 3, "<|tool|>": 4, "Ġtwo": 5, "Ċ": 6}
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary}, "decoder": {"type": "ByteLevel"}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def write_spans(stage: Path, *, steps: int = 40, at: float = 1_700_000_000.0) -> None:
    """Of each step: the driver waits 0.6 s for a batch while generator-0 generates it, then all train 0.3 s."""
    folder = stage / "spans"
    folder.mkdir()
    spans: dict[str, list[dict[str, Any]]] = {"driver": [], "generator-0": [], "replay": [], "trainer-0": []}

    def add(part: str, name: str, start: float, end: float, **attrs: Any) -> None:
        number = len(spans[part]) + 1
        spans[part].append({"id": f"{part}:{number}", "name": name, "start": start, "end": end, "attrs": attrs})

    for step in range(1, steps + 1):
        begun, group = at + step, 10 * step
        add("replay", "admitted", begun, begun, group=group)
        add("generator-0", "generate", begun, begun + 0.58, group=group, version=step - 1, tokens=16)
        add("replay", "stored", begun + 0.59, begun + 0.59, group=group)
        add("replay", "wait", begun, begun + 0.59, **{"for": "generator-0", "why": f"group {group}"})
        add("driver", "batch", begun, begun + 0.6)
        add("driver", "step", begun + 0.6, begun + 0.95, step=step, groups=[group])
        add("trainer-0", "forward_backward", begun + 0.62, begun + 0.9, step=step)
        add("trainer-0", "publish", begun + 0.9, begun + 0.99, version=step)
        add("generator-0", "wait", begun + 0.6, begun + 0.9, **{"for": "slot", "why": "no group may start"})
        add("generator-0", "fetch_weights", begun + 0.95, begun + 1.0, version=step)
    for part, own in spans.items():
        append_lines(folder / f"{part}.jsonl", [{"part": part, "pid": 1, "host": "a", "clock_offset_s": 0.0}, *own])

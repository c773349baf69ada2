"""Imports every config under a folder, as `leeway import` does, and counts what became of them.

    python benchmarks/imports.py verl FOLDER [--yaml OUT] [--refused] [--train NAME ...]

A line for each file with --refused: why something of it was refused. OUT: where the configs that were made go. A file
whose import raises anything but a refusal ends the program with its traceback.

--train: those files (by a part of their path) train two batches on this machine's CPU, with a tiny model in place of
theirs, additions in place of their tasks, and the engine hf; what is learned and how stays as it was imported.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from leeway.config import ConfigError
from leeway.config.text import to_text
from leeway.elsewhere.importer import Imported, as_table, as_yaml, import_file
from leeway.elsewhere.table import BAD

ENDINGS = {"trinity": (".yaml", ".yml"), "verl": (".yaml", ".yml", ".sh"), "torchtune": (".yaml", ".yml")}

SHARDED = ("fsdp_size", "forward_prefetch", "fsdp_units", "cpu_offload_optimizer", "cpu_offload_reference")
"""Settings of several GPUs."""


def files_of(system: str, folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in ENDINGS[system] and file.is_file())


def tiny_model(folder: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from leeway.tasks.tiny_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(["0 + 1 = 2 3 4 5 6 7 8 9 # user assistant system"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if not loop.last %} = {% endif %}{% endfor %}"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("qwen2", vocab_size=len(tokenizer), num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tasks(settings: dict[str, Any], file: Path) -> None:
    """Additions, in the columns that the config names."""
    with file.open("w", encoding="utf-8") as out:
        for a in range(10, 60):
            question, answer = f"{a} + {a + 1}", f"{settings.get('answer_after') or ''} {2 * a + 1}".strip()
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            column, _, inner = settings.get("answer_key", "answer").partition(".")
            row = {settings.get("prompt_key", "question"): question, column: {inner: answer} if inner else answer}
            row |= {settings.get("rejected_key", "rejected"): "0", settings.get("messages_key") or "messages": turns}
            out.write(json.dumps(row) + "\n")


def shrunk(tree: dict[str, Any], folder: Path, model: Path) -> dict[str, Any]:
    """The same run on a CPU: other model, tasks, engine and sizes; the same algorithm, optimizer and schedule."""
    for i, own in enumerate([tree, *tree.get("stages", {}).values()]):
        data = folder / f"tasks-{i}.jsonl"
        own.pop("eval", None)
        own.pop("monitor", None)
        if "reference_path" in own.get("algorithm", {}):
            own["algorithm"]["reference_path"] = str(model)
        if "task" in own:
            settings = {**tree.get("task", {}), **own["task"]}
            own["task"] = {k: v for k, v in own["task"].items() if k.endswith("_key") or k in ("answer_after", "order")}
            tasks(settings, data)
            own["task"] |= {"name": "jsonl", "path": str(data)}
        for buffer in own.get("replay", {}).get("buffers", {}).values():
            buffer |= {"path": str(data), "batch_size": 4}
        if "rollout" in own or own is tree:
            rollout = own.setdefault("rollout", {})
            rollout |= {"engine": {"name": "hf"}, "num_generators": 1, "max_prompt_tokens": 32}
            rollout |= {"max_response_tokens": 8, "max_model_len": 64}
        if "model" in own or own is tree:
            lora = own.get("model", {}).get("lora")
            own["model"] = {"path": str(model), "dtype": "float32"} | ({"lora": lora | {"rank": 4}} if lora else {})
        train = own.setdefault("train", {})
        updates = train.get("updates_per_batch", tree.get("train", {}).get("updates_per_batch", 1))
        uses = own.get("replay", tree.get("replay", {})).get("max_uses", 1)
        for key in ("epochs", *SHARDED):
            train.pop(key, None)
        train |= {"steps": 2 * updates, "num_ranks": 1, "gradient_checkpointing": False, "cpu_offload": False}
        if "groups_per_step" in train:
            train["groups_per_step"] = 4 * updates * uses
        if "batch_size" in train:
            train["batch_size"] = 8
        if "group_size" in own.get("algorithm", {}):
            own["algorithm"]["group_size"] = min(4, own["algorithm"]["group_size"])
        placement = own.get("cluster", {}).get("placement")
        own["cluster"] = {"device": "cpu", "object_store_mb": 256} | ({"placement": placement} if placement else {})
        own["checkpoint"] = {}
        if "groups_per_step" in train:  # a model that knows nothing is never right: its answers' lengths differ
            own["env"] = {"reward": "length", "reward_options": {"length": {"max_tokens": 8}}}
    return tree | {"output_dir": str(folder / "runs"), "project": "imports", "name": "tiny"}


def train(file: Path, found: Imported, folder: Path, model: Path) -> bool:
    config = folder / "tiny.yaml"
    config.write_text(to_text(shrunk(found.tree, folder, model)), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("leeway")), "run", found.recipe, "--config", str(config)]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    said = (done.stdout + done.stderr).strip().splitlines()
    print(f"{file.name}: {'trained' if done.returncode == 0 else 'FAILED'} in {time.monotonic() - begun:.0f} s")
    if done.returncode:
        print("\n".join(f"    {line}" for line in said[-6:]))
    return done.returncode == 0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("system", choices=ENDINGS)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--yaml", type=Path)
    arguments.add_argument("--refused", action="store_true")
    arguments.add_argument("--train", nargs="*", default=[])
    given = arguments.parse_args()
    if given.train:
        with tempfile.TemporaryDirectory() as folder:
            model = tiny_model(Path(folder) / "model")
            files = [f for f in files_of(given.system, given.folder) if any(name in str(f) for name in given.train)]
            results = []
            for i, file in enumerate(files):
                own = Path(folder) / str(i)
                own.mkdir()
                results.append(train(file, import_file(given.system, file), own, model))
        print(f"{sum(results)} of {len(results)} trained")
        sys.exit(0 if all(results) else 1)
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    for file in files_of(given.system, given.folder):
        try:
            found = import_file(given.system, file)
        except ConfigError as error:
            counts["no config of a run"] += 1
            found = Imported(problem=str(error))
        else:
            as_table(found)
            counts["whole" if found.is_whole else "in part" if found.tree else "refused"] += 1
            counts["accepted by `leeway validate --quick`"] += bool(found.tree) and found.problem is None
        why = [f"{line.fate.kind}: {line.theirs}: {line.fate.why}" for line in found.of_kind(*BAD)]
        why += [found.problem] if found.problem else []
        reasons.update({reason.split("=")[0][:110] for reason in why})
        if given.yaml is not None and found.tree:
            given.yaml.mkdir(parents=True, exist_ok=True)
            name = "-".join(file.relative_to(given.folder).with_suffix(".yaml").parts)
            (given.yaml / name).write_text(as_yaml(found, f"leeway import {given.system} {file}"), encoding="utf-8")
        if given.refused:
            print(f"{file.relative_to(given.folder)}: {'; '.join(why)[:600] or 'whole'}")
    print("\nreasons, by the number of files:", file=sys.stderr)
    for reason, number in reasons.most_common(60):
        print(f"  {number:4}  {reason}", file=sys.stderr)
    print(f"\n{sum(counts[k] for k in ('whole', 'in part', 'refused', 'no config of a run'))} files: {dict(counts)}")


if __name__ == "__main__":
    main()

"""What `peers.py` asks of all systems: workloads, their models and tasks, and how ours is told of one.

A workload is in the form of each side: peers get finished prompts, ours a file of questions and settings.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peer_parts
from quickstart_runs import warmed_up

DTYPES = ("float32", "bfloat16")
SYSTEM_PROMPT = "Answer with the number only."
"""Of the real model, which would write sentences without it."""


@dataclass(frozen=True)
class Workload:
    model: str  # "warm", "random" or "given"
    groups: int
    max_tokens: int  # of an answer, or of a turn
    reward: str
    lr: float
    steps: int
    learn_steps: int = 0
    target: float = 0.0  # held-out accuracy whose time is reported
    group_size: int = 8
    turns: int = 1
    environment_s: float = 0.0
    min_tokens: int = 0

    @property
    def is_short(self) -> bool:
        """Whether all answers are finished sooner than their prompts would be read again."""
        return self.max_tokens == 8

    @property
    def response_tokens(self) -> int:
        """Of a whole conversation, at most."""
        return self.turns * self.max_tokens + (self.turns - 1) * 8

    @property
    def model_length(self) -> int:
        if self.model == "given":
            return 104 + self.max_tokens
        return 64 if self.is_short else 384


WORKLOADS = {
    "short": Workload("warm", 64, 8, "exact_match", 3e-4, 25, learn_steps=80, target=0.70),
    "long": Workload("random", 16, 256, "peer_parts:digits", 1e-6, 12),
    "even": Workload("random", 16, 200, "peer_parts:digits", 1e-6, 12, min_tokens=180),
    "turns": Workload(
        *("random", 16, peer_parts.TOKENS_PER_TURN, "peer_parts:digits", 1e-6, 12),
        turns=peer_parts.TURNS,
        environment_s=peer_parts.ENVIRONMENT_S,
    ),
    "smollm2": Workload("given", 8, 24, "last_number", 1e-5, 10, learn_steps=24, target=0.20),
    "chat": Workload("given", 64, 24, "last_number", 1e-5, 25, learn_steps=80, target=0.40),
    "thousand": Workload("given", 16, 1000, "peer_parts:digits", 1e-6, 8, min_tokens=1000),
}


def model_of(workload: Workload, out: Path, *, given: Path | None, warm: Path | None) -> Path:
    """The folder of its model; `warm`: what a warm-up has made already, which takes some minutes otherwise."""
    if workload.model == "given":
        if given is None:
            raise SystemExit("--model: got nothing; expected the folder of SmolLM2-135M-Instruct")
        return given.absolute()
    warm = warm.absolute() if warm else warmed_up(out, "peers")
    return warm if workload.model == "warm" else random_weights(warm, out / "random")


def random_weights(like: Path, folder: Path) -> Path:
    """The same architecture without training, for longer texts: every token is about as likely as any other."""
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(like)
        config.max_position_embeddings = 1024
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        AutoTokenizer.from_pretrained(like).save_pretrained(folder)
    return folder


def task_files(workload: Workload, name: str, model: Path, out: Path) -> dict[str, Any]:
    """Sums and differences of two numbers, for all sides: rows of questions for ours, finished prompts for peers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    draw, seen = random.Random(0), set()
    while len(seen) < 6256:
        a, b, sign = draw.randint(10, 99), draw.randint(10, 99), draw.choice("+-")
        seen.add((a, sign, b))
    numbers = list(seen)
    draw.shuffle(numbers)
    system = SYSTEM_PROMPT if workload.model == "given" else None
    rows = []
    for a, sign, b in numbers:
        question = f"State the final answer to the following arithmetic problem: {a} {sign} {b} ="
        prompt = question
        if system is not None:
            said = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        rows.append({"question": question, "prompt": prompt, "answer": str(a + b if sign == "+" else a - b)})
    files: dict[str, Any] = {"tasks": rows[256:], "heldout": rows[:256] if workload.model != "given" else rows[:128]}
    for part in ("tasks", "heldout"):
        file = out / f"{name}-{part}.jsonl"
        lines = [json.dumps({"question": r["question"], "answer": r["answer"]}) for r in files[part]]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        files[f"{part}_file"] = file
    return files


def overrides(
    system: str,
    workload: Workload,
    model: Path,
    files: dict[str, Any],
    folder: Path,
    label: str,
    *,
    steps: int,
    every: int,
    threads: int,
    dtype: str,
    device: str,
    gpu_share: float,
) -> list[str]:
    bound = {"lockstep": 0, "lockstep_hf": 0, "bound1": 1, "bound2": 2, "bound4": 4, "hf": 2, "hf4": 4}[system]
    given = [
        *(f"model.dtype={dtype}", f"model.head_dtype={'null' if dtype == DTYPES[0] else 'float32'}"),
        *(
            "stages.sft=null",
            f"model.path={model}",
            "task.name=jsonl",
            f"task.path={files['tasks_file']}",
            "task.holdout_frac=0",
        ),
        *(
            f"output_dir={folder}",
            "project=peers",
            f"name={label}",
            f"rollout.max_response_tokens={workload.response_tokens}",
        ),
        *(f"train.steps={steps}", f"train.groups_per_step={workload.groups}", f"optimizer.lr={workload.lr}"),
        *("optimizer.schedule=constant", "optimizer.warmup_steps=0", f"algorithm.group_size={workload.group_size}"),
        *(f"staleness.max_policy_lag={bound}", "param_server.publish_every=1", "rollout.pull_every=1"),
        *("eval.at_start=false", "eval.at_end=false", "monitor.console=off"),
        *("checkpoint.save_hf=never", "checkpoint.save_state=never", f"eval.every={every}"),
        *(f"rollout.max_model_len={workload.model_length}", f"cluster.device={device}"),
        *([f"eval.path={files['heldout_file']}"] if every else []),
    ]
    if workload.model == "given":
        given += [f"task.system_prompt={SYSTEM_PROMPT}", "task.answer_after=null"]
        given += ["rollout.temperature=1"]  # torchrl's loss knows no other
        if "hf" not in system:
            given += ["rollout.engine={name: vllm, enforce_eager: true, max_num_seqs: 128}"]
    else:
        given += ["model.init=null"]
    if workload.max_tokens > 24:
        given += ["staleness.reorder_window=null"]
    if workload.min_tokens:
        given += [f"rollout.min_response_tokens={workload.min_tokens}"]
    if workload.turns > 1:
        given += ["env.name=peer_parts:Talk"]
    else:
        given += [f"env.reward={workload.reward}"]
    if not workload.is_short:
        given += ["staleness.in_flight=recompute"]
    if bound == 0 and device == "cpu":
        given += in_lockstep(workload, threads)
    if device == "cuda" or not bound:
        given += ["cluster.placement=together"]
    if device == "cuda":
        given += ["train.max_tokens_per_microbatch=null", "cluster.start_timeout_s=300"]
        if "hf" not in system:
            given += [f"rollout.engine.gpu_memory_utilization={gpu_share}", "rollout.engine.enforce_eager=false"]
            given += [f"rollout.engine.max_num_seqs={workload.groups * workload.group_size}"]
    if "hf" in system:
        given += ["rollout.engine.name=hf"]
    if system == "hf4":
        given += [f"rollout.max_groups_in_flight={2 * workload.groups}", "rollout.pull_every=3"]
    return given


def in_lockstep(workload: Workload, threads: int) -> list[str]:
    """What trials on two cores found fastest; each is one that `leeway tune` makes, too."""
    from leeway.planning.tuning import MOST_ENGINES

    engines = min(threads, MOST_ENGINES) if workload.max_tokens > 24 else 1
    given = [f"rollout.num_generators={engines}", f"cluster.cpus_per_generator={threads // engines}"]
    given += [f"cluster.cpus_per_trainer={threads}"]
    if workload.environment_s:
        half = workload.groups // 2
        given += [f"train.stream_groups={half}", f"rollout.engine.max_num_seqs={half * workload.group_size}"]
    return given

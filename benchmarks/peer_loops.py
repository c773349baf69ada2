"""One run of a peer, for `peers.py`: TRL's GRPOTrainer, a loop of torchrl's wrappers and GRPOLoss, or vLLM alone.

    python benchmarks/peer_loops.py trl|trl_vllm|torchrl|vllm SPEC.json OUT.jsonl

A line of OUT for each step: its seconds, generation and training together, and its sampled tokens; a line for each
evaluation, whose time is in no step. Generation and training take turns. On a CPU, and without `_vllm`, transformers
generates. Passes of training hold all answers of a step on a CPU, about 32,768 tokens on a GPU.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def exact_match(text: str, answer: str) -> float:
    return float(" ".join(text.split()) == answer)


def last_number(text: str, answer: str) -> float:
    found = re.findall(r"-?[0-9]+", text.replace(",", ""))
    return float(bool(found) and found[-1] == answer)


def digits(text: str, answer: str) -> float:
    return sum(c.isdigit() for c in text) / max(1, len(text))


REWARDS = {"exact_match": exact_match, "last_number": last_number, "peer_parts:digits": digits}


class Record:
    """The lines of OUT; the clock stands still during evaluations."""

    def __init__(self, spec: dict[str, Any], path: str, model: Any, tokenizer: Any) -> None:
        self._spec, self._out = spec, open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._model, self._tokenizer = model, tokenizer
        self._reward = REWARDS[spec["reward"]]
        self._begun = time.monotonic()

    def begin(self) -> None:
        self._begun = time.monotonic()

    def step(self, number: int, tokens: int) -> None:
        line = {"step": number, "seconds": time.monotonic() - self._begun, "tokens": tokens}
        self._out.write(json.dumps(line) + "\n")
        every = self._spec["eval_every"]
        if every and number % every == 0:
            self.evaluate(number)
        self.begin()

    def evaluate(self, number: int) -> None:
        asked = self._spec["heldout"]
        training, side = self._model.training, self._tokenizer.padding_side
        self._model.eval()
        self._tokenizer.padding_side = "left"
        right = 0.0
        for first in range(0, len(asked), 64):
            some = asked[first : first + 64]
            rows = self._tokenizer([q["prompt"] for q in some], return_tensors="pt", padding=True)
            rows = {name: rows[name].to(self._model.device) for name in ("input_ids", "attention_mask")}
            with torch.no_grad():
                full = self._model.generate(
                    **rows, do_sample=False, max_new_tokens=self._spec["max_tokens"], pad_token_id=PAD
                )
            texts = self._tokenizer.batch_decode(full[:, rows["input_ids"].shape[1] :], skip_special_tokens=True)
            right += sum(self._reward(text, q["answer"]) for text, q in zip(texts, some, strict=True))
        self._tokenizer.padding_side = side
        self._model.train(training)
        self._out.write(json.dumps({"step": number, "accuracy": right / len(asked)}) + "\n")


PAD = 0


def loaded(spec: dict[str, Any]) -> tuple[Any, Any]:
    """Model and tokenizer; what pads is no token that is ever sampled on purpose: both loops drop it from answers."""
    global PAD
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(spec["seed"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32).to(spec["device"])
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.bos_token
    PAD = tokenizer.pad_token_id
    return model, tokenizer


def rewards_of(spec: dict[str, Any], texts: list[str], answers: list[str]) -> list[float]:
    """With turns, their environments have taken their time already; see `talked`."""
    reward = REWARDS[spec["reward"]]
    return [reward(text, answer) for text, answer in zip(texts, answers, strict=True)]


def talked(
    spec: dict[str, Any], model: Any, tokenizer: Any, prompts: list[list[int]]
) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """(tokens after each prompt, 1 for those that the model wrote, their logprobs) after all turns.

    The environments of a turn take `environment_s` together, as if all of them waited side by side.
    """
    reply = tokenizer(spec["reply"], add_special_tokens=False)["input_ids"]
    after: list[list[int]] = [[] for _ in prompts]
    own: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    for turn in range(spec["turns"]):
        rows = [p + a for p, a in zip(prompts, after, strict=True)]
        width = max(map(len, rows))
        ids = torch.tensor([[PAD] * (width - len(r)) + r for r in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=model.device)
        training = model.training
        model.eval()
        with torch.no_grad():
            made = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=spec["max_tokens"],
                min_new_tokens=spec["min_tokens"],
                pad_token_id=PAD,
                return_dict_in_generate=True,
                output_logits=True,
            )
        model.train(training)
        new = made.sequences[:, width:]
        logits = torch.stack(made.logits, 1)
        scored = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), new.flatten(), reduction="none")
        scored = scored.view(new.shape).tolist()
        for i, tokens in enumerate(new.tolist()):
            ends = tokens.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in tokens else len(tokens)
            after[i] += tokens[:ends]
            own[i] += [1] * ends
            logprobs[i] += scored[i][:ends]
        time.sleep(spec["environment_s"])
        if turn + 1 < spec["turns"]:
            for a, o, p in zip(after, own, logprobs, strict=True):
                a += reply
                o += [0] * len(reply)
                p += [0.0] * len(reply)
    return after, own, logprobs


# ------------------------------------------------------------------------------------------------------------ TRL


def trl(spec: dict[str, Any], out: str, *, vllm: bool = False) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = loaded(spec)
    record = Record(spec, out, model, tokenizer)
    sampled: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        sampled.append(sum(map(len, completion_ids)))
        return rewards_of(spec, completions, answer)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
        after, own, _ = talked(spec, trainer.model, tokenizer, ids)
        return {"prompt_ids": ids, "completion_ids": after, "logprobs": None, "env_mask": own}

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            record.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            record.step(state.global_step, sampled[-1])

    size = spec["groups"] * spec["group_size"]
    passes = 1 if spec["device"] == "cpu" else num_passes(size, spec["model_length"])
    if vllm:
        generation: dict[str, Any] = {"min_tokens": spec["min_tokens"]}
        if spec["cache_bytes"]:
            from trl.generation import vllm_generation

            sized = functools.partial(vllm_generation.LLM, kv_cache_memory_bytes=spec["cache_bytes"])
            vllm_generation.LLM = sized
        engine: dict[str, Any] = {
            **{"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": spec["gpu_share"]},
            # Without it TRL would compute all logprobs once more.
            **{"vllm_max_model_length": spec["model_length"], "vllm_importance_sampling_correction": False},
        }
    else:
        generation = {"max_new_tokens": spec["max_tokens"], "min_new_tokens": spec["min_tokens"]}
        engine = {}
    config = GRPOConfig(
        output_dir=str(Path(out).parent / "trl"),
        use_cpu=spec["device"] == "cpu",
        bf16=spec["dtype"] == "bfloat16",
        max_steps=spec["steps"],
        per_device_train_batch_size=size // passes,
        gradient_accumulation_steps=passes,
        steps_per_generation=passes,
        num_generations=spec["group_size"],
        max_completion_length=spec["max_tokens"] if vllm else spec["turns"] * (spec["max_tokens"] + 8),
        generation_kwargs=generation,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="grpo",
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        weight_decay=0.0,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=spec["seed"],
        **engine,
    )
    rows = Dataset.from_list([{"prompt": q["prompt"], "answer": q["answer"]} for q in spec["tasks"]])
    own: dict[str, Any] = {"rollout_func": rollout} if spec["turns"] > 1 else {}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[Steps()],
        **own,
    )
    trainer.train()


def num_passes(size: int, length: int, at_most: int = 32_768) -> int:
    """Into how many equal parts `size` answers of up to `length` tokens are cut, none of more than `at_most` tokens."""
    passes = 1
    while passes < size and size // passes * length > at_most:
        passes *= 2
    return passes


# -------------------------------------------------------------------------------------------------------- torchrl


def torchrl(spec: dict[str, Any], out: str) -> None:
    """Sample, reward, GRPOLoss, step: what torchrl's example does, with transformers in the place of vLLM.

    Its wrapper computes the logprobs that are trained; answers come from `generate` itself, because the wrapper gives
    the first token of each answer the logprob 0.
    """
    import random

    from tensordict import TensorDict
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm.grpo import GRPOLoss

    model, tokenizer = loaded(spec)
    model.eval()  # no dropout in these models
    record = Record(spec, out, model, tokenizer)
    wrapped = {"tokenizer": tokenizer, "input_mode": "tokens", "pad_output": True}
    actor = TransformersWrapper(model, **wrapped, generate=False, return_log_probs=True)
    loss_module = GRPOLoss(
        actor, clip_epsilon=(0.2, 0.28), entropy_bonus=False, aggregation="prompt_mean", masking_strategy="rlhf"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    order = random.Random(spec["seed"])
    size = spec["group_size"]
    for number in range(1, spec["steps"] + 1):
        record.begin()
        asked = [q for q in order.sample(spec["tasks"], spec["groups"]) for _ in range(size)]
        prompts = [tokenizer(q["prompt"], add_special_tokens=False)["input_ids"] for q in asked]
        width = max(map(len, prompts))
        rows = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts], device=model.device)
        after, own, logprobs = talked(spec, model, tokenizer, prompts)
        longest = max(map(len, after))
        responses = torch.tensor([a + [PAD] * (longest - len(a)) for a in after], device=model.device)
        mask = torch.tensor([o + [0] * (longest - len(o)) for o in own], device=model.device).bool()
        real = torch.tensor([[1] * len(a) + [0] * (longest - len(a)) for a in after], device=model.device).bool()
        texts = tokenizer.batch_decode([r[m].tolist() for r, m in zip(responses, real, strict=True)], True)
        rewards = torch.tensor(rewards_of(spec, texts, [q["answer"] for q in asked]), device=model.device)
        rewards = rewards.view(-1, size)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
        full = torch.cat([rows, responses], 1)
        attention = torch.cat([rows != PAD, real], 1)
        assistant = torch.cat([torch.zeros_like(rows).bool(), mask], 1)
        batch = TensorDict(
            {
                "tokens": {"full": full, "prompt": rows, "response": responses},
                "masks": {"all_attention_mask": attention, "all_assistant_mask": assistant},
                "advantage": (advantages[:, None] * assistant)[..., None],
            },
            batch_size=[len(full)],
        )
        old = torch.zeros(full.shape, device=model.device)
        old[:, width:] = torch.tensor([p + [0.0] * (longest - len(p)) for p in logprobs])
        batch["log_probs", "full"] = old
        with torch.autocast(spec["device"], torch.bfloat16, enabled=spec["dtype"] == "bfloat16"):
            total = loss_module(batch).loss_objective.sum()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        record.step(number, int(mask.sum()))


# ----------------------------------------------------------------------------------------------------- vLLM alone


def vllm_alone(spec: dict[str, Any], out: str) -> None:
    """Answers of a step, one step after the other; nothing is trained, and nothing is made of the answers."""
    import random

    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    on_cpu = spec["device"] == "cpu"
    sized = spec["cache_bytes"] or (2**30 if on_cpu else None)
    llm = LLM(
        model=spec["model"],
        dtype=spec["dtype"],
        max_model_len=spec["model_length"],
        max_num_seqs=spec["groups"] * spec["group_size"],
        gpu_memory_utilization=spec["gpu_share"],
        kv_cache_memory_bytes=sized,
        enforce_eager=on_cpu,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        seed=spec["seed"],
        **({"block_size": 32} if on_cpu else {}),
    )
    params = SamplingParams(
        n=spec["group_size"],
        temperature=1.0,
        max_tokens=spec["max_tokens"],
        min_tokens=spec["min_tokens"],
        logprobs=0,
        detokenize=False,
    )
    record = Record(spec | {"eval_every": 0}, out, None, tokenizer)
    order = random.Random(spec["seed"])
    for number in range(1, spec["steps"] + 1):
        asked = order.sample(spec["tasks"], spec["groups"])
        prompts = [{"prompt_token_ids": tokenizer(q["prompt"], add_special_tokens=False)["input_ids"]} for q in asked]
        record.begin()
        answers = llm.generate(prompts, params, use_tqdm=False)
        record.step(number, sum(len(one.token_ids) for answer in answers for one in answer.outputs))


if __name__ == "__main__":
    which, spec_file, out_file = sys.argv[1:]
    loops = {"trl": trl, "trl_vllm": functools.partial(trl, vllm=True), "torchrl": torchrl, "vllm": vllm_alone}
    loops[which](json.loads(Path(spec_file).read_text(encoding="utf-8")), out_file)

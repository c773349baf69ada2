"""Every family of causal LMs that transformers can build, trained as we train it against what transformers says.

    python benchmarks/families.py                        all of them; writes docs/families.md
    python benchmarks/families.py --only nemotron mpt    these; prints their rows

Each family is built tiny. Every weight and every buffer of its files gets noise, every dropout and router noise is on,
windows, caps and scales are such that they show. Then it is loaded as a trainer loads it, packed and padded, and
sixteen sequences of up to forty tokens are scored: the largest difference of a logprob to transformers (eager
attention, evaluation mode, each sequence alone, float32), and that of the gradient, relative to its norm. Last, its
weights are exported and loaded again. "WRONG" in a row is a defect of ours; the last line counts them, and the exit
code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import json
import logging
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from leeway.algorithms.objective import SupervisedObjective
from leeway.config.flow import ParamServerConfig
from leeway.config.inputs import ModelConfig
from leeway.config.learning import CheckpointConfig, OptimizerConfig, TrainConfig
from leeway.config.running import ClusterConfig
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.trainer.families import ModelRefusedError, load_model
from leeway.trainer.microbatch import split_into_microbatches
from leeway.trainer.scoring import ScoringModel, score_microbatch
from leeway.trainer.settings import TrainerSettings
from leeway.trainer.trainer import Trainer
from leeway.types import TrainBatch, Trajectory, batch_trajectories
from leeway.weights import CanaryPrompts

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
VOCAB = 96
TEMPERATURE = 0.7
MAX_GAP, MAX_GRADIENT = 1e-4, 1e-3
SECONDS = 240  # for one family, on a busy machine
# Set where a config has the attribute. Sizes first, then what is off, or out of reach of short sequences, by default.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "n_embed": 32,
    "dim_model": 32,
    "embedding_dim": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "ffn_hidden_size": 48,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "n_inner": 48,
    "dim_ff": 48,
    "dff": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_seq_len": 128,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 8,
    "laurel_rank": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 16,
    # With 2 heads a quarter of hy_v4's indexer scores are exactly zero (a ReLU), and which of equal ones top-k selects
    # depends on the width of the pass, in transformers' own padded batch too: there is no one answer to agree with.
    "index_n_heads": 16,
    "mamba_d_state": 8,
    "mamba_d_head": 8,
    "mamba_n_heads": 8,
    "state_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHOWN: dict[str, Any] = {
    "sliding_window": 5,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "attention_chunk_size": 6,
    "index_topk": 4,
    "query_pre_attn_scalar": 8,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 1.5,
    "logits_soft_cap": 3.0,
    "output_logit_soft_cap": 3.0,
    "logits_scaling": 2.5,
    "logit_scale": 0.4,
    "lm_head_multiplier": 0.3,
    "router_jitter_noise": 0.1,
    "input_jitter_noise": 0.1,
    "layerdrop": 0.0,
    "is_decoder": True,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "use_mamba_kernels": False,
}
COMPUTED = ("slope_rate", "_decay", "inv_freq")
"""Buffers in the files that nobody trains: the code makes them, and noise would make another model of it."""
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
QWEN4 = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
QWEN4 |= {"indexer_compress_ratio": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "qwen3_next": LINEAR,
    "qwen3_5": {"text_config": LINEAR},
    "qwen3_5_moe": {"text_config": LINEAR},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "qwen4_exp": {"text_config": LINEAR | QWEN4},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "diffllama": {"attention_dropout": 0.0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 5},
    "inkling_text": {"logits_mup_width_multiplier": 2.0},
    "mpt": {"attn_config": {"attn_pdrop": "unset"}},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64},
    "ministral": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2},
    "kimi_linear": {**LINEAR, "num_experts": 8, "num_experts_per_token": 2, "num_expert_group": 1}
    | {"linear_head_dim": 8, "linear_num_heads": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
    | {"activation_sparsity_pattern": [0.5, 0.0]},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3}
    | {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1},
    "zaya": {"num_experts_per_tok": 1},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 2, "head_dim": "unset"},
    "dbrx": {"tie_word_embeddings": False, "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48}},
    "qwen4_exp_text": LINEAR | QWEN4,
}
"""What a family needs beside these to be built."""


@dataclass
class Row:
    family: str
    model: str = ""
    packed: str = ""
    padded: str = ""
    exported: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def is_built(self) -> bool:
        return bool(self.packed)

    @property
    def is_wrong(self) -> bool:
        return any("WRONG" in cell for cell in (self.packed, self.padded, self.exported))


# ------------------------------------------------------------------------------------------------------- models


def shrunk(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a tiny config of the same class, those of the configs within it included."""
    defaults = config.to_dict()
    noises = {n: 0.1 for n, v in defaults.items() if ("drop" in n and "layer" not in n) and isinstance(v, float | int)}
    noises = {n: v for n, v in noises.items() if not isinstance(defaults[n], bool)}
    out = {n: v for n, v in ({**SIZES, **SHOWN, **noises}).items() if n in defaults and defaults[n] is not None}
    out |= {n: v for n, v in SHOWN.items() if n in defaults and n in ("sliding_window", "final_logit_softcapping")}
    if "num_key_value_heads" in defaults:
        out["num_key_value_heads"] = SIZES[
            "num_attention_heads" if "kv_lora_rank" in defaults else "num_key_value_heads"
        ]
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None and not isinstance(part, dict):
            out[name] = {**shrunk(part, changes.get(name, {})), "model_type": part.model_type}
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(out.get(name), dict):
            continue
        out[name] = value
    return {n: v for n, v in out.items() if v != "unset"}


def build(family: str, folder: Path) -> Any:
    """The tiny model with noise in everything that its files hold; it lies in `folder`."""
    kind = CONFIG_MAPPING[family]
    arguments = shrunk(kind(), FAMILIES.get(family, {}))
    torch.manual_seed(0)
    config = kind(**arguments)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    add_noise(model)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def add_noise(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    embeddings = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter += 0.2 * noise(parameter)
        elif id(parameter) in embeddings:
            parameter.copy_(0.5 * noise(parameter))
        elif min(parameter.shape) > 1 and "A_log" not in name:
            parameter.copy_(noise(parameter) / parameter.shape[-1] ** 0.5)
    kept = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in kept and buffer.is_floating_point() and not name.endswith(COMPUTED):
            buffer += 0.3 * noise(buffer).abs()


# --------------------------------------------------------------------------------------------------- comparison


def trajectories() -> list[Trajectory]:
    """Three groups of four with one prompt each, and four sequences of their own."""
    rng = random.Random(0)
    out = []
    for size in (4, 4, 4, 1, 1, 1, 1):
        prompt = [rng.randrange(5, VOCAB) for _ in range(rng.randint(2, 14))]
        for _ in range(size):
            response = [rng.randrange(5, VOCAB) for _ in range(rng.choice((1, rng.randint(2, 26))))]
            out.append(
                Trajectory(
                    prompt_tokens=prompt,
                    response_tokens=response,
                    loss_mask=[True] * len(response),
                    behavior_logprobs=[0.0] * len(response),
                    policy_versions=[0] * len(response),
                    reward=0.0,
                    finish_reason="stop",
                    text="",
                )
            )
    return out


Scores = tuple[torch.Tensor, dict[str, torch.Tensor]]


def of_transformers(folder: Path, data: list[Trajectory], weights: torch.Tensor) -> Scores:
    """Logprobs and the gradient of their weighted sum, each sequence alone, by transformers itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "rescale_every", 0):
            config.rescale_every = 0
    parts, place = [], 0
    for t in data:
        logits = plain(model, t.prompt_tokens + t.response_tokens)
        logits = logits[len(t.prompt_tokens) - 1 : -1].float() / TEMPERATURE
        scored = torch.log_softmax(logits, -1).gather(-1, torch.tensor(t.response_tokens)[:, None])[:, 0]
        (scored * weights[place : place + len(scored)]).sum().backward()
        place += len(scored)
        parts.append(scored.detach())
    return torch.cat(parts), gradients(model)


def plain(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence, by transformers itself."""
    no_cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(input_ids=torch.tensor([tokens]), **no_cache).logits[0]


def of_ours(model: ScoringModel, batch: TrainBatch, packing: Any, weights: torch.Tensor) -> Scores:
    model.zero_grad()
    logprobs = torch.full((len(batch.response_tokens),), float("nan"))
    for piece in split_into_microbatches(batch, max_tokens=150, packing=packing):
        scored, _ = score_microbatch(model, replace(piece, temperature=TEMPERATURE))
        (scored * weights[piece.batch_positions]).sum().backward()
        logprobs[piece.batch_positions] = scored.detach()
    return logprobs, gradients(model.lm)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}


def compared(got: Scores, expected: Scores) -> str:
    gap = float((got[0] - expected[0]).abs().max())
    total = sum(float(g.square().sum()) for g in expected[1].values()) ** 0.5
    wrong = [float((got[1].get(n, torch.zeros_like(g)) - g).norm()) for n, g in expected[1].items()]
    gradient = max(wrong, default=0.0) / total if total else 0.0
    gradient = max(gradient, 1.0 if set(got[1]) - set(expected[1]) else 0.0)
    ok = gap <= MAX_GAP and gradient <= MAX_GRADIENT
    return f"{'exact' if ok else 'WRONG'} ({gap:.0e}, gradient {gradient:.0e})"


def check(family: str, folder: Path) -> Row:
    row = Row(family)
    model = build(family, folder)
    row.model = type(model).__name__
    with torch.no_grad():
        spread = float(plain(model.eval(), list(range(5, 15))).std())
    if not 0.1 < spread < 50:
        row.notes.append(f"logits have a spread of {spread:.2g}: mistakes may not show")
    data = trajectories()
    batch = batch_trajectories(data, [0.0] * len(data), num_sequences=1, num_tokens=1, temperature=TEMPERATURE)
    weights = torch.randn(len(batch.response_tokens), generator=torch.Generator().manual_seed(2))
    expected: Scores | None = None
    for column, packings in (("packed", ("shared", "packed")), ("padded", ("padded",))):
        try:
            ours = load_model(str(folder), packing=packings[0])
        except ModelRefusedError as error:
            setattr(row, column, f"refused: {reason(str(error))}")
            continue
        expected = expected or of_transformers(folder, data, weights)
        cells = [compared(of_ours(ours, batch, packing, weights), expected) for packing in packings]
        how: str = str(ours.lm.config._attn_implementation) if column == "padded" else ""
        how += ", masks" if ours.masks else ""
        setattr(row, column, max(cells, key=lambda cell: "WRONG" in cell) + (f" {how}" if how else ""))
    if "refused" not in row.padded:
        try:
            row.exported = exported(folder, data)
        except ValueError as error:
            row.exported = f"refused: {reason(' '.join(str(error).split()))}"
    return row


def exported(folder: Path, data: list[Trajectory]) -> str:
    """How far the weights that a trainer writes, without a step, are from those that it loaded."""
    build_tokenizer(["12 + 34 = 46"]).save_pretrained(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    trainer = Trainer(settings_of(folder), rank=0, init_method=address)
    try:
        trainer.save(str(folder / "saved"))
    finally:
        trainer.close()
    models = [
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32, attn_implementation="eager").eval()
        for f in (folder, folder / "saved")
    ]
    gap = 0.0
    for t in data[:6]:
        with torch.no_grad():
            a, b = (torch.log_softmax(plain(m, t.prompt_tokens + t.response_tokens), -1) for m in models)
        gap = max(gap, float((a - b).abs().max()))
    return "exact" if gap <= 1e-5 else f"WRONG ({gap:.0e})"


def settings_of(folder: Path) -> TrainerSettings:
    return TrainerSettings(
        model=ModelConfig(path=str(folder), dtype="float32"),
        optimizer=OptimizerConfig(lr=1e-3),
        train=TrainConfig(max_tokens_per_microbatch=1000),
        checkpoint=CheckpointConfig(in_background=False),
        param_server=ParamServerConfig(bucket_mb=1),
        cluster=ClusterConfig(device="cpu", step_timeout_s=60),
        objective=SupervisedObjective(),
        canary=CanaryPrompts(scored=[], cached=[]),
        total_steps=1,
        max_policy_lag=None,
        num_threads=0,
        seed=0,
    )


def reason(message: str) -> str:
    """Why, without what the table says anyway."""
    if "(" in message and "; expected what" in message:
        message = message.split("is not trained exactly (", 1)[1].split("); expected what", 1)[0]
    return message.replace("packed rows: ", "").replace("|", "/")[:260]


# --------------------------------------------------------------------------------------------------------- page

HEAD = """# Families

Made by `python benchmarks/families.py` with transformers {version}; do not edit. What is compared, and how a model is
loaded: [trainer.md](trainer.md#families).

Each family was built tiny, with noise in every weight and buffer of its files, dropout and router noise on, and
windows, caps and scales that show. In brackets: the largest difference of a logprob to transformers in eager attention
and evaluation mode, each sequence alone, in nats, and that of the gradient, relative to its norm. `exact` allows
{gap:g} and {gradient:g}. Under "padded" is the attention that was chosen. "Exported": the weights that a trainer writes
without a step, loaded again, give the same logprobs.

Indexers were given 16 heads: with 2, a quarter of hy_v4's scores are exactly zero (a ReLU), and which of equal scores
top-k selects depends on the width of the pass, so transformers differs by 2 nats from its own padded batch, and we
differ from it in the same way. With equal scores taken in the order of their tokens on both sides, hy_v4, glm_moe_dsa,
deepseek_v32 and axk2 were exact with 2 heads too. As it is, a model with such ties is refused when it is loaded if the
comparison happens to meet one; if it does not, tokens that a tie decides differ. Sequences no longer than what the
indexer selects (2,048 tokens in hy_v4) are not affected.

{built} families were built: {packed} are exact packed, {padded} exact padded, {refused} are refused in one line when
they are loaded, and {wrong} are trained wrong. Packed rows are refused where a layer does not hand on the layout of the
row, where layers do not take another attention or are of other kinds (states, convolutions, chunks, sinks), and where
the comparison found a difference (a state, or a window that attention is not told of). Such models are padded.

| family | packed | padded | exported |
|---|---|---|---|
"""


def page(rows: list[Row]) -> str:
    built = [row for row in rows if row.is_built]

    def number(cell: Callable[[Row], str], word: str) -> int:
        return sum(cell(row).startswith(word) for row in built)

    text = HEAD.format(
        version=transformers.__version__,
        gap=MAX_GAP,
        gradient=MAX_GRADIENT,
        built=len(built),
        packed=number(lambda row: row.packed, "exact"),
        padded=number(lambda row: row.padded, "exact"),
        refused=number(lambda row: row.padded, "refused"),
        wrong=sum(row.is_wrong for row in built),
    )
    text += "".join(f"| {r.family} | {r.packed} | {r.padded} | {r.exported or '-'} |\n" for r in built)
    dull = [f"{row.family} ({note})" for row in built for note in row.notes]
    text += f"\nTo be read with care: {', '.join(dull)}.\n" if dull else ""
    missing = [f"| {row.family} | {row.notes[0].removeprefix('not built: ')} |\n" for row in rows if not row.is_built]
    return text + "\nNot built here:\n\n| family | why |\n|---|---|\n" + "".join(missing).replace("\n\n", "\n")


# --------------------------------------------------------------------------------------------------------- main


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(family: str) -> Row:
    folder = Path(tempfile.mkdtemp(prefix="leeway-family-"))
    started = time.monotonic()
    try:
        with within(SECONDS):
            row = check(family, folder)
    except Exception as error:
        row = Row(family, notes=[f"not built: {type(error).__name__}: {' '.join(str(error).split())[:200]}"])
        if "--trace" in sys.argv:
            import traceback

            traceback.print_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row.seconds = round(time.monotonic() - started, 1)
    gc.collect()
    return row


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = [Row(**json.loads(line)) for f in args.rows or [] for line in f.read_text().splitlines() if line[0] == "{"]
    for family in [] if rows else args.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows.append(run(family))
        print(json.dumps(asdict(rows[-1])), flush=True)
    rows = sorted({row.family: row for row in rows}.values(), key=lambda row: row.family)
    wrong = [row.family for row in rows if row.is_wrong]
    if not args.only:
        PAGE.write_text(page(rows))
    print(f"{sum(r.is_built for r in rows)} of {len(rows)} built, wrong: {', '.join(wrong) or 'none'}")
    sys.exit(1 if wrong else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="these, and no table is written")
    parser.add_argument("--rows", nargs="+", type=Path, metavar="FILE", help="write the table of rows printed before")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--trace", action="store_true", help="print why a family could not be built")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""What a model of any family needs in order to be scored exactly, determined by trying when it is loaded.

    read -> set rotary frequencies to those of the run's longest sequence
         -> measure what the model does to its head's logits
         -> score four short sequences with transformers, each alone, in evaluation mode
         -> take the first way to compute a pass that agrees: packed (its last layer for the needed tokens alone, or for
            all), padded, padded with masks

Nothing depends on a family's name. A model that no way computes exactly is refused, by name, before training starts.
Trainer ranks do all of that with their shards: no rank ever reads or holds the whole model.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from .attention import NAME as PACKED
from .attention import may_be_packed
from .last_layer import skip_unneeded
from .logprobs import LogitTransform
from .microbatch import Packing, split_into_microbatches
from .pretrained import ModelRefusedError, read_weights, skeleton
from .scoring import ScoringModel, head_forward, output_head, score_microbatch
from .sharding import decoder_layers, reshard, shard
from .shards import shard_of
from .tensors import fill, saved_tensors, taken_back

logger = logging.getLogger(__name__)

# How far apart two exact ways of computing may be, as a share of the widest logit: float32 keeps seven digits, and the
# sums of a deep model lose one or two of them. Real errors seen so far, in any family, were a thousand times larger.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# Names, in modules and configs, of lengths beyond which a layer sees less. Those that the run's sequences exceed are
# shortened for the comparison; otherwise it would not show how a layer treats them.
WINDOWS = ("sliding_window", "attention_chunk_size", "index_topk")
SHORT_WINDOW = 4
# Substitutes for a head's logits: small ones show a scale, large ones a cap.
SMALL_LOGIT, LARGE_LOGIT = 1e-3, 1e6


@dataclass(frozen=True)
class FoundModel:
    """A model, and the way to compute it exactly. `lm`: its skeleton, to be filled with `weights`; see `pretrained`."""

    lm: PreTrainedModel
    weights: dict[str, torch.Tensor]
    transform: LogitTransform
    masks: bool
    skips_unneeded: bool
    head_dtype: torch.dtype | None

    def scoring_model(self, chunk_tokens: int | None = None) -> ScoringModel:
        """Around the skeleton. `chunk_tokens`: most tokens whose logits exist at a time; None: `MANY_LOGITS`."""
        if self.skips_unneeded:
            skip_unneeded(decoder_layers(self.lm)[-1])
        return ScoringModel(
            self.lm,
            transform=self.transform,
            head_dtype=self.head_dtype,
            chunk_tokens=chunk_tokens,
            masks=self.masks,
        )


def load_model(
    path: str,
    *,
    attn: str = "auto",
    packing: str = "auto",
    head_dtype: torch.dtype | None = None,
    chunk_tokens: int | None = None,
    max_length: int | None = None,
    device: torch.device | None = None,
) -> ScoringModel:
    """The whole model in float32 on `device`, scored exactly as by transformers, without noise; see `find_model`."""
    device = device or torch.device("cpu")
    found = find_model(path, attn=attn, packing=packing, head_dtype=head_dtype, max_length=max_length, device=device)
    model = found.scoring_model(chunk_tokens)
    fill(model.lm, found.weights)
    return model.to(device)


def find_model(
    path: str,
    *,
    attn: str = "auto",
    packing: str = "auto",
    head_dtype: torch.dtype | None = None,
    max_length: int | None = None,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    cpu_offload: bool = False,
) -> FoundModel:
    """The way in which a model's passes are exact, and its weights in float32: with `mesh`, this rank's rows of them.

    `packing`: a `Packing`, or "auto": shared where that is exact, else padded. `attn`: an attention of transformers, or
    "auto": the first of sdpa and eager that is exact. `head_dtype`: see `ScoringModel`. `max_length`: of the run's
    longest sequence; None: the model's own limit. Raises a one-line `ModelRefusedError` if no requested way is exact.
    Costs about ten passes over at most forty tokens, on all ranks of `mesh` at once.
    """
    loader = _Loader(path, device, max_length, mesh, cpu_offload, head_dtype)
    probe = _Probe.of(loader)
    found: list[str] = []
    whole: str | None = None  # why the last layer computes all tokens
    for way in _ways(attn, packing):
        if way.attn == PACKED and not probe.may_be_one_row:
            if not way.skips_unneeded:
                found.append(f"{way}: its layers are of kinds that do not take packed attention")
            continue
        try:
            wrong = probe.compare(loader.scoring(way, probe.transform), way)
        except Exception as error:  # whatever it is, this way does not work
            wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if (wrong := loader.agreed(wrong)) is None:
            if found and packing == "auto":
                logger.warning("%s: batches are computed as %s, because of %s", probe.name, way, found[0])
            elif whole is not None:
                logger.info("%s: its last layer computes all tokens, because of %s", probe.name, whole)
            lm = loader.skeleton(way.attn)
            return FoundModel(lm, loader.weights, probe.transform, way.masks, way.skips_unneeded, head_dtype)
        if way.skips_unneeded:
            whole = wrong
        else:
            found.append(f"{way}: {wrong}")
    raise ModelRefusedError(
        f"{probe.name}: got train.packing={packing}, model.attn={attn}, with which it is not trained exactly "
        f"({'; '.join(found)}); expected what transformers says of each sequence alone; "
        + ("set train.packing=auto, model.attn=auto" if (packing, attn) != ("auto", "auto") else "use another model")
    )


@dataclass(frozen=True)
class _Way:
    """One way of computing passes."""

    attn: str
    packing: Packing
    masks: bool = False
    skips_unneeded: bool = False  # in the last layer

    def __str__(self) -> str:
        if self.attn == PACKED:
            return "packed rows"
        return f"padded rows{' with masks' if self.masks else ''} in {self.attn} attention"


def _ways(attn: str, packing: str) -> list[_Way]:
    """The ways to try, fastest first."""
    ways: list[_Way] = []
    if packing != "padded" and attn in ("auto", "sdpa"):
        form: Any = "shared" if packing == "auto" else packing
        ways += [_Way(PACKED, form, skips_unneeded=True), _Way(PACKED, form)]
    if packing in ("auto", "padded"):
        ways += [
            _Way(name, "padded", masks)
            for name in (("sdpa", "eager") if attn == "auto" else (attn,))
            for masks in (False, True)
        ]
    return ways


@dataclass
class _Loader:
    """Makes models of the same weights, one at a time. `weights`: this rank's, while no model has them."""

    path: str
    device: torch.device
    max_length: int | None
    mesh: DeviceMesh | None
    cpu_offload: bool
    head_dtype: torch.dtype | None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    _conversions: Any = None  # from the files' names and tensors to the model's
    _model: ScoringModel | None = None

    def skeleton(self, attn: str) -> PreTrainedModel:
        """With its weights in `weights`: the last model has them no more."""
        lm = skeleton(self.path, attn)
        if self.head_dtype is not None and type(output_head(lm)) is not nn.Linear:
            raise ModelRefusedError(
                f"{_name(lm)}: model.head_dtype: got {str(self.head_dtype).removeprefix('torch.')} for an output head "
                f"of kind {type(output_head(lm)).__name__}, expected a plain matrix; leave it out"
            )
        if self._model is not None:
            reshard(self._model)
            self.weights = taken_back(self._model.lm)
            self._model = None
            gc.collect()  # parts of a sharded model refer to each other
        elif not self.weights:
            rank, num_ranks = (0, 1) if self.mesh is None else shard_of(self.mesh)
            device = torch.device("cpu") if self.cpu_offload else self.device
            self.weights = read_weights(lm, self.path, rank=rank, num_ranks=num_ranks, device=device)
            self._conversions = lm._weight_conversions
        lm._weight_conversions = self._conversions
        fix_rotary(lm, self.longest(lm))
        _switch_off(lm.config)
        return lm

    def scoring(self, way: _Way, transform: LogitTransform | None = None) -> ScoringModel:
        """One that can compute, in float32, and needs no gradients of weights."""
        lm, transform = self.skeleton(way.attn), transform or LogitTransform()
        model = FoundModel(lm, {}, transform, way.masks, way.skips_unneeded, self.head_dtype).scoring_model()
        model.requires_grad_(False)
        self._model = model
        if self.mesh is None:
            fill(model.lm, self.weights)
            return model.to(self.device)
        return shard(
            model,
            self.mesh,
            weights=self.weights,
            compute_dtype=torch.float32,
            gradient_checkpointing=False,
            cpu_offload=self.cpu_offload,
        )

    def agreed(self, wrong: str | None) -> str | None:
        """What is wrong on any rank: all take the same way."""
        if self.mesh is None:
            return wrong
        failed = torch.tensor([float(wrong is not None)], device=self.device)
        dist.all_reduce(failed, dist.ReduceOp.MAX)  # the mesh has all ranks
        return "another rank cannot compute it" if wrong is None and failed.item() else wrong

    def longest(self, lm: PreTrainedModel) -> int:
        limit = getattr(lm.config.get_text_config(), "max_position_embeddings", None) or 2048
        return limit if self.max_length is None else self.max_length

    def is_unusual(self, lm: PreTrainedModel) -> bool:
        """Whether what a token sees might depend on how long other sequences of its pass are."""
        return any(_rope_kinds(m) - {"default", "linear", "llama3", "yarn"} for m in lm.modules())


def _switch_off(config: Any) -> None:
    """Turn off what costs time or changes weights without affecting the logits."""
    for part in _configs(config):
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False  # a separate loss, which is not trained here
        if getattr(part, "rescale_every", 0):
            part.rescale_every = 0  # RWKV halves its weights in evaluation mode, against overflow in float16


def _configs(config: Any) -> Iterator[Any]:
    """A config and its nested configs."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            yield from _configs(part)


# ------------------------------------------------------------------------------------------------------- rotary


class _FixedRotary:
    """A rotary embedding that answers as if the pass held a sequence of `longest` tokens.

    Long RoPE uses other frequencies as soon as one position of a pass is beyond the original ones, so a token's logprob
    would depend on its neighbours. vLLM uses those of its `max_model_len` for all sequences; so does this.
    """

    longest: int

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if (length := int(position_ids.max()) + 1) > self.longest:
            raise ValueError(
                f"rollout.max_model_len: got {self.longest}, by which the frequencies of this model's rotary embedding "
                f"are fixed, expected at least {length}, the length of a sequence in the data; raise it"
            )
        last = position_ids.new_full((*position_ids.shape[:-1], 1), self.longest - 1)
        out = super().forward(x, torch.cat([position_ids, last], dim=-1), *args, **kwargs)  # type: ignore[misc]
        return tuple(part[..., :-1, :] for part in out)


def fix_rotary(lm: PreTrainedModel, longest: int) -> None:
    """Fix rotary frequencies that depend on the longest position of a pass to those of the run's longest sequence."""
    for module in lm.modules():
        kinds = _rope_kinds(module)
        if any("dynamic" in kind for kind in kinds):
            limit: int = getattr(module.config, "max_position_embeddings")  # noqa: B009  # torch's stub knows no configs
            if longest > limit:
                raise ModelRefusedError(
                    f"{_name(lm)}: rollout.max_model_len: got {longest}, expected at most {limit}: beyond it, the "
                    "frequencies of its dynamic rotary embedding change with every length; lower it"
                )
        if any("dynamic" in kind or kind == "longrope" for kind in kinds):
            kind = type(module)
            module.__class__ = type(f"Fixed{kind.__name__}", (_FixedRotary, kind), {"longest": longest})


def _rope_kinds(module: nn.Module) -> set[str]:
    kinds = getattr(module, "rope_type", None)
    return {str(k) for k in (kinds.values() if isinstance(kinds, dict) else [kinds]) if k is not None}


# --------------------------------------------------------------------------------------------------------- head


@torch.no_grad()
def logit_transform(model: ScoringModel, device: torch.device) -> LogitTransform:
    """Measure what the model does to its head's logits: feed made-up logits in at the head, and read the output.

    Raises `ModelRefusedError` if that is neither a scale nor a tanh cap, or differs between tokens.
    """
    lm = model.lm
    head, probes = output_head(lm), []
    real = head.forward

    def made_up(hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.empty_like(real(hidden), dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        values = 200 * torch.rand(logits.shape, generator=generator) - 100
        values[..., :4] = torch.tensor([SMALL_LOGIT, -SMALL_LOGIT, LARGE_LOGIT, -LARGE_LOGIT])
        probes.append(values.to(logits.device))
        return probes[-1]

    tokens = torch.tensor([probe_tokens(lm, 3)], device=device)
    with head_forward(head, made_up):
        out = _logits(model, tokens)
    if len(probes) != 1 or probes[0].shape != out.shape:
        raise ModelRefusedError(
            f"{_name(lm)}: its logits are not those of one output head ({len(probes)} calls of "
            f"{type(head).__name__} in a pass), expected a causal LM with one; use another model"
        )
    small, _, large, _ = out[0, -1, :4].tolist()
    scale = large / LARGE_LOGIT
    transform = LogitTransform(scale=_rounded(scale))
    if abs(small / SMALL_LOGIT - scale) > 1e-3 * abs(small / SMALL_LOGIT):  # large ones are held back
        scale = _rounded(small / SMALL_LOGIT)
        transform = LogitTransform(cap=abs(large) / abs(scale) if scale else None, scale=scale)
    wrong = (transform(probes[0]) - out).abs().max() / (1 + out.abs().clamp(max=100).max())
    if not transform.scale or not wrong < 1e-4:
        raise ModelRefusedError(
            f"{_name(lm)}: its logits are neither a multiple of its head's nor capped by a tanh (they differ by "
            f"{float(wrong):.1g}), expected one of these; use another model"
        )
    return transform


def _logits(model: ScoringModel, tokens: torch.Tensor) -> torch.Tensor:
    """The logits that transformers itself gives tokens [B, T]: [B, T, V], float32."""
    try:
        return model.plain_logits(tokens)
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ModelRefusedError(
            f"{_name(model.lm)}: transformers cannot run it on tokens alone ({what}), expected a text-only causal LM; "
            "use another model"
        ) from None


def _rounded(scale: float) -> float:
    """Rounded to six digits, the precision of float32: 1, and not 0.99999994."""
    return float(f"{scale:.6g}")


# -------------------------------------------------------------------------------------------------------- probe


@dataclass(frozen=True)
class _Probe:
    """Four short sequences, three of them with one prompt, and their responses' logprobs from transformers.

    Of these three, the second begins like no other one, and the third as the first does.
    """

    name: str
    transform: LogitTransform
    sequences: list[tuple[list[int], list[int]]]  # prompt, response
    expected: torch.Tensor  # float32 [S], in nats
    tolerance: float
    device: torch.device
    longest: int  # tokens in a sequence of the run
    far: bool  # whether one sequence of a pass is to be that long
    may_be_one_row: bool  # whether the layers may take packed attention

    @classmethod
    @torch.no_grad()
    def of(cls, loader: _Loader) -> _Probe:
        model, device = loader.scoring(_Way("eager", "padded")), loader.device
        lm, longest = model.lm, loader.longest(model.lm)
        transform = logit_transform(model, device)
        tokens = probe_tokens(lm, 27)
        prompt, other = tokens[:5], tokens[20:23]
        one, another, third = tokens[5:12], tokens[12:17], tokens[5:8] + tokens[17:20]
        sequences = [(prompt, one), (prompt, another), (prompt, third), (other, tokens[23:27])]
        before = _versions(lm)
        logprobs, nexts, widest = [], [], 1.0
        with short_windows(lm, longest):
            for prompt, response in sequences:
                logits = _logits(model, torch.tensor([prompt + response], device=device))[0, len(prompt) - 1 : -1]
                widest = max(widest, float((logits - logits.mean(-1, keepdim=True)).abs().max()))
                scored = torch.log_softmax(logits, dim=-1)
                nexts.append(scored[0])
                logprobs.append(scored.gather(-1, torch.tensor(response, device=device)[:, None])[:, 0].cpu())
        tolerance = TOLERANCE[torch.float32] * widest
        if changed := [name for name, version in _versions(lm).items() if before[name] != version]:
            raise ModelRefusedError(f"{_name(lm)}: scoring changes its weights ({changed[0]}); use another model")
        if not (gap := float((nexts[0] - nexts[1]).abs().max())) <= tolerance:
            raise ModelRefusedError(
                f"{_name(lm)}: its tokens depend on those after them (by {gap:.2g} nats), expected a causal LM; "
                "set is_decoder in its config.json, or use another model"
            )
        far, one_row = loader.is_unusual(lm), may_be_packed(lm)
        return cls(_name(lm), transform, sequences, torch.cat(logprobs), tolerance, device, longest, far, one_row)

    def compare(self, model: ScoringModel, way: _Way) -> str | None:
        """What is wrong with computing passes this way; None: nothing."""
        half = way.attn == "flash_attention_2"
        tolerance = self.tolerance * (TOLERANCE[torch.bfloat16] / TOLERANCE[torch.float32] if half else 1.0)
        # The padded form of packed attention too: canaries are scored by it, and passes where a reference is padded.
        for packing in dict.fromkeys((way.packing, "padded")):
            learns = packing == way.packing
            with (
                short_windows(model.lm, self.longest),
                torch.autocast(self.device.type, torch.bfloat16, enabled=half),
                torch.set_grad_enabled(learns),
            ):
                got, compared = self._score(model, packing, learns=learns)
            gap = float((got - self.expected)[compared].abs().max())
            if not gap <= tolerance:  # nan is not
                return f"they differ from transformers by {gap:.2g} nats, and {tolerance:.1g} is rounding"
        return None

    def _score(self, model: ScoringModel, packing: Packing, *, learns: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs [S] from passes like those of training, and which of them [S] to compare.

        `learns`: a backward pass must work too, which some models support only in training mode. Raises ValueError for
        a gradient that is not finite: what a forward pass leaves out shows there.
        """
        [pass_] = split_into_microbatches(self._batch(), max_tokens=1000, packing=packing)
        compared = torch.ones(len(self.expected), dtype=torch.bool)
        position_ids = pass_.position_ids
        if self.far:
            # The last sequence of the pass moves as far as sequences of the run may reach.
            last = sum(map(len, self.sequences[-1]))
            if position_ids is None:
                position_ids = torch.arange(pass_.input_ids.shape[1]).expand(*pass_.input_ids.shape).clone()
                position_ids[-1] += self.longest - position_ids.shape[1]
            else:
                position_ids = position_ids.clone()
                position_ids[:, 1 - last :] += self.longest - last
            compared[-len(self.sequences[-1][1]) :] = False
        pass_ = replace(pass_, position_ids=position_ids).to(self.device)
        embedded: list[torch.Tensor] = []

        def to_derive_by(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
            embedded.append(out.detach().requires_grad_(learns))
            return embedded[-1].clone()  # which the model may change in place

        embeddings: nn.Module = model.lm.get_input_embeddings()  # type: ignore[assignment]
        hook = embeddings.register_forward_hook(to_derive_by)
        try:
            scored, _ = score_microbatch(model, pass_)
        finally:
            hook.remove()
        if learns:
            [gradient] = torch.autograd.grad(scored.sum(), embedded[0], allow_unused=True)
            if gradient is not None and not gradient.isfinite().all():
                raise ValueError("the gradient of its embeddings is not finite")
        scored = scored.detach()
        return torch.zeros(len(compared)).scatter(0, pass_.batch_positions.cpu(), scored.float().cpu()), compared

    def _batch(self) -> Any:
        """As much of a `TrainBatch` as a pass is cut from."""
        responses = [token for _, response in self.sequences for token in response]
        none = torch.zeros(len(responses))
        return SimpleNamespace(
            prompt_tokens=torch.tensor([token for prompt, _ in self.sequences for token in prompt]),
            response_tokens=torch.tensor(responses),
            prompt_lengths=torch.tensor([len(prompt) for prompt, _ in self.sequences]),
            response_lengths=torch.tensor([len(response) for _, response in self.sequences]),
            loss_mask=none.bool(),
            behavior_logprobs=none,
            policy_versions=none.long(),
            advantages=none,
            temperatures=torch.ones(len(self.sequences)),
            prompt_tensors=None,
            token_tensors=None,
        )


@contextmanager
def short_windows(lm: PreTrainedModel, longest: int) -> Iterator[None]:
    """While it is active, layers that do not see all of `longest` tokens see only a few."""
    changed: list[tuple[Any, str, int]] = []
    parts: Iterable[Any] = {id(p): p for m in lm.modules() for p in (m, *_configs(getattr(m, "config", None)))}.values()
    for part in parts:
        for name in WINDOWS:
            value = vars(part).get(name) if hasattr(part, "__dict__") else None
            if isinstance(value, int) and SHORT_WINDOW < value < longest:
                changed.append((part, name, value))
                setattr(part, name, SHORT_WINDOW)
    try:
        yield
    finally:
        for part, name, value in changed:
            setattr(part, name, value)


def probe_tokens(lm: PreTrainedModel, number: int) -> list[int]:
    """Ids from all over the vocabulary, none of which has a special meaning in the model's code."""
    special: set[int] = set()
    for config in _configs(lm.config):
        for name, value in vars(config).items():
            if name.endswith(("_id", "_ids", "_index")):
                special |= {v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)}
    embeddings: Any = lm.get_input_embeddings()
    size = min(lm.config.get_text_config().vocab_size, len(embeddings.weight))
    plain = [token for token in range(min(size, 50_000)) if token not in special]
    step = math.floor(len(plain) * 0.618) or 1
    return [plain[(1 + i * step) % len(plain)] for i in range(number)]


def _versions(lm: PreTrainedModel) -> dict[str, int]:
    """How often each tensor of the model was modified."""
    return {name: tensor._version for name, tensor in saved_tensors(lm).items()}


def _name(lm: PreTrainedModel) -> str:
    return f"{type(lm).__name__} ({lm.config.model_type})"

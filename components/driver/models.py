"""What can be known about a model before loading it: its config.json, its size, and whether it is available at all.

A hub id is looked up in the local cache, then requested once, with a deadline: libraries that load models retry for
a minute or more.
"""

from __future__ import annotations

import importlib
import json
import math
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.engines import is_local_path
from ..config.inputs import ModelInit
from ..config.model_files import INDEX, DamagedWeights, tensors_in
from ..config.paths import is_file, user_path
from ..failures import Refused
from ..integrity import DamagedFileError, check_folder

HUB_TIMEOUT_S = 10.0
SHAPES = Path(__file__).with_name("shapes.json")
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_seq_length",
    "seq_length",
)
_VOCABULARY_OF_A_NEW_TOKENIZER = 256


class Unreachable(OSError):
    """The hub did not answer, so it is unknown whether the requested model or data set exists."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder. `num_parameters` is counted if the weights are available, else computed from the sizes.

    `layer_parameters`: of one decoder layer; `outer_parameters`: of embeddings, head and last norm. `inner_size`: how
    wide a layer's MLP is for one token, all of its experts together.
    """

    num_parameters: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    inner_size: int
    experts_per_token: int
    vocab_size: int
    layer_parameters: int
    outer_parameters: int

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


def read_model_config(key: str, path: str) -> dict[str, Any] | None:
    """The config.json of a folder or hub id; None if it is on the hub but not yet on this machine.

    Raises ValueError in one line, naming `key`, for a model that does not exist or cannot be read, `Unreachable` where
    the hub does not answer.
    """
    file = user_path(path) / "config.json" if is_local_path(path) else _cached(path)
    if file is None:
        _ask_hub(key, path, f"api/models/{path}", what="model")
        return None
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{key}: {file} cannot be read as JSON ({' '.join(str(error).split())[:120]})") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{key}: {file} names no model_type; expected the config.json of a Hugging Face model")
    if config.get("auto_map"):
        _check_known(key, file, config["model_type"])
    return config


def _check_known(key: str, file: Path, model_type: str) -> None:
    """Raise ValueError for a model that only code from its own folder can load."""
    known: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    if model_type not in known.CONFIG_MAPPING_NAMES:
        raise ValueError(
            f"{key}: {file} names code of its own (auto_map, model_type {model_type[:60]!r}), which Leeway never runs "
            "(trust_remote_code); expected a model that transformers knows; choose another one"
        )


def check_weights(key: str, path: str) -> None:
    """Compare a local model with the checksums that are in its folder if Leeway wrote it; reads all of it.

    Raises `Refused` in one line, naming `key`.
    """
    try:
        check_folder(user_path(path))
    except DamagedFileError as error:
        raise Refused(f"{key}: got {path}, but {error}; or take other weights") from None


def check_safetensors(key: str, path: str) -> None:
    """Raise `Refused` in one line, naming `key`, for a model's folder without weights that the trainer reads."""
    folder = user_path(path)
    if not any(is_file(folder / name) for name in ("model.safetensors", INDEX)):
        raise Refused(
            f"{key}: got {path} (no model.safetensors in it, and no {INDEX}), expected weights in safetensors, which "
            "alone are read; save it once more with transformers, in which save_pretrained writes them"
        )


def check_tokenizer(key: str, path: str) -> None:
    """Raise `Refused` in one line, naming `key`, for a model's folder without a tokenizer, or with one that is none."""
    folder = user_path(path)
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
        except Exception as error:  # a bare one, from Rust
            why = " ".join(str(error).split())[:120]
            expected = "expected a tokenizer as transformers saves it; copy the model again"
            raise Refused(f"{key}: got {file}, which is no tokenizer ({why}), {expected}") from None
    elif not any(next(folder.glob(name), None) for name in _TOKENIZERS):
        raise Refused(
            f"{key}: got {path} (no tokenizer in it), expected tokenizer.json or another one beside the weights; copy "
            "it there, or save it with transformers: AutoTokenizer.from_pretrained(ID).save_pretrained(FOLDER)"
        )


_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Files that come with one, of which transformers knows many kinds."""


def check_dataset_exists(path: str) -> None:
    """Raises like `read_model_config` if the data set `path` is neither in the local cache nor on the hub."""
    datasets: Any = importlib.import_module("datasets")
    if not (Path(datasets.config.HF_DATASETS_CACHE) / path.replace("/", "___").lower()).exists():
        _ask_hub("task.path", path, f"api/datasets/{path}", what="data set")


def longest_input(config: dict[str, Any]) -> int | None:
    """The longest input, in tokens, of a model with this config, rotary scaling included; None: not stated."""
    text = _text_part(config)
    found = [v for name in _POSITIONS if type(v := text.get(name)) is int and v > 0]
    if not found:
        return None
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    factor = rope.get("factor", 1) if isinstance(rope, dict) else 1
    return int(max(found) * max(1.0, factor if isinstance(factor, int | float) else 1.0))


# What a family has besides its matrices, by model_type: biases of queries, keys and values; norms of queries and keys.
_WITH_QKV_BIAS = {"qwen2", "qwen2_moe"}
_WITH_QK_NORMS = {"qwen3", "qwen3_moe"}


def shape_of(config: dict[str, Any], folder: Path | None = None) -> ModelShape | None:
    """Sizes from a config.json (and the weights in `folder`); None if it does not state them in a known way.

    Exact for Llama, Mistral, Qwen2, Qwen2.5, Qwen3 and its mixtures of experts, else without small tensors.
    """
    text = _text_part(config)

    def size(*names: str, default: int = 0) -> int:
        return next((v for name in names if type(v := text.get(name)) is int and v > 0), default)

    hidden, layers = size("hidden_size", "n_embd", "d_model"), size("num_hidden_layers", "n_layer", "num_layers")
    heads = size("num_attention_heads", "n_head", "num_heads")
    if not (hidden and layers and heads):
        return None
    kv_heads, head_dim = size("num_key_value_heads", default=heads), size("head_dim", default=hidden // heads)
    inner = size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    experts = size("num_experts", "num_local_experts", "n_routed_experts")
    expert_inner, per_token = size("moe_intermediate_size", default=inner), size("num_experts_per_tok", default=1)
    kind, qkv = text.get("model_type", config.get("model_type")), head_dim * (heads + 2 * kv_heads)
    layer = hidden * (qkv + heads * head_dim) + 2 * hidden
    layer += experts * (3 * hidden * expert_inner + hidden) if experts else 3 * hidden * inner
    layer += qkv if kind in _WITH_QKV_BIAS or text.get("attention_bias") is True else 0
    layer += hidden if text.get("attention_bias") is True else 0
    layer += 2 * head_dim if kind in _WITH_QK_NORMS else 0
    layer += 2 * inner + hidden if text.get("mlp_bias") is True else 0
    vocabulary = size("vocab_size", default=_VOCABULARY_OF_A_NEW_TOKENIZER)
    outer = vocabulary * hidden * (1 if text.get("tie_word_embeddings", True) else 2) + hidden
    counted = None if folder is None else _count_parameters(folder)
    return ModelShape(
        num_parameters=counted or layers * layer + outer,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        inner_size=per_token * expert_inner if experts else inner,
        experts_per_token=per_token if experts else 0,
        vocab_size=vocabulary,
        layer_parameters=layer,
        outer_parameters=outer,
    )


def shape_named(name: str) -> ModelShape:
    """Of a model in shapes.json, or of a folder with a config.json; its weights need not be there.

    Raises ValueError in one line for any other name.
    """
    known = json.loads(SHAPES.read_text(encoding="utf-8"))
    if name in known:
        shape = shape_of(known[name])
    else:
        folder = user_path(name)
        if not is_file(folder / "config.json"):
            raise ValueError(
                f"--model: got {name}, expected a folder with a config.json, or one of {', '.join(known)}; "
                "name one of them"
            )
        shape = shape_of(read_model_config("--model", str(folder)) or {}, folder)
    if shape is None:
        raise ValueError(
            f"--model: {name}/config.json does not say how large the model is; expected hidden_size, "
            "num_hidden_layers and num_attention_heads; name another one"
        )
    return shape


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Multimodal models keep the decoder's settings in a separate section."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def shape_of_model(path: str | None, init: ModelInit | None) -> ModelShape | None:
    """Sizes of a local model, or of one that is still to be built, without network access. None if unknown."""
    if init is not None:
        return shape_of(init.options)
    file = None if path is None else user_path(path) / "config.json" if is_local_path(path) else _cached(path)
    if file is None or not is_file(file):
        return None
    try:
        return shape_of(json.loads(file.read_bytes()), file.parent)
    except (OSError, ValueError, RecursionError):
        return None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The headers may carry the user's token, which must only go to the hub."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _count_parameters(folder: Path) -> int | None:
    """The number of elements of all tensors in the safetensors files of `folder`, from their headers."""
    try:
        entries = [entry for file in folder.glob("*.safetensors") for entry in tensors_in(file)[1].values()]
        return sum(math.prod(entry["shape"]) for entry in entries) or None
    except (OSError, DamagedWeights, KeyError, TypeError):
        return None


def _cached(path: str) -> Path | None:
    """The config.json of a hub id in the local cache."""
    hub: Any = importlib.import_module("huggingface_hub")
    found = hub.try_to_load_from_cache(path, "config.json")
    return Path(found) if isinstance(found, str) else None


def _ask_hub(key: str, path: str, address: str, *, what: str) -> None:
    """Ask once whether `path` exists; only the status code is read."""
    hub: Any = importlib.import_module("huggingface_hub")
    here = f"{key}: got {path}, which is not on this machine"
    if hub.constants.HF_HUB_OFFLINE:
        raise Unreachable(f"{here}, and HF_HUB_OFFLINE is set; unset it, or set {key} to a folder")
    headers = hub.utils.build_hf_headers(library_name="leeway")
    request = urllib.request.Request(f"{hub.constants.ENDPOINT}/{address}", method="HEAD", headers=headers)
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=HUB_TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
        if error.code < 400:  # it has moved, so it exists
            return
        if error.code in (401, 403, 404):
            why = "may not be read with this login" if error.code == 403 else f"is no public {what} there"
            raise ValueError(
                f"{key}: got {path}, which {why} ({hub.constants.ENDPOINT} answers {error.code}); "
                f"check its name, log in with `hf auth login`, or set {key} to a folder"
            ) from None
        raise Unreachable(f"{here}; {hub.constants.ENDPOINT} answers {error.code}: try again later") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise Unreachable(
            f"{here}, and {hub.constants.ENDPOINT} cannot be reached ({why}); connect, or set {key} to a folder "
            f"(`leeway download {what.replace(' ', '')} {path} --into FOLDER` makes one)"
        ) from None

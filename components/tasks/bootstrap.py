"""A fresh small model and its tokenizer, for runs that start from scratch (`model.init`)."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .tiny_tokenizer import build_tokenizer


def build_model_dir(init: Any, texts: Iterable[str], out_dir: str | Path, *, seed: int, dtype: str = "float32") -> Path:
    """Write a model folder (config, generation config, safetensors, tokenizer) and return it.

    `init` is a `ModelInit`: architecture (a transformers model type), options (its config's fields), init_std. The
    tokenizer is made from `texts`. The same arguments give the same bytes. Raises ValueError for an unknown
    architecture or option.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    out = Path(out_dir)
    max_length = int(init.options.get("max_position_embeddings", 1024))
    tokenizer = build_tokenizer(texts, max_length=max_length)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = _model_config(init, vocab_size=len(tokenizer), **ids)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
            raise ValueError(
                f"model.init: {init.architecture} with {dict(init.options)} cannot be built: {error}"
            ) from None
    # Drawn in float32 and then rounded: the same seed starts the same model in every dtype.
    model = model.to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(**ids)
    out.mkdir(parents=True, exist_ok=True)
    had_progress_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(out)
    if had_progress_bar:
        logging.enable_progress_bar()
    tokenizer.save_pretrained(out)
    return out


def unbuilt_model(init: Any) -> Any:
    """The model of `init` without weights, and with another vocabulary than the one that its task will give it."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(_model_config(init))


def _model_config(init: Any, **fields: Any) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = [name for name in CONFIG_MAPPING_NAMES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    if init.architecture not in known:
        near = get_close_matches(init.architecture, known, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"model.init.architecture: got {init.architecture!r}, expected a transformers model type like {near!r}"
        )
    # transformers silently stores unknown options, so a misspelt one would build another model without an error.
    default = AutoConfig.for_model(init.architecture)
    for key in init.options:
        if not hasattr(default, key):
            near = get_close_matches(key, default.to_dict(), n=1, cutoff=0.0)[0]
            raise ValueError(f"model.init.options: {init.architecture} has no {key!r}; did you mean {near!r}?")
        if key in fields:
            raise ValueError(f"model.init.options: {key!r} follows from the tokenizer; remove it")
    return AutoConfig.for_model(init.architecture, **{"initializer_range": init.init_std, **init.options, **fields})

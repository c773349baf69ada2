"""A model's vocabulary size: a model that scores the policy's samples must know all of its tokens."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def vocabulary_size(lm: PreTrainedModel) -> int:
    """Rows of a model's embedding, sharded or not."""
    embeddings = lm.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    return embeddings.num_embeddings


def check_vocabulary(key: str, path: str, lm: PreTrainedModel, *, policy: PreTrainedModel) -> None:
    """Raise ValueError naming setting `key` if the model at `path` knows fewer tokens than the policy."""
    if (known := vocabulary_size(lm)) < (needed := vocabulary_size(policy)):
        raise ValueError(
            f"{key}: got {path}, which knows {known} tokens, expected the policy's {needed}; "
            "choose a model with the policy's tokenizer"
        )

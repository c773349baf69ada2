"""Checks that token ids mean the same to two models, because one scores token ids that the other has sampled."""

from __future__ import annotations

from typing import Any


def check_same_tokens(key: str, path: str, policy_path: str) -> None:
    """Raise ValueError naming setting `key` if the model at `path` has a different token under one of the policy's ids.

    Ids that only one of them has are not a conflict: some models pad their vocabulary. A model without a tokenizer
    cannot be compared; the trainer still compares the vocabulary sizes.
    """
    from transformers import AutoTokenizer

    try:
        other = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError):
        return
    different = contradictions(AutoTokenizer.from_pretrained(policy_path, trust_remote_code=False), other)
    if different:
        token_id, own, others = different[0]
        raise ValueError(
            f"{key}: got {path}, for which token {token_id} is {others!r}, expected a model with the policy's "
            f"tokenizer, for which it is {own!r} ({len(different)} tokens differ); choose one of the policy's family"
        )


def contradictions(policy: Any, other: Any) -> list[tuple[int, str, str]]:
    """(id, the policy's token, the other model's token) for every id whose tokens differ."""
    own, others = (_tokens_by_id(tokenizer) for tokenizer in (policy, other))
    return [(i, own[i], others[i]) for i in sorted(own.keys() & others.keys()) if own[i] != others[i]]


def _tokens_by_id(tokenizer: Any) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}

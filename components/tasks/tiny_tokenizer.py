"""A small tokenizer made from the task's own text: frequent words whole, digits single, bytes for the unseen."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

PAD, EOS = "<pad>", "<eos>"

# Exactly Qwen2's rule, whatever the architecture: for the model type qwen2, transformers 5 rebuilds the tokenizer as
# its own Qwen2Tokenizer from vocabulary and merges alone, and would silently replace any other rule when the model is
# loaded.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(texts: Iterable[str], *, max_vocab_size: int = 4096, max_length: int = 1024) -> Any:
    """A byte-level BPE tokenizer (transformers) trained on `texts`; <pad> is 0, <eos> is 1, no BOS.

    Any text (in Unicode's NFC form) decodes to itself. At most `max_vocab_size` entries, padded to a multiple of 8 for
    matrix kernels. The same texts give the same tokenizer.
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    def around(model: BPE) -> Tokenizer:
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    trained = around(BPE())
    trainer = BpeTrainer(
        vocab_size=max_vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = model["vocab"]
    for i in range(-len(vocab) % 8):
        vocab[f"<unused{i}>"] = len(vocab)
    return PreTrainedTokenizerFast(
        tokenizer_object=around(BPE(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]])),
        pad_token=PAD,
        eos_token=EOS,
        unk_token=PAD,  # never produced (every byte has a token); unset, Qwen2Tokenizer would add one of its own
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )

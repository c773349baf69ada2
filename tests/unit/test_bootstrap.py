"""A model from nothing: loads through the Auto classes, the same for the same seed, with a lossless tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leeway.tasks import Prompter
from leeway.tasks.bootstrap import build_model_dir
from leeway.tasks.tiny_tokenizer import build_tokenizer

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"
OPTIONS = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
}
PROMPT = "State the final answer to the following arithmetic problem: 42 - 25 ="
TEXTS = [PROMPT.replace("42", str(i)).replace("25", str(j)) for i in range(10, 99, 7) for j in range(10, 99, 7)] + [
    "-12",
    "99",
]
HARD = ["-12", "- 12", " 42 -  25\n\n=7", "unseen wörds, 日本語 🙂\t<x>", "don't  stop", "", " "]


def model_init(architecture="qwen2", **options):
    return SimpleNamespace(architecture=architecture, options={**OPTIONS, **options}, init_std=0.05)


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


# qwen2 is the one whose tokenizer transformers rebuilds as its own class at loading.
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_loads_through_the_auto_classes(tmp_path, architecture):
    build_model_dir(model_init(architecture), TEXTS, tmp_path, seed=0, dtype="bfloat16")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    made = build_tokenizer(TEXTS)
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size % 8 == 0
    assert len(tokenizer) == len(made) == model.config.vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    for text in [PROMPT, *HARD]:
        assert tokenizer(text)["input_ids"] == made(text)["input_ids"]
    assert Prompter.load(tmp_path).stop_token_ids == [1]
    assert model.generation_config.eos_token_id == 1
    tokens = torch.tensor([Prompter.load(tmp_path).encode(PROMPT)])
    assert torch.isfinite(model(tokens).logits).all()
    assert abs(model.state_dict()["model.embed_tokens.weight"].float().std().item() - 0.05) < 0.005


@pytest.mark.slow
def test_same_seed_same_bytes(tmp_path):
    before = torch.random.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build_model_dir(model_init(), iter(TEXTS), tmp_path / name, seed=seed)
    assert torch.equal(before, torch.random.get_rng_state())
    first = digests(tmp_path / "a")
    assert first == digests(tmp_path / "b")
    build_model_dir(model_init(), TEXTS, tmp_path / "a", seed=0)  # over an existing one
    assert first == digests(tmp_path / "a")
    other = digests(tmp_path / "c")
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["tokenizer.json"] == other["tokenizer.json"]


@pytest.mark.parametrize("text", [PROMPT, *HARD])
def test_every_text_survives(text):
    tokenizer = build_tokenizer(TEXTS)
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert tokenizer(tokenizer.decode(tokens))["input_ids"] == tokens


def test_words_are_whole_and_digits_single():
    tokenizer = build_tokenizer(TEXTS)
    tokens = tokenizer(PROMPT)["input_ids"]
    assert len(tokens) <= 20
    pieces = [tokenizer.decode([t]) for t in tokens]
    assert " arithmetic" in pieces
    assert pieces[-7:] == ["4", "2", " -", " ", "2", "5", " ="]
    assert [tokenizer.decode([t]) for t in tokenizer("-12")["input_ids"]] == ["-", "1", "2"]


def test_prompter_round_trip():
    prompter = Prompter(build_tokenizer(TEXTS))
    prompt, response = prompter.encode_example(PROMPT, "-12")
    assert prompter.decode(response) == "-12"
    assert response[-1] == 1
    assert 1 not in prompt


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (model_init("qwem2"), "architecture.*qwen2"),
        (model_init(hiden_size=3), "no 'hiden_size'.*'hidden_size'"),
        (model_init(vocab_size=7), "follows from the tokenizer"),
        (model_init(eos_token_id=7), "follows from the tokenizer"),
    ],
)
def test_wrong_init_is_refused(tmp_path, init, message):
    with pytest.raises(ValueError, match=message):
        build_model_dir(init, TEXTS, tmp_path / "m", seed=0)
    assert not (tmp_path / "m").exists()


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs ../shared/data/gsm8k beside the checkout")
def test_gsm8k_text():
    rows = [json.loads(line) for line in (GSM8K / "train.jsonl").read_text().splitlines()]
    texts = [text for row in rows for text in (row["question"], row["answer"])]
    tokenizer = build_tokenizer(texts)
    assert len(tokenizer) <= 4096
    unseen = [json.loads(line)["question"] for line in (GSM8K / "test.jsonl").read_text().splitlines()]
    for text in texts[:200] + unseen:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert sum(len(tokenizer(t)["input_ids"]) for t in unseen) < 0.4 * sum(map(len, unseen))

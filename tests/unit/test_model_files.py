"""A model's folder, looked at without loading it: files that are not whole, heads that no engine has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from leeway.config import find_recipe, load_config
from leeway.config.check import check_run
from leeway.config.hardware import Hardware
from leeway.config.model_files import damage, head_size, only_attends
from leeway.config.names import cpu_head_sizes
from leeway.monitor.logs import last_error

MACHINE = Hardware(num_gpus=0, cores=(0, 1, 2, 3), memory_gib=64.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two shards."""
    shards = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}
    for name, tensors in shards.items():
        save_file({tensor: torch.ones(5, 3) for tensor in tensors}, tmp_path / name, metadata={"format": "pt"})
    index = {"weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 2}))
    return tmp_path


SHARD = "model-00002-of-00002.safetensors"


def cut(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:num_bytes])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda f: cut(f / SHARD, -1), rf"{SHARD} \(\d+ bytes, \d+ by its header\)"),
    "too long": (lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes() + b"x"), r"bytes, \d+ by its header"),
    "cut in its header": (lambda f: cut(f / SHARD, 20), r"20 bytes, which end before its header does"),
    "empty": (lambda f: cut(f / SHARD, 0), r"0 bytes, which end before"),
    "absent": (lambda f: (f / SHARD).unlink(), rf"{SHARD} \(nothing there, though .*index\.json names it"),
    "without a tensor": (lambda f: save_file({"d": torch.ones(2)}, f / SHARD), r"without c, which .*index\.json"),
    "no header": (lambda f: (f / SHARD).write_bytes((5).to_bytes(8, "little") + b"12345"), "its header is not"),
    "deep header": (lambda f: (f / SHARD).write_bytes((10**5).to_bytes(8, "little") + b"[" * 10**5), "its header is"),
    "wrong header": (lambda f: (f / SHARD).write_bytes((9).to_bytes(8, "little") + b'{"a": 11}'), "its header is not"),
    "LFS pointer": (lambda f: (f / SHARD).write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "no index": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "no JSON with a weight_map"),
    "a way out": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a"}}'),
        "nothing there",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_are_not_whole_are_named(folder: Path, fault: str) -> None:
    assert damage(folder) is None
    make, match = FAULTS[fault]
    make(folder)
    found = damage(folder)
    assert found is not None
    assert re.search(match, found), found


def test_a_single_file_is_looked_at_too_and_other_formats_are_not(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    assert damage(tmp_path) is None
    save_file({"a": torch.ones(9)}, tmp_path / "model.safetensors")
    assert damage(tmp_path) is None
    cut(tmp_path / "model.safetensors", -4)
    assert "model.safetensors (" in str(damage(tmp_path))


def problems(folder: Path, *overrides: str, recipe: str = "async_rl") -> list[str]:
    options = ["model.init=null", f"model.path={folder}", f"output_dir={folder}/runs", *overrides]
    return [
        str(problem)
        for problem in check_run(load_config("quickstart", options, recipe=recipe), find_recipe(recipe), MACHINE)
    ]


def test_damaged_weights_are_a_problem_of_every_model_before_anything_starts(folder: Path) -> None:
    assert problems(folder) == []
    cut(folder / SHARD, -1)
    (found,) = problems(folder)
    assert found.startswith(f"model.path: damaged weights: got {folder}/{SHARD} (")
    assert "expected whole files" in found
    other = ["algorithm.kl.coef=0.1", f"algorithm.reference_path={folder}"]
    assert [f.partition(":")[0] for f in problems(folder, *other)] == ["model.path", "algorithm.reference_path"]


def test_heads_that_the_engine_has_no_kernel_for_are_a_problem_on_a_cpu(folder: Path) -> None:
    if not cpu_head_sizes():
        pytest.skip("vLLM is not installed")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 80, "num_attention_heads": 2}))
    (found,) = problems(folder)
    assert found.startswith("model.path: got attention heads of size 40, expected one of 32, 48, 64, 80,")
    assert problems(folder, recipe="sft") == [], "no engine"


def test_the_size_of_a_head_is_read_where_it_is_said() -> None:
    assert head_size({"hidden_size": 64, "num_attention_heads": 2}) == 32
    assert head_size({"hidden_size": 64, "num_attention_heads": 2, "head_dim": 16}) == 16
    assert head_size({"text_config": {"head_dim": 256}, "head_dim": 1}) == 256
    assert head_size({"hidden_size": 64, "num_attention_heads": 2, "kv_lora_rank": 8}) is None
    assert head_size({"hidden_size": 64}) is None


def test_a_log_says_why_an_engine_did_not_start(tmp_path: Path) -> None:
    log = tmp_path / "generator-0.log"
    log.write_text(
        "(EngineCore pid=7) ERROR 11-21 [core.py:1510] ValueError: an earlier one\n"
        "(EngineCore pid=7) ERROR 11-21 [core.py:1510] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-21 [core.py:1510] ValueError: head size 40 is not supported by CPU attention\n"
        "(EngineCore pid=7)   File x.py, line 3\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    )
    but = "Engine core initialization failed"
    assert last_error(log, but=but) == "ValueError: head size 40 is not supported by CPU attention"
    log.write_text("all is well\n")
    assert last_error(log, but=but) is None
    assert last_error(tmp_path / "absent", but=but) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_attention_heads": 9, "hidden_size": 576}, True),
        ({"num_attention_heads": 9, "layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"text_config": {"num_attention_heads": 9}, "vision_config": {"num_conv_layers": 3}}, True),
        ({"num_attention_heads": 9, "layer_types": ["full_attention", "linear_attention"]}, False),
        ({"num_attention_heads": 9, "layer_types": "full_attention"}, False),
        ({"num_attention_heads": 9, "mamba_d_state": 16}, False),
        ({"num_attention_heads": 9, "kv_lora_rank": 512}, False),
        ({"num_attention_heads": 9, "kv_lora_rank": None}, True),
        ({"state_size": 16}, False),
        ({}, False),
    ],
)
def test_a_model_is_known_to_attend_alone_only_where_its_config_names_no_other_layers(config, expected) -> None:
    assert only_attends(config) is expected

"""The type that a model is computed in, where the settings leave it to the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from leeway.config import inputs, load_config, stages, to_yaml
from leeway.config.hardware import has_bfloat16
from leeway.config.schema import Config
from leeway.config.stages import resolve_stages
from leeway.config.tree import Tree

X86 = "processor\t: 0\nflags\t\t: fpu sse2 avx2 {}\n\nprocessor\t: 1\nflags\t\t: fpu amx_bf16\n"


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        (X86.format("avx512f avx512_vnni"), False),
        (X86.format("avx512_bf16"), True),
        (X86.format("amx_tile amx_bf16"), True),
        ("processor : 0\nFeatures : fp asimd sve bf16 i8mm\n", True),
        ("processor : 0\nFeatures : fp asimd\n", False),
        ("", False),
    ],
)
def test_what_a_processor_has_is_read_from_its_flags(cpuinfo: str, has: bool) -> None:
    assert has_bfloat16(cpuinfo) is has


@pytest.fixture(params=[True, False], ids=["with bfloat16", "without"])
def has(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    for module in (inputs, stages):
        monkeypatch.setattr(module, "computes_bfloat16", lambda: request.param)
    return request.param


@pytest.mark.parametrize("model", [{}, {"dtype": "auto"}, {"dtype": "auto", "head_dtype": "float32"}])
def test_auto_is_what_the_device_computes_fast(has: bool, model: dict[str, str]) -> None:
    for device in ("cuda", "cpu"):
        found = Config.model_validate({"model": model, "cluster": {"device": device}}).model
        in_half = has or device == "cuda"
        assert found.dtype == ("bfloat16" if in_half else "float32")
        assert found.head_dtype == (model.get("head_dtype") if in_half else None), "all of it is in float32 then"
    assert Config.model_validate({"model": model}).model.dtype == "bfloat16", "a GPU is the default"


def test_what_is_set_is_kept(has: bool) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        assert Config.model_validate({"model": {"dtype": dtype}, "cluster": {"device": "cpu"}}).model.dtype == dtype


def test_a_run_writes_down_the_type_itself(has: bool, tmp_path: Path) -> None:
    """So that it goes on in it when it is resumed on another machine."""
    file = tmp_path / "mine.yaml"
    file.write_text("model: {path: org/model}\ntask: {path: mine.jsonl}\ncluster: {device: cpu}\ntrain: {steps: 2}\n")
    assert f"dtype: {'bfloat16' if has else 'float32'}\n" in to_yaml(load_config(str(file)))


@pytest.mark.parametrize(
    ("dtype", "device", "says"),
    [
        ("auto", "cpu", "auto is float32 here"),
        ("bfloat16", "cpu", "float32 is many times as fast"),
        *(("float32", "cpu", ""), (None, "cpu", ""), ("auto", "cuda", ""), ("bfloat16", "cuda", "")),
    ],
)
def test_a_slow_type_is_said_before_the_start(has: bool, dtype: str | None, device: str, says: str) -> None:
    model = {"path": "org/model"} | ({"dtype": dtype} if dtype else {})
    tree: Tree = {"model": model, "task": {"path": "mine.jsonl"}, "cluster": {"device": device}, "train": {"steps": 2}}
    notes = [note for stage in resolve_stages(tree, "async_rl") for note in stage.notes]
    assert [says in note for note in notes] == ([True] if says and not has else [])

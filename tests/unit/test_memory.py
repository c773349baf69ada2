"""What a model of a given size needs: counted as transformers does, measured of real trainers, judged by a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leeway.config import find_recipe, plan_run
from leeway.driver.memory import GIB, Cluster, fit, processes_of, remedies, split_of
from leeway.driver.models import SHAPES, shape_named, shape_of

from ..forked import GIVES_MEMORY_BACK, Forked

MEASURE = f"""
{GIVES_MEMORY_BACK}
import multiprocessing, runpy, sys, tempfile

sys.path.insert(0, "benchmarks")
benchmark = runpy.run_path("benchmarks/memory.py")
with tempfile.TemporaryDirectory() as folder:
    maker = multiprocessing.get_context("fork").Process(target=benchmark["make_model"], args=("medium", 128, folder))
    maker.start()
    maker.join()
    benchmark["measure"]("medium", 128, folder, "trainer", ["train.max_tokens_per_microbatch=512"])
"""
NAMED: dict[str, dict[str, Any]] = json.loads(SHAPES.read_text())
PUBLISHED = {"qwen2.5-7b": 7_615_616_512, "qwen2.5-32b": 32_763_876_352, "qwen3-235b-a22b": 235_093_634_560}


def test_the_named_models_have_their_published_sizes():
    assert {name: shape_named(name).num_parameters for name in NAMED} == PUBLISHED


@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(named, marks=pytest.mark.slow) for named in NAMED.values()),
        {"model_type": "llama", "tie_word_embeddings": True},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        {"model_type": "mistral", "head_dim": 16, "tie_word_embeddings": False},
        {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
        {"model_type": "mixtral", "num_local_experts": 4, "tie_word_embeddings": False},
    ],
    ids=lambda c: f"{c['model_type']}-{len(c)}",
)
def test_parameters_are_counted_as_transformers_has_them(changes):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6}
    sizes = small | {"num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": 0} | changes
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
    shape = shape_of(sizes)
    assert shape is not None
    assert shape.num_parameters == sum(p.numel() for p in lm.parameters())
    assert shape.layer_parameters == sum(p.numel() for p in lm.model.layers[0].parameters())


def settings(*overrides: str) -> Any:
    return plan_run("qwen2_5_3b_async_grpo", "async_rl", ["cluster.device=cuda", *overrides])[-1]


def test_a_part_more_is_memory_more():
    shape, base = shape_named("qwen2.5-7b"), settings("train.num_ranks=4")

    def trainer(*overrides: str) -> Any:
        stage = settings("train.num_ranks=4", *overrides)
        return processes_of(stage.config, stage.recipe, shape)[0]

    rank = processes_of(base.config, base.recipe, shape)[0]
    assert rank.device["weights"] == rank.device["gradients"] == 4 * shape.num_parameters // 4
    assert rank.device["optimizer"] == 8 * shape.num_parameters // 4
    assert trainer("algorithm.kl.coef=0.1").device["reference"] == 4 * shape.num_parameters // 4
    assert trainer("train.gradient_checkpointing=false").device["activations"] > 5 * rank.device["activations"]
    assert trainer("train.max_tokens_per_microbatch=4096").device["activations"] < rank.device["activations"] / 3
    assert trainer("algorithm.entropy_coef=0.01").device["logits"] == 2 * rank.device["logits"]
    offloaded = trainer("train.cpu_offload=true")
    assert "optimizer" not in offloaded.device
    assert offloaded.main["optimizer"] == rank.device["optimizer"]
    moments = trainer("train.cpu_offload_optimizer=true")
    assert moments.main["optimizer"] == rank.device["optimizer"] not in moments.device.values()
    assert moments.device["weights"] == rank.device["weights"]
    reference = trainer("algorithm.kl.coef=0.1", "train.cpu_offload_reference=true")
    assert reference.main["reference"] == 4 * shape.num_parameters // 4
    assert "reference" not in reference.device


def test_processes_of_operators_are_counted_once_on_the_drivers_host():
    shape = shape_named("qwen2.5-7b")
    stage = settings("train.num_ranks=8", "replay.operators=[dedupe]", "replay.operator_processes=6")
    found = {p.name: p for p in processes_of(stage.config, stage.recipe, shape)}
    (held,) = found["operator process"].main.values()
    assert (found["operator process"].number, held) == (6, GIB // 4)
    assert "operator process" not in {p.name for p in processes_of(settings().config, stage.recipe, shape)}

    def in_main_memory(hosts: int, *names: str) -> int:
        cluster = Cluster(hosts=hosts, devices_per_host=16, device_gib=80.0, host_gib=1000.0)
        return fit(stage.config, [found[name] for name in names], cluster)[-1].needed

    ranks = in_main_memory(1, "trainer rank")
    assert in_main_memory(1, "trainer rank", "operator process") == ranks + 6 * held
    assert in_main_memory(2, "operator process") == 6 * held


@pytest.mark.parametrize(
    ("model", "hosts", "fits"),
    [("qwen2.5-7b", 1, True), ("qwen2.5-32b", 1, False), ("qwen3-235b-a22b", 1, False)],
)
def test_a_verdict_says_what_would_make_it_fit(leeway, model, hosts, fits):
    done = leeway("plan", "--model", model, "--hosts", str(hosts), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["fits"] is fits
    assert said["fits"] is all(place["needed"] <= place["room"] for place in said["places"])
    assert said["num_parameters"] == PUBLISHED[model]
    if model != "qwen2.5-32b":
        assert said["would_fit_with"] == []
        return
    again = leeway("plan", "--model", model, "--json", f"train.num_ranks={said['trainer_ranks']}",
                    f"rollout.num_generators={said['engines']}", *said["would_fit_with"])  # fmt: skip
    assert json.loads(again.stdout)["fits"], "what it advises is what fits"


def test_the_largest_part_is_named_in_words(leeway):
    done = leeway("plan", "--model", "qwen2.5-32b")
    assert "GPU of trainer ranks" in done.stdout
    assert "does not fit; the largest part is optimizer" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("does not fit; it would with ")


def test_a_folder_with_a_config_json_is_enough(leeway, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(NAMED["qwen2.5-7b"]))
    done = leeway("plan", "--model", str(tmp_path), "--json")
    assert json.loads(done.stdout)["num_parameters"] == PUBLISHED["qwen2.5-7b"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "nowhere"), "--model: got nowhere, expected a folder with a config.json, or one of qwen2.5-7b"),
        (("--model", "qwen2.5-7b", "--hosts", "0"), "--hosts: got 0, expected 1 or more"),
    ],
)
def test_wrong_questions_are_refused(leeway, arguments, said):
    done = leeway("plan", *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_host_holds_what_its_own_ranks_do():
    """Of two hosts, the first has the trainer and the second the engines: neither has both."""
    cluster = Cluster(hosts=2, devices_per_host=8, device_gib=80, host_gib=1024)
    stage = settings("train.num_ranks=8", "rollout.num_generators=8")
    shape = shape_named("qwen2.5-7b")
    processes = processes_of(stage.config, stage.recipe, shape)
    fullest = next(p for p in fit(stage.config, processes, cluster) if p.name.startswith("main"))
    assert "engine ranks: next version" in fullest.parts
    assert fullest.parts.get("trainer ranks: copy while publishing", 0) == 0
    assert fullest.parts["processes"] < 8 * GIB


def test_an_engine_gets_as_many_devices_as_its_weights_need():
    cluster = Cluster(hosts=16, devices_per_host=8, device_gib=80, host_gib=2048)
    config = split_of(settings().config, shape_named("qwen3-235b-a22b"), cluster)
    assert config.rollout.engine_options.devices == 8
    assert (config.train.num_ranks, config.rollout.num_generators) == (64, 8)
    assert find_recipe("async_rl").generates


def test_no_setting_is_advised_where_none_helps():
    cluster = Cluster(hosts=1, devices_per_host=8, device_gib=80, host_gib=1024)
    assert remedies(settings().config, cluster, lambda _: False) == []


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute of processor
def test_a_real_rank_holds_what_is_counted() -> None:
    """Its peak over two steps with a publication, as the benchmark measures it."""
    root = Path(__file__).resolve().parents[2]
    process = Forked(MEASURE, cwd=root)
    said = process.communicate()
    assert process.returncode == 0, said[-2000:]
    (row,) = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert row["counted_mb"] > 500
    assert row["measured_mb"] == pytest.approx(row["counted_mb"], rel=0.15), row

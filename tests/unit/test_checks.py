"""What is checked before anything starts: `validate` and `run` say the same, in one line, and no folder is made."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leeway.config import Config, Stage, find_recipe, inputs
from leeway.config.inputs import ModelInit
from leeway.config.stages import plan_run
from leeway.driver import estimate, models
from leeway.driver.estimate import _step_s, estimate_stage, memory_problem
from leeway.driver.memory import processes_of
from leeway.driver.models import ModelShape, longest_input, shape_of, shape_of_model

from .conftest import Done

MODEL = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
CONFIG = """
model: {path: ./model, dtype: float32}
task: {path: tasks.jsonl}
env: {reward: exact_match}
rollout: {max_model_len: 256, max_prompt_tokens: 100, max_response_tokens: 100}
train: {steps: 4, groups_per_step: 4}
cluster: {device: cpu}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config, a model whose file of weights is empty, and tasks, all in the working directory of the command."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL))
    (tmp_path / "model/tokenizer_config.json").write_text("{}")
    (tmp_path / "model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "q{i}", "answer": "a"}}\n' for i in range(9)))
    (tmp_path / "mine.yaml").write_text(CONFIG)
    (tmp_path / "parquet.jsonl").write_bytes(b"PAR1\x15\x04")
    (tmp_path / "nested.jsonl").write_text("[" * 50_000)
    (tmp_path / "checked_loss.py").write_text(
        "from leeway import PolicyLoss\n\n\nclass Loss(PolicyLoss):\n    scale: float = 1.0\n\n"
        "    def __call__(self, x):\n        return -x.logprobs * x.advantages * self.scale\n"
    )
    return tmp_path


def both_say(leeway: Callable[..., Done], folder: Path, *overrides: str) -> str:
    """The one line with which `run` refuses, which `validate` says too; nothing was made."""
    before = sorted(folder.iterdir())
    done = leeway("run", "async_rl", "--config", "mine.yaml", *overrides)
    assert done.returncode == 2, (done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    line = lines[0].removeprefix("leeway: refused: ")
    validated = leeway("validate", "mine.yaml", *overrides)
    said = validated.stderr if validated.returncode == 2 else validated.stdout
    assert line in said
    assert "can run it" not in validated.stdout
    assert [p for p in sorted(folder.iterdir()) if p.name != "__pycache__"] == before
    return line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "(no tokenizer in it), expected tokenizer.json"),
        ("{", "which is no tokenizer (EOF while"),
    ],
)
def test_a_model_without_a_tokenizer_is_refused(
    folder: Path, leeway: Callable[..., Done], content: str | None, said: str
) -> None:
    (folder / "model/tokenizer_config.json").unlink()
    if content is not None:
        (folder / "model/tokenizer.json").write_text(content)
    line = both_say(leeway, folder)
    assert line.startswith("model.path: got ")
    assert said in line


def test_a_model_whose_weights_are_no_safetensors_is_refused(folder: Path, leeway: Callable[..., Done]) -> None:
    (folder / "model/model.safetensors").rename(folder / "model/pytorch_model.bin")
    assert "model.path: got ./model (no model.safetensors in it, and no" in both_say(leeway, folder)


def test_validate_says_what_code_will_run_without_importing_it(folder: Path, leeway: Callable[..., Done]) -> None:
    (folder / "mine_too.py").write_text("raise SystemExit(3)\ndef pays(task, text): ...\n")
    done = leeway(
        "validate", "mine.yaml", "--quick", "env.reward=mine_too:pays", "task.mix={}", "eval.tasksets="
        "{rows: {name: sql, path: rows.sqlite, query: select 1},"
        " lakes: {name: python, path: leeway.envs.frozen_lake:lakes, size: 4},"
        " others: {name: python, path: leeway.config.recipe:find_recipe, options: {given: ./mine_too.py}}}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"  env.reward: mine_too:pays ({folder / 'mine_too.py'}) runs with your rights" in done.stdout
    assert "  eval.tasksets.rows.query: a SELECT that reads rows.sqlite: select 1" in done.stdout
    listed = done.stdout.partition("code that will run")[2].partition("\n\n")[0]
    assert "frozen_lake" not in listed, "it is our own, and runs nothing else"
    assert "eval.tasksets.others.path: leeway.config.recipe:find_recipe" in listed, "it runs a file that it is given"
    assert "  model.path: the chat template of ./model, under limits; no other code" in done.stdout


def test_a_model_that_needs_code_of_its_own_is_refused(folder: Path, leeway: Callable[..., Done]) -> None:
    own = {**MODEL, "model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}}
    (folder / "model/config.json").write_text(json.dumps(own))
    (folder / "model/configuration_mine.py").write_text("open('the-attack-was-here', 'w')\n")
    assert "which Leeway never runs (trust_remote_code)" in both_say(leeway, folder)
    (folder / "model/config.json").write_text(json.dumps({**own, "model_type": "llama"}))
    assert leeway("validate", "mine.yaml").returncode == 0
    assert not (folder / "the-attack-was-here").exists()
    assert "is never run" in leeway("validate", "mine.yaml", "rollout.engine={trust_remote_code: true}").stderr


def test_a_config_that_is_right_has_what_it_takes(folder: Path, leeway: Callable[..., Done]) -> None:
    done = leeway("validate", "mine.yaml")
    assert done.returncode == 0, done.stderr
    first, second, third, *rest = done.stdout.splitlines()
    assert (first, second.split(":")[0]) == ("mine.yaml: ok", "this machine")
    assert third == "  can run it: leeway run async_rl --config mine.yaml"
    text = "\n".join(rest)
    assert "max outstanding groups" in text
    assert "memory of a trainer rank" in text
    assert "time" in text
    assert "updates_per_batch" not in text
    assert "updates_per_batch: 1" in leeway("validate", "mine.yaml", "--yaml").stdout
    more = leeway("validate", "mine.yaml", "--quick", "eval.tasksets={sums: {name: jsonl, path: tasks.jsonl}}").stdout
    assert "evaluation: taskset sums" in more


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["task.prompt_key=prompt"], ["tasks.jsonl:1", "no key 'prompt'", "task.prompt_key"]),
        (["task.path=parquet.jsonl"], ["parquet.jsonl", "a parquet file", "task.name=parquet"]),
        (["task.path=nested.jsonl"], ["nested.jsonl:1", "nested too deeply"]),
        (["task.name=parquet", "task.path=no/folder"], ["task.path: missing file", "no/folder"]),
        (["task.name=parquet", "task.path=tasks.jsonl"], ["tasks.jsonl cannot be read as parquet"]),
        (["task.name=hf", "task.path=./no/data"], ["task.path: missing file", "./no/data"]),
        (["task.name=sql", "task.path=tasks.jsonl", "task.query=select a from t"], ["task.query", "not a database"]),
        (["eval.tasksets={a: {name: jsonl, path: no.jsonl}}"], ["eval.tasksets.a.path: missing file"]),
        (["rollout.temperature=2.5"], ["rollout.temperature: got 2.5", "less than or equal to 2"]),
        (["eval.temperature=2.5"], ["eval.temperature: got 2.5", "at most 2"]),
        (["rollout.max_model_len=513"], ["rollout.max_model_len: got 513, expected at most 512", "./model"]),
        (
            ["rollout.engine.name=hf", "model.lora.target_modules=[q_porj]"],
            ["model.lora.target_modules: got 'q_porj', expected some of", "nearest: q_proj"],
        ),
        (
            ["rollout.engine.name=hf", "model.lora.rank=129"],
            ["model.lora.rank: got 129, expected at most 128", "k_proj"],
        ),
        (["rollout.num_generators=9", "cluster.kv_cache_gib=0.01"], ["cores for 9 generators"]),
        (
            ["rollout.engine.pipeline_parallel_size=2"],
            ["pipeline_parallel_size: got 2", "where cluster.device is cpu"],
        ),
        (["output_dir=mine.yaml"], ["output_dir: got", "is a file"]),
        (["output_dir=/proc/nowhere"], ["output_dir: got /proc/nowhere", "cannot be written to"]),
        (["output_dir=" + "d" * 300], ["output_dir: got", "File name too long"]),
        (["env.reward_options={exact_match: {no_such_option: 1}}"], ["no_such_option"]),
        (
            ["algorithm.loss.name=checked_loss:Loss", "algorithm.loss.scael=2"],
            ["algorithm.loss.scael", "checked_loss:Loss takes scale"],
        ),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_before_anything_starts(
    overrides: list[str], parts: list[str], folder: Path, leeway: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    line = both_say(leeway, folder, *overrides)
    for part in parts:
        assert part in line, line


@pytest.mark.slow
@pytest.mark.parametrize("override", ["task.split=validation", "task.answer_key=reply"])
def test_a_wrong_split_or_key_of_a_data_set(override: str, folder: Path, leeway: Callable[..., Done]) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"question": "q", "answer": "a"}])
    datasets.DatasetDict({"train": rows}).save_to_disk(str(folder / "data"))
    chosen = ["task.name=hf", "task.path=./data"]
    assert leeway("validate", "mine.yaml", *chosen).returncode == 0
    assert override.split("=")[1] in both_say(leeway, folder, *chosen, override)


class Hub:
    """The hub, as `urllib` sees it."""

    def __init__(self, answer: Exception | None) -> None:
        self.answer, self.asked = answer, []

    def open(self, request: Any, timeout: float) -> Any:
        assert 0 < timeout <= 10
        self.asked.append((request.get_method(), request.full_url))
        if self.answer is not None:
            raise self.answer
        import io

        return io.BytesIO()


def answers(code: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("https://huggingface.co", code, "", None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        (answers(404), ["model.path: got org/nmae", "no public model", "answers 404"]),
        (answers(401), ["model.path: got org/nmae", "hf auth login"]),
        (answers(503), ["not on this machine", "answers 503"]),
        (urllib.error.URLError("Name or service not known"), ["cannot be reached (Name or service not known)"]),
        (TimeoutError("timed out"), ["cannot be reached (timed out)"]),
    ],
)
def test_a_hub_model_that_cannot_be_had(
    answer: Exception, parts: list[str], folder: Path, leeway: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is asked once, and the run's name stays free."""
    hub = Hub(answer)
    monkeypatch.setattr(models.urllib.request, "build_opener", lambda *_: hub)
    line = both_say(leeway, folder, "model.path=org/nmae")
    assert hub.asked == [("HEAD", "https://huggingface.co/api/models/org/nmae")] * 2
    for part in parts:
        assert part in line, line


@pytest.mark.parametrize("answer", [None, answers(307)])
def test_a_hub_model_that_exists(
    answer: Exception | None, folder: Path, leeway: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.urllib.request, "build_opener", lambda *_: Hub(answer))
    assert "can run it" in leeway("validate", "mine.yaml", "model.path=org/name").stdout


def test_the_longest_input_knows_of_stretched_positions() -> None:
    assert longest_input({"max_position_embeddings": 512}) == 512
    assert longest_input({"text_config": {"n_positions": 64}}) == 64
    assert longest_input({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}) == 2048
    assert longest_input({"hidden_size": 3}) is None


def test_parameters_are_counted_as_transformers_does() -> None:
    """SmolLM2-135M and Qwen2.5-0.5B, by their published sizes."""
    smol = {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    }  # fmt: skip
    qwen = {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    for config, published in ((smol, 134_515_008), (qwen, 494_032_768)):
        shape = shape_of(config)
        assert shape is not None
        assert shape.num_parameters == pytest.approx(published, rel=0.01)
    assert shape_of({"hidden_size": 3}) is None


def stage_of(hidden: int, recipe: str = "async_rl") -> Stage:
    options = {
        "hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 4 * hidden,
        "vocab_size": 1000,
    }  # fmt: skip
    config = Config.model_validate(
        {
            "model": {"init": ModelInit(options=options).model_dump(), "dtype": "bfloat16"},
            "train": {"steps": 10},
            "cluster": {"device": "cpu"},
        }
    )
    return Stage(name="rl", recipe=find_recipe(recipe), config=config, dir=Path("x"))


def memory_of_passes(stage: Stage, shape: ModelShape) -> int:
    """What a trainer's rank has while it computes, and not between two passes."""
    rank = processes_of(stage.config, stage.recipe, shape)[0]
    names = ("gathered weights", "gathered gradients", "activations", "logits")
    return sum(rank.device[name] for name in names)


def test_memory_holds_what_is_certain() -> None:
    from leeway.config import Hardware

    stage = stage_of(256)
    total = estimate_stage(stage).main_memory_bytes
    shape = shape_of(stage.config.model.init.options)  # type: ignore[union-attr]
    assert shape is not None
    # Trainer in float32: weights, gradients, two moments. In bfloat16: its copy to publish, the engine, the version on
    # its way into it, what it loads ahead, and two published ones. KV cache.
    in_passes = memory_of_passes(stage, shape)
    assert in_passes > 0
    held = shape.num_parameters * (4 + 4 + 8 + 2 + 2 + 2 + 2 + 2 * 2) + 2**30
    assert total == held + in_passes
    machine = Hardware(cores=(0, 1), num_gpus=0, memory_gib=16.0)
    assert memory_problem([stage], machine) == ""
    assert "expected more than the" in memory_problem([stage_of(32768)], machine)
    sft = stage_of(256, "sft")
    assert estimate_stage(sft).main_memory_bytes == shape.num_parameters * 16 + memory_of_passes(sft, shape)


SMOLLM2 = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
SHORT = ("train.groups_per_step=64",)
LONG = (
    "train.groups_per_step=16", "rollout.max_response_tokens=256", "rollout.max_model_len=384",
    "model.init.options.max_position_embeddings=384",
)  # fmt: skip
TURNS = (
    "staleness.max_policy_lag=0", "param_server.publish_every=1", "staleness.in_flight=recompute",
    "cluster.placement=turns", "cluster.cpus_per_generator=2", "cluster.cpus_per_trainer=2",
)  # fmt: skip
SENTENCES = (
    *("model.path=./smollm2", "stages.sft=null", "rollout.max_response_tokens=24", "rollout.engine.name=vllm"),
    "stages.async_rl.train.groups_per_step=16",
)
BOUND_4 = ("staleness.max_policy_lag=4", "staleness.in_flight=recompute")
MEASURED = {  # seconds of a step on two cores, from docs/performance.md and docs/log.md
    "quickstart": (("quickstart",), 0.74),
    "short answers": (("quickstart", *SHORT), 0.81),
    "short answers in lockstep": (("quickstart", *SHORT, *TURNS), 1.26),
    "long answers": (("quickstart", *LONG, *BOUND_4), 4.83),
    "long answers in lockstep": (("quickstart", *LONG, *TURNS, "staleness.reorder_window=null"), 7.96),
    "a model of 135 million": (("smollm2_135m", *SENTENCES), 8.0),
    "the same in float32": (("smollm2_135m", *SENTENCES, "model.dtype=float32", "model.head_dtype=null"), 18.0),
}


def step_s(name: str, *overrides: str) -> tuple[float, float]:
    stage = plan_run(name, "async_rl", overrides)[-1]
    init = stage.config.model.init
    shape = shape_of(SMOLLM2) if init is None else shape_of_model(None, init)
    assert shape is not None
    usual, most = (_step_s(stage.config, stage.recipe, shape, usual=usual) for usual in (True, False))
    return usual, most


@pytest.mark.parametrize("measured", MEASURED.values(), ids=MEASURED.keys())
def test_the_time_of_a_step_is_right_within_a_factor_of_two(
    measured: tuple[tuple[str, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, seconds = measured
    for module in (inputs, estimate):  # where these were measured
        monkeypatch.setattr(module, "computes_bfloat16", lambda: True)
    usual, most = step_s(*settings)
    assert usual / 2 <= seconds <= 2 * most
    assert usual <= most <= 4 * usual + 0.2, "a range says something"


def test_a_type_that_a_processor_emulates_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    smollm2 = ("smollm2_135m", "model.path=./smollm2", "model.dtype=bfloat16")
    monkeypatch.setattr(estimate, "computes_bfloat16", lambda: True)
    [fast, _] = step_s(*smollm2)
    monkeypatch.setattr(estimate, "computes_bfloat16", lambda: False)
    [slow, _] = step_s(*smollm2)
    assert slow > 10 * fast


def test_a_groups_prompt_is_computed_once_and_each_answer_for_itself() -> None:
    """But not where each sequence has a row of its own."""
    lengths = ("rollout.max_prompt_tokens=1000", "rollout.max_model_len=1100")
    long_prompts = ("quickstart", *lengths, "model.init.options.max_position_embeddings=1100")
    few, many = (step_s(*long_prompts, f"algorithm.group_size={size}")[1] for size in (2, 16))
    assert many < 1.3 * few
    assert step_s(*long_prompts, "algorithm.group_size=16", "train.packing=padded")[1] > 8 * many

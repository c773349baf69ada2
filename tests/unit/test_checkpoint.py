"""Save, end, load, go on: the same weights as without an end, and nothing half-written is ever loaded."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests import trainers
from tests.trainers import SHARDED, all_rows, free_address
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.kl import KLPenalty
from leeway.algorithms.objective import PolicyObjective
from leeway.config import load_config
from leeway.config.learning import OptimizerConfig
from leeway.driver.checkpoints import Checkpoints
from leeway.integrity import sealed, sums_of
from leeway.runtime.supervisor import Supervisor
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.trainer import checkpoint, saver, writing
from leeway.trainer.actor import TrainerActor
from leeway.trainer.checkpoint import CheckpointError, read_state
from leeway.trainer.convert import convert
from leeway.trainer.export import HFWriter
from leeway.trainer.settings import TrainerSettings
from leeway.trainer.shards import write_safetensors
from leeway.trainer.trainer import Trainer
from leeway.trainer.writing import CheckpointWriteError, turns_of
from leeway.types import TrainBatch, Trajectory, batch_trajectories
from leeway.weights import CanaryPrompts

VOCAB = 40


def save_model(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
    }
    config = AutoConfig.for_model("qwen2", **(options | changes))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    build_tokenizer(["12 + 34 = 46"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def settings_of(path: Path, **changes: Any) -> TrainerSettings:
    objective = PolicyObjective(policy_loss=PPOClip(clip_low=0.2, clip_high=0.28), aggregation="token_mean")
    optimizer = OptimizerConfig(
        lr=0.05, eps=1e-2, weight_decay=0.1, schedule="linear", warmup_steps=3, min_lr_frac=0.1, max_skipped_steps=0
    )
    canary = CanaryPrompts(scored=[[1, 2, 3]], cached=[[4, 5, 6]])
    own = {"objective": objective, "canary": canary, "max_policy_lag": 100, "max_tokens_per_microbatch": 50}
    return trainers.settings_of(path, optimizer=optimizer, **own | {"total_steps": 20} | changes)


@pytest.fixture
def make(model_path: Path, group_of_one_rank: None) -> Iterator[Callable[..., Trainer]]:
    """make(path, **settings) -> a new trainer."""
    threads = torch.get_num_threads()

    def build(path: Path = model_path, **changes: Any) -> Trainer:
        return Trainer(settings_of(path, **changes), rank=0, init_method=free_address())

    yield build
    torch.set_num_threads(threads)


def step_batch(step: int, rank: int = 0, num_ranks: int = 1) -> TrainBatch:
    rng = random.Random(step)
    trajectories = []
    for _ in range(4):
        response = rng.randint(2, 9)
        trajectories.append(
            Trajectory(
                prompt_tokens=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))],
                response_tokens=[rng.randrange(VOCAB) for _ in range(response)],
                loss_mask=[True] * response,
                behavior_logprobs=[rng.uniform(-5, -3) for _ in range(response)],
                policy_versions=[0] * response,
                reward=0.0,
                finish_reason="stop",
                text="",
            )
        )
    advantages = [rng.uniform(-2, 2) for _ in trajectories]
    share = slice(rank, None, num_ranks)
    num_tokens = sum(len(t.response_tokens) for t in trajectories)
    return batch_trajectories(
        trajectories[share], advantages[share], num_sequences=len(trajectories), num_tokens=num_tokens
    )


def train(trainer: Trainer, steps: range) -> list[float]:
    rates = []
    for step in steps:
        trainer.forward_backward(step_batch(step))
        rates.append(trainer.optim_step()["train/lr"])
    return rates


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: all_rows(p.detach()).clone() for name, p in trainer._model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, SHARDED])
def test_ten_steps_and_ten_more_are_twenty_steps(make, tmp_path, settings):
    through = make(**settings)
    rates = train(through, range(20))
    expected = weights(through)
    first = make(**settings)
    train(first, range(10))
    torch.rand(3)  # the generator's position is part of the state
    position = torch.get_rng_state()
    first.publish()  # scores its canary: a forward pass without a backward pass, which FSDP does not tidy up after
    first.save_state(str(tmp_path / "state"))
    assert train(first, range(10, 20)) == rates[10:], "saving changes nothing"
    second = make(**settings)
    assert not torch.equal(torch.get_rng_state(), position)
    assert second.load_state(str(tmp_path / "state")) == second.policy_version == 10
    assert torch.equal(torch.get_rng_state(), position)
    assert train(second, range(10, 20)) == rates[10:]
    for name, tensor in weights(second).items():
        assert torch.equal(tensor, expected[name]), name


RANK = """
import dataclasses
import time
from pathlib import Path
from leeway.trainer import writing
from leeway.trainer.shards import write_safetensors
from leeway.trainer.trainer import Trainer
settings, address, rank, folder, batches, out = work
trainer = Trainer(settings, rank=rank, init_method=address)
trainer.load_state(folder)
for batch in batches:
    trainer.forward_backward(batch)
    trainer.optim_step()
trainer.save_state(out)

# One at a time (settings.max_writers): when did each rank write?
real, spans = writing.write_shard, []
def slowly(*args, **options):
    begun = time.monotonic()
    time.sleep(0.2)
    result = real(*args, **options)
    spans.append((begun, time.monotonic()))
    return result
writing.write_shard = slowly
trainer.save_state(out + "-slowly")
# One machine at a time: both ranks are on this one, and write when both are about to.
def together(*args, **options):
    Path(f"{out}-rank-{rank}").touch()
    deadline = time.monotonic() + 100
    while not Path(f"{out}-rank-{1 - rank}").exists():
        assert time.monotonic() < deadline, "two ranks of one machine write in turn"
        time.sleep(0.01)
    return real(*args, **options)
writing.write_shard = together
by_machine = settings.checkpoint.model_copy(update={"writers": "machines"})
trainer._settings = dataclasses.replace(settings, checkpoint=by_machine)
trainer.save_state(out + "-together")
trainer._settings = settings

# A rank that cannot write: each hears of it, none waits for it.
def full(*args, **options):
    raise OSError(28, "No space left on device")
if rank == 1:
    writing.write_shard = full
try:
    trainer.save_state(out + "-full")
    error = "none"
except writing.CheckpointWriteError as told:
    error = str(told)
writing.write_shard = real
result = {"spans": spans, "error": error}
trainer.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_ranks_go_on_from_what_one_saved_and_one_from_what_two_saved(make, tmp_path, other_ranks):
    alone = make()
    train(alone, range(5))
    alone.save_state(str(tmp_path / "one"))
    train(alone, range(5, 15))
    expected = weights(alone)
    settings = settings_of(Path(alone._settings.path_of(None)), num_ranks=2, max_writers=1)
    address, one, two = free_address(), str(tmp_path / "one"), str(tmp_path / "two")
    batches = [[step_batch(step, rank, 2) for step in range(5, 15)] for rank in range(2)]
    other_ranks.begin(RANK, {rank: (settings, address, rank, one, batches[rank], two) for rank in range(2)})
    first, second = other_ranks.results(200)
    (begun, ended), (next_begun, next_ended) = sorted(first["spans"] + second["spans"])
    assert begun < ended <= next_begun < next_ended, "two ranks wrote at once"
    assert "rank 1 could not write it: [Errno 28] No space left" in first["error"]
    assert "rank 1 could not write it: [Errno 28] No space left" in second["error"]
    assert read_state(tmp_path / "two")["num_ranks"] == read_state(tmp_path / "two-slowly")["num_ranks"] == 2
    back = make()
    assert back.load_state(str(tmp_path / "two")) == 15
    for name, tensor in weights(back).items():
        assert (tensor - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_ranks_write_in_turns_each_or_by_machine():
    assert turns_of(range(5), 0) == [0] * 5
    assert turns_of(range(5), 2) == [0, 1, 2, 0, 1], "neighbours are in different turns"
    machines = ["a", "a", "b", "b", "c", "c"]
    assert turns_of(machines, 1) == [0, 0, 1, 1, 2, 2]
    assert turns_of(machines, 2) == [0, 0, 1, 1, 0, 0]
    assert turns_of(["here"] * 4, 1) == [0] * 4


@pytest.fixture
def saved(make, tmp_path) -> Path:
    trainer = make()
    train(trainer, range(2))
    trainer.save_state(str(tmp_path / "state"))
    return tmp_path / "state"


def refused(trainer: Trainer, folder: Path, match: str) -> None:
    before = weights(trainer)
    with pytest.raises(CheckpointError, match=match):
        trainer.load_state(str(folder))
    assert trainer.policy_version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


@pytest.mark.slow
def test_what_was_not_completed_or_was_changed_is_refused(make, saved):
    trainer = make()
    shard = saved / "shard-00000.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    refused(trainer, saved, rf"{shard.name}: \d+ bytes, \d+ were written")
    shard.unlink()
    refused(trainer, saved, rf"{shard.name}: cannot be read \(No such file")
    shard.write_bytes(whole)
    state = (saved / "state.json").read_text()
    (saved / "state.json").write_text(state.replace('"policy_version": 2', '"policy_version": 3'))
    refused(trainer, saved, r"state.json: it does not match its own SHA-256")
    (saved / "state.json").unlink()
    refused(trainer, saved, "never completed")
    (saved / "state.json").write_text(state)
    assert trainer.load_state(str(saved)) == 2


@pytest.mark.slow
def test_one_bit_of_a_weight_is_seen_when_it_is_read_and_the_file_is_named(make, saved):
    shard = saved / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"shard-00000.safetensors: bytes 0 to \d+ do not match .*; move it away"):
        make().load_state(str(saved))


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [{}, SHARDED])
def test_a_reference_of_other_weights_is_refused(make, model_path, tmp_path, sharded):
    """`model.path` may be another model by the time that a run is resumed."""
    penalty = {"objective": PolicyObjective(aggregation="token_mean", kl=KLPenalty(coef=0.1)), **sharded}
    first = make(**penalty)
    train(first, range(2))
    first.save_state(str(tmp_path / "state"))
    assert make(**penalty).load_state(str(tmp_path / "state")) == 2
    assert make(**sharded).load_state(str(tmp_path / "state")) == 2, "without a penalty nothing is referred to"
    moved = make()
    train(moved, range(1))
    moved.save(str(tmp_path / "moved"))
    build_tokenizer(["12 + 34 = 46"]).save_pretrained(tmp_path / "moved")
    other = make(tmp_path / "moved", **penalty)
    with pytest.raises(CheckpointError, match=r"another reference policy .*algorithm\.reference_path"):
        other.load_state(str(tmp_path / "state"))


@pytest.mark.slow
def test_what_an_earlier_version_pickled_is_refused_with_what_to_do(make, tmp_path):
    (tmp_path / "step-000003/dcp").mkdir(parents=True)
    (tmp_path / "step-000003/dcp/.metadata").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    expected = r"dcp/\) was written by an earlier version .* model.path=.*step-000003/hf"
    with pytest.raises(CheckpointError, match=expected):
        make().load_state(str(tmp_path / "step-000003/trainer"))
    with pytest.raises(CheckpointError, match=expected):
        list(convert(tmp_path))


def test_shards_are_what_safetensors_itself_would_write(tmp_path):
    kinds = (torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.bool, torch.float64, torch.int32)
    kinds += (torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16)
    tensors = {f"{'ab'[i % 2]}.{kind}é": torch.arange(i + 3).to(kind) for i, kind in enumerate(kinds)}
    tensors |= {"scalar": torch.tensor(0.5), "none": torch.zeros(0, 3), "two": torch.ones(2, 3)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    sums, _ = write_safetensors(tmp_path / "ours", tensors, metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sums == sums_of(tmp_path / "ours")


@pytest.mark.slow
def test_another_models_checkpoint_is_refused_by_name(make, saved, tmp_path):
    refused(
        make(save_model(tmp_path / "wider", hidden_size=24)),
        saved,
        r"another model: .*embed_tokens.*\(40, 16\) float32",
    )
    refused(make(save_model(tmp_path / "deeper", num_hidden_layers=3)), saved, r"layers\.2.*absent in the checkpoint")


@pytest.mark.slow
def test_what_is_saved_is_the_state_at_that_moment_however_far_training_has_come_when_it_is_written(
    make, tmp_path, monkeypatch
):
    trainer, may_write = make(), threading.Event()
    train(trainer, range(3))
    expected, real = weights(trainer), checkpoint.write_shards

    def late(*args: Any, **options: Any) -> Any:
        assert may_write.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(checkpoint, "write_shards", late)
    assert set(trainer.begin_save(state=str(tmp_path / "state"), hf=str(tmp_path / "hf"))) == {"checkpoint/copy_s"}
    train(trainer, range(3, 6))
    assert not (tmp_path / "state/state.json").exists(), "training did not wait for it"
    may_write.set()
    assert trainer.finish_save()["checkpoint/write_s"] > 0
    after = weights(trainer)
    again = make()
    assert again.load_state(str(tmp_path / "state")) == 3
    for name, tensor in weights(again).items():
        assert torch.equal(tensor, expected[name]), name
    assert any(not torch.equal(after[name], expected[name]) for name in expected)
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters():
        assert torch.equal(tensor, expected[f"lm.{name}"]), name
    train(again, range(3, 6))  # its optimizer's state, too, was that of version 3
    for name, tensor in weights(again).items():
        assert torch.equal(tensor, after[name]), name


@pytest.mark.slow
def test_a_failed_write_is_told_in_one_line_and_the_next_one_is_free_to_succeed(make, saved, monkeypatch):
    trainer = make()

    def full(*_: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device", "shard")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_shard", full)
        trainer.begin_save(state=str(saved))
        train(trainer, range(1))
        with pytest.raises(CheckpointWriteError) as told:
            trainer.finish_save()
    assert re.fullmatch(
        rf"checkpoint {saved}: rank 0 could not write it: \[Errno 28\] No space left on device: 'shard'; "
        rf"it had to write \d+\.\d MB, \d+\.\d MB are free at {saved}; .* checkpoint.resume=auto",
        str(told.value),
    )
    with pytest.raises(CheckpointError, match="never completed"):
        read_state(saved)
    trainer.save_state(str(saved))
    assert read_state(saved)["policy_version"] == 1


@pytest.mark.slow
def test_every_generator_goes_on_where_it_was(make, tmp_path):
    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), random.gauss(0, 1), np.random.standard_normal(3).tolist()

    trainer = make()
    random.gauss(0, 1)  # both keep the second of a pair for the next call
    np.random.standard_normal(1)
    trainer.save_state(str(tmp_path / "state"))
    expected = draw()
    again = make()
    random.seed(5)
    np.random.seed(5)
    again.load_state(str(tmp_path / "state"))
    assert draw() == expected


# ------------------------------------------------------------------------------------------------------- convert


@pytest.mark.slow
def test_a_run_with_three_steps_is_converted_once_and_any_part_of_it_may_be_named(make, model_path, tmp_path):
    trainer, folder, expected = make(), tmp_path / "run/checkpoints", {}
    for step in (1, 2, 3):
        train(trainer, range(step, step + 1))
        trainer.save_state(str(folder / f"step-{step:06d}/trainer"))
        (folder / f"step-{step:06d}/state.json").write_text(sealed({"base_model": str(model_path)}))
        expected[step] = weights(trainer)
    shutil.copytree(folder / "step-000003", folder / "step-000004.partial")
    inside = folder / "step-000002/trainer"
    assert list(convert(inside)) == [(folder / "step-000002/hf", True)]
    every = [folder / f"step-{step:06d}/hf" for step in (1, 2, 3)]
    assert list(convert(tmp_path / "run", dtype="bfloat16")) == list(zip(every, (True, False, True), strict=True))
    assert list(convert(tmp_path / "run")) == [(path, False) for path in every]
    for step, dtype in ((1, torch.bfloat16), (2, torch.float32), (3, torch.bfloat16)):
        loaded = AutoModelForCausalLM.from_pretrained(every[step - 1], dtype="auto")
        for name, tensor in loaded.named_parameters():
            assert torch.equal(tensor, expected[step]["lm." + name].to(dtype)), name
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert (every[step - 1] / "tokenizer.json").exists()


@pytest.mark.slow
def test_what_cannot_be_converted_is_refused_by_name(make, saved, model_path, tmp_path):
    step = tmp_path / "step-000001"
    step.mkdir()
    saved.rename(step / "trainer")
    with pytest.raises(CheckpointError, match=r"config is missing.*--base-model"):
        list(convert(step))
    assert list(convert(step, base_model=str(model_path))) == [(step / "hf", True)]
    megatron = tmp_path / "other/iter_0000100/mp_rank_00"
    megatron.mkdir(parents=True)
    for path in (tmp_path / "other", megatron):
        with pytest.raises(CheckpointError, match="Megatron"):
            list(convert(path))
    with pytest.raises(CheckpointError, match="nothing there"):
        list(convert(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no sharded checkpoint"):
        list(convert(tmp_path / "empty"))


@pytest.mark.slow
def test_weights_for_others_that_cannot_be_written_leave_no_folder_and_are_told_of(make, tmp_path, monkeypatch):
    trainer, folder = make(), tmp_path / "hf"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(HFWriter, "add", full)
        trainer.begin_save(hf=str(folder))  # the other ranks are in the middle of sending: told of when all have sent
        with pytest.raises(CheckpointWriteError, match=r"rank 0 could not write it: .* No space left on device"):
            trainer.finish_save()
    assert not folder.exists()
    trainer.save(str(folder))
    AutoModelForCausalLM.from_pretrained(folder)


# --------------------------------------------------------------------------------------------------- interrupted


@pytest.mark.slow
@pytest.mark.parametrize("at_the_end", [False, True], ids=["in mid-run", "in the final save"])
def test_an_interrupt_while_a_rank_copies_ends_with_a_whole_checkpoint_of_it(make, tmp_path, monkeypatch, at_the_end):
    """A real rank goes on with the copy that it was asked for, whoever has stopped waiting for it."""
    trainer, copying, may_copy, real = make(), threading.Event(), threading.Event(), saver.take_state
    train(trainer, range(2))

    def slowly(**options: Any) -> Any:
        copying.set()
        assert may_copy.wait(60)
        return real(**options)

    monkeypatch.setattr(saver, "take_state", slowly)
    options = ["model.init=null", "model.path=org/m", "checkpoint.every=2", f"output_dir={tmp_path}"]
    config = load_config("quickstart", options, recipe="sft")

    async def scenario() -> None:
        actor = TrainerActor(role="trainer-0", log_file=tmp_path / "log", log_level="ERROR", cores=[])
        actor._trainer = trainer
        from .test_async_rl import Remote  # here: a program of its own imports this file without its package

        rank = Remote(actor)
        checkpoints = Checkpoints(tmp_path / "saved", config=config, trainers=[rank], supervisor=Supervisor())
        saving = asyncio.ensure_future(checkpoints.at_end() if at_the_end else checkpoints.after_step(2))
        await asyncio.to_thread(copying.wait, 200)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        ending = asyncio.ensure_future(checkpoints.at_end(interrupted=True))
        await asyncio.sleep(0)
        may_copy.set()
        assert await asyncio.wait_for(ending, 200) == tmp_path / "saved/step-000002/hf"

    asyncio.run(scenario())
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["latest.json", "step-000002"]
    assert read_state(tmp_path / "saved/step-000002/trainer")["policy_version"] == 2
    again = make()
    assert again.load_state(str(tmp_path / "saved/step-000002/trainer")) == 2

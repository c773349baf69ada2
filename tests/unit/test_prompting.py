"""Prompts as real templates write them: one BOS, and a response that ends with the token that ends a turn."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from leeway.config import ConfigError
from leeway.config.inputs import ModelConfig
from leeway.config.stages import plan_run
from leeway.tasks import Prompter
from leeway.trainer.export import HFWriter

from ..trainers import save_model

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# Qwen3 opens an empty thought before the answer; the generation prompt does not write it.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Says how many messages there are, so the beginning of a conversation depends on its end.
REWRITING = "{{ messages | length }}{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"

SPECIALS = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
PLAIN = ["<unk>", "user", "assistant", "system", "\n", " ", "a", "b", "c", "<think></think>", "<", ">", "2", "3"]


def tokenizer(template=None, *, writes_bos=False, writes_eos=False, eos="<eos>"):
    vocab = {token: i for i, token in enumerate(SPECIALS + PLAIN)}
    core = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("user|assistant|system|<think></think>|[\\s\\S]"), "isolated")
    if writes_bos or writes_eos:
        single = ("<bos> " if writes_bos else "") + "$A" + (" <eos>" if writes_eos else "")
        core.post_processor = TemplateProcessing(single=single, special_tokens=[("<bos>", 0), ("<eos>", 1)])
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<bos>", eos_token=eos)
    made.add_special_tokens({"additional_special_tokens": SPECIALS})
    made.chat_template = template
    return made


def ids(made, text):
    return made(text, add_special_tokens=False)["input_ids"]


def test_chatml_response_ends_with_the_end_of_turn():
    made = tokenizer(CHATML)
    prompter = Prompter(made)
    prompt, response = prompter.encode_example("a b", "c")
    assert prompt == prompter.encode("a b") == ids(made, "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n")
    assert response == ids(made, "c<|im_end|>")
    assert prompter.stop_token_ids == sorted([SPECIALS.index("<eos>"), SPECIALS.index("<|im_end|>")])
    assert prompter.decode(response) == "c"


def test_llama3_writes_exactly_one_bos():
    made = tokenizer(LLAMA3, writes_bos=True, eos="<|eot_id|>")
    prompter = Prompter(made)
    for prompt in ("a", [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]):
        tokens, response = prompter.encode_example(prompt, " c ")  # this template trims
        assert tokens.count(0) == 1
        assert tokens[0] == 0
        assert response == ids(made, "c<|eot_id|>")
    assert prompter.stop_token_ids == [SPECIALS.index("<|eot_id|>")]


def test_text_written_before_the_answer_is_part_of_the_response():
    made = tokenizer(THINKING)
    prompt, response = Prompter(made).encode_example("a", "c")
    assert response == ids(made, "<think></think>c<|im_end|>")
    assert prompt[-1] == ids(made, "\n")[0]


def test_several_turns():
    made = tokenizer(CHATML)
    messages = [
        {"role": r, "content": c} for r, c in (("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "a"))
    ]
    prompt, response = Prompter(made).encode_example(messages, "b b")
    assert made.decode(prompt).count("<|im_start|>") == 5
    assert response == ids(made, "b b<|im_end|>")
    with pytest.raises(ValueError, match="user message last"):
        Prompter(made).encode(messages[:3])


def test_template_that_rewrites_the_prompt_is_refused_for_examples_only():
    prompter = Prompter(tokenizer(REWRITING))
    assert prompter.encode("a")
    with pytest.raises(ValueError, match="chat template"):
        prompter.encode_example("a", "b")


def test_plain_text_keeps_own_bos_and_never_ends_with_eos():
    made = tokenizer(writes_bos=True, writes_eos=True)
    prompter = Prompter(made, extra_stop_token_ids=[6])
    prompt, response = prompter.encode_example("a b", "c")
    assert prompt == [0, *ids(made, "a b")]
    assert response == [*ids(made, "c"), 1]
    assert prompter.stop_token_ids == [1, 6]
    assert prompter.encode([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]) == [
        0,
        *ids(made, "a\nb"),
    ]
    assert prompter.decode([*ids(made, "b 2"), 6]) == "b 2"


@pytest.mark.parametrize("writes", [{}, {"writes_bos": True, "writes_eos": True}])
@pytest.mark.parametrize("text", ["a b", "a<|im_end|>b", "é?", "a\nuser 23"])
def test_text_becomes_the_tokens_that_the_tokenizer_gives(writes, text):
    made = tokenizer(**writes)
    prompter = Prompter(made)
    whole = made(text)["input_ids"]
    assert prompter.encode_plain(text) == ids(made, text)
    assert prompter.encode(text) == (whole[:-1] if writes else whole)
    assert prompter.decode(ids(made, text)) == made.decode(ids(made, text), skip_special_tokens=True)


def test_what_others_ask_of_the_tokenizer_neither_cuts_nor_pads():
    made = tokenizer()
    prompter, whole = Prompter(made), ids(made, "a b c a b")
    made("a b c", truncation=True, max_length=2)
    assert prompter.encode_plain("a b c a b") == whole
    made.pad_token = "<unk>"
    made(["a", "b c"], padding="max_length", max_length=30)
    assert prompter.encode_plain("a b c a b") == whole
    tagged = prompter.encode_plain("a <eos> b")
    made("a <eos> b", split_special_tokens=True)  # against tags in what users wrote
    assert prompter.encode_plain("a <eos> b") == tagged


def test_a_tokenizer_that_does_more_than_encode_is_asked_itself():
    class Lowers(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *args, **kwargs):
            return super()._encode_plus(text.lower(), *args, **kwargs)

    core = tokenizer().backend_tokenizer
    made = Lowers(tokenizer_object=core, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>")
    assert Prompter(made).encode_plain("A b") == ids(tokenizer(), "a b")


def test_empty_plain_prompt_is_refused():
    with pytest.raises(ValueError, match="empty text"):
        Prompter(tokenizer()).encode("")


def test_tokenizer_without_any_end_is_refused():
    made = tokenizer()
    made.eos_token = None
    with pytest.raises(ValueError, match="no EOS"):
        Prompter(made)


# ------------------------------------------------------------------------------------------ a template of one's own

ENDING = "{% for m in messages %}{{ m['content'] + '<|eot_id|>' }}{% endfor %}"
SILENT = "{% if not enable_thinking %}{{ '<think></think>' }}{% endif %}"
THOUGHTFUL = THINKING.replace("{{ '<think></think>' }}", SILENT).replace(
    "assistant\\n' }}{% endif %}", "assistant\\n' }}" + SILENT + "{% endif %}"
)


def test_a_template_of_ones_own_takes_the_place_of_the_tokenizers():
    made = tokenizer(CHATML)
    prompter = Prompter(made, chat_template=ENDING)
    assert prompter.encode("a b") == ids(made, "a b<|eot_id|>")
    assert prompter.encode_example("a", "c")[1] == ids(made, "c<|eot_id|>")
    assert ids(made, "<|eot_id|>")[0] in prompter.stop_token_ids
    assert Prompter(tokenizer(None), chat_template=ENDING).encode("a") == ids(made, "a<|eot_id|>")


def test_a_template_is_given_its_arguments_in_every_rendering():
    made = tokenizer(THOUGHTFUL)
    plain, silent = (Prompter(made, chat_template_kwargs={"enable_thinking": on}) for on in (True, False))
    assert silent.encode("a") == [*plain.encode("a"), *ids(made, "<think></think>")]
    again = [{"role": "user", "content": "a"}]
    assert silent.encode_next_turn(again, again)[-1:] == ids(made, "<think></think>")


@pytest.mark.parametrize(
    ("template", "kwargs", "said"),
    [
        (CHATML, {"enable_thinking": False}, "expected a variable that the template reads"),
        (THOUGHTFUL, {"messages": "x"}, "model.chat_template_kwargs.messages"),
        (LLAMA3, {"bos_token": "x"}, "model.chat_template_kwargs.bos_token"),
        (None, {"enable_thinking": False}, "the tokenizer has no chat template"),
    ],
)
def test_an_argument_without_an_effect_is_refused(template, kwargs, said):
    with pytest.raises(ValueError, match="expected") as refused:
        Prompter(tokenizer(template), chat_template_kwargs=kwargs)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_template_of_ones_own_is_rendered_under_limits():
    endless = "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}x{% endfor %}"
    with pytest.raises(ValueError, match=r"model\.chat_template: it loops too long"):
        Prompter(tokenizer(CHATML), chat_template=endless).encode("a")


def test_the_text_of_a_template_file_is_part_of_the_settings(tmp_path):
    (tmp_path / "own.jinja").write_text(ENDING)
    model = ModelConfig(path="a/b", chat_template=str(tmp_path / "own.jinja"))
    assert model.chat_template == ENDING
    assert ModelConfig(**model.model_dump()).chat_template == ENDING
    (tmp_path / "notes").write_text("no template")
    for wrong in ("notes", "absent.jinja", "."):
        with pytest.raises(ConfigError, match=r"^model\.chat_template: got .* expected a") as refused:
            plan_run("quickstart", None, [f"model.chat_template={tmp_path / wrong}"])
        assert "\n" not in str(refused.value)


def test_saved_weights_come_with_the_template_that_they_were_trained_with(tmp_path):
    base = save_model(tmp_path / "base", tied=True)
    writer = HFWriter(str(base), tmp_path / "out", dtype=torch.float32, chat_template=ENDING)
    writer.add({name: torch.zeros(shape) for name, shape in writer.shapes.items()})
    writer.finish()
    assert Prompter.load(tmp_path / "out").encode("12") == Prompter.load(base, chat_template=ENDING).encode("12")


@pytest.mark.parametrize("key", ["model.trust_remote_code", "rollout.trust_remote_code"])
def test_code_from_a_models_folder_is_refused_with_the_reason(key):
    with pytest.raises(ConfigError, match="code from a model's folder is never run"):
        plan_run("quickstart", None, [f"{key}=true"])


def test_a_fresh_model_has_no_template():
    with pytest.raises(ConfigError, match=r"model\.chat_template.*model\.init"):
        plan_run("quickstart", None, ["model.chat_template={{ messages }}"])

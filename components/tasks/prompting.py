"""Text to tokens and back, the same way for generation and for supervised training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.inputs import ModelConfig
from ..types import Message
from .chat_templates import ChatTemplate

Tools = Sequence[dict[str, Any]]
"""JSON schemas of functions: {"type": "function", "function": {"name": ..., "parameters": ...}}."""

_PROBE = "leeway probe answer"
"""Placeholder for an answer: rendered in its place, it shows what the template writes around an answer."""

ASSISTANT_STANDS = "(the policy's turn)"
"""Placeholder for what the policy sampled when a template renders a conversation; its tokens are kept separately."""


class Prompter:
    """Encodes prompts as the tokenizer's model expects them, with its chat template when there is one.

    With a template, the template writes every special token (so there is exactly one BOS); without one, prompts are
    plain text with the tokenizer's own special tokens, except an EOS at their end. `stop_token_ids` end a response: the
    EOS, those of the generation config, and what the template writes after an assistant's turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        extra_stop_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`chat_template`: instead of the tokenizer's own. `chat_template_kwargs`: what it reads beside messages."""
        self.tokenizer = tokenizer
        self._direct = _direct(tokenizer)
        self._written: set[str] = set()  # what the template was seen to write
        self.vocab_size = len(tokenizer)
        self.has_template = bool(chat_template or tokenizer.chat_template)
        if chat_template_kwargs and not self.has_template:
            raise ValueError(
                f"model.chat_template_kwargs: got {sorted(chat_template_kwargs)}, expected nothing: the tokenizer has "
                "no chat template; leave it out, or set model.chat_template=FILE.jinja"
            )
        self._chat_template = None
        if self.has_template:
            self._chat_template = _chat_template(tokenizer, chat_template, chat_template_kwargs or {})
        self._added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
        turn_end = self._probe_turn_end() if self.has_template else None
        self._turn_end = tokenizer.eos_token_id if turn_end is None else turn_end
        stops = {self._turn_end, tokenizer.eos_token_id, *extra_stop_token_ids} - {None}
        if not stops:
            raise ValueError(
                "tokenizer: got no EOS token and no end of turn, expected one of them; responses could never stop"
            )
        self.stop_token_ids: list[int] = sorted(stops)
        self._stop_texts = [text for text in map(tokenizer.decode, self.stop_token_ids) if text]

    @classmethod
    def of(cls, model: ModelConfig, *, path: str | None = None) -> Prompter:
        """That of the policy. `path`: where its files are here (None: at `model.path`)."""
        found = model.path if path is None else path
        assert found is not None, "a model is built before anything is encoded"
        return cls.load(found, chat_template=model.chat_template, chat_template_kwargs=model.chat_template_kwargs)

    @classmethod
    def load(cls, model_path: str | Path, **template: Any) -> Prompter:
        """The prompter of a model folder or hub name, with the stop tokens of its generation config; `template`: as for
        the class.
        """
        from transformers import AutoTokenizer, GenerationConfig

        try:
            eos = GenerationConfig.from_pretrained(str(model_path)).eos_token_id
        except OSError:  # a model without generation_config.json
            eos = None
        stops = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        tokenizer = AutoTokenizer.from_pretrained(str(model_path), trust_remote_code=False)
        return cls(tokenizer, extra_stop_token_ids=stops, **template)

    def encode(self, prompt: str | Sequence[Message], *, tools: Tools = ()) -> list[int]:
        """Token ids [T] of a prompt, ready for the assistant to continue. Text counts as one user message.

        `tools`: schemas of what the assistant may call, which only a template can write.
        """
        if self.has_template:
            return self._tokens(self._render(_as_messages(prompt), tools=tools))
        self._refuse_without_template([] if isinstance(prompt, str) else prompt, tools)
        return self.encode_text(_as_text(prompt))

    def encode_text(self, text: str) -> list[int]:
        """Token ids [T] of text to be continued: never a chat template, the tokenizer's own BOS, no EOS at the end."""
        tokens = self._tokens(text, special=True)
        while len(tokens) > 1 and tokens[-1] == self.tokenizer.eos_token_id:
            tokens.pop()
        if not tokens:
            raise ValueError("prompt: got empty text, expected at least one token for the policy to continue from")
        return tokens

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of bare text, without template or special tokens."""
        return self._tokens(text)

    def encode_next_turn(self, conversation: Sequence[Message], turn: Sequence[Message]) -> list[int]:
        """Token ids [D] that the template writes between the policy's last turn and its next one.

        That is the end of the turn, `turn` (the messages that answer it), and the header of the next one.
        `conversation` is everything before the policy's last turn, with `ASSISTANT_STANDS` as the content of its
        earlier turns: what the policy sampled is neither rendered nor encoded again. Without a template: the bare text
        of `turn`. Raises ValueError for a template that writes earlier turns differently once others follow: the tokens
        that were generated would then belong to another conversation.
        """
        if not self.has_template:
            return self._tokens(_as_text(turn))
        before = self._render(_as_messages(conversation)) + ASSISTANT_STANDS
        full = self._render(_as_messages([*conversation, {"role": "assistant", "content": ASSISTANT_STANDS}, *turn]))
        if not full.startswith(before):
            same = next((i for i, (a, b) in enumerate(zip(before, full, strict=False)) if a != b), len(full))
            raise ValueError(
                f"{self._template}: it rewrites earlier turns when others follow: "
                f"{before[max(0, same - 20) : same + 40]!r} became {full[max(0, same - 20) : same + 40]!r}; "
                "expected a template that only appends; use one, or answer with token ids"
            )
        # Encoded after the placeholder, because some tokenizers add a space at the start of a text.
        stands, both = self._tokens(ASSISTANT_STANDS), self._tokens(full[len(before) - len(ASSISTANT_STANDS) :])
        if both[: len(stands)] == stands:
            return both[len(stands) :]
        return self._tokens(full[len(before) :])

    def encode_example(
        self, prompt: str | Sequence[Message], answer: str | Message, *, tools: Tools = ()
    ) -> tuple[list[int], list[int]]:
        """(prompt tokens [T], response tokens [R]) of a supervised example; the response ends with the stop token.

        The prompt's tokens are exactly `encode(prompt)`, the response is what the policy would have to sample behind
        them: what the template writes before an answer (an empty thought, a channel), the answer, the stop token. An
        answer that calls tools is a message with its calls, which the template writes.
        Raises ValueError when the template rewrites the prompt once an answer follows it, when it writes something
        other than the answer, or when a stop token stands in the answer itself.
        """
        turn: Message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        text: str = turn["content"]
        self.check_answer(text)
        prompt_tokens = self.encode(prompt, tools=tools)
        if turn.get("tool_calls"):
            self._refuse_without_template([turn], tools)
            return prompt_tokens, self._calling(_as_messages(prompt), prompt_tokens, turn, tools)
        if not self.has_template:
            tokens = self._behind(self.encode_text, _as_text(prompt), prompt_tokens, text)
        else:
            messages = _as_messages(prompt)
            before = self._render(messages, tools=tools)
            tokens = self._behind(self._tokens, before, prompt_tokens, self._response(messages, before, text, tools))
        return prompt_tokens, [*tokens, self._turn_end]

    def check_answer(self, answer: str) -> None:
        """Raise ValueError if the answer contains a stop token: the policy could never sample past it."""
        if not any(stop in answer for stop in self._stop_texts):  # far cheaper than encoding it
            return
        inside = next((token for token in self._tokens(answer) if token in self.stop_token_ids), None)
        if inside is not None:
            raise ValueError(
                f"answer {_short(answer)}: got the stop token {self.tokenizer.decode([inside])!r} in it, expected text "
                "without it: the policy stops there, and Leeway adds it at the end of a turn; remove it"
            )

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of response tokens, without special and stop tokens."""
        stops = self.stop_token_ids
        kept = [t for t in tokens if t not in stops]
        if self._direct is None or self.tokenizer.clean_up_tokenization_spaces:
            return self.tokenizer.decode(kept, skip_special_tokens=True)
        return self._direct.decode(kept, skip_special_tokens=True)

    def _render(self, messages: list[Message], *, prompt_only: bool = True, tools: Tools = ()) -> str:
        """Raises ValueError for a template that leaves out the tools, or what a tool answered."""
        text = self._rendered(messages, prompt_only, tools)
        if tools and "tools" not in self._written:
            self._refuse_if(self._rendered(messages, prompt_only, ()) == text, "the tools")
            self._written.add("tools")
        result = next((i for i, m in enumerate(messages) if m["role"] == "tool" and m["content"].strip()), None)
        if result is not None and "results" not in self._written:
            without = [*messages[:result], {**messages[result], "content": ""}, *messages[result + 1 :]]
            self._refuse_if(self._rendered(without, prompt_only, tools) == text, "what a tool answered")
            self._written.add("results")
        return text

    def _rendered(self, messages: list[Message], prompt_only: bool, tools: Tools) -> str:
        if self._chat_template is None:
            return self.tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt_only
            )
        return self._chat_template.render(messages, add_generation_prompt=prompt_only, tools=tools)

    def _refuse_if(self, is_left_out: bool, what: str) -> None:
        if is_left_out:
            raise ValueError(
                f"{self._template}: it leaves out {what}; expected a template that writes conversations with tools"
            )

    def _refuse_without_template(self, messages: Sequence[Message], tools: Tools) -> None:
        if not self.has_template and (tools or any(m.get("tool_calls") for m in messages)):
            raise ValueError("tokenizer: it has no chat template, expected one that writes conversations with tools")

    def _calling(self, messages: list[Message], prompt_tokens: list[int], turn: Message, tools: Tools) -> list[int]:
        """Tokens of a turn that calls tools, up to its stop token, as the template writes it after the prompt.

        How a template writes calls is its own affair, so nothing is compared with the answer. Instead the turn must
        read otherwise without its calls, and without its text if it has any.
        """
        before = self._render(messages, tools=tools)
        full = self._rendered([*messages, turn], False, tools)
        self._keeps(before, full)
        without_calls = {key: value for key, value in turn.items() if key != "tool_calls"}
        self._refuse_if(self._rendered([*messages, without_calls], False, tools) == full, "the calls of a turn")
        if turn["content"].strip():
            silent = {**turn, "content": ""}
            self._refuse_if(self._rendered([*messages, silent], False, tools) == full, "the text of a turn with calls")
        tokens = self._behind(self._tokens, before, prompt_tokens, full[len(before) :])
        ends = [i for i, token in enumerate(tokens) if token in self.stop_token_ids]
        if len(ends) != 1 or self.tokenizer.decode(tokens[ends[0] + 1 :]).strip():
            raise ValueError(
                f"{self._template}: it writes {_short(full[len(before) :])} for a turn that calls tools, with "
                f"{len(ends)} stop tokens in it; expected one, at its end: the policy stops there"
            )
        return tokens[: ends[0] + 1]

    def _keeps(self, before: str, full: str) -> None:
        if not full.startswith(before):
            raise ValueError(
                f"{self._template}: the prompt ends with {before[-40:]!r}, but with an answer the same "
                f"conversation reads {full[:80]!r}...; expected the first to begin the second; use a template that "
                "keeps earlier turns"
            )

    def _response(self, messages: list[Message], before: str, answer: str, tools: Tools) -> str:
        """What the template writes between the prompt, which it renders as `before`, and the end of the answer's turn.

        The answer is not searched for, because a template may write its text in other places too. Instead, a
        placeholder shows what the template writes after an answer. That is removed from the end, and the rest must be
        the answer.
        """
        with_answer, with_probe = (
            self._rendered([*messages, {"role": "assistant", "content": content}], False, tools)
            for content in (answer, _PROBE)
        )
        self._keeps(before, with_answer)
        self._keeps(before, with_probe)
        written = with_answer[len(before) :]
        lead, found, after = with_probe[len(before) :].rpartition(_PROBE)
        end = len(written) - len(after)
        response = written[:end]
        # White space is ignored, because templates trim. Some templates rewrite the thought of an answer in their form.
        if not found or written[end:] != after or _squeezed(response) not in map(_squeezed, (lead + answer, answer)):
            raise ValueError(
                f"{self._template}: for the answer {_short(answer)} it writes {_short(written)}, and for any other "
                f"{_short(lead)}, the answer, {_short(after)}; expected the whole answer in the same place; use a "
                "template that writes answers as they are"
            )
        return response

    def _behind(self, encode: Callable[[str], list[int]], before: str, tokens: list[int], text: str) -> list[int]:
        """The tokens of `text` when it follows `before`, which `encode` turns into `tokens`.

        `text` is encoded after `before`, because some tokenizers add a space at the start of a text. If the two would
        share a token, `text` is encoded by itself, since the policy continues from the prompt's own tokens.
        """
        both = encode(before + text)
        return both[len(tokens) :] if both[: len(tokens)] == tokens else self._tokens(text)

    @property
    def _template(self) -> str:
        """Names the template in messages."""
        return _template_name(self.tokenizer) if self._chat_template is None else self._chat_template.name

    def _tokens(self, text: str, *, special: bool = False) -> list[int]:
        # Not `special`: the template has already written BOS and the rest; the tokenizer would duplicate them.
        direct = self._direct
        if direct is None or direct.truncation or direct.padding or direct.encode_special_tokens:
            return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        return direct.encode(text, add_special_tokens=special).ids

    def _probe_turn_end(self) -> int | None:
        """The added token that the template writes right after an assistant's content, if there is one."""
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _PROBE}]
        _, found, after = self._render(messages, prompt_only=False).rpartition(_PROBE)
        if not found:
            return None
        return next((token for token in self._tokens(after) if token in self._added), None)


def _template_name(tokenizer: Any) -> str:
    name = getattr(tokenizer, "name_or_path", "")
    return f"chat template of {name}" if name else "chat template"


def _chat_template(tokenizer: Any, own: str | None, kwargs: Mapping[str, Any]) -> ChatTemplate | None:
    """`own`, or the tokenizer's template; None for a tokenizer whose code, not a template, writes conversations."""
    from transformers import PreTrainedTokenizerBase as Base

    if own is None and type(tokenizer).apply_chat_template is not Base.apply_chat_template:
        if kwargs:
            raise ValueError(
                f"model.chat_template_kwargs: got {sorted(kwargs)}, expected nothing: code of the tokenizer, not a "
                "template, writes conversations; leave it out, or set model.chat_template=FILE.jinja"
            )
        return None
    return ChatTemplate(
        tokenizer.get_chat_template() if own is None else own,
        name=_template_name(tokenizer) if own is None else "model.chat_template",
        special_tokens=tokenizer.special_tokens_map,
        kwargs=kwargs,
    )


def _direct(tokenizer: Any) -> Any:
    """The backend that `tokenizer` encodes with, if the tokenizer does nothing else itself; otherwise None.

    Short texts of many environments are encoded one by one, on the processor that answers the engine. Encoding ten
    tokens takes 5 us, and transformers adds 16 us of other work.
    """
    if not getattr(tokenizer, "is_fast", False):
        return None
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    own = ("__call__", "_encode_plus", "decode", "_decode")
    as_it_is = isinstance(tokenizer, Fast) and all(getattr(kind, name) is getattr(Fast, name) for name in own)
    return tokenizer.backend_tokenizer if as_it_is and not tokenizer.split_special_tokens else None


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-17:]}")


def _as_messages(prompt: str | Sequence[Message]) -> list[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not prompt or prompt[-1]["role"] == "assistant":
        raise ValueError("prompt: got messages that are empty or end with the assistant, expected a user message last")
    return list(prompt)


def _as_text(prompt: str | Sequence[Message]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)

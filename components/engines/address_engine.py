"""A model at an OpenAI-compatible address that takes token ids (Leeway, vLLM, SGLang), as an engine to be evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from ..collector.clock import RolloutClock
from ..collector.engine import EngineSettings, Heard, SampledTokens
from ..collector.progress import Progress
from ..config.inputs import AuxiliaryModel
from ..envs.auxiliary import AuxiliaryClient
from ..failures import Refused
from ..tasks.prompting import Prompter


class AddressEngine:
    """See `collector.engine.Engine`. It only generates; its weights are somebody else's.

    Prompts are encoded here, with the tokenizer of `model.path`, and sent as token ids. So an address that serves the
    same model gives the same greedy answers as an engine of one's own.
    """

    @classmethod
    async def start(cls, settings: EngineSettings) -> AddressEngine:
        engine = cls(settings)
        await engine._check()
        return engine

    def __init__(self, settings: EngineSettings) -> None:
        self._client = AuxiliaryClient("", AuxiliaryModel(**settings.options), where="eval.address")
        self._prompter = Prompter.load(settings.model_path)
        self._version = settings.initial_version or 0
        self.places, self.cache_tokens = AuxiliaryModel(**settings.options).max_in_flight, 0
        self.progress = Progress()

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        *,
        n: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        seed: int | None = None,
        top_p: float = 1.0,
        clock: RolloutClock | None = None,
        heard: Heard | None = None,
    ) -> list[SampledTokens]:
        """Logprobs are 0: nobody asks for them in an evaluation. Time spent waiting is the environment's."""
        body: dict[str, Any] = {
            "prompt": list(prompt_tokens),
            "n": n if temperature else 1,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "stop_token_ids": list(stop_token_ids),
            "return_token_ids": True,
        }
        body |= {} if seed is None else {"seed": seed}
        body |= {} if top_p == 1.0 else {"top_p": top_p}
        choices = await self._client.choices("completions", body)
        if len(choices) != body["n"]:
            raise ValueError(f"eval.address: got {len(choices)} choices, expected n = {body['n']}")
        sampled = [self._sampled(choice) for choice in choices]
        return sampled if temperature else sampled * n

    def _sampled(self, choice: dict[str, Any]) -> SampledTokens:
        tokens = choice.get("token_ids")
        if tokens is None:  # the same text may have other tokens; only their number is looked at
            tokens = self._prompter.encode_plain(str(choice["text"]))
        tokens = [int(token) for token in tokens] or [self._prompter.stop_token_ids[0]]
        reason = "length" if choice.get("finish_reason") == "length" else "stop"
        return SampledTokens(tokens, [0.0] * len(tokens), [self._version] * len(tokens), reason)

    async def _check(self) -> None:
        """Raises Refused where the address does not answer a prompt of token ids."""
        prompt = self._prompter.encode("?")
        try:
            await self.generate(prompt, n=1, temperature=0.0, max_tokens=1, stop_token_ids=[])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise Refused(
                f"eval.address: got no answer to a prompt of token ids ({error}), expected one from "
                "POST /v1/completions, as Leeway, vLLM and SGLang serve it"
            ) from None

    def process_ids(self) -> list[int]:
        return []

    def shutdown(self) -> None: ...

    def stage(self, *_: Any, **__: Any) -> NoReturn:
        raise Refused("eval.address: its weights are served elsewhere, and cannot be replaced from here")

    load_weights = sleep = read_back = score = stage

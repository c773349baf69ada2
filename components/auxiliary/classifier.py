"""A sequence classifier (a reward model) of transformers: texts that come together are scored together."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

MAX_BATCH = 32


class Classifier:
    """`classify` returns the class probabilities; for a model with one output, it returns that output unchanged."""

    def __init__(self, model_path: str, *, device: str, dtype: str) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            model_path, dtype=getattr(torch, dtype), trust_remote_code=False
        )
        if model.config.pad_token_id is None:  # what is last in a row of a batch is found by it
            model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.to(device).eval()
        self._waiting: list[tuple[str, asyncio.Future[list[float]]]] = []
        self._busy = asyncio.Lock()

    async def classify(self, text: str) -> list[float]:
        future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, future))
        while not future.done():
            async with self._busy:
                if not future.done():
                    await self._score_some()
        return future.result()

    async def _score_some(self) -> None:
        batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        try:
            scores = await asyncio.to_thread(self._scores, [text for text, _ in batch])
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), score in zip(batch, scores, strict=True):
            if not future.done():
                future.set_result(score)

    @torch.inference_mode()
    def _scores(self, texts: list[str]) -> list[list[float]]:
        longest = getattr(self._model.config, "max_position_embeddings", None)
        inputs = self._tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        inputs = {name: inputs[name].to(self._model.device) for name in ("input_ids", "attention_mask")}
        logits = self._model(**inputs).logits.float()
        return (logits if logits.shape[-1] == 1 else logits.softmax(dim=-1)).tolist()

"""What a parameter is called outside of the model that trains it.

Transformers keeps a layer's experts as one tensor and writes one file entry per expert and matrix, often under other
names. Engines and other tools know the names of the files. For all other models both are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion


class PublishedNames:
    """Splits the parameters of one model into the tensors of its files, and puts them together again."""

    def __init__(self, lm: PreTrainedModel) -> None:
        self._lm = lm
        self.differ = any(isinstance(c, WeightConverter) for c in get_model_conversion_mapping(lm, add_legacy=False))

    def split(self, name: str, full: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that parameter `name` with the values `full` is published as, by name."""
        return revert_weight_conversion(self._lm, {name: full}) if self.differ else {name: full}

    def parts(self, name: str, shape: torch.Size) -> set[str]:
        """Names of the tensors that `split` makes of a parameter of this shape."""
        return set(self.split(name, torch.empty(shape, device="meta")))

    def join(self, name: str, shape: torch.Size, published: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The values of parameter `name` from all its published parts. Undoes `split`."""
        if not self.differ:
            return published[name]
        # Splitting the numbers 0, 1, ... says where each published element belongs.
        places = self.split(name, torch.arange(shape.numel()).view(shape))
        full = torch.empty(shape.numel(), dtype=published[next(iter(places))].dtype)
        for part, place in places.items():
            full[place.flatten()] = published[part].flatten()
        return full.view(shape)

"""The names of a model's tensors outside of the process that trains it.

Engines and other tools know the names in a model's files. For most models these are the names of its modules. Some
families rename (a composite's language model), and transformers keeps a layer's experts as one tensor, of which the
files hold one entry per expert and matrix.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from .tensors import saved_tensors


class PublishedNames:
    """Splits the tensors of one model into those of its files, and joins them again.

    `renamed`: the file's name of every tensor that is also one tensor in the files; the others must be split. Raises
    `ValueError` for a family whose files keep several tensors as one, because each is published and saved separately.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        self._lm = lm
        self.renamed: dict[str, str] = {}
        owners: dict[str, str] = {}
        for name, tensor in saved_tensors(lm).items():
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            parts = revert_weight_conversion(lm, {name: whole})
            if len(parts) == 1 and next(iter(parts.values())) is whole:
                self.renamed[name] = next(iter(parts))
            for part in parts:
                if (owner := owners.setdefault(part, name)) != name:
                    raise ValueError(
                        f"model.path: got a {type(lm).__name__}, whose files keep {owner} and {name} as one tensor "
                        f"({part}); expected a model whose files hold its weights as they are or in parts"
                    )

    def split(self, name: str, full: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors, by name, under which `name` with the values `full` is published."""
        if name in self.renamed:
            return {self.renamed[name]: full}
        return revert_weight_conversion(self._lm, {name: full})

    def parts(self, name: str, shape: torch.Size) -> set[str]:
        """Names of the tensors that `split` makes of a tensor of this shape."""
        return set(self.split(name, torch.empty(shape, device="meta")))

    def join(self, name: str, shape: torch.Size, published: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The values of `name` from all its published parts. Undoes `split`."""
        if name in self.renamed:
            return published[self.renamed[name]]
        # Splitting the numbers 0, 1, ... says where each published element belongs.
        places = self.split(name, torch.arange(shape.numel()).view(shape))
        full = torch.empty(shape.numel(), dtype=published[next(iter(places))].dtype)
        for part, place in places.items():
            full[place.flatten()] = published[part].flatten()
        return full.view(shape)

"""The engine on transformers under the contract of every engine, and what is its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leeway.engines.hf_engine import HfEngine

from ..engine_contract import EngineContract, Served, check_masks


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("model"), HfEngine)
    served.recover()
    yield served
    served.close()


class TestHf(EngineContract):
    pass


def test_it_says_what_each_token_was_drawn_from(served: Served) -> None:
    check_masks(served)

"""For unit tests: one thread for tiny tensors, and ranks of a group that are started once for all."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from .other_ranks import OtherRanks


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The tensors of a unit test are so small that handing a share to a second thread costs more than the share."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherRanks]:
    ranks = OtherRanks(tmp_path_factory.mktemp("other-ranks"))
    yield ranks
    ranks.end()


@pytest.fixture
def other_ranks(ranks_of_this_session: OtherRanks) -> Iterator[OtherRanks]:
    """The ranks beside the one in this process; those that a failed test left at work are ended."""
    yield ranks_of_this_session
    ranks_of_this_session.end_busy()

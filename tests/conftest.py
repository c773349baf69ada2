"""For all tests: what no test may do by accident, and which tier a test belongs to."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import _pytest.logging

# Loaded later than now, and so parsed by pytest's own loader, they meet finalizers that upset CPython 3.11's parser.
import hypothesis.internal.observability
import hypothesis.strategies._internal.random  # noqa: F401
import pytest
from _pytest.logging import catching_logs
from hypothesis import HealthCheck, settings

from . import environment, forked, lanes  # the first of all: it keeps the environment as it is now
from .tiers import LONG, in_order, sample

# For properties that do not say how many examples they need. New ones at each run are for `make test-long`: they may
# find what has nothing to do with the change that is tested. No limit is one of wall time, which a busy machine takes.
settings.register_profile(
    "leeway",
    max_examples=sample(40, 100),
    derandomize=not LONG,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("leeway")

# Imports make millions of objects that all stay: searching them for garbage is a third of the time that they take.
gc.disable()

# torchrl loads vLLM wherever it is: a third of all that tests import, of no use to them. Until they are imported, it
# is not there; those that start an engine load it then.
sys.modules.setdefault("vllm", None)  # type: ignore[arg-type]  # the import system's own sign for "not there"


class LogsOfTheRoot(catching_logs):
    """pytest's own also looks through all loggers, six times a test, for those that do not hand on to the root: torch,
    transformers and ray bring hundreds, and of ours there is none.
    """

    def __enter__(self) -> Any:
        if self.level is not None:  # --log-level
            return super().__enter__()
        root = logging.getLogger()
        root.addHandler(self.handler)
        self.attached_loggers.append(root)
        return self.handler


_pytest.logging.catching_logs = LogsOfTheRoot  # type: ignore[misc]

INTEGRATION = Path(__file__).parent / "integration"


@pytest.fixture
def environ_of_a_run() -> Iterator[None]:
    """For tests about what processes inherit: whatever was imported by tests that this process ran before."""
    with patch.dict(os.environ, environment.of_a_run(), clear=True):
        yield


@pytest.fixture(autouse=True, scope="session")
def no_rank_keeps_freed_memory_here() -> Iterator[None]:
    """What a rank tells malloc holds for its whole process, in which other tests ask what is given back."""
    with patch("leeway.trainer.memory.keep_freed_memory"):
        yield


@pytest.hookimpl(tryfirst=True)  # before -m takes items away
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if INTEGRATION in item.path.parents:
            item.add_marker("integration")
            if not item.get_closest_marker("timeout"):  # whole runs, beside others on a machine that may be slow
                item.add_marker(pytest.mark.timeout(900))
        if not LONG and (mark := item.get_closest_marker("long")):
            item.add_marker(pytest.mark.skip(reason=f"{mark.args[0]}: make test-long"))


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "run tests on that many processes, forked when all are collected (tests/lanes.py)"
    parser.addoption("--lanes", type=int, default=0, metavar="N", help=help_text)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    if not options.lanes or options.collectonly or session.testsfailed or not session.items:
        return None
    lanes.run(session, options.lanes, in_order(session.items))
    return True


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded now stays: torch and transformers are millions of objects, which each full collection, and each
    test that asks for one, would walk through again. Garbage in cycles is rare; it may wait for 50,000 new objects.
    """
    if sys.modules.get("vllm", sys) is None:
        del sys.modules["vllm"]
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()
    if session.items and not session.config.option.collectonly:
        if any("fork_servers_imported" in getattr(item, "fixturenames", ()) for item in session.items):
            from . import fork_servers  # which imports ours: not before all is set above

            fork_servers.begin()
        forked.begin()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The tensors of a test are so small that handing a share to a second thread costs more than the share."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fork_servers_imported() -> None:
    """For tests that start runs: see `fork_servers`."""


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Qwen2 with a tied head, for tests that read it."""
    from .trainers import save_model

    return save_model(tmp_path_factory.mktemp("tiny"), tied=True)


@pytest.fixture(scope="session")
def group_of_one_rank() -> Iterator[None]:
    """The process group of all trainers of one rank: what torch learns of a mesh, it keeps for the next one."""
    from .trainers import end_group

    yield
    end_group()


@pytest.fixture
def make(model_path: Path, group_of_one_rank: None) -> Iterator[Callable[..., Any]]:
    """make(**settings) -> a trainer of one rank."""
    import torch

    from .trainers import one_rank_trainer

    threads = torch.get_num_threads()

    def build(path: Path = model_path, **changes: Any) -> Any:
        return one_rank_trainer(path, **changes)

    yield build
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def the_same_numbers_in_any_order() -> None:
    """What a test draws without a seed of its own is the same, whichever tests came before it in this process."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        # At each call, torch keeps a stack trace for every kind of device that nothing has used yet.
        seed = torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed
        seed(0)


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # or libraries that count their objects at the very end report each as leaked

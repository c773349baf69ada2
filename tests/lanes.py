"""Tests on several processes that are forks of one: `--lanes=N`.

    collect once -> fork N lanes -> a lane asks for tests, runs them, sends their reports -> pytest's process prints

Imports and collection take longer than most files of tests: they are paid once, not by each process. Tests are handed
out when they are asked for, in the order of `tiers.in_order`, so no lane keeps one waiting while another has
nothing to do. A lane that dies is a failure of the test that it ran; another one takes its place.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

Scope = list[pytest.Item]
"""Tests that one process runs, in this order: they share fixtures."""
GRACE_S = 60.0
"""How long a lane may take to end what its tests share once the session is over."""


def run(session: pytest.Session, number: int, scopes: Iterable[Scope]) -> None:
    """Run `scopes`, which are all of `session.items`, on `number` processes; each is begun in this order."""
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all lanes
    reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.showfspath = False  # tests of several files report by turns
    lanes: list[_Lane] = []
    waiting = iter(scopes)
    numbers = iter(range(sys.maxsize))

    def begin() -> None:
        lanes.append(_Lane(session, next(numbers), [lane.connection for lane in lanes]))

    try:
        for _ in range(number):
            begin()
        while lanes:
            for ready in wait([lane.connection for lane in lanes]):
                lane = next(lane for lane in lanes if lane.connection is ready)
                try:
                    wants_more = lane.hear()
                except EOFError:
                    lanes.remove(lane)
                    if (rest := lane.bury()) is not None:
                        begin()
                        lanes[-1].rest = rest
                    continue
                if wants_more:
                    lane.hand(lane.rest or next(waiting, []))
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
    finally:
        for lane in lanes:
            lane.end()


class _Lane:
    """One of the processes, as pytest's own process sees it."""

    def __init__(self, session: pytest.Session, number: int, others: list[Connection]) -> None:
        self.scope: Scope = []
        self.rest: Scope = []
        """Of a lane that died: what was handed to it, behind the test that it died of."""
        self._session = session
        self._running: pytest.Item | None = None
        self._is_over = False
        self.connection, theirs = Pipe()
        self._places = {id(item): place for place, item in enumerate(session.items)}
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            for connection in (self.connection, *others):
                connection.close()
            _be_a_lane(session, number, theirs)
        theirs.close()

    def hand(self, scope: Scope) -> None:
        """Nothing: the lane ends what its tests share, and itself."""
        self.scope, self.rest, self._is_over = scope, [], not scope
        self.connection.send([self._places[id(item)] for item in scope])

    def hear(self) -> bool:
        """One message of the lane: does it ask for more? EOFError: it has ended."""
        config, (what, given) = self._session.config, self.connection.recv()
        if what == "begin":
            self._running = self._session.items[given]
        elif what == "report":
            config.hook.pytest_runtest_logreport(
                report=config.hook.pytest_report_from_serializable(config=config, data=given)
            )
        elif what == "warning":
            config.hook.pytest_warning_recorded.call_historic(kwargs=given)
        else:
            self._running = None
        return what == "more"

    def bury(self) -> Scope | None:
        """After its end: what it has left undone, or None if it ended because there was nothing more to do."""
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self.connection.close()
        if self._is_over and code == 0:
            return None
        died_of = self._running or (self.scope or self._session.items)[-1]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        report = pytest.TestReport(
            nodeid=died_of.nodeid,
            location=died_of.location,
            keywords={},
            outcome="failed",
            longrepr=f"{died_of.nodeid}: the process that ran it {how}",
            when="call",
        )
        self._session.config.hook.pytest_runtest_logreport(report=report)
        return self.scope[self.scope.index(died_of) + 1 :] if died_of in self.scope else None

    def end(self) -> None:
        """Now: it has GRACE_S to end what its tests share."""
        self.connection.close()
        ended = os.pidfd_open(self._pid)
        signal.pidfd_send_signal(ended, signal.SIGINT)
        if not wait([ended], GRACE_S):
            signal.pidfd_send_signal(ended, signal.SIGKILL)
        os.close(ended)
        os.waitpid(self._pid, 0)


class _AnotherFile:
    """What pytest asks of the test that comes next, to see which fixtures may stay: those of the session."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[Any]:
        return [self._session]


class _Telling:
    """In a lane: its reports and warnings go to pytest's own process."""

    def __init__(self, session: pytest.Session, told: Connection) -> None:
        self._config, self._told = session.config, told
        self._places = {id(item): place for place, item in enumerate(session.items)}
        self._has_begun = False
        session.config.pluginmanager.register(self, "lane")  # which repeats all warnings of the collection
        self._has_begun = True

    def report(self, report: pytest.TestReport) -> None:
        self._told.send(("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        self._told.send(("begin", self._places[id(item)]))
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            self.report(report)
        return True

    @pytest.hookimpl
    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if not self._has_begun:
            return
        given = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        warning_message.source = None
        try:
            pickle.dumps(warning_message)
        except Exception:  # of a class that cannot be pickled: its text can
            warning_message.message = Warning(str(warning_message.message))
            warning_message.category = Warning
        self._told.send(("warning", given))


def _be_a_lane(session: pytest.Session, number: int, told: Connection) -> None:
    """Never returns."""
    code = 1
    try:
        _work(session, number, told)
        code = 0
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the session was ended
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # to take all libraries apart, object by object, costs seconds


def _work(session: pytest.Session, number: int, told: Connection) -> None:
    capture: Any = session.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:  # into files that are this process's alone
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    temporary: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]  # of pytest's own plugin
    temporary._basetemp = temporary.getbasetemp() / f"lane-{number}"
    temporary._basetemp.mkdir(mode=0o700)
    signal.signal(signal.SIGINT, _interrupted)
    telling = _Telling(session, told)
    item = None
    try:
        while True:
            told.send(("more", None))
            places = told.recv()
            if not places:
                break
            items = [session.items[place] for place in places]
            for item, following in zip(items, [*items[1:], _AnotherFile(session)], strict=True):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    finally:
        if item is not None:
            _end_what_is_shared(item, telling)


def _interrupted(*_: Any) -> None:
    """Once, by the terminal or by pytest's own process: what it ends then is not interrupted again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_what_is_shared(last: pytest.Item, telling: _Telling) -> None:
    """The fixtures of the whole session; what fails in them is told as an error of the test that was run last."""
    state: Any = last.session._setupstate
    call = pytest.CallInfo.from_call(lambda: state.teardown_exact(None), when="teardown")
    if call.excinfo is not None:
        telling.report(last.config.hook.pytest_runtest_makereport(item=last, call=call))

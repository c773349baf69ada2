"""An address that judges: whatever it answers, the rollout ends with a reason, in time, and the key stays here."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from leeway.config.inputs import AuxiliaryModel
from leeway.envs import auxiliary
from leeway.envs.auxiliary import AuxiliaryClient, AuxiliaryError

Behave = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def server() -> Iterator[Callable[[Behave], tuple[str, list[str]]]]:
    """server(behave) starts one; returns its address and the paths and keys that it was asked with."""
    started: list[ThreadingHTTPServer] = []

    def start(behave: Behave) -> tuple[str, list[str]]:
        seen: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                seen.append(f"{self.path} {self.headers.get('authorization')}")
                self.rfile.read(int(self.headers.get("content-length", 0)))
                try:
                    behave(self)
                except OSError:  # the client has left
                    pass

            do_GET = do_POST

            def log_message(self, *args: object) -> None:
                pass

        listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        listening.daemon_threads = True
        threading.Thread(target=listening.serve_forever, daemon=True, kwargs={"poll_interval": 0.01}).start()
        started.append(listening)
        return f"http://127.0.0.1:{listening.server_port}/v1", seen

    yield start
    for listening in started:
        listening.shutdown()
        listening.server_close()


def ask(url: str, **settings: float) -> str:
    model = {"url": url, "model": "m", "key_variable": "JUDGE_KEY", "retries": 0, "timeout_s": 200.0, **settings}
    return asyncio.run(AuxiliaryClient("j", AuxiliaryModel.model_validate(model)).complete("x"))


def says(body: bytes, *headers: tuple[str, str], status: int = 200) -> Behave:
    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in (*headers, ("content-length", str(len(body)))):
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return behave


@pytest.mark.attack
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_key_is_sent_nowhere_else(
    status: int, server: Callable[[Behave], tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    other, seen_by_other = server(says(b'{"choices": [{"text": "SCORE: 10"}]}'))
    url, seen = server(says(b"", ("location", f"{other}/x"), status=status))
    with pytest.raises(AuxiliaryError, match=f"HTTP {status}"):
        ask(url)
    assert seen == ["/v1/completions Bearer secret"]
    assert seen_by_other == []


@pytest.mark.attack
@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{", b'{"choices": []}', b'{"choices": [{"text": 1e999}]}'[:20], b"[" * 100_000, b"\xff\xfe",
     b'{"choices": {"0": {"text": "x"}}}', b"<html>SCORE: 10</html>"],
)  # fmt: skip
def test_nonsense_is_an_error_with_a_name(body: bytes, server: Callable[[Behave], tuple[str, list[str]]]) -> None:
    url, _ = server(says(body))
    with pytest.raises(AuxiliaryError, match=r"env\.models\.j at http"):
        ask(url)


@pytest.mark.attack
def test_an_endless_answer_is_cut_off(
    server: Callable[[Behave], tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auxiliary, "MAX_ANSWER_BYTES", 1 << 20)

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b" " * (1 << 16))

    url, _ = server(endless)
    with pytest.raises(AuxiliaryError, match="an answer of more than 1 MiB"):
        ask(url)


@pytest.mark.attack
def test_an_answer_byte_by_byte_keeps_no_thread(server: Callable[[Behave], tuple[str, list[str]]]) -> None:
    left = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(3000):
                handler.wfile.write(b" ")
                time.sleep(0.1)
        except OSError:
            left.set()
            raise

    url, _ = server(drip)
    with pytest.raises(AuxiliaryError, match="no answer within"):
        ask(url, timeout_s=0.3)
    assert left.wait(200), "the client's thread still reads"

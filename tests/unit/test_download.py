"""`leeway download` against servers that speak the hubs' interfaces: broken connections, pickles, tokens."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub.constants
import pytest

SHA = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = bytes(range(256)) * 4096
MODEL = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"\x80pickle",
    "original/x.pth": b"\x80",
}


@dataclass
class Hub:
    """What one server has, how often it breaks a large file off in its middle, and what it was asked."""

    files: dict[str, bytes]
    breaks: int = 0
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def ranges(self, name: str) -> list[str | None]:
        return [h.get("range") for method, path, h in self.asked if method == "GET" and path.endswith(name)]


class Answers(BaseHTTPRequestHandler):
    """The few calls that both hubs' clients make."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        path, query = unquote(split.path), {k: v[0] for k, v in parse_qs(split.query).items()}
        self.hub.asked.append(
            (self.command, query.get("FilePath", path), {k.lower(): v for k, v in self.headers.items()})
        )
        parts = path.strip("/").split("/")
        if "private" in path:
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if "FilePath" in query:
            return self._file(query["FilePath"])
        if path.endswith(("/repo/files", "/repo/tree")):
            return self._json({"Data": {"Files": [] if query.get("PageNumber", "1") != "1" else self._modelscope()}})
        if parts[0] == "api" and "tree" in parts:
            return self._json([self._entry(name) for name in self.hub.files])
        if parts[0] == "api":
            siblings = [{"rfilename": name} for name in self.hub.files]
            return self._json({"id": "org/m", "modelId": "org/m", "sha": SHA, "siblings": siblings})
        return self._file(path.partition(f"/resolve/{SHA}/")[2])

    def _entry(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(self.hub.files[name]), "oid": self._digest(name)[:40]}

    def _modelscope(self) -> list[dict[str, Any]]:
        files = [
            {"Path": n, "Size": len(d), "Sha256": self._digest(n), "Type": "blob"} for n, d in self.hub.files.items()
        ]
        return [{"Path": "original", "Size": 0, "Type": "tree"}, *files]

    def _digest(self, name: str) -> str:
        return hashlib.sha256(self.hub.files[name]).hexdigest()

    def _json(self, said: Any) -> None:
        self._send(200, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        whole = self.hub.files[name]
        about = {"ETag": f'"{self._digest(name)[:40]}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if "Range" in self.headers:
            about["Content-Range"] = f"bytes {start}-{len(whole) - 1}/{len(whole)}"
        rest = whole[start:]
        is_broken = self.hub.breaks > 0 and len(rest) > 1000 and self.command == "GET"
        self.hub.breaks -= is_broken
        self._send(206 if "Range" in self.headers else 200, rest, about, cut=len(rest) // 2 if is_broken else None)

    def _send(self, code: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hub]]:
    """Both hubs' clients ask this server, as HF_ENDPOINT and MODELSCOPE_ENDPOINT would have it."""
    servers = []

    def start(files: dict[str, bytes] = MODEL, **settings: Any) -> Hub:
        hub = Hub(dict(files), **settings)
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Of", (Answers,), {"hub": hub}))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", address)
        return hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)  # it resumes whole chunks
    for variable in ("HF_TOKEN", "MODELSCOPE_API_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


BOTH = pytest.mark.parametrize("source", ["huggingface", "modelscope"])


@BOTH
def test_a_model_comes_whole_through_a_broken_connection_and_without_its_pickles(
    serve: Any, leeway: Any, tmp_path: Path, source: str
) -> None:
    hub = serve(breaks=1)
    done = leeway("download", "model", "org/m", "--into", "m", "--from", source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("model.path=m")
    assert (tmp_path / "m/model.safetensors").read_bytes() == WEIGHTS
    assert not list(tmp_path.glob("m/**/*.bin")) + list(tmp_path.glob("m/**/*.pth"))
    assert not [path for _, path, _ in hub.asked if path.endswith((".bin", ".pth"))], "not even asked for"
    ranges = hub.ranges("model.safetensors")
    assert len(ranges) == 2
    assert ranges[1] is not None
    assert 0 < int(ranges[1].removeprefix("bytes=").rstrip("-")) <= len(WEIGHTS) // 2, "it went on, not anew"
    before = len(hub.ranges("model.safetensors"))
    assert leeway("download", "model", "org/m", "--into", "m", "--from", source).returncode == 0
    assert len(hub.ranges("model.safetensors")) == before, "what is there is not fetched again"


def test_a_command_that_broke_off_goes_on_when_it_is_given_again(serve: Any, leeway: Any, tmp_path: Path) -> None:
    hub = serve(breaks=100)
    first = leeway("download", "model", "org/m", "--into", "m", "--from", "modelscope")
    assert first.returncode == 1
    assert "the same command again" in first.stderr.splitlines()[-1]
    assert not (tmp_path / "m/model.safetensors").exists()
    hub.breaks = 0
    hub.asked.clear()
    assert leeway("download", "model", "org/m", "--into", "m", "--from", "modelscope").returncode == 0
    assert (tmp_path / "m/model.safetensors").read_bytes() == WEIGHTS
    [range_] = hub.ranges("model.safetensors")
    assert int(range_.removeprefix("bytes=").rstrip("-")) >= len(WEIGHTS) // 2


@BOTH
def test_a_data_set_of_two_subsets(serve: Any, leeway: Any, tmp_path: Path, source: str) -> None:
    files = {"README.md": b"# x", "main/train-00000-of-00001.parquet": b"PAR1", "socratic/a.parquet": b"PAR1"}
    hub = serve({**files, "dataset_infos.json": b"{}"})
    done = leeway("download", "dataset", "org/d", "--into", "d", "--from", source, "--ignore", "socratic/*")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("task.name=hf task.path=d")
    kept = {str(path.relative_to(tmp_path / "d")) for path in (tmp_path / "d").rglob("*.*") if path.is_file()}
    own = {name for name in kept if not name.startswith(".cache")} - {"dataset_infos.json"}
    assert own == {"README.md", "main/train-00000-of-00001.parquet"}
    assert ("dataset_infos.json" in kept) == (source == "huggingface"), "ModelScope's has no types"
    assert any("/datasets/" in path for _, path, _ in hub.asked)


def test_a_token_is_sent_and_never_shown(serve: Any, leeway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = serve()
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_mine")
    done = leeway("download", "model", "org/private")
    assert done.returncode == 2
    assert "expected a model on http://127" in done.stderr
    assert any(h.get("authorization") == "Bearer hf_secret_of_mine" for _, _, h in hub.asked)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms-secret-of-mine")
    ms = leeway("download", "model", "org/private", "--from", "modelscope", "--into", "m")
    assert ms.returncode == 1
    assert any("ms-secret-of-mine" in h.get("cookie", "") for _, _, h in hub.asked)
    assert "secret" not in done.stdout + done.stderr + ms.stdout + ms.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["model", "org/m", "--from", "modelscope"], 2, "--into: .*expected a folder"),
        (["model", "../../etc"], 2, "expected a model on"),
        (["weights", "org/m"], 2, "weights"),
    ],
)
def test_refusals_are_one_line(serve: Any, leeway: Any, arguments: list[str], code: int, said: str) -> None:
    serve()
    done = leeway("download", *arguments)
    assert done.returncode == code
    assert re.search(said, done.stderr)


def test_a_model_of_pickles_alone_is_refused_before_anything_is_fetched(serve: Any, leeway: Any) -> None:
    hub = serve({"config.json": b"{}", "pytorch_model.bin": b"\x80"})
    done = leeway("download", "model", "org/m", "--into", "m")
    assert done.returncode == 2
    assert ".safetensors, not as pickles" in done.stderr
    assert not [path for _, path, _ in hub.asked if "/resolve/" in path]


def test_no_network_and_offline_are_one_clear_line(serve: Any, leeway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    serve()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    gone = leeway("download", "model", "org/m", "--into", "m")
    assert gone.returncode == 1
    assert "check the network" in gone.stderr.splitlines()[-1]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    offline = leeway("download", "model", "org/m", "--into", "m")
    assert offline.returncode == 2
    assert "HF_HUB_OFFLINE is set" in offline.stderr
    assert len(offline.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", "..\\evil"])
def test_a_list_of_files_cannot_write_outside_the_folder(serve: Any, leeway: Any, tmp_path: Path, name: str) -> None:
    serve({"model.safetensors": b"x", name: b"evil"})
    done = leeway("download", "model", "org/m", "--into", "inside/m", "--from", "modelscope")
    assert done.returncode == 1
    assert "within the repository" in done.stderr
    assert not [path for path in tmp_path.rglob("*evil*")]


def test_bytes_of_another_digest_are_thrown_away(serve: Any, leeway: Any, tmp_path: Path, monkeypatch: Any) -> None:
    serve()
    monkeypatch.setattr(Answers, "_digest", lambda self, name: "0" * 64)
    done = leeway("download", "model", "org/m", "--into", "m", "--from", "modelscope")
    assert done.returncode == 1
    assert "has SHA-256" in done.stderr
    assert not list((tmp_path / "m").glob("config.json*"))

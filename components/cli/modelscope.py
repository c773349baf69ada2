"""Files of ModelScope, by its HTTP interface: one list, then each file, resumed by ranges and checked by its digest."""

from __future__ import annotations

import hashlib
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..redaction import hide

ENDPOINT = "https://www.modelscope.cn"
TIMEOUT_S = 30.0
ATTEMPTS = 5
PAGE = 200
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """`path`: within the repository. `sha256`: hex, empty where the hub has none."""

    path: str
    num_bytes: int
    sha256: str


class ModelScope:
    """One repository. `MODELSCOPE_ENDPOINT` names another server. Raises OSError or ValueError in one line."""

    def __init__(self, kind: str, name: str, *, revision: str, token: str | None) -> None:
        self.endpoint = os.environ.get("MODELSCOPE_ENDPOINT", ENDPOINT).rstrip("/")
        self._kind, self._revision = kind, revision
        self._address = f"{self.endpoint}/api/v1/{kind}s/{urllib.parse.quote(name)}/repo"
        self._headers = {"User-Agent": "leeway"}
        if token is not None:
            hide({token: "MODELSCOPE_API_TOKEN"})
            self._headers["Cookie"] = f"m_session_id={token}"
        self._opener = urllib.request.build_opener(_TokenStaysHome)

    def files(self) -> list[RemoteFile]:
        if self._kind == "model":
            return self._list("files", Recursive="true")
        found: list[RemoteFile] = []
        for page in range(1, 10_000):
            more = self._list("tree", Recursive="true", PageNumber=str(page), PageSize=str(PAGE))
            if not more or more[0] in found:
                break
            found += more
        return found

    def fetch(self, file: RemoteFile, folder: Path) -> None:
        """Write the file under `folder`, unless it is there. Of an interrupted one, what came is kept beside it."""
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or "\\" in file.path or not path.parts:
            raise ValueError(f"got a file named {file.path[:100]!r}, expected a path within the repository")
        target = folder / path
        if target.is_file() and target.stat().st_size == file.num_bytes:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._append(file, part)
                break
            except (OSError, EOFError):
                if attempt == ATTEMPTS:
                    raise
        if file.sha256 and (got := _sha256(part)) != file.sha256:
            part.unlink()
            raise ValueError(
                f"{file.path} has SHA-256 {got[:16]}..., expected {file.sha256[:16]}...; it was thrown away"
            )
        part.replace(target)

    def _append(self, file: RemoteFile, part: Path) -> None:
        """Raises OSError where the connection ends before the file does."""
        have = part.stat().st_size if part.is_file() else 0
        if have < file.num_bytes:
            query = {"Revision": self._revision, "FilePath": file.path}
            with self._open("", query, {"Range": f"bytes={have}-"}) as answer:
                mode = "ab" if answer.status == 206 else "wb"
                with part.open(mode) as out:
                    while chunk := answer.read(CHUNK_BYTES):
                        out.write(chunk)
        else:
            part.touch()
        if (got := part.stat().st_size) != file.num_bytes:
            if got > file.num_bytes:
                part.unlink()
            raise OSError(f"{file.path}: got {got} bytes, expected {file.num_bytes}")

    def _list(self, what: str, **query: str) -> list[RemoteFile]:
        with self._open(f"/{what}", {"Revision": self._revision, **query}) as answer:
            said = json.load(answer)
        listed = said.get("Data") if isinstance(said, dict) else None
        listed = listed.get("Files") if isinstance(listed, dict) else None
        if not isinstance(listed, list):
            raise ValueError(f"{self.endpoint} lists no files of it: {str(said)[:120]}")
        return [_file(item) for item in listed if isinstance(item, dict) and item.get("Type") != "tree"]

    def _open(self, path: str, query: Mapping[str, str], headers: Mapping[str, str] | None = None) -> Any:
        address = f"{self._address}{path}?{urllib.parse.urlencode(query)}"
        request = urllib.request.Request(address, headers={**self._headers, **(headers or {})})
        return self._opener.open(request, timeout=TIMEOUT_S)


class _TokenStaysHome(urllib.request.HTTPRedirectHandler):
    """Files are often on another host, which has no business with the login."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and new.host != req.host:
            new.remove_header("Cookie")
        return new


def _file(item: Mapping[str, Any]) -> RemoteFile:
    path, size, digest = item.get("Path"), item.get("Size"), item.get("Sha256")
    if not isinstance(path, str) or not isinstance(size, int):
        raise ValueError(f"got {str(item)[:120]} in the list of files, expected a Path and a Size")
    return RemoteFile(path, size, digest if isinstance(digest, str) else "")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

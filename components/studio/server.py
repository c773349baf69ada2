"""The studio's server, on this machine alone: whoever has the token may start runs as you.

GET  /?token=...      sets a cookie and forwards to the page
GET  /api/form        every setting
POST /api/check       {config, overrides, whole}: the verdict, the numbers that follow, the YAML, the difference
POST /api/run         {config, recipe, overrides}: starts the run, once its settings are right
GET  /api/runs        the runs that were started here
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from ..config import ConfigError
from ..library.job import Job, run
from ..watch.serve import LOOPBACK, listening_at, serve_app
from ..watch.server import Guard
from ..watch.shown import shown_value
from .check import Checker
from .form import form

PAGE = Path(__file__).parent / "page"
SHARED = Path(__file__).parents[1] / "watch/page"
FILES = {
    "index.html": (PAGE, "text/html; charset=utf-8"),
    "studio.css": (PAGE, "text/css; charset=utf-8"),
    "studio.js": (PAGE, "text/javascript; charset=utf-8"),
    "style.css": (SHARED, "text/css; charset=utf-8"),
    "dom.js": (SHARED, "text/javascript; charset=utf-8"),
}
MOST_BYTES, MOST_OVERRIDES = 1 << 20, 1000
LAST_LINES = 12


class BadRequest(ValueError):
    """What was sent cannot be used, in one line."""


def studio(config: str, *, port: int) -> None:
    """Serve until it is interrupted. Runs that were started go on."""
    token = secrets.token_urlsafe(24)
    listening = listening_at("127.0.0.1", port)
    port = listening.getsockname()[1]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app = build_app(config, token=token, cookie=f"leeway_studio_{port}")
        print(f"leeway: studio: http://127.0.0.1:{port}/?token={token}", flush=True)
        asyncio.run(serve_app(app, listening))
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()


def build_app(config: str, *, token: str, cookie: str = "leeway_studio") -> Starlette:
    """`config`: what the page opens with."""
    checker = Checker()
    jobs: list[Job] = []

    async def index(request: Request) -> Response:
        return _file("index.html")

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        return _file(name) if name in FILES else JSONResponse({"error": "no such file"}, 404)

    async def the_form(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(form) | {"config": config})

    async def check(request: Request) -> Response:
        try:
            wanted, overrides, content = await _asked(request)
            found = await checker.check(wanted, overrides, whole=content.get("whole") is True)
        except BadRequest as error:
            return JSONResponse({"error": str(error)}, 400)
        except TimeoutError:
            return JSONResponse({"error": "the check took too long"}, 504)
        return JSONResponse(shown_value(found))

    async def start(request: Request) -> Response:
        try:
            wanted, overrides, content = await _asked(request)
            recipe = content.get("recipe")
            if not isinstance(recipe, str) or recipe.startswith("-"):
                raise BadRequest("recipe: expected a name")
            job = await run_in_threadpool(run, recipe, wanted, overrides)
        except (BadRequest, ConfigError) as error:
            return JSONResponse(shown_value({"error": str(error)}), 400)
        jobs.append(job)
        return JSONResponse(_about(job))

    async def runs(request: Request) -> Response:
        return JSONResponse([_about(job) for job in jobs])

    routes = [
        Route("/", index),
        Route("/page/{name}", static),
        Route("/api/form", the_form),
        Route("/api/check", check, methods=["POST"]),
        Route("/api/run", start, methods=["POST"]),
        Route("/api/runs", runs),
    ]
    app = Starlette(routes=routes)
    app.add_middleware(
        Guard,
        token=token,
        hosts=LOOPBACK,
        cookie=cookie,
        opened_by="leeway studio",
        methods=("GET", "HEAD", "POST"),
    )
    return app


async def _asked(request: Request) -> tuple[str, list[str], dict[str, Any]]:
    """(config, overrides, all that was sent)."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise BadRequest(f"expected at most {MOST_BYTES} bytes")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest("expected JSON") from None
    config, overrides = (content.get("config"), content.get("overrides")) if isinstance(content, dict) else (None, None)
    if not isinstance(config, str) or not config or config.startswith("-") or "\0" in config:
        raise BadRequest("config: expected a bundled config or a file")
    if not isinstance(overrides, list) or len(overrides) > MOST_OVERRIDES:
        raise BadRequest(f"overrides: expected a list of at most {MOST_OVERRIDES}")
    if any(not isinstance(one, str) or "=" not in one or one.startswith("-") or "\0" in one for one in overrides):
        raise BadRequest("overrides: expected key=value")
    return config, overrides, content


def _about(job: Job) -> dict[str, Any]:
    last = job.output[-20_000:].splitlines()[-LAST_LINES:]
    return shown_value({"path": str(job.path), "status": job.status, "pid": job.pid, "last": last})


def _file(name: str) -> Response:
    folder, kind = FILES[name]
    return FileResponse(folder / name, headers={"Content-Type": kind})

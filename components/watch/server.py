"""The page's server: read-only, on this machine alone, for those who have the token.

    GET /?token=...          sets a cookie and forwards to the page
    GET /api/overview        runs, stages, sentences, advisories
    GET /api/events          the same as server-sent events, whenever it changes
    GET /api/words           what each metric means
    GET /api/series          metrics of a stage, thinned
    GET /api/rollouts        a filtered list; /api/rollout: one of them with its tokens
    GET /api/lanes           spans between two times

What files say is data: it leaves as JSON, with every character visible, and the page writes it as text.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from ..monitor.metrics import sections
from .index import SORTS
from .rollouts import readable
from .shown import shown_value
from .watcher import Watcher, overview_text

PAGE = Path(__file__).parent / "page"
FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
    **{
        f"{name}.js": "text/javascript; charset=utf-8"
        for name in ("app", "dom", "charts", "timeline", "rollouts", "api")
    },
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MAX_NAMES = 60
MAX_LIMIT = 200
SHOWN_STEPS = 10
"""What the timeline opens with."""
EVENT_EVERY_S = 1.0
FIRST_EVENT_EVERY_S = 0.05
"""Until the first stage has been looked at: somebody waits for it."""
ALIVE_EVERY_S = 15.0
_FILTERS = (*(f"{name}_{end}" for name in ("reward", "lag", "tokens", "step") for end in ("min", "max")),)


class BadRequest(ValueError):
    """A parameter that cannot be used, in one line."""


def build_app(
    watcher: Watcher, *, token: str | None, hosts: frozenset[str] | None, cookie: str = "leeway_watch"
) -> Starlette:
    """`token`: None lets everybody in. `hosts`: names that the page is asked for under, without port; another one is a
    page of somebody else's that was made to point here, and is refused. None: any; the cookie is bound to its name.
    """

    async def index(request: Request) -> Response:
        return _file("index.html")

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        return _file(name) if name in FILES else _refused(404, "no such file")

    def answers(compute: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        return answers_with(lambda request: _encoded(compute(request)))

    def answers_once(compute: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        """One that only new lines change."""

        def encoded(request: Request) -> bytes:
            asked, revision = (request.url.path, request.url.query), _stage(watcher, request).revision
            return watcher.kept(asked, revision, lambda: _encoded(compute(request)))

        return answers_with(encoded)

    def answers_with(encoded: Callable[[Request], bytes]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return Response(await run_in_threadpool(encoded, request), media_type="application/json")
            except BadRequest as error:
                return _refused(400, str(error))
            except KeyError:
                return _refused(404, "no such run, stage or rollout")

        return endpoint

    async def events(request: Request) -> Response:
        return StreamingResponse(feed.listen(request), media_type="text/event-stream")

    feed = _Feed(watcher)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(feed.follow())
        yield
        following.cancel()

    routes = [
        Route("/", index),
        Route("/page/{name}", static),
        Route("/api/overview", answers(lambda request: watcher.overview())),
        Route("/api/words", answers(lambda request: words())),
        Route("/api/names", answers_once(lambda request: _names(watcher, request))),
        Route("/api/series", answers_once(lambda request: _series(watcher, request))),
        Route("/api/lags", answers_once(lambda request: _stage(watcher, request).index.lags())),
        Route("/api/rollouts", answers(lambda request: _rollouts(watcher, request))),
        Route("/api/rollout", answers(lambda request: _rollout(watcher, request))),
        Route("/api/lanes", answers_once(lambda request: _lanes(watcher, request))),
        Route("/api/events", events),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.end = feed.end
    app.add_middleware(Guard, token=token, hosts=hosts, cookie=cookie, opened_by="leeway watch")
    return app


class Guard:
    """Refuses who has no token, and whoever was sent here by another site; adds the headers to every answer.

    The token in the address that was printed becomes a cookie, and leaves the address. `opened_by`: the command that
    prints it. `methods`: what may be asked; a POST must say that it is JSON, which no form of another site can.
    """

    def __init__(
        self,
        app: Any,
        *,
        token: str | None,
        hosts: frozenset[str] | None,
        cookie: str,
        opened_by: str,
        methods: tuple[str, ...] = ("GET", "HEAD"),
    ) -> None:
        self._app, self._token, self._hosts, self._cookie = app, token, hosts, cookie
        self._opened_by, self._methods = opened_by, methods

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        request = Request(scope)
        answer = self._at_the_door(request)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _at_the_door(self, request: Request) -> Response | None:
        """The answer to who may not come in, and to who comes with the token; None: let in."""
        host = request.headers.get("host", "")
        name = host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if self._hosts is not None and name.lower() not in self._hosts:
            return _refused(421, "this address is not served here")
        if request.method not in self._methods:
            return _refused(405, f"expected {' or '.join(self._methods)}")
        if request.method == "POST" and request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return _refused(415, "expected application/json")
        if self._token is None:
            return None
        given = request.cookies.get(self._cookie) or ""
        is_entry = request.url.path == "/" and "token" in request.query_params
        if is_entry:
            given = request.query_params["token"]
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode()):
            return _refused(401, f"open the address that `{self._opened_by}` printed: it has the token")
        if is_entry:
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return answer
        return None


class _Feed:
    """The overview for all who listen: made once a change, however many they are."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._text = overview_text(watcher.overview())
        self._changed = asyncio.Event()  # the next change; one is set once
        self._number = 0
        self._ended = False

    async def end(self) -> None:
        """Let the listeners go; a server that stops waits for them."""
        self._ended = True
        self._tell()

    async def follow(self) -> None:
        while True:
            begun = any(run["stages"] for run in self._watcher.overview())
            await asyncio.sleep(EVENT_EVERY_S if begun else FIRST_EVENT_EVERY_S)
            text = overview_text(self._watcher.overview())
            if text != self._text:
                self._text = text
                self._number += 1
                self._tell()

    def _tell(self) -> None:
        # A condition would do the same, but whoever leaves it takes its lock first, and may be cancelled at that again.
        self._changed.set()
        self._changed = asyncio.Event()

    async def listen(self, request: Request) -> AsyncIterator[str]:
        seen = -1
        while not await request.is_disconnected() and not self._ended:
            if seen != self._number:
                seen = self._number
                yield f"event: overview\ndata: {self._text}\n\n"
                continue
            try:
                await asyncio.wait_for(self._changed.wait(), ALIVE_EVERY_S)
            except TimeoutError:
                yield ": alive\n\n"


def words() -> dict[str, dict[str, str]]:
    """By metric name (or a pattern with <...>): unit, how to read it, when to look closer; as in docs/metrics.md."""
    return {
        name: {"unit": metric.unit, "meaning": metric.meaning, "look": metric.look}
        for section in sections()
        for metric in section.metrics
        for name in metric.names
    }


def _names(watcher: Watcher, request: Request) -> list[str]:
    return shown_value(sorted(_stage(watcher, request).index.names))


def _series(watcher: Watcher, request: Request) -> dict[str, Any]:
    _stage(watcher, request)
    run, stage = int(request.query_params["run"]), request.query_params["stage"]
    names = request.query_params.getlist("name")[:MAX_NAMES]
    start, stop = _number(request, "from", -math.inf), _number(request, "to", math.inf)
    points = int(_number(request, "points", 600))
    return {name: watcher.series(run, stage, name, start, stop, points) for name in names}


def _rollouts(watcher: Watcher, request: Request) -> dict[str, Any]:
    index = _stage(watcher, request).index
    given = request.query_params
    filters: dict[str, Any] = {key: _number(request, key, None) for key in _FILTERS}
    filters |= {key: given[key][:200] for key in ("task", "same_task", "reason", "sign") if given.get(key)}
    if given.get("group"):
        filters["group"] = _number(request, "group", None)
    sort = given.get("sort", "newest")
    if sort not in SORTS:
        raise BadRequest(f"sort: got {sort!r}, expected one of {', '.join(SORTS)}")
    limit = max(1, min(MAX_LIMIT, int(_number(request, "limit", 50))))
    found = index.find(filters, sort=sort, limit=limit, offset=max(0, int(_number(request, "offset", 0))))
    return shown_value(found | {"choices": index.choices()})


def _rollout(watcher: Watcher, request: Request) -> dict[str, Any]:
    stage = _stage(watcher, request)
    found = stage.index.rollout(int(_number(request, "id", -1)))
    if found is None:
        raise KeyError("rollout")
    row, line = found
    return readable(row, line, stage.pieces)


def _lanes(watcher: Watcher, request: Request) -> dict[str, Any]:
    stage = _stage(watcher, request)
    extent = stage.spans.extent()
    seconds = max(0.001, min(24 * 3600.0, _number(request, "seconds", stage.index.seconds_of_steps(SHOWN_STEPS))))
    stop = _number(request, "to", extent[1] if extent else 0.0)
    if extent is None:
        return {"lanes": [], "start": None, "stop": None, "extent": None}
    run, name = int(request.query_params["run"]), request.query_params["stage"]
    found = watcher.window(run, name, stop - seconds, stop)
    return shown_value(found | {"start": stop - seconds, "stop": stop, "extent": list(extent)})


def _stage(watcher: Watcher, request: Request) -> Any:
    try:
        return watcher.stage(int(request.query_params["run"]), request.query_params["stage"])
    except ValueError:
        raise BadRequest("run: expected a number") from None


def _number(request: Request, key: str, default: Any) -> Any:
    text = request.query_params.get(key)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 1e15:
        raise BadRequest(f"{key}: got {text[:40]!r}, expected a number")
    return value


def _file(name: str) -> Response:
    return FileResponse(PAGE / name, headers={"Content-Type": FILES[name]})


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status_code=status)

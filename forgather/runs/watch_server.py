"""Watched runs for a browser on this machine: a page, and what has changed since it asked last.

The input is `WatchedRuns`; the output is a server. It listens on the loopback address only. Each address begins with a
random token, which the page that was opened with it keeps; other pages of the same browser, and other users of the
machine, do not know it. A request must name this server as its host and, if it names an origin, as its origin; it must
be a GET without a body. Everything that is served is listed here: no word of a request is used as the name of a file.
"""

from __future__ import annotations

import hmac
import io
import json
import re
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from typing import Any

from forgather.errors import ProjectError
from forgather.runs.watch_data import changes_since
from forgather.runs.watched_runs import WatchedRuns

MAX_HEAD_BYTES, MAX_CONNECTIONS = 8192, 32
"""The size above which a request is refused, and the number of connections at a time."""
HEAD_SECONDS = 5.0
"""Units: seconds. The time in which a request must have arrived, and an answer must have been taken."""
_FRESH_SECONDS = 0.5
"""Units: seconds. The age at which the runs are read again for a request."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_PAGE = ("page.html", "page.css", "chart.js", "page.js")
_SINCE = re.compile(r"since=([0-9]{1,15})", re.ASCII)


class WatchServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves the page of watched runs until it is shut down.

    Args:
        watched: the runs.
        port: the port, or 0 for any free one.

    Raises:
        ProjectError: FG551 if the port cannot be used.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, watched: WatchedRuns, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._watched = watched
        self._read_at = float("-inf")
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        page = files("forgather.runs").joinpath("watch_page")
        self._files = {name: page.joinpath(name).read_bytes() for name in _PAGE}
        try:
            super().__init__(("127.0.0.1", port), _Request)
        except (OSError, OverflowError) as error:
            raise ProjectError(
                f"127.0.0.1:{port} cannot be served: {getattr(error, 'strerror', None) or error}",
                code="FG551",
                hint="give another --port, or leave it out for any free one",
            ) from None

    @property
    def address(self) -> str:
        """The address of the page, which contains the token."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def hosts(self) -> tuple[str, ...]:
        """Returns the names by which a request may call this server."""
        port = self.server_address[1]
        return f"127.0.0.1:{port}", f"localhost:{port}"

    def content_of(self, name: str, query: str) -> tuple[str, bytes] | None:
        """Returns the type and the content of what is served under a name; None if there is none.

        Args:
            name: what follows the token in an address.
            query: what follows the question mark, or "".
        """
        if name == "changes":
            since = _SINCE.fullmatch(query)
            return None if since is None else ("application/json", self._changes(int(since[1])))
        if query:
            return None
        content = self._files.get(name or "page.html")
        return None if content is None else (_TYPES[(name or "page.html").rpartition(".")[2]], content)

    def _changes(self, version: int) -> bytes:
        with self._watched.lock:
            if time.monotonic() - self._read_at >= _FRESH_SECONDS:
                # A folder that was removed has no news; the page keeps what it has.
                with suppress(ProjectError):
                    self._watched.update()
                self._read_at = time.monotonic()
            found = changes_since(self._watched, version)
        return json.dumps(found, allow_nan=False).encode()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a connection in a thread of its own; one too many is closed."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drops a connection that failed: the other side may have closed it at any moment."""


class _Request(BaseHTTPRequestHandler):
    """One connection with one request."""

    server: WatchServer
    server_version, sys_version = "forgather", ""

    def handle(self) -> None:
        """Reads the head of a request as a whole, with limits for its size and time, and answers it."""
        self.close_connection = True
        head = _head_of(self.connection)
        if head is None:
            return
        # From here on nothing is read from the connection.
        self.raw_requestline, _, rest = head.partition(b"\n")
        self.raw_requestline += b"\n"
        self.rfile = io.BytesIO(rest)
        if not self.parse_request():
            return
        refusal = self._refusal()
        if refusal is not None:
            self.send_error(refusal)
            return
        path, _, query = self.path.partition("?")
        content = self.server.content_of(path.removeprefix(f"/{self.server.token}/"), query)
        if content is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._send(HTTPStatus.OK, *content)

    def _refusal(self) -> HTTPStatus | None:
        """Returns the status with which a request is refused; None if it is answered."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0] not in self.server.hosts():
            return HTTPStatus.FORBIDDEN
        if any(origin != f"http://{hosts[0]}" for origin in self.headers.get_all("Origin", [])):
            return HTTPStatus.FORBIDDEN
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return HTTPStatus.FORBIDDEN
        given = self.path.partition("?")[0].removeprefix("/").partition("/")[0]
        if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.server.token.encode()):
            return HTTPStatus.FORBIDDEN
        if self.request_version not in ("HTTP/1.0", "HTTP/1.1"):
            return HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
        if self.command != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED
        has_body = "Transfer-Encoding" in self.headers or self.headers.get_all("Content-Length", ["0"]) != ["0"]
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE if has_body else None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends a refusal, which repeats no word of the request."""
        # A request of HTTP/0.9 would get an answer without headers.
        self.request_version = "HTTP/1.0"
        self.requestline, self.command = "", "GET"
        self._send(code, "text/plain", self.responses.get(code, ("refused", ""))[0].encode())

    def _send(self, code: int, kind: str, content: bytes) -> None:
        self.connection.settimeout(HEAD_SECONDS)
        self.send_response(code)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing: a request contains the token."""


def _head_of(connection: socket.socket, clock: Callable[[], float] = time.monotonic) -> bytes | None:
    """Returns the head of a request; None if it is too long, or does not arrive in time."""
    until, head = clock() + HEAD_SECONDS, b""
    with suppress(OSError):
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            left = until - clock()
            if left <= 0 or len(head) > MAX_HEAD_BYTES:
                return None
            connection.settimeout(left)
            part = connection.recv(MAX_HEAD_BYTES)
            if not part:
                return None
            head += part
        return head if len(head) <= MAX_HEAD_BYTES else None
    return None

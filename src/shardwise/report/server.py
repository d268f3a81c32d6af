"""A page served to this machine alone: on the loopback address, to whoever knows its token, and nothing else but the page."""

import hmac
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class PageServer(ThreadingHTTPServer):
    """`make` gives the page and a tag that changes with it; it is called for one request at a time."""

    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, make: Callable[[], tuple[str, str]], port: int = 0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.token = secrets.token_urlsafe(24)
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        self._make, self._lock = make, threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def page(self) -> tuple[bytes, str]:
        with self._lock:
            text, tag = self._make()
        return text.encode("utf-8", "replace"), f'"{tag}"'

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 20  # seconds for a request to arrive
    server_version, sys_version = "shardwise", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        if (
            self.headers.get("Host", "").lower() not in self.server.hosts
        ):  # a name of somebody else that leads here
            return self._refuse("this address is served to 127.0.0.1 alone")
        given = self.path.partition("?")[0].strip("/").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self.server.token.encode()):
            return self._refuse(
                "the token in the address is missing or wrong; the command has printed the whole address"
            )
        try:
            page, tag = self.server.page()
        except OSError as error:
            return self._send(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the run cannot be read: {error.strerror}\n".encode(),
                "text/plain",
                with_body,
            )
        if self.headers.get("If-None-Match") == tag:
            return self._send(HTTPStatus.NOT_MODIFIED, b"", "text/html", False, tag)
        return self._send(HTTPStatus.OK, page, "text/html", with_body, tag)

    def _refuse(self, why: str) -> None:
        self._send(HTTPStatus.FORBIDDEN, f"{why}\n".encode(), "text/plain", self.command != "HEAD")

    def _send(
        self, status: HTTPStatus, content: bytes, kind: str, with_body: bool, tag: str = ""
    ) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if tag:
            self.send_header("ETag", tag)
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: the address holds the token."""

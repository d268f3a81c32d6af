"""Serves one page to this machine only.

It listens on the loopback address, answers only requests that carry its token, and serves nothing
but the page. A token is needed because other users of the machine reach the loopback address too.
"""

import hmac
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# No other site may store, frame or embed the page, or learn its address.
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
    """An HTTP server for one page that is made anew for each request.

    Args:
        make_page: Returns the page and a tag that changes with it. Requests call it one at a time.
        port: Port on 127.0.0.1; 0 for a free one.

    Attributes:
        token: The secret part of the address.
        hosts: The values of the Host header that are answered.
    """

    daemon_threads = True
    # A second server on the same port is an error, not a takeover.
    allow_reuse_address = False

    def __init__(self, make_page: Callable[[], tuple[str, str]], port: int = 0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.token = secrets.token_urlsafe(24)
        self.hosts = {
            f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")
        }
        self._make_page = make_page
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def page(self) -> tuple[bytes, str]:
        """Return the page and its ETag."""
        with self._lock:
            text, tag = self._make_page()
        return text.encode("utf-8", "replace"), f'"{tag}"'

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of a connection: a browser may disconnect at any time."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    # Seconds until a request must have arrived.
    timeout = 20
    server_version, sys_version = "shardwise", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        # A foreign host name that resolves to 127.0.0.1 would let its site read the page.
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            return self._refuse("this page is served at 127.0.0.1 only")
        given = self.path.partition("?")[0].strip("/").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self.server.token.encode()):
            return self._refuse(
                "the token in the address is missing or wrong; "
                "use the complete address that 'shardwise report' printed"
            )
        try:
            page, tag = self.server.page()
        except OSError as error:
            text = f"cannot read the run: {error.strerror}\n"
            return self._send(
                HTTPStatus.SERVICE_UNAVAILABLE, text.encode(), "text/plain", with_body
            )
        if self.headers.get("If-None-Match") == tag:
            return self._send(HTTPStatus.NOT_MODIFIED, b"", "text/html", False, tag)
        return self._send(HTTPStatus.OK, page, "text/html", with_body, tag)

    def _refuse(self, reason: str) -> None:
        with_body = self.command != "HEAD"
        self._send(
            HTTPStatus.FORBIDDEN, f"{reason}\n".encode(), "text/plain", with_body
        )

    def _send(
        self,
        status: HTTPStatus,
        content: bytes,
        kind: str,
        with_body: bool,
        tag: str = "",
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

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the address contains the token."""

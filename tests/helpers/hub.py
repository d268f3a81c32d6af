"""A local Hugging Face Hub: the part of its protocol that a download needs, on loopback."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A running server.

    Attributes:
        models: the directory that it serves, with files at `owner/name/file`.
        requests: the method and the path of every request.
        url: the address of the server.
    """

    models: Path
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of `huggingface_hub`. Subclasses set `hub`."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.answer_api(parts[2:])
        elif parts[2:3] == ["resolve"]:
            self.answer_file(self.hub.models.joinpath(*parts[:2], parts[4]))
        else:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def answer_api(self, parts: list[str]) -> None:
        """Answer owner/name/revision/... and owner/name/tree/..."""
        name = "/".join(parts[:2])
        folder = self.hub.models / name
        if not folder.is_dir():
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        files = [file for file in sorted(folder.iterdir()) if file.is_file()]
        content: object
        if parts[2] == "revision":
            content = {
                "_id": "1",
                "id": name,
                "sha": COMMIT,
                "private": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": [{"rfilename": file.name} for file in files],
            }
        else:
            content = [
                {
                    "type": "file",
                    "path": file.name,
                    "size": file.stat().st_size,
                    "oid": digest(file.read_bytes()),
                }
                for file in files
            ]
        self.answer(200, json.dumps(content).encode())

    def answer_file(self, file: Path) -> None:
        if not file.is_file():
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = file.read_bytes()
        self.answer(
            200, content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT}
        )

    def answer(
        self, status: int, content: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve(models: Path) -> Iterator[Hub]:
    """Serve the models in a directory until the `with` statement ends."""
    hub = Hub(models)
    handler = type("HubHandler", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()

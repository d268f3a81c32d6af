"""A Hub of this machine: as much of its protocol as a download needs, on loopback, with the files of a directory."""

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
    models: Path  # owner/name/file
    asked: list[tuple[str, str]] = field(default_factory=list)  # method and path
    broken: str = ""  # files whose name ends so fail
    url: str = ""


@contextmanager
def serve(models: Path) -> Iterator[Hub]:
    hub = Hub(models)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path))
            words = path.strip("/").split("/")
            if (
                words[:2] == ["api", "models"]
                and (folder := models / "/".join(words[2:4])).is_dir()
            ):
                files = [file for file in sorted(folder.iterdir()) if file.is_file()]
                if words[4] == "revision":
                    about = {
                        "_id": "1",
                        "id": "/".join(words[2:4]),
                        "sha": COMMIT,
                        "private": False,
                        "downloads": 0,
                        "likes": 0,
                        "tags": [],
                    }
                    self.answer(
                        200,
                        json.dumps(
                            {**about, "siblings": [{"rfilename": file.name} for file in files]}
                        ).encode(),
                    )
                else:
                    entries = [
                        {
                            "type": "file",
                            "path": f.name,
                            "size": f.stat().st_size,
                            "oid": digest(f.read_bytes()),
                        }
                        for f in files
                    ]
                    self.answer(200, json.dumps(entries).encode())
            elif (
                words[2:3] == ["resolve"]
                and (file := models.joinpath(*words[:2], words[4])).is_file()
            ):
                if hub.broken and file.name.endswith(hub.broken):
                    self.answer(500, b"", {"X-Error-Message": "the disk is broken"})
                    return
                content = file.read_bytes()
                self.answer(200, content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT})
            else:
                code = (
                    {"X-Error-Code": "RepoNotFound"}
                    if words[:2] == ["api", "models"]
                    else {"X-Error-Code": "EntryNotFound"}
                )
                self.answer(404, b"", code)

        do_HEAD = do_GET

        def answer(
            self, status: int, content: bytes, headers: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(content)),
                **(headers or {}),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
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

"""The server of a live report: whom it answers, and what."""

import http.client
import threading

import pytest

from shardwise.report.server import PageServer


@pytest.fixture
def served():
    """Yield a running server, and a list that grows with every page that it makes."""
    made = []
    server = PageServer(lambda: (made.append(1) or "<p>page", "tag"))
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}
    )
    thread.start()
    yield server, made
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server, path, method="GET", host=None, **headers):
    """Send a request, and return status, body and headers of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {
        "Host": host or f"127.0.0.1:{server.server_port}",
        **headers,
    }.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


def test_requests_without_the_token_are_refused(served):
    server, made = served
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 32
    path = f"/{server.token}/"
    for wrong in (
        "/",
        "/../etc/passwd",
        f"/{server.token[:-1]}/",
        f"{path}metrics.jsonl",
        "/%00",
        "/%C3%A9",
    ):
        assert ask(server, wrong)[0] == 403
    assert made == []


def test_requests_for_another_host_are_refused(served):
    server, made = served
    for host in (
        "evil.example",
        f"evil.example:{server.server_port}",
        "127.0.0.1",
        f"127.0.0.1:{server.server_port}.evil.example",
    ):
        assert ask(server, f"/{server.token}/", host=host)[0] == 403
    assert made == []


def test_the_page_is_served_with_its_token(served):
    server, _ = served
    path = f"/{server.token}/"
    status, body, headers = ask(server, path)
    assert (status, body) == (200, b"<p>page")
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Server"].strip() == "shardwise"
    assert ask(server, path, host=f"localhost:{server.server_port}")[0] == 200
    assert ask(server, path, "HEAD")[:2] == (200, b"")
    assert ask(server, path, **{"If-None-Match": '"tag"'})[:2] == (304, b"")
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, path, method)[0] == 501


def test_a_run_that_cannot_be_read_is_an_error_of_the_server():
    def fail():
        raise PermissionError(13, "Permission denied")

    with PageServer(fail) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        thread.start()
        status, body, _ = ask(server, f"/{server.token}/")
        server.shutdown()
        thread.join()
    assert (status, body) == (503, b"cannot read the run: Permission denied\n")

"""The documentation site: it builds without warnings, is complete, and loads nothing else."""

import inspect
import json
import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

import shardwise
from tests.helpers.pages import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    done = subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built_and_in_the_navigation(site):
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = set(re.findall(r"[\w/]+\.md", str(settings["nav"])))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert named == pages
    assert {
        name for name in pages if not (site / name).with_suffix(".html").exists()
    } == set()
    assert settings["strict"] is True


def test_the_site_loads_nothing_from_other_hosts(site):
    """Scripts, styles, pictures and fonts are loaded; links that a reader may follow are not."""
    for page in site.rglob("*.html"):
        tags = re.findall(
            r"<(?:script|link|img|iframe|source|video|audio|object|embed)\b[^>]*>",
            page.read_text(),
        )
        loads = [
            tag
            for tag in tags
            if re.search(r"(?:src|href|data|srcset)=[\"']?(?:https?:)?//", tag)
            and 'rel="canonical"' not in tag
        ]
        assert loads == [], page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(
            r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()
        ), sheet.name


def test_the_reference_has_every_public_name(site):
    referred = set(
        re.findall(
            r"^::: (\S+)$",
            "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md")),
            re.MULTILINE,
        )
    )
    homes = {
        name: f"{getattr(shardwise, name).__module__}.{name}"
        for name in shardwise.__all__
        if not inspect.ismodule(getattr(shardwise, name))
    }
    assert {name for name, home in homes.items() if home not in referred} == set()
    text = "".join(Path(page).read_text() for page in (site / "api").glob("*.html"))
    assert {name for name in referred if f'id="{name}"' not in text} == set()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def address(site):
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(site))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_pages_request_nothing_from_other_hosts_and_show_code_side_by_side(
    browser, address
):
    browser.get_log("performance")
    for width, columns in ((1280, 2), (400, 1)):
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        for name in ("index", "errors", "api/index", "coming_from_pytorch"):
            browser.get(f"{address}/{name}.html")
            assert browser.find_elements("css selector", "h1")
            assert browser.execute_script(
                "return document.documentElement.scrollWidth <= window.innerWidth"
            ), (name, width)
        lefts = browser.execute_script(
            """return [...document.querySelector('.side').querySelectorAll(':scope > .highlight')]
                .map(e => e.getBoundingClientRect().left)"""
        )
        assert len(lefts) == 2
        assert len(set(lefts)) == columns
    messages = [
        json.loads(entry["message"])["message"]
        for entry in browser.get_log("performance")
    ]
    requested = {
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    }
    elsewhere = {
        url
        for url in requested
        if url.startswith(("http", "ws", "ftp")) and not url.startswith(address)
    }
    assert len([url for url in requested if url.startswith(address)]) > 5
    # chrome:// is the first page of the browser itself.
    assert elsewhere == set()

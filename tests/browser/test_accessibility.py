"""axe-core checks the pages as they are shown: light and dark, wide and narrow, all unfolded."""

from importlib.resources import files

import pytest

from shardwise.report.run_page import report_page
from shardwise.rundir.files import RunFiles
from tests.helpers.browser import set_screen
from tests.helpers.run_dirs import lines, make_run, step

# The label of a bar segment that is too narrow for it wraps out of sight. This version of axe-core
# compares it with what is there. The tests of colors check the segments instead.
RUN = """const done = arguments[arguments.length - 1];
axe.run({exclude: [[".stacked > span"]]}, {resultTypes: ["violations"]})
  .then((found) => done(found.violations), (error) => done([{id: String(error)}]));"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Make the report of a complete run, of a damaged one, and of several as a sweep has them."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [make_run(folder / name) for name in ("lr=0.001,seed=0", "lr=0.01,seed=0")]
    more = {"lr/muon": 0.1, "update_norm/head": 1.0}
    lines(
        runs[1] / "metrics.jsonl", [step(n, loss=9 / n, **more) for n in range(1, 1500)]
    )
    damaged = folder / "damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    (damaged / "metrics.jsonl").write_text('{"step": 1, "loss": "nan"}\n{"st\n')
    pages = {}
    for name, paths in {"run": runs[:1], "damaged": [damaged], "sweep": runs}.items():
        pages[name] = folder / f"{name}.html"
        text = report_page([RunFiles(path).read() for path in paths])
        pages[name].write_text(text, encoding="utf-8")
    return pages


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["run", "damaged", "sweep"])
def test_axe_finds_no_violations(browser, pages, name, width):
    for dark in (False, True):
        set_screen(browser, width, dark)
        browser.get(pages[name].as_uri())
        browser.execute_script(
            "for (const one of document.querySelectorAll('details')) one.open = true"
        )
        browser.execute_script((files("axe_core_python") / "axe.min.js").read_text())
        violations = [
            (
                rule["id"],
                rule.get("impact"),
                [node["target"] for node in rule.get("nodes", [])][:5],
            )
            for rule in browser.execute_async_script(RUN)
        ]
        assert violations == [], dark
    browser.get("about:blank")
    set_screen(browser)
    browser.get_log("browser"), browser.get_log("performance")

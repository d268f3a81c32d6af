"""The report in a real browser: keyboard, pointer, phone, paper, hostile names, live refresh.

What the charts draw is tested by test_curves.py.
"""

import json
import re
import subprocess
import sys
import time
from itertools import pairwise

import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By

from shardwise.report.html import STATIC
from shardwise.report.run_page import report_page
from shardwise.rundir.files import RunFiles
from tests.helpers.browser import (
    HOSTILE,
    contrast,
    overlapping,
    press,
    press_tab_until,
    set_screen,
    text,
    texts,
    too_wide,
)
from tests.helpers.run_dirs import T0, lines, make_run, step


@pytest.fixture
def show(browser, tmp_path):
    """Return a function that opens the report of runs.

    At the end the page must have requested nothing, and the browser must not have complained.
    """
    page = tmp_path / "report.html"

    def open_page(*paths, width=1280, dark=False, media="", names=None):
        names = names or [""] * len(paths)
        runs = [
            RunFiles(path, name).read() for path, name in zip(paths, names, strict=True)
        ]
        page.write_text(report_page(runs), encoding="utf-8")
        set_screen(browser, width, dark, media)
        browser.get_log("performance"), browser.get_log("browser")
        browser.get(page.as_uri())

    yield open_page
    events = [
        json.loads(entry["message"])["message"]
        for entry in browser.get_log("performance")
    ]
    requests = [
        e["params"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]
    assert {params["request"]["url"] for params in requests} <= {page.as_uri()}
    assert browser.get_log("browser") == []
    set_screen(browser)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Make a run that is long enough to be thinned, with an outlier and a missing value."""
    path = make_run(tmp_path_factory.mktemp("runs") / "long")
    records = [
        step(
            n,
            loss=3 + 40 / n + 0.1 * (n % 7),
            grad_norm=1 + 0.1 * (n % 5) + 99 * (n == 900),
        )
        for n in range(1, 2001)
    ]
    records[500]["loss"] = "nan"
    evaluations = [
        {"step": n, "eval_loss": 3.1 + 30 / n, "eval_accuracy": n / 4000}
        for n in range(100, 2001, 100)
    ]
    lines(path / "metrics.jsonl", [*records, *evaluations])
    about = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(about | {"steps": 2000}))
    return path


def find(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def attribute(browser, selector, name):
    return find(browser, selector).get_attribute(name)


def wait(browser, milliseconds=50):
    browser.execute_async_script("setTimeout(arguments[1], arguments[0])", milliseconds)


def test_the_summary_comes_first(browser, show, run):
    show(run)
    assert browser.title == text(browser, "h1") == "long"
    assert text(browser, "#summary h2").endswith("Finished: 2,000 steps")
    tiles = ["Training loss", "Validation loss", "Validation accuracy"]
    assert texts(browser, ".tile h3")[:3] == tiles
    sections = "Summary Curves Time Plan Memory Layout Samples History Run"
    assert texts(browser, "nav a") == sections.split()
    assert "about 3 steps" in text(browser, "#chart-loss .note")
    assert "training: 1 value not drawn" in text(browser, "#chart-loss .note")
    assert text(browser, "#chosen-name") == "blocks/0/up"
    # The hints on keys of both the curves and the layout are shown.
    assert "press the arrow keys" in text(browser, "#curves-help")
    assert "Use the arrow keys" in text(browser, "#layout .listing")


def test_a_chart_is_read_and_zoomed_by_keyboard(browser, show, run):
    show(run)
    plot = press_tab_until(browser, lambda one: one.get_attribute("role") == "slider")
    assert plot.get_attribute("aria-label") == "Loss: values at a step"
    outline = browser.execute_script(
        "return getComputedStyle(arguments[0]).outlineStyle", plot
    )
    assert outline == "solid"
    press(browser, Keys.HOME)
    first = plot.get_attribute("aria-valuetext")
    assert re.match(
        r"step 3: training [\d.]+ \([\d.]+ to 43\.1\), validation 3\.4$", first
    ), first
    press(browser, Keys.ARROW_RIGHT)
    assert plot.get_attribute("aria-valuenow") == "6"
    assert text(browser, "#chart-loss .at") == "step 6"
    press(browser, Keys.PAGE_UP)
    assert 30 < int(plot.get_attribute("aria-valuenow")) < 50
    press(browser, Keys.END)
    assert text(browser, "#chart-loss [data-series='1']") == "3.115"
    for _ in range(3):
        press(browser, "+")
    assert int(plot.get_attribute("aria-valuemin")) > 1500
    assert "Show all steps (now 1," in text(browser, "#show-all")
    # All charts show the same steps.
    assert int(attribute(browser, "#chart-lr .plot", "aria-valuemin")) > 1500
    press(browser, Keys.ESCAPE)
    assert int(plot.get_attribute("aria-valuemin")) <= 3
    assert not find(browser, "#show-all").is_enabled()


def test_zooming_adapts_the_y_axis(browser, show, run):
    show(run)

    def largest_label():
        labels = texts(browser, "#chart-loss .plot text.end:not(.across)")
        return max(float(label) for label in labels)

    find(browser, "#chart-loss .outliers input").click()
    assert largest_label() >= 30
    plot = find(browser, "#chart-loss .plot")
    plot.send_keys(Keys.END, "+", "+", "+")
    assert largest_label() < 4


def test_the_scale_and_smoothing_are_chosen_by_keyboard(browser, show, run):
    show(run)
    before = attribute(browser, "#chart-loss .line", "d")
    find(browser, "#chart-loss .log").send_keys(Keys.SPACE)
    assert attribute(browser, "#chart-loss .line", "d") != before
    assert len(browser.find_elements(By.CSS_SELECTOR, "#chart-loss .raw")) == 1
    slider = find(browser, "#smoothing")
    slider.send_keys(Keys.HOME)
    assert text(browser, "#smoothing-value") == "none"
    assert browser.find_elements(By.CSS_SELECTOR, "#chart-loss .raw") == []
    slider.send_keys(Keys.ARROW_RIGHT)
    assert text(browser, "#smoothing-value") == "0.5 %"
    assert slider.get_attribute("aria-valuetext") == "0.5 percent of the points"


def test_pointing_reads_values_and_dragging_zooms(browser, show, run):
    show(run)
    plot = find(browser, "#chart-grad .plot")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(browser).move_to_element(plot).perform()
    assert re.match(r"step (9|1,0)\d\d", text(browser, "#chart-grad .at"))
    assert len(browser.find_elements(By.CSS_SELECTOR, "#chart-grad .dot")) == 1
    ActionChains(browser).click_and_hold(plot).move_by_offset(
        100, 0
    ).release().perform()
    assert find(browser, "#show-all").is_enabled()
    assert 900 < int(plot.get_attribute("aria-valuemin")) < 1100
    find(browser, "#show-all").click()
    assert int(plot.get_attribute("aria-valuemin")) <= 3


def test_outliers_are_shown_on_request(browser, show, run):
    show(run)

    def largest_label():
        return max(
            float(label) for label in texts(browser, "#chart-grad .plot text.end")[:-1]
        )

    assert "1 value is outside the drawing" in text(browser, "#chart-grad")
    assert largest_label() < 50
    find(browser, "#chart-grad .outliers input").click()
    assert largest_label() > 50
    assert "outside" not in text(browser, "#chart-grad")
    # Where nothing is outside, there is no switch.
    assert not find(browser, "#chart-lr .outliers").is_displayed()


def x_axis(browser):
    """Return the unit of the x axis, and the part of the address after #."""
    unit = "return document.querySelector('#chart-loss .across').textContent"
    return browser.execute_script(unit), browser.execute_script("return location.hash")


def test_the_x_axis_is_chosen_by_keyboard(browser, show, tmp_path):
    """Two starts: 30 s, 70 s of downtime, 30 s. Step 21 ends after 50.5 s without the downtime."""
    show(make_run(tmp_path / "a"))
    press_tab_until(browser, lambda one: one.get_attribute("name") == "x")
    assert x_axis(browser) == ("step", "")
    press(browser, Keys.ARROW_RIGHT)
    assert x_axis(browser) == ("tokens", "#x=units")
    plot = find(browser, "#chart-loss .plot")
    assert plot.get_attribute("aria-label") == "Loss: values at a number of tokens"
    assert plot.get_attribute("aria-valuemax") == "10240"
    values = "10.24k tokens, step 40: training 0.125, validation 0.5"
    assert plot.get_attribute("aria-valuetext") == values
    press(browser, Keys.ARROW_RIGHT)
    assert x_axis(browser) == ("s", "#x=time")
    times = browser.execute_script(
        "return [20, 21, 40].map((step) => positionOfStep(0, step))"
    )
    assert times == [20, 50.5, 60]
    ends = "return charts.loss.series.map((series) => positions(series).at(-1))"
    assert browser.execute_script(ends) == [60, 60]

    plot.send_keys(Keys.HOME)
    assert text(browser, "#chart-loss .at") == "10.5 s, step 1"
    for _ in range(20):
        plot.send_keys(Keys.ARROW_RIGHT)
    assert text(browser, "#chart-loss .at") == "50.5 s, step 21"
    plot.send_keys("+")
    assert text(browser, "#show-all").startswith("Show all (now ")
    find(browser, "input[name=x][value=step]").send_keys(Keys.SPACE)
    assert x_axis(browser) == ("step", "")
    # The same steps of a single run stay in view.
    zoomed = [int(number) for number in re.findall(r"\d+", text(browser, "#show-all"))]
    assert 18 <= zoomed[0] <= 21 < zoomed[1] <= 40


def test_the_x_axis_is_kept_in_the_address(browser, show, tmp_path):
    show(make_run(tmp_path / "a"))
    find(browser, "input[name=x][value=time]").send_keys(Keys.SPACE)
    find(browser, "nav a[href='#run']").click()
    # The page changes the address after the browser has followed the link.
    deadline = time.monotonic() + 10
    while x_axis(browser) == ("s", "#run") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert x_axis(browser) == ("s", "#run&x=time")
    browser.refresh()
    assert x_axis(browser) == ("s", "#run&x=time")
    assert find(browser, "input[name=x][value=time]").is_selected()
    top = "return document.getElementById('run').getBoundingClientRect().top"
    assert 0 <= browser.execute_script(top) < 900
    # "constructor" is a property of every JavaScript object, but not an axis.
    for axis in ("units", "constructor"):
        browser.execute_script("location.hash = arguments[0]", f"x={axis}")
        wait(browser)
        assert x_axis(browser) == ("tokens", "#x=units")


def test_several_runs_over_the_time_of_each(browser, show, tmp_path):
    slow = make_run(tmp_path / "slow")
    records = [
        json.loads(line) for line in (slow / "metrics.jsonl").read_text().splitlines()
    ]
    timed = [{**r, "time": r["time"] + 2 * r["step"]} for r in records if "time" in r]
    lines(slow / "metrics.jsonl", timed)
    show(make_run(tmp_path / "quick"), slow)
    find(browser, "input[name=x][value=time]").send_keys(Keys.SPACE)
    ends = browser.execute_script(
        """return charts.lr.series.map(
            (series) => [series.run, positions(series)[0], positions(series).at(-1)])"""
    )
    # The first start of the slow run lasts 60 s, so its downtime is 40 s.
    assert ends == [[0, 10.5, 60], [1, 12.5, 170]]
    unit = "return document.querySelector('#chart-lr .across').textContent"
    assert browser.execute_script(unit) == "min"
    find(browser, "#chart-lr .plot").send_keys(Keys.END)
    assert text(browser, "#chart-lr .at") == "0:02:50"
    lines(
        slow / "metrics.jsonl",
        [{k: v for k, v in r.items() if k != "time"} for r in records],
    )
    show(tmp_path / "quick", slow)
    assert [label.strip() for label in texts(browser, ".axes label")] == [
        "steps",
        "tokens",
    ]


NAMED_ROLES = {
    "slider",
    "button",
    "checkbox",
    "link",
    "img",
    "image",
    "region",
    "heading",
    "navigation",
    "DisclosureTriangle",
}


def test_all_controls_and_drawings_have_names(browser, show, run):
    other = make_run(run.parent / "other")
    for paths in ([run, other], [run]):
        show(*paths)
        browser.execute_cdp_cmd("Accessibility.enable", {})
        nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        nodes = [node for node in nodes if not node["ignored"]]
        for node in nodes:
            if node["role"]["value"] in NAMED_ROLES:
                assert node["name"].get("value", "").strip(), node["role"]
        roles = [node["role"]["value"] for node in nodes]
        assert roles.count("slider") == 1 + len(
            browser.find_elements(By.CSS_SELECTOR, ".plot")
        )
        assert roles.count("checkbox") >= 6
    headings = "return [...document.querySelectorAll('h1,h2,h3')].map((e) => e.tagName)"
    levels = [int(tag[1]) for tag in browser.execute_script(headings)]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    without_headings = """return [...document.querySelectorAll("table")].filter(
        (t) => !t.tHead || [...t.tHead.rows[0].cells].some((c) => c.scope !== "col")).length"""
    assert browser.execute_script(without_headings) == 0
    assert browser.execute_script("return document.documentElement.lang") == "en"


def test_runs_differ_in_color_and_dashes_and_can_be_hidden(
    browser, show, tmp_path, run
):
    show(run, make_run(tmp_path / "other"))
    names = texts(browser, "#finals tbody td:first-child")
    assert [name.strip() for name in names] == ["long", "other"]
    styles = browser.execute_script(
        """return [...document.querySelectorAll('#chart-lr .line')].map((e) => getComputedStyle(e))
            .map((style) => [style.stroke, style.strokeDasharray])"""
    )
    assert (
        len({color for color, _ in styles[:2]})
        == len({dash for _, dash in styles[:2]})
        == 2
    )
    find(browser, "input.run[value='0']").send_keys(Keys.SPACE)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#chart-lr .plot .line")) == 1
    assert int(attribute(browser, "#chart-lr .plot", "aria-valuemax")) == 40
    assert too_wide(browser) == 0


@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone(browser, show, tmp_path, run, dark):
    long_name = make_run(tmp_path / ("a-run-with-a-rather-long-name-" * 3))
    for paths in ([run], [run, long_name]):
        show(*paths, width=360, dark=dark)
        assert too_wide(browser) == 0
        assert overlapping(browser) == []
        heights = browser.execute_script(
            """return [...document.querySelectorAll('.chart .plot text')]
                .map((e) => e.getBoundingClientRect().height)"""
        )
        assert min(heights) > 9
        background = "return getComputedStyle(document.body).backgroundColor"
        channels = map(int, re.findall(r"\d+", browser.execute_script(background)))
        assert (sum(channels) < 150) == dark


def test_on_paper(browser, show, run):
    show(run, media="print", dark=True)
    assert not find(browser, "#smoothing").is_displayed()
    assert find(browser, "#chart-loss").is_displayed()
    assert (
        browser.execute_script("return getComputedStyle(document.body).color")
        == "rgb(0, 0, 0)"
    )
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
    assert len(printed["data"]) > 50_000


@pytest.mark.parametrize("width", [1280, 360])
def test_everything_is_readable_without_scripts(browser, show, run, width):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show(run, width=width)
    finally:
        browser.execute_cdp_cmd(
            "Emulation.setScriptExecutionDisabled", {"value": False}
        )
    plot = find(browser, "#chart-loss .plot")
    assert plot.get_attribute("role") == "img"
    assert "maximum 43.1 (step 1)" in plot.get_attribute("aria-label")
    # Two curves, and two samples in the legend.
    assert len(browser.find_elements(By.CSS_SELECTOR, "#chart-loss .line")) == 4
    ends = texts(browser, "#chart-loss .plot text")
    assert ends[2:] == ["1", "step 2,000"]
    # The sketch shows means: the first point is that of steps 1 to 4.
    assert 20 < float(ends[0]) < 43.1
    assert 3 < float(ends[1]) < 3.4
    assert not find(browser, "#smoothing").is_displayed()
    assert len(texts(browser, "#chart-loss tbody tr")) == 16
    assert too_wide(browser) == 0
    assert overlapping(browser) == []


def test_hostile_content_is_text(browser, show, tmp_path):
    path = make_run(tmp_path / "a")
    nested = {
        name: {HOSTILE: HOSTILE}
        for name in ("arguments", "versions", "mesh", "model", "git")
    }
    plain = dict.fromkeys(("recipe", "devices", "source"), HOSTILE)
    (path / "run.json").write_text(json.dumps(nested | plain))
    metrics = {HOSTILE: 1.0, f"lr/{HOSTILE}": 0.5, f"eval_{HOSTILE}": 2.0}
    records = [{"step": n, "loss": 1.0 / n, **metrics} for n in range(1, 30)]
    lines(path / "metrics.jsonl", records)
    lines(path / "samples.jsonl", [{"step": 1, "text": HOSTILE}])
    show(path, names=[HOSTILE])
    assert texts(browser, "h1") == [HOSTILE]
    for plot in browser.find_elements(By.CSS_SELECTOR, ".plot"):
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
        ActionChains(browser).move_to_element(plot).perform()
    assert HOSTILE in text(browser, "#samples pre")
    show(path, path, names=[HOSTILE, "b" + HOSTILE])
    counts = (
        "return [document.scripts.length, document.images.length, typeof window.hacked]"
    )
    assert browser.execute_script(counts) == [2, 0, "undefined"]


def test_colors_have_enough_contrast():
    def schemes(name):
        style = (STATIC / name).read_text()
        roots = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
        return [dict(re.findall(r"--([\w-]+): (#\w{6})", root)) for root in roots[:2]]

    for base, curves in zip(
        schemes("page.css"), schemes("report_page.css"), strict=True
    ):
        assert len(curves) == 11
        for name, color in curves.items():
            assert contrast(color, base["page"]) >= 3, name
            if name.startswith("t"):
                assert contrast(base["on-kind"], color) >= 4.5, name


def wait_for_heading(browser, part, seconds=10):
    """Wait until the heading of the summary contains `part`."""
    # In one call: the element may be replaced at any time.
    heading = "return document.querySelector('#summary h2').textContent"
    deadline = time.monotonic() + seconds
    while part not in browser.execute_script(heading) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert part in browser.execute_script(heading)


def append_step(path, n, **more):
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(n, T0 + 100, **more)) + "\n")


def test_a_live_page_refreshes_in_place(browser, tmp_path):
    path = make_run(tmp_path / "live", steps=100)
    set_screen(browser)
    command = [sys.executable, "-m", "shardwise.cli", "report", str(path), "--watch"]
    with subprocess.Popen(
        [*command, "--every", "0.3"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            browser.get_log("browser")
            browser.get(process.stdout.readline().split()[1])
            plot = find(browser, "#chart-lr .plot")
            browser.execute_script(
                "arguments[0].scrollIntoView({block: 'center'}); arguments[0].focus()",
                plot,
            )
            press(browser, Keys.HOME, Keys.ARROW_RIGHT, "+")
            find(browser, "#chart-lr summary").click()
            browser.execute_script("arguments[0].focus()", plot)
            press(browser, Keys.HOME)
            zoomed = attribute(browser, "#chart-lr .plot", "aria-valuemax")
            scrolled = browser.execute_script("return scrollY")
            append_step(path, 101, lr=0.5)
            wait_for_heading(browser, "101 steps")
            # What the reader has zoomed, scrolled, opened, focused and read stays as it was.
            assert attribute(browser, "#chart-lr .plot", "aria-valuemax") == zoomed
            assert browser.execute_script("return scrollY") == scrolled > 0
            assert find(browser, "#chart-lr details").get_attribute("open")
            active = browser.switch_to.active_element
            assert (
                active.get_attribute("aria-label") == "Learning rate: values at a step"
            )
            assert active.get_attribute("aria-valuetext").startswith("step 2:")
            press(browser, "0")
            assert attribute(browser, "#chart-lr .plot", "aria-valuemax") == "101"
            assert "last refresh at" in text(browser, "#live")
            find(browser, "input[name=x][value=units]").send_keys(Keys.SPACE)
            append_step(path, 102)
            wait_for_heading(browser, "102 steps")
            assert x_axis(browser) == ("tokens", "#x=units")
            assert find(browser, "input[name=x][value=units]").is_selected()
            assert browser.get_log("browser") == []
        finally:
            process.terminate()
        assert process.wait(timeout=10) == 0
    deadline = time.monotonic() + 5
    while (
        "no longer served" not in text(browser, "#live") and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert "no longer served" in text(browser, "#live")
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")

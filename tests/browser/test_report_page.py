"""The report of a run in a real browser: drawn as Python draws it, by keyboard, on a phone, on paper, hostile, while it goes on."""

import json
import re
import subprocess
import sys
import time
from itertools import pairwise

import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By

from shardwise.report.charts import WIDTH, draw
from shardwise.report.run_page import report_page
from shardwise.report.sections.curves import charts_of
from shardwise.rundir.files import RunFiles
from tests.helpers.browser import (
    HOSTILE,
    contrast,
    overlapping,
    press,
    set_screen,
    text,
    texts,
    too_wide,
)
from tests.helpers.run_dirs import T0, lines, make_run, step

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@pytest.fixture
def show(browser, tmp_path):
    """Opens the report of runs from its file; at the end nothing was asked of a network and nothing was complained about."""
    page = tmp_path / "report.html"

    def open_page(*paths, width=1280, dark=False, media="", names=None):
        runs = [
            RunFiles(path, name).read()
            for path, name in zip(paths, names or [""] * len(paths), strict=True)
        ]
        page.write_text(report_page(runs), encoding="utf-8")
        set_screen(browser, width, dark, media)
        browser.get_log("performance"), browser.get_log("browser")
        browser.get(page.as_uri())
        return runs

    yield open_page
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    assert {
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    } <= {page.as_uri()}
    assert browser.get_log("browser") == []
    set_screen(browser)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Long enough to be thinned, with outliers and a number that is none."""
    path = make_run(tmp_path_factory.mktemp("runs") / "long")
    records = [
        step(n, loss=3 + 40 / n + 0.1 * (n % 7), grad_norm=1 + 0.1 * (n % 5) + 99 * (n == 900))
        for n in range(1, 2001)
    ]
    records[500]["loss"] = "nan"
    held_out = [
        {"step": n, "eval_loss": 3.1 + 30 / n, "eval_accuracy": n / 4000}
        for n in range(100, 2001, 100)
    ]
    lines(path / "metrics.jsonl", [*records, *held_out])
    about = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(about | {"steps": 2000}))
    return path


def figure(browser, name):
    return browser.find_element(By.ID, f"chart-{name}")


def attribute(browser, selector, name):
    return browser.find_element(By.CSS_SELECTOR, selector).get_attribute(name)


def test_it_says_what_matters_first(browser, show, run):
    show(run)
    assert browser.title == text(browser, "h1") == "long"
    assert text(browser, "#summary h2").endswith("Finished: 2,000 steps")
    assert texts(browser, ".tile h3")[:3] == ["Training loss", "Held-out loss", "Held-out accuracy"]
    assert texts(browser, "nav a") == [
        "Summary",
        "Curves",
        "Time",
        "Plan",
        "Memory",
        "Layout",
        "Samples",
        "History",
        "Run",
    ]
    assert "about 3 steps" in text(browser, "#chart-loss .note")
    assert "1 values cannot be drawn" in text(browser, "#chart-loss .note")
    assert text(browser, "#chosen-name") == "blocks/0/up"


@pytest.mark.parametrize("is_log", [False, True])
def test_the_script_draws_what_python_draws(browser, show, run, is_log):
    for chart in charts_of(show(run)):
        expected, outside = draw(chart, is_log=is_log, width=WIDTH)
        found = browser.execute_script(
            "state.log[arguments[0]] = arguments[1]; const d = draw(charts[arguments[0]], arguments[2]); return [d.markup, d.outside]",
            chart.name,
            is_log,
            WIDTH,
        )
        assert found[1] == outside
        assert NUMBER.sub("#", found[0]) == NUMBER.sub("#", expected)
        pairs = zip(NUMBER.findall(found[0]), NUMBER.findall(expected), strict=True)
        assert max(abs(float(a) - float(b)) for a, b in pairs) < 0.11, (
            chart.name
        )  # halves are rounded up here, to even there


def test_a_chart_is_read_and_enlarged_by_keyboard_alone(browser, show, run):
    show(run)
    for _ in range(40):
        press(browser, Keys.TAB)
        if browser.switch_to.active_element.get_attribute("role") == "slider":
            break
    plot = browser.switch_to.active_element
    assert plot.get_attribute("aria-label") == "Loss: values at a step"
    assert (
        browser.execute_script("return getComputedStyle(arguments[0]).outlineStyle", plot)
        == "solid"
    )
    press(browser, Keys.HOME)
    first = plot.get_attribute("aria-valuetext")
    assert re.match(r"step 3: training [\d.]+ \([\d.]+ to 43\.1\), held out 3\.4$", first), first
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
    assert "Show all steps (now 1," in text(browser, "#whole")
    assert (
        int(attribute(browser, "#chart-lr .plot", "aria-valuemin")) > 1500
    )  # all charts show the same steps
    press(browser, Keys.ESCAPE)
    assert int(plot.get_attribute("aria-valuemin")) <= 3
    assert not browser.find_element(By.ID, "whole").is_enabled()

    before = attribute(browser, "#chart-loss .line", "d")
    browser.find_element(By.CSS_SELECTOR, "#chart-loss .log").send_keys(Keys.SPACE)
    assert attribute(browser, "#chart-loss .line", "d") != before
    slider = browser.find_element(By.ID, "smooth")
    slider.send_keys(Keys.HOME)
    assert text(browser, "#smoothed") == "none"
    assert browser.find_elements(By.CSS_SELECTOR, "#chart-loss .raw") == []
    slider.send_keys(Keys.ARROW_RIGHT)
    assert text(browser, "#smoothed") == "0.5 %"
    assert slider.get_attribute("aria-valuetext") == "0.5 percent of the points"


def test_pointing_reads_values_and_dragging_enlarges(browser, show, run):
    show(run)
    plot = browser.find_element(By.CSS_SELECTOR, "#chart-grad .plot")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(browser).move_to_element(plot).perform()
    assert re.match(r"step (9|1,0)\d\d", text(browser, "#chart-grad .at"))
    assert len(browser.find_elements(By.CSS_SELECTOR, "#chart-grad .dot")) == 1
    ActionChains(browser).click_and_hold(plot).move_by_offset(100, 0).release().perform()
    assert browser.find_element(By.ID, "whole").is_enabled()
    assert 900 < int(plot.get_attribute("aria-valuemin")) < 1100
    browser.find_element(By.ID, "whole").click()
    assert int(plot.get_attribute("aria-valuemin")) <= 3
    assert "1 values lie outside the drawing" in text(browser, "#chart-grad")
    top = max(float(t) for t in texts(browser, "#chart-grad text.end") if t != "step")
    browser.find_element(By.CSS_SELECTOR, "#chart-grad .everything").click()
    assert max(float(t) for t in texts(browser, "#chart-grad text.end") if t != "step") > 50 > top
    assert "outside" not in text(browser, "#chart-grad")


def over(browser):
    return browser.execute_script(
        "return document.querySelector('#chart-loss .across').textContent"
    ), browser.execute_script("return location.hash")


def test_curves_over_units_and_over_time_by_keyboard_and_by_address(browser, show, tmp_path):
    """Two starts: 30 s, then 70 s of nothing, then 30 s. Step 21 is done 50.5 s after the beginning without the pause."""
    path = make_run(tmp_path / "a")
    show(path)
    for _ in range(40):
        press(browser, Keys.TAB)
        if browser.switch_to.active_element.get_attribute("name") == "x":
            break
    assert over(browser) == ("step", "")
    press(browser, Keys.ARROW_RIGHT)
    assert over(browser) == ("tokens", "#x=units")
    plot = browser.find_element(By.CSS_SELECTOR, "#chart-loss .plot")
    assert (plot.get_attribute("aria-label"), plot.get_attribute("aria-valuemax")) == (
        "Loss: values at a number of tokens",
        "10240",
    )
    assert (
        plot.get_attribute("aria-valuetext")
        == "10.24k tokens, step 40: training 0.125, held out 0.5"
    )
    press(browser, Keys.ARROW_RIGHT)
    assert over(browser) == ("s", "#x=time")
    assert browser.execute_script("return [20, 21, 40].map((step) => atStep(0, step))") == [
        20,
        50.5,
        60,
    ]
    assert browser.execute_script(
        "return charts.loss.series.map((series) => places(series).at(-1))"
    ) == [60, 60]

    plot.send_keys(Keys.HOME)
    assert text(browser, "#chart-loss .at") == "10.5 s, step 1"
    for _ in range(20):
        plot.send_keys(Keys.ARROW_RIGHT)
    assert text(browser, "#chart-loss .at") == "50.5 s, step 21"
    plot.send_keys("+")
    assert text(browser, "#whole").startswith("Show all (now ")
    radio = browser.find_element(By.CSS_SELECTOR, "input[name=x][value=step]")
    radio.send_keys(Keys.SPACE)
    assert over(browser) == ("step", "")
    enlarged = [int(number) for number in re.findall(r"\d+", text(browser, "#whole"))]
    assert 18 <= enlarged[0] <= 21 < enlarged[1] <= 40  # of one run, the same steps stay in view
    browser.find_element(By.ID, "whole").click()

    browser.find_element(By.CSS_SELECTOR, "input[name=x][value=time]").send_keys(Keys.SPACE)
    browser.find_element(By.CSS_SELECTOR, "nav a[href='#run']").click()
    assert over(browser) == ("s", "#run&x=time")
    browser.refresh()
    assert over(browser) == ("s", "#run&x=time")
    assert browser.find_element(By.CSS_SELECTOR, "input[name=x][value=time]").is_selected()
    assert (
        0
        <= browser.execute_script(
            "return document.getElementById('run').getBoundingClientRect().top"
        )
        < 900
    )
    browser.execute_script("location.hash = 'x=units'")
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    assert over(browser) == ("tokens", "#x=units")
    browser.execute_script("location.hash = 'x=constructor'")
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    assert over(browser) == ("tokens", "#x=units")


def test_runs_side_by_side_over_the_time_of_each(browser, show, tmp_path):
    slow = make_run(tmp_path / "slow")
    records = [json.loads(line) for line in (slow / "metrics.jsonl").read_text().splitlines()]
    lines(
        slow / "metrics.jsonl",
        [{**r, "time": r["time"] + 2 * r["step"]} for r in records if "time" in r],
    )
    show(make_run(tmp_path / "quick"), slow)
    browser.find_element(By.CSS_SELECTOR, "input[name=x][value=time]").send_keys(Keys.SPACE)
    ends = browser.execute_script(
        "return charts.lr.series.map((series) => [series.run, places(series)[0], places(series).at(-1)])"
    )
    assert ends == [
        [0, 10.5, 60],
        [1, 12.5, 170],
    ]  # of the slow one the first start lasts 60 s, so 40 s are taken out
    assert (
        browser.execute_script("return document.querySelector('#chart-lr .across').textContent")
        == "min"
    )
    plot = browser.find_element(By.CSS_SELECTOR, "#chart-lr .plot")
    plot.send_keys(Keys.END)
    assert text(browser, "#chart-lr .at") == "0:02:50"
    lines(slow / "metrics.jsonl", [{k: v for k, v in r.items() if k != "time"} for r in records])
    show(tmp_path / "quick", slow)
    assert [label.strip() for label in texts(browser, ".axes label")] == ["steps", "tokens"]


def test_everything_that_can_be_operated_or_looked_at_has_a_name(browser, show, run):
    show(run, make_run(run.parent / "other"), names=["long", "other"])
    for _ in range(2):
        browser.execute_cdp_cmd("Accessibility.enable", {})
        nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        nodes = [n for n in nodes if not n["ignored"]]
        roles = {
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
        for node in nodes:
            if node["role"]["value"] in roles:
                assert node["name"].get("value", "").strip(), node["role"]
        found = [n["role"]["value"] for n in nodes]
        assert found.count("slider") == 1 + len(browser.find_elements(By.CSS_SELECTOR, ".plot"))
        assert found.count("checkbox") >= 6
        show(run)
    levels = [
        int(tag[1])
        for tag in browser.execute_script(
            "return [...document.querySelectorAll('h1,h2,h3')].map((e) => e.tagName)"
        )
    ]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    headless = """return [...document.querySelectorAll("table")]
        .filter((t) => !t.tHead || [...t.tHead.rows[0].cells].some((c) => c.scope !== "col")).length"""
    assert browser.execute_script(headless) == 0
    assert browser.execute_script("return document.documentElement.lang") == "en"


def test_runs_side_by_side_can_be_told_apart_and_left_out(browser, show, tmp_path, run):
    other = make_run(tmp_path / "other")
    show(run, other)
    assert texts(browser, "#finals tbody td:first-child") == [" long", " other"]
    styles = browser.execute_script(
        "return [...document.querySelectorAll('#chart-lr .line')].map((e) => getComputedStyle(e)).map((s) => [s.stroke, s.strokeDasharray])"
    )
    drawn = [tuple(style) for style in styles[:2]]
    assert len({colour for colour, _ in drawn}) == len({dash for _, dash in drawn}) == 2
    browser.find_element(By.CSS_SELECTOR, "input.run[value='0']").send_keys(Keys.SPACE)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#chart-lr .plot .line")) == 1
    assert int(attribute(browser, "#chart-lr .plot", "aria-valuemax")) == 40
    assert too_wide(browser) == 0


@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone(browser, show, tmp_path, run, dark):
    for paths in ([run], [run, make_run(tmp_path / ("a-run-with-a-rather-long-name-" * 3))]):
        show(*paths, width=360, dark=dark)
        assert too_wide(browser) == 0
        assert overlapping(browser) == []
        sizes = browser.execute_script(
            "return [...document.querySelectorAll('.chart .plot text')].map((e) => e.getBoundingClientRect().height)"
        )
        assert min(sizes) > 9
        background = browser.execute_script(
            "return getComputedStyle(document.body).backgroundColor"
        )
        assert (sum(map(int, re.findall(r"\d+", background))) < 150) == dark


def test_on_paper(browser, show, run):
    show(run, media="print", dark=True)
    assert not browser.find_element(By.ID, "smooth").is_displayed()
    assert figure(browser, "loss").is_displayed()
    assert browser.execute_script("return getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
    assert len(printed["data"]) > 50_000


def test_without_scripts_everything_can_be_read(browser, show, run):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show(run)
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    plot = browser.find_element(By.CSS_SELECTOR, "#chart-loss .plot")
    assert plot.get_attribute("role") == "img"
    assert "greatest 43.1 at step 1" in plot.get_attribute("aria-label")
    assert (
        len(browser.find_elements(By.CSS_SELECTOR, "#chart-loss .line")) == 4
    )  # two curves, two samples in the legend
    assert not browser.find_element(By.ID, "smooth").is_displayed()
    assert len(texts(browser, "#chart-loss tbody tr")) == 16
    assert too_wide(browser) == 0


def test_hostile_content_is_text(browser, show, tmp_path):
    path = make_run(tmp_path / "a")
    about = {
        "recipe": HOSTILE,
        "arguments": {HOSTILE: HOSTILE},
        "versions": {HOSTILE: HOSTILE},
        "devices": HOSTILE,
        "source": HOSTILE,
    }
    (path / "run.json").write_text(
        json.dumps(
            about
            | {"mesh": {HOSTILE: HOSTILE}, "model": {HOSTILE: HOSTILE}, "git": {HOSTILE: HOSTILE}}
        )
    )
    lines(
        path / "metrics.jsonl",
        [
            {"step": n, "loss": 1.0 / n, HOSTILE: 1.0, f"lr/{HOSTILE}": 0.5, "eval_" + HOSTILE: n}
            for n in range(1, 30)
        ],
    )
    lines(path / "samples.jsonl", [{"step": 1, "text": HOSTILE}])
    show(path, names=[HOSTILE])
    assert texts(browser, "h1") == [HOSTILE]
    for plot in browser.find_elements(By.CSS_SELECTOR, ".plot"):
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
        ActionChains(browser).move_to_element(plot).perform()
    assert HOSTILE in text(browser, "#samples pre")
    show(path, path, names=[HOSTILE, "b" + HOSTILE])
    assert browser.execute_script(
        "return [document.scripts.length, document.images.length, typeof window.hacked]"
    ) == [2, 0, "undefined"]


def test_colours_can_be_told_from_their_ground():
    from pathlib import Path

    import shardwise.report.html

    folder = Path(shardwise.report.html.__file__).parent / "static"
    grounds = [
        dict(re.findall(r"--([\w-]+): (#\w{6})", found))
        for found in re.findall(r":root \{(.*?)\}", (folder / "page.css").read_text(), re.DOTALL)
    ]
    curves = [
        dict(re.findall(r"--([\w-]+): (#\w{6})", found))
        for found in re.findall(
            r":root \{(.*?)\}", (folder / "report_page.css").read_text(), re.DOTALL
        )
    ]
    for ground, colours in zip(grounds[:2], curves[:2], strict=True):
        for name, colour in colours.items():
            assert contrast(colour, ground["page"]) >= 3, name
            if name.startswith("t"):
                assert contrast(ground["on-kind"], colour) >= 4.5, name


def test_it_is_refreshed_in_place_while_the_run_goes_on(browser, tmp_path):
    path = make_run(tmp_path / "live", steps=100)
    set_screen(browser)
    words = [
        sys.executable,
        "-m",
        "shardwise.cli",
        "report",
        str(path),
        "--watch",
        "--every",
        "0.3",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            browser.get_log("browser")
            browser.get(process.stdout.readline().split()[1])
            plot = browser.find_element(By.CSS_SELECTOR, "#chart-lr .plot")
            browser.execute_script(
                "arguments[0].scrollIntoView({block: 'center'}); arguments[0].focus()", plot
            )
            press(browser, Keys.HOME, Keys.ARROW_RIGHT, "+")
            browser.find_element(By.CSS_SELECTOR, "#chart-lr summary").click()
            browser.execute_script("arguments[0].focus()", plot)
            press(browser, Keys.HOME)
            zoomed, at = (
                attribute(browser, "#chart-lr .plot", "aria-valuemax"),
                browser.execute_script("return scrollY"),
            )
            with (path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(step(101, T0 + 100, lr=0.5)) + "\n")
            deadline = time.monotonic() + 10
            heading = "return document.querySelector('#summary h2').textContent"  # in one go: it may be replaced at any time
            while "101" not in browser.execute_script(heading) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert text(browser, "#summary h2").endswith("101 steps")
            assert attribute(browser, "#chart-lr .plot", "aria-valuemax") == zoomed
            assert browser.execute_script("return scrollY") == at > 0
            assert browser.find_element(By.CSS_SELECTOR, "#chart-lr details").get_attribute("open")
            assert (
                browser.switch_to.active_element.get_attribute("aria-label")
                == "Learning rate: values at a step"
            )
            assert browser.switch_to.active_element.get_attribute("aria-valuetext").startswith(
                "step 2:"
            )
            press(browser, "0")
            assert attribute(browser, "#chart-lr .plot", "aria-valuemax") == "101"
            assert "last at" in text(browser, "#live")
            browser.find_element(By.CSS_SELECTOR, "input[name=x][value=units]").send_keys(
                Keys.SPACE
            )
            with (path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(step(102, T0 + 100)) + "\n")
            while "102" not in browser.execute_script(heading) and time.monotonic() < deadline + 10:
                time.sleep(0.1)
            assert over(browser) == ("tokens", "#x=units")
            assert browser.find_element(By.CSS_SELECTOR, "input[name=x][value=units]").is_selected()
            assert browser.get_log("browser") == []
        finally:
            process.terminate()
        assert process.wait(timeout=10) == 0
    deadline = time.monotonic() + 5
    while "no longer served" not in text(browser, "#live") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "no longer served" in text(browser, "#live")
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")

"""The page of a plan in a browser: content, keyboard, hostile names, narrow, dark, no scripts."""

import json
import math
import re
from dataclasses import replace

import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By

from shardwise.plan.compile import plan_run
from shardwise.plan.plan import Buffer, Memory, Plan, PlannedLeaf, Times, Traffic
from shardwise.plan.target import find_target
from shardwise.report.html import STATIC
from shardwise.report.plan_page import plan_page
from shardwise.text import NONE, TIMES
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

MESH = {"data": 4, "fsdp": 2, "model": 2}


def leaf(path, shape, axes, mesh, why="annotation (embed, mlp)"):
    num_shards = math.prod(mesh[name] for names in axes for name in names)
    layout = f"({', '.join('*'.join(names) or '-' for names in axes)})"
    num_bytes = 4 * math.prod(shape) / num_shards
    return PlannedLeaf(path, shape, "float32", axes, layout, num_bytes, why)


def make_plan(mesh=MESH, layers=1, **changes):
    leaves = [
        leaf("tokens", (512, 64), (("model",), ("fsdp",)), mesh),
        leaf("norm/scale", (64,), ((),), mesh, "too small to shard"),
    ]
    for i in range(layers):
        leaves.append(
            leaf(f"blocks/{i}/up/kernel", (64, 256), (("fsdp",), ("model",)), mesh)
        )
        leaves.append(
            leaf(f"blocks/{i}/up/bias", (256,), (("model",),), mesh, "annotation (mlp)")
        )
    plan = Plan(
        target="v5e:4x4",
        chip="TPU v5e",
        mesh=mesh,
        options={"accumulate": 1},
        batch={"inputs": (64, 1024), "labels": (64, 1024)},
        items=65536,
        unit="tokens",
        num_params=124_475_904,
        memory=Memory(1 * 2**30, 2 * 2**30, 2**25, 2**16, 5 * 2**30),
        limit=15.75 * 2**30,
        fits=True,
        buffers=[
            Buffer("jit(step)/jvp()/dot_general", "bf16[8192,25152]", 4.1e8),
            Buffer("copy.1", "bf16[12,8192,768]", 1.5e8),
        ],
        flops=3.6e12,
        model_flops=5.6e13,
        bytes=2.8e10,
        traffic=[
            Traffic("all-reduce", "model", "links", 53, 6.3e8, 0.014, 0.014),
            Traffic("all-gather", "fsdp", "links", 278, 2e8, 3e-3, 1e-3),
        ],
        times=Times(0.119, 0.018, 0.086, {"model": 0.014, "fsdp": 0.001}, "memory"),
        peak_flops=3.152e15,
        leaves=leaves,
    )
    return replace(plan, **changes)


def candidate(mesh, status, seconds, peak, why="", chosen=False, **changes):
    known = {
        "mesh": mesh,
        "options": {"accumulate": 1, "remat": "dots"},
        "status": status,
        "why": why,
        "chosen": chosen,
        "seconds": seconds,
        "peak": peak,
        "items_per_second": None if seconds is None else 65536 / seconds,
        "mfu": None,
        "bound": seconds and "memory",
    }
    return known | changes


RANKING = [
    candidate("data=4,fsdp=2,model=2", "compiled", 0.119, 8e9, chosen=True),
    candidate("data=8,model=2", "compiled", 0.131, 1e10),
    candidate(
        "data=2,fsdp=8", "not compiled", None, None, "its bound is slower than the best"
    ),
    candidate("data=16", "too large", 0.110, 1.8e10, "1.0 GiB over the limit"),
    candidate("model=16", "refused", None, None, "12 heads are not divisible by 16"),
]


@pytest.fixture
def show(browser, tmp_path):
    """Return a function that opens the page of a plan.

    At the end the page must have requested nothing, and the browser must not have complained.
    """
    page = tmp_path / "plan.html"

    def open_page(
        plan,
        candidates=(),
        title="recipes/gpt2.py on v5e:4x4",
        command="shardwise train recipes/gpt2.py",
        width=1280,
        dark=False,
    ):
        page.write_text(
            plan_page(plan, list(candidates), title, command), encoding="utf-8"
        )
        set_screen(browser, width, dark)
        browser.get_log("performance"), browser.get_log("browser")
        browser.get(page.as_uri())
        return page

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


def num_visible_rows(browser, table):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].filter((r) => !r.hidden).length",
        f"#{table} tbody tr",
    )


def mesh_shards(browser):
    return texts(browser, "#mesh .cell text")


def test_the_answer_comes_first(browser, show):
    show(make_plan(), RANKING)
    assert browser.title == text(browser, "h1") == "recipes/gpt2.py on v5e:4x4"
    assert text(browser, "#answer h2").endswith(f"Fits on 16 {TIMES} TPU v5e")
    assert (
        text(browser, ".lead")
        == "8.0 GiB of 15.8 GiB per device (51.0 %); 7.7 GiB free."
    )
    assert texts(browser, ".tile .value") == [
        "8.0 GiB",
        "≈ 119 ms",
        "≈ 551k tokens/s",
        "≈ 14.9 %",
        f"16 {TIMES} TPU v5e",
    ]
    assert "bound by memory bandwidth" in text(browser, ".tiles")
    sources = text(browser, "#answer .columns")
    assert "Read from the compiled program" in sources
    assert "Estimated with a hardware model" in sources
    assert text(browser, "#memory tr.total").startswith("peak 8.0 GiB 100.0 % 51.0 %")
    parts = ["arithmetic", "memory", "network on model", "network on fsdp"]
    assert texts(browser, "#time tbody .named") == parts
    chosen = texts(browser, "#candidates tr.chosen td:nth-child(3)")
    assert [status.split() for status in chosen] == [["chosen", "compiled"]]
    assert len(texts(browser, ".scatter .point title")) == 3


def test_a_plan_that_does_not_fit_says_by_how_much(browser, show):
    show(make_plan(fits=False, limit=7 * 2**30))
    assert "Does not fit on 16" in text(browser, "#answer h2")
    assert "1.0 GiB too much" in text(browser, ".lead")
    style = browser.find_element(By.CSS_SELECTOR, ".stacked .limit").get_attribute(
        "style"
    )
    assert 86 < float(re.search(r"[\d.]+", style)[0]) < 88


def test_unknown_hardware_has_no_times(browser, show):
    plan = make_plan(
        mesh={"data": 1, "fsdp": 1, "model": 1},
        times=None,
        peak_flops=None,
        limit=float("inf"),
        traffic=[],
    )
    show(plan)
    assert texts(browser, ".tile .value") == [
        "8.0 GiB",
        NONE,
        NONE,
        NONE,
        f"1 {TIMES} TPU v5e",
    ]
    assert "times cannot be estimated" in text(browser, "#time")
    assert text(browser, "#chosen-summary").startswith("Complete on one device")
    assert browser.find_elements(By.ID, "ranking") == []


def test_a_parameter_is_chosen_by_keyboard(browser, show):
    show(make_plan())
    assert text(browser, "#chosen-name") == "tokens"
    # Columns are data and model, rows are fsdp.
    assert mesh_shards(browser) == ["0", "2"] * 4 + ["1", "3"] * 4
    active = press_tab_until(browser, lambda element: element.tag_name == "tr")
    assert active.text.startswith("tokens")
    outline = browser.execute_script(
        "return getComputedStyle(arguments[0]).outlineStyle", active
    )
    assert outline == "solid"
    press(browser, Keys.ARROW_DOWN)
    assert text(browser, "#chosen-name") == "blocks/0/up/kernel"
    assert mesh_shards(browser) == ["0", "1"] * 4 + ["2", "3"] * 4
    summary = (
        "[64, 256] in 4 shards of [32, 128], 16.0 KiB each; each shard is on 4 devices."
    )
    assert summary in text(browser, "#chosen-summary")
    press(browser, Keys.END)
    assert text(browser, "#chosen-name") == "norm/scale"
    assert (
        text(browser, "#chosen-summary") == "Replicated on every device: [64], 256 B."
    )
    assert set(mesh_shards(browser)) == {"●"}
    selected = browser.find_elements(By.CSS_SELECTOR, "#leaves [aria-selected=true]")
    assert [row.text.split()[0] for row in selected] == ["norm/scale"]
    press(browser, Keys.HOME)
    assert text(browser, "#chosen-name") == "tokens"


def test_parameters_are_filtered_by_keyboard(browser, show):
    show(make_plan())
    browser.find_element(By.ID, "filter").send_keys("BIAS mlp")
    assert num_visible_rows(browser, "leaves") == 1
    assert text(browser, "#filter-count") == "1 of 4"
    press_tab_until(browser, lambda element: element.tag_name == "tr")
    # The Tab key alone chooses nothing.
    assert text(browser, "#chosen-name") == "tokens"
    press(browser, Keys.ENTER)
    assert text(browser, "#chosen-name") == "blocks/0/up/bias"
    assert mesh_shards(browser) == ["0", "1"] * 8
    drawings = browser.find_elements(By.CSS_SELECTOR, "svg.array")
    visible = [
        svg.get_attribute("data-array") for svg in drawings if svg.is_displayed()
    ]
    assert visible == ["0:2"]


def test_columns_sort_and_statuses_filter(browser, show):
    show(make_plan(), RANKING)
    heading = browser.find_element(By.CSS_SELECTOR, "#candidates th:nth-child(4)")
    button = heading.find_element(By.TAG_NAME, "button")
    button.click()
    # Unknown times come last in both orders.
    assert texts(browser, "#candidates td:first-child") == ["2", "1", "4", "3", "5"]
    assert heading.get_attribute("aria-sort") == "descending"
    button.send_keys(Keys.ENTER)
    assert texts(browser, "#candidates td:first-child") == ["4", "1", "2", "3", "5"]
    assert heading.get_attribute("aria-sort") == "ascending"
    too_large = browser.find_element(
        By.CSS_SELECTOR, "#statuses input[value='too large']"
    )
    too_large.send_keys(Keys.SPACE)
    browser.find_element(By.CSS_SELECTOR, "#statuses input[value='refused']").click()
    assert num_visible_rows(browser, "candidates") == 3
    assert text(browser, "#ranking-count") == "3 of 5"
    points = browser.find_elements(By.CSS_SELECTOR, ".scatter svg .point")
    assert len([point for point in points if point.is_displayed()]) == 2


def pasted(browser):
    """Return the content of the clipboard, by pasting it into the filter of parameters."""
    filter_input = browser.find_element(By.ID, "filter")
    filter_input.clear()
    filter_input.send_keys(Keys.CONTROL, "v")
    return filter_input.get_attribute("value")


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_the_command_can_be_copied(browser, show, has_clipboard):
    command = f"shardwise train r.py --note 'a \"b\" {has_clipboard}'"
    show(make_plan(), command=command)
    assert text(browser, "#command") == command
    if not has_clipboard:
        browser.execute_script(
            "navigator.clipboard.writeText = () => Promise.reject(new Error('refused'))"
        )
    button = browser.find_element(By.ID, "copy")
    button.click()
    browser.execute_async_script("setTimeout(arguments[0], 100)")
    assert button.text == "Copied"
    assert pasted(browser) == command
    browser.execute_async_script("setTimeout(arguments[0], 2000)")
    assert button.text == "Copy"


def test_hostile_names_are_text(browser, show):
    mesh = {"data": 2, HOSTILE: 4}
    leaves = [
        leaf(f"a/{HOSTILE}", (8, 8), ((HOSTILE,), ()), mesh, HOSTILE),
        PlannedLeaf("b", (2,), HOSTILE, ((),), HOSTILE, 8.0, HOSTILE),
    ]
    plan = replace(
        make_plan(),
        mesh=mesh,
        leaves=leaves,
        chip=HOSTILE,
        unit=HOSTILE,
        target=HOSTILE,
        options={HOSTILE: HOSTILE},
        batch={HOSTILE: (8, 2)},
        unknown_kernels={HOSTILE: 1},
        buffers=[Buffer(HOSTILE, HOSTILE, 1.0)],
        traffic=[Traffic(HOSTILE, HOSTILE, HOSTILE, 1, 1.0, 1.0, 1.0)],
        times=Times(1.0, 0.5, 0.0, {HOSTILE: 0.5}, HOSTILE),
    )
    changes = {"bound": HOSTILE, "options": {HOSTILE: HOSTILE}}
    ranking = [
        candidate(HOSTILE, HOSTILE, 1.0, 1.0, HOSTILE, chosen=chosen, **changes)
        for chosen in (True, False)
    ]
    show(plan, ranking, title=HOSTILE, command=HOSTILE)
    assert texts(browser, "h1") == texts(browser, "#command") == [HOSTILE]
    assert texts(browser, "#chosen-name") == [f"a/{HOSTILE}"]
    for row in browser.find_elements(By.CSS_SELECTOR, "#leaves tbody tr"):
        row.click()
        ActionChains(browser).move_to_element(row).perform()
    browser.find_element(By.CSS_SELECTOR, "#statuses input").click()
    assert num_visible_rows(browser, "candidates") == 0
    counts = (
        "return [document.scripts.length, document.images.length, typeof window.hacked]"
    )
    assert browser.execute_script(counts) == [1, 0, "undefined"]


def test_the_policy_lets_no_other_script_run(browser, show):
    show(make_plan())
    browser.execute_script(
        """const script = document.createElement("script");
        script.textContent = "window.hacked = 1";
        document.body.append(script);"""
    )
    browser.execute_script(
        """const element = document.createElement("b");
        element.setAttribute("onclick", "window.hacked = 1");
        document.body.append(element);
        element.click();"""
    )
    assert browser.execute_script("return typeof window.hacked") == "undefined"
    refused = browser.get_log("browser")
    assert len(refused) == 2
    assert all("Content Security Policy" in entry["message"] for entry in refused)


def test_everything_is_readable_without_scripts(browser, show):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show(make_plan(), RANKING)
    finally:
        browser.execute_cdp_cmd(
            "Emulation.setScriptExecutionDisabled", {"value": False}
        )
    assert num_visible_rows(browser, "leaves") == 4
    assert num_visible_rows(browser, "candidates") == 5
    assert mesh_shards(browser) == ["0", "2"] * 4 + ["1", "3"] * 4
    assert not browser.find_element(By.ID, "filter").is_displayed()
    assert not browser.find_element(By.ID, "copy").is_displayed()


@pytest.mark.parametrize("dark", [False, True])
def test_narrow_and_dark(browser, show, dark):
    command = "shardwise train recipes/gpt2.py " + "--mesh=data=4,fsdp=2,model=2" * 4
    show(make_plan(), RANKING, width=400, dark=dark, command=command)
    assert too_wide(browser) == 0
    background = browser.execute_script(
        "return getComputedStyle(document.body).backgroundColor"
    )
    assert (sum(map(int, re.findall(r"\d+", background))) < 150) == dark
    assert overlapping(browser) == []


def test_512_devices_and_80_layers(browser, show):
    mesh = {"data": 8, "fsdp": 16, "model": 4}
    page = show(make_plan(mesh=mesh, layers=80), RANKING * 80)
    assert page.stat().st_size < 1_000_000
    assert num_visible_rows(browser, "leaves") == 4
    assert "80 layers: 0 to 79" in text(browser, "#leaves")
    assert text(browser, "#chosen-name") == "blocks/*/up/kernel"
    assert "162 parameters in 4 rows" in text(browser, ".listing")
    drawn = mesh_shards(browser)
    assert len(drawn) < 200
    assert drawn[-1] == "63"
    note = f"512 devices. {512 - len(drawn)} of them are not drawn."
    assert note in text(browser, "#drawings")
    assert too_wide(browser) == 0
    assert overlapping(browser) == []


def test_a_compiled_plan(browser, show):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from shardwise import Batches, Mean, Run

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(16, 512, rngs=rngs)
            self.two = nnx.Linear(512, 8, rngs=rngs)

        def __call__(self, x):
            return self.two(jax.nn.relu(self.one(x)))

    def loss(model, batch):
        return Mean(jnp.square(model(batch["x"]) - batch["y"]).mean(-1))

    data = {"x": np.zeros((64, 16), np.float32), "y": np.zeros((64, 8), np.float32)}
    run = Run(
        model=Net,
        optimizer=optax.adam(1e-3),
        loss=loss,
        data=Batches(data, batch_size=16),
        steps=3,
        mesh="data=2,fsdp=4",
    )
    show(plan_run(run, find_target("cpu:8")))
    assert f"on 8 {TIMES}" in text(browser, "#answer h2")
    assert num_visible_rows(browser, "leaves") == 4
    assert text(browser, "#chosen-name") == "one/kernel"
    assert len(set(mesh_shards(browser))) == 4


def test_colors_have_enough_contrast():
    style = (STATIC / "page.css").read_text()
    schemes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    assert len(schemes) == 2
    for scheme in schemes:
        colors = dict(re.findall(r"--([\w-]+): (#\w{6})", scheme))
        for ink in ("ink", "soft", "link", "good", "bad", "limit"):
            assert contrast(colors[ink], colors["page"]) >= 4.5, ink
            assert contrast(colors[ink], colors["panel"]) >= 4.5, ink
        assert contrast(colors["soft"], colors["chosen"]) >= 4.5
        for kind in range(8):
            assert contrast(colors["on-kind"], colors[f"k{kind}"]) >= 4.5, kind
            assert contrast(colors["page"], colors[f"k{kind}"]) >= 3, kind

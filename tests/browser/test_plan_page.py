"""The page of a plan in a real browser: what it says, by keyboard alone, with hostile names, narrow, dark and without scripts."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By

import shardwise.report.html
from shardwise.plan.compile import plan_run
from shardwise.plan.plan import Buffer, Memory, Plan, PlannedLeaf, Times, Traffic
from shardwise.plan.target import find_target
from shardwise.report.plan_page import plan_page
from shardwise.text import NONE, TIMES
from tests.helpers.browser import HOSTILE, contrast, overlapping, press, text, texts, too_wide


def leaf(path, shape, axes, mesh, why="annotation (embed, mlp)"):
    pieces = 1
    for names in axes:
        for name in names:
            pieces *= mesh[name]
    size = 4
    for length in shape:
        size *= length
    layout = f"({', '.join('*'.join(names) or '-' for names in axes)})"
    return PlannedLeaf(path, shape, "float32", axes, layout, size / pieces, why)


def make_plan(mesh=None, layers=1, **changes):
    mesh = mesh or {"data": 4, "fsdp": 2, "model": 2}
    leaves = [
        leaf("tokens", (512, 64), (("model",), ("fsdp",)), mesh),
        leaf("norm/scale", (64,), ((),), mesh, "too small to cut"),
    ]
    for i in range(layers):
        leaves.append(leaf(f"blocks/{i}/up/kernel", (64, 256), (("fsdp",), ("model",)), mesh))
        leaves.append(leaf(f"blocks/{i}/up/bias", (256,), (("model",),), mesh, "annotation (mlp)"))
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
    rate = None if seconds is None else 65536 / seconds
    known = {
        "seconds": seconds,
        "peak": peak,
        "items_per_second": rate,
        "mfu": None,
        "bound": seconds and "memory",
    }
    return (
        {
            "mesh": mesh,
            "options": {"accumulate": 1, "remat": "dots"},
            "status": status,
            "why": why,
            "chosen": chosen,
        }
        | known
        | changes
    )


RANKING = [
    candidate("data=4,fsdp=2,model=2", "compiled", 0.119, 8e9, chosen=True),
    candidate("data=8,model=2", "compiled", 0.131, 1e10),
    candidate(
        "data=2,fsdp=8", "not compiled", None, None, "its bound is slower than the best found"
    ),
    candidate("data=16", "too large", 0.110, 1.8e10, "1.0 GiB more than there is"),
    candidate("model=16", "refused", None, None, "16 does not divide 12 heads"),
]


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of a plan from its file; at the end nothing was asked of a network and nothing was complained about."""
    seen = []

    def open_page(
        plan,
        candidates=(),
        title="recipes/gpt2.py on v5e:4x4",
        command="shardwise train recipes/gpt2.py",
        width=1280,
        dark=False,
    ):
        page = tmp_path / "plan.html"
        page.write_text(
            plan_page(json.loads(json.dumps(plan.as_json())), list(candidates), title, command),
            encoding="utf-8",
        )
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        browser.get_log("performance"), browser.get_log("browser")
        browser.get(page.as_uri())
        seen.append(page.as_uri())
        return page

    yield open_page
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    assert {
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    } <= set(seen)
    assert browser.get_log("browser") == []


def shown_rows(browser, table):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].filter((r) => !r.hidden).length",
        f"#{table} tbody tr",
    )


def mesh_pieces(browser):
    return texts(browser, "#mesh .cell text")


def test_it_says_what_matters_first(browser, show):
    show(make_plan(), RANKING)
    assert browser.title == text(browser, "h1") == "recipes/gpt2.py on v5e:4x4"
    assert text(browser, "#answer h2").endswith(f"Fits on 16 {TIMES} TPU v5e")
    assert text(browser, ".lead") == "8.0 GiB of 15.8 GiB per device (51.0 %); 7.7 GiB are left."
    assert texts(browser, ".tile .value") == [
        "8.0 GiB",
        "≈ 119 ms",
        "≈ 551k tokens/s",
        "≈ 14.9 %",
        f"16 {TIMES} TPU v5e",
    ]
    assert "bound by the memory's bandwidth" in text(browser, ".tiles")
    sources = text(browser, "#answer .columns")
    assert "Read from the compiled program" in sources
    assert "Estimated by a model of the hardware" in sources
    assert text(browser, "#memory tr.total").startswith("peak 8.0 GiB 100.0 % 51.0 %")
    assert texts(browser, "#time tbody .named") == [
        "arithmetic",
        "memory",
        "network on model",
        "network on fsdp",
    ]
    assert [row.split() for row in texts(browser, "#candidates tr.chosen td:nth-child(3)")] == [
        ["chosen", "compiled"]
    ]
    assert len(texts(browser, ".scatter .point title")) == 3


def test_what_does_not_fit_says_by_how_much(browser, show):
    show(make_plan(fits=False, limit=7 * 2**30))
    assert "Does not fit on 16" in text(browser, "#answer h2")
    assert "1.0 GiB too much" in text(browser, ".lead")
    assert (
        86
        < float(
            re.search(
                r"[\d.]+",
                browser.find_element(By.CSS_SELECTOR, ".stacked .limit").get_attribute("style"),
            )[0]
        )
        < 88
    )


def test_hardware_that_is_not_known_has_no_times(browser, show):
    show(
        make_plan(
            mesh={"data": 1, "fsdp": 1, "model": 1},
            times=None,
            peak_flops=None,
            limit=float("inf"),
            traffic=[],
        )
    )
    assert texts(browser, ".tile .value") == ["8.0 GiB", NONE, NONE, NONE, f"1 {TIMES} TPU v5e"]
    assert "no times can be told" in text(browser, "#time")
    assert text(browser, "#chosen-said").startswith("Whole on the one device")
    assert browser.find_elements(By.ID, "ranking") == []


def test_a_parameter_is_chosen_by_keyboard_alone(browser, show):
    show(make_plan())
    assert text(browser, "#chosen-name") == "tokens"
    assert mesh_pieces(browser) == ["0", "2"] * 4 + ["1", "3"] * 4  # columns data, model; rows fsdp
    for _ in range(60):
        press(browser, Keys.TAB)
        if browser.switch_to.active_element.tag_name == "tr":
            break
    active = browser.switch_to.active_element
    assert active.text.startswith("tokens")
    assert (
        browser.execute_script("return getComputedStyle(arguments[0]).outlineStyle", active)
        == "solid"
    )
    press(browser, Keys.ARROW_DOWN)
    assert text(browser, "#chosen-name") == "blocks/0/up/kernel"
    assert mesh_pieces(browser) == ["0", "1"] * 4 + ["2", "3"] * 4
    assert "[64, 256] in 4 pieces of [32, 128], 16.0 KiB each; every piece on 4 devices." in text(
        browser, "#chosen-said"
    )
    press(browser, Keys.END)
    assert text(browser, "#chosen-name") == "norm/scale"
    assert text(browser, "#chosen-said") == "Whole on every device: [64], 256 B."
    assert set(mesh_pieces(browser)) == {"●"}
    assert [
        row.text.split()[0]
        for row in browser.find_elements(By.CSS_SELECTOR, "#leaves [aria-selected=true]")
    ] == ["norm/scale"]
    press(browser, Keys.HOME)
    assert text(browser, "#chosen-name") == "tokens"

    browser.find_element(By.ID, "find").send_keys("BIAS mlp")
    assert shown_rows(browser, "leaves") == 1
    assert text(browser, "#found") == "1 of 4"
    while browser.switch_to.active_element.tag_name != "tr":
        press(browser, Keys.TAB)
    assert text(browser, "#chosen-name") == "tokens"  # Tab alone chooses nothing
    press(browser, Keys.ENTER)
    assert text(browser, "#chosen-name") == "blocks/0/up/bias"
    assert mesh_pieces(browser) == ["0", "1"] * 8
    visible = [
        svg for svg in browser.find_elements(By.CSS_SELECTOR, "svg.array") if svg.is_displayed()
    ]
    assert [svg.get_attribute("data-array") for svg in visible] == ["0:2"]


def test_columns_sort_and_statuses_filter(browser, show):
    show(make_plan(), RANKING)
    head = browser.find_element(By.CSS_SELECTOR, "#candidates th:nth-child(4) button")
    head.click()
    assert [row.split("\n")[0] for row in texts(browser, "#candidates td:first-child")] == [
        "2",
        "1",
        "4",
        "3",
        "5",
    ]  # unknown ones last
    head.send_keys(Keys.ENTER)
    assert texts(browser, "#candidates td:first-child") == ["4", "1", "2", "3", "5"]
    assert (
        browser.find_element(By.CSS_SELECTOR, "#candidates th:nth-child(4)").get_attribute(
            "aria-sort"
        )
        == "ascending"
    )
    browser.find_element(By.CSS_SELECTOR, "#statuses input[value='too large']").send_keys(
        Keys.SPACE
    )
    browser.find_element(By.CSS_SELECTOR, "#statuses input[value='refused']").click()
    assert shown_rows(browser, "candidates") == 3
    assert text(browser, "#ranked") == "3 of 5"
    assert (
        len(
            [
                point
                for point in browser.find_elements(By.CSS_SELECTOR, ".scatter svg .point")
                if point.is_displayed()
            ]
        )
        == 2
    )


def test_the_command_can_be_copied(browser, show):
    show(make_plan(), command="shardwise train r.py --note 'a \"b\"'")
    assert text(browser, "#command") == "shardwise train r.py --note 'a \"b\"'"
    browser.find_element(By.ID, "copy").click()
    browser.execute_async_script("setTimeout(arguments[0], 100)")
    assert text(browser, "#copy") in ("Copied", "Selected")


def test_hostile_names_are_text(browser, show):
    mesh = {"data": 2, HOSTILE: 4}
    plan = make_plan(
        mesh={"data": 4, "fsdp": 2, "model": 2},
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
    hostile = [
        leaf(f"a/{HOSTILE}", (8, 8), ((HOSTILE,), ()), mesh, HOSTILE),
        PlannedLeaf("b", (2,), HOSTILE, ((),), HOSTILE, 8.0, HOSTILE),
    ]
    ranking = [
        candidate(
            HOSTILE, HOSTILE, 1.0, 1.0, HOSTILE, bound=HOSTILE, options={HOSTILE: HOSTILE}, chosen=c
        )
        for c in (True, False)
    ]
    show(replace(plan, mesh=mesh, leaves=hostile), ranking, title=HOSTILE, command=HOSTILE)
    assert texts(browser, "h1") == texts(browser, "#command") == [HOSTILE]
    assert texts(browser, "#chosen-name") == [f"a/{HOSTILE}"]
    for row in browser.find_elements(By.CSS_SELECTOR, "#leaves tbody tr"):
        row.click()
        ActionChains(browser).move_to_element(row).perform()
    browser.find_element(By.CSS_SELECTOR, "#statuses input").click()
    assert shown_rows(browser, "candidates") == 0
    assert browser.execute_script(
        "return [document.scripts.length, document.images.length, typeof window.hacked]"
    ) == [1, 0, "undefined"]


def test_the_policy_lets_no_other_script_run(browser, show):
    show(make_plan())
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s)"
    )
    browser.execute_script(
        "const b = document.createElement('b'); b.setAttribute('onclick', 'window.hacked = 1'); document.body.append(b); b.click()"
    )
    assert browser.execute_script("return typeof window.hacked") == "undefined"
    refused = browser.get_log("browser")
    assert len(refused) == 2
    assert all("Content Security Policy" in entry["message"] for entry in refused)


def test_without_scripts_everything_can_be_read(browser, show):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show(make_plan(), RANKING)
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert shown_rows(browser, "leaves") == 4
    assert shown_rows(browser, "candidates") == 5
    assert mesh_pieces(browser) == ["0", "2"] * 4 + ["1", "3"] * 4
    assert not browser.find_element(By.ID, "find").is_displayed()
    assert not browser.find_element(By.ID, "copy").is_displayed()


@pytest.mark.parametrize("dark", [False, True])
def test_narrow_and_dark(browser, show, dark):
    show(
        make_plan(),
        RANKING,
        width=400,
        dark=dark,
        command="shardwise train recipes/gpt2.py " + "--mesh=data=4,fsdp=2,model=2" * 4,
    )
    assert too_wide(browser) == 0
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 150) == dark
    assert overlapping(browser) == []


def test_512_devices_and_80_layers(browser, show):
    mesh = {"data": 8, "fsdp": 16, "model": 4}
    page = show(make_plan(mesh=mesh, layers=80), RANKING * 80)
    assert page.stat().st_size < 1_000_000
    assert shown_rows(browser, "leaves") == 4
    assert "80 alike: 0 to 79" in text(browser, "#leaves")
    assert text(browser, "#chosen-name") == "blocks/*/up/kernel"
    assert "162 parameters, those alike in 4 rows" in text(browser, ".listing")
    drawn = mesh_pieces(browser)
    assert len(drawn) < 200
    assert drawn[-1] == "63"
    assert f"512 devices. Dots stand for {512 - len(drawn)} devices" in text(browser, "#pictures")
    assert too_wide(browser) == 0
    assert overlapping(browser) == []


def test_a_plan_that_was_compiled(browser, show):
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
    plan = plan_run(run, find_target("cpu:8"))
    show(plan)
    assert f"on 8 {TIMES}" in text(browser, "#answer h2")
    assert shown_rows(browser, "leaves") == 4
    assert text(browser, "#chosen-name") == "one/kernel"
    assert len(set(mesh_pieces(browser))) == 4


def test_colours_can_be_told_from_their_ground():
    style = (Path(shardwise.report.html.__file__).parent / "static" / "page.css").read_text()
    for scheme in re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", scheme))
        for ink in ("ink", "soft", "link", "good", "bad", "limit"):
            assert contrast(colours[ink], colours["page"]) >= 4.5, ink
            assert contrast(colours[ink], colours["panel"]) >= 4.5, ink
        assert contrast(colours["soft"], colours["chosen"]) >= 4.5
        for kind in range(8):
            assert contrast(colours["on-kind"], colours[f"k{kind}"]) >= 4.5, kind
            assert contrast(colours["page"], colours[f"k{kind}"]) >= 3, kind

"""The report of complete, damaged and hostile runs: what is on the page, and that it is valid."""

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.report.html import STATIC, escape
from shardwise.report.run_page import ASSETS, report_page
from shardwise.rundir.files import RunFiles
from shardwise.rundir.summary import summarize
from shardwise.text import NONE, TIMES
from tests.helpers.run_dirs import LEAF, T0, damage_run, lines, make_run, plan, step

HOSTILE = (
    "</script><script>window.hacked=1</script>\"'>"
    "<img src=x onerror=window.hacked=1>&amp;<!--"
)


class Markup(HTMLParser):
    """Checks that elements are closed in order, and collects ids, tags and event handlers."""

    VOID = frozenset({"meta", "input", "wbr", "br"})

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.tags, self.handlers, self.scripts = (
            [],
            [],
            set(),
            [],
            0,
        )

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.scripts += tag == "script"
        names = [name for name, _ in attributes]
        assert len(set(names)) == len(names), (tag, names)
        self.handlers += [name for name in names if name.startswith("on")]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())


def check(page):
    """Check that a page is valid, self-contained, and runs no script but its own."""
    markup = Markup()
    markup.feed(page)
    markup.close()
    assert markup.open == []
    assert markup.handlers == []
    assert markup.scripts <= 2
    assert not markup.tags & {
        "img",
        "iframe",
        "object",
        "embed",
        "link",
        "base",
        "form",
        "image",
    }
    assert len(set(markup.ids)) == len(markup.ids)
    assert "<script>window" not in page
    assert re.search(
        r'http-equiv="Content-Security-Policy" content="default-src \'none\'', page
    )
    return markup


def report_of(*paths, **options):
    return report_page([RunFiles(path).read() for path in paths], **options)


def section_of(page, name):
    """Return the markup of one section."""
    return page[page.index(f'<section id="{name}"') :].partition("</section>")[0]


def table_rows(markup):
    """Return the text of the cells of each table row in some markup, without the heading."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", markup.partition("<tbody>")[2], re.DOTALL)
    return [
        [re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row)]
        for row in rows
    ]


def test_the_time_of_a_start_without_a_known_end_is_an_estimate(tmp_path):
    known = make_run(tmp_path / "known")
    unknown = make_run(tmp_path / "unknown", again=False)
    records = [
        json.loads(line)
        for line in (unknown / "metrics.jsonl").read_text().splitlines()
    ]
    for record in records:
        record.pop("time", None)
    lines(unknown / "metrics.jsonl", records)
    note = "The last sign of life of some starts is unknown"
    assert note in section_of(report_of(unknown), "time")
    assert note not in report_of(known)
    # How many steps of the first start were repeated is known from phases.jsonl only.
    first, _ = table_rows(section_of(report_of(known), "history").partition("<h3>")[0])
    assert first[3] == "25"
    assert first[-1] == "5"
    first, _ = table_rows(
        section_of(report_of(unknown), "history").partition("<h3>")[0]
    )
    assert first[3] == NONE
    assert first[-1] == NONE


def test_values_that_cannot_be_drawn_are_counted(tmp_path):
    path = make_run(tmp_path / "a")
    assert "not drawn" not in report_of(path)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(41, T0 + 100, skipped=True, loss="nan")) + "\n")
    page = report_of(path)
    loss = page[page.index('id="chart-loss"') :].partition("</figure>")[0]
    note = "training: 1 value not drawn (not finite, or beyond 1e100), marked ▾ at step 41."
    assert note in loss
    assert page.count("not drawn") == 1
    assert "1 update skipped" in section_of(page, "summary")


def test_a_complete_run(tmp_path):
    page = report_of(make_run(tmp_path / "a"))
    markup = check(page)
    sections = {"summary", "curves", "time", "plan", "memory", "layout", "samples"}
    assert sections | {"history", "run", "chart-loss", "chart-lr"} <= set(markup.ids)
    for text in (
        "Finished: 40 steps",
        "After step 40",
        "late &lt;b&gt;",
        "blocks/",
        "x = 1",
        "jax",
        "5 steps were repeated after restarts",
        "12.3 %",
        f"2.00 {TIMES}",
    ):
        assert text in page, text
    assert "connect-src" not in page


def test_the_plan_is_compared_with_the_measurement(tmp_path):
    rows = table_rows(section_of(report_of(make_run(tmp_path / "a")), "plan"))
    assert rows == [
        ["step time", "≈ 250 ms", "500 ms", f"2.00 {TIMES}"],
        ["tokens/s", "≈ 1.02k", "512", f"0.50 {TIMES}"],
        ["MFU", "≈ 40.0 %", NONE, NONE],
        ["peak memory per device", "708 B", NONE, NONE],
    ]


def test_a_damaged_plan_is_noted_and_ignored(tmp_path):
    path = make_run(tmp_path / "a")
    record = json.loads((path / "plan.json").read_text())
    record["plan"]["num_devices"] = 3
    (path / "plan.json").write_text(json.dumps(record))
    page = report_of(path)
    markup = check(page)
    assert not {"plan", "memory", "layout"} & set(markup.ids)
    assert "plan.json: ignored" in section_of(page, "summary")


def test_several_runs(tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    about = json.loads((two / "run.json").read_text())
    about["arguments"]["lr"] = "0.5"
    (two / "run.json").write_text(json.dumps(about))
    lines(two / "metrics.jsonl", [step(n, loss=9 / n) for n in range(1, 30)])
    page = report_of(one, two)
    check(page)
    finals = page[page.index('id="finals"') :].partition("</table>")[0].split("</tr>")
    assert "best" in finals[1].split("</td>")[2]
    assert "best" not in finals[2].split("</td>")[2]
    differences = section_of(page, "differences")
    assert "<code>lr</code>" in differences
    assert "<code>out</code>" not in differences


def test_a_live_page_may_fetch_itself_only(tmp_path):
    page = report_of(make_run(tmp_path / "a"), watch=2.5)
    check(page)
    assert 'data-watch="2.5"' in page
    assert page.count("connect-src") == 1
    assert "; connect-src 'self'\">" in page


def test_damaged_files_give_a_valid_page(tmp_path):
    path = make_run(tmp_path / "a")
    damage_run(path)
    page = report_of(path)
    check(page)
    assert "Some files in the run directory could not be read" in section_of(
        page, "summary"
    )


texts = st.one_of(st.just(HOSTILE), st.text(max_size=30))
numbers = st.sampled_from([10**400, -(10**400), 1e308, -1e308, 5e-324])
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, numbers),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)
    ),
    max_leaves=8,
)
moments = st.one_of(values, st.floats(T0, T0 + 1000))
METRICS = (
    "loss",
    "eval_loss",
    "lr",
    "grad_norm/x",
    "step_s",
    "data_s",
    "time",
    "skipped",
)
metrics_of_a_step = st.dictionaries(
    st.one_of(st.sampled_from(METRICS), texts), values, max_size=6
)
records = st.lists(
    st.tuples(st.one_of(st.integers(-1, 50), values), metrics_of_a_step), max_size=12
)
start = {
    "step": st.one_of(st.integers(0, 50), values),
    "time": moments,
    "seconds": values,
    "text": texts,
}
starts = st.lists(st.fixed_dictionaries(start), max_size=4)
ABOUT = (
    "steps",
    "arguments",
    "versions",
    "devices",
    "git",
    "source",
    "recipe",
    "model",
    "data",
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    metrics=records,
    begun=starts,
    starting=starts,
    phases=starts,
    about=st.dictionaries(st.sampled_from(ABOUT), values),
    measured=values,
    name=texts,
)
def test_hostile_content_gives_a_valid_page(
    tmp_path, metrics, begun, starting, phases, about, measured, name
):
    path = tmp_path / "run"
    path.mkdir(exist_ok=True)
    lines(path / "metrics.jsonl", [{"step": n, **rest} for n, rest in metrics])
    lines(path / "starts.jsonl", begun)
    lines(path / "starting.jsonl", starting)
    lines(path / "phases.jsonl", phases)
    lines(path / "samples.jsonl", begun)
    (path / "run.json").write_text(json.dumps(about))
    leaf = {**LEAF, "path": name, "why": name, "layout": name, "dtype": name}
    plan_file = {"plan": plan({name: 2}, [leaf]), "measured": measured}
    (path / "plan.json").write_text(json.dumps(plan_file))
    run = RunFiles(path, name or "a").read()
    for page in (report_page([run], watch=3), report_page([run, run])):
        check(page)
        data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
        assert data is None or json.loads(data[1])["charts"]
    json.dumps(summarize(run).as_json())


def test_control_characters_are_replaced():
    assert escape("a\x00b\x1bc\n\ud800<") == "a\ufffdb\ufffdc\n?&lt;"


@pytest.mark.parametrize("ending", ["css", "js"])
def test_every_asset_is_packaged_and_used(ending):
    packaged = {path.stem for path in STATIC.glob(f"*.{ending}")}
    assert packaged <= set(ASSETS)
    assert {"page", "plan_page"} <= packaged
    assert all(
        (STATIC / f"{name}.js").exists() or name == "report_page" for name in ASSETS
    )

"""The report of a run: what is read from whole, damaged and hostile directories, where the time went, what is drawn, who is served."""

import http.client
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.cli import main
from shardwise.report.charts import Chart, draw, ranges, rows, thin, ticks, told
from shardwise.report.html import escape
from shardwise.report.run_page import report_page
from shardwise.report.sections.curves import charts_of
from shardwise.report.server import PageServer
from shardwise.rundir.columns import Column
from shardwise.rundir.files import RunFiles
from shardwise.rundir.summary import summarize
from shardwise.text import TIMES, show_number, smoothed
from tests.helpers.run_dirs import LEAF, T0, damage_run, lines, make_run, plan, step

HOSTILE = (
    "</script><script>window.hacked=1</script>\"'><img src=x onerror=window.hacked=1>&amp;<!--"
)


class Markup(HTMLParser):
    """Whether elements are closed in order, ids stand once and scripts are those of the page."""

    VOID = frozenset({"meta", "input", "wbr", "br"})

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.tags, self.handlers, self.scripts = [], [], set(), [], 0

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
    found = Markup()
    found.feed(page)
    found.close()
    assert found.open == []
    assert found.handlers == []
    assert found.scripts <= 2
    assert not found.tags & {"img", "iframe", "object", "embed", "link", "base", "form", "image"}
    assert len(set(found.ids)) == len(found.ids)
    assert "<script>window" not in page
    assert re.search(r'http-equiv="Content-Security-Policy" content="default-src \'none\'', page)
    return found


def test_downtime_of_a_run_without_phases_is_shown_as_unknown(tmp_path):
    path = make_run(tmp_path / "a", again=False)
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("time", None)
    lines(path / "metrics.jsonl", records)
    assert "not known" in report_page([RunFiles(path).read()])


def test_values_that_cannot_be_drawn_are_counted(tmp_path):
    path = make_run(tmp_path / "a")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(41, T0 + 100, skipped=True, loss="nan")) + "\n")
    assert "1 values cannot be drawn" in report_page([RunFiles(path).read()])


def test_a_whole_run(tmp_path):
    page = report_page([RunFiles(make_run(tmp_path / "a")).read()])
    found = check(page)
    assert {
        "summary",
        "curves",
        "time",
        "plan",
        "memory",
        "layout",
        "samples",
        "history",
        "run",
        "chart-loss",
        "chart-lr",
    } <= set(found.ids)
    for text in (
        "Finished: 40 steps",
        "After step 40",
        "late &lt;b&gt;",
        "blocks/",
        "x = 1",
        "jax",
        "5 steps were done twice",
        "12.3 %",
        f"2.00 {TIMES}",
    ):
        assert text in page, text
    assert "connect-src" not in page


def test_several_runs(tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    about = json.loads((two / "run.json").read_text())
    about["arguments"]["lr"] = "0.5"
    (two / "run.json").write_text(json.dumps(about))
    lines(two / "metrics.jsonl", [step(n, loss=9 / n) for n in range(1, 30)])
    runs = [RunFiles(path).read() for path in (one, two)]
    page = report_page(runs)
    check(page)
    finals = page[page.index('id="finals"') :].partition("</table>")[0].split("</tr>")
    assert "best" in finals[1].split("</td>")[2]
    assert "best" not in finals[2].split("</td>")[2]
    differing = page[page.index('id="differences"') :].partition("</section>")[0]
    assert "<code>lr</code>" in differing
    assert "<code>out</code>" not in differing
    loss = charts_of(runs)[0]
    assert [s.label for s in loss.series] == ["one, training", "two, training", "one, held out"]
    assert len({(s.style % 8, (s.style + s.style // 8) % 8) for s in loss.series}) == 3
    assert loss.series[0].style % 8 == loss.series[2].style % 8  # a colour is a run


def test_a_thinned_curve_keeps_its_extremes(tmp_path):
    values = np.sin(np.arange(100_000) / 1000.0)
    values[77_777], values[5], values[6], values[9] = 50.0, math.nan, math.inf, 1e200
    series = thin(Column(np.arange(1, 100_001), values), "loss", 0, 0, 600)
    assert len(series.x) <= 600
    assert max(series.high) == 50.0
    assert series.most == (50.0, 77_778)
    assert series.num_missing == 3
    assert series.missing == [6, 7, 10]
    assert all(
        low <= y <= high for low, y, high in zip(series.low, series.y, series.high, strict=True)
    )
    chart = Chart("loss", "Loss", "", [series])
    assert ranges(chart, False, True)[1] > 50 > ranges(chart, False, False)[1] > 1
    drawing, outside = draw(chart)
    assert outside == 1
    assert "nan" not in drawing
    assert "greatest 50 at step 77,778" in told(chart)
    assert len(rows(chart)) == 16


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1e-9, 3e-9), (-5, 1e90), (3, 3.001), (1e5, 9e12)]
)
def test_ticks_are_round_and_within(low, high):
    found = ticks(low, high, False, 5)
    assert 2 <= len(found) <= 11
    assert all(low - 1e-6 * (high - low) <= tick <= high + 1e-6 * (high - low) for tick in found)


def test_ticks_of_a_logarithmic_axis():
    assert ticks(0.9, 110, True, 5) == [1, 10, 100]
    assert ticks(0.9, 9, True, 5) == [1, 2, 5]
    assert len(ticks(1e-90, 1e90, True, 5)) <= 7


def test_numbers_as_people_read_them():
    shown = [
        show_number(v)
        for v in (0, 0.0125, 12345, 1e-4, -2.5, 9.9999e5, 1.5e20, math.inf, math.nan, 1234)
    ]
    assert shown == [
        "0",
        "0.0125",
        "12.35k",
        "1e-4",
        "\u22122.5",
        "1M",
        "1.5e20",
        "∞",
        "not a number",
        "1234",
    ]
    assert smoothed([1.0, 3.0], 0.0) == [1, 3]


def test_damaged_files_give_a_valid_page(tmp_path):
    path = make_run(tmp_path / "a")
    damage_run(path)
    check(report_page([RunFiles(path).read()]))


def test_the_report_replaces_a_link_and_does_not_write_through_it(tmp_path):
    outside = make_run(tmp_path / "outside")
    path = tmp_path / "a"
    path.mkdir()
    for name in ("run.json", "metrics.jsonl", "checkpoints", "plan.json", "report.html"):
        (path / name).symlink_to(outside / name)
    os.mkfifo(path / "samples.jsonl")
    (path / "phases.jsonl").mkdir()
    assert main(["report", str(path)]) == 0
    assert not (path / "report.html").is_symlink()
    assert not (outside / "report.html").exists()


texts = st.one_of(st.just(HOSTILE), st.text(max_size=30))
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        texts,
        st.sampled_from([10**400, -(10**400), 1e308, -1e308, 5e-324]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
moments = st.one_of(values, st.floats(T0, T0 + 1000))
metric = st.dictionaries(
    st.one_of(
        st.sampled_from(
            ["loss", "eval_loss", "lr", "grad_norm/x", "step_s", "data_s", "time", "skipped"]
        ),
        texts,
    ),
    values,
    max_size=6,
)
records = st.lists(st.tuples(st.one_of(st.integers(-1, 50), values), metric), max_size=12)
starts = st.lists(
    st.fixed_dictionaries(
        {
            "step": st.one_of(st.integers(0, 50), values),
            "time": moments,
            "seconds": values,
            "text": texts,
        }
    ),
    max_size=4,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    records,
    starts,
    starts,
    starts,
    st.dictionaries(
        st.sampled_from(
            [
                "steps",
                "arguments",
                "versions",
                "devices",
                "git",
                "source",
                "recipe",
                "model",
                "data",
            ]
        ),
        values,
    ),
    values,
    texts,
)
def test_hostile_content_gives_a_page_that_is_whole(
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
    (path / "plan.json").write_text(
        json.dumps({"plan": plan({name: 2}, [leaf]), "measured": measured})
    )
    run = RunFiles(path, name or "a").read()
    for page in (report_page([run], watch=3), report_page([run, run])):
        check(page)
        data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
        assert data is None or json.loads(data[1])["charts"]
    json.dumps(summarize(run).as_json())


def test_control_signs_are_shown_as_such():
    assert escape("a\x00b\x1bc\n\ud800<") == "a\ufffdb\ufffdc\n?&lt;"


def test_the_command(tmp_path, monkeypatch, capsys):
    one = make_run(tmp_path / "one")
    assert main(["report", str(one)]) == 0
    assert capsys.readouterr().out == f"report: {one / 'report.html'}\n"
    assert "<h1>one</h1>" in (one / "report.html").read_text()
    monkeypatch.chdir(tmp_path)
    two = make_run(tmp_path / "two")
    assert main(["report", str(one), str(two), "--json", "answer.json"]) == 0
    assert (tmp_path / "report.html").exists()
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert [run["goodput"] for run in answer["runs"]] == [pytest.approx(16 / 130)] * 2
    for words, said in (
        (["report"], "needs a run directory"),
        (["report", "none"], "there is no run directory none"),
        (["report", "."], "It holds runs: one, two"),
        (["report", "one", "--port", "1"], "belong to --watch"),
        (["report", "one", "--out", "no/where.html"], "cannot be written"),
        (["report", "one", "--watch", "--port", "99999"], "from 0 to 65535"),
    ):
        capsys.readouterr()
        assert main(words) == 2
        assert said in capsys.readouterr().err
    assert main(["report", "--help"]) == 0
    assert "--watch" in capsys.readouterr().out


def test_ten_thousand_steps_take_less_than_a_second_and_no_jax(tmp_path):
    (tmp_path / "a").mkdir()
    lines(tmp_path / "a" / "metrics.jsonl", [step(n) for n in range(1, 10_001)])
    code = "import sys; from shardwise.cli import main; main(['report', sys.argv[1]]); sys.exit('jax' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], check=True, capture_output=True
    )
    begun = time.process_time()
    assert main(["report", str(tmp_path / "a")]) == 0
    assert time.process_time() - begun < 1
    assert (tmp_path / "a" / "report.html").stat().st_size < 600_000


@pytest.fixture
def served():
    made = []
    server = PageServer(lambda: (made.append(1) or "<p>page", "tag"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server, made
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server, path, method="GET", host=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": host or f"127.0.0.1:{server.server_port}", **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


def test_only_who_knows_the_token_is_served(served):
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
        "/\u00e9"[:1] + "%C3%A9",
    ):
        assert ask(server, wrong)[0] == 403
    for host in (
        "evil.example",
        f"evil.example:{server.server_port}",
        "127.0.0.1",
        f"127.0.0.1:{server.server_port}.evil.example",
    ):
        assert ask(server, path, host=host)[0] == 403
    assert made == []
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watching_ends_when_it_is_told_to(tmp_path, number):
    path = make_run(tmp_path / "a")
    words = [
        sys.executable,
        "-m",
        "shardwise.cli",
        "report",
        str(path),
        "--watch",
        "--json",
        str(tmp_path / "answer.json"),
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        address = re.fullmatch(
            r"report: http://127\.0\.0\.1:(\d+)(/[\w-]+/)\n", process.stdout.readline()
        )
        connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=10)
        connection.request("GET", address[2])
        assert b"Finished: 40 steps" in connection.getresponse().read()
        process.send_signal(number)
        assert process.wait(timeout=10) == 0
        assert process.stderr.read() == "ended\n"
    assert json.loads((tmp_path / "answer.json").read_text())["runs"][0]["step"] == 40
    assert not (path / "report.html").exists()


def test_the_parts_of_the_page_are_packed():
    import shardwise.report.html

    for name in (
        "page.css",
        "page.js",
        "plan_page.css",
        "plan_page.js",
        "curves.js",
        "report_page.css",
        "report_page.js",
    ):
        assert (Path(shardwise.report.html.__file__).parent / "static" / name).exists()

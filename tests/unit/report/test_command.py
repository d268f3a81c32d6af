"""`shardwise report`: files, errors, speed, and serving."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from shardwise.cli import main
from tests.helpers.run_dirs import lines, make_run, step


def test_it_writes_the_page_and_the_same_numbers_as_json(tmp_path, monkeypatch, capsys):
    one = make_run(tmp_path / "one")
    assert main(["report", str(one)]) == 0
    assert capsys.readouterr().out == f"report: {one / 'report.html'}\n"
    assert "<h1>one</h1>" in (one / "report.html").read_text()
    monkeypatch.chdir(tmp_path)
    two = make_run(tmp_path / "two")
    assert main(["report", str(one), str(two), "--json", "answer.json"]) == 0
    assert "<h1>Comparison of 2 runs</h1>" in (tmp_path / "report.html").read_text()
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert [run["goodput"] for run in answer["runs"]] == [pytest.approx(16 / 130)] * 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "needs a run directory"),
        (["none"], "run directory none does not exist"),
        (["."], "It contains runs: one, two"),
        (["one"] * 65, "65 runs given; at most 64 can be compared"),
        (["one", "--port", "1"], "`--port` and `--every` require `--watch`"),
        (["one", "--out", "no/where.html"], "cannot write the page to no/where.html"),
        (
            ["one", "--watch", "--out", "page.html"],
            "`--watch` serves the page and writes no file",
        ),
        (["one", "--watch", "--port", "99999"], "from 0 to 65535"),
        (["one", "--watch", "--every", "0.1"], "0.2 to 3600 seconds"),
    ],
)
def test_mistakes_are_explained(tmp_path, monkeypatch, capsys, args, message):
    make_run(tmp_path / "one")
    make_run(tmp_path / "two")
    monkeypatch.chdir(tmp_path)
    assert main(["report", *args]) == 2
    assert message in capsys.readouterr().err


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["report", "--help"])
    assert stopped.value.code == 0
    assert "--watch" in capsys.readouterr().out


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path, monkeypatch):
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
        make_run(tmp_path / parent / "a")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "x/a", "y/a"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "x/a, training" in page
    assert "y/a, training" in page


def test_the_page_replaces_a_link_and_is_not_written_through_it(tmp_path):
    outside = make_run(tmp_path / "outside")
    path = tmp_path / "a"
    path.mkdir()
    for name in (
        "run.json",
        "metrics.jsonl",
        "checkpoints",
        "plan.json",
        "report.html",
    ):
        (path / name).symlink_to(outside / name)
    os.mkfifo(path / "samples.jsonl")
    (path / "phases.jsonl").mkdir()
    assert main(["report", str(path)]) == 0
    assert not (path / "report.html").is_symlink()
    assert not (outside / "report.html").exists()


def test_ten_thousand_steps_take_less_than_a_second_and_no_jax(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    lines(path / "metrics.jsonl", [step(n) for n in range(1, 10_001)])
    code = (
        "import sys; from shardwise.cli import main; main(['report', sys.argv[1]]); "
        "sys.exit('jax' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, capture_output=True
    )
    begin = time.process_time()
    assert main(["report", str(path)]) == 0
    assert time.process_time() - begin < 1
    assert (path / "report.html").stat().st_size < 600_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watching_stops_on_a_signal(tmp_path, number):
    path = make_run(tmp_path / "a")
    answer = tmp_path / "answer.json"
    command = [sys.executable, "-m", "shardwise.cli", "report", str(path), "--watch"]
    with subprocess.Popen(
        [*command, "--json", str(answer)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        line = process.stdout.readline()
        address = re.fullmatch(r"report: http://127\.0\.0\.1:(\d+)(/[\w-]+/)\n", line)
        connection = http.client.HTTPConnection(
            "127.0.0.1", int(address[1]), timeout=10
        )
        connection.request("GET", address[2])
        assert b"Finished: 40 steps" in connection.getresponse().read()
        process.send_signal(number)
        assert process.wait(timeout=10) == 0
        assert process.stderr.read() == "stopped\n"
    assert json.loads(answer.read_text())["runs"][0]["step"] == 40
    assert not (path / "report.html").exists()

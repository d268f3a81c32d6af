"""The command `shardwise plan`: its answers, usage errors, the page, the search, interruptions."""

import json
import signal
import time

import pytest

from shardwise.cli import main
from tests.helpers.command import run, start

RECIPE = "recipes/stdlib_gpt.py"


def test_a_plan_for_virtual_devices_has_a_page_and_a_command(tmp_path):
    words = (
        "plan",
        RECIPE,
        "--on",
        "cpu:8",
        "--mesh",
        "data=4,model=2",
        "--html",
        tmp_path / "p.html",
        "--json",
        tmp_path / "p.json",
    )
    done = run(*words, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout
    assert "all-reduce" in done.stdout
    assert (
        f"shardwise train {RECIPE} --mesh data=4,model=2 --cpu-devices 8" in done.stdout
    )
    answer = json.loads((tmp_path / "p.json").read_text())
    assert answer["plan"]["mesh"] == {"data": 4, "model": 2}
    assert answer["plan"]["num_devices"] == 8
    assert {t["axes"] for t in answer["plan"]["traffic"]} >= {"data", "model"}
    assert "<html" in (tmp_path / "p.html").read_text()[:400]
    start_time = time.monotonic()
    again = run(*words, XDG_CACHE_HOME=str(tmp_path))
    assert again.returncode == 0
    # The plan is from the cache: even its compile time is the same.
    assert again.stdout == done.stdout
    assert time.monotonic() - start_time < 30


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--on", "v5e:3x3"), 2, "no such arrangement"),
        (("--on", "v5x:2x2"), 2, "there is no chip 'v5x'"),
        (("--on", "cpu:8", "--mesh", "data=3"), 2, "needs 3 devices, and there are 8"),
        (("--on", "cpu:8", "--search"), 2, "Name a known chip"),
        (("--on", "cpu:2", "--tokens", "many"), 2, "--tokens"),
        (("--on", "cpu:2", "--html", "nowhere/plan.html"), 2, "there is no directory"),
        (("--on", "v5e:2x2", "--search", "--compile-at-most", "0"), 2, "at least 1"),
    ],
)
def test_a_usage_error_is_one_message(
    words, code, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["plan", RECIPE, *words]) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_search_on_absent_chips_can_be_interrupted_and_continued(tmp_path):
    words = (
        "plan",
        RECIPE,
        "--on",
        "v5e:2x2",
        "--search",
        "--steps",
        "10",
        "--json",
        str(tmp_path / "s.json"),
    )
    process = start(*words, XDG_CACHE_HOME=str(tmp_path / "cache"))
    deadline = time.monotonic() + 300
    while not list((tmp_path / "cache").rglob("*.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=30)
    assert process.returncode == 75
    assert "candidates compiled" in out
    assert "Compiled plans are cached" in error
    assert "Traceback" not in error
    done = run(*words, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "s.json").read_text())
    chosen = [c for c in answer["candidates"] if c["chosen"]]
    assert len(chosen) == 1
    assert chosen[0] == answer["candidates"][0]
    assert f"--mesh {chosen[0]['mesh']}" in answer["command"]


@pytest.mark.slow
def test_a_step_that_is_too_large_is_answered_with_remedies(tmp_path):
    words = (
        "--preset",
        "gpt2",
        "--batch-size",
        "256",
        "--length",
        "512",
        "--on",
        "v5e:1x1",
    )
    done = run(
        "plan",
        "recipes/gpt2.py",
        *words,
        "--json",
        str(tmp_path / "t.json"),
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert done.returncode == 2, done.stderr
    assert "too large" in done.stdout
    assert "largest buffers" in done.stdout
    for change in (
        "--loss-chunks 8",
        "--remat dots",
        "--remat block",
        "--accumulate 2",
        "--accumulate 8",
    ):
        assert change in done.stdout
    assert "Traceback" not in done.stderr
    assert not json.loads((tmp_path / "t.json").read_text())["plan"]["fits"]

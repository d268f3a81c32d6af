"""Two runs in one directory: only one may write."""

import json
import time

import pytest
from harness import (
    PLAIN_SHORT,
    SHORT,
    Silent,
    check_clean,
    check_done,
    check_exact,
    check_refused,
    copy_of,
    experiment,
    last_step,
)

PAIRS = 50
PLAIN_PAIRS = 5


@pytest.mark.faults
def test_f21_two_runs_in_one_directory(bench, straight):
    expected = straight(*SHORT)
    with experiment("F21", "two runs in one directory") as row:
        with row.ours.trial("the second starts while the first is running"):
            first = bench.start("run", *SHORT, "--pause", "0.3")
            first.wait_for_step(2)
            second = bench.train("run", *SHORT)
            check_refused(second, 7, str(first.process.pid), "--out")
            assert first.process.poll() is None
            check_done(first.end())
            check_exact(first.out, expected, 20)
            check_clean(first.out)
            row.note = f"refused after {second.seconds:.1f} s"
        for number in range(PAIRS):
            with row.ours.trial(f"pair {number + 1}, at the same moment", quiet=True):
                pair = [
                    bench.start("pairs", *SHORT, "--pause", "1"),
                    bench.start("pairs", *SHORT, "--pause", "1"),
                ]
                try:
                    deadline = time.monotonic() + 120
                    while all(process.process.poll() is None for process in pair):
                        assert time.monotonic() < deadline, "neither was refused"
                        time.sleep(0.02)
                    loser, winner = sorted(
                        pair, key=lambda process: process.process.poll() is None
                    )
                    check_refused(loser.end(), 7)
                    assert winner.process.poll() is None, "both ended"
                finally:
                    for process in pair:
                        process.kill()
        with row.ours.trial("the lock of a killed run is taken over"):
            assert json.loads((bench.folder / "pairs" / "lock").read_text())["pid"]
            check_done(bench.train("pairs", *SHORT))
            check_exact(bench.folder / "pairs", expected, 20)
            check_clean(bench.folder / "pairs")
        with row.ours.trial("the lock of another machine"):
            out = copy_of(expected, bench, "moved", without=(20,))
            (out / "lock").write_text(
                json.dumps(
                    {
                        "pid": 1,
                        "host": "elsewhere",
                        "boot_id": "another",
                        "started": time.time() - 60,
                    }
                )
            )
            check_refused(
                bench.train("moved", *SHORT), 7, "elsewhere", "--force-unlock"
            )
            check_done(bench.train("moved", *SHORT, "--force-unlock"))
            check_exact(out, expected, 20)
        with row.ours.trial("a corrupted lock file"):
            out = copy_of(expected, bench, "garbage", without=(20,))
            (out / "lock").write_bytes(b"\x00\xff{")
            check_done(bench.train("garbage", *SHORT))
            check_exact(out, expected, 20)

        for number in range(PLAIN_PAIRS):
            with row.plain.trial(f"pair {number + 1}, seeds 0 and 1"):
                pair = [
                    bench.start_plain(
                        f"plain{number}",
                        *PLAIN_SHORT,
                        "--pause",
                        "0.1",
                        "--seed",
                        str(seed),
                    )
                    for seed in (0, 1)
                ]
                try:
                    codes = [process.end(60).code for process in pair]
                finally:
                    for process in pair:
                        process.kill()
                if codes == [0, 0]:
                    raise Silent("both ran to the end in one directory")
                assert 0 not in codes or last_step(pair[0].out) == 20
                raise AssertionError(
                    f"exit codes {codes}: one process found files of the other"
                )

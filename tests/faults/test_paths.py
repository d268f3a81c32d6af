"""Run directories with unusual names, and steps under another number."""

import json
import shlex
import shutil

import pytest
from harness import (
    PLAIN_SHORT,
    RECIPE,
    SHORT,
    Silent,
    check_clean,
    check_done,
    check_exact,
    check_refused,
    copy_of,
    experiment,
    steps_of,
)

PLAIN_LONGER = ("--steps", "28", "--save-every", "4")
NAMES = (
    "lr[1e-3]",
    "[lr=1e-3]",
    "a*b?c",
    "{a,b}",
    "50%20#x",
    'it\'s "quoted" $HOME',
    "back\\slash",
    "new\nline",
    "größe",
    "**",
)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(NAMES[:1], marks=pytest.mark.slow),
        pytest.param(NAMES, marks=pytest.mark.faults),
    ],
    ids=["quick", "all"],
)
def test_f35_unusual_paths(bench, straight, names):
    """Plain Orbax cannot read below such a path, so the run is moved before it is compared."""
    expected = straight(*SHORT)
    with experiment("F35", "special characters in the path of the run") as row:
        for number, name in enumerate(names):
            with row.ours.trial(repr(name)):
                out = bench.folder / f"{number}" / name
                out.parent.mkdir()
                stopped = bench.train(out, *SHORT, "--steps", "20")
                check_done(stopped)
                assert shlex.quote(str(out)) in stopped.err, stopped.message
                verified = bench.command("checkpoint", "verify", out)
                check_done(verified)
                check_clean(out)
                shutil.rmtree(out / "checkpoints" / "20")
                check_done(bench.train(out, *SHORT))
                moved = bench.folder / f"moved-{number}"
                out.rename(moved)
                shutil.copy(
                    out.with_name(out.name + ".batches"),
                    moved.with_name(moved.name + ".batches"),
                )
                check_exact(moved, expected, 20)
        if len(names) > 1:
            with row.plain.trial(repr(names[0])):
                out = bench.folder / "plain" / names[0]
                out.parent.mkdir()
                check_done(bench.plain(out, *PLAIN_SHORT))
                if bench.plain(out, *PLAIN_LONGER).code:
                    raise Silent("the run ended with 0, but cannot resume")
        with row.ours.trial("an empty path"):
            check_refused(bench.command("train", RECIPE, "--out", ""), 2, "empty")
        with row.ours.trial("not UTF-8"):
            out = f"{bench.folder}/a\udcff"
            check_refused(bench.command("train", RECIPE, "--out", out), 2, "UTF-8")


@pytest.mark.slow
def test_f36_steps_under_another_number(bench, straight, straight_plain):
    expected = straight(*SHORT)
    with experiment("F36", "a checkpoint renamed or copied to another step") as row:
        for what, old, new in (
            ("renamed", 20, 24),
            ("copied to an older step", 12, 14),
            ("copied to a newer step", 12, 40),
        ):
            with row.ours.trial(what):
                out = copy_of(expected, bench, what)
                folder = out / "checkpoints"
                if what == "renamed":
                    (folder / str(old)).rename(folder / str(new))
                else:
                    shutil.copytree(folder / str(old), folder / str(new))
                verified = bench.command("checkpoint", "verify", out)
                if verified.code == 0:
                    raise Silent("verified")
                assert f"names {old}" in verified.err, verified.message
                check_done(bench.train(out.name, *SHORT))
                check_exact(out, expected, 20)
        with row.ours.trial("a description of another step"):
            out = copy_of(expected, bench, "description")
            meta = out / "checkpoints" / "20" / "meta.json"
            content = json.loads(meta.read_text())
            meta.write_text(json.dumps({**content, "step": 16}))
            check_done(bench.train(out.name, *SHORT))
            assert steps_of(out)[-1] == 20
            check_exact(out, expected, 20)
        with row.plain.trial("renamed"):
            out = copy_of(straight_plain(*PLAIN_SHORT), bench, "plain renamed")
            folder = out / "checkpoints"
            (folder / "20").rename(folder / "24")
            if bench.plain(out.name, *PLAIN_LONGER).code == 0:
                raise Silent("step 20 was resumed as step 24")

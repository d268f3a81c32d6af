"""Disks that are full, broken, read-only or missing, and the order of flushes and renames."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import (
    HERE,
    PLAIN_SHORT,
    SHORT,
    can_mount,
    check_clean,
    check_done,
    check_exact,
    check_refused,
    experiment,
    files_of,
    is_complete,
    leaves,
    mounted,
    steps_of,
)

# Bytes of a checkpoint, rounded up.
CHECKPOINT = 1_500_000


def filled(folder, leave):
    """Write a file that leaves `leave` bytes free, and return its path."""
    free = shutil.disk_usage(folder).free
    path = folder / "filler"
    with path.open("wb") as file:
        file.write(bytes(free - leave))
    return path


@pytest.mark.faults
def test_f06_full_disk(bench, straight, straight_plain):
    """Fill an in-memory file system with a file, and delete the file again.

    The file system has room for a few checkpoints.
    """
    expected = straight(*SHORT)
    if not can_mount(bench.folder / "probe"):
        with (
            experiment(
                "F06", "disk full", "cannot mount here: simulated by a fail point"
            ) as row,
            row.ours.trial("three consecutive saves"),
        ):
            ended = bench.train(
                "run", *SHORT, SHARDWISE_FAILPOINT="checkpoint.arrays:2-4:enospc"
            )
            check_done(ended)
            assert "No space left" in ended.err, ended.message
            check_exact(bench.folder / "run", expected, 20)
            check_clean(bench.folder / "run")
        return
    with experiment("F06", "disk full", "on an in-memory file system") as row:
        with (
            row.ours.trial("room for one checkpoint and a half"),
            mounted(bench.folder / "small", f"size={CHECKPOINT * 3 // 2}") as disk,
        ):
            ended = bench.train(disk / "run", *SHORT)
            check_refused(ended, 4, "free", "step 20")
            out = disk / "run"
            assert steps_of(out), ended.message
            check_clean(out)
        for name, leave in (
            ("detected before the save", CHECKPOINT // 3),
            ("during the save", CHECKPOINT * 9 // 10),
        ):
            with (
                row.ours.trial(f"filled during the run, {name}"),
                mounted(bench.folder / "disk", f"size={CHECKPOINT * 5}") as disk,
            ):
                out = disk / "run"
                process = bench.start(out, *SHORT, "--pause", "0.2")
                process.wait_for(lambda out=out: steps_of(out) == [4], "step 4")
                filler = filled(disk, leave)
                process.wait_for_line("warning:")
                assert is_complete(out / "checkpoints" / "4")
                filler.unlink()
                ended = process.end()
                check_done(ended)
                move_out(bench, disk, "moved")
                check_exact(bench.folder / "moved", expected, 20)
                check_clean(bench.folder / "moved")
                shutil.rmtree(bench.folder / "moved")
        with (
            row.ours.trial("full at the last save, resumed when there is room"),
            mounted(bench.folder / "disk", f"size={CHECKPOINT * 5}") as disk,
        ):
            out = disk / "run"
            process = bench.start(out, *SHORT, "--pause", "0.2")
            process.wait_for(lambda: 16 in steps_of(out), "step 16")
            filler = filled(disk, CHECKPOINT // 3)
            check_refused(process.end(), 4, "step 20", "16")
            assert steps_of(out)[-1] == 16
            check_clean(out)
            filler.unlink()
            check_done(bench.train(out, *SHORT))
            move_out(bench, disk, "moved")
            check_exact(bench.folder / "moved", expected, 20)
        plain = straight_plain(*PLAIN_SHORT)
        with (
            row.plain.trial("filled during the run"),
            mounted(bench.folder / "disk", f"size={CHECKPOINT * 5}") as disk,
        ):
            out = disk / "run"
            process = bench.start_plain(out, *PLAIN_SHORT, "--pause", "0.2")
            process.wait_for(lambda: 4 in steps_of(out), "step 4")
            filler = filled(disk, CHECKPOINT // 3)
            process.wait_for_step(14)
            filler.unlink()
            check_done(process.end())
            move_out(bench, disk, "plain")
            check_exact(bench.folder / "plain", plain, 20, merged=True)


def move_out(bench, disk, name):
    """Copy a run from the in-memory file system before it is unmounted."""
    shutil.copytree(disk / "run", bench.folder / name)
    shutil.copy(disk / "run.batches", bench.folder / f"{name}.batches")


def as_nobody(bench, out):
    """Run the command as a user without access to the directory."""
    cache = bench.folder / "cache-of-nobody"
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    return bench.start(
        out,
        *SHORT,
        wrap=("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
        JAX_COMPILATION_CACHE_DIR=str(cache),
    ).end()


def test_f23_unusable_directory(bench):
    """The command refuses before it compiles."""
    with experiment(
        "F23",
        "run directory read-only, without permission, a file, missing, or with I/O errors",
    ) as row:
        (bench.folder / "file").write_text("not a directory")
        with row.ours.trial("its parent is a file"):
            ended = bench.train("file/run", *SHORT)
            check_refused(ended, 4, "file/run", "--out")
            assert "compiling" not in ended.err
        with row.ours.trial("a link to nowhere"):
            (bench.folder / "link").symlink_to(bench.folder / "nowhere")
            ended = bench.train("link", *SHORT)
            check_refused(ended, 4, "link")
            assert "compiling" not in ended.err
        if can_mount(bench.folder / "probe"):
            with (
                row.ours.trial("a read-only file system"),
                mounted(bench.folder / "read-only", "size=1m,ro"),
            ):
                ended = bench.train("read-only/run", *SHORT)
                check_refused(ended, 4, "read-only/run", "Read-only file system")
                assert "compiling" not in ended.err


@pytest.mark.faults
def test_f23_directory_that_breaks_during_the_run(bench, straight):
    expected = straight(*SHORT)
    with experiment(
        "F23",
        "run directory read-only, without permission, a file, missing, or with I/O errors",
    ) as row:
        if os.geteuid() == 0:
            with row.ours.trial("no permission"):
                for folder in (bench.folder, *bench.folder.parents):
                    if folder.owner() == "root" and folder != Path("/"):
                        folder.chmod(folder.stat().st_mode | 0o055)
                (bench.folder / "mine").mkdir(mode=0o700)
                ended = as_nobody(bench, "mine/run")
                check_refused(ended, 4, "mine/run", "Permission denied")
                assert "compiling" not in ended.err
        with row.ours.trial("a link to a directory"):
            (bench.folder / "target").mkdir()
            (bench.folder / "link").symlink_to(bench.folder / "target")
            check_done(bench.train("link", *SHORT))
            check_exact(bench.folder / "link", expected, 20)
        with row.ours.trial("removed during the run"):
            process = bench.start("gone", *SHORT, "--pause", "0.2")
            process.wait_for_step(6)
            # A save may create files meanwhile, so a rename takes the directory away at once.
            process.out.rename(bench.folder / "taken away")
            check_refused(process.end(), 4, "gone")
        for point in (
            "checkpoint.temporary",
            "checkpoint.written",
            "checkpoint.manifest",
            "checkpoint.rename",
            "checkpoint.renamed",
            "checkpoint.delete",
        ):
            with row.ours.trial(f"one I/O error at {point}"):
                out = bench.folder / point
                ended = bench.train(
                    out.name, *SHORT, SHARDWISE_FAILPOINT=f"{point}:1:eio"
                )
                check_done(ended)
                assert "warning:" in ended.err, ended.message
                assert steps_of(out)[-1] == 20
                check_exact(out, expected, 20)
                check_clean(out)


@pytest.mark.faults
def test_f26_background_saves_that_fail(bench, straight):
    expected = straight(*SHORT)
    with experiment("F26", "saving fails: once, at the last save, always") as row:
        with row.ours.trial("once"):
            ended = bench.train(
                "once", *SHORT, SHARDWISE_FAILPOINT="checkpoint.written:2:eio"
            )
            check_done(ended)
            assert "8 could not be saved" in ended.err, ended.message
            assert "the next save is after step" in ended.err, ended.message
            check_exact(bench.folder / "once", expected, 20)
            check_clean(bench.folder / "once")
        with row.ours.trial("at the last save, once"):
            ended = bench.train(
                "last", *SHORT, SHARDWISE_FAILPOINT="checkpoint.written:5:enospc"
            )
            check_done(ended)
            check_exact(bench.folder / "last", expected, 20)
        for name, count in (
            ("at the last save, every time", "5-99"),
            ("always", "1-99"),
        ):
            with row.ours.trial(name):
                out = bench.folder / name.replace(" ", "-").replace(",", "")
                check_refused(
                    bench.train(
                        out.name,
                        *SHORT,
                        SHARDWISE_FAILPOINT=f"checkpoint.written:{count}:enospc",
                    ),
                    4,
                    "step 20",
                )
                assert steps_of(out) == ([8, 12, 16] if count == "5-99" else [])
                check_clean(out)
                check_done(bench.train(out.name, *SHORT))
                check_exact(out, expected, 20)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(9, marks=pytest.mark.faults),
    ],
    ids=["quick", "all"],
)
def test_f37_log_that_cannot_be_written(bench, straight, count):
    """Training continues, and the lines are written later. The state is saved in any case."""
    expected = straight(*SHORT)
    cases = [("a while", "6-14:enospc"), ("with I/O errors", "2-9:eio")]
    with experiment(
        "F37", "metrics cannot be written: for a while, until the end"
    ) as row:
        for name, visits in cases[:count]:
            with row.ours.trial(name):
                out = bench.folder / name.replace(" ", "-").replace("/", "-")
                ended = bench.train(
                    out.name, *SHORT, SHARDWISE_FAILPOINT=f"log.write:{visits}"
                )
                check_done(ended)
                assert "Training continues" in ended.err, ended.message
                assert "could not be written to" not in ended.err, ended.message
                check_exact(out, expected, 20)
                check_clean(out)
        with row.ours.trial("until the end"):
            out = bench.folder / "end"
            ended = bench.train(
                "end", *SHORT, SHARDWISE_FAILPOINT="log.write:10-9999:enospc"
            )
            check_done(ended)
            assert "lines that could not be written to" in ended.err, ended.message
            assert leaves(out, 20) == leaves(expected, 20)


def strace_works():
    """Return whether strace is installed and may trace."""
    return (
        shutil.which("strace") is not None
        and subprocess.run(
            ["strace", "-o", "/dev/null", "true"], capture_output=True
        ).returncode
        == 0
    )


CALL = re.compile(r"^\d+\s+(\w+)\((.*)")


def read_strace(path):
    """Return (call, first path, second path) in the order in which the calls ended."""
    calls, unfinished = [], {}
    for line in path.read_text(errors="replace").splitlines():
        pid, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.endswith("<unfinished ...>"):
            unfinished[pid] = rest.removesuffix("<unfinished ...>")
            continue
        if rest.startswith("<..."):
            rest = unfinished.pop(pid, "") + rest.partition("resumed>")[2]
        if not re.search(r"\)\s+= 0", rest):
            continue
        name = rest.partition("(")[0]
        paths = (
            re.findall(r"<(/[^>]*)>", rest)
            if "sync" in name
            else re.findall(r'"([^"]*)"', rest)
        )
        calls.append((name, *paths[:2]))
    return calls


def check_order(calls, out, step):
    """Check that a checkpoint survives power loss.

    All its files and directories are flushed before the rename, and its parent after it.
    """
    final, temporary = (
        out / "checkpoints" / str(step),
        out / "checkpoints" / f"{step}.tmp",
    )
    renames = [
        i
        for i, call in enumerate(calls)
        if call[0].startswith(("rename", "replace"))
        and call[1:] == (str(temporary), str(final))
    ]
    assert len(renames) == 1, f"{len(renames)} renames of {temporary}"
    flushed = {call[1] for call in calls[: renames[0]] if "sync" in call[0]}
    wanted = [
        *files_of(final),
        *(path for path in final.rglob("*") if path.is_dir()),
        final,
    ]
    missing = [
        str(path.relative_to(final))
        for path in wanted
        if str(temporary / path.relative_to(final)) not in flushed
    ]
    assert missing == [], f"not flushed before the rename: {missing}"
    assert any(
        "sync" in call[0] and call[1] == str(final.parent)
        for call in calls[renames[0] :]
    ), "the directory is not flushed after the rename"


@pytest.mark.faults
def test_f30_everything_is_flushed_before_the_rename(bench):
    """Trace the calls with strace where possible, otherwise in Python.

    Python does not see the additional flushes of Orbax.
    """
    traced = strace_works()
    with experiment(
        "F30",
        "order of flushes and renames, for power loss",
        "strace" if traced else "calls of Python",
    ) as row:
        log = bench.folder / "calls"
        tracer = (
            "strace",
            "-f",
            "-y",
            "-e",
            "trace=fsync,fdatasync,rename,renameat,renameat2",
            "-s",
            "4096",
            "-o",
            str(log),
        )
        wrap, environment = (
            (tracer, {})
            if traced
            else ((), {"PYTHONPATH": str(HERE / "spy"), "SPY_CALLS": str(log)})
        )
        out = bench.folder / "run"
        check_done(bench.start("run", *SHORT, wrap=wrap, **environment).end())
        calls = (
            read_strace(log)
            if traced
            else [tuple(line.split("\t")) for line in log.read_text().splitlines()]
        )
        for step in steps_of(out):
            with row.ours.trial(f"step {step}"):
                check_order(calls, out, step)
        with row.ours.trial("run.json"):
            index = next(
                i
                for i, call in enumerate(calls)
                if call[-1] == str(out / "run.json")
                and call[0].startswith(("rename", "replace"))
            )
            assert any(
                "sync" in call[0] and call[1] == str(out / "run.json.tmp")
                for call in calls[:index]
            )
        if traced:
            with row.plain.trial("the last step"):
                log.unlink()
                process = bench.popen(
                    (
                        *tracer,
                        sys.executable,
                        HERE / "plain.py",
                        "--out",
                        bench.folder / "plain",
                        *PLAIN_SHORT,
                    ),
                    "plain",
                )
                check_done(process.end())
                check_plain_order(read_strace(log), bench.folder / "plain", 20)


def check_plain_order(calls, out, step):
    """Check that the plain loop flushes all files of a checkpoint before the rename."""
    final = out / "checkpoints" / str(step)
    renames = [
        i
        for i, call in enumerate(calls)
        if call[0].startswith("rename") and call[-1] == str(final)
    ]
    assert renames, "no rename"
    temporary = Path(calls[renames[0]][1])
    flushed = {call[1] for call in calls[: renames[0]] if "sync" in call[0]}
    names = {Path(path).name.removesuffix(".__lock") for path in flushed}
    missing = [
        str(path.relative_to(final))
        for path in files_of(final)
        if path.name not in names
    ]
    assert missing == [], (
        f"not flushed before the rename of {temporary.name}: {missing}"
    )

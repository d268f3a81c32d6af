"""Hostile run directories: no code runs, no outside writes, no ports, no memory blowup."""

import json
import os
import pickle
from pathlib import Path

import pytest
import tensorstore
from harness import (
    HERE,
    SHORT,
    Silent,
    check_done,
    check_exact,
    check_refused,
    copy_of,
    experiment,
    write_manifest,
)

NAMES = (
    "checkpoint.pkl",
    "rng_state.pth",
    "train_state.pt",
    "model.pickle",
    "optimizer.bin",
    "data.pkl",
    "compiled_step",
    "__init__.py",
    "conftest.py",
)


class Payload:
    """An object that creates the canary when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = str(canary)

    def __reduce__(self):
        return os.mkdir, (self.canary,)


def put_pickles(out, outside):
    step = out / "checkpoints" / "16"
    content = pickle.dumps(Payload(outside / "canary"))
    for folder in (out, out / "checkpoints", step, step / "state"):
        for name in NAMES:
            (folder / name).write_bytes(
                content
                if not name.endswith(".py")
                else f"import os; os.mkdir({str(outside / 'canary')!r})".encode()
            )
    write_manifest(step)


def pickle_as_metadata(out, outside):
    step = out / "checkpoints" / "16"
    (step / "meta.json").write_bytes(pickle.dumps(Payload(outside / "canary")))
    write_manifest(step)


def pickle_as_orbax_metadata(out, outside):
    step = out / "checkpoints" / "16"
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding"):
        (step / "state" / name).write_bytes(pickle.dumps(Payload(outside / "canary")))
    write_manifest(step)


def names_outside_the_run(out, outside):
    manifest = out / "checkpoints" / "16" / "MANIFEST"
    lines = [
        f"{'0' * 64}  ../../../outside/canary\n",
        f"{'0' * 64}  {outside}/canary\n",
        f"{'0' * 64}  state/../../x\n",
    ]
    manifest.write_text(manifest.read_text() + "".join(lines))


def links_for_files(out, outside):
    """Every file that the command writes is a link to a file outside."""
    for name in (
        "run.json",
        "run.json.tmp",
        "metrics.jsonl.tmp",
        "starts.jsonl",
        "loss.png",
        "loss.png.tmp",
    ):
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(outside / "precious")


def link_for_lock(out, outside):
    (out / "lock").unlink()
    (out / "lock").symlink_to(outside / "precious")


def links_for_folders(out, outside):
    for name in ("99.tmp", "20.tmp", "20", "12.deleted.tmp"):
        (out / "checkpoints" / name).symlink_to(outside)


def link_in_a_step(out, outside):
    step = out / "checkpoints" / "16"
    (step / "state" / "d" / "link").symlink_to(outside / "precious")
    write_manifest(step)


def manifest_that_never_ends(out, outside):
    manifest = out / "checkpoints" / "16" / "MANIFEST"
    manifest.unlink()
    os.mkfifo(manifest)


def odd_names_of_steps(out, outside):
    for name in ("٢١", "021", "99999999999999999999999", "-5", "1e3"):
        (out / "checkpoints" / name).mkdir()


def declared_size(out, outside):
    """The metadata declare an array of 10**15 elements; the file has a few bytes."""
    step = out / "checkpoints" / "16"
    store = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{step / 'state'}/"}
    ).result()
    key = next(
        key
        for key in store.list().result()
        if key.endswith(b"params.head.kernel/.zarray")
    )
    description = json.loads(store.read(key).result().value)
    description["shape"] = description["chunks"] = [10**8, 10**7]
    store.write(key, json.dumps(description).encode()).result()
    write_manifest(step)


def nested_metadata(out, outside):
    step = out / "checkpoints" / "16"
    (step / "meta.json").write_text('{"lr": ' + "[" * 200_000 + "]" * 200_000 + "}")
    write_manifest(step)


def nested_orbax_metadata(out, outside):
    step = out / "checkpoints" / "16"
    (step / "state" / "_METADATA").write_text("[" * 200_000 + "]" * 200_000)
    write_manifest(step)


def metadata_of_other_kinds(out, outside):
    step = out / "checkpoints" / "16"
    meta = json.loads((step / "meta.json").read_text())
    (step / "meta.json").write_text(
        json.dumps(
            {
                **meta,
                "lr": {"all": 3, "x": {"nan": []}},
                "data": [1],
                "seed": {"a": None},
                "step": "x",
            }
        )
    )
    write_manifest(step)


def metadata_that_is_a_list(out, outside):
    step = out / "checkpoints" / "16"
    (step / "meta.json").write_text("[1, 2]")
    write_manifest(step)


def logs_of_other_kinds(out, outside):
    (out / "metrics.jsonl").write_text(
        '3\n{}\n{"step": "x"}\n{"step": null, "loss": []}\n["step"]\n'
    )
    (out / "starts.jsonl").write_text('3\n{}\n{"step": "x"}\n[]\n')


def pipe_for_metrics(out, outside):
    (out / "metrics.jsonl").unlink()
    os.mkfifo(out / "metrics.jsonl")


def pipes_for_temporary_files(out, outside):
    for name in ("run.json.tmp", "metrics.jsonl.tmp", "plan.json.tmp"):
        os.mkfifo(out / name)


def folders_for_files(out, outside):
    for name in ("starts.jsonl", "phases.jsonl", "loss.png"):
        (out / name).unlink()
        (out / name).mkdir()


def pipe_for_lock(out, outside):
    (out / "lock").unlink()
    os.mkfifo(out / "lock")


def pipe_for_checkpoints(out, outside):
    (out / "checkpoints").rename(out / "saved")
    os.mkfifo(out / "checkpoints")


def pipe_for_a_save(out, outside):
    os.mkfifo(out / "checkpoints" / "20.tmp")


def escapes_in_the_lock(out, outside):
    """A process on another machine holds it, with a name that would clear the terminal."""
    owner = {"pid": "\x1b[2J", "host": "\x1b]0;title\x07", "boot_id": "x"}
    (out / "lock").write_text(json.dumps(owner))


def numbers_of_other_kinds(out, outside):
    with (out / "metrics.jsonl").open("a") as file:
        for value in ("[1]", '"x"', "null", "{}", "1" + "0" * 400):
            file.write(f'{{"step": 3, "loss": {value}, "eval_loss": {value}}}\n')


# Expected outcomes.
EXACT, ANY, REFUSED, DONE = "exact", "any", "refused", "done"
CASES = {
    put_pickles: EXACT,
    links_for_files: ANY,
    pickle_as_metadata: ANY,
    pickle_as_orbax_metadata: ANY,
    names_outside_the_run: EXACT,
    link_for_lock: ANY,
    links_for_folders: ANY,
    link_in_a_step: EXACT,
    manifest_that_never_ends: ANY,
    odd_names_of_steps: ANY,
    declared_size: REFUSED,
    nested_metadata: ANY,
    nested_orbax_metadata: ANY,
    metadata_of_other_kinds: ANY,
    metadata_that_is_a_list: ANY,
    logs_of_other_kinds: DONE,
    numbers_of_other_kinds: DONE,
    pipe_for_metrics: REFUSED,
    pipes_for_temporary_files: REFUSED,
    folders_for_files: REFUSED,
    pipe_for_lock: REFUSED,
    pipe_for_checkpoints: REFUSED,
    pipe_for_a_save: DONE,
    escapes_in_the_lock: REFUSED,
}


def contents(folder):
    """Return the bytes of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(99, marks=pytest.mark.faults),
    ],
    ids=["quick", "all"],
)
def test_f25_hostile_files(bench, straight, count):
    run = straight(*SHORT)
    with experiment("F25", "hostile files in a run directory") as row:
        benign = copy_of(run, bench, "benign", without=(20,))
        usual = spied(bench, benign, 0)
        check_done(usual.ended)
        memory = usual.memory
        for make, due in list(CASES.items())[:count]:
            with row.ours.trial(make.__name__.replace("_", " ")):
                out = copy_of(
                    run,
                    bench,
                    make.__name__,
                    without=(12, 20) if due == REFUSED else (20,),
                )
                outside = bench.folder / f"outside-{make.__name__}"
                outside.mkdir()
                (outside / "precious").write_text("precious")
                make(out, outside)
                found = spied(bench, out, memory)
                if contents(outside) != {"precious": b"precious"}:
                    raise Silent(
                        f"changed outside the run directory: {sorted(contents(outside))}"
                    )
                strange = sorted(found.events - usual.events)
                assert strange == [], (
                    f"events that a normal run does not have: {strange[:3]}"
                )
                assert found.ports == set(), f"listens on {found.ports}"
                assert found.elsewhere == set(), (
                    f"written outside the run: {sorted(found.elsewhere)[:3]}"
                )
                if due == EXACT:
                    check_done(found.ended)
                    check_exact(out, run, 20)
                elif due == DONE:
                    check_done(found.ended)
                elif found.ended.code != 0:
                    is_locked = make in (link_for_lock, escapes_in_the_lock)
                    check_refused(
                        found.ended, 7 if is_locked and found.ended.code == 7 else 4
                    )
                    assert "\x1b" not in found.ended.err, found.ended.message
                elif due == REFUSED:
                    raise Silent("loaded")


class spied:
    """A run that `spy/sitecustomize.py` watches.

    Attributes:
        memory: its peak memory in bytes.
        ports: the addresses on which it listened.
        ended: its exit code and its output.
        elsewhere: the paths that it wrote outside its directory.
        events: its other audit events.
    """

    def __init__(self, bench, out, memory):
        log = bench.folder / f"{out.name}.events"
        settings = bench.folder / "matplotlib"
        search = os.pathsep.join(
            path for path in (str(HERE / "spy"), os.environ.get("PYTHONPATH")) if path
        )
        process = bench.start(
            out.name,
            *SHORT,
            PYTHONPATH=search,
            SPY_EVENTS=str(log),
            MPLCONFIGDIR=str(settings),
            PYTHONDONTWRITEBYTECODE="1",
        )
        self.memory, self.ports = process.watch()
        self.ended = process.end()
        assert not memory or self.memory < 2 * memory, (
            f"{self.memory / 2**20:.0f} MiB, usually {memory / 2**20:.0f}"
        )
        lines = [line.split("\t", 1) for line in log.read_text().splitlines()]
        allowed = (
            str(out),
            f"{out}.batches",
            str(bench.cache),
            str(settings),
            "/dev/",
            "/proc/",
        )
        self.elsewhere = {
            what
            for event, what in lines
            if event in ("write", "change")
            and what.startswith("/")
            and not what.startswith(allowed)
        }
        self.events = {
            f"{event} {what}"
            for event, what in lines
            if event not in ("write", "change")
        }

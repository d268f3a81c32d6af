"""Bad command lines, impossible meshes, and checkpoints of another model."""

import re

import pytest
from harness import (
    PLAIN_SHORT,
    RECIPE,
    SHORT,
    Silent,
    check_refused,
    copy_of,
    experiment,
    leaves,
    steps_of,
)

OTHER = """
from shardwise import Run

def broken() -> Run:
    raise ValueError("no such corpus")

def number() -> int:
    return 3

def untyped(steps) -> Run:
    raise KeyError("steps")

def leaves() -> Run:
    raise SystemExit(0)

recipe = 7
"""
# (arguments, words of the answer). These need no recipe, so JAX is not imported.
EARLY = [
    ([], "shardwise train"),
    (["trian", RECIPE], "'trian' is not a command"),
    (["train"], "needs a recipe"),
    (["explain"], "needs a recipe"),
    (["train", "--steps", "3"], "needs a recipe"),
    (["train", "missing.py"], "recipe file 'missing.py' does not exist"),
    (["train", "othr.py"], "Did you mean 'other.py'"),
    (["train", "."], "recipe file '.' does not exist"),
    (["train", RECIPE, "--cpu-devices", "x"], "--cpu-devices"),
    (["train", RECIPE, "--cpu-devices", "1.5"], "--cpu-devices"),
    (["train", RECIPE, "--cpu-devices"], "--cpu-devices"),
    (["train", RECIPE, "--accept", "everything"], "--accept"),
    (["train", RECIPE, "--json"], "--json"),
    (["train", RECIPE, "--out", ""], "empty"),
    (["train", RECIPE, "--out="], "empty"),
    (["data", "frobnicate"], "frobnicate"),
    (["checkpoint", "frobnicate"], "frobnicate"),
]
# The same for arguments that need the recipe.
LATE = [
    (["train", RECIPE, "--stepz", "3"], "--steps"),
    (["train", RECIPE, "--steps", "three"], "--steps"),
    (["train", RECIPE, "--steps", "3.5"], "--steps"),
    (["train", RECIPE, "--steps"], "--steps"),
    (["train", RECIPE, "--steps", "0"], "steps"),
    (["train", RECIPE, "--steps", "-4"], "steps"),
    (["train", RECIPE, "--steps", "1" + "0" * 30], "at most 2,147,483,647"),
    (["train", RECIPE, "--save-every", "1" + "0" * 30], "at most 2,147,483,647"),
    (["train", RECIPE, "--cpu-devices", "1" + "0" * 30], "at most 4096"),
    (["train", "latin.py"], ("latin.py", "byte 0xe9 in line 3")),
    (["train", RECIPE, "--stepz", "3", "--widht", "4"], ("--steps", "--width")),
    (["train", RECIPE, "surplus"], "surplus"),
    (["train", RECIPE, "--lr", "fast"], "--lr"),
    (["train", RECIPE, "--lr", "nan"], "nan"),
    (["train", RECIPE, "--optimizer", "adamx"], "adamw"),
    (["train", RECIPE, "--dtype", "float31"], "float32"),
    (["train", RECIPE, "--batch-size", "0"], "0"),
    (["train", RECIPE, "--accumulate", "0"], "accumulate=0"),
    (["train", RECIPE, "--accumulate", "3"], "3"),
    (["train", RECIPE, "--save-every", "-3"], "-3"),
    (["train", RECIPE, "--eval-every", "-1"], "-1"),
    (["train", RECIPE, "--max-skips", "-1"], "-1"),
    (["train", RECIPE, "--on-nonfinite", "maybe"], "skip"),
    (["train", RECIPE, "--width", "0"], "the model cannot be built"),
    (["train", RECIPE, "--cpu-devices", "0"], "at least 1"),
    (["train", f"{RECIPE}:nothing"], "has no function 'nothing'"),
    (["train", "syntax.py"], "cannot be imported: SyntaxError"),
    (["train", "raises.py"], "cannot be imported: RuntimeError"),
    (["train", "text.txt"], "text.txt"),
    (["train", "other.py"], "recipe"),
    (["train", "other.py:broken"], "the recipe raised ValueError: no such corpus"),
    (["train", "other.py:number"], "returned a int"),
    (["train", "other.py:untyped"], "steps"),
    (["train", "other.py:leaves"], "recipe"),
]


@pytest.mark.parametrize(
    "share", [12, pytest.param(1, marks=pytest.mark.faults)], ids=["quick", "all"]
)
def test_f14_bad_arguments(bench, share):
    (bench.folder / "other.py").write_text(OTHER)
    (bench.folder / "syntax.py").write_text("def recipe(:")
    (bench.folder / "raises.py").write_text("raise RuntimeError('at import')")
    (bench.folder / "text.txt").write_text("not a recipe")
    (bench.folder / "latin.py").write_bytes(b"# A recipe\n\nx = '\xe9'\n")
    with experiment("F14", "bad arguments") as row:
        slowest = 0.0
        for early, (args, words) in [(True, case) for case in EARLY[::share]] + [
            (False, case) for case in LATE[::share]
        ]:
            with row.ours.trial(
                " ".join(str(word).replace(str(RECIPE), "recipe.py") for word in args)
                or "(nothing)"
            ):
                ended = bench.command(*args)
                if args:
                    check_refused(
                        ended, 2, *([words] if isinstance(words, str) else words)
                    )
                else:
                    assert (ended.code, words in ended.err) == (2, True)
                assert "compiling" not in ended.err
                if early:
                    slowest = max(slowest, ended.seconds)
        row.note = (
            f"slowest reply to the {len(EARLY[::share])} that need no recipe: "
            f"{slowest:.1f} s"
        )


MESHES = [
    (["--mesh", "data=6"], ("data=6", "8")),
    (["--mesh", "data=8", "--batch-size", "12"], ("12", "8")),
    (["--mesh", "data=2,data=4"], ("data", "twice")),
    (["--mesh", "data=4,model=2"], ("model",)),
    (["--mesh", "data=-1,fsdp=-1"], ("-1",)),
    (["--mesh", "data=eight"], ("data=eight",)),
    (["--mesh", "data=0"], ("0",)),
    (
        ["--mesh", "data=4,model=2", "--rule", "heed/kernel", "model"],
        ("heed/kernel", "head/kernel"),
    ),
    (
        ["--mesh", "model=8", "--rule", "head/kernel", "model", "--vocabulary", "130"],
        ("head/kernel", "130", "8"),
    ),
]


@pytest.mark.parametrize(
    "share", [3, pytest.param(1, marks=pytest.mark.faults)], ids=["quick", "all"]
)
def test_f15_impossible_meshes(bench, share):
    with experiment("F15", "impossible meshes") as row:
        for args, words in MESHES[::share]:
            with row.ours.trial(" ".join(args)):
                ended = bench.command("train", RECIPE, "--cpu-devices", "8", *args)
                check_refused(ended, 2, *words)
                assert "compiling" not in ended.err


# Arguments -> words that the answer must have.
MISMATCHES = {
    ("--width", "56"): (
        "params/blocks/0/up/kernel",
        "params/blocks/1/up/kernel",
        "float32[48, 192]",
        "float32[56, 224]",
    ),
    ("--dtype", "bfloat16"): (
        "params/blocks/1/up/kernel",
        "float32[48, 192]",
        "bfloat16[48, 192]",
    ),
    ("--renamed",): ("params/head/kernel", "params/output/kernel", "opt_state"),
    ("--depth", "4"): ("params/blocks/3/down/bias", "opt_state"),
    ("--vocabulary", "130"): ("params/tokens/embedding", "params/head/bias"),
    ("--optimizer", "lion"): ("opt_state", "nu"),
    ("--depth", "1", "--width", "32", "--vocabulary", "64"): (
        "params/blocks/0/up/kernel",
        "params/blocks/1/up/kernel",
    ),
}
PLAIN_MISMATCHES = [args for args in MISMATCHES if args != ("--renamed",)]


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(99, marks=pytest.mark.faults),
    ],
    ids=["quick", "all"],
)
def test_f16_checkpoint_of_another_model(bench, straight, straight_plain, count):
    """The command lists the first mismatched leaves and counts the rest.

    It loads nothing and changes nothing.
    """
    run = straight(*SHORT)
    with experiment(
        "F16", "other shape, dtype, optimizer or name than in the checkpoint"
    ) as row:
        out = copy_of(run, bench, "run")
        before = leaves(out, 20)
        for args, words in list(MISMATCHES.items())[:count]:
            with row.ours.trial(" ".join(args)):
                ended = bench.train("run", *SHORT, *args)
                check_refused(ended, 4, *words)
                assert "compiling" not in ended.err
                if args[0] == "--width":
                    shaped = [
                        path
                        for path, (_, shape, _) in before.items()
                        if {48, 192} & set(shape)
                    ]
                    named = [path for path in shaped if path.lstrip("/") in ended.err]
                    others = int(re.search(r"and (\d+) more", ended.err)[1])
                    assert len(named) + others == len(shaped), (
                        f"{len(named)} of {len(shaped)} leaves named, {others} counted"
                    )
        assert steps_of(out) == [12, 16, 20]
        assert leaves(out, 20) == before
        if count > 10:
            plain = straight_plain(*PLAIN_SHORT)
            for args in PLAIN_MISMATCHES:
                with row.plain.trial(" ".join(args)):
                    copy_of(plain, bench, "plain " + "".join(args))
                    if (
                        bench.plain(
                            "plain-" + "".join(args),
                            "--steps",
                            "22",
                            "--save-every",
                            "4",
                            *args,
                        ).code
                        == 0
                    ):
                        raise Silent("accepted")

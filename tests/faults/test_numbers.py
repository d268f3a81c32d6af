"""Losses and gradients that are not finite, and runs that diverge."""

import shutil

import numpy as np
import pytest
from harness import (
    PLAIN_SHORT,
    SHORT,
    Silent,
    check_clean,
    check_done,
    check_refused,
    experiment,
    leaves,
    losses,
    read_log,
    rewrite,
    steps_of,
)

SAVED_AT_7 = ("--steps", "20", "--save-every", "7", "--eval-every", "10")


def all_finite(out):
    """Check that every checkpoint has only finite values."""
    for step in steps_of(out):
        for path, (dtype, _, content) in leaves(out, step).items():
            if (
                dtype.startswith("float")
                and not np.isfinite(np.frombuffer(content, dtype)).all()
            ):
                raise Silent(
                    f"checkpoint {step} has values that are not finite in {path}"
                )


@pytest.mark.faults
def test_f09_batch_with_a_nonfinite_loss_or_gradient(bench):
    """Batches count from 0, so batch 7 belongs to step 8, which must not be applied."""
    with experiment("F09", "NaN loss, infinite gradient") as row:
        for name, args in (
            ("nan", ("--nan-at", 7)),
            ("infinite gradient", ("--infinite-at", 7)),
        ):
            with row.ours.trial(f"{name}, stop"):
                out = bench.folder / f"stop {name}".replace(" ", "-")
                ended = bench.train(out.name, *SAVED_AT_7, *args)
                check_refused(
                    ended,
                    5,
                    "step 8",
                    "look at the batch",
                    "newest checkpoint is step 7",
                )
                assert steps_of(out)[-1:] == [7], steps_of(out)
                all_finite(out)
                check_clean(out)
            with row.ours.trial(f"{name}, skip"):
                out = bench.folder / f"skip {name}".replace(" ", "-")
                check_done(
                    bench.train(out.name, *SAVED_AT_7, *args, "--on-nonfinite", "skip")
                )
                assert [r["step"] for r in read_log(out) if r.get("skipped")] == [8]
                all_finite(out)
                # Skip the batch by hand: set the step of checkpoint 7 to 8.
                hand = bench.folder / f"hand {name}".replace(" ", "-")
                (hand / "checkpoints").mkdir(parents=True)
                shutil.copytree(out / "checkpoints" / "7", hand / "checkpoints" / "8")
                rewrite(
                    hand / "checkpoints" / "8",
                    lambda path, array: (
                        np.full_like(array, 8) if path == "/step" else array
                    ),
                    step=8,
                )
                check_done(
                    bench.train(hand.name, *SAVED_AT_7, *args, "--on-nonfinite", "skip")
                )
                ours, by_hand = (
                    {k: v for k, v in losses(o).items() if k[0] > 8}
                    for o in (out, hand)
                )
                assert by_hand
                if ours != by_hand or leaves(out, 20) != leaves(hand, 20):
                    raise Silent("differs from the run that skips the batch by hand")
        with row.plain.trial("nan"):
            ended = bench.plain("plain", *PLAIN_SHORT, "--nan-at", "7")
            if ended.code == 0:
                all_finite(bench.folder / "plain")


@pytest.mark.faults
def test_f10_learning_rate_far_too_large(bench):
    with experiment("F10", "learning rate 1e12; a slow divergence") as row:
        with row.ours.trial("1e12"):
            ended = bench.train("huge", *SHORT, "--lr", "1e12")
            check_refused(ended, 5, "learning rate")
            all_finite(bench.folder / "huge")
            last = max(r["step"] for r in read_log(bench.folder / "huge"))
            row.note = f"1e12: stopped after step {last}"
        with row.ours.trial("consecutive spikes"):
            # Each processor has its spikes at other steps. With any learning rate from 10 to 1,000
            # there are two consecutive ones.
            args = (
                "--optimizer",
                "sgd",
                "--lr",
                "10",
                "--spikes",
                "2",
                "--max-skips",
                "1",
            )
            ended = bench.train(
                "slow",
                "--steps",
                "60",
                "--save-every",
                "4",
                "--eval-every",
                "30",
                *args,
            )
            check_refused(ended, 5, "learning rate", "checkpoint")
            all_finite(bench.folder / "slow")
        with row.plain.trial("1e12"):
            ended = bench.plain("plain", *PLAIN_SHORT, "--lr", "1e12")
            if ended.code == 0:
                all_finite(bench.folder / "plain")

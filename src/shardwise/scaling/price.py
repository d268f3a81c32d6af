"""What a large run costs, from its plan."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.reader import read_json
from shardwise.sweep.runs import CHILD, describe_exit
from shardwise.text import Json, show_number, show_seconds


@dataclass(frozen=True)
class Price:
    """What a run costs, from its plan.

    Attributes:
        steps: the number of steps.
        seconds: the estimated time of all of them.
        target: the devices.
        num_params: the number of model parameters.
    """

    steps: int
    seconds: float
    target: str
    num_params: int

    def __str__(self) -> str:
        """Return the price for people."""
        duration = show_seconds(self.seconds)
        params = show_number(self.num_params)
        return (
            f"{self.steps:,} steps in {duration} on {self.target}, {params} parameters"
        )


def find_price(target: str, words: Sequence[str], steps: int) -> Price | str:
    """Return the price of a run, or why there is none.

    It is planned in a process of its own, which may use the accelerator.

    Args:
        target: the recipe.
        words: its arguments, and options of `shardwise plan`.
        steps: the number of steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        command = ["plan", target, *words, "--json", str(file)]
        done = subprocess.run(
            [sys.executable, "-P", "-c", CHILD, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if not file.exists():
            return f"the plan failed with {describe_exit(done.returncode)}."
        plan: Json = read_json(file)["plan"]
    if not plan["fits"]:
        return f"the run does not fit on {plan['target']}."
    if not plan["times"]:
        return "the speed of the devices is unknown. Use --on TARGET."
    return Price(
        steps=steps,
        seconds=float(plan["times"]["total"]) * steps,
        target=str(plan["target"]),
        num_params=int(plan["num_params"]),
    )

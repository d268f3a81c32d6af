"""Plan GPTs of 124 million to 6.7 billion parameters with FSDP on devices that are not attached.

    python benchmarks/fsdp_plans.py                       every row, about 25 minutes on 2 cores
    python benchmarks/fsdp_plans.py --models 124M --chips v5e h200
    python benchmarks/fsdp_plans.py --before /path/to/checkout

With `--before`, each row is also planned by another checkout, and the table shows both. Memory and
collectives are read from compiled programs. Times are estimates. This needs the compilers for TPUs
and GPUs, `pip install 'shardwise[tpu-plan,gpu-plan]'`, but neither a TPU nor a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Model:
    """A model and its batch.

    Attributes:
        preset: the preset of recipes/gpt2.py.
        remat: what the backward pass recomputes.
        length: tokens per sequence.
        sequences: sequences per chip.
    """

    preset: str
    remat: str
    length: int
    sequences: int


MODELS = {
    "124M": Model("gpt2", "none", 1024, 8),
    "355M": Model("gpt2-medium", "none", 1024, 4),
    "774M": Model("gpt2-large", "dots", 1024, 4),
    "1.5B": Model("gpt2-xl", "block", 1024, 4),
    "6.7B": Model("gpt-7b", "block", 2048, 1),
}
# Topologies by chip: a small and a large one.
SMALL = {"v5e": "2x4", "v5p": "2x2x2", "v6e": "2x4", "h200": "8"}
LARGE = {"v5e": "8x8", "v5p": "4x4x4", "v6e": "8x8", "h200": "64"}
LARGE_MODELS = ("6.7B",)


def plan(checkout: Path, name: str, chip: str, has_replicas: bool) -> dict:
    """Return the plan of a row, made by a checkout in a process of its own."""
    model = MODELS[name]
    topology = (LARGE if name in LARGE_MODELS else SMALL)[chip]
    count = 1
    for side in topology.split("x"):
        count *= int(side)
    mesh = f"data=2,fsdp={count // 2}" if has_replicas else f"fsdp={count}"
    arguments = {
        "preset": model.preset,
        "mesh": mesh,
        "batch-size": str(count * model.sequences),
        "length": str(model.length),
        "remat": model.remat,
        "on": f"{chip}:{topology}",
    }
    words = [word for key, value in arguments.items() for word in (f"--{key}", value)]
    paths = [str(checkout / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "shardwise.cli", "plan", "recipes/gpt2.py"]
        subprocess.run(
            [*command, *words, "--no-cache", "--json", str(answer)],
            stdout=subprocess.DEVNULL,
            cwd=checkout,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": os.pathsep.join(paths),
            },
            check=False,
        )
        found: dict = json.loads(answer.read_text())["plan"]
    return found


def moved(found: dict, *kinds: str) -> float:
    """Return the bytes of collectives of these kinds."""
    return sum(each["bytes"] for each in found["traffic"] if each["kind"] in kinds)


def cells(found: dict) -> list[str]:
    """Return the figures of a plan."""
    bytes_moved = (
        moved(found, "all-gather"),
        moved(found, "reduce-scatter"),
        moved(found, "all-reduce"),
    )
    return [
        " / ".join(f"{amount / 2**20:,.0f}" for amount in bytes_moved),
        f"{found['peak'] / 2**30:.1f}" + ("" if found["fits"] else " (!)"),
        f"{1e3 * found['seconds']:,.1f}",
        f"{100 * found['mfu']:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--chips", nargs="+", choices=SMALL, default=list(SMALL))
    parser.add_argument("--before", type=Path, help="another checkout of shardwise")
    parser.add_argument("--replicas", action="store_true", help="with 'data=2' too")
    parser.add_argument("--json", type=Path, help="add each plan to this file")
    options = parser.parse_args()
    checkouts = [*([options.before.resolve()] if options.before else []), HERE]
    columns = "MiB gathered / scattered / all-reduced", "GiB", "ms", "MFU %"
    print(f"| model | target | mesh | {' | '.join(columns)} |")
    print(f"| --- {'| --- ' * 3}{'| --: ' * 3}|")
    for name in options.models:
        for chip in options.chips:
            for has_replicas in (False, True)[: 1 + options.replicas]:
                found = [plan(each, name, chip, has_replicas) for each in checkouts]
                rows = zip(*map(cells, found), strict=True)
                mesh = ",".join(f"{k}={v}" for k, v in found[-1]["mesh"].items())
                row = " | ".join(" → ".join(dict.fromkeys(row)) for row in rows)
                print(
                    f"| {name} | {found[-1]['target']} | {mesh} | {row} |", flush=True
                )
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps([name, found]) + "\n")


if __name__ == "__main__":
    main()

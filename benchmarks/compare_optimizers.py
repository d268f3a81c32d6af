"""Train the default recipe with each optimizer for equal steps; write a table and a picture.

    python benchmarks/compare_optimizers.py    # make compare-optimizers; 15 minutes on 2 cores

Each optimizer has the learning rate and the schedule of `recipes/stdlib_gpt.py`. Results of
finished runs are kept in `build/compare`, so an interrupted comparison resumes with the next
optimizer.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import jax

from shardwise import fit
from shardwise.console import line_picture
from shardwise.metrics import read_metrics
from shardwise.text import smoothed

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "recipes"))
import stdlib_gpt  # noqa: E402

COLUMNS = (
    "optimizer",
    "peak learning rate",
    "training loss, last 50 steps",
    "validation loss",
    "values per parameter in the state",
    "ms per step",
)
PAGE = """# Optimizers compared

Each optimizer trains `recipes/stdlib_gpt.py` for {steps:,} steps of 2,048 bytes. The model is a
byte-level GPT with {params:,} parameters. Data and initial weights are the same for all. The
learning rates are those of the recipe, from a coarse search with runs of 250 steps. A finer search
could swap optimizers with similar losses. `make compare-optimizers` generates this page
(jax {jax}, {device}).

| {columns} |
| --- | ---: | ---: | ---: | ---: | ---: |
{rows}

![Training loss by step for each optimizer](optimizer_comparison.png)
"""


def run_one(name: str, steps: int, folder: Path) -> dict:
    answer = folder / f"{name}-{steps}.json"
    if answer.exists():
        return json.loads(answer.read_text())
    out = folder / f"{name}-{steps}"
    run = stdlib_gpt.recipe(
        steps=steps, optimizer=name, out=out, eval_every=0, save_every=0
    )
    result = fit(replace(run, sample=None))
    records = [
        record for record in read_metrics(out / "metrics.jsonl") if "loss" in record
    ]
    state = sum(leaf.size for leaf in jax.tree.leaves(result.state.opt_state))
    found = {
        "losses": [record["loss"] for record in records],
        "held_out": result.eval_metrics["loss"],
        "state": state / result.spec.num_params,
        "params": result.spec.num_params,
        "step_ms": 1e3
        * sorted(record["step_s"] for record in records)[len(records) // 2],
    }
    answer.write_text(json.dumps(found))
    return found


def draw(found: dict[str, dict], picture: Path) -> None:
    with line_picture(
        picture,
        xlabel="step",
        ylabel="training loss, nats per byte, smoothed",
        ylim=(1.2, 4.0),
    ) as axes:
        for name, each in sorted(found.items(), key=lambda item: item[1]["held_out"]):
            axes.plot(
                smoothed(each["losses"], 0.05),
                linewidth=1.8,
                label=f"{name}, validation {each['held_out']:.3f}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(stdlib_gpt.LEARNING_RATES),
        default=list(stdlib_gpt.LEARNING_RATES),
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    folder = ROOT / "build" / "compare"
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for i, name in enumerate(options.only):
        print(f"{name} ({i + 1} of {len(options.only)})", flush=True)
        found[name] = run_one(name, options.steps, folder)
    rows = [
        f"| {name} | {stdlib_gpt.LEARNING_RATES[name]:g} | {sum(each['losses'][-50:]) / 50:.3f} "
        f"| {each['held_out']:.3f} | {each['state']:.2f} | {each['step_ms']:.0f} |"
        for name, each in sorted(found.items(), key=lambda item: item[1]["held_out"])
    ]
    device, params = jax.devices()[0].device_kind, next(iter(found.values()))["params"]
    page = PAGE.format(
        steps=options.steps,
        params=params,
        jax=jax.__version__,
        device=device,
        columns=" | ".join(COLUMNS),
        rows="\n".join(rows),
    )
    (options.docs / "optimizer_comparison.md").write_text(page)
    draw(found, options.docs / "optimizer_comparison.png")
    print("\n".join(rows))


if __name__ == "__main__":
    main()

"""Measure the bytes per parameter of a training step without activations, as the compiler reports
them.

    python -m benchmarks.memory --presets gpt2 gpt2-xl

AdamW with float32 weights needs 16 bytes: 4 for the weight, 8 for the two moments and 4 for the
gradient. The batch is one sequence of 64 tokens, so that activations are negligible.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import jax

from benchmarks.gpt2 import make_run
from shardwise.models.gpt import PRESETS
from shardwise.run import prepare


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--presets", nargs="+", default=["gpt2", "gpt2-xl"], choices=sorted(PRESETS)
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    answer = {}
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for preset in options.presets:
        for dtype in ("float32", "bfloat16"):
            config = replace(
                PRESETS[preset], max_length=64, scan_layers=True, remat="block"
            )
            run = replace(
                make_run(config, 1, 64),
                compute_dtype=None if dtype == "float32" else dtype,
            )
            prepared = prepare(run)
            found = prepared.step.lower().compile().memory_analysis()
            count = sum(x.size for x in jax.tree.leaves(prepared.spec.abstract.params))
            row = {
                "parameters": count,
                "state": found.argument_size_in_bytes / count,
                "temporary": found.temp_size_in_bytes / count,
            }
            row["total"] = (
                row["state"]
                + row["temporary"]
                + (found.output_size_in_bytes - found.alias_size_in_bytes) / count
            )
            answer[f"{preset} {dtype}"] = row
            print(
                f"{preset:10s} {dtype:8s} {row['state']:6.2f} of state + {row['temporary']:6.2f} "
                f"of temporaries = {row['total']:6.2f} bytes per parameter",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

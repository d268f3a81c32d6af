"""Compare plans with published training results, as configurations of recipes/llama.py.

    python benchmarks/published.py                        # print the table
    python benchmarks/published.py llama3.1-8b-v6e-8 ...  # plan these and compare both figures
    python benchmarks/published.py --chosen               # plan those that docs/plan.md shows

This needs libtpu, but no TPU. Compare seconds per step: published MFU is counted in different ways,
see `counting`. "full" counts all T x T scores of attention and "causal" half of them. Both exclude
recomputation and the lookup in the embedding. "nominal" multiplies a nominal number of parameters.

All results were measured with AdamW, with the optimizer state in the dtype of the parameters,
gradients clipped to norm 1, and data that cost nothing (synthetic, or prefetched).
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

RECIPE = Path(__file__).parents[1] / "recipes" / "llama.py"
# bfloat16 operations per second and chip.
PEAK = {
    "v5e": 197e12,
    "v5p": 459e12,
    "v6e": 918e12,
    "h100": 989e12,
}


@dataclass(frozen=True)
class Published:
    """A published result.

    Attributes:
        name: the name of the configuration.
        topology: "v6e:16x16"; several slices are "4*v5e:16x16".
        mesh: the mesh.
        rows: sequences per chip.
        arguments: other arguments of the recipe.
        seconds: measured seconds per step.
        mfu: the published MFU.
        counting: how the MFU was counted.
        source: where the result was published.
        assumed: facts that the source does not state, and differences between the two models.
    """

    name: str
    topology: str
    mesh: str
    rows: int
    arguments: Mapping[str, Any]
    seconds: float
    mfu: float | None
    counting: Literal["full", "causal", "nominal"]
    source: str
    assumed: str = ""

    @property
    def chip(self) -> str:
        """Return the name of the chip."""
        return self.topology.rpartition("*")[2].partition(":")[0]

    @property
    def chips(self) -> int:
        """Return the number of chips."""
        slices, _, one = self.topology.rpartition("*")
        return int(slices or 1) * math.prod(map(int, one.partition(":")[2].split("x")))

    @property
    def tokens_per_second(self) -> float:
        """Return the measured tokens per second and chip."""
        return self.rows * self.arguments["length"] / self.seconds

    def recipe_arguments(self) -> dict[str, Any]:
        """Return the arguments of the recipe."""
        return {
            "mesh": self.mesh,
            "batch_size": self.rows * self.chips,
            **self.arguments,
        }


MAXTEXT = "AI-Hypercomputer/maxtext"
TPU_RECIPES = "AI-Hypercomputer/tpu-recipes c8cfe2f, training/trillium"
SAME_AS_LOG = (
    "Their embedding is a matmul with one-hot vectors, ours is a lookup. Their kernel blocks are "
    "2048, with one backward kernel; ours are 512, with two."
)


def trillium_8b(
    chips: int, shape: str, rows: int, seconds: float, tflops: float
) -> Published:
    """Return a result of Llama 3.1 8B on v6e."""
    return Published(
        f"llama3.1-8b-v6e-{chips}",
        f"v6e:{shape}",
        f"fsdp={chips}",
        rows,
        {
            "size": "8b",
            "length": 8192,
            "remat": "block",
            "offload": ("input", "qkv", "out"),
        },
        seconds,
        tflops / 918,
        "full",
        f"{TPU_RECIPES}/Llama3.1-8B-MaxText/v6e-{chips}/README.md (MaxText tag tpu-recipes-v0.1.4)",
        SAME_AS_LOG,
    )


def trillium_70b(
    chips: int,
    shape: str,
    rows: int,
    seconds: float,
    tflops: float,
    dtype: str = "float32",
) -> Published:
    """Return a result of Llama 3.1 70B on v6e."""
    return Published(
        f"llama3.1-70b-v6e-{chips}",
        f"v6e:{shape}",
        f"fsdp={chips}",
        rows,
        {
            "size": "70b",
            "length": 8192,
            "remat": "block",
            "offload": ("input", "qkv"),
            "param_dtype": dtype,
        },
        seconds,
        tflops / 918,
        "full",
        f"{TPU_RECIPES}/Llama3.1-70B-MaxText/v6e-{chips}/README.md (MaxText tag "
        "tpu-recipes-v0.1.4)",
        SAME_AS_LOG,
    )


PUBLISHED = [
    trillium_8b(8, "2x4", 3, 3.443, 413.433),
    trillium_8b(16, "4x4", 3, 3.393, 419.485),
    trillium_8b(32, "4x8", 3, 3.495, 407.225),
    trillium_8b(64, "8x8", 5, 5.652, 419.701),
    trillium_8b(128, "8x16", 4, 4.602, 412.319),
    trillium_8b(256, "16x16", 4, 4.546, 417.397),
    trillium_70b(32, "4x8", 2, 17.790, 443.385, "bfloat16"),
    trillium_70b(64, "8x8", 2, 18.688, 422.091),
    trillium_70b(128, "8x16", 4, 34.786, 453.500),
    trillium_70b(256, "16x16", 5, 42.656, 462.297),
    Published(
        "llama2-70b-v6e-256",
        "v6e:16x16",
        "fsdp=256",
        2,
        {"size": "70b-llama2", "length": 4096, "remat": "block", "offload": ("qkv",)},
        9.052,
        402.274 / 918,
        "full",
        f"{TPU_RECIPES}/Llama2-70B-MaxText/README.md (MaxText tag tpu-recipes-v0.1.2)",
        "The README lists 3 sequences per chip; its log (905.0 tokens/s in 9.052 s, 2,097,152 "
        "weights) shows 2. Theirs shards parameters along the dimensions that FSDP usually "
        "replicates (fsdp_transpose); ours along the usual ones.",
    ),
    Published(
        "llama3.1-405b-2xv6e-256",
        "2*v6e:16x16",
        "fsdp=512",
        1,
        {"size": "405b", "length": 8192, "remat": "block", "offload": ("input",)},
        54.803,
        392.454 / 918,
        "full",
        f"{TPU_RECIPES}/Llama3.1-405B-MaxText/README.md (MaxText tag tpu-recipes-v0.1.2)",
        "FSDP spans both slices. Another run of the same model (maxtext "
        "docs/reference/models/tiering.md: 38.55 %, 123 tokens/s) has tensor=4 within a slice, "
        "and its two figures contradict each other.",
    ),
    Published(
        "llama2-70b-v5p-512",
        "v5p:8x8x8",
        "fsdp=512",
        4,
        {
            "size": "70b-llama2",
            "length": 4096,
            "remat": "block",
            "keep": ("qkv", "out", "down"),
        },
        4 * 4096 / 692,
        0.654,
        "causal",
        f"{MAXTEXT} docs/reference/models/tiering.md, benchmarks/maxtext_v5p_model_configs.py at "
        "92e59fd (llama2_70b_v5p_128)",
        "The 512 chips are assumed to be one 8x8x8. Sequences per chip are from the configuration"
        " of that commit. There is no log: 692 tokens/s are 64.6 % with causal attention and 67.0"
        " % with full attention, so 65.4 % is neither.",
    ),
    Published(
        "llama3.1-405b-v5p-512",
        "v5p:8x8x8",
        "fsdp=512",
        2,
        {
            "size": "405b",
            "length": 8192,
            "remat": "block",
            "offload": ("input", "attention"),
            "loss_chunks": 4,
        },
        131.474,
        314.530 / 459,
        "causal",
        "AI-Hypercomputer/tpu-recipes c8cfe2f, training/v5p/Llama3.1-405B-MaxText/README.md "
        "(maxtext 3eb77db, llama3_1_405b_8192_v5p_1024)",
        "v5p-1024 is 512 chips, assumed to be one 8x8x8. Theirs keeps the inputs of the blocks on"
        " the device (63 GiB). Our gradients are replicated and float32 before they are sharded, "
        "so this would need 100 GiB of 95.7, and ours offloads them. The loss is in 4 chunks, "
        "like theirs.",
    ),
    Published(
        "fuji-7b-4xv5e-256",
        "4*v5e:16x16",
        "data=4,fsdp=256",
        1,
        {"size": "7b", "vocab": 32768, "tied": True, "length": 4096, "remat": "dots"},
        2.21,
        0.46,
        "nominal",
        "apple/axlearn axlearn/experiments/text/gpt/fuji.py, comment of f2326c5 (v2 on "
        "tpu-v5litepod-256x4, 14 GB of HBM per chip)",
        "Flash attention is assumed (both variants exist). The source does not say how MFU was "
        "counted: 46 % matches 6 x 7e9 and full attention; with the actual parameters it is 43.4 "
        "%.",
    ),
    Published(
        "fuji-70b-4xv5e-256",
        "4*v5e:16x16",
        "data=4,fsdp=256",
        1,
        {
            "size": "70b-llama2",
            "vocab": 32768,
            "mlp_width": 22016,
            "tied": True,
            "length": 4096,
            "remat": "block",
            "offload": ("qkv", "out"),
        },
        14.3736,
        0.5987,
        "nominal",
        "apple/axlearn axlearn/experiments/text/gpt/fuji.py, comment of a7c64ee (tpu-v5e-1024)",
        "At that commit the MLP width was 22016 (8/3 of the width) and the output was tied: "
        "55.7e9 parameters. 59.87 % is 6 x 68.98e9; for the model that ran it is 52.9 % with full"
        " attention. Theirs also offloads the output of attention; libtpu 0.0.51 cannot.",
    ),
    Published(
        "llama3.1-8b-h100-8",
        "h100:8",
        "fsdp=8",
        2,
        {
            "size": "8b",
            "length": 8192,
            "remat": "block",
            "keep": ("qkv", "attention", "out"),
        },
        2 * 8192 / 6667,
        None,
        "full",
        "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md, table 1, FSDP + "
        "torch.compile, 77.0 GiB",
        "H100 with 96 GB HBM2e (2.4 TB/s) at 500 W. Its checkpointing keeps the output of "
        "attention and every second matmul; ours keeps q, k, v, attention and its projection. "
        "5,762 tokens/s without torch.compile.",
    ),
]


CHOSEN = [
    "llama3.1-8b-v6e-8",
    "fuji-7b-4xv5e-256",
    "llama2-70b-v5p-512",
    "fuji-70b-4xv5e-256",
]


def estimate(config: Published) -> Any:
    """Return the plan of a configuration for its topology."""
    from shardwise.plan.compile import plan_run
    from shardwise.plan.target import find_target
    from shardwise.recipe import load_recipe, make_run

    if config.chip == "h100":
        raise SystemExit(
            f"{config.name}: a step for GPUs can be compiled only on a machine with a GPU."
        )
    run = make_run(load_recipe(RECIPE, "recipe"), config.recipe_arguments())
    return plan_run(run, find_target(config.topology))


def main(args: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", choices=[[], *(config.name for config in PUBLISHED)]
    )
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    names = CHOSEN if options.chosen else options.names
    if not names:
        for config in PUBLISHED:
            mfu = (
                f"{config.mfu:.1%} {config.counting}" if config.mfu else "not published"
            )
            speed = f"{config.seconds:8.3f} s  {config.tokens_per_second:7,.0f} tokens/s/chip"
            print(f"{config.name:26}{config.topology:14}{config.mesh:18}{speed}  {mfu}")
        return
    print(
        f"{'':26}{'published':>10} {'planned':>10} {'ratio':>7}   {'MFU':>6} {'planned':>8}   "
        f"{'memory':>9}  {'planned in':>10}"
    )
    rows = []
    for config in (config for config in PUBLISHED if config.name in names):
        plan = estimate(config)
        # Both MFU count full attention and no recomputation.
        measured = plan.model_flops / config.seconds / plan.peak_flops
        rows.append(
            {
                "name": config.name,
                "published_s": config.seconds,
                "published_mfu": measured,
                "times": asdict(plan.times),
            }
        )
        rows[-1] |= {
            "planned_s": plan.times.total,
            "planned_mfu": plan.mfu,
            "peak": plan.memory.peak,
            "plan_s": plan.compile_seconds,
        }
        rows[-1]["traffic"] = [asdict(t) for t in plan.traffic]
        memory = f"{plan.memory.peak / 2**30:5.1f} GiB{' ' if plan.fits else '!'}"
        print(
            f"{config.name:26}{config.seconds:8.2f} s {plan.times.total:8.2f} s "
            f"{plan.times.total / config.seconds:7.2f}   "
            f"{measured:6.1%} {plan.mfu:8.1%}   {memory} {plan.compile_seconds:8.0f} s",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

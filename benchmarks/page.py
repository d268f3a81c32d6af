"""Generate docs/performance.md and its pictures from the records: `python -m benchmarks.page`.

No figure on the page is written by hand.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.record import RECORDS

DOCS = RECORDS.parents[1] / "docs"


def load(name: str) -> dict[str, Any]:
    """Return the record `name`, or an empty one."""
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def table(columns: list[str], rows: list[list[str]], align: str = "--:") -> str:
    """Return a Markdown table. `align` is the alignment of all columns except the first."""
    lines = [columns, ["---", *[align] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def measured(entry: dict[str, Any]) -> str:
    """Return the hardware, versions and source of an entry, as small print."""
    versions = entry["versions"]
    names = [
        f"{name} {versions[name]}"
        for name in ("jax", "flax", "torch", "transformers")
        if name in versions
    ]
    software = f"Python {versions['python']}, {', '.join(names)}"
    return f"<sub>{entry['hardware']}; {software}; source {entry['source']}, {entry['date']}</sub>"


def gpt2(entry: dict[str, Any]) -> str:
    """Return the comparison of GPT-2 124M with PyTorch."""
    rows = []
    best = entry[entry["best"]]["step_ms"]
    for name, title in (
        ("shardwise", "shardwise"),
        ("float8", "shardwise, matmuls of 8 bits"),
        ("muon", "shardwise, Muon"),
        ("muon16", "shardwise, Muon with iterations in bfloat16"),
        ("compact", "PyTorch, compact model"),
        ("torchao", "PyTorch, compact model, matmuls of 8 bits by torchao"),
        ("transformers", "PyTorch, `transformers`"),
    ):
        if name not in entry:
            continue
        one = entry[name]
        mfu = f"{one['mfu']:.1%}" if one.get("mfu") else ""
        ratio = f"{best / one['step_ms']:.3f}"
        rows.append(
            [
                title,
                f"{one['step_ms']:.1f} ms",
                f"{one['tokens_per_s']:,.0f}",
                ratio,
                mfu,
                f"{one['peak_gib']:.1f} GiB",
                f"{one['compile_s']:.0f} s",
            ]
        )
    ours, other = entry["shardwise"]["losses"], entry[entry["best"]]["losses"]
    hub = entry["transformers" if entry["best"] == "compact" else "compact"]["losses"]

    def difference(a: list[float], b: list[float]) -> str:
        found = [abs(x - y) / y for x, y in zip(a, b, strict=True)]
        return (
            f"{sum(found) / len(found):.2%} on average (at most {max(found):.2%}; "
            f"at most {max(found[:50]):.2%} in the first 50 steps)"
        )

    head = table(
        [
            "GPT-2 124M, 64 x 1024 tokens per step",
            "step time",
            "tokens/s",
            "relative to the faster PyTorch model",
            "MFU",
            "memory",
            "compilation",
        ],
        rows,
    )
    return f"""{head}

All train with AdamW, unless the row says Muon, and gradient clipping. They compute in bfloat16 with
float32 weights, and use flash attention without dropout. PyTorch uses `torch.compile` and its fused
AdamW. All start from the same weights and read the same text. [Matmuls of 8 bits](float8.md) change
the losses a little.{note(entry)}{attention(entry)}

Over {len(ours)} steps, the losses of shardwise and the faster PyTorch model differ by
{difference(ours, other)}.
The losses of the two PyTorch models differ by
{difference(hub, other)}.

The loss of the recipe is `Mean(linear_cross_entropy(*model.features(inputs), labels))`, from
`shardwise.models.loss`. It works with any model: its arguments are the inputs of the output layer,
(N, D), and the weights of that layer, (V, D).{power(entry)}

![Training losses of shardwise and PyTorch](performance.png)

{measured(entry)}
"""


def note(entry: dict[str, Any]) -> str:
    """Return what was written into the record about changes since it was measured."""
    text = entry.get("float8", {}).get("note")
    return f" {text}" if text else ""


def attention(entry: dict[str, Any]) -> str:
    """Return a sentence on PyTorch's attention, if it was recorded."""
    found = entry["compact"]
    if not found.get("attention"):
        return ""
    # Without the tile sizes.
    kernels = [name.partition("_wgmma")[0] for name in found["attention"]]
    names = " and ".join(f"`{name}`" for name in kernels)
    version = found["cudnn"]
    major, rest = divmod(version, 10_000)
    minor, patch = divmod(rest, 100)
    return f"\n\nPyTorch's attention runs on cuDNN {major}.{minor}.{patch}: {names}."


def power(entry: dict[str, Any]) -> str:
    """Return a paragraph on the power and clock of the GPU, if they were recorded."""
    ours = entry["shardwise"]
    if "power_w" not in ours:
        return ""
    others = " and ".join(
        f"{entry[name]['power_w']:.0f} W at {entry[name]['clock_mhz']:.0f} MHz"
        for name in ("compact", "transformers")
    )
    return f"""

The GPU draws {ours["power_w"]:.0f} W at {ours["clock_mhz"]:.0f} MHz with shardwise,
and {others} with the PyTorch models (medians reported by nvidia-smi). At the
power limit, only less work makes a step faster. Less waiting does not."""


def picture(entry: dict[str, Any], path: Path) -> None:
    """Draw the losses of the comparison with PyTorch."""
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for name, label, style in (
        ("shardwise", "shardwise", "-"),
        ("compact", "PyTorch, compact", "--"),
        ("transformers", "PyTorch, transformers", ":"),
    ):
        axes.plot(
            range(1, len(entry[name]["losses"]) + 1),
            entry[name]["losses"],
            style,
            label=label,
            linewidth=1.3,
        )
    axes.set(xlabel="step", ylabel="loss, nats per byte", ylim=(0, None))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def growth(entry: dict[str, Any]) -> str:
    """Return how time and memory grow with the model and the mesh."""
    parts = []
    for name, cases in entry["sizes"].items():
        rows = [
            [
                f"{size}",
                *(f"{row[key]:.2f} s" for key in ("prepare", "lower", "compile")),
                f"{row['step'] * 1e3:.1f} ms",
                f"{row['flops'] / row['step'] / 1e9:.1f} GFLOP/s",
                f"{row['bytes'] / 2**20:.1f} MiB",
            ]
            for size, row in cases
        ]
        parts.append(
            table(
                [
                    name,
                    "before XLA",
                    "lowering",
                    "compilation",
                    "step time",
                    "FLOP rate",
                    "memory per device",
                ],
                rows,
            )
        )
    rows = [
        [
            f"{row['layers']} layers{', scanned' if row['scan'] else ''}, {row['chips']} chips",
            f"{row['compile']:.1f} s",
            f"{row['peak'] / 2**30:.2f} GiB",
            f"{row['step'] * 1e3:.1f} ms" if row["step"] else "",
        ]
        for row in entry["tpu"]
    ]
    parts.append(
        table(
            [
                "GPT-2 compiled for TPU v5e, 4 sequences per chip",
                "tracing and compilation",
                "memory per chip",
                "planned step time",
            ],
            rows,
        )
    )
    text = (
        "Left: time before the first step, by number of layers. Middle: step time by FLOPs, "
        "both relative to the\nsmallest case of each table. Below the grey line, time grows more "
        "slowly than the work. Right: memory per device,\nrelative to the smallest case in the "
        "same way."
    )
    image = "![Compilation time, step time and memory by model size](growth.png)"
    return f"{image}\n\n{text}\n\n" + "\n\n".join(parts) + f"\n\n{measured(entry)}\n"


def growth_picture(entry: dict[str, Any], path: Path) -> None:
    """Draw how time and memory grow with the model and the mesh."""
    figure, (before, steps, memory) = plt.subplots(
        1, 3, figsize=(10, 4), layout="constrained"
    )
    for (name, cases), style in zip(
        entry["sizes"].items(), ("-o", "--s", "-.^", ":v", "-D", "--x"), strict=False
    ):
        sizes, rows = zip(*cases, strict=True)
        if name.startswith("layers"):
            before.plot(
                sizes,
                [row["prepare"] + row["lower"] + row["compile"] for row in rows],
                style,
                markersize=4,
                label=f"{name}, CPU",
            )
        work, time = (
            [row[key] / rows[0][key] for row in rows] for key in ("flops", "step")
        )
        steps.plot(work, time, style, markersize=4, label=name)
        memory.plot(
            [size / sizes[0] for size in sizes],
            [row["bytes"] / rows[0]["bytes"] for row in rows],
            style,
            markersize=4,
            label=name,
        )
    for scan, style, label in (
        (False, "-*", "layers, unrolled, TPU"),
        (True, "--*", "layers, scanned, TPU"),
    ):
        found = sorted(
            {
                (row["layers"], row["compile"])
                for row in entry["tpu"]
                if row["scan"] is scan and row["chips"] == 8
            }
        )
        before.plot(*zip(*found, strict=True), style, markersize=5, label=label)
    ends = [1, max(line.get_xdata()[-1] for line in steps.lines)]
    steps.plot(ends, ends, color="lightgrey", linewidth=4, zorder=0)
    before.set(xlabel="layers", ylabel="seconds", title="tracing and compilation")
    steps.set(xlabel="relative FLOPs", ylabel="relative time", title="step time")
    memory.set(
        xlabel="relative size", ylabel="relative memory", title="memory per device"
    )
    for axes, across, up in (
        (before, (2, 4, 8, 16, 32), (5, 10, 20, 50)),
        *((axes, (1, 2, 5, 10, 20), (1, 2, 5, 10, 20)) for axes in (steps, memory)),
    ):
        axes.set(xscale="log", yscale="log")
        axes.minorticks_off()
        axes.set_xticks(across, map(str, across))
        axes.set_yticks(up, map(str, up))
    for axes in (before, steps):
        # Below the picture, where no line is.
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2}
        axes.legend(frameon=False, fontsize=7, **place)
    for axes in (before, steps, memory):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def torch(entry: dict[str, Any]) -> str:
    """Return the comparison with PyTorch on a CPU."""
    names = {
        "shardwise": "shardwise",
        "eager": "PyTorch, eager",
        "compile": "PyTorch, `torch.compile`",
    }
    rows = []
    for row in entry["rows"]:
        times = "" if row["side"] == "shardwise" else f"{row['shardwise_over_it']:.2f}"
        rows.append(
            [row["model"], names[row["side"]], f"{row['step_ms']:.1f} ms", times]
        )
    head = [
        "GPT, width 128, 16 x 128 bytes per step",
        "library",
        "step time",
        "shardwise, relative to this",
    ]
    note = (
        "All libraries run in every round, in turn. Times are medians over the rounds. Ratios are "
        "medians of the\nratios within one round. They depend on the processor, because PyTorch "
        "and XLA use different libraries for matmuls."
    )
    return f"{table(head, rows)}\n\n{note}\n\n{measured(entry)}\n"


def start(entry: dict[str, Any]) -> str:
    """Return the time to the end of the first step, without and with a compilation cache."""
    names = list(entry["first"]["seconds"])
    rows = []
    for which in ("first", "second"):
        seconds = [
            entry[which]["total"],
            *(entry[which]["seconds"].get(name, 0.0) for name in names),
        ]
        rows.append([f"{which} start", *(f"{s:.1f} s" for s in seconds)])
    note = f"The second start takes {entry['ratio']:.2f} times as long as the first"
    if len(ratios := entry.get("ratios", ())) > 1:
        note += (
            f". This is the median of {len(ratios)} pairs of starts, which range from "
            f"{min(ratios):.2f} to {max(ratios):.2f}"
        )
    head = table(["until the end of the first step", "total", *names], rows)
    return f"{head}\n\n{note}.\n\n{measured(entry)}\n"


def xl(entry: dict[str, Any]) -> str:
    """Return the plan and the measurement of GPT-2 1.5B."""
    head = [
        "GPT-2 1.5B",
        "sequences of 1024 tokens, from `plan --largest-batch`",
        "step time",
        "tokens/s",
        "MFU",
        "memory",
    ]
    rows = [
        [
            "planned",
            f"{entry['rows']}",
            f"{entry['planned_ms']:.0f} ms",
            "",
            "",
            f"{entry['planned_gib']:.1f} GiB",
        ],
        [
            "measured",
            f"{entry['rows']}",
            f"{entry['step_ms']:.0f} ms",
            f"{entry['tokens_per_s']:,.0f}",
            f"{entry['mfu']:.1%}",
            f"{entry['peak_gib']:.1f} GiB",
        ],
    ]
    return f"{table(head, rows)}\n\n{measured(entry)}\n"


def long(entry: dict[str, Any]) -> str:
    """Return the comparison with PyTorch for long sequences."""
    ours, theirs = entry["shardwise"], entry["compact"]
    row = [
        "GPT-2 124M, 65,536 tokens per step",
        f"{ours['tokens_per_s']:,.0f}",
        f"{theirs['tokens_per_s']:,.0f}",
        f"{entry['ratio']:.2f}",
        f"{ours['peak_gib']:.1f} and {theirs['peak_gib']:.1f} GiB",
    ]
    head = [
        "model",
        "shardwise, tokens/s",
        "PyTorch with flash attention, tokens/s",
        "ratio",
        "memory",
    ]
    return f"{table(head, [row])}\n\n{measured(entry)}\n"


def memory(entry: dict[str, Any]) -> str:
    """Return the bytes per parameter of a training step."""
    cases = {
        name: row
        for name, row in entry.items()
        if isinstance(row, dict) and "total" in row
    }
    rows = [
        [name, *(f"{row[key]:.2f}" for key in ("state", "temporary", "total"))]
        for name, row in cases.items()
    ]
    head = [
        "bytes per parameter, from the compiler",
        "weights and AdamW moments",
        "gradient and temporaries",
        "total",
    ]
    note = (
        "AdamW with float32 weights needs 4 bytes for the weight, 8 for the moments and 4 for the "
        "gradient. Blocks are\nrematerialized, and the batch is one sequence of 64 tokens. "
    )
    added = []
    for dtype in ("float32", "bfloat16"):
        (small, few), (large, many) = (
            (row["total"], row["parameters"])
            for row in (cases[f"gpt2 {dtype}"], cases[f"gpt2-xl {dtype}"])
        )
        added.append(
            f"{(large * many - small * few) / (many - few):.2f} bytes with matmuls in {dtype}"
        )
    note += (
        "From the smaller to the larger model, each additional\n"
        f"parameter needs {' and '.join(added)}."
    )
    return f"{table(head, rows)}\n\n{note}\n\n{measured(entry)}\n"


def chunks(entry: dict[str, Any]) -> str:
    """Return the cost of a chunked loss."""
    whole, parts = entry["whole"], entry["parts"]
    rows = [
        [
            "all logits at once",
            f"{whole['step_ms']:.1f} ms",
            "1",
            f"{whole['peak_gib']:.1f} GiB",
        ],
        [
            "one eighth of the logits at a time",
            f"{parts['step_ms']:.1f} ms",
            f"{entry['ratio']:.3f}",
            f"{parts['peak_gib']:.1f} GiB",
        ],
    ]
    head = ["loss of GPT-2 124M, 64 x 1024 tokens", "step time", "relative", "memory"]
    return f"{table(head, rows)}\n\n{measured(entry)}\n"


def loop(entry: dict[str, Any]) -> str:
    """Return the overhead of the training loop on a GPU."""
    row = entry["gpt2"]
    rows = [
        ["hand-written loop", f"{row['by_hand_s'] * 1e3:.1f} ms", "1"],
        ["`steps()`", "", f"{row['steps_ratio']:.3f}"],
        ["`steps()` with the log of `fit()`", "", f"{row['fit_ratio']:.3f}"],
        [
            "`fit()` with a checkpoint of 1.5 GB every 100 steps",
            "",
            f"{row['with_checkpoint_ratio']:.3f}",
        ],
    ]
    note = (
        f"The first checkpoint costs {row['first_save_s']:.1f} s more, because the driver pins "
        "host memory for it once."
    )
    head = ["loop for GPT-2 124M, 32 x 1024 tokens", "step time", "relative"]
    return f"{table(head, rows)}\n\n{note}\n\n{measured(entry)}\n"


def cpu_loop(entry: dict[str, Any]) -> str:
    """Return the overhead of the training loop on a CPU."""
    rows = [
        [
            f"{row['by_hand_s'] * 1e3:.1f} ms",
            *(
                cell
                for key in ("steps", "fit")
                for cell in (
                    f"{row[f'{key}_ratio']:.3f}",
                    f"{row[f'{key}_host_s'] * 1e6:+.0f} us",
                )
            ),
        ]
        for row in (entry[name] for name in ("tiny", "small", "medium"))
    ]
    head = [
        "hand-written step",
        "`steps()`, relative",
        "CPU time of its thread",
        "with the log of `fit()`, relative",
        "CPU time of its thread",
    ]
    note = (
        "CPU times are differences from the hand-written loop, per step. The XLA program and the "
        "prefetching thread share two\ncores with the loop. With an accelerator, only the CPU time "
        "of the loop's thread matters."
    )
    return f"{table(head, rows)}\n\n{note}\n\n{measured(entry)}\n"


def nnx_jit(entry: dict[str, Any]) -> str:
    """Return the comparison of `nnx.jit` with `jax.jit`."""
    ways = {
        "jax_jit": "`jax.jit` of arrays",
        "nnx_jit": "`nnx.jit` of model and optimizer",
        "cached_partial": "`nnx.jit` with `nnx.cached_partial`",
    }
    rows = [
        [
            f"{row['arrays']} arrays, {label}",
            f"{row[f'{way}_s'] * 1e3:.2f} ms",
            f"{row[f'{way}_ratio']:.2f}",
            f"{row[f'{way}_host_s'] * 1e3:.2f} ms",
        ]
        for row in (entry[name] for name in ("small", "medium"))
        for way, label in ways.items()
    ]
    head = [
        "step of an MLP with Adam",
        "step time",
        "relative",
        "CPU time of its thread",
    ]
    note = (
        "`nnx.jit` takes model and optimizer apart before every call and updates them after it, on "
        "the host. The program is the\nsame. `python -m benchmarks.nnx_jit` measures it."
    )
    return f"{table(head, rows)}\n\n{note}\n\n{measured(entry)}\n"


SECTIONS = [
    ("GPT-2 124M on one GPU", "gpu", "gpt2", gpt2),
    ("GPT-2 1.5B on one GPU", "gpu", "xl", xl),
    ("Sequences of 16,384 tokens", "gpu", "16k", long),
    ("Sequences of 65,536 tokens", "gpu", "64k", long),
    ("Memory per parameter", "gpu", "memory", memory),
    ("Chunked loss", "gpu", "chunks", chunks),
    ("Training loop on one GPU", "gpu", "loop", loop),
    ("Comparison with PyTorch on a CPU", "cpu", "torch", torch),
    ("Comparison with PyTorch on an Intel CPU", "cpu_intel", "torch", torch),
    ("Training loop on a CPU", "cpu", "loop", cpu_loop),
    ("`nnx.jit` and `jax.jit` on a CPU", "cpu", "nnx_jit", nnx_jit),
    ("Startup time: default recipe on a CPU", "cpu", "start", start),
    ("Startup time: GPT-2 124M on one GPU, scanned layers", "gpu", "start", start),
    (
        "Startup time: GPT-2 124M on one GPU, unrolled layers",
        "gpu",
        "start_unrolled",
        start,
    ),
    ("Scaling with model size and devices", "cpu", "growth", growth),
]


def main() -> None:
    """Write the page and its pictures."""
    parts = [
        "# Performance",
        "`python -m benchmarks.page` generates this page from the records in benchmarks/records. "
        "`make bench` writes the records\nof a CPU, `python -m benchmarks.gpu` those of a GPU. "
        "Both sides of a ratio are measured in one run on one machine.",
    ]
    records = {name: load(name) for name in ("gpu", "cpu", "cpu_intel")}
    for title, record, name, show in SECTIONS:
        if name in records[record]:
            parts.append(f"## {title}\n\n{show(records[record][name])}")
    changes = json.loads((RECORDS / "changes.json").read_text())
    rows = [
        [
            c["where"],
            c["change"],
            c["predicted"],
            c["measured"],
            "kept" if c["kept"] else "not kept",
        ]
        for c in changes
    ]
    parts.append(
        "## Optimizations: predicted and measured\n\n"
        "Each row is one change to the code, with the effect that was predicted before it was "
        "measured. Times are per step\nunless a row says otherwise.\n\n"
        + table(["case", "change", "predicted", "measured", "result"], rows, "---")
    )
    if "gpt2" in records["gpu"]:
        picture(records["gpu"]["gpt2"], DOCS / "performance.png")
    if "growth" in records["cpu"]:
        growth_picture(records["cpu"]["growth"], DOCS / "growth.png")
    (DOCS / "performance.md").write_text("\n\n".join(parts).rstrip() + "\n")
    print(DOCS / "performance.md")


if __name__ == "__main__":
    main()

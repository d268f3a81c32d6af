"""docs/performance.md and its picture, from the records: `python -m benchmarks.page`. No figure there is written by hand."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.record import RECORDS

DOCS = RECORDS.parents[1] / "docs"


def load(name: str) -> dict[str, Any]:
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def table(columns: list[str], rows: list[list[str]], align: str = "--:") -> str:
    lines = [columns, ["---", *[align] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def measured(entry: dict[str, Any]) -> str:
    """With what an entry was measured, for small print."""
    versions = entry["versions"]
    names = [
        f"{name} {versions[name]}"
        for name in ("jax", "flax", "torch", "transformers")
        if name in versions
    ]
    return f"<sub>{entry['hardware']}; Python {versions['python']}, {', '.join(names)}; source {entry['source']}, {entry['date']}</sub>"


def gpt2(entry: dict[str, Any]) -> str:
    rows = []
    best = entry[entry["best"]]["step_ms"]
    for name, title in (
        ("shardwise", "shardwise"),
        ("compact", "PyTorch, a compact model"),
        ("transformers", "PyTorch, `transformers`"),
    ):
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

    def apart(a: list[float], b: list[float]) -> str:
        found = [abs(x - y) / y for x, y in zip(a, b, strict=True)]
        return f"{sum(found) / len(found):.2%} (at most {max(found):.2%}; in the first 50 steps {max(found[:50]):.2%})"

    head = table(
        [
            "GPT-2 124M, 64 x 1024 tokens a step",
            "a step",
            "tokens/s",
            "times the faster PyTorch",
            "MFU",
            "memory",
            "compilation",
        ],
        rows,
    )
    return f"""{head}

All three compute in bfloat16 over float32 weights with AdamW and clipping, flash attention and no dropout; PyTorch with `torch.compile` and
its fused AdamW. They begin with the same weights and see the same text. Over {len(ours)} steps the losses of shardwise and of the faster
PyTorch model differ by {apart(ours, other)} on average; those of the two PyTorch models by {apart(hub, other)}.

The recipe's loss is `Mean(linear_cross_entropy(*model.features(inputs), labels))`, of `shardwise.models.loss`, which takes what goes
into the output layer, (N, D), and its weights, (V, D), of any model.{power(entry)}

![losses](performance.png)

{measured(entry)}
"""


def power(entry: dict[str, Any]) -> str:
    ours = entry["shardwise"]
    if "power_w" not in ours:
        return ""
    others = " and ".join(
        f"{entry[name]['power_w']:.0f} W at {entry[name]['clock_mhz']:.0f} MHz"
        for name in ("compact", "transformers")
    )
    return f"""

While shardwise trains, the card draws {ours["power_w"]:.0f} W at {ours["clock_mhz"]:.0f} MHz, medians of what nvidia-smi says; with the
PyTorch models {others}. At the limit of its power, what makes a step faster is less work, not less waiting."""


def picture(entry: dict[str, Any], path: Path) -> None:
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
    axes.set(xlabel="step", ylabel="loss, nats a byte", ylim=(0, None))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def growth(entry: dict[str, Any]) -> str:
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
                [name, "before XLA", "lowering", "compilation", "a step", "", "memory of a device"],
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
                "GPT-2 compiled for TPU v5e, 4 rows a chip",
                "trace and compilation",
                "memory of a chip",
                "a step, planned",
            ],
            rows,
        )
    )
    words = (
        "Left: what comes before the first step, against layers. Middle: time of a step against its arithmetic, from the smallest case of\n"
        "each table; below the grey line it grows slower than the work. Right: memory of a device, likewise against what is doubled."
    )
    return f"![growth](growth.png)\n\n{words}\n\n" + "\n\n".join(parts) + f"\n\n{measured(entry)}\n"


def growth_picture(entry: dict[str, Any], path: Path) -> None:
    figure, (before, steps, memory) = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
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
        work, time = ([row[key] / rows[0][key] for row in rows] for key in ("flops", "step"))
        steps.plot(work, time, style, markersize=4, label=name)
        memory.plot(
            [size / sizes[0] for size in sizes],
            [row["bytes"] / rows[0]["bytes"] for row in rows],
            style,
            markersize=4,
            label=name,
        )
    for scan, style, label in (
        (False, "-*", "layers, in a row, TPU"),
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
    steps.set(xlabel="times the arithmetic", ylabel="times the time", title="a step")
    memory.set(xlabel="times the size", ylabel="times the memory", title="memory of a device")
    for axes, across, up in (
        (before, (2, 4, 8, 16, 32), (5, 10, 20, 50)),
        *((axes, (1, 2, 5, 10, 20), (1, 2, 5, 10, 20)) for axes in (steps, memory)),
    ):
        axes.set(xscale="log", yscale="log")
        axes.minorticks_off()
        axes.set_xticks(across, map(str, across))
        axes.set_yticks(up, map(str, up))
    for axes in (before, steps):
        axes.legend(frameon=False, fontsize=7)
    for axes in (before, steps, memory):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def torch(entry: dict[str, Any]) -> str:
    names = {
        "shardwise": "shardwise",
        "eager": "PyTorch, eager",
        "compile": "PyTorch, `torch.compile`",
    }
    rows = []
    for row in entry["rows"]:
        times = "" if row["side"] == "shardwise" else f"{row['shardwise_over_it']:.2f}"
        rows.append([row["model"], names[row["side"]], f"{row['step_ms']:.1f} ms", times])
    head = [
        "model of 16 x 128 bytes a step, width 128",
        "",
        "a step",
        "shardwise takes, times that",
    ]
    note = "Each takes its turn in every round; times are medians of the rounds, and so are the ratios, each of one round."
    return f"{table(head, rows)}\n\n{note}\n\n{measured(entry)}\n"


def start(entry: dict[str, Any]) -> str:
    names = list(entry["first"]["seconds"])
    rows = []
    for which in ("first", "second"):
        seconds = [
            entry[which]["total"],
            *(entry[which]["seconds"].get(name, 0.0) for name in names),
        ]
        rows.append([f"{which} start", *(f"{s:.1f} s" for s in seconds)])
    note = f"The second takes {entry['ratio']:.2f} times as long as the first"
    if len(ratios := entry.get("ratios", ())) > 1:
        note += f", the median of {len(ratios)} such pairs, which take {min(ratios):.2f} to {max(ratios):.2f}"
    return f"{table(['to the end of the first step', 'in all', *names], rows)}\n\n{note}.\n\n{measured(entry)}\n"


def xl(entry: dict[str, Any]) -> str:
    head = [
        "GPT-2 1.5B",
        "rows of 1024 tokens, by `plan --largest-batch`",
        "a step",
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
    ours, theirs = entry["shardwise"], entry["compact"]
    row = [
        "GPT-2 124M, 65,536 tokens a step",
        f"{ours['tokens_per_s']:,.0f}",
        f"{theirs['tokens_per_s']:,.0f}",
        f"{entry['ratio']:.2f}",
        f"{ours['peak_gib']:.1f} and {theirs['peak_gib']:.1f} GiB",
    ]
    head = ["", "tokens/s", "PyTorch's, flash attention", "ratio", "memory"]
    return f"{table(head, [row])}\n\n{measured(entry)}\n"


def memory(entry: dict[str, Any]) -> str:
    cases = {name: row for name, row in entry.items() if isinstance(row, dict) and "total" in row}
    rows = [
        [name, *(f"{row[key]:.2f}" for key in ("state", "temporary", "total"))]
        for name, row in cases.items()
    ]
    head = [
        "bytes a parameter, by the compiler",
        "weights and AdamW's averages",
        "gradient and all else",
        "in all",
    ]
    note = "AdamW over float32 weights needs 4 + 8 + 4. Blocks are computed again, of one row of 64 tokens. "
    added = []
    for dtype in ("float32", "bfloat16"):
        (small, few), (large, many) = (
            (row["total"], row["parameters"])
            for row in (cases[f"gpt2 {dtype}"], cases[f"gpt2-xl {dtype}"])
        )
        added.append(
            f"{(large * many - small * few) / (many - few):.2f} bytes with products in {dtype}"
        )
    note += f"What a parameter more adds, from the smaller model to the larger one: {' and '.join(added)}."
    return f"{table(head, rows)}\n\n{note}\n\n{measured(entry)}\n"


def chunks(entry: dict[str, Any]) -> str:
    whole, parts = entry["whole"], entry["parts"]
    rows = [
        ["all logits at once", f"{whole['step_ms']:.1f} ms", "1", f"{whole['peak_gib']:.1f} GiB"],
        [
            "an eighth of the logits at a time",
            f"{parts['step_ms']:.1f} ms",
            f"{entry['ratio']:.3f}",
            f"{parts['peak_gib']:.1f} GiB",
        ],
    ]
    return f"{table(['the loss of GPT-2 124M, 64 x 1024 tokens', 'a step', 'times', 'memory'], rows)}\n\n{measured(entry)}\n"


def loop(entry: dict[str, Any]) -> str:
    row = entry["gpt2"]
    rows = [
        ["written by hand", f"{row['by_hand_s'] * 1e3:.1f} ms", "1"],
        ["`steps()`", "", f"{row['steps_ratio']:.3f}"],
        ["with the log of `fit()`", "", f"{row['fit_ratio']:.3f}"],
        [
            "all of `fit()`, a save of 1.5 GB every 100 steps",
            "",
            f"{row['with_checkpoint_ratio']:.3f}",
        ],
    ]
    note = f"The first save costs {row['first_save_s']:.1f} s more: the driver pins memory of the host for it, once."
    return f"{table(['loop around GPT-2 124M, 32 x 1024 tokens', 'a step', 'times'], rows)}\n\n{note}\n\n{measured(entry)}\n"


def cpu_loop(entry: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['by_hand_s'] * 1e3:.1f} ms",
            *(
                cell
                for key in ("steps", "fit")
                for cell in (f"{row[f'{key}_ratio']:.3f}", f"{row[f'{key}_host_s'] * 1e6:+.0f} us")
            ),
        ]
        for row in (entry[name] for name in ("tiny", "small", "medium"))
    ]
    head = [
        "a step by hand",
        "`steps()`, times",
        "its own thread",
        "with the log of `fit()`, times",
        "its own thread",
    ]
    note = "The program, and the thread that reads ahead, share two cores with the loop; for an accelerator its own thread is what counts."
    return f"{table(head, rows)}\n\n{note}\n\n{measured(entry)}\n"


SECTIONS = [
    ("GPT-2 124M on one GPU", "gpu", "gpt2", gpt2),
    ("GPT-2 1.5B on one GPU", "gpu", "xl", xl),
    ("Rows of 16,384 tokens", "gpu", "16k", long),
    ("Rows of 65,536 tokens", "gpu", "64k", long),
    ("Memory", "gpu", "memory", memory),
    ("The loss in parts", "gpu", "chunks", chunks),
    ("The loop", "gpu", "loop", loop),
    ("On the CPU, beside PyTorch", "cpu", "torch", torch),
    ("The loop on the CPU", "cpu", "loop", cpu_loop),
    ("Starting: the default recipe on the CPU", "cpu", "start", start),
    ("Starting: GPT-2 124M on one GPU, one scanned layer", "gpu", "start", start),
    ("Starting: GPT-2 124M on one GPU, all layers in a row", "gpu", "start_in_a_row", start),
    ("How it grows", "cpu", "growth", growth),
]


def main() -> None:
    parts = [
        "# Performance",
        "Made by `python -m benchmarks.page` from the records in benchmarks/records, which `make bench` and,\n"
        "on a machine with a GPU, `python -m benchmarks.gpu` write. Ratios are measured in one run on one machine.",
    ]
    records = {name: load(name) for name in ("gpu", "cpu")}
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
        f"## What changes brought\n\n{table(['', 'change', 'predicted', 'measured', ''], rows, '---')}"
    )
    if "gpt2" in records["gpu"]:
        picture(records["gpu"]["gpt2"], DOCS / "performance.png")
    if "growth" in records["cpu"]:
        growth_picture(records["cpu"]["growth"], DOCS / "growth.png")
    (DOCS / "performance.md").write_text("\n\n".join(parts).rstrip() + "\n")
    print(DOCS / "performance.md")


if __name__ == "__main__":
    main()

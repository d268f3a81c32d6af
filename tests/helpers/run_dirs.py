"""Write run directories as a run would leave them."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

T0 = 1_800_000_000.0


PHASES = {
    "importing": 2.0,
    "preparing": 1.0,
    "compiling the step": 4.0,
    "loading the state": 2.0,
    "first step": 1.0,
}


def lines(path: Path, records: Iterable[object]) -> None:
    """Write records as a file of JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def step(n: int, begun: float = T0, **more: object) -> dict[str, object]:
    """Return the record of a step of a start that began at `begun` and took 10 s to start up."""
    known = {
        "loss": 5 / n,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "step_s": 0.5,
        "data_s": 0.1,
        "tokens_per_s": 512.0,
        "time": begun + 10 + 0.5 * n,
    }
    return {"step": n, **known, **more}


def plan(
    mesh: Mapping[str, int], leaves: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    """Return a plan as JSON: 0.25 s per step, 1,024 tokens/s, MFU 0.4, 708 B of 1 GB."""
    memory = {
        "parameters": 100.0,
        "optimizer": 200.0,
        "other": 0.0,
        "batch": 8.0,
        "temporaries": 400.0,
    }
    times = {
        "total": 0.25,
        "arithmetic": 0.05,
        "memory": 0.15,
        "network": {"fsdp": 0.05},
        "bound": "memory",
    }
    return {
        "target": "cpu",
        "chip": "cpu",
        "mesh": mesh,
        "options": {"accumulate": 1},
        "batch": {"inputs": [8, 32]},
        "items": 256,
        "unit": "tokens",
        "num_params": 1000,
        "num_devices": math.prod(mesh.values()),
        "memory": memory,
        "peak": 708.0,
        "limit": 1e9,
        "fits": True,
        "buffers": [],
        "flops": 5e8,
        "model_flops": 1e9,
        "bytes": 1e6,
        "traffic": [],
        "times": times,
        "peak_flops": 1e10,
        "leaves": leaves,
    }


LEAF = {
    "path": "blocks/0/up",
    "shape": [64, 256],
    "dtype": "float32",
    "axes": [["fsdp"], []],
    "layout": "(fsdp, -)",
    "bytes": 32768.0,
    "why": "rule",
}


def make_run(path: Path, steps: int = 40, again: bool = True) -> Path:
    """Make a run with two starts: the first reached step 25, the second resumed from step 20.

    Args:
        path: the directory to make.
        steps: the last step.
        again: whether phases.jsonl exists, which records how many steps were repeated.
    """
    path.mkdir()
    records = [step(n) if n <= 20 else step(n, T0 + 100) for n in range(1, steps + 1)]
    lines(
        path / "metrics.jsonl",
        [
            *records[:20],
            {"step": 20, "eval_loss": 0.7},
            *records[20:],
            {"step": steps, "eval_loss": 0.5},
        ],
    )
    lines(
        path / "starts.jsonl",
        [{"step": 0, "time": T0 + 9}, {"step": 20, "time": T0 + 109}],
    )
    starting = [
        {"step": s, "time": t, "total": 10.0, "seconds": PHASES}
        for s, t in ((0, T0 + 10), (20, T0 + 110))
    ]
    lines(path / "starting.jsonl", starting)
    if again:
        one = {
            "start": T0,
            "time": T0 + 30,
            "step": 25,
            "seconds": {
                "compile": 4.0,
                "steps": 13.0,
                "data": 2.5,
                "evaluate": 3.0,
                "save": 1.0,
            },
        }
        two = {
            "start": T0 + 100,
            "time": T0 + 125,
            "step": steps,
            "seconds": {
                "compile": 4.0,
                "steps": 10.5,
                "data": 2.0,
                "evaluate": 1.0,
                "save": 1.0,
            },
        }
        lines(path / "phases.jsonl", [{**one, "time": T0 + 20, "step": 10}, one, two])
    lines(
        path / "samples.jsonl",
        [{"step": 20, "text": "early"}, {"step": 40, "text": "late <b>"}],
    )
    about = {
        "recipe": "r.py:recipe",
        "arguments": {"lr": "0.001", "out": str(path)},
        "source": "x = 1\n",
        "mesh": "fsdp=2",
        "steps": steps,
    }
    (path / "run.json").write_text(
        json.dumps(
            about
            | {"versions": {"jax": "0.10.2"}, "devices": {"count": 2, "kind": "cpu"}}
        )
    )
    (path / "plan.json").write_text(
        json.dumps(
            {
                "plan": plan({"data": 1, "fsdp": 2}, [LEAF]),
                "measured": {"seconds": 0.5, "peak": None},
            }
        )
    )
    (path / "checkpoints" / "40").mkdir(parents=True)
    (path / "checkpoints" / "40" / "meta.json").write_text(
        json.dumps({"metrics": {"loss": 0.125}})
    )
    return path


def damage_run(path: Path) -> None:
    """Damage every file of a run directory: seven bad lines and a partial one in its metrics."""
    good = (path / "metrics.jsonl").read_text()
    deep = '{"step": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    odd = [
        '{"step": "1"}',
        '{"step": -1}',
        '{"step": true, "loss": 1}',
        "[]",
        "\x00\xff",
        deep,
        '{"step": 1' + "0" * 5000 + "}",
        '{"step": 99, "loss',
    ]
    (path / "metrics.jsonl").write_bytes(
        good.encode() + "\n".join(odd).encode("latin1")
    )
    for name in (
        "run.json",
        "plan.json",
        "starts.jsonl",
        "starting.jsonl",
        "phases.jsonl",
        "samples.jsonl",
    ):
        (path / name).write_bytes(b'\xff{"step": [')

"""A plan as one HTML page: what fits, what bounds the step, how every parameter is cut, which layouts were compared.

The page is a single file that asks nothing of any network. All of it can be read without JavaScript; `plan_page.js` adds
choosing, sorting and filtering. Whatever comes from a plan passes through `escape`, and none of it into the script.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.report.html import (
    Cell,
    Part,
    bar,
    code,
    command_box,
    escape,
    facts,
    page,
    row,
    stacked,
    swatch,
    table,
    tile,
)
from shardwise.report.plan_picture import Point, grid, scatter
from shardwise.text import (
    NONE,
    TIMES,
    any_layer,
    show_bytes,
    show_count,
    show_share,
    show_short_time,
)

MEMORY_KINDS = {
    "parameters": "the weights, as they are stored",
    "optimizer": "what the optimizer keeps for each weight",
    "other": "statistics of the model, and the program itself",
    "batch": "the rows of one step",
    "temporaries": "activations kept for the backward pass, gradients, scratch",
}
SOURCES = {
    "compiler": "Read from the compiled program",
    "model of the hardware": "Estimated by a model of the hardware, marked\N{NO-BREAK SPACE}≈",
    "trace": "Counted in the traced model",
}
FIELDS = {
    "memory": "memory by kind",
    "buffers": "the largest buffers",
    "flops": "arithmetic of a device",
    "bytes": "bytes to and from a device's memory",
    "traffic.kind": "the exchanges: their kinds",
    "traffic.axes": "axes",
    "traffic.count": "counts",
    "traffic.bytes": "bytes",
    "times": "step time and its parts",
    "traffic.seconds": "seconds of exchanges",
    "traffic.waited": "seconds waited for them",
    "items_per_second": "throughput",
    "mfu": "MFU",
    "limit": "the memory limit",
    "model_flops": "arithmetic of the model",
    "leaves": "how parameters are cut",
    "items": "items of a step",
}
STATUSES = ("compiled", "not compiled", "too large", "pruned", "refused")
MOST_CANDIDATES = 400
UNKNOWN = "this hardware's speed is not known"
CHOSEN = '<b class="chosen-mark">chosen</b> '


def plan_page(
    plan: dict[str, Any], candidates: list[dict[str, Any]], title: str, command: str
) -> str:
    """The page for `Plan.as_json()`; `candidates` is the ranking, best first, empty where nothing was compared."""
    sections = {
        "Answer": _answer(plan),
        "Memory": memory_section(plan),
        "Layout": layout_section(plan),
        "Time": _time(plan),
    }
    sections["Ranking"] = _ranking(plan, candidates)
    footer = (
        f"Compiled in {show_short_time(plan['compile_seconds'])} with {show_bytes(plan['compile_memory'])} of this machine's memory.\n"
        "Nothing was allocated on any device."
    )
    return page(
        title, "Plan of a run", command_box(command), sections, footer, ["page", "plan_page"]
    )


# The answer


def _answer(plan: dict[str, Any]) -> str:
    peak, limit, times = plan["peak"], plan["limit"], plan["times"]
    limited = 0 < limit < math.inf
    if not limited:
        verdict, more = "Memory limit not known", f"{show_bytes(peak)} per device"
    elif plan["fits"]:
        verdict = "Fits, tightly" if peak > 0.95 * limit else "Fits"
        more = f"{show_bytes(peak)} of {show_bytes(limit)} per device ({show_share(peak, limit)}); {show_bytes(limit - peak)} are left"
    else:
        verdict = "Does not fit"
        more = f"{show_bytes(peak)} of {show_bytes(limit)} per device ({show_share(peak, limit)}); {show_bytes(peak - limit)} too much"
    state = "unknown" if not limited else "good" if plan["fits"] else "bad"
    sign = {"good": "✓", "bad": "✗", "unknown": "?"}[state]
    chips = f"{plan['num_devices']} {TIMES} {escape(plan['chip'])}"
    tiles = [
        tile(
            "Peak memory per device",
            show_bytes(peak),
            f"{show_share(peak, limit)} of {show_bytes(limit)}" if limited else "limit not known",
        ),
        tile(
            "Step time",
            f"≈ {show_short_time(times['total'])}",
            f"bound by {_bound(times['bound'])}",
        )
        if times
        else tile("Step time", NONE, UNKNOWN),
        tile(
            "Throughput",
            f"≈ {show_count(plan['items_per_second'])} <small>{escape(plan['unit'])}/s</small>"
            if times
            else NONE,
            f"{plan['items']:,} {escape(plan['unit'])} a step",
        ),
        tile(
            "MFU",
            f"≈ {show_share(plan['mfu'], 1.0)}" if plan["mfu"] is not None else NONE,
            "of the peak, without what is computed twice",
        ),
        tile("Chips", chips, f"target {escape(plan['target'])}"),
    ]
    known = {
        "mesh": escape(_mesh_text(plan["mesh"])),
        "options": escape(_options_text(plan["options"])),
        "batch": escape(
            ", ".join(f"{name} {_shape(shape)}" for name, shape in plan["batch"].items())
        ),
        "parameters": f"{plan['num_params']:,}",
        "arithmetic of a device": f"{show_count(plan['flops'], ' ')}FLOP a step, as compiled",
        "arithmetic of the model": f"{show_count(plan['model_flops'], ' ')}FLOP a step, all devices",
        "memory traffic of a device": f"{show_bytes(plan['bytes'])} a step",
    }
    sources = {
        escape(SOURCES.get(source, source)): escape(
            ", ".join(FIELDS.get(name, name) for name in names)
        )
        for source, names in plan["sources"].items()
    }
    unknown = "".join(
        f"<li><code>{escape(name)}</code>, {calls} calls</li>"
        for name, calls in plan["unknown_kernels"].items()
    )
    if unknown:
        unknown = f"<p>The arithmetic of these kernels is not known; the step takes longer than said:</p><ul>{unknown}</ul>"
    return f"""<section id="answer" aria-labelledby="answer-title">
<h2 id="answer-title" class="verdict {state}"><span class="sign" aria-hidden="true">{sign}</span>{verdict} on {chips}</h2>
<p class="lead">{more}.</p>
<div class="tiles">{"".join(tiles)}</div>
<p class="note">≈ marks an estimate by a model of the hardware. Memory is what the compiler has laid out.</p>
<div class="note">{unknown}</div>
<div class="columns"><div><h3>The run</h3>{facts(known)}</div><div><h3>Where the figures come from</h3>{facts(sources)}</div></div>
</section>
"""


# Memory and time, as bars


def memory_section(plan: dict[str, Any]) -> str:
    memory, peak, limit = plan["memory"], plan["peak"], plan["limit"]
    parts = [
        Part(kind, memory[kind], show_bytes(memory[kind]), note, f"k{i}")
        for i, (kind, note) in enumerate(MEMORY_KINDS.items())
    ]
    limited = 0 < limit < math.inf
    bars = ""
    if limited:
        bars = f'<p class="bar-title">Against the limit of {show_bytes(limit)}</p>' + stacked(
            parts, max(peak, limit), limit
        )
    if not limited or peak < 0.6 * limit:
        bars += f'<p class="bar-title">The peak of {show_bytes(peak)}, enlarged</p>' + stacked(
            parts, peak
        )
    head = ["kind", "per device", "of the peak", *(["of the limit"] if limited else [])]
    values = [(swatch(part), part.value) for part in parts] + [("peak", peak)]
    rows: list[list[Cell]] = [
        [
            name,
            (value, show_bytes(value)),
            (value, show_share(value, peak)),
            *([(value, show_share(value, limit))] if limited else []),
        ]
        for name, value in values
    ]
    buffers = plan["buffers"]
    most = max((b["bytes"] for b in buffers), default=1.0)
    largest = table(
        "The largest buffers among the temporaries",
        ["made by", "shape", "bytes"],
        [
            row(
                [
                    code(b["name"]),
                    code(b["shape"]),
                    (b["bytes"], bar(b["bytes"], most, show_bytes(b["bytes"]))),
                ]
            )
            for b in buffers
        ],
    )
    return f"""<section id="memory" aria-labelledby="memory-title">
<h2 id="memory-title">Memory of one device</h2>
{bars}
{table("Memory by kind", head, [*map(row, rows[:-1]), row(rows[-1], 'class="total"')])}
{f"<h3>Largest buffers among the temporaries</h3>{largest}" if buffers else ""}
</section>
"""


def _time(plan: dict[str, Any]) -> str:
    times = plan["times"]
    if times is None:
        body = f"<p>The arithmetic is counted, but {UNKNOWN}, so no times can be told.</p>"
    else:
        seconds = {
            "arithmetic": (times["arithmetic"], "instructions bound by arithmetic"),
            "memory": (times["memory"], "instructions bound by the memory's bandwidth"),
            **{
                f"network on {axes}": (s, f"waiting for exchanges along {axes}")
                for axes, s in times["network"].items()
            },
        }
        parts = [
            Part(name, value, f"≈ {show_short_time(value)}", note, f"k{(i + 5) % 8}")
            for i, (name, (value, note)) in enumerate(seconds.items())
        ]
        values = [(swatch(part), part.value) for part in parts] + [("step", times["total"])]
        rows: list[list[Cell]] = [
            [
                name,
                (value, f"≈ {show_short_time(value)}"),
                (value, show_share(value, times["total"])),
            ]
            for name, value in values
        ]
        body = f"""<p class="bar-title">A step of ≈ {show_short_time(times["total"])}, bound by {_bound(times["bound"])}</p>
{stacked(parts, times["total"])}
{table("Parts of a step", ["part", "time", "share"], [*map(row, rows[:-1]), row(rows[-1], 'class="total"')])}"""
    head = ["exchange", "along", "over", "count", "bytes", "takes", "of it waited for"]
    exchanges = [
        row(
            [
                escape(t["kind"]),
                code(t["axes"]),
                escape(t["link"]),
                (t["count"], f"{t['count']:,}"),
                (t["bytes"], show_bytes(t["bytes"])),
                (t["seconds"], f"≈ {show_short_time(t['seconds'])}" if times else NONE),
                (t["waited"], f"≈ {show_short_time(t['waited'])}" if times else NONE),
            ]
        )
        for t in plan["traffic"]
    ]
    exchanged = (
        table("Exchanges between devices in one step", head, exchanges)
        if exchanges
        else "<p>The devices exchange nothing.</p>"
    )
    return f"""<section id="time" aria-labelledby="time-title">
<h2 id="time-title">Where the time goes</h2>
{body}
<h3>Exchanges between devices in one step</h3>
<p class="note">Counts and bytes are the compiler's: whole arrays, as one device has them before or after.
What runs beside arithmetic is not waited for.</p>
{exchanged}
</section>
"""


# How parameters are cut


@dataclass(frozen=True)
class Group:
    """Parameters that differ in the number of their layer alone."""

    leaf: dict[str, Any]  # the first of them
    paths: list[str]
    cuts: tuple[tuple[int, tuple[int, ...]], ...]  # dim, and the axes of the drawn mesh that cut it

    @property
    def path(self) -> str:
        return self.paths[0] if len(self.paths) == 1 else any_layer(self.paths[0])


def layout_section(plan: dict[str, Any]) -> str:
    mesh = {name: size for name, size in plan["mesh"].items() if size > 1}
    groups = sorted(
        _group(plan["leaves"], list(mesh)),
        key=lambda group: -group.leaf["bytes"] * len(group.paths),
    )
    sizes = list(mesh.values())
    if not groups:
        return ""
    chosen = groups[0]
    arrays: dict[str, str] = {}
    rows = []
    for group in groups:
        key = _array_key(group, sizes)
        if key not in arrays:
            arrays[key] = _array_picture(group, sizes, key, hidden=group is not chosen)
        rows.append(_leaf_row(group, mesh, key, chosen=group is chosen))
    count = f"{len(plan['leaves']):,} parameters" + (
        f", those alike in {len(groups)} rows" if len(groups) < len(plan["leaves"]) else ""
    )
    ones = [name for name, size in plan["mesh"].items() if size == 1]
    drawn, left_out = _mesh_picture(mesh, chosen)
    about = (
        f"{f' {TIMES} '.join(f'{name} {size}' for name, size in mesh.items())} = {plan['num_devices']} devices."
        if mesh
        else "One device."
    )
    about += f" Dots stand for {left_out} devices that are not drawn." if left_out else ""
    about += f" Of size one: {', '.join(ones)}." if ones and mesh else ""
    columns = ["parameter", "array", "layout, and why", "per device"]
    return f"""<section id="layout" aria-labelledby="layout-title">
<h2 id="layout-title">How parameters are cut</h2>
<div class="beside-table">
<div class="pictures" id="pictures">
<h3 id="chosen-name"><code>{escape(chosen.path)}</code></h3>
<p id="chosen-said" aria-live="polite">{escape(_said(chosen, mesh))}</p>
<figure><figcaption>The array</figcaption>{"".join(arrays.values())}</figure>
<figure><figcaption>Who holds which piece</figcaption>{drawn}<p class="note">{escape(about)}</p></figure>
</div>
<div class="listing">
<div class="tools" hidden><label for="find">Filter</label>
<input id="find" type="search" placeholder="path, layout or reason" autocomplete="off" spellcheck="false">
<output id="found" for="find"></output></div>
{table("Parameters and how they are cut", columns, rows, name="leaves")}
<p class="note">{count}. <span class="keys" hidden>Arrow keys move through the list.</span></p>
</div>
</div>
</section>
"""


def _group(leaves: list[dict[str, Any]], axes: list[str]) -> list[Group]:
    alike: dict[Any, list[dict[str, Any]]] = {}
    for leaf in leaves:
        key = (
            any_layer(leaf["path"]),
            *(str(leaf[name]) for name in ("shape", "dtype", "axes", "layout", "bytes", "why")),
        )
        alike.setdefault(key, []).append(leaf)
    return [
        Group(
            same[0],
            [leaf["path"] for leaf in same],
            tuple(
                (dim, numbers)
                for dim, names in enumerate(same[0]["axes"])
                if (numbers := tuple(axes.index(name) for name in names if name in axes))
            ),
        )
        for same in alike.values()
    ]


def _leaf_row(group: Group, mesh: dict[str, int], key: str, chosen: bool) -> str:
    leaf, count = group.leaf, len(group.paths)
    path = code(group.path)
    size = show_bytes(leaf["bytes"] * count)
    if count > 1:
        path += f"<small>{count} alike{escape(_numbers(group.paths))}</small>"
        size += f"<small>{count} {TIMES} {show_bytes(leaf['bytes'])}</small>"
    axes = " ".join(str(axis) for _, numbers in group.cuts for axis in numbers)
    attributes = f'data-axes="{axes}" data-array="{key}" data-said="{escape(_said(group, mesh))}" aria-selected="{str(chosen).lower()}"'
    cells: list[Cell] = [
        path,
        code(f"{leaf['dtype']}{_shape(leaf['shape'])}"),
        f"{code(leaf['layout'])}<small>{escape(leaf['why'])}</small>",
        (leaf["bytes"] * count, size),
    ]
    return row(cells, attributes)


def _numbers(paths: list[str]) -> str:
    """The layers of parameters that are alike: ": 0 to 79", where one number tells them apart."""
    split = [path.split("/") for path in paths]
    differing = [column for column in zip(*split, strict=True) if len(set(column)) > 1]
    if len(differing) != 1:
        return ""
    numbers = sorted(int(number) for number in differing[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f": {numbers[0]} to {numbers[-1]}"
    return ": " + ", ".join(map(str, numbers[:6])) + (" …" if len(numbers) > 6 else "")


def _said(group: Group, mesh: dict[str, int]) -> str:
    names, sizes = list(mesh), list(mesh.values())
    shape, devices = group.leaf["shape"], math.prod(sizes)
    each = show_bytes(group.leaf["bytes"])
    if not group.cuts:
        return (
            f"Whole on every device: {_shape(shape)}, {each}."
            if devices > 1
            else f"Whole on the one device: {_shape(shape)}, {each}."
        )
    counts = {dim: math.prod(sizes[axis] for axis in numbers) for dim, numbers in group.cuts}
    pieces = math.prod(counts.values())
    piece = [-(-size // counts.get(dim, 1)) for dim, size in enumerate(shape)]
    dims = "; ".join(
        f"dim {dim} in {counts[dim]} over {' and '.join(names[axis] for axis in numbers)}"
        for dim, numbers in group.cuts
    )
    copies = devices // pieces
    held = f"every piece on {copies} devices" if copies > 1 else "every device has its own"
    return (
        f"{_shape(shape)} in {pieces} pieces of {_shape(piece)}, {each} each; {held}. Cut: {dims}."
    )


def _array_key(group: Group, sizes: list[int]) -> str:
    """Arrays with the same key look alike: "1:2-2:4" is cut in two along dim 1, in four along dim 2."""
    return (
        "-".join(
            f"{dim}:{math.prod(sizes[axis] for axis in numbers)}" for dim, numbers in group.cuts
        )
        or "whole"
    )


def _array_picture(group: Group, sizes: list[int], key: str, hidden: bool) -> str:
    dims = {f"dim {dim}": math.prod(sizes[axis] for axis in numbers) for dim, numbers in group.cuts}
    pieces = math.prod(dims.values())
    label = f"The array cut in {pieces} pieces" if pieces > 1 else "The array, whole"
    attributes = f'class="array" data-array="{key}"{" hidden" if hidden else ""}'
    return grid(dims, range(len(dims)), gaps=(1.0, 6.0, 12.0)).svg(attributes, label)


def _mesh_picture(mesh: dict[str, int], group: Group) -> tuple[str, int]:
    """The devices coloured by the piece they hold, and how many of them are not drawn."""
    drawn = grid(
        mesh, [axis for _, numbers in group.cuts for axis in numbers], gaps=(3.0, 10.0, 18.0)
    )
    label = f"The mesh of {_mesh_text(mesh) or 'one device'}; each device shows the number of the piece it holds"
    attributes = f'class="mesh" id="mesh" data-sizes="{",".join(map(str, mesh.values()))}"'
    return drawn.svg(attributes, label), math.prod(mesh.values()) - drawn.count


# The ranking


def _ranking(plan: dict[str, Any], candidates: list[dict[str, Any]]) -> str:
    if not candidates:
        return ""
    shown = candidates[:MOST_CANDIDATES]
    slowest = max((c["seconds"] for c in shown if c["seconds"] is not None), default=1.0)
    counts = {
        status: sum(c["status"] == status for c in shown)
        for status in dict.fromkeys([*STATUSES, *(c["status"] for c in shown)])
    }
    boxes = "".join(
        f'<label><input type="checkbox" value="{escape(status)}" checked> {escape(status)} <small>{count}</small></label>'
        for status, count in counts.items()
        if count
    )
    left_out = (
        f'<p class="note">{len(candidates) - len(shown):,} more are not listed.</p>'
        if len(candidates) > len(shown)
        else ""
    )
    head = [
        "rank",
        "mesh and options",
        "status",
        "step time",
        "peak memory",
        f"{plan['unit']}/s",
        "MFU",
    ]
    rows = [
        _candidate_row(number, candidate, slowest, plan["limit"])
        for number, candidate in enumerate(shown, 1)
    ]
    return f"""<section id="ranking" aria-labelledby="ranking-title">
<h2 id="ranking-title">Layouts compared</h2>
{scatter(_points(shown), plan["limit"])}
<fieldset class="tools" id="statuses" hidden><legend>Show</legend>{boxes}<output id="ranked"></output></fieldset>
{table("Layouts compared, best first", head, rows, name="candidates")}
{left_out}
</section>
"""


def _points(candidates: list[dict[str, Any]]) -> list[Point]:
    return [
        Point(
            c["peak"],
            c["seconds"],
            "chosen" if c["chosen"] else "compiled" if c["status"] == "compiled" else "grey",
            c["status"],
            f"{c['mesh']}, {_options_text(c['options'])}: {show_short_time(c['seconds'])}, {show_bytes(c['peak'])}, {c['status']}",
        )
        for c in candidates
        if c["seconds"] is not None and c["peak"] is not None
    ]


def _candidate_row(number: int, candidate: dict[str, Any], slowest: float, limit: float) -> str:
    seconds, peak, rate, mfu = (
        candidate[name] for name in ("seconds", "peak", "items_per_second", "mfu")
    )
    limited = 0 < limit < math.inf
    bound = f"<small>bound by {_bound(candidate['bound'])}</small>" if candidate["bound"] else ""
    cells: list[Cell] = [
        (number, f"{number}"),
        f"{code(candidate['mesh'])}<small>{escape(_options_text(candidate['options']))}</small>",
        f"{CHOSEN if candidate['chosen'] else ''}{escape(candidate['status'])}<small>{escape(candidate['why'])}</small>",
        (
            seconds,
            bar(seconds, slowest, f"≈ {show_short_time(seconds)}") + bound
            if seconds is not None
            else NONE,
        ),
        (
            peak,
            NONE
            if peak is None
            else bar(peak, limit, show_bytes(peak))
            if limited
            else show_bytes(peak),
        ),
        (rate, f"≈ {show_count(rate)}" if rate is not None else NONE),
        (mfu, f"≈ {show_share(mfu, 1.0)}" if mfu is not None else NONE),
    ]
    kind = "chosen" if candidate["chosen"] else "" if candidate["status"] == "compiled" else "grey"
    return row(
        cells,
        f'class="{kind}" data-status="{escape(candidate["status"])}"'
        + (' aria-current="true"' if candidate["chosen"] else ""),
    )


# Words and tables


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def _options_text(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _bound(bound: str) -> str:
    return escape({"memory": "the memory's bandwidth"}.get(bound, bound))

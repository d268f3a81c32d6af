"""The tables and lines that `shardwise plan` prints."""

import math
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from shardwise.mesh import show_sizes
from shardwise.plan.plan import Plan, Times
from shardwise.plan.search import Candidate, Entry, Search, Status
from shardwise.text import show_bytes, show_count, show_matmuls, show_seconds

MAX_BUFFERS = 8
MAX_MATMULS = 12
SECONDS_PER_MONTH = 30 * 86400


def show_plan(console: Console, plan: Plan) -> None:
    """Print one plan."""
    console.print(_memory_table(plan))
    verdict = "[bold green]fits[/]" if plan.fits else "[bold red]too large[/]"
    share = plan.memory.peak / plan.limit
    console.print(f"{verdict}: {share:.0%} of the memory", highlight=False)
    if not plan.fits and plan.buffers:
        console.print(_buffer_table(plan))
    if plan.traffic:
        console.print(_traffic_table(plan))
    model_flops = show_count(plan.model_flops / plan.num_devices, " ")
    _print_line(
        console,
        f"per step: {show_count(plan.flops, ' ')}FLOP per device (model: {model_flops}FLOP), "
        f"{show_bytes(plan.bytes)} of memory traffic per device, {plan.items:,} {plan.unit}, "
        f"{show_matmuls(plan.matmul_flops, plan.matmul_lines)}",
    )
    if plan.matmul_choices:
        console.print(_matmul_table(plan))
    if plan.inactive_params:
        active = show_count(plan.num_params - plan.inactive_params)
        total = show_count(plan.num_params)
        _print_line(console, f"experts: a token uses {active} of {total} parameters")
    if plan.microbatches:
        _print_line(
            console,
            f"pipeline: {plan.microbatches} microbatches; a stage has none for {plan.bubble:.0%} "
            "of the time",
        )
    if plan.times is not None:
        _print_line(console, _estimate_line(plan, plan.times))
    else:
        _print_line(console, f"no time estimate: the speed of '{plan.chip}' is unknown")
    if plan.unknown_kernels:
        calls = (
            f"{name} ({count} calls)" for name, count in plan.unknown_kernels.items()
        )
        _print_line(
            console,
            f"only the bytes of these kernels count, their FLOP are unknown: {', '.join(calls)}",
        )
    _print_line(
        console,
        "[dim]Memory, FLOP, bytes and collectives are read from the compiled program. Times are "
        f"estimated by a model of the hardware. Compiled in {show_seconds(plan.compile_seconds)} "
        f"with {show_bytes(plan.compile_memory)} of host memory.[/]",
    )


def _print_line(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _table(title: str, left: Iterable[str], right: Iterable[str]) -> Table:
    """Return a table whose first columns are aligned to the left and the others to the right."""
    table = Table(title=title, title_justify="left")
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def _memory_table(plan: Plan) -> Table:
    memory = plan.memory
    columns = {
        "parameters": memory.parameters,
        "optimizer": memory.optimizer,
        "other": memory.other,
        "batch": memory.batch,
        "activations, temporaries": memory.temporaries,
        "peak": memory.peak,
        "limit": plan.limit,
    }
    title = f"{plan.num_devices} x {plan.chip}, mesh {show_sizes(plan.mesh)}: memory per device"
    table = _table(title, [], columns)
    table.add_row(*map(show_bytes, columns.values()))
    return table


def _buffer_table(plan: Plan) -> Table:
    table = Table(title="largest buffers among the temporaries", title_justify="left")
    table.add_column("bytes", justify="right")
    table.add_column("shape")
    table.add_column("written by", overflow="fold")
    for buffer in plan.buffers[:MAX_BUFFERS]:
        table.add_row(show_bytes(buffer.bytes), buffer.shape, buffer.name)
    return table


def _traffic_table(plan: Plan) -> Table:
    title = "collectives of one step, per device"
    table = _table(
        title,
        ["kind", "axes", "link"],
        ["count", "bytes", "estimated time", "not hidden"],
    )
    for traffic in plan.traffic:
        times = ("", "")
        if plan.times:
            times = (
                f"{traffic.seconds * 1e3:.2f} ms",
                f"{traffic.waited * 1e3:.2f} ms",
            )
        count, size = str(traffic.count), show_bytes(traffic.bytes)
        table.add_row(traffic.kind, traffic.axes, traffic.link, count, size, *times)
    return table


def _matmul_table(plan: Plan) -> Table:
    title = "matmuls of the forward pass, with matmul_dtype='float8'"
    table = _table(title, [], ["count", "rows", "depth", "columns"])
    table.add_column("bits")
    for choice in plan.matmul_choices[:MAX_MATMULS]:
        sizes = (choice.rows, choice.depth, choice.columns)
        bits = f"as without: {choice.why_not}" if choice.why_not else "8"
        table.add_row(str(choice.count), *(f"{size:,}" for size in sizes), bits)
    return table


def _estimate_line(plan: Plan, times: Times) -> str:
    parts = [
        f"arithmetic {times.arithmetic * 1e3:.1f} ms",
        f"memory {times.memory * 1e3:.1f} ms",
    ]
    for axes, seconds in times.network.items():
        # Less would be shown as 0.0.
        if seconds > 5e-5:
            parts.append(f"waiting on {axes} {seconds * 1e3:.1f} ms")
    mfu = f", MFU {plan.mfu:.1%}" if plan.mfu is not None else ""
    return (
        f"estimate: [bold]{times.total * 1e3:.1f} ms[/] per step, bound by {times.bound} "
        f"({', '.join(parts)}); {plan.items_per_second:,.0f} {plan.unit}/s{mfu}"
    )


def show_cost(console: Console, plan: Plan, tokens: float) -> None:
    """Print the time and the chip-hours that a number of tokens (or images ...) takes."""
    amount = f"{show_count(tokens)} {plan.unit}"
    if plan.items_per_second is None:
        _print_line(
            console, f"{amount}: time unknown, because the speed of '{plan.chip}' is"
        )
        return
    seconds = tokens / plan.items_per_second
    chip_hours = seconds / 3600 * plan.num_devices
    per_month = math.ceil(plan.num_devices * seconds / SECONDS_PER_MONTH)
    _print_line(
        console,
        f"{amount}: {show_seconds(seconds)} on {plan.num_devices} chips, {chip_hours:,.0f} "
        f"chip-hours; at the same utilization, 30 days need {per_month} of these chips",
    )


def show_ranking(console: Console, result: Search) -> None:
    """Print the candidates of a search, best first."""
    title = f"{result.num_compiled} of {result.num_candidates} candidates compiled"
    table = _table(title, ["mesh", "options"], ["step", "per second", "MFU", "peak"])
    table.add_column("bound by, or reason")
    refused = [entry for entry in result.ranking if entry.status == Status.REFUSED]
    for entry in result.ranking:
        if entry.status != Status.REFUSED:
            style = None if entry.status == Status.COMPILED else "dim"
            table.add_row(*_ranking_cells(entry), style=style)
    console.print(table)
    if refused:
        names = ", ".join(f"'{show_candidate(entry.candidate)}'" for entry in refused)
        _print_line(
            console, f"not possible: {names}. Reason for the first: {refused[0].why}"
        )


def _ranking_cells(entry: Entry) -> list[str]:
    plan = entry.plan
    times = plan.times if plan is not None else None
    step = per_second = mfu = peak = bound = ""
    if plan is not None:
        peak = show_bytes(plan.memory.peak)
        mfu = f"{plan.mfu:.1%}" if plan.mfu is not None else ""
    if plan is not None and times is not None:
        step = f"{times.total * 1e3:.1f} ms"
        per_second = show_count(plan.items_per_second or 0)
        bound = times.bound
    reason = entry.why or bound
    if entry.status != Status.COMPILED:
        reason = f"{entry.status}: {reason}"
    return [
        entry.candidate.mesh,
        _show_options(entry.candidate),
        step,
        per_second,
        mfu,
        peak,
        reason,
    ]


def show_remedies(
    console: Console, plan: Plan, remedies: Iterable[tuple[str, Plan]]
) -> None:
    """Print what changes to a plan that does not fit would save.

    Args:
        console: where to print.
        plan: the plan that does not fit.
        remedies: the text of each change and the plan with it.
    """
    table = Table(title="changes that save memory", title_justify="left")
    for column in ("change", "saves", "peak", "", "step"):
        table.add_column(
            column, justify="left" if column in ("change", "") else "right"
        )
    for change, changed in remedies:
        saved = max(0.0, plan.memory.peak - changed.memory.peak)
        step = (
            f"{changed.times.total * 1e3:.1f} ms"
            if changed.times and changed.fits
            else ""
        )
        verdict = "fits" if changed.fits else "too large"
        table.add_row(
            change, show_bytes(saved), show_bytes(changed.memory.peak), verdict, step
        )
    console.print(table)


def show_candidate(candidate: Candidate) -> str:
    """Return a candidate as text, such as "data=4,model=2 remat=block"."""
    return f"{candidate.mesh} {_show_options(candidate)}".strip()


def _show_options(candidate: Candidate) -> str:
    """Return the options that have an effect."""
    options = [
        f"{name}={value}"
        for name, value in candidate.options
        if value not in (1, "none")
    ]
    return " ".join(options)

"""The layout of the parameters on the mesh, as a section of a plan and of a report."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardwise.plan.plan import Plan, PlannedLeaf
from shardwise.report.html import Cell, code, escape, row, section, table
from shardwise.report.mesh_drawing import draw_grid
from shardwise.report.plan_text import mesh_text, shape_text
from shardwise.text import TIMES, any_layer, show_bytes

MAX_LAYERS_LISTED = 6


@dataclass(frozen=True)
class LeafGroup:
    """Parameters that differ only in the number of their layer.

    Attributes:
        leaf: The first of them.
        paths: Paths of all of them.
        sharded_dims: For each sharded dim, the indices of the mesh axes that it is sharded over.
            Mesh axes of size 1 do not count.
    """

    leaf: PlannedLeaf
    paths: list[str]
    sharded_dims: dict[int, list[int]]

    @property
    def path(self) -> str:
        """The path, with "*" for the number of the layer if there are several."""
        return self.paths[0] if len(self.paths) == 1 else any_layer(self.paths[0])

    @property
    def bytes(self) -> float:
        """Bytes per device of all parameters in the group."""
        return self.leaf.bytes * len(self.paths)

    @property
    def mesh_axes(self) -> list[int]:
        """Indices of the mesh axes that the parameters are sharded over."""
        return [axis for axes in self.sharded_dims.values() for axis in axes]

    def num_shards(self, sizes: Sequence[int]) -> dict[int, int]:
        """Return the number of shards along each sharded dim of a mesh with these axis sizes."""
        return {
            dim: math.prod(sizes[axis] for axis in axes)
            for dim, axes in self.sharded_dims.items()
        }


def layout_section(plan: Plan) -> str:
    """Return the section: drawings of one parameter, and a table to choose another from.

    It is empty for a plan without parameters.
    """
    mesh = {name: size for name, size in plan.mesh.items() if size > 1}
    sizes = list(mesh.values())
    groups = _group_leaves(plan.leaves, list(mesh))
    if not groups:
        return ""
    groups.sort(key=lambda group: -group.bytes)
    chosen = groups[0]
    drawings: dict[str, str] = {}
    rows = []
    for group in groups:
        key = _drawing_key(group, sizes)
        # Parameters that are sharded alike share a drawing.
        if key not in drawings:
            drawings[key] = _draw_array(
                group, sizes, key, is_hidden=group is not chosen
            )
        rows.append(_leaf_row(group, mesh, key, is_chosen=group is chosen))
    drawn_mesh, num_hidden = _draw_mesh(mesh, chosen)
    columns = ["parameter", "array", "sharding and reason", "per device"]
    body = f"""<div class="drawing-and-table">
<div class="drawings" id="drawings">
<h3 id="chosen-name"><code>{escape(chosen.path)}</code></h3>
<p id="chosen-summary" aria-live="polite">{escape(_summarize(chosen, mesh))}</p>
<figure><figcaption>Array</figcaption>{"".join(drawings.values())}</figure>
<figure><figcaption>Shard on each device</figcaption>{drawn_mesh}
<p class="note">{escape(_mesh_note(plan, num_hidden))}</p></figure>
</div>
<div class="listing">
<div class="tools" hidden><label for="filter">Filter</label>
<input id="filter" type="search" placeholder="path, sharding or reason" autocomplete="off"
spellcheck="false"><output id="filter-count" for="filter"></output></div>
{table("Parameters and their sharding", columns, rows, name="leaves")}
<p class="note">{_count_note(len(plan.leaves), len(groups))}
<span class="keys" hidden>Use the arrow keys to move through the list.</span></p>
</div>
</div>"""
    return section("layout", "Parameter layout", body)


def _count_note(num_leaves: int, num_rows: int) -> str:
    if num_rows == num_leaves:
        return f"{num_leaves:,} parameters."
    return f"{num_leaves:,} parameters in {num_rows:,} rows; equal layers share a row."


def _mesh_note(plan: Plan, num_hidden: int) -> str:
    mesh = {name: size for name, size in plan.mesh.items() if size > 1}
    if not mesh:
        return "One device."
    product = f" {TIMES} ".join(f"{name} {size}" for name, size in mesh.items())
    note = f"{product} = {plan.num_devices} devices."
    if num_hidden:
        note += f" {num_hidden} of them are not drawn."
    ones = [name for name, size in plan.mesh.items() if size == 1]
    if ones:
        note += f" Axes of size 1: {', '.join(ones)}."
    return note


def _group_leaves(leaves: Iterable[PlannedLeaf], axes: list[str]) -> list[LeafGroup]:
    alike: dict[PlannedLeaf, list[PlannedLeaf]] = {}
    for leaf in leaves:
        alike.setdefault(replace(leaf, path=any_layer(leaf.path)), []).append(leaf)
    groups = []
    for same in alike.values():
        sharded_dims = {}
        for dim, names in enumerate(same[0].axes):
            indices = [axes.index(name) for name in names if name in axes]
            if indices:
                sharded_dims[dim] = indices
        groups.append(LeafGroup(same[0], [leaf.path for leaf in same], sharded_dims))
    return groups


def _leaf_row(group: LeafGroup, mesh: dict[str, int], key: str, is_chosen: bool) -> str:
    """Return the table row of a group. Its data attributes are what plan_page.js shows of it."""
    leaf, count = group.leaf, len(group.paths)
    path = code(group.path)
    size = show_bytes(group.bytes)
    if count > 1:
        path += f"<small>{escape(_layers_text(group.paths))}</small>"
        size += f"<small>{count} {TIMES} {show_bytes(leaf.bytes)}</small>"
    attributes = (
        f'data-axes="{" ".join(map(str, group.mesh_axes))}" data-array="{key}"'
        f' data-summary="{escape(_summarize(group, mesh))}"'
        f' aria-selected="{"true" if is_chosen else "false"}"'
    )
    cells: list[Cell] = [
        path,
        code(f"{leaf.dtype}{shape_text(leaf.shape)}"),
        f"{code(leaf.layout)}<small>{escape(leaf.why)}</small>",
        (group.bytes, size),
    ]
    return row(cells, attributes)


def _layers_text(paths: list[str]) -> str:
    """Return which layers the paths belong to, such as "80 layers: 0 to 79"."""
    by_part = zip(*(path.split("/") for path in paths), strict=True)
    differing = [parts for parts in by_part if len(set(parts)) > 1]
    if len(differing) != 1:
        return f"{len(paths)} alike"
    numbers = sorted(int(number) for number in differing[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{len(paths)} layers: {numbers[0]} to {numbers[-1]}"
    listed = ", ".join(map(str, numbers[:MAX_LAYERS_LISTED]))
    more = " …" if len(numbers) > MAX_LAYERS_LISTED else ""
    return f"{len(paths)} layers: {listed}{more}"


def _summarize(group: LeafGroup, mesh: dict[str, int]) -> str:
    """Return how a parameter is sharded, in one or two sentences."""
    names, sizes = list(mesh), list(mesh.values())
    shape, num_devices = group.leaf.shape, math.prod(sizes)
    size = show_bytes(group.leaf.bytes)
    if not group.sharded_dims:
        placement = (
            "Replicated on every device"
            if num_devices > 1
            else "Complete on one device"
        )
        return f"{placement}: {shape_text(shape)}, {size}."
    counts = group.num_shards(sizes)
    num_shards = math.prod(counts.values())
    # A dim that its axes do not divide is padded, so the shard is rounded up.
    shard = [-(-length // counts.get(dim, 1)) for dim, length in enumerate(shape)]
    num_copies = num_devices // num_shards
    copies = "each device has a different shard"
    if num_copies > 1:
        copies = f"each shard is on {num_copies} devices"
    dims = "; ".join(
        f"dim {dim} into {counts[dim]} over {' and '.join(names[axis] for axis in axes)}"
        for dim, axes in group.sharded_dims.items()
    )
    return (
        f"{shape_text(shape)} in {num_shards} shards of {shape_text(shard)}, {size} each; "
        f"{copies}. Sharded: {dims}."
    )


def _drawing_key(group: LeafGroup, sizes: list[int]) -> str:
    """Return a key that equally drawn arrays share: "1:2-2:4" is dim 1 in 2 and dim 2 in 4."""
    parts = [f"{dim}:{count}" for dim, count in group.num_shards(sizes).items()]
    return "-".join(parts) or "replicated"


def _draw_array(group: LeafGroup, sizes: list[int], key: str, is_hidden: bool) -> str:
    dims = {f"dim {dim}": count for dim, count in group.num_shards(sizes).items()}
    num_shards = math.prod(dims.values())
    label = (
        f"The array in {num_shards} shards"
        if num_shards > 1
        else "The array, not sharded"
    )
    attributes = f'class="array" data-array="{key}"{" hidden" if is_hidden else ""}'
    return draw_grid(dims, range(len(dims)), gaps=(1.0, 6.0, 12.0)).svg(
        attributes, label
    )


def _draw_mesh(mesh: dict[str, int], group: LeafGroup) -> tuple[str, int]:
    """Return the devices colored by the shard they hold, and how many of them are not drawn."""
    grid = draw_grid(mesh, group.mesh_axes, gaps=(3.0, 10.0, 18.0))
    name = mesh_text(mesh) or "one device"
    label = f"The mesh {name}; each device shows the number of the shard that it holds"
    sizes = ",".join(map(str, mesh.values()))
    attributes = f'class="mesh" id="mesh" data-sizes="{sizes}"'
    return grid.svg(attributes, label), math.prod(mesh.values()) - grid.num_cells

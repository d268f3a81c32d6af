"use strict";
// The parameter layout: choosing a parameter shows its array and which device holds which shard.

const leafRows = () => all("#leaves tbody tr");
const visibleLeafRows = () => leafRows().filter((row) => !row.hidden);

// mesh_drawing.py numbers and colors the shards of the first parameter in the same way.
function showShards(axes) {
  const mesh = $("#mesh");
  const sizes = mesh.dataset.sizes ? mesh.dataset.sizes.split(",").map(Number) : [];
  for (const cell of all(".cell", mesh)) {
    const coordinates = cell.dataset.at.split(",").map(Number);
    const shard = axes.reduce((before, axis) => before * sizes[axis] + coordinates[axis], 0);
    cell.dataset.shard = shard;
    cell.style.setProperty("--hue", ((210 + 137.5 * shard) % 360).toFixed(1));
    $("text", cell).textContent = axes.length ? shard : "●";
  }
}

function chooseLeaf(row) {
  for (const other of leafRows()) {
    other.ariaSelected = String(other === row);
    other.tabIndex = other === row ? 0 : -1;
  }
  $("#chosen-name code").textContent = $("code", row).textContent;
  $("#chosen-summary").textContent = row.dataset.summary;
  for (const drawing of all("svg.array")) {
    drawing.toggleAttribute("hidden", drawing.dataset.array !== row.dataset.array);
  }
  showShards(row.dataset.axes ? row.dataset.axes.split(" ").map(Number) : []);
}

const leafMoves = {
  ArrowDown: (i) => i + 1,
  ArrowUp: (i) => i - 1,
  Home: () => 0,
  End: () => Infinity,
};

function pressKeyOnLeaf(event, row) {
  if (event.key === "Enter" || event.key === " ") {
    chooseLeaf(row);
  } else if (leafMoves[event.key]) {
    const rows = visibleLeafRows();
    const target = leafMoves[event.key](rows.indexOf(row));
    const next = rows[Math.max(0, Math.min(rows.length - 1, target))];
    chooseLeaf(next);
    next.focus();
  } else {
    return;
  }
  event.preventDefault();
}

function filterLeaves(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = leafRows();
  for (const row of rows) {
    const content = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => content.includes(word));
    row.tabIndex = -1;
  }
  // The Tab key reaches one row: the chosen one if it is visible.
  const visible = visibleLeafRows();
  const reachable = visible.find((row) => row.ariaSelected === "true") ?? visible[0];
  if (reachable) reachable.tabIndex = 0;
  $("#filter-count").textContent = words.length ? `${visible.length} of ${rows.length}` : "";
}

// All cells of the shard under the pointer stand out, in the array and in the mesh.
function highlightShard(drawings, event) {
  const cell = event.type === "pointerover" ? event.target.closest(".cell") : null;
  for (const other of all(".cell", drawings)) {
    other.classList.toggle("same", other.dataset.shard === cell?.dataset.shard);
  }
}

enhancers.push((root) => {
  if (!$("#leaves", root)) return;
  const rows = leafRows();
  $("#leaves").setAttribute("role", "grid");
  unhide($(".listing .keys"));
  chooseLeaf(rows.find((row) => row.ariaSelected === "true") ?? rows[0]);
  for (const row of rows) {
    row.addEventListener("click", () => { chooseLeaf(row); row.focus(); });
    row.addEventListener("keydown", (event) => pressKeyOnLeaf(event, row));
  }
  const drawings = $("#drawings");
  for (const type of ["pointerover", "pointerleave"]) {
    drawings.addEventListener(type, (event) => highlightShard(drawings, event));
  }
  const filter = $("#filter");
  unhide(filter.parentElement);
  filter.addEventListener("input", () => filterLeaves(filter.value));
});

// The ranking: showing only layouts with some statuses

function filterRanking(statuses) {
  const wanted = new Set(all("input:checked", statuses).map((box) => box.value));
  for (const marked of all("#ranking [data-status]")) {
    marked.toggleAttribute("hidden", !wanted.has(marked.dataset.status));
  }
  const rows = all("#candidates tbody tr");
  const visible = rows.filter((row) => !row.hidden);
  const isFiltered = visible.length < rows.length;
  $("#ranking-count").textContent = isFiltered ? `${visible.length} of ${rows.length}` : "";
}

enhancers.push((root) => {
  const statuses = $("#statuses", root);
  if (!statuses) return;
  unhide(statuses);
  statuses.addEventListener("change", () => filterRanking(statuses));
});

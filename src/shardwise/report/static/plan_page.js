"use strict";
// How parameters are cut: choosing one
enhancers.push((root) => {
  if (!$("#leaves", root)) return;
  const mesh = $("#mesh");
  const rows = all("#leaves tbody tr");
  const sizes = mesh && mesh.dataset.sizes ? mesh.dataset.sizes.split(",").map(Number) : [];

  function choose(row) {
    for (const other of rows) {
      other.ariaSelected = String(other === row);
      other.tabIndex = other === row ? 0 : -1;
    }
    $("#chosen-name code").textContent = $("code", row).textContent;
    $("#chosen-said").textContent = row.dataset.said;
    for (const picture of all("svg.array")) picture.toggleAttribute("hidden", picture.dataset.array !== row.dataset.array);
    const axes = row.dataset.axes ? row.dataset.axes.split(" ").map(Number) : [];
    for (const cell of all(".cell", mesh)) {
      const at = cell.dataset.at.split(",").map(Number);
      const piece = axes.reduce((before, axis) => before * sizes[axis] + at[axis], 0);
      cell.dataset.piece = piece;
      cell.style.setProperty("--hue", ((210 + 137.5 * piece) % 360).toFixed(1));
      $("text", cell).textContent = axes.length ? piece : "●";
    }
  }

  const shown = () => all("#leaves tbody tr").filter((row) => !row.hidden);
  const moves = { ArrowDown: (i) => i + 1, ArrowUp: (i) => i - 1, Home: () => 0, End: () => Infinity };
  if (rows.length) {
    $("#leaves").setAttribute("role", "grid");
    unhide($(".keys"));
    choose(rows.find((row) => row.ariaSelected === "true") ?? rows[0]);
    for (const row of rows) {
      row.addEventListener("click", () => { choose(row); row.focus(); });
      row.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          choose(row);
          event.preventDefault();
        } else if (moves[event.key]) {
          const list = shown();
          const next = list[Math.max(0, Math.min(list.length - 1, moves[event.key](list.indexOf(row))))];
          choose(next);
          next.focus();
          event.preventDefault();
        }
      });
    }
  }

  // All cells of the piece under the pointer stand out
  const pictures = $("#pictures");
  if (pictures) {
    const mark = (event) => {
      const piece = event.type === "pointerover" ? event.target.closest(".cell")?.dataset.piece : undefined;
      for (const cell of all(".cell", pictures)) cell.classList.toggle("same", cell.dataset.piece === piece);
    };
    pictures.addEventListener("pointerover", mark);
    pictures.addEventListener("pointerleave", mark);
  }

  // The filter
  const find = $("#find");
  if (find) {
    unhide(find.parentElement);
    find.addEventListener("input", () => {
      const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      const list = shown();
      for (const row of rows) row.tabIndex = -1;
      if (list.length) (list.find((row) => row.ariaSelected === "true") ?? list[0]).tabIndex = 0;
      $("#found").textContent = words.length ? `${list.length} of ${rows.length}` : "";
    });
  }
});

// The ranking
enhancers.push((root) => {
  const statuses = $("#statuses", root);
  if (statuses) {
    unhide(statuses);
    statuses.addEventListener("change", () => {
      const wanted = new Set(all("input:checked", statuses).map((box) => box.value));
      for (const marked of all("#ranking [data-status]")) marked.toggleAttribute("hidden", !wanted.has(marked.dataset.status));
      const candidates = all("#candidates tbody tr");
      const list = candidates.filter((row) => !row.hidden);
      $("#ranked").textContent = list.length < candidates.length ? `${list.length} of ${candidates.length}` : "";
    });
  }
});

"use strict";
// What all pages share. A page's own script adds to `enhancers`; each is called with whatever is new on the page.
const $ = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const unhide = (element) => { if (element) element.hidden = false; };
const enhancers = [];
const enhance = (root) => { for (const enhancer of enhancers) enhancer(root); };

// The command
enhancers.push((root) => {
  const copy = $("#copy", root);
  if (!copy) return;
  unhide(copy);
  copy.addEventListener("click", async () => {
    const code = $("#command");
    try {
      await navigator.clipboard.writeText(code.textContent);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      copy.textContent = document.execCommand("copy") ? "Copied" : "Selected";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  });
});

// Sorting by a click on the head of a column; rows of totals stay last
enhancers.push((root) => {
  for (const table of all("table", root)) {
    const body = table.tBodies[0];
    all("th", table).forEach((head, column) => {
      const number = body.rows[0]?.cells[column]?.matches(".num");
      if (number) head.classList.add("num");
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const now = head.ariaSort;
        const rising = now ? now === "descending" : !number;
        all("th", table).forEach((other) => { other.ariaSort = null; });
        head.ariaSort = rising ? "ascending" : "descending";
        const key = (row) => number ? row.cells[column].dataset.key : row.cells[column].textContent;
        const compare = (a, b) => {
          const [x, y] = [key(a), key(b)];
          if (!number) return (rising ? 1 : -1) * x.localeCompare(y, undefined, { numeric: true });
          if (x === "" || y === "") return (x === "") - (y === "");
          return (rising ? 1 : -1) * (x - y);
        };
        const rows = [...body.rows];
        const total = rows.filter((row) => row.matches(".total"));
        body.append(...rows.filter((row) => !row.matches(".total")).sort(compare), ...total);
      });
    });
  }
});

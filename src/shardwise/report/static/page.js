"use strict";
// What all pages share. The script of a page adds functions to `enhancers`. Each is called with
// the document, and with every section that replaces an older one on a live page.
const $ = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const unhide = (element) => { if (element) element.hidden = false; };
const enhancers = [];
const enhance = (root) => { for (const enhancer of enhancers) enhancer(root); };

// Copying the command

async function copyCommand(button) {
  const code = $("#command");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    // A page that was opened from a file may have no access to the clipboard.
    getSelection().selectAllChildren(code);
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

enhancers.push((root) => {
  const button = $("#copy", root);
  if (!button) return;
  unhide(button);
  button.addEventListener("click", () => copyCommand(button));
});

// Sorting tables by a click on a column heading

function compareRows(column, isNumeric, isAscending) {
  const sign = isAscending ? 1 : -1;
  return (a, b) => {
    const [cellA, cellB] = [a.cells[column], b.cells[column]];
    if (!isNumeric) {
      return sign * cellA.textContent.localeCompare(cellB.textContent, undefined, { numeric: true });
    }
    const [keyA, keyB] = [cellA.dataset.key, cellB.dataset.key];
    // Unknown numbers come last in both orders.
    if (keyA === "" || keyB === "") return (keyA === "") - (keyB === "");
    return sign * (keyA - keyB);
  };
}

function sortTable(table, column, isNumeric) {
  const heading = table.tHead.rows[0].cells[column];
  // Numbers start with the largest, text with the first in the alphabet; another click reverses.
  const isAscending = heading.ariaSort ? heading.ariaSort === "descending" : !isNumeric;
  for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
  heading.ariaSort = isAscending ? "ascending" : "descending";
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const totals = rows.filter((row) => row.matches(".total"));
  const others = rows.filter((row) => !row.matches(".total"));
  body.append(...others.sort(compareRows(column, isNumeric, isAscending)), ...totals);
}

enhancers.push((root) => {
  for (const table of all("table", root)) {
    all("th", table).forEach((heading, column) => {
      const isNumeric = Boolean(table.tBodies[0].rows[0]?.cells[column]?.matches(".num"));
      if (isNumeric) heading.classList.add("num");
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = heading.textContent;
      heading.replaceChildren(button);
      button.addEventListener("click", () => sortTable(table, column, isNumeric));
    });
  }
});

"use strict";
// Refreshes the page of a running run: fetches the page again and replaces the sections that
// changed. What the reader has opened, focused, chosen and scrolled to stays as it is.

// Returns the way from a section to an element in it, as indices of children.
function pathTo(element, section) {
  const path = [];
  for (let at = element; at !== section; at = at.parentElement) {
    path.unshift([...at.parentElement.children].indexOf(at));
  }
  return path;
}

const elementAt = (path, section) => path.reduce((at, index) => at?.children[index], section);

function replaceSection(old, next) {
  const wasOpen = all("details", old).map((details) => details.open);
  all("details", next).forEach((details, i) => {
    if (i < wasOpen.length) details.open = wasOpen[i];
  });
  const active = document.activeElement;
  const focusPath = old.contains(active) ? pathTo(active, old) : null;
  const [scrolled, cursor] = [scrollY, { ...view.cursor }];
  old.replaceWith(next);
  // An element that is removed loses the focus, which clears the cursor of its chart.
  view.cursor = cursor;
  enhance(next);
  if (focusPath) elementAt(focusPath, next)?.focus({ preventScroll: true });
  scrollTo(scrollX, scrolled);
}

function watch(seconds) {
  // Sections as the server sent them; scripts have changed those on the page.
  const known = new Map(all("main > section").map((section) => [section.id, section.outerHTML]));
  let tag = "";

  const updateSections = (page) => {
    for (const section of all("main > section", page)) {
      if (known.get(section.id) === section.outerHTML) continue;
      known.set(section.id, section.outerHTML);
      const old = document.getElementById(section.id);
      const next = document.importNode(section, true);
      if (old) {
        replaceSection(old, next);
      } else {
        $("main").append(next);
        enhance(next);
      }
    }
    document.title = page.title;
  };

  const fetchPage = async () => {
    const headers = tag ? { "If-None-Match": tag } : {};
    const answer = await fetch(location.pathname, { headers, cache: "no-store" });
    if (answer.status === 304) return;
    if (answer.status !== 200) throw new Error(String(answer.status));
    tag = answer.headers.get("ETag") ?? "";
    updateSections(new DOMParser().parseFromString(await answer.text(), "text/html"));
  };

  const refresh = async () => {
    try {
      await fetchPage();
      const now = new Date().toLocaleTimeString();
      $("#live").textContent = `Refreshes while the run continues; last refresh at ${now}.`;
    } catch {
      $("#live").textContent = "The report is no longer served; this is its last state.";
    }
    setTimeout(refresh, 1000 * seconds);
  };
  setTimeout(refresh, 1000 * seconds);
}

if (document.body.dataset.watch) watch(Number(document.body.dataset.watch));

"use strict";
// Curves: reading, zooming, smoothing, other axes; and the page again while a run goes on

// Markup comes from numbers and fixed names alone, never from a label
function redraw(figure) {
  const chart = charts[figure.dataset.chart];
  if (!chart) return;
  const plot = $(".plot", figure);
  const width = Math.max(260, Math.round(plot.clientWidth) || 620);
  const drawn = draw(chart, width);
  const svg = $("svg", plot);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.classList.add("drawn");
  svg.innerHTML = drawn.markup + '<g class="over"></g>';
  if (state.x === "units") $(".across", svg).textContent = axes.units.label.length < 9 ? axes.units.label : "units";
  const over = { step: "a step", units: `a number of ${axes.units?.label}`, time: "a time" }[state.x];
  if (plot.getAttribute("role") === "slider") plot.setAttribute("aria-label", `${$("h3", figure).textContent}: values at ${over}`);
  figure.drawn = drawn;
  $(".outside", figure).hidden = !drawn.outside;
  $(".outside .count", figure).textContent = drawn.outside.toLocaleString("en");
  const box = $(".every", figure);
  if (drawn.outside) unhide(box);
  for (const item of all(".readout li", figure)) item.hidden = state.off.has(Number(item.dataset.run));
  point(figure, state.at[chart.name] ?? null);
}

const redrawAll = () => { for (const figure of all(".chart")) redraw(figure); };

function showPlace(value) {
  if (state.x === "step") return `step ${Math.round(value).toLocaleString("en")}`;
  if (state.x === "units") return `${showNumber(value)} ${axes.units.label}`;
  if (value < 100) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  const [minutes, seconds] = [Math.floor(whole / 60) % 60, whole % 60].map((part) => String(part).padStart(2, "0"));
  return `${Math.floor(whole / 3600).toLocaleString("en")}:${minutes}:${seconds}`;
}

// The values at a place of the axis: at the point nearest to it of every curve
function point(figure, place) {
  const { across, up, shown, left, right } = figure.drawn;
  const chart = charts[figure.dataset.chart];
  state.at[chart.name] = place;
  const here = place === null ? right : place;
  const marks = [];
  const said = [];
  let step = null; // of the first curve
  for (const { series, x, line, from, to } of shown) {
    if (to <= from) continue;
    let [low, high] = [from, to - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] <= here) low = middle; else high = middle;
    }
    const near = Math.abs(x[high] - here) < Math.abs(x[low] - here) ? high : low;
    step ??= Math.round(series.x[near]);
    let text = showNumber(series.y[near]);
    if (series.low && place !== null) text += ` (${showNumber(series.low[near])} to ${showNumber(series.high[near])})`;
    $(`[data-series="${chart.series.indexOf(series)}"]`, figure).textContent = text;
    said.push(`${series.label} ${text}`);
    if (place !== null) marks.push(`<circle class="dot s${series.style % 8}" r="4" cx="${across(x[near]).toFixed(1)}" cy="${up(line[near])}"/>`);
  }
  const isOne = shown.every(({ series }) => series.run === shown[0].series.run);
  const which = state.x !== "step" && isOne && step !== null ? `, step ${step.toLocaleString("en")}` : "";
  $(".at", figure).textContent = place === null ? "" : showPlace(place) + which;
  const cursor = place === null ? "" : `<path class="cursor" d="M${across(place).toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}"/>`;
  $(".over", figure).innerHTML = cursor + marks.join("");
  const plot = $(".plot", figure);
  if (plot.getAttribute("role") === "slider") {
    plot.setAttribute("aria-valuemin", Math.round(left));
    plot.setAttribute("aria-valuemax", Math.round(right));
    plot.setAttribute("aria-valuenow", Math.round(here));
    plot.setAttribute("aria-valuetext", `${state.x === "step" ? `step ${Math.round(here)}` : showPlace(here) + which}: ${said.join(", ")}`);
  }
}

function zoom(range) {
  const [least, most] = ends(Object.values(charts).flatMap((chart) => chart.series));
  const narrowest = state.x === "step" ? 1 : (most - least) / 1e5;
  if (range) {
    range = [Math.max(least, Math.min(...range)), Math.min(most, Math.max(...range))];
    if (range[1] - range[0] < narrowest) range = state.zoom;
    else if (range[0] <= least && range[1] >= most) range = null;
  }
  state.zoom = range;
  const button = $("#whole");
  if (button) {
    button.disabled = !range;
    const name = state.x === "step" ? "Show all steps" : "Show all";
    const shown = range?.map((end) => state.x === "step" ? Math.round(end).toLocaleString("en") : showPlace(end));
    button.textContent = shown ? `${name} (now ${shown.join(" to ")})` : name;
  }
  redrawAll();
}

function zoomBy(figure, factor) {
  const { left, right } = figure.drawn;
  const middle = state.at[figure.dataset.chart] ?? (left + right) / 2;
  zoom([middle - (middle - left) * factor, middle + (right - middle) * factor]);
}

function stops(figure) {
  return [...new Set(figure.drawn.shown.flatMap(({ x, from, to }) => x.slice(from, to)))].sort((a, b) => a - b);
}

// What the curves are drawn over is kept behind the address: #curves&x=time, or #x=units
const inAddress = () => location.hash.slice(1).split("&").filter(Boolean);
const chosenAxis = () => inAddress().find((part) => part.startsWith("x="))?.slice(2);
const isAxis = (x) => x === "step" || Object.hasOwn(axes, x ?? "");
const chosenSection = () => inAddress().find((part) => !part.startsWith("x="));

function noteAxis() {
  const parts = [chosenSection(), state.x === "step" ? "" : `x=${state.x}`].filter(Boolean).join("&");
  history.replaceState(null, "", location.href.split("#")[0] + (parts ? `#${parts}` : ""));
}

function drawOver(x) {
  if (x === state.x) return;
  const runs = new Set(Object.values(charts).flatMap((chart) => chart.series.map((series) => series.run)));
  let range = null;
  if (state.zoom && runs.size === 1) { // of several runs the same steps are not at the same place
    const [run] = runs;
    const known = axes[state.x]?.runs[run];
    range = state.zoom.map((end) => known ? between(known.at, known.steps, end) : end);
    state.x = x;
    range = range.map((step) => atStep(run, step));
  }
  state.x = x;
  state.at = {};
  state.zoom = null;
  for (const radio of all("input[name=x]")) radio.checked = radio.value === x;
  zoom(range);
}

addEventListener("hashchange", () => {
  const x = chosenAxis();
  if (isAxis(x)) drawOver(x);
  noteAxis(); // a link to a section has none in it
});

function operate(figure) {
  const chart = charts[figure.dataset.chart];
  const plot = $(".plot", figure);
  plot.setAttribute("role", "slider");
  plot.setAttribute("tabindex", "0");
  plot.setAttribute("aria-orientation", "horizontal");
  unhide($(".switches", figure));
  const log = $(".log", figure);
  if (log) log.checked = Boolean(state.log[chart.name]);
  log?.addEventListener("change", () => { state.log[chart.name] = log.checked; redraw(figure); });
  const every = $(".everything", figure);
  every.checked = Boolean(state.every[chart.name]);
  if (every.checked) unhide($(".every", figure));
  every.addEventListener("change", () => { state.every[chart.name] = every.checked; redraw(figure); });

  const placeAt = (event) => {
    const box = plot.getBoundingClientRect();
    const { left, right, width } = figure.drawn;
    const x = (event.clientX - box.left) * width / box.width;
    return Math.min(right, Math.max(left, left + (right - left) * (x - LEFT) / (width - LEFT - RIGHT)));
  };
  let begin = null;
  plot.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.pointerType !== "touch") {
      begin = placeAt(event);
      plot.setPointerCapture(event.pointerId);
    }
    point(figure, placeAt(event));
  });
  plot.addEventListener("pointermove", (event) => {
    point(figure, placeAt(event));
    if (begin === null) return;
    const [a, b] = [begin, placeAt(event)].map(figure.drawn.across).sort((x, y) => x - y);
    $(".over", figure).insertAdjacentHTML("beforeend",
      `<rect class="chosen-range" x="${a.toFixed(1)}" y="${TOP}" width="${(b - a).toFixed(1)}" height="${HEIGHT - TOP - BOTTOM}"/>`);
  });
  plot.addEventListener("pointerup", (event) => {
    const end = placeAt(event);
    const from = begin;
    begin = null;
    if (from !== null && Math.abs(figure.drawn.across(end) - figure.drawn.across(from)) > 8) zoom([from, end]);
  });
  plot.addEventListener("pointercancel", () => { begin = null; });
  plot.addEventListener("pointerleave", () => { if (begin === null && document.activeElement !== plot) point(figure, null); });
  plot.addEventListener("blur", () => point(figure, null));
  plot.addEventListener("dblclick", () => zoom(null));
  plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const list = stops(figure);
    const now = state.at[chart.name] ?? list[list.length - 1];
    let i = list.findIndex((place) => place >= now);
    if (i < 0) i = list.length - 1;
    const moves = {
      ArrowLeft: i - 1, ArrowDown: i - 1, ArrowRight: i + 1, ArrowUp: i + 1, PageDown: i - 10, PageUp: i + 10, Home: 0, End: list.length - 1,
    };
    if (event.key in moves) point(figure, list[Math.max(0, Math.min(list.length - 1, moves[event.key]))]);
    else if (event.key === "+" || event.key === "=") zoomBy(figure, 0.5);
    else if (event.key === "-" || event.key === "\u2212") zoomBy(figure, 2);
    else if (event.key === "0" || event.key === "Escape") zoom(null);
    else return;
    event.preventDefault();
  });
}

enhancers.push((root) => {
  const data = $("#data", root);
  if (!data) return;
  const found = JSON.parse(data.textContent);
  charts = Object.fromEntries(found.charts.map((chart) => [chart.name, chart]));
  axes = Object.fromEntries(found.axes.map((axis) => [axis.key, axis]));
  const asked = root === document ? chosenAxis() : state.x;
  state.x = isAxis(asked) ? asked : "step";
  for (const radio of all("input[name=x]")) {
    radio.checked = radio.value === state.x;
    radio.addEventListener("change", () => { drawOver(radio.value); noteAxis(); });
  }
  state.smooth ??= found.smooth;
  unhide($(".curves-tools"));
  unhide($("#how"));
  const slider = $("#smooth");
  const said = () => {
    slider.value = 100 * state.smooth;
    $("#smoothed").textContent = state.smooth ? `${100 * state.smooth} %` : "none";
    slider.setAttribute("aria-valuetext", state.smooth ? `${100 * state.smooth} percent of the points` : "none");
  };
  said();
  slider.addEventListener("input", () => { state.smooth = slider.value / 100; said(); redrawAll(); });
  $("#whole").addEventListener("click", () => zoom(null));
  for (const box of all("input.run")) {
    box.checked = !state.off.has(Number(box.value));
    box.addEventListener("change", () => {
      state.off[box.checked ? "delete" : "add"](Number(box.value));
      redrawAll();
    });
  }
  for (const figure of all(".chart")) {
    operate(figure);
    redraw(figure);
  }
  zoom(state.zoom);
  if (root === document && chosenAxis()) document.getElementById(chosenSection())?.scrollIntoView();
});

let wide = 0;
addEventListener("resize", () => {
  if (innerWidth !== wide) redrawAll();
  wide = innerWidth;
});

// While a run goes on: the same page again, section by section where it has changed
if (document.body.dataset.watch) {
  const known = new Map(all("main > section").map((section) => [section.id, section.outerHTML]));
  let tag = "";
  const refresh = async () => {
    const live = $("#live");
    try {
      const answer = await fetch(location.pathname, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status !== 200 && answer.status !== 304) throw new Error(String(answer.status));
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") ?? "";
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        update(page);
        document.title = page.title;
      }
      live.textContent = `Refreshed while the run goes on; last at ${new Date().toLocaleTimeString()}.`;
    } catch {
      live.textContent = "The report is no longer served; this is its last state.";
    }
    setTimeout(refresh, 1000 * Number(document.body.dataset.watch));
  };

  const update = (page) => {
    const main = $("main");
    for (const section of all("main > section", page)) {
      const markup = section.outerHTML;
      if (known.get(section.id) === markup) continue;
      known.set(section.id, markup);
      const old = document.getElementById(section.id);
      const next = document.importNode(section, true);
      if (old) {
        const open = all("details", old).map((one) => one.open);
        const active = old.contains(document.activeElement) ? path(document.activeElement, old) : null;
        const [at, points] = [scrollY, { ...state.at }];
        all("details", next).forEach((one, i) => { if (i < open.length) one.open = open[i]; });
        old.replaceWith(next);
        state.at = points; // what is taken away loses its focus, and with it the step that was read
        enhance(next);
        if (active) follow(active, next)?.focus({ preventScroll: true });
        scrollTo(scrollX, at);
      } else {
        main.append(next);
        enhance(next);
      }
    }
  };

  // Where an element stands in its section, by the numbers of children on the way
  const path = (element, root) => {
    const found = [];
    for (let at = element; at !== root; at = at.parentElement) found.unshift([...at.parentElement.children].indexOf(at));
    return found;
  };
  const follow = (numbers, root) => numbers.reduce((at, number) => at?.children[number], root);
  setTimeout(refresh, 1000 * Number(document.body.dataset.watch));
}

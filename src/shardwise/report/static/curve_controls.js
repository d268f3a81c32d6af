"use strict";
// Operates the charts: reading values, zooming, smoothing, choosing runs and the x axis.

const isOverSteps = () => view.xAxis === "step";

// Drawing a chart into its figure

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
  if (view.xAxis === "units") {
    // The label comes from the run, so it is set as text. A long one does not fit.
    const { label } = axes.units;
    $(".across", svg).textContent = label.length < 9 ? label : "units";
  }
  figure.drawn = drawn;
  labelPlot(figure);
  noteOutliers(figure, drawn.numOutside);
  for (const entry of all(".readout li", figure)) {
    entry.hidden = view.hiddenRuns.has(Number(entry.dataset.run));
  }
  moveCursor(figure, view.cursor[chart.name] ?? null);
}

const redrawAll = () => { for (const figure of all(".chart")) redraw(figure); };

function labelPlot(figure) {
  const place = { step: "a step", units: `a number of ${axes.units?.label}`, time: "a time" };
  const title = $("h3", figure).textContent;
  $(".plot", figure).setAttribute("aria-label", `${title}: values at ${place[view.xAxis]}`);
}

function noteOutliers(figure, count) {
  const note = $(".outside", figure);
  note.hidden = !count;
  const verb = count === 1 ? "value is" : "values are";
  note.textContent = `${count.toLocaleString("en")} ${verb} outside the drawing.`;
  if (count) unhide($(".outliers", figure));
}

// Reading values

function showPosition(value) {
  if (isOverSteps()) return `step ${Math.round(value).toLocaleString("en")}`;
  if (view.xAxis === "units") return `${showNumber(value)} ${axes.units.label}`;
  if (value < 100) return `${value.toFixed(1)} s`;
  const total = Math.round(value);
  const parts = [Math.floor(total / 60) % 60, total % 60];
  const [minutes, seconds] = parts.map((part) => String(part).padStart(2, "0"));
  return `${Math.floor(total / 3600).toLocaleString("en")}:${minutes}:${seconds}`;
}

// Returns the index of the point of a curve that is nearest to a position.
function nearestPoint({ x, from, to }, position) {
  let [low, high] = [from, to - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= position) low = middle; else high = middle;
  }
  return Math.abs(x[high] - position) < Math.abs(x[low] - position) ? high : low;
}

// Shows the values at a position, or the last values if it is null.
function moveCursor(figure, position) {
  const { toX, toY, visible, left, right } = figure.drawn;
  const chart = charts[figure.dataset.chart];
  view.cursor[chart.name] = position;
  const target = position ?? right;
  const dots = [];
  const values = [];
  let firstStep = null;
  for (const curve of visible) {
    const { series, x, line, from, to } = curve;
    if (to <= from) continue;
    const i = nearestPoint(curve, target);
    firstStep ??= Math.round(series.x[i]);
    let text = showNumber(series.y[i]);
    if (series.low && position !== null) {
      text += ` (${showNumber(series.low[i])} to ${showNumber(series.high[i])})`;
    }
    $(`[data-series="${chart.series.indexOf(series)}"]`, figure).textContent = text;
    values.push(`${series.label} ${text}`);
    if (position !== null) {
      const center = `cx="${toX(x[i]).toFixed(1)}" cy="${toY(line[i])}"`;
      dots.push(`<circle class="dot ${series.color}" r="4" ${center}/>`);
    }
  }
  let place = showPosition(target);
  // Several runs reach the same time at different steps.
  const isOneRun = visible.every(({ series }) => series.run === visible[0].series.run);
  if (!isOverSteps() && isOneRun && firstStep !== null) {
    place += `, step ${firstStep.toLocaleString("en")}`;
  }
  $(".at", figure).textContent = position === null ? "" : place;
  const line = `M${toX(target).toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}`;
  const cursor = position === null ? "" : `<path class="cursor" d="${line}"/>`;
  $(".over", figure).innerHTML = cursor + dots.join("");
  const plot = $(".plot", figure);
  plot.setAttribute("aria-valuemin", Math.round(left));
  plot.setAttribute("aria-valuemax", Math.round(right));
  plot.setAttribute("aria-valuenow", Math.round(target));
  plot.setAttribute("aria-valuetext", `${place}: ${values.join(", ")}`);
}

// Zooming. All charts show the same range.

const allSeries = () => Object.values(charts).flatMap((chart) => chart.series);

function zoomTo(range) {
  const [least, most] = xRange(allSeries());
  const narrowest = isOverSteps() ? 1 : (most - least) / 1e5;
  if (range) {
    range = [Math.max(least, Math.min(...range)), Math.min(most, Math.max(...range))];
    if (range[1] - range[0] < narrowest) range = view.zoom;
    else if (range[0] <= least && range[1] >= most) range = null;
  }
  view.zoom = range;
  labelShowAll();
  redrawAll();
}

function labelShowAll() {
  const button = $("#show-all");
  button.disabled = !view.zoom;
  const name = isOverSteps() ? "Show all steps" : "Show all";
  const format = isOverSteps() ? (end) => Math.round(end).toLocaleString("en") : showPosition;
  const range = view.zoom?.map(format).join(" to ");
  button.textContent = range ? `${name} (now ${range})` : name;
}

function zoomBy(figure, factor) {
  const { left, right } = figure.drawn;
  const center = view.cursor[figure.dataset.chart] ?? (left + right) / 2;
  zoomTo([center - (center - left) * factor, center + (right - center) * factor]);
}

// The x axis. The choice is kept in the address: #x=units, or with a section, #curves&x=time.

const addressParts = () => location.hash.slice(1).split("&").filter(Boolean);
const axisInAddress = () => addressParts().find((part) => part.startsWith("x="))?.slice(2);
const sectionInAddress = () => addressParts().find((part) => !part.startsWith("x="));
const isKnownAxis = (key) => key === "step" || Object.hasOwn(axes, key ?? "");

function keepAxisInAddress() {
  const axis = isOverSteps() ? "" : `x=${view.xAxis}`;
  const hash = [sectionInAddress(), axis].filter(Boolean).join("&");
  history.replaceState(null, "", location.href.split("#")[0] + (hash ? `#${hash}` : ""));
}

function checkAxisButtons() {
  for (const radio of all("input[name=x]")) radio.checked = radio.value === view.xAxis;
}

function chooseAxis(key) {
  if (key === view.xAxis) return;
  const runs = new Set(allSeries().map((series) => series.run));
  let range = null;
  // The same steps stay in view. Those of several runs are at different times.
  if (view.zoom && runs.size === 1) {
    const [run] = runs;
    const steps = view.zoom.map((position) => stepAtPosition(run, position));
    view.xAxis = key;
    range = steps.map((step) => positionOfStep(run, step));
  }
  view.xAxis = key;
  view.cursor = {};
  view.zoom = null;
  checkAxisButtons();
  zoomTo(range);
}

addEventListener("hashchange", () => {
  const key = axisInAddress();
  if (isKnownAxis(key)) chooseAxis(key);
  // A link to a section has no axis in it; it is added again.
  keepAxisInAddress();
});

// Pointer and keyboard

function positionUnderPointer(figure, event) {
  const box = $(".plot", figure).getBoundingClientRect();
  const { left, right, width } = figure.drawn;
  const x = (event.clientX - box.left) * width / box.width;
  const position = left + (right - left) * (x - LEFT) / (width - LEFT - RIGHT);
  return Math.min(right, Math.max(left, position));
}

function drawSelection(figure, begin, end) {
  const [from, to] = [begin, end].map(figure.drawn.toX).sort((a, b) => a - b);
  const area = `x="${from.toFixed(1)}" width="${(to - from).toFixed(1)}"`;
  $(".over", figure).insertAdjacentHTML("beforeend",
    `<rect class="chosen-range" ${area} y="${TOP}" height="${HEIGHT - TOP - BOTTOM}"/>`);
}

function listenToPointer(figure) {
  const plot = $(".plot", figure);
  let begin = null; // where dragging began
  plot.addEventListener("pointerdown", (event) => {
    // A finger that moves across a chart scrolls the page.
    if (event.button === 0 && event.pointerType !== "touch") {
      begin = positionUnderPointer(figure, event);
      plot.setPointerCapture(event.pointerId);
    }
    moveCursor(figure, positionUnderPointer(figure, event));
  });
  plot.addEventListener("pointermove", (event) => {
    const position = positionUnderPointer(figure, event);
    moveCursor(figure, position);
    if (begin !== null) drawSelection(figure, begin, position);
  });
  plot.addEventListener("pointerup", (event) => {
    const [from, to] = [begin, positionUnderPointer(figure, event)];
    begin = null;
    // A shorter movement is a click.
    const { toX } = figure.drawn;
    if (from !== null && Math.abs(toX(to) - toX(from)) > 8) zoomTo([from, to]);
  });
  plot.addEventListener("pointercancel", () => { begin = null; });
  plot.addEventListener("pointerleave", () => {
    if (begin === null && document.activeElement !== plot) moveCursor(figure, null);
  });
  plot.addEventListener("dblclick", () => zoomTo(null));
}

// Moves the cursor by points of the curves. Returns whether the key is one that does so.
function moveByKey(figure, key) {
  const points = figure.drawn.visible.flatMap(({ x, from, to }) => x.slice(from, to));
  const stops = [...new Set(points)].sort((a, b) => a - b);
  const last = stops.length - 1;
  const now = view.cursor[figure.dataset.chart] ?? stops[last];
  const found = stops.findIndex((position) => position >= now);
  const i = found < 0 ? last : found;
  const moves = {
    ArrowLeft: i - 1, ArrowDown: i - 1, ArrowRight: i + 1, ArrowUp: i + 1,
    PageDown: i - 10, PageUp: i + 10, Home: 0, End: last,
  };
  if (!(key in moves)) return false;
  moveCursor(figure, stops[Math.max(0, Math.min(last, moves[key]))]);
  return true;
}

function listenToKeys(figure) {
  const plot = $(".plot", figure);
  plot.addEventListener("blur", () => moveCursor(figure, null));
  plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const zooms = {
      "+": () => zoomBy(figure, 0.5), "=": () => zoomBy(figure, 0.5),
      "-": () => zoomBy(figure, 2), "\u2212": () => zoomBy(figure, 2),
      0: () => zoomTo(null), Escape: () => zoomTo(null),
    };
    if (event.key in zooms) zooms[event.key]();
    else if (!moveByKey(figure, event.key)) return;
    event.preventDefault();
  });
}

// Ties a checkbox of a chart to a part of the view.
function tieCheckbox(box, choices, figure) {
  if (!box) return;
  const { chart } = figure.dataset;
  box.checked = Boolean(choices[chart]);
  box.addEventListener("change", () => { choices[chart] = box.checked; redraw(figure); });
}

function operate(figure) {
  // For screen readers a chart is a slider along its x axis.
  const plot = $(".plot", figure);
  plot.setAttribute("role", "slider");
  plot.setAttribute("tabindex", "0");
  plot.setAttribute("aria-orientation", "horizontal");
  unhide($(".switches", figure));
  tieCheckbox($(".log", figure), view.isLog, figure);
  const outliers = $(".outliers", figure);
  tieCheckbox($("input", outliers), view.showOutliers, figure);
  // A chart that shows its outliers needs the switch to hide them again.
  outliers.hidden = !view.showOutliers[figure.dataset.chart];
  listenToPointer(figure);
  listenToKeys(figure);
}

// The controls above the charts

function operateSmoothing() {
  const slider = $("#smoothing");
  const show = () => {
    const percent = 100 * view.smoothing;
    slider.value = percent;
    $("#smoothing-value").textContent = percent ? `${percent} %` : "none";
    slider.setAttribute("aria-valuetext", percent ? `${percent} percent of the points` : "none");
  };
  show();
  slider.addEventListener("input", () => {
    view.smoothing = slider.value / 100;
    show();
    redrawAll();
  });
}

function operateRuns() {
  for (const box of all("input.run")) {
    const run = Number(box.value);
    box.checked = !view.hiddenRuns.has(run);
    box.addEventListener("change", () => {
      if (box.checked) view.hiddenRuns.delete(run);
      else view.hiddenRuns.add(run);
      redrawAll();
    });
  }
}

function operateAxes() {
  checkAxisButtons();
  for (const radio of all("input[name=x]")) {
    radio.addEventListener("change", () => { chooseAxis(radio.value); keepAxisInAddress(); });
  }
}

enhancers.push((root) => {
  const data = $("#data", root);
  if (!data) return;
  const found = JSON.parse(data.textContent);
  charts = Object.fromEntries(found.charts.map((chart) => [chart.name, chart]));
  axes = Object.fromEntries(found.axes.map((axis) => [axis.key, axis]));
  view.smoothing ??= found.smoothing;
  // A new page takes the axis from its address; a refreshed section keeps the chosen one.
  const wanted = root === document ? axisInAddress() : view.xAxis;
  view.xAxis = isKnownAxis(wanted) ? wanted : "step";
  unhide($(".curves-tools"));
  unhide($("#curves-help"));
  operateAxes();
  operateSmoothing();
  operateRuns();
  $("#show-all").addEventListener("click", () => zoomTo(null));
  for (const figure of all(".chart")) operate(figure);
  zoomTo(view.zoom);
  // The browser finds no element for an address with an axis in it, so it did not scroll there.
  if (root === document && axisInAddress()) {
    document.getElementById(sectionInAddress())?.scrollIntoView();
  }
});

// Charts are drawn for their width in pixels, so that their text keeps its size. The height of a
// phone's window changes while scrolling, which needs no new drawing.
let windowWidth = 0;
addEventListener("resize", () => {
  if (innerWidth !== windowWidth) redrawAll();
  windowWidth = innerWidth;
});

"use strict";
// Curves: drawn again from the same numbers as curves.py when something is changed; reading, zooming, smoothing
const state = { smooth: null, log: {}, every: {}, zoom: null, off: new Set(), at: {} };
const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM, SMALLEST] = [250, 58, 14, 12, 26, 1e-100];
let charts = {};

function showNumber(value) {
  const size = Math.abs(value);
  const sign = value < 0 ? "\u2212" : "";
  const short = (number) => String(Number(number.toPrecision(4)));
  if (size === 0) return "0";
  if (size >= 1e-3 && size < 1e4) return sign + short(size);
  for (const [power, prefix] of [[3, "k"], [6, "M"], [9, "G"], [12, "T"]]) {
    if (size >= 1e4 && size < 10 ** (power + 3) * 0.99995) return sign + short(size / 10 ** power) + prefix;
  }
  const [mantissa, exponent] = size.toExponential(3).split("e");
  return `${sign}${Number(mantissa)}e${Number(exponent)}`;
}

function smoothed(values, share) {
  const decay = 1 - 1 / Math.max(1, share * values.length);
  let [mean, weight] = [0, 0];
  return values.map((value) => {
    mean = decay * mean + (1 - decay) * value;
    weight = decay * weight + (1 - decay);
    return mean / weight;
  });
}

function scale(low, high, isLog, begin, end) {
  const [from, to] = isLog ? [Math.log10(low), Math.log10(high)] : [low, high];
  return (value) => begin + (end - begin) * ((isLog ? Math.log10(Math.max(value, SMALLEST)) : value) - from) / (to - from);
}

function ticks(low, high, isLog, count) {
  const found = [];
  if (isLog && Math.log10(high / low) > 0.8) {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const factors = last - first + 1 <= 3 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil((last - first + 1) / count));
    for (let decade = first; decade <= last; decade++) {
      if (decade % every === 0) found.push(...factors.map((factor) => factor * 10 ** decade));
    }
    return found.filter((tick) => low <= tick * 1.0000001 && tick <= high * 1.0000001);
  }
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => power * factor).find((size) => size >= rough * 0.999);
  for (let i = Math.ceil(low / step - 1e-6); i <= Math.floor(high / step + 1e-6); i++) found.push(step * i);
  return found;
}

function ranges(chart, shown, isLog, everything) {
  const edges = shown.flatMap(({ series: s, from, to }) => [...(s.low ?? s.y).slice(from, to), ...(s.high ?? s.y).slice(from, to)])
    .filter((value) => !isLog || value > 0).map(isLog ? Math.log10 : Number).sort((a, b) => a - b);
  if (!edges.length) return isLog ? [1, 10, 0] : [0, 1, 0];
  const last = edges.length - 1;
  let [low, high] = [edges[0], edges[last]];
  if (!everything && edges.length >= 40) {
    const [near, far] = [edges[Math.floor(0.01 * last)], edges[Math.ceil(0.99 * last)]];
    const room = 0.6 * (far - near);
    if (far > near && high - low > 3 * (far - near)) [low, high] = [Math.max(low, near - room), Math.min(high, far + room)];
  }
  if (chart.zero && !isLog) low = Math.min(low, 0);
  const outside = edges.filter((value) => value < low || value > high).length;
  const pad = 0.05 * (high - low) || Math.abs(high) * 0.1 || 1;
  const bottom = chart.zero && !isLog && low === 0 ? low : low - pad;
  high += pad;
  return isLog ? [10 ** bottom, 10 ** high, outside] : [bottom, high, outside];
}

function draw(chart, width) {
  const isLog = Boolean(state.log[chart.name]);
  const share = chart.smooth ? state.smooth : 0;
  const on = chart.series.filter((series) => !state.off.has(series.run));
  const list = on.length ? on : chart.series;
  const ends = list.flatMap((series) => [series.x[0], series.x[series.x.length - 1]]);
  let [left, right] = state.zoom ?? [Math.min(...ends), Math.max(...ends)];
  if (left === right) [left, right] = [left - 1, right + 1];
  const shown = list.map((series) => {
    let from = 0;
    let to = series.x.length;
    if (state.zoom) {
      while (from < to && series.x[from] < left) from++;
      while (to > from && series.x[to - 1] > right) to--;
    }
    return { series, line: series.marked ? series.y : smoothed(series.y, share), from, to };
  });
  const [low, high, outside] = ranges(chart, shown, isLog, Boolean(state.every[chart.name]));
  const across = scale(left, right, false, LEFT, width - RIGHT);
  const up = scale(low, high, isLog, HEIGHT - BOTTOM, TOP);
  const place = (value) => Math.min(Math.max(up(value), -2000), 2000).toFixed(1);
  const marks = [];
  for (const tick of ticks(low, high, isLog, 5)) {
    const y = up(tick).toFixed(1);
    marks.push(`<path class="rule" d="M${LEFT} ${y}H${(width - RIGHT).toFixed(0)}"/>`,
      `<text class="place end" x="${LEFT - 8}" y="${y}">${showNumber(tick)}</text>`);
  }
  for (const tick of ticks(left, right, false, Math.max(2, width / 110))) {
    marks.push(`<text class="place" x="${across(tick).toFixed(1)}" y="${HEIGHT - 10}">${showNumber(tick)}</text>`);
  }
  marks.push(`<text class="place end" x="${LEFT - 8}" y="${HEIGHT - 10}">step</text>`);
  marks.push(`<path class="frame" d="M${LEFT} ${(HEIGHT - BOTTOM).toFixed(1)}H${(width - RIGHT).toFixed(0)}"/>`);
  const curves = [];
  for (const { series: s, line } of shown) {
    const [colour, dash] = [`s${s.style % 8}`, `d${(s.style + Math.floor(s.style / 8)) % 8}`];
    const xs = s.x.map((x) => across(x).toFixed(1));
    const path = (values) => "M" + values.map((value, i) => `${xs[i]} ${place(value)}`).join("L");
    if (s.low) {
      const there = s.high.map((value, i) => `${xs[i]} ${place(value)}`);
      const back = s.low.map((value, i) => `${xs[i]} ${place(value)}`).reverse();
      curves.push(`<path class="band ${colour}" d="M${[...there, ...back].join("L")}Z"/>`);
    }
    if (share && !s.marked) curves.push(`<path class="raw ${colour}" d="${path(s.y)}"/>`);
    curves.push(`<path class="line ${colour} ${dash}" d="${path(line)}"/>`);
    if (s.marked) {
      s.y.forEach((value, i) => curves.push(`<use href="#mark${s.style % 4}" class="mark ${colour}" x="${xs[i]}" y="${place(value)}"/>`));
    }
    for (const x of s.missing) {
      if (left <= x && x <= right) curves.push(`<path class="missing ${colour}" d="M${(across(x) - 3).toFixed(1)} ${TOP}l3 6l3 -6z"/>`);
    }
  }
  const frame = `<clipPath id="clip-${chart.name}"><rect x="${LEFT - 4}" y="${TOP - 6}" width="${(width - LEFT - RIGHT + 8).toFixed(0)}" `
    + `height="${(HEIGHT - TOP - BOTTOM + 12).toFixed(0)}"/></clipPath>`;
  const markup = `${frame}${marks.join("")}<g clip-path="url(#clip-${chart.name})">${curves.join("")}</g>`;
  return { markup, outside, across, up: place, left, right, shown, width };
}

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
  figure.drawn = drawn;
  $(".outside", figure).hidden = !drawn.outside;
  $(".outside .count", figure).textContent = drawn.outside.toLocaleString("en");
  const box = $(".every", figure);
  if (drawn.outside) unhide(box);
  for (const item of all(".readout li", figure)) item.hidden = state.off.has(Number(item.dataset.run));
  point(figure, state.at[chart.name] ?? null);
}

const redrawAll = () => { for (const figure of all(".chart")) redraw(figure); };

// The values at a step: at the point nearest to it of every curve
function point(figure, step) {
  const { across, up, shown, left, right } = figure.drawn;
  const chart = charts[figure.dataset.chart];
  state.at[chart.name] = step;
  const here = step === null ? right : step;
  const marks = [];
  const said = [];
  for (const { series, line, from, to } of shown) {
    if (to <= from) continue;
    let [low, high] = [from, to - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (series.x[middle] <= here) low = middle; else high = middle;
    }
    const near = Math.abs(series.x[high] - here) < Math.abs(series.x[low] - here) ? high : low;
    let text = showNumber(series.y[near]);
    if (series.low && step !== null) text += ` (${showNumber(series.low[near])} to ${showNumber(series.high[near])})`;
    $(`[data-series="${chart.series.indexOf(series)}"]`, figure).textContent = text;
    said.push(`${series.label} ${text}`);
    if (step !== null) marks.push(`<circle class="dot s${series.style % 8}" r="4" cx="${across(series.x[near]).toFixed(1)}" cy="${up(line[near])}"/>`);
  }
  $(".at", figure).textContent = step === null ? "" : `step ${Math.round(step).toLocaleString("en")}`;
  const cursor = step === null ? "" : `<path class="cursor" d="M${across(step).toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}"/>`;
  $(".over", figure).innerHTML = cursor + marks.join("");
  const plot = $(".plot", figure);
  if (plot.getAttribute("role") === "slider") {
    plot.setAttribute("aria-valuemin", Math.round(left));
    plot.setAttribute("aria-valuemax", Math.round(right));
    plot.setAttribute("aria-valuenow", Math.round(here));
    plot.setAttribute("aria-valuetext", `step ${Math.round(here)}: ${said.join(", ")}`);
  }
}

function zoom(range) {
  const ends = Object.values(charts).flatMap((chart) => chart.series.flatMap((s) => [s.x[0], s.x[s.x.length - 1]]));
  const [least, most] = [Math.min(...ends), Math.max(...ends)];
  if (range) {
    range = [Math.max(least, Math.min(...range)), Math.min(most, Math.max(...range))];
    if (range[1] - range[0] < 1 || (range[0] <= least && range[1] >= most)) range = range[1] - range[0] < 1 ? state.zoom : null;
  }
  state.zoom = range;
  const button = $("#whole");
  if (button) {
    button.disabled = !range;
    button.textContent = range ? `Show all steps (now ${Math.round(range[0]).toLocaleString("en")} to ${Math.round(range[1]).toLocaleString("en")})` : "Show all steps";
  }
  redrawAll();
}

function zoomBy(figure, factor) {
  const { left, right } = figure.drawn;
  const middle = state.at[figure.dataset.chart] ?? (left + right) / 2;
  zoom([middle - (middle - left) * factor, middle + (right - middle) * factor]);
}

function steps(figure) {
  return [...new Set(figure.drawn.shown.flatMap(({ series, from, to }) => series.x.slice(from, to)))].sort((a, b) => a - b);
}

function operate(figure) {
  const chart = charts[figure.dataset.chart];
  const plot = $(".plot", figure);
  plot.setAttribute("role", "slider");
  plot.setAttribute("tabindex", "0");
  plot.setAttribute("aria-label", `${$("h3", figure).textContent}: values at a step`);
  plot.setAttribute("aria-orientation", "horizontal");
  unhide($(".switches", figure));
  const log = $(".log", figure);
  if (log) log.checked = Boolean(state.log[chart.name]);
  log?.addEventListener("change", () => { state.log[chart.name] = log.checked; redraw(figure); });
  const every = $(".everything", figure);
  every.checked = Boolean(state.every[chart.name]);
  if (every.checked) unhide($(".every", figure));
  every.addEventListener("change", () => { state.every[chart.name] = every.checked; redraw(figure); });

  const stepAt = (event) => {
    const box = plot.getBoundingClientRect();
    const { left, right, width } = figure.drawn;
    const x = (event.clientX - box.left) * width / box.width;
    return Math.min(right, Math.max(left, left + (right - left) * (x - LEFT) / (width - LEFT - RIGHT)));
  };
  let begin = null;
  plot.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.pointerType !== "touch") {
      begin = stepAt(event);
      plot.setPointerCapture(event.pointerId);
    }
    point(figure, stepAt(event));
  });
  plot.addEventListener("pointermove", (event) => {
    point(figure, stepAt(event));
    if (begin === null) return;
    const [a, b] = [begin, stepAt(event)].map(figure.drawn.across).sort((x, y) => x - y);
    $(".over", figure).insertAdjacentHTML("beforeend",
      `<rect class="chosen-range" x="${a.toFixed(1)}" y="${TOP}" width="${(b - a).toFixed(1)}" height="${HEIGHT - TOP - BOTTOM}"/>`);
  });
  plot.addEventListener("pointerup", (event) => {
    const end = stepAt(event);
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
    const list = steps(figure);
    const now = state.at[chart.name] ?? list[list.length - 1];
    let i = list.findIndex((step) => step >= now);
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
    redraw(figure);
    operate(figure);
    point(figure, state.at[figure.dataset.chart] ?? null);
  }
  zoom(state.zoom);
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

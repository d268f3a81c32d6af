"use strict";
// Curves drawn as curves.py draws them, from the same numbers; over steps, or over what axes.py has found
const state = { smooth: null, log: {}, every: {}, zoom: null, off: new Set(), at: {}, x: "step" };
const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM, SMALLEST] = [250, 58, 14, 12, 26, 1e-100];
const CLOCK = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
let charts = {};
let axes = {};

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

function tickLabels(found) {
  const shown = found.map(showNumber);
  if (new Set(shown).size === shown.length) return shown;
  const digits = Math.max(0, -Math.floor(Math.log10(found[1] - found[0]) + 1e-6));
  if (digits > 6 || Math.abs(found[found.length - 1]) >= 1e9) return shown;
  const places = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return found.map((tick) => tick.toLocaleString("en", places).replace("-", "\u2212"));
}

// Between two known points it grows evenly; before the first and after the last it stays
function between(from, to, value) {
  let [low, high] = [0, from.length - 1];
  if (value <= from[low]) return to[low];
  if (value >= from[high]) return to[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= value) low = middle; else high = middle;
  }
  return to[low] + (to[high] - to[low]) * (value - from[low]) / (from[high] - from[low] || 1);
}

// Where a step of a run stands on the chosen axis, and the points of a curve
function atStep(run, step) {
  const known = axes[state.x]?.runs[run];
  return known ? between(known.steps, known.at, step) : step;
}

function places(series) {
  if (!axes[state.x]) return series.x;
  series.places ??= {};
  series.places[state.x] ??= series.x.map((step) => atStep(series.run, step));
  return series.places[state.x];
}

// Steps are shown from the first that is known, all else from 0
function ends(list) {
  const x = list.flatMap((series) => [places(series)[0], places(series).at(-1)]);
  return [state.x === "step" ? Math.min(...x) : 0, Math.max(...x)];
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
  let [left, right] = state.zoom ?? ends(list);
  if (left === right) [left, right] = [left - 1, right + 1];
  const shown = list.map((series) => {
    const x = places(series);
    let from = 0;
    let to = x.length;
    if (state.zoom) {
      while (from < to && x[from] < left) from++;
      while (to > from && x[to - 1] > right) to--;
    }
    return { series, x, line: series.marked ? series.y : smoothed(series.y, share), from, to };
  });
  const [low, high, outside] = ranges(chart, shown, isLog, Boolean(state.every[chart.name]));
  const across = scale(left, right, false, LEFT, width - RIGHT);
  const up = scale(low, high, isLog, HEIGHT - BOTTOM, TOP);
  const place = (value) => Math.min(Math.max(up(value), -2000), 2000).toFixed(1);
  const marks = [];
  const levels = ticks(low, high, isLog, 5);
  for (const [i, label] of tickLabels(levels).entries()) {
    const y = up(levels[i]).toFixed(1);
    marks.push(`<path class="rule" d="M${LEFT} ${y}H${(width - RIGHT).toFixed(0)}"/>`,
      `<text class="place end" x="${LEFT - 8}" y="${y}">${label}</text>`);
  }
  const [unit, size] = state.x === "time" ? CLOCK.find(([, seconds]) => (right - left) / seconds >= 2) ?? ["s", 1] : [state.x, 1];
  const marked = ticks(left / size, right / size, false, Math.max(2, width / 110));
  for (const [i, label] of tickLabels(marked).entries()) {
    marks.push(`<text class="place" x="${across(marked[i] * size).toFixed(1)}" y="${HEIGHT - 10}">${label}</text>`);
  }
  marks.push(`<text class="place end across" x="${LEFT - 14}" y="${HEIGHT - 10}">${unit}</text>`);
  marks.push(`<path class="frame" d="M${LEFT} ${(HEIGHT - BOTTOM).toFixed(1)}H${(width - RIGHT).toFixed(0)}"/>`);
  const curves = [];
  for (const { series: s, x, line } of shown) {
    const [colour, dash] = [`s${s.style % 8}`, `d${(s.style + Math.floor(s.style / 8)) % 8}`];
    const xs = x.map((value) => across(value).toFixed(1));
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
    for (const place of s.missing.map((step) => atStep(s.run, step))) {
      if (left <= place && place <= right) curves.push(`<path class="missing ${colour}" d="M${(across(place) - 3).toFixed(1)} ${TOP}l3 6l3 -6z"/>`);
    }
  }
  const frame = `<clipPath id="clip-${chart.name}"><rect x="${LEFT - 4}" y="${TOP - 6}" width="${(width - LEFT - RIGHT + 8).toFixed(0)}" `
    + `height="${(HEIGHT - TOP - BOTTOM + 12).toFixed(0)}"/></clipPath>`;
  const markup = `${frame}${marks.join("")}<g clip-path="url(#clip-${chart.name})">${curves.join("")}</g>`;
  return { markup, outside, across, up: place, left, right, shown, width };
}

"use strict";
// Draws charts as SVG from the numbers that charts.py and chart_axes.py put on the page. This is
// the only chart engine: zooming, smoothing, logarithmic scales and other x axes need new drawings.
//
// Markup is made from numbers and fixed names only, never from a label, so that no text of a run
// can become markup.

// What the reader has chosen. It outlives the sections of a live page, which are replaced.
const view = {
  smoothing: null, // share of the points of a curve
  isLog: {}, // by name of the chart
  showOutliers: {}, // by name of the chart
  zoom: null, // [left, right] on the x axis of all charts, or null
  hiddenRuns: new Set(),
  cursor: {}, // position on the x axis by name of the chart, or null
  xAxis: "step",
};
let charts = {}; // by name
let axes = {}; // x axes other than steps, by key

const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [250, 58, 14, 12, 26];
const SMALLEST = 1e-100; // so that a logarithm of zero is finite
const FAR = 2000; // browsers draw coordinates wrong that are far outside the drawing
const TIME_UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

// Numbers

// The same as `show_number` in text.py, which writes the numbers that are on the page at first.
function showNumber(value) {
  const size = Math.abs(value);
  const sign = value < 0 ? "\u2212" : "";
  const short = (number) => String(Number(number.toPrecision(4)));
  if (size === 0) return "0";
  // From 9999.5 on, four digits would round to 10000.
  if (size >= 1e-3 && size < 9999.5) return sign + short(size);
  for (const [power, prefix] of [[3, "k"], [6, "M"], [9, "G"], [12, "T"]]) {
    if (size >= 9999.5 && size < 10 ** (power + 3) * 0.99995) {
      return sign + short(size / 10 ** power) + prefix;
    }
  }
  const [mantissa, exponent] = size.toExponential(3).split("e");
  return `${sign}${Number(mantissa)}e${Number(exponent)}`;
}

// Exponential moving average over a share of the points, corrected for its start.
function smooth(values, share) {
  const decay = 1 - 1 / Math.max(1, share * values.length);
  let [mean, weight] = [0, 0];
  return values.map((value) => {
    mean = decay * mean + (1 - decay) * value;
    weight = decay * weight + (1 - decay);
    return mean / weight;
  });
}

// Interpolates linearly between known points, and is constant before the first and after the last.
function interpolate(from, to, value) {
  let [low, high] = [0, from.length - 1];
  if (value <= from[low]) return to[low];
  if (value >= from[high]) return to[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= value) low = middle; else high = middle;
  }
  const share = (value - from[low]) / (from[high] - from[low] || 1);
  return to[low] + (to[high] - to[low]) * share;
}

// Scales and ticks

// Returns a function from values to coordinates.
function makeScale(low, high, isLog, begin, end) {
  const transform = isLog ? (value) => Math.log10(Math.max(value, SMALLEST)) : Number;
  const [from, to] = [transform(low), transform(high)];
  return (value) => begin + (end - begin) * (transform(value) - from) / (to - from);
}

function logTicks(low, high, count) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const numDecades = last - first + 1;
  const factors = numDecades <= 3 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(numDecades / count));
  const found = [];
  for (let decade = first; decade <= last; decade++) {
    if (decade % every === 0) found.push(...factors.map((factor) => factor * 10 ** decade));
  }
  // A little tolerance: powers of ten are not exact in floating point.
  return found.filter((tick) => low <= tick * 1.0000001 && tick <= high * 1.0000001);
}

// Returns about `count` round numbers within a range.
function ticks(low, high, isLog, count) {
  // Within less than a decade, linear ticks say more.
  if (isLog && Math.log10(high / low) > 0.8) return logTicks(low, high, count);
  const roughStep = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(roughStep));
  const steps = [1, 2, 2.5, 5, 10].map((factor) => power * factor);
  const step = steps.find((size) => size >= roughStep * 0.999);
  const found = [];
  const last = Math.floor(high / step + 1e-6);
  for (let i = Math.ceil(low / step - 1e-6); i <= last; i++) found.push(step * i);
  return found;
}

// Short labels where they differ, otherwise labels with as many digits as needed.
function tickLabels(values) {
  const short = values.map(showNumber);
  if (new Set(short).size === short.length) return short;
  const digits = Math.max(0, -Math.floor(Math.log10(values[1] - values[0]) + 1e-6));
  if (digits > 6 || Math.abs(values.at(-1)) >= 1e9) return short;
  const format = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return values.map((value) => value.toLocaleString("en", format).replace("-", "\u2212"));
}

// The x axis

// Returns the position of a step of a run on the chosen axis.
function positionOfStep(run, step) {
  const known = axes[view.xAxis]?.runs[run];
  return known ? interpolate(known.steps, known.at, step) : step;
}

function stepAtPosition(run, position) {
  const known = axes[view.xAxis]?.runs[run];
  return known ? interpolate(known.at, known.steps, position) : position;
}

// Returns the positions of the points of a curve; they are computed once for each axis.
function positions(series) {
  if (!axes[view.xAxis]) return series.x;
  series.positions ??= {};
  series.positions[view.xAxis] ??= series.x.map((step) => positionOfStep(series.run, step));
  return series.positions[view.xAxis];
}

// Returns the range of curves: from the first known step, or from zero on other axes.
function xRange(seriesList) {
  const ends = seriesList.flatMap((series) => [positions(series)[0], positions(series).at(-1)]);
  return [view.xAxis === "step" ? Math.min(...ends) : 0, Math.max(...ends)];
}

// The y axis

// Returns the range without the few values that would flatten all others.
function withoutOutliers(sorted) {
  const last = sorted.length - 1;
  const [low, high] = [sorted[0], sorted[last]];
  if (sorted.length < 40) return [low, high];
  const [near, far] = [sorted[Math.floor(0.01 * last)], sorted[Math.ceil(0.99 * last)]];
  const margin = 0.6 * (far - near);
  if (far <= near || high - low <= 3 * (far - near)) return [low, high];
  return [Math.max(low, near - margin), Math.min(high, far + margin)];
}

// Returns the range of the y axis, and how many values are outside of it.
function yRange(chart, visible, isLog, showOutliers) {
  const transform = isLog ? Math.log10 : Number;
  const values = visible.flatMap(({ series, from, to }) => [
    ...(series.low ?? series.y).slice(from, to), ...(series.high ?? series.y).slice(from, to),
  ]);
  const sorted = values.filter((value) => !isLog || value > 0).map(transform)
    .sort((a, b) => a - b);
  if (!sorted.length) return isLog ? [1, 10, 0] : [0, 1, 0];
  let [low, high] = showOutliers ? [sorted[0], sorted.at(-1)] : withoutOutliers(sorted);
  const startsAtZero = chart.fromZero && !isLog;
  if (startsAtZero) low = Math.min(low, 0);
  const numOutside = sorted.filter((value) => value < low || value > high).length;
  const padding = 0.05 * (high - low) || Math.abs(high) * 0.1 || 1;
  if (!startsAtZero || low !== 0) low -= padding;
  high += padding;
  return isLog ? [10 ** low, 10 ** high, numOutside] : [low, high, numOutside];
}

// Drawing

function drawYAxis(range, isLog, toY, width) {
  const values = ticks(range[0], range[1], isLog, 5);
  return tickLabels(values).map((label, i) => {
    const y = toY(values[i]).toFixed(1);
    return `<path class="rule" d="M${LEFT} ${y}H${width - RIGHT}"/>`
      + `<text class="place end" x="${LEFT - 8}" y="${y}">${label}</text>`;
  }).join("");
}

function drawXAxis([left, right], toX, width) {
  let [unit, size] = [view.xAxis, 1];
  if (view.xAxis === "time") {
    [unit, size] = TIME_UNITS.find(([, seconds]) => (right - left) / seconds >= 2) ?? ["s", 1];
  }
  const values = ticks(left / size, right / size, false, Math.max(2, width / 110));
  const labels = tickLabels(values).map((label, i) =>
    `<text class="place" x="${toX(values[i] * size).toFixed(1)}" y="${HEIGHT - 10}">${label}</text>`);
  return `${labels.join("")}<text class="place end across" x="${LEFT - 14}" y="${HEIGHT - 10}">`
    + `${unit}</text><path class="frame" d="M${LEFT} ${HEIGHT - BOTTOM}H${width - RIGHT}"/>`;
}

// Draws the band, the raw line behind a smoothed one, the line, its markers and missing values.
function drawSeries({ series, x, line }, isSmoothed, toX, toY, [left, right]) {
  const { color } = series;
  const xs = x.map((position) => toX(position).toFixed(1));
  const points = (values) => values.map((value, i) => `${xs[i]} ${toY(value)}`);
  const parts = [];
  if (series.low) {
    const outline = [...points(series.high), ...points(series.low).reverse()];
    parts.push(`<path class="band ${color}" d="M${outline.join("L")}Z"/>`);
  }
  if (isSmoothed && !series.hasMarkers) {
    parts.push(`<path class="raw ${color}" d="M${points(series.y).join("L")}"/>`);
  }
  parts.push(`<path class="line ${color} ${series.dash}" d="M${points(line).join("L")}"/>`);
  if (series.hasMarkers) {
    series.y.forEach((value, i) => parts.push(
      `<use href="#${series.marker}" class="mark ${color}" x="${xs[i]}" y="${toY(value)}"/>`));
  }
  for (const step of series.missing) {
    const position = positionOfStep(series.run, step);
    if (left <= position && position <= right) {
      const x = (toX(position) - 3).toFixed(1);
      parts.push(`<path class="missing ${color}" d="M${x} ${TOP}l3 6l3 -6z"/>`);
    }
  }
  return parts.join("");
}

// Returns the curves that are shown, each with its positions, its (smoothed) line, and the range
// of indices that the zoom shows.
function visibleCurves(chart, seriesList, [left, right]) {
  const share = chart.canSmooth ? view.smoothing : 0;
  return seriesList.map((series) => {
    const x = positions(series);
    let [from, to] = [0, x.length];
    if (view.zoom) {
      while (from < to && x[from] < left) from++;
      while (to > from && x[to - 1] > right) to--;
    }
    return { series, x, line: series.hasMarkers ? series.y : smooth(series.y, share), from, to };
  });
}

// Draws a chart at a width in pixels. Returns its markup, and what is needed to operate it.
function draw(chart, width) {
  const isLog = Boolean(view.isLog[chart.name]);
  const shown = chart.series.filter((series) => !view.hiddenRuns.has(series.run));
  const seriesList = shown.length ? shown : chart.series;
  let [left, right] = view.zoom ?? xRange(seriesList);
  if (left === right) [left, right] = [left - 1, right + 1];
  const visible = visibleCurves(chart, seriesList, [left, right]);
  const showOutliers = Boolean(view.showOutliers[chart.name]);
  const [low, high, numOutside] = yRange(chart, visible, isLog, showOutliers);
  const toX = makeScale(left, right, false, LEFT, width - RIGHT);
  const scaleY = makeScale(low, high, isLog, HEIGHT - BOTTOM, TOP);
  const toY = (value) => Math.min(Math.max(scaleY(value), -FAR), FAR).toFixed(1);
  const isSmoothed = chart.canSmooth && view.smoothing > 0;
  const curves = visible.map((curve) => drawSeries(curve, isSmoothed, toX, toY, [left, right]));
  const clip = `clip-${chart.name}`;
  // A little larger than the frame, so that markers at its edge are complete.
  const area = `<clipPath id="${clip}"><rect x="${LEFT - 4}" y="${TOP - 6}"`
    + ` width="${width - LEFT - RIGHT + 8}" height="${HEIGHT - TOP - BOTTOM + 12}"/></clipPath>`;
  const markup = area + drawYAxis([low, high], isLog, scaleY, width)
    + drawXAxis([left, right], toX, width)
    + `<g clip-path="url(#${clip})">${curves.join("")}</g>`;
  return { markup, numOutside, toX, toY, left, right, visible, width };
}

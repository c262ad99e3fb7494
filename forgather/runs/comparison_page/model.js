// The data of the page, and the points of its curves.
const DATA = JSON.parse(byId("data").textContent);
const CURVES = JSON.parse(byId("points").textContent).curves;
const RUNS = DATA.runs.map((run, at) => ({ ...run, at, curves: CURVES[at], shown: true }));
const METRICS = DATA.metrics.map((metric, at) => ({ ...metric, at }));
const RANK = [];
DATA.ranking.forEach((at, place) => { RANK[at] = place; });
const GROUPS = DATA.groups.map((group, at) => ({ ...group, at }));
const HAS_SEEDS = GROUPS.some(group => group.runs.length > 1);
const WINNERS = new Set(DATA.verdict.winner ? GROUPS[0].runs : []);
const SETTINGS = DATA.config.filter(row => !row.label);
// Of values that change together, such as those of two models, one stands for the others in tables and plots.
const LEADING = SETTINGS.filter(row => !row.follows);
const GROUP_OF = [];
GROUPS.forEach(group => group.runs.forEach(at => { GROUP_OF[at] = group; }));

function numbers(text, type) {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  return new type(bytes.buffer);
}
const DELTAS = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array, 8: BigUint64Array };
// The points are decoded when they are first drawn.
function points(facts) {
  if (!facts) return null;
  if (!facts.decoded) {
    const steps = [];
    let step = 0;
    for (const delta of numbers(facts.steps, DELTAS[facts.size])) steps.push(step += Number(delta));
    facts.decoded = [steps, Array.from(numbers(facts.values, facts.bits === 32 ? Float32Array : Float64Array))];
  }
  return facts.decoded;
}
const curveOf = (run, metric) => run.curves.metrics[metric.at];
const entryOf = (run, metric) => DATA.table[run.at][metric.at];

// The value of a piecewise linear function between its points; nothing outside of them.
function interpolated([xs, ys], x) {
  let low = 0, high = xs.length - 1;
  if (high < 0 || x < xs[0] || x > xs[high]) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return xs[high] === xs[low] ? ys[high] : ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / (xs[high] - xs[low]);
}
// Steps as the axis shows them; null if the run does not say when it was at a step.
function onAxis(run, steps, axis) {
  if (axis === "step") return steps;
  const known = points(run.curves[axis]);
  return known && known[0].length ? steps.map(step => interpolated(known, step)) : null;
}
// The exponential moving average, corrected at its start, where it has seen few values.
function smoothed(values, weight) {
  let mean = 0, seen = 0;
  return values.map(value => {
    mean = weight * mean + (1 - weight) * value;
    seen = weight * seen + (1 - weight);
    return mean / seen;
  });
}
const keep = (xs, ys, test) => {
  const found = [[], []];
  xs.forEach((x, at) => { if (x !== null && test(x, ys[at])) { found[0].push(x); found[1].push(ys[at]); } });
  return found;
};
// The line of a run: its points, and with smoothing the moving average over the means of its buckets.
function lineOf(run, metric, view) {
  const facts = curveOf(run, metric), raw = points(facts);
  if (!raw || !raw[0].length) return null;
  const test = (x, y) => (!view.logY || y > 0) && (!view.logX || x > 0);
  const xs = onAxis(run, raw[0], view.axis);
  if (!xs) return null;
  const line = { raw: keep(xs, raw[1], test), dropped: 0 };
  line.dropped = raw[0].length - line.raw[0].length;
  const [steps, values] = facts.means && (view.smoothing || view.means) ? points(facts.means) : raw;
  line.smooth = view.smoothing ? keep(onAxis(run, steps, view.axis), smoothed(values, view.smoothing), test) : line.raw;
  line.trend = view.means ? keep(onAxis(run, steps, view.axis), view.smoothing ? smoothed(values, view.smoothing) : values, test) : line.smooth;
  return line;
}
// The mean of several lines where all of them have a value, and the lowest and highest value.
function bandOf(lines) {
  const first = Math.max(...lines.map(line => line[0][0])), last = Math.min(...lines.map(line => line[0].at(-1)));
  const xs = [...new Set(lines.flatMap(line => line[0]))].filter(x => x >= first && x <= last).sort((a, b) => a - b);
  const every = Math.ceil(xs.length / 1600), kept = xs.filter((x, at) => at % every === 0 || at === xs.length - 1);
  const found = { xs: kept, mean: [], low: [], high: [] };
  for (const x of kept) {
    const values = lines.map(line => interpolated(line, x));
    found.mean.push(values.reduce((sum, value) => sum + value, 0) / values.length);
    found.low.push(Math.min(...values));
    found.high.push(Math.max(...values));
  }
  return found;
}

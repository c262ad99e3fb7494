// The color and the dash of each run. Runs that differ in seeds alone have one color. Up to ten colors can be told apart by
// color-blind readers; more are colored by rank, from the best one on, because nobody tells fifty colors apart: a run is
// found by pointing at it.
const LIGHT = ["#0b5fce", "#c4420a", "#0a7a5c", "#a3308f", "#7a5c00", "#1798b8", "#d0246b", "#4d4fc9", "#4f7a14", "#5a6270"];
const DARK = ["#6aaeff", "#ff9a5c", "#3fd6a6", "#e88bd8", "#e6c34a", "#5fd4ee", "#ff86b0", "#a9a6ff", "#a5d764", "#aab3c0"];
const RAMP_LIGHT = [[0, 74, 158], [0, 121, 140], [52, 140, 90], [140, 148, 40], [196, 140, 60], [190, 150, 140]];
const RAMP_DARK = [[120, 190, 255], [80, 210, 210], [110, 205, 130], [190, 195, 90], [214, 160, 90], [150, 120, 115]];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

function ramp(share) {
  const stops = isDark.matches ? RAMP_DARK : RAMP_LIGHT, at = Math.min(share * (stops.length - 1), stops.length - 1.0001);
  const low = stops[Math.floor(at)], high = stops[Math.floor(at) + 1], part = at % 1;
  return `rgb(${low.map((value, channel) => Math.round(value + (high[channel] - value) * part)).join(",")})`;
}
function colorAt(place, count) {
  return count <= LIGHT.length ? (isDark.matches ? DARK : LIGHT)[place] : ramp(place / Math.max(1, count - 1));
}
const colorOfGroup = group => colorAt(group.at, GROUPS.length);
const colorOf = run => colorOfGroup(GROUP_OF[run.at]);
const dashOf = run => {
  const group = GROUP_OF[run.at];
  return DASHES[group.runs.length > 1 ? group.runs.indexOf(run.at) % DASHES.length : GROUPS.length > LIGHT.length ? group.at % DASHES.length : group.at < 5 ? 0 : 1];
};
function swatch(stroke, dash) {
  const line = shape("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke, "stroke-width": 3, "stroke-dasharray": (dash || []).join(" ") || null });
  return shape("svg", { class: "swatch", viewBox: "0 0 22 10", "aria-hidden": "true" }, line);
}
const swatchOf = run => swatch(colorOf(run), dashOf(run));

// What is pointed at is lit everywhere: in the chart, the legend, the tables and the plots.
const listeners = [];
let lit = null, due = null;
function light(runs) {
  if (String(runs) === String(lit)) return;
  lit = runs;
  for (const found of document.querySelectorAll("[data-run]")) found.classList.toggle("lit", runs !== null && found.dataset.run.split(",").some(at => runs.includes(Number(at))));
  // A pointer that moves over fifty runs lights each of them, and the charts are drawn once.
  cancelAnimationFrame(due);
  due = requestAnimationFrame(() => listeners.forEach(listener => listener()));
}
const lights = runs => ({ "data-run": runs.join(), onmouseenter: () => light(runs), onmouseleave: () => light(null), onfocus: () => light(runs), onblur: () => light(null) });
const isLit = run => lit !== null && lit.includes(run.at);

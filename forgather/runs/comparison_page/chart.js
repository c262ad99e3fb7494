// The large chart of one metric.
const view = { metric: METRICS[0], axis: "step", logX: false, logY: false, smoothing: 0, seeds: false, means: false, zoom: null };
const AXES = { step: "Step", tokens: "Tokens", time: "Time" };
// The distances between the ticks of an axis of time: parts of minutes, hours and days.
const TIME_STEPS = [0.001, 0.01, 0.1, 1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720].map(minutes => 60 * minutes), ...[1, 2, 5, 10, 20, 50, 100].map(days => 86400 * days)];
let chart = null, drawn = [];

// What is drawn: a line for each run, or for each group of seeds.
function linesOf() {
  const found = [];
  const groups = view.seeds ? GROUPS : DATA.ranking.map(at => ({ runs: [at], label: RUNS[at].label }));
  view.means = view.seeds;
  for (const group of groups) {
    const members = group.runs.map(at => RUNS[at]).filter(run => run.shown);
    const lines = members.map(run => [run, lineOf(run, view.metric, view)]).filter(([, line]) => line && line.raw[0].length);
    if (!lines.length) continue;
    const several = lines.length > 1, dropped = lines.reduce((sum, [, line]) => sum + line.dropped, 0), stroke = colorOf(lines[0][0]);
    const line = { runs: lines.map(([run]) => run), stroke, dropped, dash: view.seeds ? [] : dashOf(lines[0][0]), label: view.seeds ? group.label : lines[0][0].label };
    if (several) {
      const band = bandOf(lines.map(([, one]) => one.trend));
      found.push({ ...line, xs: band.xs, ys: band.mean, band });
    } else {
      const [, one] = lines[0];
      found.push({ ...line, xs: one.smooth[0], ys: one.smooth[1], raw: view.smoothing ? one.raw : null });
    }
  }
  // The best one is drawn last, on top of the others.
  return found.reverse();
}
function extent(lists, isLog) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list) { if (value < low) low = value; if (value > high) high = value; }
  if (low > high) return isLog ? [1, 10] : [0, 1];
  if (isLog) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
  const space = (high - low) * 0.04 || Math.abs(high) * 0.1 || 1;
  return [low - space, high + space];
}
function bounds() {
  const within = view.zoom && view.zoom.y ? null : view.zoom;
  const x = extent(drawn.flatMap(line => [line.xs, line.raw ? line.raw[0] : []]), view.logX);
  const ys = drawn.flatMap(line => [[line.xs, line.ys], ...(line.raw ? [line.raw] : []), ...(line.band ? [[line.xs, line.band.low], [line.xs, line.band.high]] : [])]);
  const y = extent(ys.map(([xs, values]) => within ? values.filter((_, at) => xs[at] >= within.x[0] && xs[at] <= within.x[1]) : values), view.logY);
  return { x: view.zoom ? view.zoom.x : x, y: view.zoom && view.zoom.y ? view.zoom.y : y };
}
const axisText = value => view.axis === "time" ? timeText(value) : numberText(value);

function drawBands(plot) {
  const { ctx } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
  ctx.clip();
  for (const line of drawn) {
    if (!line.band) continue;
    ctx.globalAlpha = lit === null || line.runs.some(isLit) ? 0.16 : 0.05;
    ctx.fillStyle = line.stroke;
    ctx.beginPath();
    line.xs.forEach((x, at) => ctx.lineTo(plot.valToPos(x, "x", true), plot.valToPos(line.band.high[at], "y", true)));
    for (let at = line.xs.length - 1; at >= 0; at--) ctx.lineTo(plot.valToPos(line.xs[at], "x", true), plot.valToPos(line.band.low[at], "y", true));
    ctx.fill();
  }
  ctx.restore();
}
// Where a value is not finite, where something happened, and the best value of all.
function marksOf() {
  const found = [];
  for (const line of drawn) for (const run of line.runs) {
    const facts = curveOf(run, view.metric), entry = entryOf(run, view.metric);
    for (const [step, text] of facts && facts.gaps || []) found.push({ run, line, step, kind: "gap", text: `${view.metric.name} is ${text}` });
    for (const [step, kind, text] of run.events) if (step !== null) found.push({ run, line, step, kind: "event", text: text ? `${kind}: ${text}` : kind });
    if (view.metric.name === DATA.metric && RANK[run.at] === 0 && entry && entry[0] !== null && !view.seeds) found.push({ run, line, step: entry[1], value: entry[0], kind: "best", text: "the best value of all runs" });
  }
  return found;
}
function placed(plot) {
  const pixels = devicePixelRatio, { left, top, width, height } = plot.bbox, found = [];
  for (const mark of marksOf()) {
    const at = onAxis(mark.run, [mark.step], view.axis);
    if (!at || at[0] === null) continue;
    const x = plot.valToPos(at[0], "x", true), low = top + height - 7 * pixels;
    const y = mark.kind === "best" ? plot.valToPos(mark.value, "y", true) : mark.kind === "gap" ? top + 7 * pixels : low;
    if (x >= left && x <= left + width && y >= top && y <= top + height) found.push({ ...mark, x, y });
  }
  return found;
}
function drawMarks(plot) {
  const { ctx } = plot, size = 5 * devicePixelRatio;
  ctx.save();
  ctx.lineWidth = 2 * devicePixelRatio;
  for (const mark of plot.marks = placed(plot)) {
    ctx.globalAlpha = lit === null || isLit(mark.run) ? 1 : 0.15;
    ctx.strokeStyle = ctx.fillStyle = mark.line.stroke;
    ctx.beginPath();
    if (mark.kind === "gap") {
      for (const side of [1, -1]) { ctx.moveTo(mark.x - size, mark.y - side * size); ctx.lineTo(mark.x + size, mark.y + side * size); }
      ctx.stroke();
    } else if (mark.kind === "event") {
      ctx.moveTo(mark.x, mark.y - size); ctx.lineTo(mark.x + size, mark.y + size); ctx.lineTo(mark.x - size, mark.y + size);
      ctx.fill();
    } else {
      ctx.arc(mark.x, mark.y, size * 1.2, 0, 7);
      ctx.fillStyle = color("paper");
      ctx.fill();
      ctx.stroke();
    }
  }
  ctx.restore();
}
function seriesOf(line, isRaw) {
  const paths = uPlot.paths.linear();
  return {
    show: !line.isEmpty,
    facets: [{ scale: "x", auto: false }, { scale: "y", auto: false }],
    paths: (plot, at) => paths(plot, at, 0, plot.data[at][0].length - 1),
    stroke: () => {
      const faded = lit !== null && !line.runs.some(isLit);
      const alpha = isRaw ? (faded ? 0.04 : 0.28) : faded ? 0.13 : 1;
      return withAlpha(line.stroke, alpha);
    },
    // The width belongs to the path of a series, so a lit line is drawn again on top of it.
    width: isRaw ? 1 : line.runs.some(run => WINNERS.has(run.at)) ? 2.6 : RUNS.length > 20 ? 1.2 : 1.7,
    dash: line.dash, points: { show: false },
  };
}
function withAlpha(text, alpha) {
  const parts = text.startsWith("#") ? [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16)) : text.match(/\d+/g);
  return `rgba(${parts.join(",")},${alpha})`;
}
function drawLit(plot) {
  const { ctx } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
  ctx.clip();
  for (const line of drawn) {
    // Few values are points, too: a single evaluation has no line.
    if (line.xs.length > 12) continue;
    ctx.fillStyle = withAlpha(line.stroke, lit === null || line.runs.some(isLit) ? 1 : 0.15);
    line.xs.forEach((x, at) => { ctx.beginPath(); ctx.arc(plot.valToPos(x, "x", true), plot.valToPos(line.ys[at], "y", true), (line.xs.length < 2 ? 5 : 3) * devicePixelRatio, 0, 7); ctx.fill(); });
  }
  for (const line of drawn.filter(one => one.runs.some(isLit))) {
    ctx.lineJoin = "round";
    ctx.lineWidth = 3.2 * devicePixelRatio;
    ctx.strokeStyle = line.stroke;
    ctx.beginPath();
    line.xs.forEach((x, at) => ctx.lineTo(plot.valToPos(x, "x", true), plot.valToPos(line.ys[at], "y", true)));
    ctx.stroke();
  }
  ctx.restore();
  drawMarks(plot);
}
function draw() {
  const place = byId("plot");
  drawn = linesOf();
  // The raw lines are behind all others.
  const layers = [...drawn.filter(line => line.raw).map(line => [line, true]), ...drawn.map(line => [line, false])];
  // uPlot cannot be pointed at without a series.
  if (!layers.length) layers.push([{ runs: [], stroke: color("quiet"), dash: [], xs: [], ys: [], isEmpty: true }, false]);
  const range = bounds(), grid = { stroke: color("grid"), width: 1 }, ticks = { stroke: color("line"), width: 1 };
  const axis = { stroke: color("quiet"), grid, ticks, font: "12px system-ui, sans-serif" };
  if (chart) chart.destroy();
  chart = new uPlot({
    mode: 2, width: place.clientWidth, height: place.clientHeight,
    legend: { show: false }, cursor: { drag: { x: true, y: true, uni: 24, setScale: false }, points: { show: false } },
    scales: { x: { time: false, distr: view.logX ? 3 : 1, range: () => range.x }, y: { distr: view.logY ? 3 : 1, range: () => range.y } },
    series: [{}, ...layers.map(([line, isRaw]) => seriesOf(line, isRaw))],
    axes: [{ ...axis, values: (_, values) => values.map(value => value === null ? "" : axisText(value)), space: 70, ...(view.axis === "time" ? { incrs: TIME_STEPS } : {}) }, { ...axis, size: 64, values: (_, values) => values.map(value => value === null ? "" : numberText(Number(value.toPrecision(3)))) }],
    hooks: { drawAxes: [drawBands], draw: [drawLit], setSelect: [select], setCursor: [point] },
  }, [null, ...layers.map(([line, isRaw]) => isRaw ? line.raw : [line.xs, line.ys])], place);
  byId("reset").disabled = !view.zoom;
  place.setAttribute("aria-label", `${view.metric.name} of ${plural(drawn.length, view.seeds ? "config" : "run")} by ${AXES[view.axis].toLowerCase()}`);
  noteOf();
}
function noteOf() {
  const texts = [], shown = RUNS.filter(run => run.shown), name = view.metric.name;
  const without = shown.filter(run => !drawn.some(line => line.runs.includes(run)));
  if (without.length) texts.push(`${plural(without.length, "run")} without ${name}${view.axis === "step" ? "" : ` or ${AXES[view.axis].toLowerCase()}`}: ${without.slice(0, 4).map(run => run.label).join(", ")}${without.length > 4 ? ", …" : ""}.`);
  const dropped = drawn.reduce((sum, line) => sum + line.dropped, 0);
  if (dropped) texts.push(`${plural(dropped, "point")} at or below 0, or outside the axis, cannot be drawn here.`);
  const thinned = shown.some(run => (curveOf(run, view.metric) || {}).width);
  if (thinned) texts.push("Long curves are drawn as the smallest and the largest value of buckets of steps, so spikes are kept; --full embeds every point.");
  const marks = marksOf(), gaps = marks.filter(mark => mark.kind === "gap").length, events = marks.filter(mark => mark.kind === "event").length;
  if (gaps) texts.push(`✕ at the top: ${plural(gaps, "value")} not finite.`);
  if (events) texts.push(`▲ at the bottom: ${plural(events, "event")}; point at one to read it.`);
  if (drawn.some(line => line.band)) texts.push("Lines of several seeds are means; bands reach from the lowest to the highest seed.");
  if (view.axis === "time") {
    const paused = shown.filter(run => run.paused);
    texts.push(`Time counts from the first line of a run's metrics${paused.length ? `, without pauses: ${paused.slice(0, 4).map(run => `${timeText(run.paused)} of ${run.label}`).join(", ")}${paused.length > 4 ? ", …" : ""}` : ""}.`);
  }
  if (view.axis === "tokens") texts.push("Tokens are as logged, or follow from the logged speeds.");
  byId("chart-notes").textContent = texts.join(" ");
}
function select(plot) {
  const { left, top, width, height } = plot.select;
  if (width < 4 && height < 4) return;
  const isWide = width >= 4 && width < plot.over.clientWidth - 1 || height >= plot.over.clientHeight - 1;
  const x = isWide ? [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")] : [plot.scales.x.min, plot.scales.x.max];
  const y = height >= 4 && height < plot.over.clientHeight - 1 ? [plot.posToVal(top + height, "y"), plot.posToVal(top, "y")] : null;
  zoom({ x, y });
}
function zoom(to) {
  view.zoom = to;
  draw();
}
// The line next to the pointer.
function point(plot) {
  const { left, top } = plot.cursor, tip = byId("tip");
  if (left < 0 || top < 0) { tip.hidden = true; if (plot.pointed) { plot.pointed = false; light(null); } return; }
  const pixels = devicePixelRatio, x = plot.posToVal(left, "x");
  const near = (plot.marks || []).map(mark => ({ mark, far: Math.hypot(mark.x / pixels - left - plot.bbox.left / pixels, mark.y / pixels - top - plot.bbox.top / pixels) })).sort((a, b) => a.far - b.far)[0];
  let best = null;
  for (const line of drawn) {
    const value = interpolated([line.xs, line.ys], x);
    if (value === null) continue;
    const far = Math.abs(plot.valToPos(value, "y") - top);
    if (!best || far < best.far) best = { line, value, far };
  }
  const isMark = near && near.far < 10;
  if (!isMark && (!best || best.far > 40)) { tip.hidden = true; if (plot.pointed) { plot.pointed = false; light(null); } return; }
  const line = isMark ? near.mark.line : best.line;
  const where = isMark ? `step ${near.mark.step.toLocaleString("en-US")}` : `${AXES[view.axis].toLowerCase()} ${axisText(view.axis === "time" ? x : Math.round(x))}`;
  replace(tip, element("b", {}, line.label), isMark ? `${where}: ${near.mark.text}` : `${view.metric.name} ${numberText(best.value)}${view.smoothing ? " (smoothed)" : ""}, ${where}`);
  tip.hidden = false;
  const wide = byId("plot").clientWidth;
  tip.style.left = `${Math.min(left + plot.bbox.left / pixels + 14, wide - tip.offsetWidth - 4)}px`;
  tip.style.top = `${Math.max(0, top - tip.offsetHeight - 8)}px`;
  plot.pointed = true;
  light(line.runs.map(run => run.at));
}
function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !chart) return;
  const { min, max } = chart.scales.x, lay = view.logX ? Math.log : value => value, lift = view.logX ? Math.exp : value => value;
  const low = lay(min), high = lay(max), wide = high - low;
  const moves = { "+": [0.25, -0.25], "=": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2] };
  if (event.key === "0") zoom(null);
  else if (moves[event.key]) zoom({ x: [lift(low + wide * moves[event.key][0]), lift(high + wide * moves[event.key][1])], y: null });
  else return;
  event.preventDefault();
}
listeners.push(() => { if (chart) chart.redraw(false); });

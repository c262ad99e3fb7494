// How the metric depends on the values that differ: a scatter plot of one value, and parallel coordinates of all.
const WIDTH = 560, HEIGHT = 300, MARGIN = { left: 56, right: 16, top: 14, bottom: 44 };
const choice = { row: null, isLog: null };
const held = new Map();
// A seed explains nothing, if there is anything else.
const PLOTTED = LEADING.some(row => !row.seed) ? LEADING.filter(row => !row.seed) : LEADING;

// The scale of a value: numbers on a line, texts at equal distances.
function scaleOf(row, low, high) {
  const known = row.numbers, texts = row.values;
  const isNumeric = texts.every(value => value.runs.every(at => known[at] !== null));
  if (!isNumeric) {
    const place = new Map(texts.flatMap((value, at) => value.runs.map(run => [run, at])));
    const step = (high - low) / Math.max(1, texts.length - 1);
    return { at: run => texts.length > 1 ? low + step * place.get(run) : (low + high) / 2, ticks: texts.map((value, at) => [texts.length > 1 ? low + step * at : (low + high) / 2, value.text ?? "not set"]) };
  }
  const values = known.filter(value => value !== null), least = Math.min(...values), most = Math.max(...values);
  const isLog = least > 0 && most / least >= 20, lay = isLog ? Math.log : value => value;
  const place = value => lay(most) === lay(least) ? (low + high) / 2 : low + (high - low) * (lay(value) - lay(least)) / (lay(most) - lay(least));
  const distinct = [...new Set(values)].sort((a, b) => a - b);
  const shown = distinct.length <= 6 ? distinct : [least, isLog ? Math.sqrt(least * most) : (least + most) / 2, most];
  return { at: run => place(known[run]), ticks: shown.map(value => [place(value), numberText(value)]), isLog };
}
// Three to seven round numbers within a range.
function roundNumbers(least, most) {
  const unit = 10 ** Math.floor(Math.log10((most - least) / 3)), step = unit * [5, 2, 1].find(factor => unit * factor * 3 <= most - least);
  const found = [];
  for (let at = Math.ceil(least / step); at * step <= most; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}
function metricScale(low, high) {
  const values = RUNS.map(run => bestOf(run, METRICS[0])).filter(value => value !== null), [least, most] = extent([values], false);
  const place = value => low + (high - low) * (value - least) / (most - least);
  return { at: run => place(bestOf(RUNS[run], METRICS[0])), ticks: roundNumbers(least, most).map(value => [place(value), numberText(value)]) };
}
const measured = () => RUNS.filter(run => bestOf(run, METRICS[0]) !== null);
const cut = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;
// Of a constructor, the name without its module.
const brief = (text, most) => cut(text.includes(" ") ? text : text.slice(text.lastIndexOf(":") + 1), most);
const told = run => shape("title", {}, `${run.label}: ${DATA.metric} ${numberText(bestOf(run, METRICS[0]))}`);

function scatter() {
  const row = choice.row, x = scaleOf(row, MARGIN.left + 16, WIDTH - MARGIN.right - 16), y = metricScale(HEIGHT - MARGIN.bottom, MARGIN.top);
  const crowded = x.ticks.length > 7, most = crowded ? 8 : Math.max(5, Math.floor(80 / x.ticks.length));
  const parts = [
    ...y.ticks.map(([at, text]) => [shape("line", { class: "rule", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: at, y2: at }), shape("text", { class: "tick", x: MARGIN.left - 8, y: at + 4, "text-anchor": "end" }, text)]),
    ...x.ticks.map(([at, text], place) => crowded && place % Math.ceil(x.ticks.length / 7) ? [] : [shape("text", { class: "tick", x: at, y: HEIGHT - MARGIN.bottom + 18, "text-anchor": "middle" }, brief(text, most), shape("title", {}, text))]),
    shape("text", { x: (MARGIN.left + WIDTH) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, row.name + (x.isLog ? " (log)" : "")),
    ...[...measured()].sort((a, b) => RANK[b.at] - RANK[a.at]).map(run => shape("circle", { class: "dot", cx: x.at(run.at), cy: y.at(run.at), r: WINNERS.has(run.at) ? 8 : 6, fill: colorOf(run), tabindex: 0, role: "img", "aria-label": told(run).textContent, ...lights([run.at]) }, told(run))),
  ].flat();
  return shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, id: "scatter", role: "group", "aria-label": `best ${DATA.metric} by ${row.name}` }, parts);
}
const isHeld = run => [...held.values()].every(([low, high, at]) => at(run.at) >= low && at(run.at) <= high);
function parallel() {
  const rows = PLOTTED.slice(0, 8), wide = 780, tall = HEIGHT, low = tall - 46, high = 40;
  const axes = [...rows.map(row => ({ name: row.short, title: row.name, ...scaleOf(row, low, high) })), { name: `best ${DATA.metric}`, title: `best ${DATA.metric}`, ...metricScale(low, high), isLast: true }];
  const left = 70, gap = (wide - left - 90) / Math.max(1, axes.length - 1), x = at => left + gap * at;
  const lines = [...measured()].sort((a, b) => RANK[b.at] - RANK[a.at]).map(run => shape("path", { class: `line${isHeld(run) ? "" : " faded"}`, stroke: colorOf(run), "stroke-width": WINNERS.has(run.at) ? 3 : null, d: `M${axes.map((axis, at) => `${x(at)},${axis.at(run.at)}`).join("L")}`, ...lights([run.at]) }, told(run)));
  const parts = axes.map((axis, at) => {
    const from = event => { const box = svg.getBoundingClientRect(); return (event.clientY - box.top) / box.height * tall; };
    const drag = start => {
      const begin = from(start);
      const move = event => { const end = from(event); held.set(axis.title, [Math.min(begin, end), Math.max(begin, end), axis.at]); if (Math.abs(end - begin) < 4) held.delete(axis.title); paint(); };
      addEventListener("pointermove", move);
      addEventListener("pointerup", () => { removeEventListener("pointermove", move); plots(); }, { once: true });
      held.delete(axis.title);
      start.preventDefault();
    };
    const range = held.get(axis.title), every = Math.ceil(axis.ticks.length / 12);
    return [
      shape("line", { class: "axis", x1: x(at), x2: x(at), y1: high, y2: low }),
      shape("text", { x: x(at), y: at % 2 && axes.length > 5 ? 30 : 14, "text-anchor": axis.isLast ? "middle" : "middle" }, cut(axis.name, 22), shape("title", {}, axis.title)),
      ...axis.ticks.map(([y, text], place) => place % every ? null : shape("text", { class: "tick", x: x(at) + (axis.isLast ? 8 : -8), y: y + 4, "text-anchor": axis.isLast ? "start" : "end" }, brief(text, 16), shape("title", {}, text))),
      range ? shape("rect", { class: "held", x: x(at) - 9, width: 18, y: range[0], height: range[1] - range[0] }) : null,
      shape("rect", { class: "brush", x: x(at) - 12, width: 24, y: high - 6, height: low - high + 12, onpointerdown: drag }, shape("title", {}, "drag to keep the runs in a range; a click removes the range")),
    ];
  }).flat().filter(part => part);
  const paint = () => lines.forEach((line, at) => line.classList.toggle("faded", !isHeld(RUNS[Number(line.dataset.run)])));
  const isAbove = part => part.classList.contains("tick") || part.classList.contains("brush");
  const svg = shape("svg", { viewBox: `0 0 ${wide} ${tall}`, id: "parallel", role: "group", "aria-label": "the values that differ, and the result" }, parts.filter(part => !isAbove(part)), lines, parts.filter(isAbove));
  return svg;
}
function plots() {
  const section = byId("values");
  if (!SETTINGS.length || !DATA.metric || !measured().length) {
    replace(section, element("h2", { id: "values-title" }, "Values and results"), element("p", { class: "empty" }, !SETTINGS.length ? "No value of the config differs." : "There is no metric to show them against."));
    return;
  }
  choice.row = choice.row || SETTINGS.find(row => row.name === DATA.verdict.main_setting) || SETTINGS.find(row => !row.seed) || SETTINGS[0];
  const select = element("select", { id: "value", onchange: event => { choice.row = SETTINGS[Number(event.target.value)]; plots(); byId("value").focus(); } }, SETTINGS.map((row, at) => element("option", { value: at, selected: row === choice.row }, row.name)));
  replace(section, element("h2", { id: "values-title" }, "Values and results"),
    element("div", { id: "pair" }, element("div", {}, element("label", {}, `best ${DATA.metric} by `, select), scatter()), element("div", {}, element("p", { class: "quiet" }, `Each line is a run. Drag along an axis to keep a range.${PLOTTED.length < SETTINGS.length || PLOTTED.length > 8 ? ` ${plural(Math.min(8, PLOTTED.length), "value")} of ${SETTINGS.length}: values that change together are one axis, and seeds none.` : ""}`), parallel())));
}

// The page of watched runs: asks each second for what has changed, and draws it. Texts of runs are never markup.
"use strict";

const POLL_MS = 1000, EVENTS = 50;
const NO_CHART = /(_runtime|_per_second|_bytes)$|^(total_flos|num_input_tokens_seen|mfu)$/;
const runs = new Map();  // by folder: { facts, curves: Map of points by name, events }
const cards = new Map();
let version = 0, order = [], metric = null, title = null, numTrials = 0, paths = [], focus = null;

const byId = id => document.getElementById(id);
function make(tag, className, ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
}
// Leaves elements alone that say the same already, so that a reader can select text.
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
const count = value => (value == null ? "–" : value.toLocaleString("en"));
function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 60) return Number(seconds.toPrecision(seconds < 10 ? 2 : 3)) + " s";
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return minutes + " min";
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${(minutes / 1440).toFixed(1)} d`;
}
function bytes(size) {
  if (typeof size !== "number") return "–";
  for (const [unit, power] of [["GiB", 30], ["MiB", 20], ["KiB", 10]])
    if (size >= 2 ** power) return `${(size / 2 ** power).toFixed(1)} ${unit}`;
  return size + " B";
}
const statusOf = facts => facts.status || "unknown";
const lossNames = run => ["loss", ...[...run.curves.keys()].filter(name => /^eval_.*loss$/.test(name))].filter(name => run.curves.has(name));
const lastOf = points => points.length ? points[points.length - 1][3] : null;

function take(answer) {
  version = answer.version;
  ({ metric, title, num_trials: numTrials, paths } = answer);
  order = answer.runs.map(facts => facts.folder);
  for (const facts of answer.runs) {
    const run = runs.get(facts.folder) || { curves: new Map(), events: [] };
    if (facts.restarted) { run.curves.clear(); run.events = []; }
    for (const [name, { kept, points }] of Object.entries(facts.curves || {})) {
      const known = run.curves.get(name) || [];
      known.length = Math.min(known.length, kept);
      run.curves.set(name, known.concat(points));
    }
    run.events = run.events.concat(facts.events || []).slice(-EVENTS);
    run.facts = facts;
    runs.set(facts.folder, run);
  }
  for (const folder of [...runs.keys()]) if (!order.includes(folder)) runs.delete(folder);
}

function figureOf(title) {
  const figure = make("figure", "", make("figcaption", "", make("h3", "", title), make("span", "legend")), make("canvas"));
  addPointer(figure);
  return figure;
}
function plot(figure, run, names, height) {
  const legend = figure.querySelector(".legend");
  if (names.length > 1 && legend.childElementCount !== names.length)
    legend.replaceChildren(...names.map((name, at) => make("span", "", make("i", "k" + at % 5), name)));
  const curves = names.map(name => ({ name, points: inUnit(name, run.curves.get(name)) }));
  drawChart(figure, curves, height);
}

const inUnit = (name, points) => !name.endsWith("_bytes") ? points
  : points.map(([step, ...values]) => [step, ...values.map(value => typeof value === "number" ? value / 2 ** 30 : value)]);
const titleOf = name => name.replace(/_bytes$/, " (GiB)").replaceAll("_", " ");

function cardOf(folder) {
  const parts = {
    name: make("h2"), badge: make("span", "badge"), step: make("b"), left: make("span"), done: make("i"),
    tiles: make("div", "tiles"), chart: figureOf("Loss"), cause: make("p", "note bad"), charts: make("div", "charts"),
    events: make("ul", "events"), happened: make("section", "card", make("h3", "", "What happened")), figures: new Map(),
  };
  const link = make("a", "", parts.name);
  link.href = "#" + encodeURIComponent(folder);
  parts.head = make("div", "head", link, parts.badge);
  parts.happened.append(parts.events);
  parts.card = make("section", "card", parts.head, make("div", "steps", parts.step, parts.left), make("div", "bar", parts.done),
    parts.cause, parts.chart);
  parts.whole = make("div", "", parts.card);
  return parts;
}

function tilesOf(run) {
  const { facts, curves } = run;
  const tiles = [];
  for (const name of lossNames(run).slice(0, 3)) {
    const isBest = facts.best && facts.best.metric === name;
    tiles.push([name, formatNumber(lastOf(curves.get(name))), isBest ? `best ${formatNumber(facts.best.value)} at ${count(facts.best.step)}` : "last"]);
  }
  if (facts.tokens_per_second != null) tiles.push(["tokens/s", formatNumber(facts.tokens_per_second), ""]);
  if (facts.seconds_per_step != null) tiles.push(["time of a step", duration(facts.seconds_per_step), ""]);
  if (facts.memory_bytes != null) tiles.push(["memory", bytes(facts.memory_bytes), "peak"]);
  tiles.push([facts.is_live ? "running for" : "ran for", duration(facts.seconds), ""]);
  return tiles;
}

function show(folder, isWhole) {
  const run = runs.get(folder), { facts } = run;
  if (!cards.has(folder)) cards.set(folder, cardOf(folder));
  const parts = cards.get(folder), status = statusOf(facts);
  say(parts.name, labelOf(facts));
  say(parts.badge, status);
  parts.badge.className = "badge " + status;
  parts.head.hidden = isWhole;
  parts.card.classList.toggle("finished", status === "finished");
  say(parts.step, `step ${count(facts.step)}` + (facts.max_steps ? ` of ${count(facts.max_steps)}` : ""));
  const seen = !facts.is_live && status === "killed" && facts.last_seen ? "last seen " + new Date(facts.last_seen * 1000).toLocaleString() : "";
  say(parts.left, facts.seconds_left != null ? duration(facts.seconds_left) + " left" : seen);
  const share = facts.max_steps ? Math.min(1, (facts.step || 0) / facts.max_steps) : 0;
  parts.done.style.width = (100 * share).toFixed(1) + "%";
  say(parts.cause, [facts.cause, ...facts.problems].filter(Boolean).join(" · "));
  parts.cause.hidden = !parts.cause.textContent;
  const tiles = tilesOf(run);
  while (parts.tiles.childElementCount > tiles.length) parts.tiles.lastChild.remove();
  tiles.forEach((texts, at) => {
    const tile = parts.tiles.children[at] || parts.tiles.appendChild(make("div", "tile", make("span"), make("b"), make("small")));
    texts.forEach((text, part) => say(tile.children[part], text));
  });
  parts.whole.classList.toggle("few", !isWhole);
  isWhole ? parts.card.before(parts.tiles) : parts.card.append(parts.tiles);
  const losses = lossNames(run), names = losses.length ? losses : [...run.curves.keys()].filter(name => !NO_CHART.test(name)).slice(0, 1);
  parts.chart.hidden = !names.length;
  say(parts.chart.querySelector("h3"), losses.length ? "Loss" : names[0] || "");
  parts.names = names;
  showEvents(parts, run, isWhole);
  showOthers(parts, run, names, isWhole);
  return parts;
}

function showEvents(parts, run, isWhole) {
  const shown = run.events.slice(isWhole ? -EVENTS : -2).reverse(), key = shown.map(event => event.number).join();
  if (parts.events.dataset.key !== key + isWhole) {
    parts.events.dataset.key = key + isWhole;
    parts.events.replaceChildren(...shown.map(event =>
      make("li", "", make("b", "", (event.step == null ? "" : `step ${count(event.step)} · `) + event.kind), " ", event.text)));
  }
  parts.happened.hidden = !shown.length;
  if (isWhole) { parts.happened.append(parts.events); parts.card.after(parts.happened); }
  else { parts.happened.remove(); parts.card.append(parts.events); }
}

function showOthers(parts, run, shown, isWhole) {
  const names = isWhole ? [...run.curves.keys()].filter(name => !shown.includes(name) && !/_runtime$/.test(name)).slice(0, 24) : [];
  for (const name of names) {
    if (parts.figures.has(name)) continue;
    const figure = figureOf(titleOf(name));
    parts.figures.set(name, figure);
    parts.charts.append(make("section", "card", figure));
  }
  parts.others = names;
  isWhole && names.length ? parts.whole.append(parts.charts) : parts.charts.remove();
}

function labelOf(facts) {
  if (metric !== null)
    return [facts.output, ...paths.filter(path => path in facts.changes).map(path => `${endOf(path)} ${facts.changes[path]}`)].join(" · ");
  const others = [...runs.values()].filter(other => other.facts.name === facts.name);
  return others.length > 1 ? `${facts.output} / ${facts.name}` : facts.name;
}
const endOf = path => path.split(".").pop();

function showTable() {
  const all = order.map(folder => runs.get(folder).facts), shown = paths;
  const cell = (tag, content) => make(tag, "", content);
  const head = make("tr", "", ...["run", "status", "step", `best ${metric}`, ...shown.map(endOf)].map(text => cell("th", text)));
  const rows = all.slice(0, 200).map((facts, at) => {
    const name = runs.get(facts.folder).curves.size ? make("a", "", facts.output) : facts.output;
    if (name.href !== undefined) name.href = "#" + encodeURIComponent(facts.folder);
    const row = make("tr", at === 0 && facts.best ? "best" : "", cell("td", name), cell("td", make("span", statusOf(facts), statusOf(facts))),
      cell("td", count(facts.step) + (facts.max_steps ? ` / ${count(facts.max_steps)}` : "")), cell("td", facts.best ? formatNumber(facts.best.value) : "–"),
      ...shown.map(path => cell("td", facts.changes[path] || "–")));
    return row;
  });
  const key = JSON.stringify(all.map(facts => [facts.folder, facts.status, facts.step, facts.best]));
  if (byId("table").dataset.key === key) return;
  byId("table").dataset.key = key;
  byId("table").replaceChildren(make("table", "", make("thead", "", head), make("tbody", "", ...rows)));
}

function draw() {
  const followed = order.filter(folder => runs.get(folder).facts.is_live !== undefined);
  if (focus !== null && !followed.includes(focus)) focus = null;
  const single = focus !== null ? focus : order.length === 1 && followed.length === 1 ? followed[0] : null;
  const shown = single !== null ? [single] : followed;
  byId("table").hidden = metric === null || single !== null || !order.length;
  if (!byId("table").hidden) showTable();
  const place = byId("runs"), parts = shown.map(folder => show(folder, single !== null));
  place.className = single === null ? "many" : "";
  if (place.childElementCount !== parts.length || parts.some((part, at) => place.children[at] !== part.whole))
    place.replaceChildren(...parts.map(part => part.whole));
  showHead(single, followed);
  parts.forEach((part, at) => {
    const run = runs.get(shown[at]);
    if (part.names.length) plot(part.chart, run, part.names, single !== null ? 300 : 190);
    for (const name of part.others) plot(part.figures.get(name), run, [name], 150);
  });
  document.documentElement.dataset.version = version;
}

function showHead(single, followed) {
  const badge = byId("badge");
  byId("kicker").replaceChildren(single !== null && order.length > 1 ? Object.assign(make("a", "", "← all runs"), { href: "#" }) : "watching");
  if (single !== null) {
    const facts = runs.get(single).facts;
    say(byId("title"), labelOf(facts));
    say(byId("sub"), [facts.config, facts.started && "started " + new Date(facts.started * 1000).toLocaleString()].filter(Boolean).join(" · "));
    say(badge, statusOf(facts));
    badge.className = "badge " + statusOf(facts);
    document.title = `${facts.max_steps && facts.step ? Math.floor(100 * facts.step / facts.max_steps) + " % · " : ""}${facts.name}`;
    return;
  }
  const paused = followed.filter(folder => runs.get(folder).facts.status === "paused").length;
  const live = followed.filter(folder => runs.get(folder).facts.is_live).length - paused;
  const known = `${order.length} run${order.length === 1 ? "" : "s"}`;
  say(byId("title"), title || (order.length ? known : "No run yet"));
  const sorted = metric !== null ? `the best ${metric} first` : "the newest first";
  const started = title ? `${order.length} of ${Math.max(numTrials, order.length)} trials started · ` : "";
  say(byId("sub"), order.length || title ? started + sorted : "New runs are shown here as they start.");
  const ends = new Map();
  if (!live && !paused) for (const folder of order) { const status = statusOf(runs.get(folder).facts); ends.set(status, (ends.get(status) || 0) + 1); }
  const words = [live ? `${live} running` : "", paused ? `${paused} paused` : "", ...[...ends].map(([status, number]) => `${number} ${status}`)];
  say(badge, words.filter(Boolean).join(", ") || "0 running");
  badge.className = "badge " + (live ? "running" : paused ? "paused" : ends.size === 1 ? [...ends.keys()][0] : "unknown");
  document.title = badge.textContent + (title ? ` · ${title}` : "");
}

async function poll() {
  try {
    const answer = await fetch(`changes?since=${version}`);
    if (!answer.ok) throw new Error(answer.statusText);
    take(await answer.json());
    byId("lost").hidden = true;
    draw();
  } catch (error) {
    byId("lost").hidden = false;
    say(byId("lost"), "The server does not answer: what is shown is no longer up to date. Start 'fgcli watch --serve' again.");
    if (!(error instanceof TypeError)) console.error(error);
  }
  setTimeout(poll, POLL_MS);
}

function readFocus() {
  focus = location.hash.length > 1 ? decodeURIComponent(location.hash.slice(1)) : null;
  if (version) draw();
}
addEventListener("hashchange", readFocus);
addEventListener("resize", () => version && draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => version && draw());
readFocus();
poll();

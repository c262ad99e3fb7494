// The page: views, selection, keyboard, and the address that leads back to what is shown.

const objects = new Objects(byId("objects"));
const templates = new Templates(byId("templates"));
const text = new Sheet(byId("text"));
const panel = new Panel(byId("panel"), item => go(item), line => goToLine(line));
const search = new Search(item => go(item), () => {});
const help = byId("help");
const views = { objects, templates, text };
const laidOut = new Set();
let view = "objects";
let selected = null;
let written = null; // the address that this page set itself

function show(name) {
  view = name;
  for (const key of Object.keys(views)) byId(key).hidden = key !== name;
  for (const tab of byId("views").children) tab.setAttribute("aria-pressed", tab.dataset.view === name);
  byId("strip").hidden = name === "text";
  legend(name);
  if (name === "text") text.build();
  else if (!laidOut.has(name)) {
    laidOut.add(name);
    if (name === "objects") objects.begin();
    else views[name].layout();
    views[name].canvas.fit(views[name].smallest);
  } else views[name].canvas.draw();
  if (name !== "text") views[name].canvas.onzoom(views[name].canvas.scale);
}

function select(item) {
  selected = item;
  objects.select(item && (isBox(item) || isRow(item) || isTemplate(item)) ? item : null);
  templates.select(item);
  if (text.made) text.select(item);
  tell();
  if (item) panel.show(item);
  else panel.close();
  address();
}

/** Says why the views of what was written show no writer of a thing. */
function tell() {
  const thing = selected && !selected.number && !isTemplate(selected) ? selected : null;
  const shown = view === "objects" || (view === "text" && thing && text.linesOf(thing).length > 0);
  if (!thing || shown || !fromCommand(thing)) return say();
  const change = changeOf(thing);
  say(`Set on the command line${view === "templates" ? ", by no template" : ""}`, change ? ": " : ".", change ? make("code", "", cut(`--set ${change}`, 120)) : null);
}

/** Selects a thing and brings it into view, in the view that is shown where it is there too. */
function go(item) {
  if (isTemplate(item)) {
    show("templates");
    select(item);
    templates.reveal(item);
  } else if (view === "text" && text.linesOf(item).length) {
    select(item);
    text.reveal(item);
  } else {
    show("objects");
    select(item);
    objects.reveal(item);
  }
}

function goToLine(line) {
  const item = selected && lineNumber(selected) === line ? selected : linesOf.get(line) || { number: line };
  show("text");
  select(item);
  text.select({ number: line });
  text.reveal({ number: line });
}

function address() {
  let path = "";
  if (selected === null) path = view === "objects" ? "" : `/${view}`;
  else if (isTemplate(selected)) path = `/templates/${selected.id}`;
  else if (selected.number) path = `/text/${selected.number}`;
  else path = pathOf(selected);
  written = path ? "#" + encodeURIComponent(path).replace(/%(5B|5D|2F)/g, code => decodeURIComponent(code)) : "#";
  if (written !== (location.hash || "#")) history.replaceState(null, "", written);
}

function follow() {
  if ((location.hash || "#") === written) return false;
  let path = location.hash.slice(1);
  try {
    path = decodeURIComponent(path);
  } catch {
    // not one of ours: taken as it is
  }
  const [, name, rest] = /^\/(text|templates|objects)(?:\/(\d+))?$/.exec(path) || [];
  if (name === "text" && rest && Number(rest) <= data.lines.length) goToLine(Number(rest));
  else if (name === "templates" && data.templates[rest]) go(data.templates[rest]);
  else if (name) show(name);
  else {
    const item = path && resolve(path);
    if (path && !item) sayUnknown(path, go);
    show("objects");
    if (item) go(item);
  }
  return true;
}

const actions = {
  fold: () => views[view].setAll(false),
  unfold: () => views[view].setAll(true),
  out: () => views[view].canvas.zoom(views[view].canvas.scale / 1.25),
  in: () => views[view].canvas.zoom(views[view].canvas.scale * 1.25),
  real: () => views[view].canvas.zoom(1),
  fit: () => views[view].canvas.fit(),
};

function listen() {
  byId("views").addEventListener("click", event => {
    if (event.target.dataset.view) turn(event.target.dataset.view);
  });
  byId("tools").addEventListener("click", event => actions[event.target.dataset.do]?.());
  for (const name of ["objects", "templates"]) {
    const host = byId(name);
    views[name].canvas.onzoom = scale => { if (view === name) byId("zoom").textContent = `${Math.round(scale * 100)}%`; };
    host.addEventListener("click", event => click(event, name));
    host.addEventListener("pointerover", event => hover(event, name));
  }
  byId("objects").addEventListener("dblclick", event => {
    const element = event.target.closest(".box");
    if (element && !event.target.closest("button") && canTurn(boxes[element.dataset.id])) objects.toggle(boxes[element.dataset.id]);
  });
  byId("text").addEventListener("click", event => {
    const line = event.target.closest(".line");
    if (!line || String(getSelection())) return;
    if (text.given.includes(line)) return select(itemOf(data.overrides[text.given.indexOf(line)]));
    const number = Number(line.dataset.line);
    select(linesOf.get(number) || { number });
    text.select({ number });
  });
  byId("ask").addEventListener("click", () => help.showModal());
  help.addEventListener("click", event => { if (event.target === help || event.target.closest(".close")) help.close(); });
  byId("findings").addEventListener("click", () => panel.showFindings());
  panel.onclose = () => select(null);
  addEventListener("hashchange", follow);
  document.addEventListener("keydown", press);
}

/** Changes the view and keeps the selection in sight. */
function turn(name) {
  show(name);
  if (name === "text") {
    text.select(selected);
    if (selected) text.reveal(selected);
  } else if (name === "templates") templates.revealWriter();
  else if (name === "objects" && selected && (isBox(selected) || isRow(selected))) objects.reveal(selected);
  tell();
  address();
}

function click(event, name) {
  const element = event.target.closest(".box");
  if (!element) return select(null);
  if (name === "templates") select(data.templates[element.dataset.template]);
  else {
    const box = boxes[element.dataset.id];
    const row = event.target.closest(".row");
    select(row ? shownRows(box)[row.dataset.row] : box);
  }
  views[name].canvas.keep(views[name].nodes.get(Number(element.dataset.id ?? element.dataset.template)));
}

function hover(event, name) {
  const element = event.target.closest(".box");
  const chosen = selected && (name === "templates" ? (templates.writers(selected).now[0]?.id ?? null) : tracedBy(selected));
  views[name].canvas.trace(element ? element.dataset.id ?? element.dataset.template : chosen);
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
  if (help.open) {
    if (event.key === "?") help.close();
    return;
  }
  const turns = { 1: "objects", 2: "templates", 3: "text" };
  if (event.key === "/") {
    event.preventDefault();
    search.focus();
  } else if (event.key === "?") help.showModal();
  else if (event.key === "Escape") select(null);
  else if (turns[event.key]) turn(turns[event.key]);
  else if (view !== "text" && event.key === "f") actions.fit();
  else if (view !== "text" && event.key === "0") actions.real();
  else if (view !== "text" && (event.key === "+" || event.key === "=")) actions.in();
  else if (view !== "text" && event.key === "-") actions.out();
  else if (view === "objects" && (event.key === " " || event.key === "Enter") && selected && !event.target.matches("button, summary")) {
    event.preventDefault();
    const box = isBox(selected) ? selected : selected.box === undefined ? null : boxes[selected.box];
    if (box && canTurn(box) && objects.nodes.has(box.id)) objects.toggle(box);
  }
}

const LEGENDS = {
  objects: [["singleton", "built once"], ["factory", "built anew"], ["partial", "callable for later"], ["plain", "data"],
    ["sharing", "shared"], ["replacing", "replaced an earlier value"]],
  templates: [["extends", "extends"], ["include", "includes"], ["import", "imports"], ["wrote", "wrote what is selected"],
    ["wrote-before", "wrote what that replaced"]],
};

function legend(name) {
  byId("legend").replaceChildren(...(LEGENDS[name] || []).map(([kind, meaning]) => make("span", kind, make("i", ""), meaning)));
}

byId("config").textContent = visible(data.config);
byId("project").textContent = visible(data.project);
if (data.findings.length) {
  const [found, notes] = [data.findings.filter(isFinding), data.findings.filter(isNote)];
  const worst = ["error", "warning", "lint", "note"].find(severity => data.findings.some(finding => finding.severity === severity));
  const count = (things, word) => `${things.length} ${word}${things.length === 1 ? "" : "s"}`;
  Object.assign(byId("findings"), { hidden: false, className: worst, textContent: found.length ? count(found, "finding") : count(notes, "note") });
}
listen();
follow();
document.documentElement.dataset.ready = Math.round(performance.now());

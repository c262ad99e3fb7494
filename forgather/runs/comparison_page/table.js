// The runs as a table that can be sorted, and the means of seeds.
const MANY = 4;
const bestOf = (run, metric) => { const entry = entryOf(run, metric); return entry ? entry[0] : null; };
function secondsOf(run) {
  const known = points(run.curves.time);
  return known ? known[1].at(-1) : null;
}
function columns(all) {
  const metrics = all ? METRICS : METRICS.filter((metric, at) => at === 0 || metric.higher !== null && !metric.cost).slice(0, MANY);
  const top = metric => { const values = RUNS.map(run => bestOf(run, metric)).filter(value => value !== null); return metric.higher ? Math.max(...values) : Math.min(...values); };
  const found = [{ name: "#", key: run => RANK[run.at], cell: run => [String(RANK[run.at] + 1)], number: true }];
  const measure = metric => {
    const most = top(metric);
    // The best speed of any step says nothing about a run.
    if (metric.higher !== null && !metric.cost) found.push({ name: `best ${metric.name}`, number: true, key: run => bestOf(run, metric), isTop: run => bestOf(run, metric) === most && RUNS.length > 1, cell: run => { const entry = entryOf(run, metric); return entry && entry[0] !== null ? [numberText(entry[0]), element("small", {}, ` @${entry[1].toLocaleString("en-US")}`)] : ["–"]; } });
    found.push({ name: `last ${metric.name}`, number: true, key: run => { const entry = entryOf(run, metric); return entry ? entry[2] : null; }, cell: run => { const entry = entryOf(run, metric); return !entry ? ["–"] : entry[2] === null ? [element("span", { class: "bad" }, "not finite")] : [numberText(entry[2])]; } });
  };
  // The metric that ranks the runs is next to their names, so that a narrow window shows it, too.
  metrics.slice(0, 1).forEach(measure);
  for (const row of all ? SETTINGS : LEADING.slice(0, 6)) {
    const value = at => row.values.find(one => one.runs.includes(at));
    found.push({ name: row.short, title: row.name, key: run => row.numbers[run.at] ?? value(run.at).text ?? "", cell: run => [element("span", { class: "mono", title: value(run.at).places.join(", ") }, brief(value(run.at).text ?? "–", 40))] });
  }
  metrics.slice(1).forEach(measure);
  found.push({ name: "status", key: run => run.status, cell: run => [element("span", { class: run.status === "finished" ? null : ["failed", "killed"].includes(run.status) ? "bad" : "warn" }, run.status)] });
  found.push({ name: "steps", number: true, key: run => run.step, cell: run => [run.step === null ? "–" : run.step.toLocaleString("en-US"), run.max && run.max !== run.step ? element("small", {}, ` of ${run.max.toLocaleString("en-US")}`) : ""] });
  found.push({ name: "time", title: "from the first to the last line of the metrics, without pauses", number: true, key: secondsOf, cell: run => [secondsOf(run) === null ? "–" : timeText(secondsOf(run))] });
  found.push({ name: "started", key: run => run.started || "", cell: run => [(run.started || "–").slice(0, 16).replace("T", " ")] });
  found.push({ name: "folder", key: run => run.folder, cell: run => [element("span", { class: "place" }, run.folder)] });
  return found;
}
const sorting = { name: "#", descending: false, all: false };
// Missing values are last in both directions.
function ordered(column) {
  const sign = sorting.descending ? -1 : 1;
  return [...RUNS].sort((a, b) => {
    const one = column.key(a), two = column.key(b), lacks = value => value === null || value === undefined || value === "";
    if (lacks(one) || lacks(two)) return lacks(one) - lacks(two) || RANK[a.at] - RANK[b.at];
    return sign * (typeof one === "number" && typeof two === "number" ? one - two : String(one).localeCompare(String(two), "en", { numeric: true })) || RANK[a.at] - RANK[b.at];
  });
}
function runsTable() {
  const shown = columns(sorting.all), by = shown.find(column => column.name === sorting.name) || shown[0];
  const head = column => element("th", { scope: "col", class: column.number ? "number" : null, title: column.title, "aria-sort": column === by ? (sorting.descending ? "descending" : "ascending") : "none" },
    element("button", { type: "button", onclick: () => { sorting.descending = sorting.name === column.name && !sorting.descending; sorting.name = column.name; runsTable(); } }, column.name));
  const rows = ordered(by).map(run => element("tr", { ...lights([run.at]), class: WINNERS.has(run.at) ? "first" : null },
    element("th", { scope: "row", title: run.label }, swatchOf(run), " ", run.label),
    shown.map(column => element("td", { class: [column.number ? "number" : "", column.isTop && column.isTop(run) ? "top" : ""].join(" ").trim() || null }, column.cell(run)))));
  const more = columns(true).length > columns(false).length ? element("label", { class: "check" }, fill(element("input", { type: "checkbox", onchange: event => { sorting.all = event.target.checked; runsTable(); } }), { checked: sorting.all }, []), " all metrics and values") : null;
  replace(byId("runs"), element("h2", { id: "runs-title" }, "Runs"), HAS_SEEDS ? seedsTable() : null, more ? element("p", {}, more) : null,
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-labelledby": "runs-title" }, element("table", {}, element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "run"), shown.map(head))), element("tbody", {}, rows))));
}
function seedsTable() {
  const rows = GROUPS.map((group, at) => element("tr", { class: at === 0 && WINNERS.size ? "first" : null }, element("th", { scope: "row" }, group.label), element("td", { class: "number" }, String(group.runs.length)), element("td", { class: "number" }, numberText(group.mean)), element("td", { class: "number" }, group.deviation === null ? "–" : `± ${numberText(group.deviation)}`)));
  return element("details", { open: GROUPS.length <= 8 }, element("summary", {}, "Means over seeds"), element("div", { class: "means", tabindex: 0 }, element("table", { class: "narrow" }, element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "config"), element("th", { scope: "col", class: "number" }, "seeds"), element("th", { scope: "col", class: "number" }, `mean of best ${DATA.metric || "value"}`), element("th", { scope: "col", class: "number" }, "deviation"))), element("tbody", {}, rows))));
}

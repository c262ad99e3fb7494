// What differs: values of the config with the lines that set them, code, versions, data and hardware.
const chip = at => element("span", { class: `chip${WINNERS.has(at) ? " best" : ""}`, title: RUNS[at].label, ...lights([at]) }, swatchOf(RUNS[at]), element("span", {}, RUNS[at].label));
function chips(runs) {
  if (runs.length === RUNS.length) return ["all runs"];
  const ordered = [...runs].sort((a, b) => RANK[a] - RANK[b]), shown = ordered.slice(0, 8);
  const rest = ordered.slice(8);
  return [element("div", { class: "chips" }, shown.map(chip), rest.length ? element("details", {}, element("summary", {}, `and ${plural(rest.length, "more run")}`), element("div", { class: "chips" }, rest.map(chip))) : null)];
}
function differenceRows(row) {
  const also = row.also && row.also.length ? element("div", { class: "quiet" }, `also ${row.also.slice(0, 2).join(", ")}${row.also.length > 2 ? ", …" : ""}`) : null;
  const order = [...row.values].sort((a, b) => Math.min(...a.runs.map(at => RANK[at])) - Math.min(...b.runs.map(at => RANK[at])));
  return order.map((value, at) => element("tr", { class: at ? "next" : null },
    at ? null : element("td", { rowspan: order.length }, element("code", {}, row.name), also),
    element("td", {}, value.text === null ? element("span", { class: "quiet" }, "not set") : element("code", {}, value.text)),
    row.kind === "config" ? element("td", {}, value.places.map(place => element("div", { class: "place" }, place))) : null,
    element("td", {}, chips(value.runs))));
}
const differenceTable = (rows, heads) => element("div", { class: "scroll", tabindex: 0 }, element("table", { class: "differ" }, element("thead", {}, element("tr", {}, heads.map(head => element("th", { scope: "col" }, head)))), element("tbody", {}, rows.map(differenceRows))));

function configs() {
  const heads = ["path", "value", "set by", "runs"], rows = SETTINGS, others = DATA.config.filter(row => row.label);
  replace(byId("config"), element("h2", { id: "config-title" }, "Config"),
    rows.length ? differenceTable(rows, heads) : element("p", { class: "empty" }, "No value of the config differs."),
    others.length ? element("details", {}, element("summary", {}, `${plural(others.length, "difference")} in names and output folders`), differenceTable(others, heads)) : null);
}
const KINDS = { code: "Code and templates", version: "Versions", data: "Data", hardware: "Hardware and environment" };
function changeOf([version, lines]) {
  const kinds = { "+": "plus", "-": "minus", "@": "at" };
  return [element("p", { class: "quiet" }, `version 1 → ${version}`), element("pre", { tabindex: 0 }, lines.map(line => element("span", { class: kinds[line[0]] || null }, `${line}\n`)))];
}
function facts() {
  const parts = Object.entries(KINDS).map(([kind, title]) => {
    const rows = DATA.facts.filter(row => row.kind === kind);
    if (!rows.length) return [];
    const changes = rows.filter(row => row.changes && row.changes.length).map(row => element("details", {}, element("summary", {}, `what changed in ${row.name}`), row.changes.map(changeOf)));
    return [element("h3", {}, title), differenceTable(rows, [kind === "code" ? "file" : "name", "value", "runs"]), changes];
  });
  const same = Object.entries(KINDS).filter(([kind]) => !DATA.facts.some(row => row.kind === kind)).map(([, title]) => title.toLowerCase());
  replace(byId("facts"), element("h2", { id: "facts-title" }, "Code, versions, data and hardware"), same.length ? element("p", { class: "empty" }, `The same in all runs: ${same.join(", ")}.`) : null, parts);
}

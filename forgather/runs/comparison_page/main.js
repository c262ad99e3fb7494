// The result in words on top, and everything below it.
function verdict() {
  const found = DATA.verdict, head = found.winner ? element("h1", {}, element("em", {}, found.winner), " is best") : element("h1", {}, "No run is called the best");
  const reasons = found.reasons.slice(0, 6), side = (value, place, tag) => element("td", {}, element(tag, { class: "mono" }, value), element("div", { class: "place" }, place));
  const heads = ["what differs", `${found.winner} (best)`, `${found.next} (next)`].map(text => element("th", { scope: "col" }, text));
  const rows = reasons.map(reason => element("tr", {}, element("td", {}, element("code", {}, reason.name)), side(reason.value, reason.place, "b"), side(reason.other, reason.other_place, "span")));
  const more = found.reasons.length > 6 ? element("p", { class: "quiet" }, `and ${plural(found.reasons.length - 6, "more value")}: see `, element("a", { href: "#config" }, "Config"), ".") : null;
  replace(byId("verdict"), head, element("p", { class: "result" }, found.result),
    rows.length ? element("table", { class: "why narrow" }, element("thead", {}, element("tr", {}, heads)), element("tbody", {}, rows)) : found.cause ? element("p", {}, found.cause) : null,
    more, found.influence ? element("p", { class: "influence" }, found.influence) : null, found.notes.length ? element("ul", { class: "notes" }, found.notes.map(note => element("li", {}, note))) : null);
  byId("count").textContent = plural(RUNS.length, "run");
}
function everything() {
  legend();
  draw();
  panels();
  runsTable();
  plots();
  configs();
  facts();
}
verdict();
tools();
everything();
isDark.addEventListener("change", everything);
let waiting = null;
new ResizeObserver(() => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => { if (chart && (chart.width !== byId("plot").clientWidth || chart.height !== byId("plot").clientHeight)) { draw(); panels(); } }); }).observe(byId("plot"));
document.documentElement.dataset.ready = String(performance.now());

// The legend, and a small chart of each metric.
function show(run, shown) { run.shown = shown; }
function legend() {
  const metric = view.metric, groups = view.seeds ? GROUPS : DATA.ranking.map(at => ({ runs: [at], label: RUNS[at].label }));
  const meanOf = runs => {
    const entries = runs.map(at => DATA.table[at][metric.at]).filter(entry => entry).map(entry => entry[0] !== null ? entry[0] : entry[2]).filter(value => value !== null);
    return entries.length ? numberText(entries.reduce((sum, value) => sum + value, 0) / entries.length) : "–";
  };
  const button = ({ runs, label }) => {
    const members = runs.map(at => RUNS[at]), isShown = members.some(run => run.shown);
    return element("button", {
      type: "button", class: `run${members.some(run => WINNERS.has(run.at)) ? " best" : ""}`, "aria-pressed": String(isShown), title: [label, ...members.map(run => run.folder)].join("\n"), ...lights(runs),
      onclick: event => { if (event.detail < 2) { members.forEach(run => show(run, !isShown)); refresh(); } },
      ondblclick: () => { RUNS.forEach(run => show(run, runs.includes(run.at))); refresh(); },
    }, swatch(colorOf(members[0]), view.seeds ? [] : dashOf(members[0])), element("span", { class: "name" }, label, runs.length > 1 ? element("span", { class: "quiet" }, ` × ${runs.length}`) : ""), element("span", { class: "value" }, meanOf(runs)));
  };
  const all = (text, test) => element("button", { type: "button", onclick: () => { RUNS.forEach(run => show(run, test(run))); refresh(); } }, text);
  const top = groups.length > 6 ? all("Best 5", run => groups.slice(0, 5).some(group => group.runs.includes(run.at))) : null;
  const scrolled = byId("legend").scrollTop, focused = byId("legend").contains(document.activeElement) ? document.activeElement.dataset.run : null;
  replace(byId("legend"), element("div", { class: "all" }, all("All", () => true), all("None", () => false), top), groups.map(button));
  byId("legend").scrollTop = scrolled;
  const again = focused && byId("legend").querySelector(`[data-run="${focused}"]`);
  if (again) again.focus();
}
function refresh() { legend(); draw(); panels(); }

function sketch(canvas, metric) {
  const pixels = devicePixelRatio, width = canvas.width = canvas.clientWidth * pixels, height = canvas.height = canvas.clientHeight * pixels;
  const ctx = canvas.getContext("2d");
  const lines = [...DATA.ranking].reverse().map(at => RUNS[at]).filter(run => run.shown).map(run => [run, points(curveOf(run, metric))]).filter(([, line]) => line && line[0].length);
  const [left, right] = extent(lines.map(([, line]) => line[0]), false), [low, high] = extent(lines.map(([, line]) => line[1]), false);
  ctx.lineJoin = "round";
  for (const [run, [xs, ys]] of lines) {
    ctx.strokeStyle = ctx.fillStyle = colorOf(run);
    ctx.lineWidth = (isLit(run) ? 2.6 : WINNERS.has(run.at) ? 1.8 : 1) * pixels;
    ctx.globalAlpha = lit === null || isLit(run) ? 1 : 0.12;
    ctx.beginPath();
    const place = at => [(xs[at] - left) / (right - left) * width, height - (ys[at] - low) / (high - low) * height];
    for (let at = 0; at < xs.length; at++) ctx.lineTo(...place(at));
    ctx.stroke();
    if (xs.length === 1) ctx.fillRect(place(0)[0] - 2 * pixels, place(0)[1] - 2 * pixels, 4 * pixels, 4 * pixels);
  }
}
// Panels are drawn when they come into view.
const seen = new IntersectionObserver(entries => { for (const entry of entries) { entry.target.visible = entry.isIntersecting; if (entry.isIntersecting) sketch(entry.target, entry.target.metric); } }, { rootMargin: "200px" });
function panels() {
  seen.disconnect();
  const hint = metric => metric.higher === null ? "" : metric.higher ? " ↑" : " ↓";
  replace(byId("panels"), METRICS.map(metric => {
    const canvas = element("canvas", { "aria-hidden": "true" });
    canvas.metric = metric;
    seen.observe(canvas);
    return element("button", { type: "button", class: "panel", "aria-pressed": String(metric === view.metric), title: `show ${metric.name} above`, onclick: () => pick(metric) }, element("span", {}, metric.name + hint(metric)), canvas);
  }));
}
function pick(metric) {
  view.metric = metric;
  view.zoom = null;
  byId("metric").value = String(metric.at);
  for (const panel of byId("panels").children) panel.setAttribute("aria-pressed", String(panel.querySelector("canvas").metric === metric));
  legend();
  draw();
}
function tools() {
  replace(byId("metric"), METRICS.map(metric => element("option", { value: metric.at }, metric.name)));
  byId("metric").onchange = event => pick(METRICS[Number(event.target.value)]);
  const buttons = Object.entries(AXES).map(([axis, text]) => {
    const isKnown = axis === "step" || RUNS.some(run => run.curves[axis]);
    return element("button", { type: "button", "data-axis": axis, "aria-pressed": String(axis === view.axis), disabled: !isKnown, title: isKnown ? null : "these runs did not log it", onclick: () => { view.axis = axis; view.zoom = null; for (const other of buttons) other.setAttribute("aria-pressed", String(other.dataset.axis === axis)); draw(); } }, text);
  });
  byId("axis").append(...buttons);
  const toggle = (name, key) => { byId(name).onchange = event => { view[key] = event.target.checked; view.zoom = null; legend(); draw(); }; };
  toggle("log-y", "logY");
  toggle("log-x", "logX");
  toggle("seeds", "seeds");
  byId("seeds-box").hidden = !HAS_SEEDS;
  byId("seeds").checked = view.seeds = HAS_SEEDS;
  byId("smoothing").oninput = event => { view.smoothing = Number(event.target.value); byId("smoothed").textContent = view.smoothing ? view.smoothing.toFixed(2) : "off"; draw(); };
  byId("reset").onclick = () => zoom(null);
  byId("plot").addEventListener("keydown", press);
  byId("plot").addEventListener("dblclick", () => zoom(null));
}
listeners.push(() => { for (const canvas of byId("panels").querySelectorAll("canvas")) if (canvas.visible) sketch(canvas, canvas.metric); });

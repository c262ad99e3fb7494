for (const svg of document.querySelectorAll("svg[data-points]")) {
  const curves = JSON.parse(svg.dataset.points);
  const plot = svg.parentElement, tip = plot.querySelector(".tip"), cross = svg.querySelector(".cross");
  const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[1] - x) < Math.abs(a[1] - x) ? b : a);
  const hide = () => { tip.style.visibility = cross.style.visibility = "hidden"; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), ratio = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * ratio;
    const all = curves.map(curve => ({ curve, point: nearest(curve.points, x) }));
    const front = all.reduce((a, b) => Math.abs(b.point[1] - x) < Math.abs(a.point[1] - x) ? b : a).point;
    const shown = all.filter(({ point }) => Math.abs(point[1] - front[1]) < 6);
    tip.replaceChildren(document.createTextNode(`step ${front[0]}`));
    for (const { curve, point } of shown) {
      const row = document.createElement("div"), key = document.createElement("i");
      key.className = `k${curve.color}`;
      row.append(key, `${curve.label}  ${point[3]}`);
      tip.append(row);
    }
    cross.setAttribute("x1", front[1]); cross.setAttribute("x2", front[1]);
    tip.style.visibility = cross.style.visibility = "visible";
    const left = front[1] / ratio, right = left + 14 + tip.offsetWidth > box.width;
    tip.style.left = `${right ? left - tip.offsetWidth - 12 : left + 12}px`;
    tip.style.top = `${Math.max(front[2] / ratio - tip.offsetHeight - 8, 0)}px`;
  });
}
// A page of a run that goes on is one moment of it: it says how old it is, and is loaded again if nobody reads its details.
const seen = document.querySelector("[data-seen]");
if (seen) {
  const text = seen.textContent;
  const secondsAgo = () => Math.max(0, Math.round(Date.now() / 1000 - seen.dataset.seen));
  const words = seconds => [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]]
    .map(([unit, size]) => [Math.floor(seconds / size), unit])
    .filter(([count]) => count).map(([count, unit]) => ` (${count} ${unit}${count === 1 ? "" : "s"} ago)`)[0] || "";
  const show = () => { seen.textContent = text + words(secondsAgo()); };
  show();
  setInterval(show, 5000);
  const isRead = () => document.querySelector("details[open]") || String(getSelection());
  if ("live" in seen.dataset)
    setInterval(() => { if (secondsAgo() < 86400 && !document.hidden && !isRead()) location.reload(); }, 15000);
}

// Curves on a canvas. A point is [last step, least, greatest, last value]; a point without a finite value is a gap.
"use strict";

const formatNumber = value => {
  if (typeof value !== "number") return value == null ? "–" : String(value);
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(4) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(4) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(4) + "k";
  return size && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
};

// The ends and the marks of an axis of values.
function axisOf(low, high, canBeLog) {
  if (canBeLog && low > 0 && high / low > 30) {
    const marks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const digit of [1, 2, 5]) {
        const mark = digit * 10 ** power;
        if (mark >= low && mark <= high) marks.push(mark);
      }
    const thin = Math.ceil(marks.length / 5);
    return { low, high, marks: marks.filter((_, at) => at % thin === 0), share: value => Math.log(value / low) / Math.log(high / low) };
  }
  if (high === low) { low -= Math.abs(low) / 2 || 1; high += Math.abs(high) / 2 || 1; }
  const raw = (high - low) / 4, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(factor => factor * power >= raw) * power;
  const first = Math.floor(low / step), last = Math.ceil(high / step), marks = [];
  for (let at = first; at <= last; at++) marks.push(at * step);
  return { low: first * step, high: last * step, marks, share: value => (value - first * step) / ((last - first) * step) };
}

// Draws curves {name, points} on the canvas of a figure, which keeps them for the pointer.
function drawChart(figure, curves, height) {
  const canvas = figure.querySelector("canvas"), width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  if (!width) return;
  canvas.style.height = height + "px";
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const color = name => style.getPropertyValue(name).trim();
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const known = curves.flatMap(curve => curve.points).filter(point => point[1] !== null);
  figure.shown = null;
  if (!known.length) return;
  let low = Infinity, high = -Infinity, begin = Infinity, end = -Infinity;
  for (const [step, least, greatest] of known) {
    low = Math.min(low, least); high = Math.max(high, greatest);
    begin = Math.min(begin, step); end = Math.max(end, step);
  }
  const axis = axisOf(low, high, true);
  pen.font = "12px system-ui, sans-serif";
  const left = Math.ceil(Math.max(...axis.marks.map(mark => pen.measureText(formatNumber(mark)).width), 24)) + 10;
  const bottom = height - 22, top = 8, right = width - 6;
  const x = step => left + (end > begin ? (step - begin) / (end - begin) : 0.5) * (right - left);
  const y = value => bottom - axis.share(value) * (bottom - top);
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  pen.lineWidth = 1;
  for (const mark of axis.marks) {
    pen.strokeStyle = color("--line");
    pen.beginPath(); pen.moveTo(left, Math.round(y(mark)) + 0.5); pen.lineTo(right, Math.round(y(mark)) + 0.5); pen.stroke();
    pen.fillStyle = color("--dim");
    pen.fillText(formatNumber(mark), left - 8, y(mark));
  }
  pen.textBaseline = "bottom";
  pen.textAlign = "left";
  pen.fillText(begin.toLocaleString("en"), left, height);
  pen.textAlign = "right";
  if (end > begin) pen.fillText("step " + end.toLocaleString("en"), right, height);
  curves.forEach((curve, number) => {
    pen.strokeStyle = pen.fillStyle = color(`--c${number % 5}`);
    pen.lineWidth = 1.8;
    pen.lineJoin = "round";
    pen.beginPath();
    let isDrawing = false, count = 0, last = null;
    for (const point of curve.points) {
      if (point[1] === null) { isDrawing = false; continue; }
      const at = x(point[0]), value = typeof point[3] === "number" ? point[3] : point[1];
      isDrawing ? pen.lineTo(at, y(value)) : pen.moveTo(at, y(value));
      // The extremes of a bucket: a spike is never hidden.
      if (point[2] > point[1]) { pen.lineTo(at, y(point[1])); pen.lineTo(at, y(point[2])); pen.moveTo(at, y(value)); }
      isDrawing = true; count++; last = [at, y(value)];
    }
    pen.stroke();
    if (last) { pen.beginPath(); pen.arc(...last, count === 1 ? 3.5 : 2.6, 0, 7); pen.fill(); }
  });
  figure.shown = { curves, x, left, right };
}

// Adds a box with the values at the step that is nearest to the pointer.
function addPointer(figure) {
  const tip = document.createElement("div");
  tip.className = "tip"; tip.hidden = true;
  figure.append(tip);
  const canvas = figure.querySelector("canvas");
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointermove", event => {
    if (!figure.shown) return;
    const { curves, x } = figure.shown, lines = [];
    let best = null;
    for (const curve of curves) for (const point of curve.points) {
      const away = Math.abs(x(point[0]) - event.offsetX);
      if (best === null || away < best.away) best = { away, step: point[0] };
    }
    if (best === null) return;
    for (const curve of curves) {
      const point = curve.points.findLast(point => point[0] <= best.step);
      if (point) lines.push(`${curve.name} ${formatNumber(point[3])}`);
    }
    tip.textContent = `step ${best.step.toLocaleString("en")}: ${lines.join(", ")}`;
    tip.hidden = false;
    const room = figure.clientWidth - tip.offsetWidth;
    tip.style.left = Math.max(0, Math.min(room, event.offsetX + 14)) + "px";
    tip.style.top = canvas.offsetTop + Math.max(0, event.offsetY - 34) + "px";
  });
}

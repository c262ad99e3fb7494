// Elements and numbers. Texts become text nodes, so that nothing that a run is called can be markup.
const byId = name => document.getElementById(name);
const SVG = "http://www.w3.org/2000/svg";

function fill(found, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else found.setAttribute(name, value === true ? "" : value);
  }
  found.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== ""));
  return found;
}
const element = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const shape = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const replace = (parent, ...children) => parent.replaceChildren(...children.flat(Infinity).filter(child => child));

function numberText(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en-US");
  if (size >= 1e12 || (size > 0 && size < 1e-4)) return value.toExponential(2).replace("e+", "e");
  for (const [mark, unit] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) if (size >= unit) return Number((value / (mark === "k" ? 1e3 : unit)).toPrecision(4)) + mark;
  return String(Number(value.toPrecision(5)));
}
function timeText(seconds) {
  const size = Math.abs(seconds);
  if (size < 90) return `${Number(seconds.toPrecision(3))} s`;
  return size < 5400 ? `${Number((seconds / 60).toPrecision(3))} min` : `${Number((seconds / 3600).toPrecision(3))} h`;
}
const plural = (count, one, many) => `${count} ${count === 1 ? one : many || one + "s"}`;
const isDark = matchMedia("(prefers-color-scheme: dark)");
const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

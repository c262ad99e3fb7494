// Elements and text. Nothing here or elsewhere reads a text as markup.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/gu;

/** The text with characters that hide, or turn the reading direction, as escapes. */
function visible(text) {
  return String(text).replace(HIDDEN, char => `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`);
}

function cut(text, limit) {
  return text.length > limit ? text.slice(0, limit - 1) + "…" : text;
}

/** An element with a class, a text or children. */
function make(tag, name, ...inside) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  for (const part of inside) {
    if (part === null || part === undefined) continue;
    if (part instanceof Node) element.append(part);
    else element.append(document.createTextNode(visible(part)));
  }
  return element;
}

function button(name, text, title, action) {
  const element = make("button", name, text);
  element.type = "button";
  if (title) element.title = visible(title);
  element.addEventListener("click", event => {
    event.stopPropagation();
    action(event);
  });
  return element;
}

const byId = id => document.getElementById(id);

const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();

/** Width of a text in a font; monospaced text is counted, other text is measured. */
function textWidth(text, font) {
  pen.font = font;
  if (!font.includes("monospace")) return pen.measureText(text).width;
  if (!widths.has(font)) widths.set(font, pen.measureText("0".repeat(100)).width / 100);
  return text.length * widths.get(font);
}

// The config as text: each line with who wrote it; lines that were overridden are dimmed.

const PART = 200; // lines of one piece; pieces out of view are not laid out
const TOKEN = /(#.*$)|("(?:[^"\\]|\\.)*"|'(?:[^']|'')*')|(![\w:./@%+-]*)|([&*][\w.-]+)/g;
const KEY = /^(\s*(?:- )*)((?:"[^"]*"|'[^']*'|[^\s#&*!"'[{][^:#]*?))(:)(?=\s|$)/;

class Sheet {
  constructor(host) {
    Object.assign(this, { host, made: false, rows: [], given: [] });
    this.over = new Map(data.over.map(([line, by]) => [line, `overridden by line ${by}`]));
    const note = row => {
      const old = row.was?.[0];
      if (old?.line && !old.alias && fromCommand(row)) this.over.set(old.line, "overridden on the command line");
      row.rows.forEach(note);
    };
    if (data.overrides.length) for (const box of boxes) box.rows.forEach(note);
  }

  build() {
    if (this.made) return;
    this.made = true;
    const sheet = make("div", "sheet");
    if (data.overrides.length) {
      sheet.append(make("p", "note", "Set on the command line, after the text below was read:"));
      this.given = data.overrides.map(change => {
        const margin = make("span", "place", make("span", "file", "command line"));
        return make("div", "line given", margin, make("span", "number", ""), make("code", "", cut(`--set ${change}`, 2000)));
      });
      sheet.append(...this.given);
    }
    let last = "";
    for (let first = 0; first < data.lines.length; first += PART) {
      const part = make("div", "part");
      data.lines.slice(first, first + PART).forEach(([text, origin], at) => {
        const row = this.line(first + at + 1, text, origin, last);
        last = origin === undefined ? last : fileOf(data.origins[origin].at);
        this.rows.push(row);
        part.append(row);
      });
      part.style.containIntrinsicSize = `auto ${part.children.length * 20}px`;
      sheet.append(part);
    }
    this.host.append(sheet);
  }

  line(number, text, origin, last) {
    const row = make("div", "line");
    row.dataset.line = number;
    const place = origin === undefined ? null : data.origins[origin].at;
    const margin = make("span", "place");
    if (place !== null) {
      margin.append(make("span", fileOf(place) === last ? "file again" : "file", fileOf(place)), make("span", "at", `:${lineOf(place)}`));
      margin.title = visible(placeName(place));
    }
    row.append(margin, make("span", "number", number));
    const code = make("code", "");
    code.append(...colored(text));
    row.append(code);
    if (this.over.has(number)) {
      row.classList.add("overridden");
      row.append(make("span", "by", this.over.get(number)));
    }
    return row;
  }

  select(item) {
    for (const row of this.host.querySelectorAll(".line.on")) row.classList.remove("on");
    for (const row of this.linesOf(item)) row.classList.add("on");
  }

  /** The elements of the lines that a thing was written in. */
  linesOf(item) {
    if (!item) return [];
    if (isTemplate(item)) {
      return this.rows.filter((_, at) => {
        const origin = data.lines[at][1];
        return origin !== undefined && templatesAt(data.origins[origin].at).includes(item);
      });
    }
    const given = !item.number && fromCommand(item) ? this.given[data.overrides.indexOf(changeOf(item))] : null;
    return [given || this.rows[lineNumber(item) - 1]].filter(Boolean);
  }

  /** Brings the first line of a thing into view. */
  reveal(item) {
    this.build();
    this.linesOf(item)[0]?.scrollIntoView({ block: "center" });
  }
}

const lineNumber = item => item.number || item.line || null;

function colored(text) {
  const parts = [];
  let rest = text;
  const key = KEY.exec(text);
  if (key) {
    parts.push(key[1], make("span", "k", key[2]), key[3]);
    rest = text.slice(key[0].length);
  }
  let at = 0;
  for (const match of rest.matchAll(TOKEN)) {
    const [whole, comment, quoted, tag, anchor] = match;
    const before = match.index ? rest[match.index - 1] : " ";
    if (comment && key && before !== " ") continue;
    if ((tag || anchor) && !" [{,(-".includes(before)) continue;
    parts.push(visible(rest.slice(at, match.index)), make("span", comment ? "c" : quoted ? "s" : tag ? "t" : anchor ? "a" : "", whole));
    at = match.index + whole.length;
  }
  parts.push(visible(rest.slice(at)));
  return parts;
}

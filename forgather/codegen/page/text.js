// The config as text: each line with who wrote it; lines that were overridden are dimmed.

const PART = 200; // lines of one piece; pieces out of view are not laid out
const TOKEN = /(#.*$)|("(?:[^"\\]|\\.)*"|'(?:[^']|'')*')|(![\w:./@%+-]*)|([&*][\w.-]+)/g;
const KEY = /^(\s*(?:- )*)((?:"[^"]*"|'[^']*'|[^\s#&*!"'[{][^:#]*?))(:)(?=\s|$)/;

class Sheet {
  constructor(host) {
    Object.assign(this, { host, made: false, rows: [] });
    this.over = new Map(data.over);
  }

  build() {
    if (this.made) return;
    this.made = true;
    const sheet = make("div", "sheet");
    if (data.overrides.length) {
      sheet.append(make("p", "note", `The text before --set, which changes the graph: ${cut(data.overrides.join(", "), 300)}`));
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
      row.append(make("span", "by", `overridden by line ${this.over.get(number)}`));
    }
    return row;
  }

  select(item) {
    for (const row of this.host.querySelectorAll(".line.on")) row.classList.remove("on");
    const line = item && lineNumber(item);
    if (line && this.rows[line - 1]) this.rows[line - 1].classList.add("on");
  }

  reveal(line) {
    this.build();
    this.rows[line - 1]?.scrollIntoView({ block: "center" });
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

// What is known about the thing that was clicked: paths, constructor, lines, and what was written before.

const LONG = 600; // characters of a value that are shown before "show all"
const isNote = found => found.severity === "note";
const isFinding = found => !isNote(found);
const MANY = 40; // values of a box that are listed before "show all"

class Panel {
  /** host: the element; go(item): selects and reveals; line(number): shows a rendered line. */
  constructor(host, go, line) {
    Object.assign(this, { host, go, line });
  }

  close() {
    this.host.hidden = true;
    this.host.replaceChildren();
  }

  open(title, subtitle, ...sections) {
    const head = make("header", "", make("h2", "", title), make("p", "", subtitle));
    head.append(button("close", "×", "close (Esc)", () => this.onclose()));
    this.host.replaceChildren(head, ...sections.filter(Boolean));
    this.host.hidden = false;
    this.host.scrollTop = 0;
  }

  show(item) {
    if (item.number) this.showLine(item.number);
    else if (isTemplate(item)) this.showTemplate(item);
    else if (isBox(item)) this.showBox(item);
    else this.showRow(item);
  }

  showBox(box) {
    this.open(titleOf(box), box.id === 0 ? data.project : box.calls || box.kind, ...this.aboutBox(box));
  }

  /** What there is to say of a box, less what its row, if that was chosen, says already. */
  aboutBox(box, row = null) {
    const name = nameOf(box);
    const facts = [
      ["kind", `${box.kind === "config" ? "" : box.kind + ": "}${KINDS[box.kind]}`],
      name ? ["name", `&${name}`] : null,
      box.shared ? ["shared", box.kind === "factory" ? `made anew at ${box.uses.length} places` : `one object at ${box.uses.length} places`] : null,
    ];
    if (box.id === 0 && data.overrides.length) facts.push(["--set", data.overrides.join("\n")]);
    return [
      this.facts(facts),
      box.id === 0 ? null : this.paths(limit => pathsOf(box, limit), box),
      row && placeOf(row) === placeOf(box) ? null : this.source(box, "written at"),
      box.home && box.home.was && box.home !== row ? this.history(box.home) : null,
      this.values(box),
      box.id === 0 ? this.findings("findings", isFinding) : null,
      box.id === 0 ? this.findings("notes", isNote) : null,
    ];
  }

  showRow(row) {
    const below = row.box === undefined ? null : boxes[row.box];
    const value = below ? null : this.value(row.text);
    const kind = below ? null : KINDS[row.kind] || row.kind;
    this.open(
      row.key, `in ${row.owner.id === 0 ? data.config : titleOf(row.owner)}`,
      value,
      this.facts([row.value ? ["the number", row.value] : null, kind ? ["kind", kind] : null, row.alias ? ["written as", row.alias === "<<" ? "a merged key" : `*${row.alias}`] : null]),
      below ? null : this.paths(limit => pathsOfRow(row, limit), row),
      row.same !== undefined ? this.section("one value, also at", ...sameValue.get(row.same).filter(other => other !== row).slice(0, MANY).map(other => this.pathLink(other))) : null,
      this.source(row, "written at"),
      this.history(row),
      row.rows.length ? this.values(row) : null,
      below ? make("h3", "rule", "what it is") : null,
      below ? this.section("box", this.link(titleOf(below), below)) : null,
      ...(below ? this.aboutBox(below, row) : []),
    );
  }

  showTemplate(template) {
    this.open(
      template.name, wholeName(template.at),
      this.facts([["why", `${REASONS[template.why] || template.why}${template.parent === undefined ? "" : `, by ${data.templates[template.parent].name}`}`],
        ["wrote", `${template.wrote} lines of the config`]]),
      template.line ? this.section("its first line", this.lineLink(template.line)) : null,
      template.by === undefined ? null : this.excerpt("asked for at", template.by),
      template.kids.length ? this.section("asks for", ...template.kids.map(kid => this.link(`${kid.why} ${kid.name}`, kid))) : null,
    );
  }

  showLine(number) {
    const [text, origin] = data.lines[number - 1] || [""];
    this.open(`line ${number}`, cut(text.trim(), 80) || "an empty line", origin === undefined ? null : this.origin(origin, "written at"));
  }

  showFindings() {
    this.open(data.findings.some(isFinding) ? "Findings" : "Notes", `of ${data.config}`, this.findings("", isFinding), this.findings(data.findings.some(isFinding) ? "notes" : "", isNote));
  }

  findings(title, wanted) {
    const found = data.findings.filter(wanted);
    return found.length ? this.section(title, ...found.map(found => make("div", `finding ${found.severity}`,
      make("b", "", `${found.severity} ${found.code}`), make("p", "", found.message),
      found.hint ? make("p", "hint", found.hint) : null,
      found.at === undefined || fileOf(found.at) === COMMAND ? null : this.excerpt("", found.at)))) : null;
  }

  // parts

  section(title, ...inside) {
    return make("section", "", title ? make("h3", "", title) : null, ...inside);
  }

  facts(pairs) {
    const list = make("dl", "");
    for (const [name, value] of pairs.filter(Boolean)) list.append(make("dt", "", name), make("dd", "", value));
    return list.children.length ? list : null;
  }

  value(text) {
    const shown = make("pre", "value", cut(text, LONG));
    if (text.length <= LONG) return shown;
    const all = button("all", `show all ${text.length.toLocaleString("en")} characters`, "", () => {
      shown.textContent = visible(text);
      all.remove();
    });
    return make("div", "", shown, all);
  }

  link(text, item) {
    return button("link", cut(text, 200), "", () => this.go(item));
  }

  pathLink(item) {
    return make("div", "path", this.link(pathOf(item), item));
  }

  lineLink(line) {
    return button("link line-link", `line ${line} of the text`, "", () => this.line(line));
  }

  /** All paths of a thing: the first dozen, and how many more there are. */
  paths(find, item) {
    const shown = find(12);
    const all = find(400);
    const more = all.length > shown.length ? make("p", "dim", `and ${all.length >= 400 ? "many" : all.length - shown.length} more`) : null;
    return this.section(shown.length > 1 ? "paths" : "path", ...shown.map(path => make("div", "path", button("link", path, "", () => this.go(resolve(path) || item)))), more);
  }

  /** The line of a template, with two around it. */
  excerpt(title, place, more = null) {
    const code = make("div", "excerpt");
    for (const [number, text] of sourceAround(place)) {
      code.append(make("div", number === lineOf(place) ? "here" : "", make("span", "number", number), make("code", "", text)));
    }
    const name = make("div", "where", placeName(place));
    name.title = visible(placeName(place));
    return this.section(title, name, code.children.length ? code : null, more);
  }

  origin(number, title) {
    const { at, via, sets, approximate } = data.origins[number];
    const steps = [...(via || []).map(place => ["printed at", place]), ...(sets || []).map(place => ["set at", place])];
    const more = make("div", "");
    if (approximate) more.append(make("p", "dim", "a filter took the text apart: this is the line that printed it"));
    for (const [word, place] of steps) more.append(this.folded(`${word} `, place));
    return this.excerpt(title, at, more);
  }

  folded(word, place) {
    const details = make("details", "", make("summary", "", word, make("span", "mono", placeName(place))));
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(this.excerpt("", place));
    });
    return details;
  }

  source(item, title) {
    if (item.origin === undefined) return null;
    const change = fromCommand(item) ? changeOf(item) : null;
    const section = fromCommand(item)
      ? this.section("set on the command line", make("div", "where", change ? cut(`--set ${change}`, LONG) : COMMAND))
      : this.origin(item.origin, title);
    if (item.line) section.append(this.lineLink(item.line));
    if (item.now !== undefined && placeOf(item) !== data.origins[item.now].at) section.append(...this.origin(item.now, "its value").children);
    return section;
  }

  history(row) {
    if (!row.was) return null;
    return this.section("it replaced", ...row.was.map(old => make("div", "was",
      make("code", "", old.text), old.alias ? make("span", "dim", old.alias === "<<" ? "merged" : `*${old.alias}`) : null,
      old.origin === undefined ? null : this.folded("", data.origins[old.origin].at))));
  }

  values(holder) {
    const rows = holder.rows;
    if (!rows.length) return null;
    const table = make("div", "blame");
    const add = some => table.append(...some.flatMap(row => this.entry(row)));
    add(rows.slice(0, MANY));
    const section = this.section("values", table);
    if (rows.length > MANY) {
      const all = button("all", `show all ${rows.length}`, "", () => {
        add(rows.slice(MANY));
        all.remove();
      });
      section.append(all);
    }
    return section;
  }

  entry(row) {
    const now = row.now === undefined ? row.origin : row.now;
    const place = row.was || row.box === undefined || now === undefined ? now : row.origin;
    const line = make("div", "entry", make("span", "key", row.key), make("span", "text", `${cut(valueText(row), 120)} ${aliasText(row)}`.trim()),
      make("span", "where", place === undefined ? "" : placeName(data.origins[place].at)));
    line.addEventListener("click", () => this.go(row));
    const older = (row.was || []).map(old => make("div", "entry old", make("span", "key", "was"), make("span", "text", old.text),
      make("span", "where", old.origin === undefined ? "" : placeName(data.origins[old.origin].at))));
    for (const element of older) element.addEventListener("click", () => this.go(row));
    return [line, ...older];
  }
}

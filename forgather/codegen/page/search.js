// Search by path, constructor, value and file: `/` focuses, Enter goes on, Escape leaves.

const MOST = 500;

/** Whether a word means a file: what lies in a file is found by it, and by no other word of the file's name. */
function isFileLike(word) {
  const name = word.replace(/:\d*$/, "");
  return (word.includes("/") || /\.[a-z]\w*$/.test(name)) && data.files.some(file => file.toLowerCase().includes(name));
}

class Search {
  /** go(item): selects and reveals a find; leave(): gives the keyboard back. */
  constructor(go, leave) {
    Object.assign(this, { go, leave, found: [], at: -1 });
    this.input = byId("query");
    this.count = byId("count");
    this.list = byId("hits");
    this.input.addEventListener("input", () => this.look());
    this.input.addEventListener("focus", () => this.draw());
    this.input.addEventListener("blur", () => setTimeout(() => { this.list.hidden = true; }, 150));
    this.input.addEventListener("keydown", event => this.key(event));
  }

  focus() {
    this.input.focus();
    this.input.select();
  }

  key(event) {
    if (event.key === "Enter") {
      event.preventDefault();
      this.step(event.shiftKey ? -1 : 1);
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      this.step(event.key === "ArrowDown" ? 1 : -1);
    } else if (event.key === "Escape") {
      event.stopPropagation();
      if (this.input.value) {
        this.input.value = "";
        this.look();
      } else this.input.blur();
      this.list.hidden = true;
      this.leave();
      this.input.blur();
    }
  }

  /** All that can be found: [item, its text in small letters, what it is called, its place]. */
  get index() {
    if (this.known) return this.known;
    const place = item => (placeOf(item) === null ? "" : placeName(placeOf(item)).toLowerCase());
    const known = [];
    const row = item => {
      // The text of a list is that of its items, which are found for themselves.
      const inside = item.box !== undefined || ["list", "dict"].includes(item.kind) && item.rows.length;
      const text = inside ? "" : `${item.text}\n${item.value || ""}\n${aliasText(item)}`;
      known.push([item, `${pathsOfRow(item, 4).join("\n")}\n${text}`.toLowerCase(), [item.key.toLowerCase().replace(/^\./, "")], place(item)]);
      // A variable that has no default says so by itself.
      item.rows.filter(inner => item.kind !== "var" || inner.kind !== "null").forEach(row);
    };
    for (const box of boxes) {
      if (box.id) {
        const paths = pathsOf(box, 4).join("\n");
        known.push([box, `${paths}\n${box.calls || box.kind}\n${nameOf(box)}`.toLowerCase(), [titleOf(box).toLowerCase(), box.home.key.toLowerCase()], place(box)]);
      }
      for (const item of box.rows) if (item.box === undefined || boxes[item.box].home !== item) row(item);
    }
    for (const template of data.templates) known.push([template, template.name.toLowerCase(), [template.name.toLowerCase()], placeName(template.at).toLowerCase()]);
    return (this.known = known);
  }

  look() {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.at = -1;
    this.found = [];
    if (words.length) {
      const ranked = [[], [], [], [], []];
      const files = new Set(words.filter(isFileLike));
      for (const [item, text, names, place] of this.index) {
        if (!words.every(word => text.includes(word) || (files.has(word) && place.includes(word)))) continue;
        const same = names.includes(words[0]);
        const rank = same ? (isBox(item) ? 0 : 1) : names.some(name => name.includes(words[0])) ? 2 : text.includes(words[0]) ? 3 : 4;
        ranked[rank].push(item);
      }
      this.found = ranked.flat().slice(0, MOST);
    }
    this.draw();
  }

  step(by) {
    if (!this.found.length) return;
    this.at = (this.at + by + this.found.length) % this.found.length;
    if (this.at < 0) this.at = 0;
    this.draw();
    this.go(this.found[this.at]);
  }

  draw() {
    const asked = this.input.value.trim() !== "";
    const many = this.found.length === MOST ? `${MOST}+` : this.found.length;
    this.count.textContent = !asked ? "" : this.found.length ? (this.at < 0 ? `${many}` : `${this.at + 1} / ${many}`) : "nothing";
    document.body.classList.toggle("searching", asked);
    const first = Math.max(0, Math.min(this.at - 5, this.found.length - 12));
    this.list.replaceChildren(...this.found.slice(first, first + 12).map((item, number) => this.hit(item, first + number)));
    this.list.hidden = !this.found.length || document.activeElement !== this.input;
  }

  hit(item, number) {
    const [name, value] = isTemplate(item) ? [item.name, "template"] : [pathOf(item), isBox(item) ? titleOf(item) : valueText(item)];
    const element = make("div", number === this.at ? "hit on" : "hit", make("span", "path", cut(name, 120)), make("span", "text", cut(value, 80)));
    element.addEventListener("mousedown", event => {
      event.preventDefault();
      this.at = number;
      this.draw();
      this.go(item);
    });
    return element;
  }
}

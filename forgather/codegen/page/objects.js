// The object graph: which boxes are open, where they stand, and what they look like.

const HEAD = 46;
const ROW = 21;
const FOOT = 7;
const ROWS = 24; // rows that a box shows at first
const MANY_USES = 12; // edges to one box, above which only their beginning is drawn
const LONGEST = 8000; // height of an edge, above which only its beginning is drawn
const SMALLEST = 0.85; // scale at which the page begins, where all would be smaller
const LOW = 0.7; // scale at which it begins in a small window, and the smallest at which all that is unfolded can be read
const NARROW = 1000; // width of a window below which columns are closer
const START = 70; // boxes that the page shows at first, where all of them fit
const FEW = 8; // boxes below which the page goes on to the next level
const FILLED = [ROWS, 8, 5, 3]; // rows that a folded box shows at first: the most that there is room for
const TITLE = "600 13px system-ui, sans-serif";
const MONO = '11.5px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';

function shownRows(box) {
  const most = box.most ?? ROWS;
  return box.whole || box.rows.length <= (most ? most + 2 : 0) ? box.rows : box.rows.slice(0, most);
}

const hidesRows = box => box.rows.length > 0 && shownRows(box).length === 0;
const canTurn = box => box.below.length > 0 || hidesRows(box); // there is something to fold or unfold
// What the config names hangs on it only where nothing else uses it: the rest is seen with what uses it.
const leads = row => row.box !== undefined && (row.owner.id !== 0 || boxes[row.box].uses.length === 0);
const openBelow = box => (box.open ? new Set(shownRows(box).filter(leads).map(row => row.box)) : []);

const KINDS = {
  config: "the config",
  singleton: "called once; every place that uses it gets the same object",
  factory: "called anew at every place",
  partial: "a callable for later",
  meta: "called with its arguments as they are written, not built",
  list: "a list", tuple: "a tuple", dict: "a mapping", dlist: "a mapping that is read as a list",
  var: "given when the objects are built", env: "an environment variable, read when the objects are built",
};

/** A call goes by what it calls, a container by the name it has, or by the key that leads to it. */
function titleOf(box) {
  if (box.id === 0) return data.config;
  if (box.calls) return box.title;
  const { owner, key } = box.home;
  return box.name || box.anchor || (key.startsWith("[") && owner.id ? titleOf(owner) + key : key);
}

const manyEntries = box => `${box.rows.length} ${box.rows.length === 1 ? "entry" : "entries"}`;

function subtitleOf(box) {
  if (box.id === 0) return data.project || "config";
  if (!box.calls) return `${box.title} · ${manyEntries(box)}`;
  const module = box.calls.slice(0, -titleOf(box).length).replace(/:$/, "");
  const values = box.rows.length === 1 ? "1 value" : `${box.rows.length} values`;
  return (module || "builtin") + (hidesRows(box) ? ` · ${values}` : "");
}

/** The box whose edges show while a thing is selected: of a row, those of what it leads to. */
function tracedBy(item) {
  if (!item || !(isBox(item) || isRow(item))) return null;
  if (isBox(item)) return item.id;
  return item.box ?? (item.owner.id || null);
}

const nameOf = box => (box.id === 0 ? "" : box.anchor || box.name || "");

class Objects {
  constructor(host) {
    this.canvas = new Canvas(host, (node, far) => this.element(node.box, far));
    this.selected = null;
    this.smallest = SMALLEST;
    this.canvas.onnew = () => this.mark();
  }

  /** The first view: everything where it fits; else what runs with its direct arguments, folded, and little beside it. */
  begin() {
    if (boxes.length <= START) {
      for (const box of boxes) box.open = true;
      if (this.fits()) return this.layout();
    }
    for (const box of boxes) box.open = false;
    boxes[0].open = true;
    const top = boxes[0].rows[0]?.box;
    const main = top === undefined ? null : boxes[top];
    if (main) main.open = true;
    let edge = this.folded(main);
    while (edge.length && this.order().length < FEW) {
      for (const box of edge) box.open = true;
      edge = this.folded(main);
    }
    // Data that nothing uses is there by its name alone; of the other folded boxes, those with most to say show it first.
    const plain = box => box.rows.filter(row => row.box === undefined).length;
    if (this.fits()) {
      for (const box of edge.filter(box => box.calling || box.uses.length).sort((a, b) => plain(b) - plain(a))) {
        for (const most of FILLED) {
          box.most = most;
          if (this.fits()) break;
          box.most = 0;
        }
      }
    } else if (this.fits(LOW)) this.smallest = LOW;
    else if (main && this.canvas.host.clientWidth < NARROW) this.cutShort(main);
    this.layout();
  }

  /** Shows of what runs as many arguments as fit; where there is no room for a column of them, their names alone. */
  cutShort(main) {
    this.smallest = LOW;
    for (const most of FILLED.slice(1)) {
      main.most = most;
      if (this.fits(LOW)) return;
    }
    main.open = false;
    for (const most of FILLED) {
      main.most = most;
      if (this.fits(LOW)) return;
    }
  }

  /** The boxes that can be seen and are folded, each with its head alone. */
  folded(main) {
    for (const box of boxes) if (box.open) box.most = null;
    const found = this.order().filter(box => !box.open && box !== main && box.id);
    for (const box of found) box.most = 0;
    return found.filter(box => box.calling || box.uses.length || !main);
  }

  /** Whether what is open can be read without moving. */
  fits(scale = SMALLEST) {
    this.arrange();
    const { left, top, right, bottom } = boundsOf([...this.nodes.values()]);
    const { clientWidth, clientHeight } = this.canvas.host;
    const room = length => (length - 2 * MARGIN) / scale;
    return right - left <= room(clientWidth) && bottom - top <= room(clientHeight);
  }

  setAll(open) {
    for (const box of boxes) Object.assign(box, { open: open || box.id === 0, whole: open, most: null });
    this.layout();
    this.canvas.fit(open ? LOW : SMALLEST);
  }

  /** Opens or closes a box, which stays where it is on the screen. */
  toggle(box, wholly = false) {
    if (wholly) box.whole = true;
    else Object.assign(box, { open: !box.open, most: null });
    const before = this.nodes.get(box.id);
    const [x, y] = [before.x, before.y];
    this.layout();
    const after = this.nodes.get(box.id);
    this.canvas.move(this.canvas.x + (x - after.x) * this.canvas.scale, this.canvas.y + (y - after.y) * this.canvas.scale);
  }

  /** Boxes that can be seen, each after all boxes that lead to it. */
  order() {
    const done = new Set();
    const order = [];
    const stack = [[0, [...openBelow(boxes[0])]]];
    done.add(0);
    while (stack.length) {
      const [id, left] = stack.at(-1);
      const next = left.shift();
      if (next === undefined) {
        order.push(boxes[id]);
        stack.pop();
      } else if (!done.has(next)) {
        done.add(next);
        stack.push([next, [...openBelow(boxes[next])]]);
      }
    }
    return order.reverse();
  }

  layout() {
    const order = this.arrange();
    this.canvas.set([...this.nodes.values()], this.edges(order));
    this.mark();
  }

  /** Gives each box that can be seen its place. */
  arrange() {
    const order = this.order();
    const depth = new Map([[0, 0]]);
    for (const box of order) {
      for (const id of openBelow(box)) depth.set(id, Math.max(depth.get(id) || 0, depth.get(box.id) + 1));
    }
    this.nodes = new Map(order.map(box => [box.id, this.node(box)]));
    const held = new Set();
    // A box hangs below the first box of the column before it, so that every edge leads to the right.
    for (const box of order) {
      const node = this.nodes.get(box.id);
      if (!box.open) continue;
      shownRows(box).forEach((row, at) => {
        if (row.box === undefined || held.has(row.box) || depth.get(row.box) !== depth.get(box.id) + 1) return;
        held.add(row.box);
        this.nodes.get(row.box).hold = row;
        node.kids.push({ node: this.nodes.get(row.box), at: HEAD + ROW * (at + 0.5) });
      });
    }
    tidy(this.nodes.get(0), { x: this.canvas.host.clientWidth < NARROW ? 44 : 76, y: 18 });
    return order;
  }

  node(box) {
    const rows = shownRows(box);
    const more = rows.length > 0 && rows.length < box.rows.length;
    const name = nameOf(box);
    const head = textWidth(titleOf(box), TITLE) + (name && name !== titleOf(box) ? textWidth(`&${name}`, MONO) + 12 : 0) + (box.shared ? 40 : 0);
    box.keys = Math.min(Math.max(0, ...rows.map(row => textWidth(cut(row.key, 40), MONO))) + 12, 240);
    const values = rows.map(row => textWidth(cut(valueText(row) + aliasText(row), 60), MONO) + (row.was ? 14 : 0) + (row.alias ? 8 : 0));
    const wide = Math.max(head, textWidth(subtitleOf(box), MONO), box.keys + Math.max(0, ...values) + 6) + 44;
    const h = HEAD + (rows.length + (more ? 1 : 0)) * ROW + (rows.length ? FOOT : 0);
    return { key: box.id, box, kids: [], w: Math.round(Math.min(Math.max(wide, 150), 400)), h, entry: HEAD / 2 };
  }

  edges(order) {
    const edges = [];
    for (const box of order) {
      if (!box.open) continue;
      const from = this.nodes.get(box.id);
      shownRows(box).forEach((row, at) => {
        const to = this.nodes.get(row.box);
        if (!to) return;
        const held = to.hold === row;
        // The config names nearly everything: only what nothing else uses hangs on it.
        const stub = !held && (box.id === 0 || boxes[row.box].uses.length > MANY_USES || Math.abs(to.y - from.y) > LONGEST);
        const kind = held ? "held" : box.id === 0 ? "named" : stub ? "shared many" : "shared";
        edges.push(edgeOf(box.id, row.box, from.x + from.w, from.y + HEAD + ROW * (at + 0.5), to.x, to.y + HEAD / 2, kind, `${box.id}/${at}`, stub));
      });
    }
    return edges;
  }

  element(box, far) {
    const element = make("div", `box ${box.kind}`);
    element.dataset.id = box.id;
    element.classList.toggle("shared", box.shared);
    const name = nameOf(box);
    const head = make("div", "head", make("span", "title", titleOf(box)));
    if (name && name !== titleOf(box)) head.append(make("span", "name", `&${name}`));
    if (box.shared) {
      const badge = make("span", "badge", `×${box.uses.length}`);
      badge.title = box.kind === "factory" ? `made anew at each of ${box.uses.length} places` : `one object, used at ${box.uses.length} places`;
      head.append(badge);
    }
    element.append(head);
    if (!far) {
      head.append(make("span", "module", subtitleOf(box)));
      element.append(...this.rows(box));
    }
    if (canTurn(box)) {
      const sign = box.open && box.below.length ? "−" : `+${box.below.length || box.rows.length}`;
      element.append(button("fold", sign, box.open ? "fold" : "unfold", () => this.toggle(box)));
    }
    return element;
  }

  rows(box) {
    const rows = shownRows(box);
    const elements = rows.map((row, at) => {
      const element = make("div", `row ${row.kind || "link"}`, make("span", "key", cut(row.key, 200)));
      element.dataset.row = at;
      element.style.setProperty("--keys", `${box.keys}px`);
      const value = make("span", "value", cut(valueText(row), 200));
      element.append(value);
      if (aliasText(row)) element.append(make("span", "alias", aliasText(row)));
      if (row.was) {
        const mark = make("i", "over");
        mark.title = visible(`was ${cut(row.was[0].text, 200)}`);
        element.append(mark);
      }
      return element;
    });
    if (rows.length && rows.length < box.rows.length) {
      elements.push(button("more", `${box.rows.length - rows.length} more`, "show all", () => this.toggle(box, true)));
    }
    return elements;
  }

  select(item) {
    this.selected = item;
    this.mark();
  }

  mark() {
    for (const element of this.canvas.layer.querySelectorAll(".on")) element.classList.remove("on");
    const item = this.selected;
    const box = item && (isBox(item) ? item : item.owner);
    const element = box && this.canvas.drawn.get(box.id);
    this.markWritten(item && isTemplate(item) ? item : null);
    if (element) {
      const row = isRow(item) ? element.querySelector(`[data-row="${(item.outer || item).at}"]`) : null;
      (row || element).classList.add("on");
    }
    this.canvas.trace(tracedBy(item));
  }

  /** Marks what a template wrote. */
  markWritten(template) {
    for (const element of this.canvas.layer.querySelectorAll(".written")) element.classList.remove("written");
    if (!template) return;
    for (const element of this.canvas.layer.children) {
      const box = boxes[element.dataset.id];
      element.classList.toggle("written", box.id !== 0 && wroteIt(template, box));
      for (const row of element.querySelectorAll(".row")) row.classList.toggle("written", wroteIt(template, box.rows[row.dataset.row]));
    }
  }

  /** Opens what hides a box or a row, and brings it into view. */
  reveal(item) {
    const row = isRow(item) ? item.outer || item : null;
    const box = row ? row.owner : item;
    if (row && row.at >= shownRows(box).length) box.whole = true;
    for (let above = box.uses[0] || box.home; above; above = above.owner.uses[0] || above.owner.home) {
      if (!above.owner.open) Object.assign(above.owner, { open: true, most: null });
      if (above.at >= shownRows(above.owner).length) above.owner.whole = true;
    }
    this.layout();
    const node = this.nodes.get(box.id);
    if (row) this.canvas.reveal(node, HEAD + row.at * ROW, ROW);
    else this.canvas.reveal(node);
    this.mark();
  }
}

function valueText(row) {
  if (row.box !== undefined) {
    const box = boxes[row.box];
    if (row.alias && row.alias !== "<<") return `*${row.alias}`;
    if (nameOf(box) && box.home !== row) return `*${nameOf(box)}`;
    return box.calls ? box.title : manyEntries(box);
  }
  return row.text;
}

/** The name by which a plain value got into its row. */
const aliasText = row => (row.box === undefined && row.alias && row.alias !== "<<" ? `*${row.alias}` : "");

// The templates that the config was made of: who extends, includes and imports whom.

const CARD = 62;
const REASONS = { config: "the config", extends: "extends", include: "includes", import: "imports" };

class Templates {
  constructor(host) {
    this.canvas = new Canvas(host, (node, far) => this.element(node.template, far));
    this.selected = null;
    this.smallest = 0.78; // the cards say less than boxes do, and stand in more columns
    this.canvas.onnew = () => this.mark();
    for (const [id, template] of data.templates.entries()) Object.assign(template, { id, kids: [], open: true });
    for (const template of data.templates) if (template.parent !== undefined) data.templates[template.parent].kids.push(template);
    if (data.templates.length > 150) for (const template of data.templates) template.open = template.why !== "include";
  }

  layout() {
    this.nodes = new Map();
    const edges = [];
    const build = template => {
      const wide = Math.max(textWidth(template.name, TITLE), textWidth(wholeName(template.at), MONO), 120) + 40;
      const node = { key: template.id, template, kids: [], w: Math.round(Math.min(wide, 360)), h: CARD, entry: CARD / 2 };
      this.nodes.set(template.id, node);
      if (template.open) node.kids = template.kids.map(kid => ({ node: build(kid), at: CARD / 2 }));
      return node;
    };
    const root = build(data.templates[0]);
    tidy(root, { x: 36, y: 14 });
    for (const node of this.nodes.values()) {
      for (const { node: kid } of node.kids) {
        edges.push(edgeOf(node.key, kid.key, node.x + node.w, node.y + CARD / 2, kid.x, kid.y + CARD / 2, `held ${kid.template.why}`, `${node.key}/${kid.key}`));
      }
    }
    this.canvas.set([...this.nodes.values()], edges);
    this.mark();
  }

  setAll(open) {
    for (const template of data.templates) template.open = open || template.id === 0;
    this.layout();
    this.canvas.fit(open ? 0.35 : this.smallest);
  }

  element(template, far) {
    const element = make("div", `box template ${template.why}`);
    element.dataset.template = template.id;
    element.append(make("div", "head", make("span", "title", template.name), far ? null : make("span", "module", wholeName(template.at))));
    if (!far) {
      const wrote = template.wrote ? `${template.wrote} ${template.wrote === 1 ? "line" : "lines"}` : "no line of its own";
      element.append(make("div", "why", make("b", "", REASONS[template.why] || template.why), ` · ${wrote}`));
    }
    if (template.kids.length) {
      element.append(button("fold", template.open ? "−" : `+${template.kids.length}`, template.open ? "fold" : "unfold", () => {
        template.open = !template.open;
        this.layout();
      }));
    }
    return element;
  }

  select(item) {
    this.selected = item;
    this.mark();
  }

  mark() {
    for (const element of this.canvas.layer.querySelectorAll(".on, .earlier")) element.classList.remove("on", "earlier");
    const { now, before } = this.writers(this.selected);
    for (const template of before) this.canvas.drawn.get(template.id)?.classList.add("earlier");
    for (const template of now) this.canvas.drawn.get(template.id)?.classList.add("on");
    this.canvas.trace(now.length ? now[0].id : null);
  }

  /** The templates that wrote a thing, and those that wrote what it replaced. */
  writers(item) {
    if (!item) return { now: [], before: [] };
    if (isTemplate(item)) return { now: [item], before: [] };
    const now = [...new Set(placesOf(item).flatMap(templatesAt))];
    return { now, before: [...new Set(placesBefore(item).flatMap(templatesAt))].filter(template => !now.includes(template)) };
  }

  /** Brings the template that wrote what is selected into view. */
  revealWriter() {
    const { now, before } = this.writers(this.selected);
    const first = now[0] || before[0];
    if (first) this.reveal(first);
  }

  reveal(template) {
    for (let at = data.templates[template.parent]; at; at = data.templates[at.parent]) at.open = true;
    this.layout();
    this.canvas.reveal(this.nodes.get(template.id));
    this.mark();
  }
}

const isTemplate = item => item.why !== undefined;

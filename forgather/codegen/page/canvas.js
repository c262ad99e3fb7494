// A plane to pan and zoom, which holds only what is in view.

const SVG = "http://www.w3.org/2000/svg";
const FAR = 0.3; // below this scale a box shows its title alone
const MARGIN = 24;
const STUB = 30; // what is drawn of an edge to a box that very many use
const MOST_WHOLE = 300;
const SMALL = 0.1; // scale that is worth showing; zooming out goes on until everything is in view
const AROUND = 300; // pixels around the view that are drawn too
const calm = matchMedia("(prefers-reduced-motion: reduce)");

class Canvas {
  /**
   * host: the element that shows the plane.
   * build(node, far): the element of a node of the layout, which has `key`, `x`, `y`, `w` and `h`.
   */
  constructor(host, build) {
    Object.assign(this, { host, build, nodes: [], edges: [], drawn: new Map(), x: 0, y: 0, scale: 1, far: false });
    this.world = make("div", "world");
    this.lines = document.createElementNS(SVG, "svg");
    this.layer = make("div", "layer");
    this.world.append(this.lines, this.layer);
    host.append(this.world);
    this.onzoom = () => {};
    this.onnew = () => {}; // after nodes came into view
    this.listen();
  }

  listen() {
    const host = this.host;
    host.addEventListener("wheel", event => {
      event.preventDefault();
      const unit = event.deltaMode === 1 ? 20 : 1;
      if (event.ctrlKey || event.metaKey) {
        const box = host.getBoundingClientRect();
        const factor = Math.exp(-event.deltaY * unit * (Math.abs(event.deltaY) < 50 ? 0.01 : 0.002));
        this.zoom(this.scale * factor, event.clientX - box.left, event.clientY - box.top);
      } else {
        const sideways = event.shiftKey && !event.deltaX;
        this.move(this.x - (sideways ? event.deltaY : event.deltaX) * unit, this.y - (sideways ? 0 : event.deltaY) * unit);
      }
    }, { passive: false });
    let grip = null;
    const fingers = new Map();
    host.addEventListener("pointerdown", event => {
      fingers.set(event.pointerId, event);
      if (event.button === 0 && !event.target.closest("button")) grip = { x: event.clientX, y: event.clientY, moved: false };
    });
    host.addEventListener("pointermove", event => {
      const before = fingers.get(event.pointerId);
      if (!before) return;
      if (fingers.size === 2) this.pinch(fingers, event);
      else if (grip) {
        grip.moved ||= Math.hypot(event.clientX - grip.x, event.clientY - grip.y) > 4;
        if (grip.moved) {
          if (!host.hasPointerCapture(event.pointerId)) host.setPointerCapture(event.pointerId);
          host.classList.add("grabbed");
          this.move(this.x + event.clientX - before.clientX, this.y + event.clientY - before.clientY);
        }
      }
      if (grip && !grip.moved) return;
      fingers.set(event.pointerId, event);
    });
    for (const end of ["pointerup", "pointercancel"]) {
      host.addEventListener(end, event => {
        fingers.delete(event.pointerId);
        host.classList.remove("grabbed");
      });
    }
    // A drag is no click.
    host.addEventListener("click", event => {
      if (grip?.moved) event.stopPropagation();
      grip = null;
    }, true);
    new ResizeObserver(() => this.draw()).observe(host);
  }

  pinch(fingers, event) {
    const other = [...fingers].find(([id]) => id !== event.pointerId)[1];
    const before = fingers.get(event.pointerId);
    const box = this.host.getBoundingClientRect();
    const spread = at => Math.hypot(at.clientX - other.clientX, at.clientY - other.clientY) || 1;
    const middle = [(event.clientX + other.clientX) / 2 - box.left, (event.clientY + other.clientY) / 2 - box.top];
    this.zoom((this.scale * spread(event)) / spread(before), ...middle);
  }

  set(nodes, edges) {
    Object.assign(this, { nodes, edges });
    this.refresh();
  }

  move(x, y) {
    Object.assign(this, { x, y });
    this.draw();
  }

  zoom(scale, x = this.host.clientWidth / 2, y = this.host.clientHeight / 2) {
    const next = Math.min(Math.max(scale, Math.min(SMALL, this.whole())), 2.5);
    this.x = x - ((x - this.x) * next) / this.scale;
    this.y = y - ((y - this.y) * next) / this.scale;
    this.scale = next;
    this.draw();
  }

  get bounds() {
    return boundsOf(this.nodes);
  }

  /** The scale at which everything is in view. */
  whole() {
    const { left, top, right, bottom } = this.bounds;
    return Math.min((this.host.clientWidth - 2 * MARGIN) / (right - left), (this.host.clientHeight - 2 * MARGIN) / (bottom - top), 1);
  }

  /** Shows everything; a picture too large to be read is shown from its beginning, in readable size. */
  fit(smallest = SMALL) {
    const { left, top, right, bottom } = this.bounds;
    const { clientWidth: width, clientHeight: height } = this.host;
    const margin = MARGIN;
    const all = this.whole();
    this.scale = Math.max(all, smallest);
    const [wide, high] = [(right - left) * this.scale, (bottom - top) * this.scale];
    this.x = (wide + 2 * margin > width ? margin : (width - wide) / 2) - left * this.scale;
    this.y = (high + 2 * margin > height ? margin : (height - high) / 2) - top * this.scale;
    if (all < smallest) {
      // The first node and the first that hangs on it, together where there is room, else the latter's head.
      const [root, first = root] = [this.nodes[0], this.nodes[0].kids[0]?.node];
      const [high, low] = [Math.min(root.y, first.y), Math.max(root.y + root.h, first.y + first.h)];
      const middle = (low - high) * this.scale < height - margin ? (high + low) / 2 : first.y + (height / 3) / this.scale;
      this.y = Math.min(Math.max(height / 2 - middle * this.scale, height - margin - bottom * this.scale), margin - top * this.scale);
    }
    this.draw();
  }

  /** Brings a part of a node into view, and moves no more than that takes. */
  reveal(node, from = 0, high = node.h) {
    const { clientWidth: width, clientHeight: height } = this.host;
    if (this.scale < 0.5) this.scale = 0.9;
    const [left, top] = [node.x * this.scale + this.x, (node.y + from) * this.scale + this.y];
    const [wide, tall] = [node.w * this.scale, Math.min(high * this.scale, height * 0.8)];
    const [edgeX, edgeY] = [Math.min(90, width / 8), Math.min(90, height / 6)];
    const fits = left >= edgeX && left + wide <= width - edgeX && top >= edgeY && top + tall <= height - edgeY;
    if (!fits) {
      this.x += width * 0.4 - wide / 2 - left;
      this.y += (height - tall) / 2 - top;
    }
    this.glide();
    this.draw();
  }

  /** Moves a node sideways into view, where a panel took the room that it stood in. */
  keep(node) {
    const over = node.x * this.scale + this.x + Math.min(node.w * this.scale, this.host.clientWidth - 2 * MARGIN) + MARGIN - this.host.clientWidth;
    if (over <= 0) return;
    this.x -= over;
    this.glide();
    this.draw();
  }

  glide() {
    if (calm.matches) return;
    this.world.classList.add("gliding");
    clearTimeout(this.gliding);
    this.gliding = setTimeout(() => this.world.classList.remove("gliding"), 260);
  }

  refresh() {
    for (const element of this.drawn.values()) element.remove();
    this.drawn.clear();
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.host;
    if (!width || !this.nodes.length) return;
    this.world.style.transform = `translate(${this.x}px,${this.y}px) scale(${this.scale})`;
    const far = this.scale < FAR;
    if (far !== this.far) {
      this.far = far;
      this.host.classList.toggle("far", far);
      for (const element of this.drawn.values()) element.remove();
      this.drawn.clear();
    }
    const view = {
      left: (-AROUND - this.x) / this.scale, right: (width + AROUND - this.x) / this.scale,
      top: (-AROUND - this.y) / this.scale, bottom: (height + AROUND - this.y) / this.scale,
    };
    const came = this.show(this.layer, this.nodes, view, node => {
      const element = this.build(node, far);
      Object.assign(element.style, { left: `${node.x}px`, top: `${node.y}px`, width: `${node.w}px`, height: `${node.h}px` });
      return element;
    });
    this.show(this.lines, this.edges, view, edge => line(edge, edge.stub ? `M${edge.x1} ${edge.y1}h${STUB}` : undefined));
    this.onzoom(this.scale);
    if (came) this.onnew();
  }

  show(layer, things, view, create) {
    const added = [];
    for (const thing of things) {
      const inside = thing.x < view.right && thing.x + thing.w > view.left && thing.y < view.bottom && thing.y + thing.h > view.top;
      const element = this.drawn.get(thing.key);
      if (inside && !element) {
        const made = create(thing);
        this.drawn.set(thing.key, made);
        added.push(made);
      } else if (!inside && element) {
        element.remove();
        this.drawn.delete(thing.key);
      }
    }
    layer.append(...added);
    return added.length > 0;
  }

  /** Marks the edges of a node, and draws those of which only the beginning is there. */
  trace(key) {
    if (key !== null) key = Number(key);
    for (const path of this.lines.querySelectorAll(".whole")) path.remove();
    const touches = edge => key !== null && (edge.from === key || edge.to === key);
    for (const path of this.lines.children) {
      path.classList.toggle("hot", touches({ from: Number(path.dataset.from), to: Number(path.dataset.to) }));
    }
    const whole = this.edges.filter(edge => edge.stub && touches(edge)).slice(0, MOST_WHOLE);
    this.lines.append(...whole.map(edge => line({ ...edge, kind: `${edge.kind} whole hot` })));
  }
}

/** The frame around all nodes. */
function boundsOf(nodes) {
  let [right, bottom, left, top] = [-Infinity, -Infinity, Infinity, Infinity];
  for (const { x, y, w, h } of nodes) {
    [left, top, right, bottom] = [Math.min(left, x), Math.min(top, y), Math.max(right, x + w), Math.max(bottom, y + h)];
  }
  return { left, top, right, bottom };
}

function line(edge, shape = curve(edge.x1, edge.y1, edge.x2, edge.y2)) {
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", shape);
  path.setAttribute("class", edge.kind);
  Object.assign(path.dataset, { from: edge.from, to: edge.to });
  return path;
}

/** An edge with the frame that tells whether it is in view. */
function edgeOf(from, to, x1, y1, x2, y2, kind, key, stub = false) {
  const frame = stub ? { x: x1, y: y1, w: STUB, h: 1 } : { x: Math.min(x1, x2), y: Math.min(y1, y2), w: Math.abs(x2 - x1), h: Math.abs(y2 - y1) + 1 };
  return { from, to, x1, y1, x2, y2, kind, key, stub, ...frame };
}

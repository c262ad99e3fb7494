// A tidy tree, left to right. Boxes of one depth share a column; a subtree moves up as far as the one above it allows.

/**
 * Gives each node of a tree its `x` and `y`.
 *
 * A node has `w`, `h`, `entry` (where its edge comes in, from its top) and `kids`: pairs of a node and the height, from
 * the parent's top, at which the edge goes out. Boxes never overlap: each is below all that stand before it in its column.
 */
function tidy(root, gap) {
  arrange(root, gap.y);
  const columns = [];
  measure(root, 0, columns);
  const starts = [0];
  for (const width of columns) starts.push(starts.at(-1) + width + gap.x);
  settle(root, 0, 0, starts);
}

function arrange(node, gap) {
  const top = [];
  const bottom = [];
  let pull = 0;
  for (const [number, kid] of node.kids.entries()) {
    const outline = arrange(kid.node, gap);
    let shift = 0;
    if (number) {
      shift = -Infinity;
      for (let level = 0; level < Math.min(bottom.length, outline.top.length); level++) {
        shift = Math.max(shift, bottom[level] + gap - outline.top[level]);
      }
    }
    kid.node.dy = shift;
    pull += kid.at - shift - kid.node.entry;
    outline.top.forEach((value, level) => {
      if (top[level] === undefined) top[level] = value + shift;
      bottom[level] = outline.bottom[level] + shift;
    });
  }
  const offset = node.kids.length ? pull / node.kids.length : 0;
  for (const kid of node.kids) kid.node.dy += offset;
  return { top: [0, ...top.map(value => value + offset)], bottom: [node.h, ...bottom.map(value => value + offset)] };
}

function measure(node, depth, columns) {
  node.depth = depth;
  columns[depth] = Math.max(columns[depth] || 0, node.w);
  for (const kid of node.kids) measure(kid.node, depth + 1, columns);
}

function settle(node, y, depth, starts) {
  node.x = Math.round(starts[depth]);
  node.y = Math.round(y);
  for (const kid of node.kids) settle(kid.node, y + kid.node.dy, depth + 1, starts);
}

/** The curve of an edge. */
function curve(x1, y1, x2, y2) {
  const bend = Math.max(28, Math.min((x2 - x1) / 2, 160));
  return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}

// The data of the page, linked: boxes know their parents and their shortest path, rows their box.

const data = JSON.parse(document.getElementById("data").textContent);
const boxes = data.boxes;
const bare = step => (step.startsWith(".") ? step.slice(1) : step);
const joined = (path, step) => (path ? path + step : bare(step));

const linesOf = new Map(); // rendered line -> the first box or row that was written there
const sameValue = new Map(); // number of a shared plain value -> its rows

// What is run comes first.
boxes[0].rows.sort((a, b) => (b.key === "main") - (a.key === "main"));
for (const [id, box] of boxes.entries()) Object.assign(box, { id, parents: [], open: false, whole: false });
for (const box of boxes) box.rows.forEach((row, at) => linkRow(row, box, at));
boxes[0].path = "";
for (const box of boxes) {
  for (const row of box.rows) {
    const below = row.box === undefined ? null : boxes[row.box];
    if (below && below.path === undefined) Object.assign(below, { path: joined(box.path, row.step), home: row });
  }
}
for (const box of boxes) {
  box.uses = box.parents.filter(row => row.owner.id !== 0);
  box.shared = box.uses.length > 1;
  box.targets = box.parents.filter(row => row.owner.id === 0);
  box.below = [...new Set(box.rows.filter(row => row.box !== undefined).map(row => row.box))];
  if (box.line && !linesOf.has(box.line)) linesOf.set(box.line, box);
}

function linkRow(row, owner, at, outer = null) {
  Object.assign(row, { owner, at, outer, rows: row.rows || [] });
  if (row.line && !linesOf.has(row.line)) linesOf.set(row.line, row);
  if (row.box !== undefined) boxes[row.box].parents.push(row);
  if (row.same !== undefined) sameValue.set(row.same, [...(sameValue.get(row.same) || []), row]);
  row.rows.forEach((inner, number) => linkRow(inner, owner, number, row));
}

const isBox = item => item.parents !== undefined;
const isRow = item => item.owner !== undefined;

function pathOf(item) {
  if (isBox(item)) return item.path;
  return joined(item.outer ? pathOf(item.outer) : item.owner.path, item.step);
}

/** All paths that reach a box, nearest to the config first, at most `limit`. */
function pathsOf(box, limit) {
  const found = [];
  const queue = [[box, ""]];
  for (let at = 0; at < queue.length && at < 5000 && found.length < limit; at++) {
    const [here, rest] = queue[at];
    if (here.id === 0) found.push(bare(rest));
    else for (const row of here.parents) queue.push([row.owner, row.step + rest]);
  }
  return found;
}

/** The box or row at a path; a path that is not a box's shortest one leads to the row that holds it. */
function resolve(path) {
  let rows = boxes[0].rows;
  let row = null;
  for (let rest = path; rest; ) {
    const first = row === null;
    row = rows.find(({ step }) => {
      const text = first ? bare(step) : step;
      return rest.startsWith(text) && (rest.length === text.length || ".[".includes(rest[text.length]));
    });
    if (!row) return null;
    rest = rest.slice((first ? bare(row.step) : row.step).length);
    rows = row.box === undefined ? row.rows : boxes[row.box].rows;
  }
  if (!row) return null;
  return row.box !== undefined && boxes[row.box].home === row ? boxes[row.box] : row;
}

/** A template that is a whole file goes by the file. */
const wholeName = place => (lineOf(place) === 1 ? fileOf(place) : placeName(place));
const fileOf = place => data.files[data.places[place][0]];
const lineOf = place => data.places[place][1];
const placeName = place => (fileOf(place).startsWith("<") ? fileOf(place) : `${fileOf(place)}:${lineOf(place)}`);
const placeOf = item => (item.origin === undefined ? null : data.origins[item.origin].at);

/** The line of a place and the two around it, as [number, text]. */
function sourceAround(place) {
  const [file, line] = data.places[place];
  for (const [first, ...texts] of data.sources[file]) {
    if (line < first || line >= first + texts.length) continue;
    return texts.map((text, at) => [first + at, text]).filter(([number]) => Math.abs(number - line) <= 2);
  }
  return [];
}

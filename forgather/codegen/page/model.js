// The data of the page, linked: boxes know their parents and their shortest path, rows their box.

const data = JSON.parse(document.getElementById("data").textContent);
const boxes = data.boxes;
const bare = step => (step.startsWith(".") ? step.slice(1) : step);
const joined = (path, step) => (path ? path + step : bare(step));

const linesOf = new Map(); // rendered line -> the first box or row that was written there
const sameValue = new Map(); // number of a shared plain value -> its rows

// A name for use in the config alone goes by itself: `.run_dir`.
for (const row of boxes[0].rows) if (/^\.[^\W\d][\w-]*$/.test(row.key)) row.step = `.${row.key}`;
for (const [id, box] of boxes.entries()) Object.assign(box, { id, parents: [], open: false, whole: false, most: null, calling: false });
markCalling();
// What is run comes first, then what is built, then data, then names for use in the config alone.
boxes[0].rows.sort((a, b) => rankOf(a) - rankOf(b));
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

/** Notes which boxes are calls or have calls inside: the others are data. */
function markCalling() {
  const above = boxes.map(() => []);
  for (const box of boxes) for (const row of box.rows) if (row.box !== undefined) above[row.box].push(box);
  const queue = boxes.filter(box => box.calls);
  for (const box of queue) box.calling = true;
  for (const box of queue) {
    for (const owner of above[box.id]) {
      if (!owner.calling) queue.push(Object.assign(owner, { calling: true }));
    }
  }
}

function rankOf(row) {
  if (row.key === "main") return 0;
  if (row.step.startsWith("..")) return 3;
  return row.box !== undefined && boxes[row.box].calling ? 1 : 2;
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

/** All paths that reach a row, at most `limit`. */
function pathsOfRow(row, limit) {
  if (row.outer) return pathsOfRow(row.outer, limit).map(path => joined(path, row.step));
  return row.owner.id === 0 ? [pathOf(row)] : pathsOf(row.owner, limit).map(path => joined(path, row.step));
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
  path = path.replace(/^\['(\.[^\W\d][\w-]*)'\]/, "$1");
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

/** The path in the config that is most like one that is not there; null where nothing is. */
function nearestPath(path) {
  let best = [Infinity, null];
  const consider = (item, text) => {
    if (Math.abs(text.length - path.length) >= best[0]) return;
    const far = distance(path.toLowerCase(), text.toLowerCase());
    if (far < best[0]) best = [far, item];
  };
  for (const box of boxes.slice(0, 5000)) {
    if (box.id) for (const text of pathsOf(box, 3)) consider(box, text);
    for (const row of box.rows) if (row.box === undefined) for (const text of pathsOfRow(row, 3)) consider(row, text);
  }
  return best[0] <= Math.max(2, path.length / 2) ? best[1] : null;
}

/** How many letters differ between two texts, of which the first 200 count. */
function distance(a, b) {
  [a, b] = [a.slice(0, 200), b.slice(0, 200)];
  let before = Array.from({ length: b.length + 1 }, (_, at) => at);
  for (let i = 1; i <= a.length; i++) {
    const now = [i];
    for (let j = 1; j <= b.length; j++) now.push(Math.min(before[j] + 1, now[j - 1] + 1, before[j - 1] + (a[i - 1] !== b[j - 1])));
    before = now;
  }
  return before[b.length];
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

// Who wrote a thing

const COMMAND = "<command line>";
const fromCommand = item => placeOf(item) !== null && fileOf(placeOf(item)) === COMMAND;

/** The places that a thing was written at: its key, its value where that stands elsewhere, and what was printed there. */
function placesOf(item) {
  const origins = item.number ? [data.lines[item.number - 1]?.[1]] : [item.origin, item.now];
  const found = origins.filter(origin => origin !== undefined).map(origin => data.origins[origin]);
  return found.flatMap(({ at, sets }) => [at, ...(sets || [])]);
}

/** The places of what a thing replaced. */
function placesBefore(item) {
  const was = item.was || item.home?.was || [];
  return was.filter(old => old.origin !== undefined).map(old => data.origins[old.origin].at);
}

const templatesOfPlace = new Map();

/** The templates that a place is in: one file may hold several, and one may be used more than once. */
function templatesAt(place) {
  if (!templatesOfPlace.has(place)) templatesOfPlace.set(place, findTemplates(place));
  return templatesOfPlace.get(place);
}

const wroteIt = (template, item) => placesOf(item).some(place => templatesAt(place).includes(template));

function findTemplates(place) {
  const [file, line] = data.places[place];
  const here = data.templates.filter(({ at }) => data.places[at][0] === file && lineOf(at) <= line);
  const first = Math.max(...here.map(({ at }) => lineOf(at)));
  return here.filter(({ at }) => lineOf(at) === first);
}

const pathOfChange = change => change.slice(0, change.indexOf("="));
const itemOf = change => resolve(pathOfChange(change));

/** The change of the command line that made a thing what it is. */
function changeOf(item) {
  const paths = isBox(item) ? pathsOf(item, 400) : pathsOfRow(item, 400);
  return data.overrides.findLast(change => {
    const named = pathOfChange(change);
    return paths.some(path => path.startsWith(named) && (path.length === named.length || ".[".includes(path[named.length])));
  });
}

// The state of the page: flat names and values, which is what stands in the address behind #.

const one = (...names) => ({ start: names[0], read: (text) => (names.includes(text) ? text : undefined) });
const text = (start, most) => ({ start, read: (given) => given.slice(0, most) });
const real = (start, low, high) => ({ start, read: (given) => inRange(given, low, high, Number.isFinite) });
const whole = (start, low, high) => ({ start, read: (given) => inRange(given, low, high, Number.isInteger) });

function inRange(given, low, high, kind) {
  const x = given.trim() === "" ? NaN : Number(given);
  return kind(x) && x >= low && x <= high ? x : undefined;
}

const MOST_TEXT = 400;
const MOST_NUMBERS = 20000; // characters of one edited matrix
const FIELDS = {
  tab: one("attend", "why", "speed"), lang: one("en", "de", "zh", "tr"),
  from: one(...Object.keys(SOURCES)), text: text("the cat sat on the mat because it was tired", MOST_TEXT),
  n: whole(6, 1, 64), m: whole(6, 1, 64), d: whole(4, 1, 16), draw: whole(1, 0, 4294967295),
  kind: one("dot", "additive", "distance"), kernel: one("gaussian", "boxcar", "epanechnikov", "constant"),
  width: real(1, 0.01, 1000), heads: whole(1, 1, 16), len: text("", MOST_TEXT), causal: one("", "top_left", "bottom_right"),
  left: text("", 9), right: text("", 9), scale: text("", 20), softcap: text("", 20), drop: real(0, 0, 1),
  seed: whole(0, 0, 4294967295), item: whole(0, 0, 1),
  q: text("", MOST_NUMBERS), k: text("", MOST_NUMBERS), v: text("", MOST_NUMBERS), w: text("", MOST_NUMBERS),
  head: whole(0, 0, 16), row: whole(0, 0, 4096), column: whole(0, 0, 4096), feature: whole(0, 0, 4096),
  topic: one("tiles", "scale", "gradients"), block: whole(2, 1, 64), wd: whole(16, 1, 512), ws: real(1, 0, 4),
  sq: whole(512, 64, 4096), sk: whole(512, 64, 4096), sd: whole(64, 16, 128),
};

// What an address says, and what of it is not understood: that keeps its start.
function readState(hash) {
  const state = Object.fromEntries(Object.entries(FIELDS).map(([name, field]) => [name, field.start]));
  const unknown = [];
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const found = Object.hasOwn(FIELDS, name) ? FIELDS[name].read(value) : undefined;
    if (found === undefined) unknown.push(name + "=" + value.slice(0, 40));
    else state[name] = found;
  }
  return { state, unknown };
}

function writeState(state) {
  const said = Object.entries(FIELDS).filter(([name, field]) => state[name] !== field.start);
  return new URLSearchParams(said.map(([name]) => [name, String(state[name])])).toString();
}

const writeRows = (rows) => rows.map((row) => row.join(",")).join(";");
const readRows = (given) => given.split(";").map((row) => row.split(",").map((x) => (x.trim() === "" ? NaN : Number(x))));

const optional = (given) => (given.trim() === "" ? null : Number(given));

function readLengths(given) {
  const numbers = given.trim() === "" ? [] : given.split(/[,\s]+/).filter(Boolean).map(Number);
  return numbers.length > 1 ? numbers : numbers.length ? numbers[0] : null;
}

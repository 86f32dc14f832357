// The state of the page: flat names and values, which is what stands in the address behind #.

const one = (...names) => ({ start: names[0], read: (text) => (names.includes(text) ? text : undefined) });
const textOf = (start, most) => ({ start, read: (given) => (given.length > most ? undefined : given) });
const realOf = (start, low, high) => ({ start, read: (given) => inRange(given, low, high, Number.isFinite) });
const wholeOf = (start, low, high) => ({ start, read: (given) => inRange(given, low, high, Number.isInteger) });

function inRange(given, low, high, kind) {
  const x = given.trim() === "" ? NaN : Number(given);
  return kind(x) && x >= low && x <= high ? x : undefined;
}

const MOST_TEXT = 400;
const MOST_NUMBERS = 20000; // characters of one edited matrix
const FIELDS = {
  tab: one("attend", "why", "speed"), lang: one("en", "de", "zh", "tr"),
  from: one(...Object.keys(SOURCES)), text: textOf("the cat sat on the mat because it was tired", MOST_TEXT),
  n: wholeOf(6, 1, 64), m: wholeOf(6, 1, 64), d: wholeOf(4, 1, 16), draw: wholeOf(1, 0, 4294967295),
  kind: one("dot", "additive", "distance"), kernel: one(...Object.keys(KERNELS)),
  width: realOf(1, 0.01, 1000), heads: wholeOf(1, 1, 16), len: textOf("", MOST_TEXT), causal: one("", "top_left", "bottom_right"),
  left: textOf("", 9), right: textOf("", 9), scale: textOf("", 20), softcap: textOf("", 20), drop: realOf(0, 0, 1),
  seed: wholeOf(0, 0, 4294967295), item: wholeOf(0, 0, 1),
  q: textOf("", MOST_NUMBERS), k: textOf("", MOST_NUMBERS), v: textOf("", MOST_NUMBERS), w: textOf("", MOST_NUMBERS),
  head: wholeOf(0, 0, 16), row: wholeOf(0, 0, 4096), column: wholeOf(0, 0, 4096), feature: wholeOf(0, 0, 4096),
  topic: one("tiles", "scale", "gradients"), block: wholeOf(2, 1, 64), wd: wholeOf(16, 1, 512), ws: realOf(1, 0, 4),
  sq: wholeOf(512, 64, 4096), sk: wholeOf(512, 64, 4096), sd: wholeOf(64, 16, 128),
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

// A number, nothing, or what is no number, for the check to refuse.
const asTyped = (given) => (Number.isNaN(Number(given)) ? given.trim() : Number(given));
const optional = (given) => (given.trim() === "" ? null : asTyped(given));

function readLengths(given) {
  const numbers = given.trim() === "" ? [] : given.split(/[,\s]+/).filter(Boolean).map(asTyped);
  return numbers.length > 1 ? numbers : numbers.length ? numbers[0] : null;
}

// Where queries, keys and values come from: a sentence, drawn numbers, or an example of the book.
//
// A source is {name, set, lengths, make(state, core)}: `set` is what choosing it does to the state, `lengths` the book's
// valid_lens, one for each item of its batch; make() gives {q, k, v, tokens, python}, rows of numbers, the words that label
// them (or null), and the lines of Python that draw the same (null: the numbers are written out).

const PLAIN = { kind: "dot", heads: 1, len: "", causal: "", left: "", right: "", scale: "", softcap: "", drop: 0, item: 0,
  q: "", k: "", v: "", w: "" };

const SOURCES = {
  sentence: { name: "a sentence", set: PLAIN, lengths: [], make: fromSentence },
  drawn: { name: "drawn numbers", set: PLAIN, lengths: [], make: fromSeed },
  "toy-dot": { name: "the book's toy, dot product", set: { ...PLAIN, len: "2" }, lengths: [2, 6],
    make: (s) => bookToy(RandomState(s.draw), 2) },
  "toy-additive": { name: "the book's toy, additive", set: { ...PLAIN, kind: "additive", len: "2" }, lengths: [2, 6],
    make: additiveToy },
  multihead: { name: "the book's multi-head toy", set: { ...PLAIN, heads: 5, len: "3" }, lengths: [3, 2],
    make: multiHeadToy },
  nadaraya: { name: "Nadaraya-Watson regression", set: { ...PLAIN, kind: "distance", width: 1 }, lengths: [],
    make: nadarayaWatson },
  encoder: { name: "the Transformer encoder", set: { ...PLAIN, heads: 8, len: "3" }, lengths: [3, 2], make: encoderBlock },
};

const MOST_WORDS = 32;

// The same word has the same numbers, wherever it stands.
function fromSentence(s) {
  const words = s.text.trim().split(/\s+/).filter(Boolean);
  if (!words.length) throw new Error(T("Write a sentence: there is no word to look at."));
  if (words.length > MOST_WORDS) {
    throw new Error(T("{n} words: at most {most} can be shown here.", { n: words.length, most: MOST_WORDS }));
  }
  const draw = RandomState(s.draw);
  const known = new Map();
  for (const word of words) {
    if (!known.has(word)) known.set(word, ["q", "k", "v"].map(() => matrix(1, s.d, () => round1(draw.normal()))[0]));
  }
  const [q, k, v] = [0, 1, 2].map((i) => words.map((word) => known.get(word)[i]));
  return { q, k, v, tokens: { q: words, k: words }, python: null };
}

function fromSeed(s) {
  const draw = RandomState(s.draw);
  const [q, k, v] = [s.n, s.m, s.m].map((rows) => matrix(rows, s.d, () => round1(draw.normal())));
  const shapes = [s.n, s.m, s.m].map((rows) => "(" + rows + ", " + s.d + ")");
  return { q, k, v, tokens: null, python: ["draw = np.random.RandomState(" + s.draw + ")",
    "q, k, v = (draw.standard_normal(shape).round(1).astype(np.float32)",
    "           for shape in (" + shapes.join(", ") + "))"] };
}

// Keys that are all alike, and values 0 to 39 in ten rows: the mean of the first rows, whatever the query is.
const bookValues = () => matrix(10, 4, (i, j) => 4 * i + j);

function bookToy(draw, features) {
  const q = matrix(1, features, () => round1(draw.normal()));
  return { q, k: matrix(10, 2, () => 1), v: bookValues(), tokens: null, python: null };
}

const LAYER = ["def drawn(rows, columns):  # Xavier's uniform numbers, as the layers have them",
  "    reach = (6 / (rows + columns)) ** 0.5", "    return draw.uniform(-reach, reach, (rows, columns)).astype(np.float32)", ""];

function drawnWeight(draw, rows, columns) {
  const reach = Math.sqrt(6 / (rows + columns));
  return matrix(rows, columns, () => draw.uniform(-reach, reach));
}

// x times weight transposed, by the core.
function projected(core, x, weight) {
  const flat = (m) => Float32Array.from(m.flat());
  const y = core.linear(flat(x), flat(weight), x.length, weight.length, x[0].length);
  return rowsOf(y, x.length, weight.length);
}

// Queries of 20 numbers meet keys of 2 in 8 hidden ones.
function additiveToy(s, core) {
  const draw = RandomState(s.draw);
  const { q, k, v } = bookToy(draw, 20);
  const [W_q, W_k] = [drawnWeight(draw, 8, 20), drawnWeight(draw, 8, 2)];
  return { q: projected(core, q, W_q), k: projected(core, k, W_k), v, tokens: null, python: [
    "draw = np.random.RandomState(" + s.draw + ")", ...LAYER,
    "q = draw.standard_normal((1, 20)).round(1).astype(np.float32)",
    "W_q, W_k = drawn(8, 20), drawn(8, 2)", "q, k = q @ W_q.T, np.ones((10, 2), np.float32) @ W_k.T",
    "v = np.arange(40, dtype=np.float32).reshape(10, 4)"] };
}

function multiHeadToy(s, core) {
  return throughLayer(s, core, [4, 6].map((rows) => matrix(rows, 100, () => 1)),
    ["X, Y = np.ones((4, 100), np.float32), np.ones((6, 100), np.float32)"]);
}

// One word a hundred times, as in the book: only its position tells one from the other.
function encoderBlock(s, core) {
  const place = (i, j) => i / 10000 ** ((j - (j % 2)) / 24);
  const X = matrix(100, 24, (i, j) => Math.fround(1 + (j % 2 ? Math.cos(place(i, j)) : Math.sin(place(i, j)))));
  return throughLayer(s, core, [X, X], ["angle = np.arange(100)[:, None] / 10000 ** (np.arange(0, 24, 2) / 24)",
    "X = (1 + np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(100, 24)).astype(np.float32)", "Y = X"]);
}

// Queries from X, keys and values from Y, as W_q, W_k and W_v project them.
function throughLayer(s, core, [X, Y], lines) {
  const features = X[0].length;
  const draw = RandomState(s.draw);
  const [q, k, v] = [X, Y, Y].map((x) => projected(core, x, drawnWeight(draw, features, features)));
  return { q, k, v, tokens: null, python: ["draw = np.random.RandomState(" + s.draw + ")", ...LAYER, ...lines,
    "q, k, v = (x @ drawn(" + features + ", " + features + ").T for x in (X, Y, Y))"] };
}

// Fifty noisy points of 2 sin(x) + x; queries are places between 0 and 5.
function nadarayaWatson(s) {
  const draw = RandomState(s.draw);
  const round2 = (x) => Math.round(100 * x) / 100;
  const x = Array.from({ length: 50 }, () => round2(5 * draw.random())).sort((a, b) => a - b);
  const v = x.map((at) => [round2(2 * Math.sin(at) + at + draw.normal())]);
  return { q: matrix(50, 1, (i) => i / 10), k: x.map((at) => [at]), v, tokens: { q: x.map((_, i) => String(i / 10)),
    k: x.map(String) }, python: null };
}

// The C core as functions of typed arrays (startCore), and of rows of numbers with every argument checked (callable).
// The worker of "How fast" and the page both begin with this file.

const CAUSAL = { false: 0, top_left: 1, bottom_right: 2 };

// Loads the module.  It asks its surroundings for one thing, the time.
async function startCore(bytes, isa) {
  let memory = null;
  const clock_time_get = (id, precision, place) => {
    new DataView(memory.buffer).setBigUint64(place, BigInt(Math.round(1e6 * performance.now())), true);
    return 0;
  };
  const { instance } = await WebAssembly.instantiate(bytes, { wasi_snapshot_preview1: { clock_time_get } });
  const core = instance.exports;
  memory = core.memory;
  core._initialize();

  // Views are made again for each use: memory that grows is another buffer.
  const floats = (place, n) => new Float32Array(memory.buffer, place, n);
  function text(place) {
    const bytes = new Uint8Array(memory.buffer, place);
    return new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
  }
  const fields = text(core.playground_fields()).trim().split(" ");

  function refuse(status) {
    if (status) throw new Error("the core: " + text(core.playground_status_text(status)));
  }
  refuse(core.playground_start(isa === undefined ? -1 : isa));

  // Runs `use(desk)` with memory of the module, which is given back whatever happens.
  function withMemory(use) {
    const taken = [];
    const room = (bytes) => {
      const place = core.playground_take(bytes);
      if (!place) throw new Error("no memory for " + (bytes / 2 ** 20).toFixed(0) + " MiB in this browser");
      taken.push(place);
      return place;
    };
    const desk = {
      room: (n) => room(4 * n),
      put(array) {
        if (!array) return 0;
        const place = room(array.byteLength);
        new array.constructor(memory.buffer, place, array.length).set(array);
        return place;
      },
      read: (place, n) => (place ? floats(place, n).slice() : null),
    };
    try {
      return use(desk);
    } finally {
      taken.forEach((place) => core.playground_give(place));
    }
  }

  function fill(values) {
    const call = new Float64Array(memory.buffer, core.playground_call(), fields.length);
    fields.forEach((name, i) => {
      call[i] = Number(values[name] || 0);
    });
  }

  // One item of a batch: q (queries, heads * head_dim), k and v as Float32Array, and the options by the names of core.c.
  // Gives out, weights (heads, queries, keys), row_max and row_sum (heads, queries); with gradOut also the gradients.
  function attention(problem, gradOut) {
    const { queries, keys, heads, head_dim, value_dim } = problem;
    const sizes = {
      out: queries * heads * value_dim, weights: heads * queries * keys, row_max: heads * queries,
      row_sum: heads * queries, grad_q: queries * heads * head_dim, grad_k: keys * heads * head_dim,
      grad_v: keys * heads * value_dim,
    };
    const wanted = ["out", "row_max", "row_sum"].concat(problem.without_weights ? [] : "weights",
      gradOut ? ["grad_q", "grad_k", "grad_v"] : []);
    return withMemory((desk) => {
      const values = { ...problem, bias: desk.put(problem.bias), valid_lens: desk.put(problem.valid_lens) };
      for (const name of ["q", "k", "v", "additive_weights"]) values[name] = desk.put(problem[name]);
      for (const name of wanted) values[name] = desk.room(sizes[name]);
      fill(values);
      refuse(core.playground_forward());
      const found = {};
      if (gradOut) {
        fill({ ...values, grad_out: desk.put(gradOut) });
        refuse(core.playground_backward());
      }
      for (const name of wanted) found[name] = desk.read(values[name], sizes[name]);
      return found;
    });
  }

  // The scores of all pairs, (heads, queries, keys), masks aside: a call with one key keeps its score as the largest.
  function scores(problem) {
    const { queries, keys, heads, head_dim } = problem;
    const found = new Float32Array(heads * queries * keys);
    const alone = { ...problem, keys: 1, value_dim: 1, v: new Float32Array(heads), valid_lens: null, causal: 0, window_left: -1,
      window_right: -1, dropout: 0, without_weights: true };
    for (let j = 0; j < keys; j++) {
      const k = problem.k.subarray(j * heads * head_dim, (j + 1) * heads * head_dim);
      const bias = problem.bias && Float32Array.from({ length: queries }, (_, i) => problem.bias[i * keys + j]);
      const { row_max, row_sum } = attention({ ...alone, k, bias });
      row_max.forEach((score, row) => (found[row * keys + j] = row_sum[row] > 0 ? score : -Infinity));
    }
    return found;
  }

  // What dropout multiplies the weights by: 0, or 1 / (1 - dropout).
  function dropoutFactors(problem) {
    const size = problem.heads * problem.queries * problem.keys;
    return withMemory((desk) => {
      const weights = desk.room(size);
      fill({ ...problem, q: 0, k: 0, v: 0, bias: 0, valid_lens: 0, additive_weights: 0, weights });
      refuse(core.playground_dropout_factors());
      return desk.read(weights, size);
    });
  }

  // x (rows, inFeatures) times weight (outFeatures, inFeatures) transposed.
  function linear(x, weight, rows, outFeatures, inFeatures) {
    return withMemory((desk) => {
      const y = desk.room(rows * outFeatures);
      refuse(core.playground_linear(rows, outFeatures, inFeatures, desk.put(x), desk.put(weight), y));
      return desk.read(y, rows * outFeatures);
    });
  }

  return { attention, scores, dropoutFactors, linear, bytes: () => memory.buffer.byteLength };
}

// ---- arguments of scripts --------------------------------------------------------------------------------------

const KINDS = ["dot", "additive"];
const OPTIONS = ["q", "k", "v", "kind", "w", "validLens", "causal", "window", "scale", "softcap", "heads", "dropout",
  "seed", "emptyRows"];

const shown = (value) => (typeof value === "string" ? JSON.stringify(value) : Array.isArray(value)
  ? "[" + value.slice(0, 4).map(shown).join(", ") + (value.length > 4 ? ", …]" : "]") : String(value));
const listed = (value) => (ArrayBuffer.isView(value) ? Array.from(value) : value);
const plural = (n, what) => n + " " + what + (n === 1 ? "" : "s");

// An error whose text has its names and numbers in {braces}, so that the page can say it in its own words.
function refusal(text, values) {
  const filled = text.replace(/\{(\w+)\}/g, (whole, name) => values[name]);
  return Object.assign(new Error(filled.replace(/\{(\w+)\}/g, (whole, name) => values[name])), { text, values });
}

function asNumber(value, name, expected, holds, values) {
  if (typeof value !== "number" || !Number.isFinite(value) || !Number.isFinite(Math.fround(value)) ||
    (holds && !holds(value))) {
    throw refusal("{name} must be {expected}, got {value}", { name, expected, value: shown(value), ...values });
  }
  return value;
}

const asWhole = (value, name, expected, low, high, values) =>
  asNumber(value, name, expected, (x) => Number.isInteger(x) && x >= low && x <= high, values);

// Rows of numbers as {rows, columns, data}.
function asMatrix(given, name) {
  const rows = listed(given);
  if (!Array.isArray(rows)) throw new Error(name + " must be a list of rows of numbers, got " + shown(given));
  if (!rows.length) throw new Error(name + " must have at least one row, got 0");
  const lists = rows.map(listed);
  lists.forEach((row, i) => {
    if (!Array.isArray(row)) throw new Error(name + "[" + i + "] must be a row of numbers, got " + shown(rows[i]));
    if (row.length !== lists[0].length) {
      throw new Error(name + "[" + i + "] has " + plural(row.length, "number") + ", " + name + "[0] has " +
        lists[0].length + ": rows of a matrix are equally long");
    }
  });
  if (!lists[0].length) throw new Error(name + "[0] must have at least one number, got 0");
  const data = Float32Array.from(lists.flatMap((row, i) => row.map((x, j) =>
    asNumber(x, name + "[" + i + "][" + j + "]", "a finite number"))));
  return { rows: lists.length, columns: lists[0].length, data };
}

function asLengths(given, queries, keys) {
  if (given === undefined || given === null) return null;
  const list = listed(given);
  const lengths = Array.isArray(list) ? list : Array(queries).fill(list);
  if (lengths.length !== queries) {
    throw refusal("{name} has {count}, q has {rows}: one number for all queries, or one for each",
      { name: "validLens", count: plural(lengths.length, "length"), rows: plural(queries, "row"), n: lengths.length, queries });
  }
  return BigInt64Array.from(lengths.map((n, i) => BigInt(asWhole(n,
    Array.isArray(list) ? "validLens[" + i + "]" : "validLens", "a whole number from 0 to {keys}, the rows of k",
    0, keys, { keys }))));
}

function asCausal(given, queries, keys) {
  if (given === undefined || given === null || given === false) return 0;
  if (given === true) {
    if (queries === keys) return CAUSAL.top_left;
    throw new Error("causal: true asks for as many queries as keys, got " + queries + " and " + keys +
      ': say "top_left" or "bottom_right"');
  }
  if (given in CAUSAL && given !== "false") return CAUSAL[given];
  throw new Error('causal must be false, true, "top_left" or "bottom_right", got ' + shown(given));
}

function asWindow(given) {
  if (given === undefined || given === null) return [-1, -1];
  const sides = listed(given);
  if (!Array.isArray(sides) || sides.length !== 2) {
    throw new Error("window must be [left, right], got " + shown(given));
  }
  return sides.map((side, i) => (side === null ? -1
    : asWhole(side, "window[" + i + "]", "null or a whole number of keys, 0 or more", 0, 2 ** 31)));
}

function together(m, name, other, otherName, what, side) {
  if (m[side] === other[side]) return;
  throw new Error(name + " has " + plural(m[side], what) + " (" + m.rows + " × " + m.columns + "), " + otherName +
    " has " + other[side] + " (" + other.rows + " × " + other.columns + "): they must have as many");
}

// What core.attention takes, from what a script gives.
function checkedCall(options) {
  if (typeof options !== "object" || options === null || Array.isArray(options)) {
    throw new Error("attention takes one object {q, k, v, …}, got " + shown(options));
  }
  const unknown = Object.keys(options).find((name) => !OPTIONS.includes(name));
  if (unknown) throw new Error(unknown + " is no argument of attention: they are " + OPTIONS.join(", "));
  const { kind = "dot", heads = 1, dropout = 0, seed = 0, emptyRows = "zero" } = options;
  if (!KINDS.includes(kind)) throw new Error('kind must be "dot" or "additive", got ' + shown(kind));
  const [q, k, v] = ["q", "k", "v"].map((name) => asMatrix(options[name], name));
  together(k, "k", q, "q", "feature", "columns");
  together(v, "v", k, "k", "row", "rows");
  asWhole(heads, "heads", "a whole number, 1 or more", 1, 2 ** 31);
  for (const [m, name] of [[q, "q"], [v, "v"]]) {
    if (m.columns % heads) {
      throw refusal("{name} has {count}, which cannot be split into {heads} heads",
        { name, count: plural(m.columns, "feature"), n: m.columns, heads });
    }
  }
  const [left, right] = asWindow(options.window);
  const head_dim = q.columns / heads;
  const natural = kind === "dot" ? 1 / Math.sqrt(head_dim) : 1;
  const given = (name) => options[name] !== undefined && options[name] !== null;
  if (emptyRows !== "zero" && emptyRows !== "uniform") {
    throw new Error('emptyRows must be "zero" or "uniform", got ' + shown(emptyRows));
  }
  return {
    queries: q.rows, keys: k.rows, heads, head_dim, value_dim: v.columns / heads, q: q.data, k: k.data, v: v.data,
    additive_weights: additiveWeights(options, kind, head_dim),
    scale: given("scale") ? asNumber(options.scale, "scale", "a finite number") : natural,
    softcap: given("softcap") ? asNumber(options.softcap, "softcap", "a number above 0", (x) => Math.fround(x) > 0) : 0,
    valid_lens: asLengths(options.validLens, q.rows, k.rows), causal: asCausal(options.causal, q.rows, k.rows),
    window_left: left, window_right: right, uniform_rows: emptyRows === "uniform",
    dropout: asNumber(dropout, "dropout", "a number from 0 to 1", (x) => x >= 0 && x <= 1),
    seed: asWhole(seed, "seed", "a whole number, 0 or more", 0, Number.MAX_SAFE_INTEGER),
  };
}

function additiveWeights(options, kind, features) {
  if (kind === "dot") {
    if (options.w === undefined || options.w === null) return null;
    throw new Error('w is an argument of kind "additive", got ' + shown(options.w) + ' with kind "dot"');
  }
  const w = listed(options.w);
  if (!Array.isArray(w)) throw new Error("w must be a list of " + features + " numbers, got " + shown(options.w));
  if (w.length !== features) {
    throw new Error("w has " + plural(w.length, "number") + ", q has " + plural(features, "feature") +
      " a head: they must have as many");
  }
  return Float32Array.from(w.map((x, i) => asNumber(x, "w[" + i + "]", "a finite number")));
}

function rowsOf(data, rows, columns) {
  return Array.from({ length: rows }, (_, i) => Array.from(data.subarray(i * columns, (i + 1) * columns)));
}

// The `mha_c.attention` of scripts: rows of numbers in and out; weights a matrix, or one for each of several heads.
function callable(core) {
  return (options) => {
    const call = checkedCall(options);
    const { queries, keys, heads, value_dim } = call;
    const found = core.attention(call);
    const weights = Array.from({ length: heads }, (_, h) =>
      rowsOf(found.weights.subarray(h * queries * keys, (h + 1) * queries * keys), queries, keys));
    return { output: rowsOf(found.out, queries, heads * value_dim), weights: heads > 1 ? weights : weights[0] };
  };
}

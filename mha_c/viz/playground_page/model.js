// One call: the state becomes numbers, and the core computes: output, weights, and the scores that they come from.

function modelOf(s, core) {
  const source = SOURCES[s.from].make(s, core);
  const [q, k, v] = ["q", "k", "v"].map((name) => (s[name] ? readRows(s[name]) : source[name]));
  const edited = ["q", "k", "v"].some((name) => s[name]);
  const window = s.left.trim() || s.right.trim() ? [optional(s.left), optional(s.right)] : null;
  const w = s.kind === "additive" ? (s.w ? readRows(s.w)[0] : drawnVector(s, q, s.heads)) : null;
  const call = checkedCall({ q, k, v, kind: s.kind === "additive" ? "additive" : "dot", w, validLens: readLengths(s.len),
    causal: s.causal || false, window, scale: s.kind === "distance" ? 1 : optional(s.scale),
      softcap: s.kind === "distance" ? null : optional(s.softcap),
    heads: s.kind === "distance" ? 1 : s.heads, dropout: s.drop, seed: s.seed, emptyRows: "uniform" });
  const model = { state: s, source, edited, q, k, v, w, call, tokens: source.tokens, head_dim: call.head_dim };
  if (s.kind === "distance") model.distances = byDistance(call, q, k, s.kernel, s.width);
  call.item = s.item;
  model.sees = visibility(call);
  model.found = core.attention(call);
  if (!model.found.out.every(Number.isFinite)) throw new Error(T("These numbers are too large: sums of them are no finite number."));
  model.scores = core.scores(call);
  model.uncapped = call.softcap ? core.scores({ ...call, softcap: 0 }) : model.scores;
  model.factors = call.dropout ? core.dropoutFactors(call) : null;
  return model;
}

function drawnVector(s, q, heads) {
  const draw = RandomState(s.draw + 1);
  return Array.from({ length: q[0].length / heads }, () => round1(draw.normal()) || 0.5);
}

// Attention whose scores are 0 but for a bias, the logarithm of the kernel: what mha_c.KernelAttention does.
const KERNELS = {
  gaussian: (u) => (-u * u) / 2, boxcar: (u) => (u < 1 ? 0 : -Infinity), epanechnikov: (u) => Math.log1p(-Math.min(u, 1)),
  constant: () => 0,
};

const kernelOf = (kernel, u) => Math.exp(KERNELS[kernel](u));

// Makes a call of this kind of it; gives the distances (queries, keys).
function byDistance(call, q, k, kernel, width) {
  const distances = q.map((a) => k.map((b) => Math.hypot(...a.map((x, n) => x - b[n]))));
  call.bias = Float32Array.from(distances.flat().map((u) => KERNELS[kernel](u / width)));
  call.head_dim = 0;
  return distances;
}

// sees(i, j): whether query i may see key j.
function visibility(call) {
  const shift = call.causal === CAUSAL.bottom_right ? call.keys - call.queries : 0;
  return (i, j) => {
    const at = i + shift;
    return (!call.valid_lens || j < Number(call.valid_lens[i])) && (!call.causal || j <= at) &&
      (call.window_left < 0 || j >= at - call.window_left) && (call.window_right < 0 || j <= at + call.window_right);
  };
}

const headOf = (row, h, size) => row.slice(h * size, (h + 1) * size);

// One head of (heads, queries, keys) as rows.
function headRows(data, { queries, keys }, h) {
  return rowsOf(data.subarray(h * queries * keys, (h + 1) * queries * keys), queries, keys);
}

const scoresOf = (model, h) => headRows(model.scores, model.call, h);
const weightsOf = (model, h) => headRows(model.found.weights, model.call, h);

const outputOf = (model, h) => rowsOf(model.found.out, model.call.queries, model.call.heads * model.call.value_dim)
  .map((row) => headOf(row, h, model.call.value_dim));

const valuesOf = (model, h) => model.v.map((row) => headOf(row, h, model.call.value_dim));

const mean = (list) => list.reduce((a, b) => a + b, 0) / list.length;

// What the attention view draws: the weights of all heads, as they are.
function panelOf(model) {
  const { queries, keys, heads } = model.call;
  const live = Array.from({ length: heads }, (_, h) => model.found.weights.slice(h * queries * keys, (h + 1) * queries * keys));
  const average = Float32Array.from(live[0], (_, i) => mean(live.map((head) => head[i])));
  const stats = (heads > 1 ? [...live, average] : live).map((head) => {
    const rows = rowsOf(head, queries, keys);
    return [mean(rows.map(entropyOf)), mean(rows.map((row) => Math.max(...row))), ""];
  });
  const tokens = model.tokens && model.tokens.q.length === queries && model.tokens.k.length === keys ? model.tokens : null;
  return { layer: 0, example: 0, live, bits: 16, h: heads, q: queries, k: keys, queries, keys, qStep: 1, kStep: 1,
    self: Boolean(tokens) && tokens.q === tokens.k, qt: tokens && tokens.q, kt: tokens && tokens.k, stats,
    hides: (i, j) => !model.sees(i, j) };
}

// ---- what stands in fields as text ------------------------------------------------------------------------------------

const writeRows = (rows) => rows.map((row) => row.join(",")).join(";");
const readRows = (given) => given.split(";").map((row) => row.split(",").map((x) => (x.trim() === "" ? NaN : Number(x))));

// A number, nothing, or what is no number, for the check to refuse.
const asTyped = (given) => (Number.isNaN(Number(given)) ? given.trim() : Number(given));
const optional = (given) => (given.trim() === "" ? null : asTyped(given));

function readLengths(given) {
  const numbers = given.trim() === "" ? [] : given.split(/[,\s]+/).filter(Boolean).map(asTyped);
  return numbers.length > 1 ? numbers : numbers.length ? numbers[0] : null;
}

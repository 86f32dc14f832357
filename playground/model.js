// One call: the state becomes numbers, the core computes, and beside it stand the scores that the formula gives, which
// the page explains cell by cell.

function modelOf(s, core) {
  const source = SOURCES[s.from].make(s, core);
  const [q, k, v] = ["q", "k", "v"].map((name) => (s[name] ? readRows(s[name]) : source[name]));
  const edited = ["q", "k", "v"].some((name) => s[name]);
  const window = s.left.trim() || s.right.trim() ? [optional(s.left), optional(s.right)] : null;
  const w = s.kind === "additive" ? (s.w ? readRows(s.w)[0] : drawnVector(s, q, s.heads)) : null;
  const call = checkedCall({ q, k, v, kind: s.kind === "additive" ? "additive" : "dot", w, validLens: readLengths(s.len),
    causal: s.causal || false, window, scale: s.kind === "distance" ? 1 : optional(s.scale), softcap: s.kind === "distance" ? null : optional(s.softcap),
    heads: s.kind === "distance" ? 1 : s.heads, dropout: s.drop, seed: s.seed, emptyRows: "uniform" });
  const model = { state: s, source, edited, q, k, v, w, call, tokens: source.tokens, head_dim: call.head_dim };
  if (s.kind === "distance") byDistance(model);
  call.item = s.item;
  model.sees = visibility(call);
  model.found = core.attention(call);
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

function byDistance(model) {
  const { call, state, q, k } = model;
  model.distances = q.map((a) => k.map((b) => Math.hypot(...a.map((x, n) => x - b[n]))));
  call.bias = Float32Array.from(model.distances.flat().map((u) => KERNELS[state.kernel](u / state.width)));
  call.head_dim = 0;
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

// The score of a pair by the formula, in float64: before and after scale and cap.
function scoreParts(model, h, i, j) {
  const { call, head_dim, state } = model;
  if (state.kind === "distance") {
    const score = KERNELS[state.kernel](model.distances[i][j] / state.width);
    return { raw: score, scaled: score, score };
  }
  const [a, b] = [headOf(model.q[i], h, head_dim), headOf(model.k[j], h, head_dim)];
  const raw = a.reduce((sum, x, n) => sum + (model.w ? model.w[n] * Math.tanh(x + b[n]) : x * b[n]), 0);
  return { a, b, raw, scaled: raw * call.scale, score: capped(call, raw * call.scale) };
}

const capped = (call, score) => (call.softcap ? call.softcap * Math.tanh(score / call.softcap) : score);

function scoresOf(model, h) {
  return matrix(model.call.queries, model.call.keys, (i, j) => scoreParts(model, h, i, j).score);
}

const weightsOf = (model, h) => {
  const { queries, keys } = model.call;
  return rowsOf(model.found.weights.subarray(h * queries * keys, (h + 1) * queries * keys), queries, keys);
};

const outputOf = (model, h) => rowsOf(model.found.out, model.call.queries, model.call.heads * model.call.value_dim)
  .map((row) => headOf(row, h, model.call.value_dim));

const valuesOf = (model, h) => model.v.map((row) => headOf(row, h, model.call.value_dim));

// Bits: 0 for one key alone, log2(keys) for all alike.
function entropyOf(row) {
  return row.reduce((sum, w) => (w > 0 ? sum - w * Math.log2(w) : sum), 0);
}

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
    self: Boolean(tokens) && tokens.q === tokens.k, qt: tokens && tokens.q, kt: tokens && tokens.k, stats };
}

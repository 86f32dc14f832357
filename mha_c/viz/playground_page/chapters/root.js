// Why sqrt(d): how far scores of random vectors spread, what the softmax makes of them, and what its gradient has left.

const ROOT_DEPTHS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
const ROOT_FACTORS = [0.125, 0.25, 0.5, 1, 2, 4];
const [ROOT_QUERIES, ROOT_KEYS] = [256, 16];

// Of 256 normal queries and 16 keys with d features: scores q k^T, and for a factor of them the mean entropy of the weights
// (bits) and the mean norm of the softmax's Jacobian.
function normalScores(core, draw, d) {
  const random = RandomState(draw);
  const numbers = (n) => Float32Array.from({ length: n * d }, () => random.normal());
  const q = numbers(ROOT_QUERIES);
  return core.linear(q, numbers(ROOT_KEYS), ROOT_QUERIES, ROOT_KEYS, d);
}

// Row c of the Jacobian is the gradient of weight c by the scores: the backward pass with K = V = I, scale 1.
function softmaxOf(core, scores, scale) {
  const eye = Float32Array.from({ length: ROOT_KEYS * ROOT_KEYS }, (_, at) => (at % (ROOT_KEYS + 1) ? 0 : 1));
  const call = { queries: ROOT_QUERIES, keys: ROOT_KEYS, heads: 1, head_dim: ROOT_KEYS, value_dim: ROOT_KEYS,
    q: scores.map((x) => x * scale), k: eye,
    v: eye, scale: 1, window_left: -1, window_right: -1 };
  const squares = new Float64Array(ROOT_QUERIES);
  let weights = null;
  for (let c = 0; c < ROOT_KEYS; c++) {
    const gradOut = Float32Array.from({ length: ROOT_QUERIES * ROOT_KEYS }, (_, at) => (at % ROOT_KEYS === c ? 1 : 0));
    const found = core.attention(call, gradOut);
    weights = rowsOf(found.weights, ROOT_QUERIES, ROOT_KEYS);
    found.grad_q.forEach((x, at) => (squares[Math.floor(at / ROOT_KEYS)] += x * x));
  }
  return { weights, entropy: mean(weights.map(entropyOf)), largest: mean(weights.map((row) => Math.max(...row))),
    jacobian: mean(Array.from(squares, Math.sqrt)) };
}

// A function of what its key says, which remembers its last answers: a slider that moves asks for most of them again.
function remembering(most, key, answer) {
  const known = new Map();
  return (...given) => {
    const name = key(...given);
    if (!known.has(name)) known.set(name, answer(...given));
    if (known.size > most) known.delete(known.keys().next().value);
    return known.get(name);
  };
}
const rootScores = remembering(24, (core, draw, d) => draw + "/" + d, normalScores);
const rootSoftmax = remembering(64, (core, draw, d, scale) => [draw, d, scale].join("/"), (core, draw, d, scale) =>
  softmaxOf(core, rootScores(core, draw, d), scale));

const varianceOf = (list) => {
  const middle = mean(list);
  return mean(list.map((x) => (x - middle) ** 2));
};

// Shares of the scores between -reach and reach; those beyond count in the last bins.
function histogram(list, reach, bins) {
  const counts = new Array(bins).fill(0);
  for (const x of list) counts[clamp(Math.floor(((x + reach) / (2 * reach)) * bins), 0, bins - 1)] += 1 / list.length;
  return counts.map((share, i) => [-reach + (2 * reach * i) / bins, -reach + (2 * reach * (i + 1)) / bins, share]);
}

const ROOT = {
  id: "root", title: "Why √d", nav: "Why √d",
  says: ["Let q and k have d independent numbers of mean 0 and variance 1: then q · k has the variance d. The more features, the further scores spread, until softmax sees one key alone and its gradient gets small.",
    "Divided by √d, scores have the variance 1 at any d. 256 random queries, 16 random keys."],
  seen: "Divided by √d, scores spread alike at any d, and softmax keeps a gradient to learn from.",
  fields: { d: wholeOf(512, 1, 512), factor: realOf(1, 0.01, 16), draw: wholeOf(1, 0, 4294967295) },
  across: "d", along: "factor",
  controls: () => [
    { kind: "slider", name: "d", label: "features d", stops: ROOT_DEPTHS },
    { kind: "slider", name: "factor", label: "your factor, times 1/√d", stops: ROOT_FACTORS },
    { kind: "button", label: "Draw again", press: (state) => ({ draw: state.draw + 1 }) },
  ],

  numbers(s, core) {
    const at = (d) => ({ d, raw: rootSoftmax(core, s.draw, d, 1), scaled: rootSoftmax(core, s.draw, d,
      s.factor / Math.sqrt(d)) });
    const list = Array.from(rootScores(core, s.draw, s.d));
    const scaled = list.map((x) => (x * s.factor) / Math.sqrt(s.d));
    return { s, raw: list, scaled, variance: varianceOf(list), scaledVariance: varianceOf(scaled), here: at(s.d),
      curves: ROOT_DEPTHS.map(at) };
  },

  picture(n, { width, height, small, pen }) {
    const { s } = n;
    const w = small ? width : Math.floor((width - 16) / 2);
    const h = small ? 125 : Math.floor((height - 16) / 2);
    const reach = Math.max(4, Math.ceil(3.2 * Math.sqrt(n.variance)));
    const bars = (list, variance, name, color) => Plot(pen, { name, title: name + ":  "
      + T("variance {x}", { x: short(variance) }), width: w, height: h, x: { low: -reach, high: reach },
      y: { low: 0, high: 0.5 },
      marks: [{ kind: "bars", at: histogram(list, reach, 41).map(([a, b, y]) => [a, b, Math.min(y, 0.5)]), color }] });
    const x = { low: 1, high: 512, log: true, ticks: [1, 4, 16, 64, 256], label: small ? null : "d" };
    const curves = (name, high, of) => Plot(pen, { name, title: small ? name.split(/ ?[(（]/)[0] : name, width: w, height: h, x, y: { low: 0, high }, marks: [
      { kind: "line", at: n.curves.map((each) => [each.d, of(each.raw)]), color: "other", size: 2.5, dash: [6, 3] },
      { kind: "line", at: n.curves.map((each) => [each.d, of(each.scaled)]), color: "line", size: 3 },
      { kind: "points", at: [[s.d, of(n.here.raw)]], color: "other", size: 6 },
        { kind: "points", at: [[s.d, of(n.here.scaled)]], color: "line", size: 6 }] });
    const plots = [bars(n.raw, n.variance, T("scores q · k"), "other"),
      bars(n.scaled, n.scaledVariance, T("scores q · k · {factor} / √{d}", { factor: s.factor, d: s.d }), "line"),
      curves(T("entropy of the weights in bits (dashed: unscaled)"), 4, (each) => each.entropy),
      curves(T("gradient of the weights, norm of ∂α/∂s (dashed: unscaled)"), 0.5, (each) => each.jacobian)].map((plot) => plot.node);
    return small ? stack(...plots) : stack(rowOf(plots[0], plots[1]), rowOf(plots[2], plots[3]));
  },

  formula(n) {
    const { s, here } = n;
    return [[T("Variance"), T("unscaled") + " " + exact(n.variance) + ";  " + s.factor + "² · " + exact(n.variance) + " / "
      + s.d + " = " + exact(n.scaledVariance)],
      [T("Entropy"), T("unscaled") + " " + exact(here.raw.entropy) + ";  " + T("scaled") + " " + exact(here.scaled.entropy)
        + ";  log₂ 16 = 4 " + T("for weights all alike")],
      [T("Gradient, norm of ∂α/∂s"), T("unscaled") + " " + exact(here.raw.jacobian) + ";  " + T("scaled") + " "
        + exact(here.scaled.jacobian) + ";  " + T("largest weight on average") + " " + exact(here.raw.largest) + ", "
        + exact(here.scaled.largest)]];
  },
  said: (n) => T("d = {d}: entropy {raw} unscaled, {scaled} scaled", { d: n.s.d, raw: short(n.here.raw.entropy),
    scaled: short(n.here.scaled.entropy) }),
  table: (n) => [table(T("by the number of features"), n.curves.map((each) =>
    [each.raw.entropy, each.scaled.entropy, each.raw.jacobian, each.scaled.jacobian]), n.curves.map((each) => "d = " + each.d),
    [T("entropy") + ", " + T("unscaled"), T("scaled"), T("Gradient, norm of ∂α/∂s") + ", " + T("unscaled"), T("scaled")], 4)],
  python: ({ s }) => ["import numpy as np", "import mha_c", "", "d, factor = " + s.d + ", " + s.factor,
    "draw = np.random.RandomState(" + s.draw + ")",
    "queries, keys = (draw.standard_normal((n, d)).astype(np.float32) for n in (" + ROOT_QUERIES + ", " + ROOT_KEYS + "))",
    "raw = queries @ keys.T", "", "for scores in (raw, raw * factor / np.sqrt(d)):",
    "    weights = mha_c.masked_softmax(scores[None])[0]",
    "    entropy = -(weights * np.log2(np.maximum(weights, 1e-30))).sum(axis=1).mean()",
    "    jacobian = weights[:, :, None] * np.eye(" + ROOT_KEYS + ") - weights[:, :, None] * weights[:, None, :]",
    "    norm = np.sqrt((jacobian**2).sum(axis=(1, 2))).mean()",
    '    print(f"variance {scores.var():.4f}, entropy {entropy:.4f} bits, norm of the Jacobian {norm:.4f}")', ""].join("\n"),
};

const short = (x) => (Math.abs(x) >= 100 ? x.toFixed(0) : x.toFixed(2)).replace("-", "−");

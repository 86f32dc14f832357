// Additive attention: W_q q and W_k k meet in a plane of hidden units, tanh, and w_v makes scores of it.

const HIDDEN = 8;
const ADDITIVE_KEYS = 10;
const TANH = range(-40, 40).map((i) => i / 10);

const ADDITIVE = {
  id: "additive", title: "Additive attention", nav: "Additive", signed: true,
  says: ["Query and key may have different sizes: W_q and W_k bring both to the same hidden units, where they are added, tanh bends the sum, and w_v weighs the units into one score.",
    "These vectors are random, as a layer has them before it has learned."],
  seen: "A small network can score a query and a key of different sizes: W_q, W_k, tanh, w_v.",
  fields: { key: wholeOf(3, 0, ADDITIVE_KEYS - 1), unit: wholeOf(0, 0, HIDDEN - 1), gain: realOf(2, 0, 16),
    draw: wholeOf(1, 0, 4294967295) },
  across: "unit", along: "key",
  controls: () => [
    { kind: "slider", name: "key", label: "key", stops: range(0, ADDITIVE_KEYS - 1) },
    { kind: "slider", name: "unit", label: "hidden unit", stops: range(0, HIDDEN - 1) },
    { kind: "slider", name: "gain", label: "w_v times", stops: [0, 0.5, 1, 2, 4, 8, 16] },
  ],

  numbers(s, core) {
    const draw = RandomState(s.draw);
    const normal = (rows, columns) => matrix(rows, columns, () => round1(draw.normal()));
    const [q, k, v] = [normal(1, 20), normal(ADDITIVE_KEYS, 2), bookValues()];
    const [W_q, W_k, w] = [drawnWeight(draw, HIDDEN, 20), drawnWeight(draw, HIDDEN, 2), drawnWeight(draw, 1, HIDDEN)[0]];
    const [a, b] = [projected(core, q, W_q), projected(core, k, W_k)];
    const w_v = w.map((x) => Math.fround(x * s.gain));
    const call = checkedCall({ q: a, k: b, v, kind: "additive", w: w_v });
    const found = core.attention(call);
    // One hidden unit alone is the score whose w_v is 1 there and 0 elsewhere.
    const units = range(0, HIDDEN - 1).map((n) => core.scores({ ...call,
      additive_weights: Float32Array.from(w, (_, m) => (m === n ? 1 : 0)) }));
    return { s, a: a[0], b, w_v, plane: b.map((_, j) => units.map((unit) => unit[j])), scores: Array.from(core.scores(call)),
      weights: Array.from(found.weights), v, output: Array.from(found.out) };
  },

  picture(n, { width, height, small, pen }) {
    const { s } = n;
    const rows = range(0, ADDITIVE_KEYS - 1).map(String);
    const type = pen.type;
    const h = small ? 19 : Math.floor((height - 8.4 * type) / (ADDITIVE_KEYS + 3));
    const brief = width < 66 * type; // names of columns are not wider than these
    const plot = small ? width : brief ? 11 * type : Math.max(200, Math.floor(width * 0.2));
    const w = small ? 16 : Math.floor(clamp((width - plot - 76 - (brief ? 18 : 23.5) * type) / (1.3 * HIDDEN), 24, 72));
    const wide = small ? 9 : 2.5 * type; // a feature of the values
    const number = small ? 36 : (brief ? 3.3 : 4) * type;
    const grid = (name, data, cell, more) => placed(pen, name, data, { w: cell, h, margins: { top: 0 }, ...more });
    const choose = (at) => ({ key: at.i, unit: at.j });
    const many = !small;
    const lanes = el("div", { class: "mhac-lanes-of", style: "grid-template-columns:repeat(" + (small ? 4 : 5) + ",auto)" },
      ...(small ? [] : [standing(grid("W_k k", n.b, w * 0.3, { rows, look: { row: s.key } }), 1, 2)]),
      standing(grid("W_q q", [n.a], w, { numbers: many, look: { cell: { i: 0, j: s.unit } } }), small ? 1 : 2, 1),
      standing(grid("tanh(W_q q + W_k k)", n.plane, w, { rows: small ? rows : null, numbers: many, top: 1,
        look: { row: s.key, cell: { i: s.key, j: s.unit } }, pick: choose }), small ? 1 : 2, 2),
      standing(grid("w_v", [n.w_v], w, { numbers: many, look: { cell: { i: 0, j: s.unit } } }), small ? 1 : 2, 3),
      standing(grid(brief ? "s" : "s = w_v · tanh", n.scores.map((x) => [x]), number,
        { kind: "plain", numbers: true, look: { row: s.key }, pick: (p) => ({ key: p.i }) }), small ? 2 : 3, 2),
      standing(grid("α", n.weights.map((x) => [x]), number, { kind: "weight", numbers: true, top: 1, look: { row: s.key },
        pick: (p) => ({ key: p.i }) }), small ? 3 : 4, 2),
      standing(grid("V", n.v, wide, { numbers: many, look: { row: s.key }, pick: (p) => ({ key: p.i }) }), small ? 4 : 5, 2),
      standing(grid(small ? "o" : "o = Σ α v", [n.output], wide, { numbers: many }), small ? 4 : 5, 3));
    const sum = n.a[s.unit] + n.b[s.key][s.unit];
    const curve = Plot(pen, { name: T("tanh, and the chosen unit on it"),
      title: T("unit {n}, ● key {key}", { n: s.unit, key: s.key }), width: plot,
      height: small ? 150 : Math.min(height, 300), x: { low: -4, high: 4, ticks: brief ? [-4, 0, 4] : [-4, -2, 0, 2, 4], label: "W_q q + W_k k" },
        y: { low: -1.2, high: 1.2 }, marks: [
        { kind: "line", at: TANH.map((x) => [x, Math.tanh(x)]), color: "soft", size: 2 },
        { kind: "points", at: n.b.map((b, j) => [clamp(n.a[s.unit] + b[s.unit], -4, 4), n.plane[j][s.unit]]), color: "other",
          size: 3.5 },
        { kind: "points", at: [[clamp(sum, -4, 4), n.plane[s.key][s.unit]]], color: "line", size: 7 }] });
    return small ? stack(lanes, curve.node) : rowOf(lanes, curve.node);
  },

  formula(n) {
    const { s } = n;
    const [j, u] = [s.key, s.unit];
    const terms = n.w_v.map((w, m) => signedText(w) + " · " + signedText(n.plane[j][m]));
    return [[T("Unit {n}", { n: u }), "tanh(" + exact(n.a[u]) + " + " + plainSigned(n.b[j][u]) + ") = " + exact(n.plane[j][u])],
      [T("Score of key {n}", { n: j }), sumOf(terms, 8) + " = " + exact(n.scores[j])],
      [T("Weight"), softmaxText(n.scores, j, 10) + " = " + exact(n.weights[j])],
      [T("Output of {query}, feature {n}", { query: T("query"), n: 0 }), sumOf(n.weights.map((w, m) => digits(w, 40)
        + " · " + n.v[m][0]), 4) + " = " + exact(n.output[0])]];
  },
  note: () => T("Additive scores compute a tanh for every query, key and hidden unit. A dot product is one product of matrices: where sizes are alike, it is the usual choice."),
  said: (n) => T("key {n}: score {score}, weight {weight}", { n: n.s.key, score: exact(n.scores[n.s.key]),
    weight: exact(n.weights[n.s.key]) }),
  table: (n) => [table("tanh(W_q q + W_k k)", n.plane, n.b.map((_, j) => String(j)), n.w_v.map((_, u) => String(u)), 4),
    table(T("scores and weights"), n.scores.map((x, j) => [x, n.weights[j]]), n.b.map((_, j) => String(j)),
      [T("score"), T("weight")], 4)],
  python: (n, core) => pythonOfState(core, { from: "drawn", kind: "additive", q: writeRows([n.a]), k: writeRows(n.b),
    v: writeRows(n.v), w: writeRows([n.w_v]) }),
};

const plainSigned = (x) => (x < 0 ? "(" + exact(x) + ")" : exact(x));

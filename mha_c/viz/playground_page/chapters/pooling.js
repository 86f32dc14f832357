// Pooling by distance: the book's regression.  Keys are places, values are heights, scores the logarithm of a kernel.

const truth = (x) => 2 * Math.sin(x) + x;
const PLACES = range(0, 100).map((i) => i / 20);
const WIDTHS = [0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1, 1.5, 2, 3, 5];

const POOLING = {
  id: "pooling", title: "Pooling by distance", nav: "Pooling",
  says: ["A query asks; keys say what there is, and each key has a value. The answer is a weighted mean of the values: the better a key fits the query, the larger its weight.",
    "Here keys are places x, values are noisy heights y, and a key fits if it is near the query."],
  seen: "Attention is a weighted mean of values; how well a key fits the query is its value's weight.",
  fields: { width: realOf(0.5, 0.01, 1000), kernel: one(...Object.keys(KERNELS)), at: realOf(2.5, 0, 5),
    draw: wholeOf(1, 0, 4294967295) },
  across: "at", along: "width",
  controls: () => [
    { kind: "slider", name: "width", label: "width", stops: WIDTHS },
    { kind: "choice", name: "kernel", label: "kernel", stops: Object.keys(KERNELS), say: (name) => T(name) },
    { kind: "slider", name: "at", label: "query", stops: PLACES },
  ],

  numbers(s, core) {
    const { k, v } = nadarayaWatson(s);
    const q = [...PLACES, s.at].map((x) => [x]);
    const call = checkedCall({ q, k, v, scale: 1, emptyRows: "uniform" });
    const distances = byDistance(call, q, k, s.kernel, s.width);
    const found = core.attention(call);
    const row = PLACES.length;
    const weights = Array.from(found.weights.subarray(row * k.length));
    const sum = found.row_sum[row] * Math.exp(found.row_max[row]); // of the kernel over all keys
    return { s, x: k.map((each) => each[0]), y: v.map((each) => each[0]), curve: Array.from(found.out.subarray(0, row)),
      estimate: found.out[row], weights, distances: distances[row], sum: found.row_sum[row] > 0 ? sum : 0,
      best: distances[row].indexOf(Math.min(...distances[row])), seen: weights.filter((_, j) =>
        call.bias[row * k.length + j] > -Infinity).length };
  },

  picture(n, { width, height, small, pen }) {
    const { s } = n;
    const most = Math.max(...n.weights);
    const [wide, high] = small ? [width, 230] : [Math.floor(width * 0.58), height];
    const x = { low: 0, high: 5, label: "x" };
    const query = { kind: "upright", at: [[s.at]], color: "line", dash: [5, 4] };
    const reach = { kind: "span", at: [[s.at - s.width, s.at + s.width]], color: "line", size: 2 };
    const named = (text, at, color, up) => ({ kind: "text", at: [at], text, color, up, weight: 600, align: "right" });
    const left = Plot(pen, { name: T("values, truth and estimate over x"), title: T("values y: the larger, the more weight"),
      width: wide, height: high, x,
      y: { low: -3, high: 9 }, marks: [
        { kind: "points", at: n.x.map((at, j) => [at, n.y[j]]), color: "soft", alpha: 0.75 },
        { kind: "points", at: n.x.map((at, j) => [at, n.y[j], 8 * Math.sqrt(n.weights[j] / most)]), color: "line", alpha: 0.55 },
        { kind: "line", at: PLACES.map((at) => [at, truth(at)]), color: "ink", size: 1.2, dash: [2, 3] },
        { kind: "line", at: PLACES.map((at, i) => [at, n.curve[i]]), color: "line", size: 3.5 }, query, reach,
        { kind: "points", at: [[s.at, n.estimate]], color: "line", size: 7 },
        { ...named(T("truth"), [0.38, 0.7], "ink"), align: "left" }, named(T("estimate"), [5, n.curve[100]], "line", 16)] });
    const right = Plot(pen, { name: T("weights of the query at {x}", { x: s.at }),
      title: T("weights of the query at {x}", { x: s.at }),
      width: small ? width : width - wide - 16, height: high, x, y: { low: 0, high: most * 1.08 || 1 }, marks: [
        { kind: "stems", at: n.x.map((at, j) => [at, n.weights[j]]), color: "line", size: 2 },
        { kind: "points", at: n.x.map((at, j) => [at, n.weights[j]]), color: "line" }, query, reach] });
    for (const plot of [left, right]) plot.canvas.pick = (event) => ({ at: Math.round(plot.where(event) * 20) / 20 });
    return rowOf(left.node, right.node);
  },

  formula(n) {
    const { s, best } = n;
    if (!n.seen) return [[T("Weight"), T("no key is within the width: all weights are 1 / {n}", { n: n.x.length }) + " = "
      + exact(1 / n.x.length)],
      [T("Estimate"), T("the mean of all values") + " = " + exact(n.estimate)]];
    const u = n.distances[best] / s.width;
    const terms = n.weights.map((w, j) => [w, j]).filter(([w]) => w > 0).sort((a, b) => b[0] - a[0]).map(([w, j]) => exact(w) + " · "
      + signedText(n.y[j]));
    return [[T("Distance of the nearest key"), "u = |" + s.at + " − " + n.x[best] + "| / " + s.width + " = " + exact(u)
      + ";  K(u) = " + kernelText(s.kernel, u)],
      [T("Weight"), "K(u) / Σ K = " + exact(kernelOf(s.kernel, u)) + " / " + exact(n.sum) + " = " + exact(n.weights[best])],
      [T("Estimate"), sumOf(terms, 4) + " = " + exact(n.estimate)]];
  },
  said: (n) => T("query {x}: estimate {y}", { x: n.s.at, y: exact(n.estimate) }),
  table: (n) => [table(T("keys, values and weights"), n.x.map((x, j) => [x, n.y[j], n.weights[j]]),
    n.x.map((_, j) => String(j)),
    [T("key"), T("value"), T("weight")], 4)],
  python: (n, core) => pythonOfState(core, { from: "nadaraya", kind: "distance", kernel: n.s.kernel, width: n.s.width,
    draw: n.s.draw, q: writeRows([[n.s.at]]) }),
};

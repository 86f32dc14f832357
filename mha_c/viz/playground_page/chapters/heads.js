// Many heads: from X through W_q, W_k, W_v and transpose_qkv to the heads, through transpose_output and W_o to the output,
// by d2l's names and shapes.  The layer is a small translation's, or the reader's own (layer.playground()).

const HEAD_COUNTS = [1, 2, 4, 8, 16, 32];
const TRANSLATED = [["the car is red .", "la voiture est rouge ."], ["the cat is red .", "le chat est rouge ."]];
const ASKED = 6; // queries of each

// What the chapter shows: inputs (where they are known), parameters (or null), the weights of a call (own, without inputs).
function layerOf(data, query) {
  if (data.own) return { ...data.own, asked: data.own.qt.map((word, at) => at + " " + word) };
  const { weights, english, french } = data.models.translation;
  const [source, target] = TRANSLATED[Math.min(Math.floor(query / ASKED), TRANSLATED.length - 1)].map((text) => text.split(" "));
  const keys = source.map((word, i) => added(weights.source[english.indexOf(word)], weights.source_place[i]));
  const queries = ["<bos>", ...target].map((word, i) => added(weights.target[french.indexOf(word)], weights.target_place[i]));
  return { heads: 2, queries, keys, values: keys, W: ["W_q", "W_k", "W_v", "W_o"].map((name) => weights[name]), bias: null,
    lens: null, qt: [...target, "<eos>"], kt: source,
    asked: [...target, "<eos>"].map((word, i) => ["<bos>", ...target][i] + " → " + word) };
}

const HEADS = {
  id: "heads", title: "Many heads", nav: "Many heads", signed: true,
  says: ["W_q, W_k and W_v project queries, keys and values; transpose_qkv cuts their features into heads; each head attends by itself; transpose_output joins them, and W_o mixes them.",
    "Each row is a French word that asks the English words for the next: in “<bos> → la”, head 1 looks at “the”, the word to translate, and head 0 at “car”, whose gender decides between la and le."],
  seen: "Heads cut the same features into parts, and each part looks for something else.",
  saysOf: ({ own }) => (own ? [HEADS.says[0], "Your own layer."] : HEADS.says),
  fields: { heads: wholeOf(0, 0, 32), head: wholeOf(0, 0, 31), query: wholeOf(0, 0, 63) },
  across: "head", along: "query",
  controls({ data }) {
    const layer = layerOf(data, 0);
    const features = layer.W ? layer.W[0].length : 0;
    const counts = features ? HEAD_COUNTS.filter((h) => features % h === 0) : [layer.heads];
    return [
      { kind: "choice", name: "heads", label: "heads", stops: counts, say: String, of: (state) => state.heads || layer.heads },
      { kind: "slider", name: "head", label: "head", stops: range(0, Math.max(...counts, layer.heads) - 1),
        most: (state) => state.heads || layer.heads },
      { kind: "select", name: "query", label: "word", stops: range(0, (data.own ? layer.qt.length : ASKED * TRANSLATED.length) - 1),
        say: (i) => (data.own ? layer.asked[i] : layerOf(data, i).asked[i % ASKED]) },
    ];
  },

  numbers(s, core, data) {
    const layer = layerOf(data, s.query);
    const { qt, kt } = layer;
    const heads = layer.W && s.heads && layer.W[0].length % s.heads === 0 ? s.heads : layer.heads;
    const h = Math.min(s.head, heads - 1);
    const first = data.own ? 0 : Math.min(Math.floor(s.query / ASKED), TRANSLATED.length - 1) * ASKED;
    const i = Math.min(s.query - first, qt.length - 1);
    const shown = { s, layer, heads, h, i, first, qt, kt, own: Boolean(data.own) };
    if (!layer.queries) return { ...shown, weights: layer.weights };
    const [W_q, W_k, W_v, W_o] = layer.W;
    const through = (x, weight, at) => projected(core, x, weight).map((row) => (layer.bias ? added(row, layer.bias[at]) : row));
    const [q, k, v] = [through(layer.queries, W_q, 0), through(layer.keys, W_k, 1), through(layer.values, W_v, 2)];
    const call = checkedCall({ q, k, v, heads, validLens: layer.lens, emptyRows: "uniform" });
    const found = core.attention(call);
    const joined = rowsOf(found.out, qt.length, v[0].length);
    const split = (data_) => range(0, heads - 1).map((head) => headRows(data_, call, head));
    return { ...shown, q, k, v, d: call.head_dim, sees: visibility(call), weights: split(found.weights),
      scores: split(core.scores(call)), joined, output: through(joined, W_o, 3) };
  },

  picture(n, { width, height, small, pen }) {
    const { heads, h, i, qt, kt } = n;
    const type = pen.type;
    const asked = small ? qt.map((word) => "→ " + word) : n.layer.asked; // the words that are asked for
    const rows = names(n.own ? qt : asked, qt.length);
    const columns = names(kt, kt.length);
    const f = n.q ? n.q[0].length : 1;
    const room = small ? Math.min(84, (width - 50) / 4) : Math.min(110, (0.9 * width) / type); // larger letters leave less to what has none
    const w = Math.max(1, room / f);
    const tall = Math.max(3, Math.min(small ? 7 : 16, (height * 0.72) / (qt.length + 2 * kt.length)));
    const band = n.q ? [h * n.d, (h + 1) * n.d] : null;
    const strip = (name, data, shape, inHeads) => stack(el("p", { class: "mhac-step-name" }, ...formula(name),
      el("span", { class: "mhac-note", text: shape })),
      placed(pen, "", data, { w, h: tall, look: { band: inHeads ? band : null, row: data.length === qt.length ? i : null } }));
    const arrow = (...texts) => el("div", { class: "mhac-through" }, ...texts.map((text) =>
      el("span", {}, ...(text.startsWith("transpose") ? [text] : formula(text)))), el("b", { text: "→" }));
    const top = Math.max(...n.weights.flat(2));
    const columnsOfHeads = heads <= 2 ? 1 : heads <= 8 ? 2 : 4;
    const cell = Math.max(2, Math.floor(Math.min(small ? 48 : 1080 / type,
      height / Math.ceil(heads / columnsOfHeads) - 2 * type) / Math.max(qt.length, kt.length)));
    const thumbs = el("div", { class: "mhac-thumbs", style: "grid-template-columns:repeat(" + columnsOfHeads + ",auto)" },
      ...n.weights.map((rows_, at) => {
      const box = el("div", { class: at === h ? "mhac-thumb-now" : "" },
        heads <= 8 ? el("span", { class: "mhac-note", text: T("Head {h}", { h: at }) }) : null,
        placed(pen, "", rows_, { w: cell, h: cell, kind: "weight", top }));
      box.pick = () => ({ head: at });
      return box;
    }));
    const large = Math.max(8, Math.floor(Math.min((small ? 190 : height - 9 * type) / qt.length,
      (small ? width * 0.72 : width * (n.q ? 0.27 : 0.6)) / kt.length - 2, 3.6 * type)));
    const chosen = stack(el("p", { class: "mhac-step-name" }, T("Head {h}", { h }),
      el("span", { class: "mhac-note", text: " (" + qt.length + ", " + kt.length + ")" })),
      placed(pen, "", n.weights[h], { w: large, h: large, rows, columns, kind: "weight", top, numbers: true,
        masked: n.sees ? (a, b) => !n.sees(a, b) : null, look: { row: i }, pick: (at) => ({ query: n.first + at.i }) }));
    if (!n.q) return rowOf(thumbs, chosen);
    const [m, k] = [qt.length, kt.length];
    const dh = f / heads;
    const inputs = stack(strip("queries", n.layer.queries, "(1, " + m + ", " + f + ")"),
      strip(n.layer.keys === n.layer.values ? "keys, values" : "keys", n.layer.keys, "(1, " + k + ", " + f + ")"),
      n.layer.keys === n.layer.values ? null : strip("values", n.layer.values, "(1, " + k + ", " + f + ")"));
    const shape = (rows_) => "(" + heads + ", " + rows_ + ", " + dh + ")";
    const projections = stack(strip("q", n.q, shape(m), true), strip("k", n.k, shape(k), true), strip("v", n.v, shape(k), true));
    const ends = [strip("α v", n.joined, shape(m), true), strip("output", n.output, "(1, " + m + ", " + f + ")")];
    if (small) return stack(rowOf(inputs, projections, thumbs), chosen, rowOf(...ends));
    return rowOf(inputs, arrow("W_q W_k W_v", "transpose_qkv"), projections, arrow("softmax", "q k^T / √" + dh), thumbs,
      chosen, ends[0], arrow("transpose_output", "W_o"), ends[1]);
  },

  formula(n) {
    const { heads, h, i, qt, kt } = n;
    const row = n.weights[h][i];
    const best = row.indexOf(Math.max(...row));
    const pair = qt[i] + " → " + kt[best] + ", " + T("Head {h}", { h });
    if (!n.q) return [[T("Weight") + ", " + pair, exact(row[best])], ["",
      T("The weights of your layer's last call. Give inputs= to layer.playground() and the whole way is computed here.")]];
    const f = n.q[0].length;
    const seen = range(0, kt.length - 1).filter((j) => n.sees(i, j));
    return [[T("Head {h}", { h }), f + " / " + heads + " = " + n.d + ";  "
      + T("features {first} to {last} of q, k and v", { first: h * n.d, last: (h + 1) * n.d - 1 })],
      seen.length ? [T("Weight") + ", " + pair, softmaxText(seen.map((j) => n.scores[h][i][j]), seen.indexOf(best), 10)
        + " = " + exact(row[best])]
        : [T("Weight"), T("no key may be seen: all weights are 1 / {n}", { n: kt.length }) + " = " + exact(row[best])]];
  },
  note(n, { models }) {
    if (n.own) return "";
    const { right, seeds } = models.translation;
    return T("Two heads, trained on short English-French pairs: {right} of the words of held-out pairs are right; of {seeds} seeds the one whose “le” and “la” look most at their noun. Another number of heads cuts the same features again.", { right: percent(right), seeds });
  },
  said(n) {
    const row = n.weights[n.h][n.i];
    const best = row.indexOf(Math.max(...row));
    return T("{head}, {query} to {key}: {weight}", { head: T("Head {h}", { h: n.h }), query: n.qt[n.i], key: n.kt[best],
      weight: exact(row[best]) });
  },
  table: (n) => n.weights.slice(0, 8).map((rows, h) => table(T("Head {h}", { h }), rows, n.qt, n.kt, 4)),
  python: (n) => (n.q ? layerPython(n) : null),
};

// Masks: the scores, the scores that a query may see, and the weights; one query before and after, as bars.

const MASKS = {
  id: "masks", title: "Masks", nav: "Masks", signed: true,
  says: ["A mask hides keys: words that only fill up a batch (padding), or words that come later (causal). Their scores become −∞, so their weights are 0, and the other weights grow.",
    "The vectors are those of chapter 2; the last words play the padding."],
  seen: "A mask sets scores to −∞: those keys have the weight 0, and the others share it.",
  fields: { len: wholeOf(6, 0, 11), causal: one("no", "yes"), query: wholeOf(2, 0, 10), last: one(...LAST_WORDS) },
  across: "len", along: "query",
  controls: () => [
    { kind: "slider", name: "len", label: "words before the padding", stops: range(0, 11) },
    { kind: "choice", name: "causal", label: "causal", stops: ["no", "yes"], say: (x) => T(x) },
    { kind: "select", name: "query", label: "query", stops: range(0, 10), say: (i) => i + " " + referenceWords("tired")[i] },
  ],

  numbers(s, core, { models }) {
    const { words, q, k, v } = referenceProjected(core, models.reference, s.last);
    const options = { q, k, v, emptyRows: "uniform" };
    const call = checkedCall({ ...options, validLens: s.len, causal: s.causal === "yes" ? "top_left" : false });
    const rows = (of) => rowsOf(of, words.length, words.length);
    const sees = visibility(call);
    return { s, q, k, v, words: words.map((word, j) => (j < s.len ? word : "<pad>")), i: s.query,
      sees: words.map((_, i) => words.map((__, j) => sees(i, j))),
      scores: rows(core.scores(call)), weights: rows(core.attention(call).weights),
        before: rows(core.attention(checkedCall(options)).weights) };
  },

  picture(n, { width, height, small, pen }) {
    const { words, i, sees } = n;
    const count = words.length;
    const type = pen.type;
    // The three matrices side by side, and below them, as wide as all, the bars of one query, named by the words.
    const below = small ? 160 : Math.floor(clamp(height * 0.36, 110, 190));
    const w = Math.max(8, Math.floor((width - (small ? 78 : 100 + 8.6 * type)) / (3 * count)));
    const h = small ? w : Math.max(8, Math.floor((height - below - 40 - 4.2 * type) / count));
    const hidden = (a, b) => !sees[a][b];
    const choose = (at) => ({ query: at.i });
    const grid = (name, data, more) => placed(pen, name, data, { w, h, look: { row: i }, columns: small ? null : words,
      shape: queriesByKeys(count, count), unused: (row) => row >= n.s.len,
      pick: choose, ...more });
    const nothing = !sees[i].some(Boolean);
    const top = Math.max(...n.scores.flat().map(Math.abs));
    const grids = [grid("S", n.scores, { rows: words, top }), grid(T("S, hidden"), n.scores, { masked: hidden, hidden: "−∞", top }),
      grid("A", n.weights, { kind: "weight", top: 1, masked: nothing ? null : hidden, })];
    const barsOf = (values, color, shift) => ({ kind: "bars", at: values.map((x, j) => [j + shift, j + shift + 0.4, x]),
      color });
    const bars = Plot(pen, { name: T("weights of “{query}” before and after the mask", { query: words[i] }),
      title: T("“{query}”: before, after", { query: words[i] }),
      width, height: below,
      x: { low: 0, high: count, ticks: range(0, count - 1).map((j) => j + 0.5), label: small && T("key"),
        say: (at) => (small ? String(at - 0.5) : words[at - 0.5]) },
      y: { low: 0, high: 1, ticks: [0, 0.5, 1] },
      marks: [barsOf(n.before[i], "soft", 0.08), barsOf(n.weights[i], "line", 0.5),
        { kind: "text", at: [[count, 0.9]], text: "■ " + T("before"), color: "soft", align: "right", shift: -6 * type },
        { kind: "text", at: [[count, 0.9]], text: "■ " + T("after"), color: "line", align: "right" }] });
    return stack(el("div", { class: "mhac-thumbs", style: "grid-template-columns:repeat(3,auto)" + (small ? "" : ";gap:10px") }, ...grids), bars.node);
  },

  formula(n, small) {
    const { s, i, sees } = n;
    const words = n.words.map((word, j) => (small ? j + " " + word : word)); // the picture of a phone has their numbers
    const seen = range(0, words.length - 1).filter((j) => sees[i][j]);
    const hidden = words.length - seen.length;
    if (!seen.length) {
      return [[T("Query {query}", { query: words[i] }), T("no key may be seen: all weights are 1 / {n}", { n: words.length })
        + " = " + exact(n.weights[i][0])],
        ["", T("That is d2l's answer: its hidden scores are −10⁶, all alike. torch's own function gives NaN or 0.")]];
    }
    const best = n.weights[i].indexOf(Math.max(...n.weights[i]));
    return [[T("Query {query}", { query: words[i] }), T("{seen} keys may be seen, {hidden} are hidden",
      { seen: seen.length, hidden })],
      [T("Weight") + ", " + words[i] + " → " + words[best], softmaxText(seen.map((j) => n.scores[i][j]), seen.indexOf(best),
        11) + " = " + exact(n.weights[i][best])],
      [T("before the mask"), softmaxText(n.scores[i], best, 11) + " = " + exact(n.before[i][best])]];
  },
  note: () => T("Grey: queries of the padding. They still look at words; what they give is not used."),
  said: (n) => T("{query}: {seen} keys may be seen", { query: n.words[n.i], seen: n.sees[n.i].filter(Boolean).length }),
  table: (n) => [table(T("scores"), n.scores.map((row, i) => row.map((x, j) => (n.sees[i][j] ? x : -Infinity))), n.words,
    n.words, 4),
    table(T("weights"), n.weights, n.words, n.words, 4)],
  python: (n, core) => pythonOfState(core, { from: "drawn", causal: n.s.causal === "yes" ? "top_left" : "",
    len: String(n.s.len), q: writeRows(n.q), k: writeRows(n.k), v: writeRows(n.v) }),
};

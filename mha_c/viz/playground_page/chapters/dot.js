// The dot product: one query of a sentence step by step, from q and K to scores, weights and the mixture of V.  The vectors
// are those of a trained model, whose "it" looks at what it stands for.

const DOT = {
  id: "dot", title: "The dot product", nav: "Dot product", signed: true,
  says: ["Each word asks with its query q. All words answer: the larger q · k with a word's key k, the larger the weight of that word's value v.",
    "The vectors are learned, and a query also holds the word two places on, so that “it” knows the last word: change it, and “it” looks at the other noun."],
  seen: "Queries and keys are learned, so that their product says what fits: one other word, and “it” looks elsewhere.",
  fields: { query: wholeOf(IT, 0, 10), last: one(...LAST_WORDS), root: one("yes", "no"), key: wholeOf(-1, -1, 10) },
  across: "query", along: "last",
  controls: () => [
    { kind: "select", name: "query", label: "query", stops: range(0, 10), say: (i) => referenceWords("…")[i] },
    { kind: "choice", name: "last", label: "last word", stops: LAST_WORDS },
    { kind: "choice", name: "root", label: "divide by √d", stops: ["yes", "no"], say: (x) => T(x) },
  ],

  numbers(s, core, { models }) {
    const model = models.reference;
    const { words, q, k, v } = referenceProjected(core, model, s.last);
    const { W_o, answer } = model.weights;
    const d = q[0].length;
    const call = checkedCall({ q, k, v, scale: s.root === "yes" ? null : 1 });
    const found = core.attention(call);
    const weights = rowsOf(found.weights, words.length, words.length);
    const scores = rowsOf(core.scores(call), words.length, words.length);
    const raw = rowsOf(core.scores({ ...call, scale: 1 }), words.length, words.length);
    const i = s.query;
    const j = s.key >= 0 ? s.key : weights[i].indexOf(Math.max(...weights[i]));
    const output = rowsOf(found.out, words.length, d);
    // What the model makes of it: a softmax over two answers is attention with two keys.
    const said = checkedCall({ q: projected(core, [output[i]], W_o), k: answer, v: [[1], [1]], scale: 1 });
    return { s, words, d, q, k, v, i, j, scores, raw, weights, output, exps: weights[i].map((w) => w * found.row_sum[i]),
      answers: Array.from(core.attention(said).weights), answered: i === IT || i === words.length - 1 };
  },

  picture(n, { width, height, small, pen }) {
    const { words, i, j } = n;
    const count = words.length;
    const type = pen.type;
    const size = small ? 15 : clamp(Math.floor(Math.min(height / 18, width / 38)), 16, 34);
    const sentence = tinted(words, n.weights[i], i, pen, size);
    const h = small ? 18 : Math.floor((height - 32 - size * 1.7 - 6.6 * type) / (count + 2));
    const across = Math.max(1.4 * type, Math.min(h, Math.floor((4 * width) / type / count))); // a cell of A
    const narrow = small ? 2 : clamp((width - count * across - 38 * type) / 66, 1, 9); // a feature's width
    const number = small ? 36 : 3.9 * type;
    const rows = names(words, count);
    const column = (numbers) => numbers.map((x) => [x]);
    const grid = (name, data, w, more) => placed(pen, name, data, { w, h, margins: { top: 0 }, look: { row: j }, pick: (at) =>
      ({ key: at.i }), ...more });
    const strip = (name, row) => placed(pen, name, [row], { w: narrow, h, margins: { top: 0 } });
    const lanes = el("div", { class: "mhac-lanes-of" }, standing(strip("q", n.q[i]), 1, 1),
      standing(grid("K", n.k, narrow, { rows }), 1, 2),
      standing(grid(small ? "s" : n.s.root === "yes" ? "s = q · k / √d" : "s = q · k", column(n.scores[i]), number,
        { kind: "plain", numbers: true }), 2, 2),
      standing(grid(small ? "exp" : "exp(s − m)", column(n.exps), number, { kind: "plain", numbers: true }), 3, 2),
      standing(grid("α", column(n.weights[i]), number, { kind: "weight", numbers: true, top: 1 }), 4, 2),
      standing(grid("V", n.v, narrow, {}), 5, 2), standing(strip(small ? "o" : "o = Σ α v", n.output[i]), 5, 3));
    if (n.answered) {
      const [il, elle] = n.answers;
      lanes.append(standing(el("p", { class: "mhac-note", text: T("French for it: il (le chat, the cat) {il}, elle (la soupe, the soup) {elle}",
        { il: percent(il), elle: percent(elle) }) }), "1 / 5", 3));
    }
    if (small) return stack(sentence, lanes);
    const matrix = placed(pen, "A", n.weights, { w: across, h, rows, columns: rows, shape: queriesByKeys(count, count), kind: "weight", top: 1,
      look: { row: i }, pick: (at) => ({ query: at.i, key: at.j }) });
    return stack(sentence, rowOf(matrix, lanes));
  },

  formula(n) {
    const { words, i, j, d } = n;
    const seen = range(0, words.length - 1);
    const pair = { pair: words[i] + " → " + words[j] };
    const mixed = seen.map((m) => [n.weights[i][m], words[m]]).sort((a, b) => b[0] - a[0]).map(([w, word]) => exact(w)
      + " · v(" + word + ")");
    return [[T("Score, {pair}", pair), "q · k" + (n.s.root === "yes" ? " / √" + d + " = " + exact(n.raw[i][j]) + " / √" + d
      : "") + " = " + exact(n.scores[i][j])],
      [T("Weight"), softmaxText(seen.map((m) => n.scores[i][m]), j, 11) + " = " + exact(n.weights[i][j])],
      [T("Output of {query}", { query: words[i] }), "o = " + sumOf(mixed, 4)]];
  },
  note: (n, { models }, small) => (small ? "" : T("A holds all α.") + " ")
    + T("m, the largest score, is subtracted so that exp stays small, which changes nothing.") + " " + T("One head, trained on such sentences: right for {right} of the pairs of noun and last word it had not seen; of {seeds} seeds the one that looks most at the noun meant.",
    { right: percent(models.reference.right), seeds: models.reference.seeds }),
  said: (n) => T("{query} looks at {key}: {weight}", { query: n.words[n.i], key: n.words[n.j],
    weight: exact(n.weights[n.i][n.j]) }),
  table: (n) => [table(T("weights"), n.weights, n.words, n.words, 4), table(T("scores"), n.scores, n.words, n.words, 4)],
  python: (n, core) => pythonOfState(core, { from: "drawn", scale: n.s.root === "yes" ? "" : "1",
    q: writeRows(n.q), k: writeRows(n.k), v: writeRows(n.v) }),
};

// A sentence whose words are tinted by the weights of one of them, which is framed.
function tinted(words, weights, at, pen, size) {
  return el("p", { class: "mhac-tinted", style: "font-size:" + size + "px" }, ...words.flatMap((word, j) => {
    const level = Math.round((STEPS - 1) * clamp(weights[j] || 0, 0, 1));
    const node = el("span", { class: "mhac-word" + (j === at ? " mhac-focus" : ""), text: word,
      style: level > 4 ? "background:" + pen.ramp.css[level] + ";color:" + pen.ramp.ink(level) : "" });
    node.pick = () => ({ query: j, key: -1 });
    return [node, " "];
  }));
}

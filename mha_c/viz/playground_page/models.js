// The trained models of the lecture (tools/lecture_models.py): their weights, and what they compute of a sentence.

function readModels({ step, ...models }) {
  return Object.fromEntries(Object.entries(models).map(([name, model]) => [name, { ...model,
    weights: Object.fromEntries(Object.entries(model.weights).map(([id, [rows, columns, packed]]) =>
      [id, rowsOf(Float32Array.from(new Int16Array(bytesOf(packed).buffer), (x) => x / step), rows, columns)])) }]));
}

const added = (...rows) => rows[0].map((x, n) => Math.fround(rows.reduce((sum, row) => sum + row[n], 0)));

const LAST_WORDS = ["tired", "cold", "ill", "salty"];
const IT = 8;

const referenceWords = (last) => ("the cat did not eat the soup because it was " + last).split(" ");

// "it" and its sentence: the words, and what W_q, W_k and W_v make of them.
function referenceProjected(core, model, last) {
  const words = referenceWords(last);
  const ids = words.map((word) => model.words.indexOf(word));
  const keys = ids.map((id, i) => added(model.weights.word[id], model.weights.place[i]));
  const queries = keys.map((row, i) => added(row, model.weights.later[ids[i + 2] || 0]));
  const { W_q, W_k, W_v } = model.weights;
  return { words, q: projected(core, queries, W_q), k: projected(core, keys, W_k), v: projected(core, keys, W_v) };
}

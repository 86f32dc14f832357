// The formula of one cell with its numbers: from the score to the weight to the output.

const scoreName = (model) => (model.call.softcap ? T("capped scores") : model.state.kind === "dot" ? "S" : T("scores"));

// The weights as they meet the values, where dropout has taken some away.
function dropOf(model, h) {
  if (!model.factors) return null;
  const { queries, keys } = model.call;
  return weightsOf(model, h).map((row, i) => row.map((w, j) => w * model.factors[(h * queries + i) * keys + j]));
}

// [[title, arithmetic], …] of a cell: from the score to the weight to the output.
function explanation(model, h, i, j, feature, query, key) {
  const { call, state } = model;
  const inHead = call.heads > 1 ? ", " + T("Head {h}", { h }) : "";
  const at = query + " → " + key + inHead;
  const parts = scoreParts(model, h, i, j);
  const row = weightsOf(model, h)[i];
  const weight = row[j];
  const lines = [[T("Score, {pair}", { pair: at }), scoreText(model, parts, i, j)]];
  const seen = row.map((_, n) => n).filter((n) => model.sees(i, n));
  if (!seen.length) {
    lines.push([T("Weight"), T("no key may be seen: all weights are 1 / {n}", { n: row.length }) + " = " + exact(weight)]);
  } else if (!model.sees(i, j)) lines.push([T("Weight"), T("this key may not be seen: 0")]);
  else {
    const terms = seen.map((n) => "exp(" + digits(scoreParts(model, h, i, n).score, 40) + ")");
    lines.push([T("Weight"), "exp(" + digits(parts.score, 40) + ") / [" + sumOf(terms, 6) + "] = " + exact(weight)]);
  }
  const dropped = dropOf(model, h);
  if (dropped) {
    lines.push([T("Dropout"), dropped[i][j] === 0 && weight > 0 ? T("dropped: 0")
      : exact(weight) + " / (1 − " + state.drop + ") = " + exact(dropped[i][j])]);
  }
  const values = valuesOf(model, h).map((value) => value[feature]);
  const used = (dropped || weightsOf(model, h))[i];
  const terms = values.map((x, n) => digits(used[n], 40) + " · " + signedText(x)).filter((_, n) => used[n] !== 0);
  lines.push([T("Output of {query}, feature {n}", { query, n: feature }) + inHead,
    (terms.length ? sumOf(terms, 6) : "0") + " = " + exact(outputOf(model, h)[i][feature])]);
  return lines;
}

const exact = (x) => (Math.abs(x) >= 1000 ? x.toFixed(1) : x.toFixed(4)).replace("-", "−");

function scoreText(model, parts, i, j) {
  const { call, state } = model;
  let said;
  if (state.kind === "distance") {
    said = "u = " + exact(model.distances[i][j]) + " / " + state.width + ";  " +
      { gaussian: "−u² / 2", boxcar: T("0 where u < 1, else −∞"), epanechnikov: "log max(0, 1 − u)", constant: "0" }[state.kernel];
  } else if (state.kind === "additive") {
    said = sumOf(parts.a.map((x, n) => signedText(model.w[n]) + " · tanh(" + digits(x, 40) + " + " +
      signedText(parts.b[n]) + ")"), 4);
    if (call.scale !== 1) said = "(" + said + ") · " + exact(call.scale);
  } else {
    const root = state.scale.trim() === "" ? " / √" + model.head_dim : " · " + exact(call.scale);
    said = "(" + dot(parts.a, parts.b) + ")" + root;
  }
  said += " = " + (Number.isFinite(parts.scaled) ? exact(parts.scaled) : "−∞");
  if (call.softcap) said += ";  " + call.softcap + " · tanh(" + exact(parts.scaled) + " / " + call.softcap + ") = " + exact(parts.score);
  return said;
}

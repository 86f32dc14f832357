// The formula of one cell with its numbers: from the score to the weight to the output.  All numbers are the core's.

const scoreName = (model) => (model.call.softcap ? T("capped scores") : model.state.kind === "dot" ? "S" : T("scores"));

// The weights as they meet the values, where dropout has taken some away.
function dropOf(model, h) {
  if (!model.factors) return null;
  const { queries, keys } = model.call;
  return weightsOf(model, h).map((row, i) => row.map((w, j) => w * model.factors[(h * queries + i) * keys + j]));
}

// [[title, arithmetic], …] of a cell: from the score to the weight to the output.  Head number `heads` is the mean of all.
function explanation(model, h, i, j, feature, query, key) {
  const { call, state } = model;
  if (h >= call.heads) {
    const each = range(0, call.heads - 1).map((head) => weightsOf(model, head)[i][j]);
    return [[T("Weight") + ", " + query + " → " + key + ", " + T("Mean"),
      "(" + each.map(exact).join(" + ") + ") / " + call.heads + " = " + exact(mean(each))]];
  }
  const inHead = call.heads > 1 ? ", " + T("Head {h}", { h }) : "";
  const [row, scores] = [weightsOf(model, h)[i], scoresOf(model, h)[i]];
  const lines = [[T("Score, {pair}", { pair: query + " → " + key + inHead }), scoreText(model, h, i, j)]];
  const seen = row.map((_, n) => n).filter((n) => model.sees(i, n) && scores[n] > -Infinity);
  if (!seen.length) {
    const why = state.kind === "distance" ? T("no key is within the width: all weights are 1 / {n}", { n: row.length })
      : T("no key may be seen: all weights are 1 / {n}", { n: row.length });
    lines.push([T("Weight"), why + " = " + exact(row[j])]);
  } else if (!model.sees(i, j)) lines.push([T("Weight"), T("this key may not be seen: 0")]);
  else if (!seen.includes(j)) lines.push([T("Weight"), T("this key is not within the width: 0")]);
  else lines.push([T("Weight"), softmaxText(seen.map((n) => scores[n]), seen.indexOf(j), 6) + " = " + exact(row[j])]);
  const dropped = dropOf(model, h);
  if (dropped) {
    lines.push([T("Dropout"), dropped[i][j] === 0 && row[j] > 0 ? T("dropped: 0")
      : exact(row[j]) + " / (1 − " + state.drop + ") = " + exact(dropped[i][j])]);
  }
  const used = (dropped || weightsOf(model, h))[i];
  const terms = valuesOf(model, h).map((value, n) => digits(used[n], 40) + " · "
    + signedText(value[feature])).filter((_, n) => used[n] !== 0);
  lines.push([T("Output of {query}, feature {n}", { query, n: feature }) + inHead,
    (terms.length ? sumOf(terms, 6) : "0") + " = " + exact(outputOf(model, h)[i][feature])]);
  return lines;
}

const exact = (x) => (Math.abs(x) >= 1e6 ? x.toExponential(3) : Math.abs(x) >= 1000 ? x.toFixed(1)
  : x.toFixed(4)).replace(/^-/, "−");

// "exp(−u² / 2)" with its u and its result.
function kernelText(kernel, u) {
  const said = { gaussian: "exp(−" + exact(u) + "² / 2) = ", boxcar: T("1 where u < 1, else 0") + ": ",
    epanechnikov: "max(0, 1 − " + exact(u) + ") = ", constant: "" }[kernel];
  return said + exact(kernelOf(kernel, u));
}

function scoreText(model, h, i, j) {
  const { call, state } = model;
  const score = scoresOf(model, h)[i][j];
  if (state.kind === "distance") {
    const u = model.distances[i][j] / state.width;
    return "u = " + exact(model.distances[i][j]) + " / " + state.width + " = " + exact(u) + ";  log K(u), K(u) = "
      + kernelText(state.kernel, u) +
      ";  " + (score > -Infinity ? exact(score) : "−∞");
  }
  const [a, b] = [headOf(model.q[i], h, model.head_dim), headOf(model.k[j], h, model.head_dim)];
  let said;
  if (state.kind === "additive") {
    said = sumOf(a.map((x, n) => signedText(model.w[n]) + " · tanh(" + digits(x, 40) + " + " + signedText(b[n]) + ")"), 4);
    if (call.scale !== 1) said = "(" + said + ") · " + exact(call.scale);
  } else {
    said = "(" + dot(a, b) + ")" + (state.scale.trim() === "" ? " / √" + model.head_dim : " · " + exact(call.scale));
  }
  const scaled = model.uncapped[(h * call.queries + i) * call.keys + j];
  said += " = " + exact(scaled);
  return call.softcap ? said + ";  " + call.softcap + " · tanh(" + exact(scaled) + " / " + call.softcap + ") = "
    + exact(score) : said;
}

// ---- errors in the words of the page ---------------------------------------------------------------------------------

// What scripts call by the names of arguments stands on the page under labels.
const labelOf = (name) => ({ validLens: T("lengths"), "window[0]": T("window left"), "window[1]": T("right"),
  scale: T("scale"), softcap: T("softcap"),
  q: T("queries"), k: T("keys"), v: T("values"), heads: T("heads") })[name.replace(/^validLens.*/, "validLens")] || name;

function wordsOfError(error) {
  const { text, values } = error;
  if (!text) return error.message;
  const named = { ...values, name: "“" + labelOf(values.name) + "”" };
  const expected = { "a whole number from 0 to {keys}, the rows of k": T("a whole number from 0 to {keys}, the number of keys"),
    "a finite number": T("a finite number"), "a number above 0": T("a number above 0"),
    "null or a whole number of keys, 0 or more": T("nothing, or a whole number of keys, 0 or more") }[values.expected]
      || values.expected || "";
  named.expected = expected.replace("{keys}", values.keys);
  if (text.includes("{queries}") || text.startsWith("{name} has {count}, q")) {
    return T("“{name}” are {n}, queries are {queries}: one number for all queries, or one for each",
      { ...named, name: labelOf(values.name) });
  }
  if (text.includes("{heads}")) return T("{n} features cannot be split into {heads} heads", named);
  return T("{name} must be {expected}, got {value}", named);
}

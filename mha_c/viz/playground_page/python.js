// The lines of Python that compute what the page shows: with mha_c, then with d2l where the book's package can.

function pythonOf(model) {
  const drawn = model.source.python && !model.edited;
  const numbers = drawn ? model.source.python : ["q", "k", "v"].map((name) => literal(name, model[name]));
  const w = model.w ? ["w = np.array([" + model.w.map(shortest).join(", ") + "], np.float32)"] : [];
  return ["import numpy as np", "import mha_c", "", ...numbers, ...w, ...headsOf(model), "", ...oursOf(model), "",
    ...bookOf(model),
    ""].join("\n");
}

// A chapter's numbers as a call of "All controls": the lines are the same.
const pythonOfState = (core, state) => pythonOf(modelOf({ ...startOf(ALL.fields), ...state }, core));

// A number as the shortest text that float32 reads as it.
function shortest(x) {
  const places = range(1, 9).find((n) => Math.fround(Number(x.toPrecision(n))) === Math.fround(x)) || 9;
  return String(Number(x.toPrecision(places)));
}

function literal(name, rows) {
  const lines = rows.map((row) => "[" + row.map(shortest).join(", ") + "]");
  return name + " = np.array([" + lines.join(",\n" + " ".repeat(name.length + 13)) + "], np.float32)";
}

// (rows, features) becomes (1, rows, features), or (1, heads, rows, features of a head).
function headsOf(model) {
  const { call, state } = model;
  const item = state.item && call.dropout ? ["q, k, v = (np.concatenate([x, x]) for x in (q, k, v))  # item 1 of a batch"] : [];
  if (call.heads === 1) return ["q, k, v = q[None], k[None], v[None]  # a batch of one", ...item];
  return ["q, k, v = (x.reshape(len(x), " + call.heads + ", -1).swapaxes(0, 1)[None] for x in (q, k, v))  # by heads", ...item];
}

const plainScores3 = ({ call, state }) => !call.causal && call.window_left < 0 && call.window_right < 0 && !call.softcap &&
  state.scale.trim() === "";

// One length for all queries, or a list of one each.
function lengthsOf(model) {
  const { call } = model;
  if (!call.valid_lens) return null;
  const lens = Array.from(call.valid_lens, Number);
  const one = lens.every((n) => n === lens[0]) ? String(lens[0]) : "[" + lens.join(", ") + "]";
  return "[" + Array(itemsOf(model)).fill(one).join(", ") + "]";
}

const itemsOf = ({ call, state }) => (state.item && call.dropout ? 2 : 1);

function oursOf(model) {
  const { call, state } = model;
  const lens = lengthsOf(model);
  const last = itemsOf(model) - 1;
  if (state.kind === "distance" && plainScores3(model) && !call.dropout) {
    return ['attention = mha_c.KernelAttention("' + state.kernel + '", width=' + state.width + ")",
      "output = attention(q, k, v" + (lens ? ", " + lens : "") + ")[0]", "weights = attention.attention_weights[0]",
      "print(output)"];
  }
  const sides = [call.window_left, call.window_right].map((side) => (side < 0 ? "None" : String(side)));
  const options = [
    lens && "valid_lens=" + lens, call.causal && 'causal="' + state.causal + '"',
    sides.some((side) => side !== "None") && "window=(" + sides.join(", ") + ")",
    state.kind === "distance" ? "bias=bias" : state.scale.trim() && "scale=" + call.scale,
    call.softcap && "softcap=" + call.softcap, call.dropout && "dropout=" + call.dropout + ", rng=" + call.seed,
    'empty_rows="uniform"', "return_weights=True"].filter(Boolean).join(", ");
  const function_ = state.kind === "additive" ? "additive_attention(q, k, v, w, " : state.kind === "distance"
    ? "dot_product_attention(q[..., :0], k[..., :0], v, " : "dot_product_attention(q, k, v, ";
  return [...(state.kind === "distance" ? biasOf(state) : []), "output, weights = mha_c.functional." + function_,
    "    " + options + ")", "output, weights = output[" + last + "], weights[" + last + "]", "print(output)"]
    .join("\n").replace("(q, k, v, \n", "(\n    q, k, v,\n").replace("w, \n", "w,\n").replace("v, \n", "v,\n").split("\n");
}

function biasOf(state) {
  const kernels = { gaussian: "-u**2 / 2", boxcar: "np.where(u < 1, 0, -np.inf)", epanechnikov: "np.log(np.maximum(0, 1 - u))",
    constant: "0 * u" };
  return ["u = np.linalg.norm(q[..., :, None, :] - k[..., None, :, :], axis=-1) / " + state.width,
    "bias = (" + kernels[state.kernel] + ").astype(np.float32)  # the logarithm of the kernel"];
}

// d2l knows lengths; corners and windows are hidden by hand, as its masked_softmax hides what is behind a length.
function bookOf(model) {
  const { call, state } = model;
  const lens = lengthsOf(model);
  const head = ["# The same with the book's package" + (call.dropout ? ", without dropout: it draws other numbers" : "") + ".",
    "import torch", "from d2l import torch as d2l", "",
    "Q, K, V = (torch.from_numpy(np.ascontiguousarray(x[0])) for x in (q, k, v))"];
  const batch = call.heads > 1 ? [] : ["Q, K, V = Q[None], K[None], V[None]"];
  const one = lens ? "torch.tensor(" + (itemsOf(model) > 1 ? lens + "[:1]" : lens) + ")" : "None";
  const lengths = lens && call.heads > 1 ? "torch.repeat_interleave(" + one + ", " + call.heads + ", dim=0)" : one;
  const lines = [...head, ...batch, "valid_lens = " + lengths];
  if (state.kind === "dot" && plainScores3(model)) {
    return [...lines, "attention = d2l.DotProductAttention(dropout=0)", "book = attention(Q, K, V, valid_lens)",
      "print(book)"];
  }
  const scores = state.kind === "additive" ? "torch.tanh(Q.unsqueeze(-2) + K.unsqueeze(-3)) @ torch.from_numpy(w)"
    : state.kind === "dot" ? "Q @ K.transpose(-2, -1)" : "torch.from_numpy(bias[:1])";
  const scaled = state.kind === "distance" || call.scale === 1 ? scores : "(" + scores + ") * " + call.scale;
  const needsBias = state.kind === "distance" && plainScores3(model) && !call.dropout ? biasOf(state) : [];
  return [...lines, ...needsBias, "scores = " + scaled,
    ...(call.softcap && state.kind !== "distance"
      ? ["scores = " + call.softcap + " * torch.tanh(scores / " + call.softcap + ")"] : []),
    ...hiddenByHand(call), "book = d2l.masked_softmax(scores, valid_lens) @ V", "print(book)"];
}

function hiddenByHand(call) {
  const rules = [call.causal && "(j <= i)", call.window_left >= 0 && "(j >= i - " + call.window_left + ")",
    call.window_right >= 0 && "(j <= i + " + call.window_right + ")"].filter(Boolean);
  if (!rules.length) return [];
  const shift = call.causal === CAUSAL.bottom_right ? call.keys - call.queries : 0;
  return ["i, j = torch.arange(" + call.queries + ")[:, None]" + (shift ? " + " + shift : "") + ", torch.arange(" +
    call.keys + ")", "scores = torch.where(" + rules.join(" & ") + ", scores, -1e6)"];
}

// ---- a layer with its parameters -------------------------------------------------------------------------------------

// Numbers as bytes: every float32 as it is.
function packedLiteral(name, rows) {
  const bytes = new Uint8Array(Float32Array.from(rows.flat()).buffer);
  const text = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  return name + ' = numbers("' + text + '", ' + rows.length + ", " + rows[0].length + ")";
}

function layerPython({ layer, heads }) {
  const names = ["W_q", "W_k", "W_v", "W_o"];
  const self = layer.queries === layer.keys;
  const sizes = [layer.keys, layer.queries, layer.values].map((x) => x[0].length).join(", ");
  const lens = layer.lens === null || layer.lens === undefined ? "None" : "np.array([" + JSON.stringify(layer.lens) + "])";
  const bias = layer.bias ? "True" : "False";
  const hiddens = layer.W[0].length;
  return ["import base64", "import numpy as np", "import mha_c", "",
    "def numbers(text, rows, columns):",
      "    return np.frombuffer(base64.b64decode(text), np.float32).reshape(rows, columns)", "",
    packedLiteral("queries", layer.queries), packedLiteral("keys", layer.keys),
      self ? "values = keys" : packedLiteral("values", layer.values),
    "queries, keys, values = queries[None], keys[None], values[None]  # a batch of one", "valid_lens = " + lens, "state = {",
    ...names.map((name, i) => '    "' + name + '.weight": ' + packedLiteral("", layer.W[i]).replace(" = ", "") + ","),
    ...(layer.bias ? names.map((name, i) => '    "' + name + '.bias": '
      + packedLiteral("", [layer.bias[i]]).replace(" = ", "") + "[0],") : []), "}", "",
    "mha = mha_c.MultiHeadAttention(" + sizes + ", " + hiddens + ", " + heads + ", 0, bias=" + bias + ")",
      "mha.load_state_dict(state)",
    "output = mha(queries, keys, values, valid_lens)[0]", "weights = mha.attention_weights[0]", "print(output)", "",
    "# The same with the book's package.", "import torch", "from d2l import torch as d2l", "",
    "try:  # the English book's", "    book_mha = d2l.MultiHeadAttention(" + hiddens + ", " + heads + ", 0, bias=" + bias + ")",
    "except TypeError:  # the Chinese and the Turkish book's", "    book_mha = d2l.MultiHeadAttention(" + sizes + ", "
      + hiddens + ", " + heads + ", 0, bias=" + bias + ")",
    "inputs = [torch.from_numpy(np.array(x)) for x in (queries, keys, values)]",
      "lens = None if valid_lens is None else torch.from_numpy(valid_lens)",
    "book_mha(*inputs, lens)  # an open size is known after a call",
      "book_mha.load_state_dict({name: torch.from_numpy(np.array(x)) for name, x in state.items()})", "book_mha.eval()",
    "book = book_mha(*inputs, lens)[0].detach()", "print(book)", ""].join("\n");
}

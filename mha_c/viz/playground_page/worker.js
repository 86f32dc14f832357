// The worker of "What it costs": computes where the page is not stopped by it; the page ends it to give up.  Each size has
// an instance of the core of its own, whose memory begins small: what it has grown by is what the call took.

const ENOUGH = 120; // milliseconds of calls: their best counts
const TOO_MUCH = 3000; // for three of the largest: one counts as it is
const TICK = 10; // clocks of browsers are coarse: so many milliseconds are measured at a time

// Milliseconds of a call, the best of several measurements.
function best(call) {
  const start = performance.now();
  for (let least = Infinity, repeats = 1, rounds = 0; ;) {
    const before = performance.now();
    for (let n = 0; n < repeats; n++) call();
    const spent = performance.now() - before;
    if (spent < TICK) repeats *= 2;
    else {
      least = Math.min(least, spent / repeats);
      rounds++;
    }
    const all = performance.now() - start;
    if ((rounds >= 3 && all > ENOUGH) || (rounds && all > TOO_MUCH)) return least;
  }
}

// Both ways are calls of the core.  Naive: all scores, then all weights, kept as n x n; tiled: no more than a tile of them.
function waysOf(core, n, depth) {
  const numbers = (phase) => Float32Array.from({ length: n * depth }, (_, i) => Math.sin(i * 12.9898 + phase) * 2);
  const [q, k, v] = [0, 1, 2].map(numbers);
  const scale = 1 / Math.sqrt(depth);
  const call = { queries: n, keys: n, heads: 1, head_dim: depth, value_dim: depth, q, k, v, scale, window_left: -1,
    window_right: -1, without_weights: true };
  const scaled = q.map((x) => x * scale);
  return {
    tiled: () => core.attention(call).out,
    naive: () => core.attention({ ...call, q: null, k: null, head_dim: 0, bias: core.linear(scaled, k, n, n, depth),
      without_weights: false }).out,
  };
}

async function measure({ core, sizes, depth }) {
  for (const n of sizes) {
    const found = { n, depth };
    const outputs = {};
    for (const way of ["tiled", "naive"]) {
      const own = await startCore(core);
      const before = own.bytes();
      const call = waysOf(own, n, depth)[way];
      outputs[way] = call();
      found[way] = { mebibytes: (own.bytes() - before) / 2 ** 20, milliseconds: best(call) };
    }
    found.apart = outputs.tiled.reduce((most, x, i) => Math.max(most, Math.abs(x - outputs.naive[i])), 0);
    postMessage(found);
  }
  postMessage({ done: true });
}

onmessage = (event) => measure(event.data).catch((error) => postMessage({ failed: error.message }));

// The worker of "How fast": computes where the page is not stopped by it.  The page ends it to give up; an engine does so
// at the end of a task only, or after seconds, so that a large call is made in pieces with a rest between them.

const ENOUGH = 300; // milliseconds of calls, so that the engine has compiled them as well as it does
const TOO_MUCH = 3000; // for one call of the largest: it counts as it is
const TICK = 20; // clocks of browsers are coarse: so many milliseconds are measured at a time
const TASK = 50; // milliseconds after which there is a rest
const PIECE = 2 ** 26; // multiplications: some 10 milliseconds of the core, some 40 of plain JavaScript

const rest = () => new Promise((done) => setTimeout(done));

// Milliseconds of a call, the best of several measurements.  The pieces are functions; rests do not count.
async function best(pieces) {
  const start = performance.now();
  let [least, rested, awake] = [Infinity, 0, start];
  for (let repeats = 1, rounds = 0; ;) {
    const before = performance.now() - rested;
    for (let n = 0; n < repeats; n++) {
      for (const piece of pieces) {
        piece();
        const now = performance.now();
        if (now - awake < TASK) continue;
        await rest();
        awake = performance.now();
        rested += awake - now;
      }
    }
    const spent = performance.now() - rested - before;
    if (spent < TICK) repeats *= 2;
    else {
      least = Math.min(least, spent / repeats);
      rounds++;
    }
    const all = performance.now() - rested - start;
    if ((rounds >= 3 && all > ENOUGH) || (rounds && all > TOO_MUCH)) return least;
  }
}

// Queries by pieces: [[first, last], …].  Rows do not depend on one another.
function piecesOf(queries, keys, depth) {
  const rows = Math.max(16, 4 * Math.floor(PIECE / (8 * keys * depth)));
  return Array.from({ length: Math.ceil(queries / rows) }, (_, i) => [i * rows, Math.min(queries, (i + 1) * rows)]);
}

async function measure({ core, queries, keys, depth }) {
  const ours = await startCore(core);
  const numbers = (n) => Float32Array.from({ length: n }, (_, i) => Math.sin(i * 12.9898) * 2);
  const [q, k, v] = [numbers(queries * depth), numbers(keys * depth).reverse(), numbers(keys * depth)];
  const call = { keys, heads: 1, head_dim: depth, value_dim: depth, k, v, scale: 1 / Math.sqrt(depth), window_left: -1,
    window_right: -1, without_weights: true };
  const found = { core: new Float32Array(queries * depth), plain: new Float32Array(queries * depth) };
  const computes = {
    core: (rows, part) => ours.attention({ ...call, queries: rows, q: part }).out, // copies to the module are part of it
    plain: (rows, part) => plainAttention(part, k, v, rows, keys, depth),
  };
  for (const [name, compute] of Object.entries(computes)) {
    postMessage({ running: name });
    await rest();
    const milliseconds = await best(piecesOf(queries, keys, depth).map(([first, last]) => () => {
      found[name].set(compute(last - first, q.subarray(first * depth, last * depth)), first * depth);
    }));
    postMessage({ done: name, milliseconds });
  }
  postMessage({ apart: found.core.reduce((most, x, i) => Math.max(most, Math.abs(x - found.plain[i])), 0) });
}

onmessage = (event) => measure(event.data).catch((error) => postMessage({ failed: error.message }));

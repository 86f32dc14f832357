// The worker of "How fast": computes where the page is not stopped by it.  Ended by the page to give up.

const ENOUGH = 300; // milliseconds of calls, so that the engine has compiled them as well as it does
const TOO_MUCH = 3000; // for one call of the largest: it counts as it is
const TICK = 20; // clocks of browsers are coarse: so many milliseconds are measured at a time

// Milliseconds of a call, the best of several measurements.
function best(run) {
  const start = performance.now();
  let least = Infinity;
  for (let repeats = 1, rounds = 0; ;) {
    const before = performance.now();
    for (let n = 0; n < repeats; n++) run();
    const now = performance.now();
    if (now - before < TICK) repeats *= 2;
    else {
      least = Math.min(least, (now - before) / repeats);
      rounds++;
    }
    if ((rounds >= 3 && now - start > ENOUGH) || (rounds && now - start > TOO_MUCH)) return least;
  }
}

async function measure({ core, queries, keys, depth }) {
  const ours = await startCore(core);
  const numbers = (n) => Float32Array.from({ length: n }, (_, i) => Math.sin(i * 12.9898) * 2);
  const [q, k, v] = [numbers(queries * depth), numbers(keys * depth).reverse(), numbers(keys * depth)];
  const call = { queries, keys, heads: 1, head_dim: depth, value_dim: depth, q, k, v, scale: 1 / Math.sqrt(depth),
    window_left: -1, window_right: -1, without_weights: true };
  postMessage({ running: "core" });
  let found = null;
  const milliseconds = best(() => {
    found = ours.attention(call); // its copies into the module's memory and back are part of it
  });
  postMessage({ done: "core", milliseconds });
  postMessage({ running: "plain" });
  let plain = null;
  const other = best(() => {
    plain = plainAttention(q, k, v, queries, keys, depth);
  });
  const apart = found.out.reduce((most, x, i) => Math.max(most, Math.abs(x - plain[i])), 0);
  postMessage({ done: "plain", milliseconds: other, apart });
}

onmessage = (event) => measure(event.data).catch((error) => postMessage({ failed: error.message }));

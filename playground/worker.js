// The worker of "How fast": computes where the page is not stopped by it.  Ended by the page to give up.

const AT_LEAST = 300; // milliseconds of calls, so that the engine has compiled them as well as it does; the best counts
const AT_MOST_CALLS = 30;

function best(run) {
  const start = performance.now();
  let least = Infinity;
  for (let n = 0; n < AT_MOST_CALLS && (n < 3 || performance.now() - start < AT_LEAST); n++) {
    const before = performance.now();
    run();
    least = Math.min(least, performance.now() - before);
    if (performance.now() - start > 10 * AT_LEAST) break;
  }
  return least;
}

async function measure({ core, queries, keys, depth }) {
  const ours = await startCore(core);
  const numbers = (n) => Float32Array.from({ length: n }, (_, i) => Math.sin(i * 12.9898) * 2);
  const [q, k, v] = [numbers(queries * depth), numbers(keys * depth).reverse(), numbers(keys * depth)];
  const call = { queries, keys, heads: 1, head_dim: depth, value_dim: depth, q, k, v, scale: 1 / Math.sqrt(depth),
    window_left: -1, window_right: -1, without_weights: true };
  postMessage({ running: "core" });
  let found = null;
  let milliseconds = Infinity;
  best(() => {
    found = ours.attention(call);
    milliseconds = Math.min(milliseconds, found.milliseconds); // the call alone, as numbers already there are measured
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

// Attention in plain JavaScript, as well as it can be written there: typed arrays, blocks of keys that stay in the cache,
// four queries at a time in local variables, an online softmax, and no weights kept.

const PLAIN_BLOCK = 64;

function plainAttention(q, k, v, queries, keys, depth) {
  const out = new Float32Array(queries * depth);
  const wide = (queries + 3) & ~3;
  const question = new Float64Array(wide * depth); // double is what JavaScript computes with: converted once
  const scale = 1 / Math.sqrt(depth);
  for (let i = 0; i < q.length; i++) question[i] = q[i] * scale;
  const sums = new Float64Array(wide * depth);
  const max = new Float64Array(wide).fill(-Infinity);
  const total = new Float64Array(wide);
  const keyBlock = new Float64Array(PLAIN_BLOCK * depth);
  const valueBlock = new Float64Array(PLAIN_BLOCK * depth);
  const scores = new Float64Array(4 * PLAIN_BLOCK);
  for (let first = 0; first < keys; first += PLAIN_BLOCK) {
    const count = Math.min(PLAIN_BLOCK, keys - first);
    keyBlock.set(k.subarray(first * depth, (first + count) * depth));
    valueBlock.set(v.subarray(first * depth, (first + count) * depth));
    for (let i = 0; i < queries; i += 4) {
      plainScores(question, keyBlock, scores, i, count, depth);
      for (let r = 0; r < 4; r++) plainSoftmax(scores, r, count, i + r, max, total, sums, depth);
      plainValues(scores, valueBlock, sums, i, count, depth);
    }
  }
  for (let i = 0; i < queries; i++) {
    for (let c = 0; c < depth; c++) out[i * depth + c] = sums[i * depth + c] / total[i];
  }
  return out;
}

// Four queries times two keys: eight sums in local variables.
function plainScores(question, keyBlock, scores, i, count, depth) {
  const [a, b, c, d] = [i * depth, (i + 1) * depth, (i + 2) * depth, (i + 3) * depth];
  for (let j = 0; j < count; j += 2) {
    const e = j * depth;
    const f = j + 1 < count ? e + depth : e;
    let ae = 0, be = 0, ce = 0, de = 0, af = 0, bf = 0, cf = 0, df = 0;
    for (let n = 0; n < depth; n++) {
      const x = keyBlock[e + n];
      const y = keyBlock[f + n];
      const qa = question[a + n];
      const qb = question[b + n];
      const qc = question[c + n];
      const qd = question[d + n];
      ae += qa * x;
      be += qb * x;
      ce += qc * x;
      de += qd * x;
      af += qa * y;
      bf += qb * y;
      cf += qc * y;
      df += qd * y;
    }
    scores[j] = ae;
    scores[PLAIN_BLOCK + j] = be;
    scores[2 * PLAIN_BLOCK + j] = ce;
    scores[3 * PLAIN_BLOCK + j] = de;
    if (f === e) continue;
    scores[j + 1] = af;
    scores[PLAIN_BLOCK + j + 1] = bf;
    scores[2 * PLAIN_BLOCK + j + 1] = cf;
    scores[3 * PLAIN_BLOCK + j + 1] = df;
  }
}

function plainSoftmax(scores, r, count, i, max, total, sums, depth) {
  const start = r * PLAIN_BLOCK;
  let most = max[i];
  for (let j = start; j < start + count; j++) if (scores[j] > most) most = scores[j];
  if (most > max[i]) {
    const shrink = Math.exp(max[i] - most);
    total[i] *= shrink;
    for (let c = i * depth; c < (i + 1) * depth; c++) sums[c] *= shrink;
    max[i] = most;
  }
  let sum = 0;
  for (let j = start; j < start + count; j++) {
    const e = Math.exp(scores[j] - most);
    scores[j] = e;
    sum += e;
  }
  total[i] += sum;
}

// Four rows of weights times two columns of values.
function plainValues(scores, valueBlock, sums, i, count, depth) {
  const [a, b, c, d] = [i * depth, (i + 1) * depth, (i + 2) * depth, (i + 3) * depth];
  for (let n = 0; n < depth; n += 2) {
    const pair = n + 1 < depth ? 1 : 0;
    let a0 = 0, b0 = 0, c0 = 0, d0 = 0, a1 = 0, b1 = 0, c1 = 0, d1 = 0;
    for (let j = 0; j < count; j++) {
      const x = valueBlock[j * depth + n];
      const y = valueBlock[j * depth + n + pair];
      const wa = scores[j];
      const wb = scores[PLAIN_BLOCK + j];
      const wc = scores[2 * PLAIN_BLOCK + j];
      const wd = scores[3 * PLAIN_BLOCK + j];
      a0 += wa * x;
      b0 += wb * x;
      c0 += wc * x;
      d0 += wd * x;
      a1 += wa * y;
      b1 += wb * y;
      c1 += wc * y;
      d1 += wd * y;
    }
    sums[a + n] += a0;
    sums[b + n] += b0;
    sums[c + n] += c0;
    sums[d + n] += d0;
    if (!pair) continue;
    sums[a + n + 1] += a1;
    sums[b + n + 1] += b1;
    sums[c + n + 1] += c1;
    sums[d + n + 1] += d1;
  }
}

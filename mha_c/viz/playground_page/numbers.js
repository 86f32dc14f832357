// Numbers drawn with a seed, the same as NumPy's np.random.RandomState(seed) draws, so that Python can draw them again.

function RandomState(seed) {
  const state = new Uint32Array(624); // the Mersenne Twister
  let at = 624;
  let kept = null; // normal numbers come in pairs
  state[0] = seed;
  for (let i = 1; i < 624; i++) state[i] = Math.imul(1812433253, state[i - 1] ^ (state[i - 1] >>> 30)) + i;

  function refill() {
    for (let i = 0; i < 624; i++) {
      const y = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7fffffff);
      state[i] = state[(i + 397) % 624] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
    }
    at = 0;
  }

  function bits32() {
    if (at === 624) refill();
    let y = state[at++];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  }

  const random = () => ((bits32() >>> 5) * 67108864 + (bits32() >>> 6)) / 9007199254740992;

  function normal() {
    if (kept !== null) {
      const now = kept;
      kept = null;
      return now;
    }
    let x, y, r;
    do {
      x = 2 * random() - 1;
      y = 2 * random() - 1;
      r = x * x + y * y;
    } while (r >= 1 || r === 0);
    const f = Math.sqrt((-2 * Math.log(r)) / r);
    kept = f * x;
    return f * y;
  }

  return {
    random,
    normal,
    uniform: (low, high) => low + (high - low) * random(),
  };
}

const round1 = (x) => Math.round(10 * x) / 10 || 0;

// A matrix as rows of numbers, each from `make(i, j)`.
const matrix = (rows, columns, make) =>
  Array.from({ length: rows }, (_, i) => Array.from({ length: columns }, (__, j) => make(i, j)));

const transposed = (m) => m[0].map((_, j) => m.map((row) => row[j]));

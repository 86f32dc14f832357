// What it costs: time and memory over n, with all scores kept (naive) and with a tile of them (the core), measured here.

const COST_SIZES = [64, 128, 256, 512, 1024, 2048, 4096];

// Two digits, which is all that a measurement in a browser tells.
const rough = (x) => String(Number(x.toPrecision(2)));

const COST = {
  id: "cost", title: "What it costs", nav: "Cost",
  says: ["n words make n² scores: twice as many words cost four times the time, and four times the memory where all scores are kept.",
    "The core keeps only a tile of them. Both ways are timed by the same core in this browser: now, and again by Measure."],
  seen: "n words cost n² of time, and n² of memory only where all scores are kept: tiles give the same output without it.",
  fields: { largest: wholeOf(1024, 64, 4096), depth: wholeOf(64, 16, 128) },
  across: "largest", along: "depth",
  controls: () => [
    { kind: "slider", name: "largest", label: "largest n", stops: COST_SIZES },
    { kind: "choice", name: "depth", label: "features", stops: [16, 32, 64, 128] },
    { kind: "button", label: "Measure", pressed: "Give up", isPressed: (state) => Boolean(state.running),
      press: (state) => (state.running ? { running: false } : { running: true, results: [], failed: "" }) },
  ],

  // A measurement runs as long as the state says so; what an ended one still sends is not heard.
  effect({ store, data }) {
    let worker = null;
    const stop = () => {
      if (worker) worker.terminate();
      worker = null;
    };
    async function start() {
      const address = URL.createObjectURL(new Blob([data.worker], { type: "text/javascript" }));
      const own = (worker = new Worker(address));
      URL.revokeObjectURL(address);
      own.onmessage = ({ data: said }) => {
        if (own !== worker) return;
        if (said.done || said.failed) store.set({ running: false, failed: said.failed || "" });
        else store.set({ results: (data.measured = [...store.state.results, said]) }); // other chapters keep it
      };
      own.onerror = (event) => own === worker && store.set({ running: false, failed: event.message });
      const core = await inflate(bytesOf(data.core));
      const { largest, depth } = store.state;
      if (own === worker) own.postMessage({ core, sizes: COST_SIZES.filter((n) => n <= largest), depth });
    }
    const forget = store.subscribe((changed) => {
      if (!changed.includes("running")) return;
      stop();
      if (store.state.running) start();
    });
    if (!(data.measured || []).length) store.set({ running: true, results: [], failed: "" });
    return () => {
      forget();
      stop();
      store.state.running = false; // in another language the chapter is built again, without this worker
    };
  },

  numbers(s, core, data) {
    const results = s.results || (data && data.measured) || [];
    const n = results.length ? results[results.length - 1].n : s.largest;
    return { s, results, n, last: results[results.length - 1] || null, square: (4 * n * n) / 2 ** 20 };
  },

  picture(n, { width, height, small, pen }) {
    const { results } = n;
    const w = small ? width : Math.floor((width - 16) / 2);
    const h = small ? 230 : height;
    const x = { low: 64, high: 4096, log: true, ticks: [64, 256, 1024, 4096], label: "n" };
    // Names never meet, whatever this machine measures: the line that ends higher is named above its end, the other below.
    const above = (of) => (n.last && of(n.last.tiled) > of(n.last.naive) ? "tiled" : "naive");
    const plot = (name, low, high, of, guide, named) => Plot(pen, { name, title: name, width: w, height: h, x,
      y: { low, high, log: true }, marks: [
      { kind: "line", at: COST_SIZES.map((size) => [size, guide * (size / 4096) ** 2]).filter(([, y]) => y >= low
        && y <= high), color: "soft", size: 1.5, dash: [2, 4] },
      { kind: "text", at: [named], text: "n²", color: "soft" },
      ...["naive", "tiled"].flatMap((way) => {
        const at = results.map((each) => [each.n, clamp(of(each[way]), low, high)]);
        const [color, dash] = way === "naive" ? ["other", [6, 3]] : ["line", []];
        const end = at.slice(-1);
        return [{ kind: "line", at, color, dash, size: 3 }, { kind: "points", at, color, size: 5 },
          { kind: "text", at: end, text: T(way), color, weight: 600, up: way === above(of) ? 14 : -16,
            ...(at.length > 1 ? { align: "center", shift: -10 } : { shift: 10 }) }]; // the first stands at the axis and its numbers
      })] });
    return rowOf(plot(T("milliseconds"), 0.01, 10000, (each) => each.milliseconds, 2000, [2300, 1800]).node,
      plot(T("memory taken, MiB"), 0.05, 512, (each) => each.mebibytes, 128, [256, 0.16]).node);
  },

  formula(n) {
    const { last } = n;
    const lines = [[T("All scores"), n.n + "² · 4 / 2²⁰ = " + exact(n.square) + " MiB;  "
      + T("naive keeps them as scores, as weights and in copies")]];
    if (n.s.failed) lines.push([T("Given up"), n.s.failed]);
    if (!last) return lines.concat([["", n.s.running ? T("Measuring …") : T("Nothing is measured yet.")]]);
    const { tiled, naive } = last;
    lines.push([T("Time"), "n = " + last.n + ", " + T("{d} features", { d: last.depth }) + ": " + T("naive") + " "
      + rough(naive.milliseconds) + " ms / " + T("tiled") + " " + rough(tiled.milliseconds) + " ms = " + rough(naive.milliseconds / tiled.milliseconds)]);
    lines.push([T("Memory"), T("naive") + " " + exact(naive.mebibytes) + " MiB, " + T("tiled") + " " + exact(tiled.mebibytes)
      + " MiB;  " + T("the outputs differ by at most {apart}", { apart: last.apart.toExponential(1) })]);
    return lines;
  },
  said: (n) => (n.last ? T("n = {n}: naive {naive} ms, tiled {tiled} ms",
    { n: n.n, naive: short(n.last.naive.milliseconds), tiled: short(n.last.tiled.milliseconds) }) : ""),
  table: (n) => [table(T("measured"), n.results.map((each) => [each.naive.milliseconds, each.tiled.milliseconds,
    each.naive.mebibytes, each.tiled.mebibytes]), n.results.map((each) => "n = " + each.n),
    ["ms, " + T("naive"), "ms, " + T("tiled"), "MiB, " + T("naive"), "MiB, " + T("tiled")], 3)],
  python: ({ s }) => ["import time", "import numpy as np", "import mha_c", "",
    "mha_c.set_num_threads(1)  # as in the browser", "depth = " + s.depth, "", "",
    "def naive(q, k, v):", "    scores = q @ k.swapaxes(1, 2) / np.float32(np.sqrt(depth))",
    "    return mha_c.masked_softmax(scores) @ v", "", "",
    "def milliseconds(call, *arguments):", "    best = np.inf", "    for _ in range(5):",
    "        start = time.perf_counter()", "        call(*arguments)", "        best = min(best, time.perf_counter() - start)",
    "    return 1000 * best", "", "", "for n in (" + COST_SIZES.filter((n) => n <= s.largest).join(", ") + ",):",
    "    q, k, v = np.random.default_rng(0).standard_normal((3, 1, n, depth), dtype=np.float32)",
    "    tiled = mha_c.functional.dot_product_attention",
    "    apart = np.abs(naive(q, k, v) - tiled(q, k, v)).max()",
    '    print(f"n = {n}: naive {milliseconds(naive, q, k, v):.3f} ms, tiled {milliseconds(tiled, q, k, v):.3f} ms, "',
    '          f"all scores {4 * n * n / 2**20:.3f} MiB, apart {apart:.1e}")', ""].join("\n"),
};

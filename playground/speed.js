// How fast: the core beside plain JavaScript, in a worker, so that the page never stands still and can give up at once.

const SIZES = [64, 128, 256, 512, 1024, 2048, 4096];

function Speed(page) {
  const { state } = page;
  const start = el("button", { type: "button", class: "mhac-button mhac-primary", text: T("Measure"), onclick: measure });
  const stop = el("button", { type: "button", class: "mhac-button", text: T("Give up"), disabled: true, onclick: giveUp });
  const said = el("p", { class: "mhac-caption", role: "status" });
  const memory = el("p", { class: "mhac-note" });
  const results = el("div", {});
  const node = el("div", {}, el("p", { class: "mhac-caption", text: T("The same attention twice in this browser: by the core, and by plain JavaScript written well. Both keep no weights.") }),
    el("div", { class: "mhac-fields" },
      slider(T("queries"), state.sq, SIZES, (sq) => change({ sq })), slider(T("keys"), state.sk, SIZES, (sk) => change({ sk })),
      slider(T("features"), state.sd, [16, 32, 64, 128], (sd) => change({ sd })), start, stop), memory, said, results);
  let worker = null;
  let began = 0;
  let times = {};

  function change(values) {
    Object.assign(state, values);
    page.remember();
    sayMemory();
  }

  function sayMemory() {
    const mebibytes = (state.sq * state.sk * 4) / 2 ** 20;
    setText(memory, T("All scores would take {size} MiB; neither holds more than a tile of them.", { size: mebibytes < 1
      ? mebibytes.toFixed(2) : mebibytes.toFixed(0) }));
  }

  function measure() {
    end();
    times = {};
    results.replaceChildren();
    const address = URL.createObjectURL(new Blob([page.data.worker], { type: "text/javascript" }));
    worker = new Worker(address);
    URL.revokeObjectURL(address);
    began = performance.now();
    worker.onmessage = ({ data }) => hear(data);
    worker.onerror = (event) => finish(event.message);
    start.disabled = true;
    stop.disabled = false;
    setText(said, T("The core is loading."));
    inflate(bytesOf(page.data.core)).then((core) => {
      if (worker) worker.postMessage({ core, queries: state.sq, keys: state.sk, depth: state.sd });
    });
  }

  function hear(message) {
    if (message.failed) finish(message.failed);
    else if (message.running) {
      setText(said, message.running === "core" ? T("The core computes.") : T("Plain JavaScript computes."));
    } else if (message.done) {
      times[message.done] = message.milliseconds;
      showTimes();
    } else {
      finish(T("The core is {ratio} times as fast. The two outputs differ by at most {apart}.",
        { ratio: (times.plain / times.core).toFixed(1), apart: message.apart.toExponential(1) }));
    }
  }

  function giveUp() {
    if (worker) finish(T("Given up after {seconds} s.", { seconds: ((performance.now() - began) / 1000).toFixed(1) }));
  }

  function end() {
    if (worker) worker.terminate();
    worker = null;
    start.disabled = false;
    stop.disabled = true;
  }

  function finish(text) {
    end();
    setText(said, text);
  }

  function showTimes() {
    const names = { core: T("core (WebAssembly, SIMD)"), plain: T("plain JavaScript") };
    const done = Object.keys(times);
    const products = 2 * state.sq * state.sk * state.sd; // multiplications, and as many additions
    results.replaceChildren(barTable(T("Milliseconds, the best of several calls"), done.map((name) => names[name] + ", " +
      ((2 * products) / times[name] / 1e6).toFixed(1) + " GFLOP/s"), [T("milliseconds")], done.map((name) => [times[name]]),
    Math.max(...done.map((name) => times[name])), (x) => x.toFixed(x < 10 ? 2 : 0)));
  }

  sayMemory();
  return { node, start() {}, resized() {}, end, focus: () => start.focus({ preventScroll: true }) };
}

// The player: Back, Play, Next, a bar with all steps, formula and caption, the matrices, the arithmetic of one cell.
// Arrow keys left and right step, space plays, up and down choose the query; pointing at a cell explains it.

const STEP_MS = { tiles: 2200, layer: 3200 };
const REVEAL_MS = 700;
const TALLEST = 470; // pixels of a scene

async function buildPlayer(host, data) {
  const player = makePlayer(data, Store({}));
  return { root: player.root, first: player.root, ready: () => player.follow(host) };
}

// The player as a part of a page, whose store it shares: step, and row and column of the chosen cell, stand there.
function makePlayer(data, store) {
  const { state } = store;
  for (const name of ["step", "row", "column"]) state[name] = state[name] || 0;
  const app = Pen("light");
  const scenes = { tiles: tileScenes, layer: layerScenes }[data.player](app, data);
  const still = window.matchMedia("(prefers-reduced-motion: reduce)");
  const ui = playerFrame(data, scenes, { step, toggle, row: moveRow });
  const ends = endings();
  let [scene, timer, started] = [null, null, 0];

  const at = () => clamp(state.step, 0, scenes.length - 1);
  function cell() {
    const { result } = scene;
    return result ? { i: clamp(state.row, 0, result.height - 1), j: clamp(state.column, 0, result.width - 1) } : { i: 0, j: 0 };
  }

  function show() {
    scene = scenes[at()].make();
    const { result } = scene;
    if (result) result.canvas.addEventListener("pointermove", (event) => point(result.at(event)));
    started = performance.now();
    ui.show(at(), scene);
    draw();
    animate();
    if (at() === scenes.length - 1) stop();
  }

  const go = (to) => store.set({ step: clamp(to, 0, scenes.length - 1) });

  function step(by) {
    stop();
    go(at() + by);
  }

  function moveRow(by) {
    if (scene.result) point({ ...cell(), i: clamp(cell().i + by, 0, scene.result.height - 1) });
  }

  function point(there) {
    if (there) store.set({ row: there.i, column: there.j });
  }

  // The result appears row by row, as it would be written down; all at once for those who want no motion.
  function shown() {
    const part = still.matches ? 1 : (performance.now() - started) / REVEAL_MS;
    if (part >= 1 || !scene.result) return null;
    const { width, height } = scene.result;
    return (i, j) => i * width + j < part * width * height;
  }

  // A page of its own stands on one screen, where that is possible; 130: names of matrices, and the edges of the stage.
  function tall() {
    const around = ui.root.offsetHeight - ui.stage.offsetHeight + 2 * (ui.root.getBoundingClientRect().top + window.scrollY);
    return alone() ? clamp(window.innerHeight - around - 130, 200, TALLEST) : TALLEST;
  }

  function draw() {
    const width = ui.stage.clientWidth;
    if (!width) return;
    scene.fit(width, tall());
    scene.draw({ cell: cell(), shown: shown() });
    ui.explain(scene.explain(cell()));
  }

  // The height of the tallest of the first scenes: what stands below the stage does not jump from step to step.
  function measure() {
    ui.stage.style.minHeight = "";
    if (ui.root.getAttribute("data-size") === "small") return; // matrices stand one below the other there
    const heights = scenes.slice(0, 6).map((each) => {
      const made = each.make();
      ui.stage.replaceChildren(made.node);
      made.fit(ui.stage.clientWidth, tall());
      made.draw({ cell: { i: 0, j: 0 }, shown: null });
      return made.node.offsetHeight;
    });
    ui.stage.style.minHeight = Math.max(...heights) + "px";
    ui.stage.replaceChildren(scene.node);
  }

  function animate() {
    if (!shown()) {
      draw();
      return;
    }
    requestAnimationFrame(() => {
      draw();
      animate();
    });
  }

  function toggle() {
    if (timer) {
      stop();
      return;
    }
    go(at() === scenes.length - 1 ? 0 : at() + 1);
    timer = setInterval(() => go(at() + 1), STEP_MS[data.player]);
    ui.playing(true);
    if (at() === scenes.length - 1) stop();
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    ui.playing(false);
  }

  show();
  ends.add(store.subscribe((changed) => (changed.includes("step") ? show() : draw())));
  ends.add(stop);
  ends.add(() => (started = -Infinity)); // a result that is still appearing is no longer drawn
  return {
    root: ui.root, end: ends.end,
    follow(host) {
      ends.add(followTheme(host, ui.root, app, draw));
      ends.add(followWidth(ui.root, (width) => {
        ui.root.setAttribute("data-size", width < 620 ? "small" : "large");
        measure();
        draw();
      }));
    },
  };
}

function playerFrame(data, scenes, does) {
  const button = (text, label, action) =>
    el("button", { type: "button", class: "mhac-button", text, "aria-label": label, onclick: action });
  const back = button(T("Back"), T("Back, left arrow"), () => does.step(-1));
  const play = button(T("Play"), T("Play, space"), () => does.toggle());
  const next = button(T("Next"), T("Next, right arrow"), () => does.step(1));
  next.classList.add("mhac-primary");
  const title = el("h4", { class: "mhac-step" });
  const math = el("div", { class: "mhac-formula" });
  const caption = el("p", { class: "mhac-caption" });
  const code = el("pre", { class: "mhac-code" });
  const stage = el("div", { class: "mhac-board" }, el("div"));
  const sum = el("p", { class: "mhac-sum", "aria-live": "polite" });
  const memory = Memory();
  const dots = scenes.map((scene, i) => el("button", { type: "button", class: "mhac-dot", "aria-label": scene.title,
    title: scene.title, "data-group": scene.group, onclick: () => does.step(i - at) }));
  let at = 0;
  const bar = el("nav", { class: "mhac-dots", "aria-label": T("Steps") }, ...dots);
  const root = el("div", { class: "mhac-root mhac-player", role: "group", "aria-label": data.title, tabindex: 0 },
    el("header", {}, el("div", { class: "mhac-titles" }, el("h3", { text: data.title })),
      el("div", { class: "mhac-controls" }, back, play, next)),
    bar, el("div", { class: "mhac-said" }, title, code, math, caption), memory.node, stage, sum,
    el("footer", {}, el("p", { text: whenKeysWork(T("← → step, space plays, ↑ ↓ choose the query. Point at a cell.")) })));

  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const onButton = event.composedPath()[0].tagName === "BUTTON";
    const action = {
      ArrowLeft: () => does.step(-1), ArrowRight: () => does.step(1), ArrowUp: () => does.row(-1),
      ArrowDown: () => does.row(1), " ": onButton ? null : () => does.toggle(),
    }[event.key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  });

  return {
    root, stage,
    playing: (on) => setText(play, on ? T("Pause") : T("Play")),
    explain: (text) => setText(sum, text),
    show(index, scene) {
      at = index;
      back.disabled = index === 0;
      next.disabled = index === scenes.length - 1;
      setText(title, index + 1 + " / " + scenes.length + "   " + T(scenes[index].title));
      const { code: written, shape } = scenes[index];
      code.replaceChildren(...(written ? [written, el("span", { text: shape ? "   # " + shape : "" })] : []));
      math.replaceChildren(...formula(scenes[index].formula));
      caption.replaceChildren(...formula(T(scenes[index].caption)));
      stage.replaceChildren(scene.node);
      memory.show(scene.memory);
      dots.forEach((dot, i) => {
        dot.classList.toggle("mhac-done", i <= index);
        dot.classList.toggle("mhac-first", i > 0 && scenes[i].group !== scenes[i - 1].group);
        if (i === index) dot.setAttribute("aria-current", "step");
        else dot.removeAttribute("aria-current");
      });
    },
  };
}

// How many scores are in memory now, beside the whole matrix.
function Memory() {
  const fill = el("span");
  const text = el("span", { class: "mhac-note" });
  const node = el("div", { class: "mhac-memory", hidden: true }, el("span", { class: "mhac-note", text: T("scores held") }),
    el("span", { class: "mhac-gauge" }, fill), text);
  return {
    node,
    show(memory) {
      node.hidden = !memory;
      if (!memory) return;
      fill.style.width = (100 * memory.held) / memory.whole + "%";
      setText(text, T("{held} of {whole}", memory));
    },
  };
}

// The page: loads the core, hands it to scripts as `mha_c`, and shows the chapter that the address asks for.

const CHAPTERS = () => [POOLING, DOT, ADDITIVE, HEADS, MASKS, ROOT, COST, SUMMARY, ALL];

function openPlayground(style, data) {
  const opening = inflate(bytesOf(data.core)).then((bytes) => startCore(bytes));
  const api = (window.mha_c = {});
  data.models = readModels(data.models);
  const own = document.querySelector("script[data-mhac-own]"); // layer.playground() puts a reader's layer there
  data.own = own && JSON.parse(own.textContent);
  // The numbers of a chapter as its picture shows them: mha_c.numbers("ch=dot&query=8").
  const numbers = (core) => (address) => {
    const { state, chapter, unknown } = readState(address, CHAPTERS());
    if (unknown.length) throw new Error(T("Not understood in the address: {what}", { what: unknown.join(", ") }));
    return chapter.numbers(state, core, data);
  };
  api.ready = opening.then((core) => {
    Object.assign(api, { attention: callable(core), linear: core.linear, numbers: numbers(core) });
  });
  mount("playground", style, data, (host) => opening.then((core) => buildPlayground(host, data, core)));
}

const LANGUAGES = [["en", "English"], ["de", "Deutsch"], ["zh", "中文"], ["tr", "Türkçe"]];

async function buildPlayground(host, data, core) {
  const root = el("div", { class: "mhac-root mhac-play" });
  const theme = detectTheme(host);
  const pen = Pen(theme);
  const page = { host, root, data, core, pen, store: null, chapter: null };
  const chapters = CHAPTERS();
  let part = null;
  let built = ""; // the language that the frame speaks

  const address = Address((hash) => open(hash));
  const framed = location.protocol === "about:"; // in a notebook's frame, which has no address of its own

  function open(hash) {
    const { state, chapter, unknown } = readState(hash, chapters);
    if (part) part.end();
    Object.assign(page, { store: Store(state), chapter });
    page.store.subscribe((changed) => {
      if (!framed) address.remember(writeState(state, chapter), changed);
      if (changed.includes("lang")) rebuild();
      if (changed.includes("p")) project();
    });
    show(unknown);
  }

  function show(unknown) {
    const { state } = page.store;
    spoken = WORDS[state.lang] || {};
    root.setAttribute("lang", state.lang);
    document.documentElement.lang = state.lang;
    document.title = T(page.chapter.title) + " · " + T(data.title);
    if (built !== state.lang) frame();
    built = state.lang;
    setText(note, T("Not understood in the address: {what}", { what: unknown.join(", ") }));
    note.hidden = !unknown.length;
    part = (page.chapter.build || Chapter)(page, page.chapter);
    main.replaceChildren(part.node);
    project();
    if (root.isConnected) part.start();
  }

  let [nav, note, main, large] = [];
  function frame() {
    nav = el("nav", { "aria-label": T("Chapters") }, el("ol", {}, ...chapters.map((each, i) => el("li", {},
      el("a", { text: (each === ALL ? "" : i + 1 + " ") + T(each.nav || each.title) })))));
    if (framed) {
      nav.addEventListener("click", (event) => {
        event.preventDefault();
        open(event.target.hash.slice(1));
      });
    }
    note = el("p", { class: "mhac-trouble", role: "alert", hidden: true });
    main = el("main", { class: "mhac-part" });
    const { state } = page.store;
    const language = select(T("Language"), LANGUAGES, state.lang, (lang) => page.store.set({ lang }));
    large = el("button", { type: "button", class: "mhac-button", "aria-label": T("Projector"), title: T("Projector") + " (p)",
      onclick: () => page.store.set({ p: page.store.state.p ? "" : "1" }) });
    root.replaceChildren(el("header", {}, nav, language, large), note, main,
      el("footer", {}, el("p", { text: T("Keys: 1 to 8 a chapter, Page Down the next, 0 all controls, p the projector, arrows and space the picture. Computed here by mha_c's C core; nothing leaves this page.") })));
  }

  function rebuild() {
    part.end();
    refill(root, () => show([]));
  }

  // The links keep language and projector.
  function project() {
    const { lang, p } = page.store.state;
    nav.querySelectorAll("a").forEach((link, i) => {
      link.setAttribute("href", "#" + writeState({ ...startOf({ ...COMMON, ...chapters[i].fields }), lang, p }, chapters[i]));
      if (chapters[i] === page.chapter) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    });
    root.toggleAttribute("data-projector", p === "1");
    setText(large, p ? "×" : T("Projector"));
    if (root.isConnected) redraw();
  }

  function redraw() {
    pen.type = page.store.state.p && root.clientWidth >= 620 ? 15 : 12;
    const list = nav.firstChild; // on a phone it is wider than the screen
    const now = list.querySelector("[aria-current]");
    list.scrollLeft = now.offsetLeft - list.offsetLeft - (list.clientWidth - now.offsetWidth) / 2;
    part.draw();
  }

  // The page's keys work wherever the focus is, behind a click on the margin, too; but where text is typed they are text.
  document.addEventListener("keydown", (event) => {
    const field = event.composedPath()[0];
    // What a presenter's clicker sends turns up to the summary; in "All controls" it scrolls, as everywhere.
    const turn = page.chapter !== ALL && { PageDown: 1, PageUp: -1 }[event.key];
    const typing = field.tagName === "TEXTAREA" || (field.tagName === "INPUT" && field.type !== "range")
      || (field.tagName === "SELECT" && !turn);
    if (typing || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const link = /^[0-9]$/.test(event.key) && nav.querySelectorAll("a")[(Number(event.key)
      + chapters.length - 1) % chapters.length];
    if (turn) nav.querySelectorAll("a")[clamp(chapters.indexOf(page.chapter) + turn, 0, chapters.indexOf(SUMMARY))].click();
    if (turn) setTimeout(() => part.focus());
    else if (event.key === "p" || (event.key === "Escape" && page.store.state.p)) page.store.set({ p: page.store.state.p ? "" : "1" });
    else if (link) {
      link.click();
      setTimeout(() => part.focus());
    } else if (root.contains(field) || !part.keys || !part.keys(event)) return;
    event.preventDefault();
  });

  wear(root, pen, theme);
  document.body.style.padding = "8px 8px 0"; // all of a chapter stands on the first screen
  open(address.start() || (data.own ? "ch=heads" : ""));
  return {
    root,
    first: page.chapter.build ? part : null, // chapters take arrows without the focus
    ready() {
      followTheme(host, root, pen, () => part.draw());
      let size = "";
      const look = once(() => {
        if (size === root.clientWidth + "," + window.innerHeight) return;
        size = root.clientWidth + "," + window.innerHeight;
        root.setAttribute("data-size", root.clientWidth < 620 ? "small" : "large");
        redraw();
      });
      new ResizeObserver(look).observe(root);
      window.addEventListener("resize", look);
      part.start();
    },
  };
}

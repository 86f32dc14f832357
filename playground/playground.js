// The page: loads the core, hands it to scripts as `mha_c`, and shows what the address asks for.

function openPlayground(style, data) {
  const opening = inflate(bytesOf(data.core)).then((bytes) => startCore(bytes));
  const api = (window.mha_c = {});
  api.ready = opening.then((core) => {
    Object.assign(api, { attention: callable(core), linear: core.linear });
  });
  mount("playground", style, data, (host) => opening.then((core) => buildPlayground(host, data, core)));
}

const LANGUAGES = [["en", "English"], ["de", "Deutsch"], ["zh", "中文"], ["tr", "Türkçe"]];

async function buildPlayground(host, data, core) {
  const root = el("div", { class: "mhac-root mhac-play", role: "main" });
  const page = { host, data, core, state: null, theme: detectTheme(host), model: null, shown: null, greeted: false, remember, drawn() {} };
  let written = null;

  // A browser may refuse more than a hundred addresses in half a minute: then the last one is written later.
  function remember() {
    const now = writeState(page.state);
    if (now === written) return;
    try {
      history.replaceState(null, "", "#" + now);
      written = now;
    } catch (refused) {
      setTimeout(remember, 1000);
    }
  }

  function open() {
    const { state, unknown } = readState(location.hash);
    page.state = state;
    build(unknown);
  }

  function build(unknown) {
    const { state } = page;
    spoken = WORDS[state.lang] || {};
    root.setAttribute("lang", state.lang);
    const parts = { attend: Attend, why: Why, speed: Speed };
    const tabs = Object.keys(parts);
    const titles = { attend: T("Attend"), why: T("Why"), speed: T("How fast") };
    const tabChoice = choice(T("Part"), tabs.map((tab) => titles[tab]), Math.max(0, tabs.indexOf(state.tab)), (i) => {
      state.tab = tabs[i];
      remember();
      show();
    });
    const language = select(T("Language"), LANGUAGES, state.lang, (lang) => {
      state.lang = lang;
      remember();
      refill(root, () => build([]));
    });
    const note = el("p", { class: "mhac-trouble", role: "alert", hidden: !unknown.length,
      text: T("Not understood in the address: {what}", { what: unknown.join(", ") }) });
    const main = el("div", { class: "mhac-part" });
    const share = Share(page);
    page.drawn = share.draw;
    root.replaceChildren(el("header", {},
      el("div", { class: "mhac-titles" }, el("h3", { text: T(data.title) }),
        el("div", { class: "mhac-subtitle", text: T("computed in this browser by the C core of mha_c") })),
      el("div", { class: "mhac-controls" }, tabChoice, language)), note, main, share.node, el("footer", {},
      el("p", { text: T("Nothing leaves this page: it asks the network for nothing.") })));

    function show() {
      if (page.shown && page.shown.end) page.shown.end();
      page.shown = parts[state.tab](page);
      main.replaceChildren(page.shown.node);
      page.shown.start();
      share.draw();
    }
    show();
  }

  // Keys work as soon as the page is open; later the focus is the reader's.
  function greet() {
    if (!page.greeted) page.shown.focus();
    page.greeted = page.state.tab !== "attend" || page.greeted; // there the view comes a moment later, and asks for it
  }

  window.addEventListener("hashchange", () => {
    if (location.hash.replace(/^#/, "") !== written) open();
  });
  open();
  return {
    root, first: { focus: greet },
    ready() {
      followTheme(host, (theme) => {
        root.setAttribute("data-theme", theme);
        page.theme = theme;
        page.shown.resized();
      });
      let width = 0;
      new ResizeObserver(() => {
        if (root.clientWidth === width) return;
        width = root.clientWidth;
        root.setAttribute("data-size", width < 620 ? "small" : "large");
        page.shown.resized();
      }).observe(root);
    },
  };
}

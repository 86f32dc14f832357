// The page: loads the core, hands it to scripts as `mha_c`, and shows what the address asks for.

function openPlayground(style, data) {
  const opening = inflate(bytesOf(data.core)).then((bytes) => startCore(bytes));
  const api = (window.mha_c = {});
  api.ready = opening.then((core) => {
    Object.assign(api, { attention: callable(core), exp: core.exp, tanh: core.tanh, linear: core.linear });
  });
  mount("playground", style, data, (host) => opening.then((core) => buildPlayground(host, data, core)));
}

async function buildPlayground(host, data, core) {
  const { output } = window.mha_c.attention({ q: [[1, 0], [0, 1]], k: [[1, 0], [0, 1]], v: [[1], [2]] });
  const root = el("div", { class: "mhac-root", role: "group", "aria-label": data.title },
    el("h3", { text: data.title }), el("p", { class: "first", text: output.map((row) => row[0].toFixed(4)).join(" ") }));
  return {
    root,
    ready() {
      followTheme(host, (theme) => root.setAttribute("data-theme", theme));
    },
  };
}

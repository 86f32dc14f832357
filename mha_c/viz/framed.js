// For a page in a frame of its own, as marimo shows it: as high as its content, in the colours of what is around it.

const frame = window.frameElement; // null where the surroundings are another site's
if (frame) {
  const body = document.body;
  const around = frame.ownerDocument;
  const fit = () => { frame.style.height = Math.ceil(body.getBoundingClientRect().height) + "px"; };
  const wear = () => {
    body.style.color = getComputedStyle(frame.parentElement).color;
    document.documentElement.style.colorScheme = getComputedStyle(frame).colorScheme; // with another one it is opaque
  };
  new ResizeObserver(fit).observe(body);
  const watcher = new MutationObserver(wear);
  for (const node of [around.body, around.documentElement]) watcher.observe(node, { attributes: true });
  wear();
}

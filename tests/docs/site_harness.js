// Shows each page of wishes.pages in a frame of wishes.width pixels and looks for what is wrong with it.
const wrong = [], heights = {}, links = new Set();
// time stands still for what waits for the server: a worker that searches gets its time so
const rest = () => fetch("pause");

async function shown(page) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${wishes.width}px; height: 900px; border: 0`;
  frame.src = page;
  const loaded = new Promise((done) => frame.addEventListener("load", done));
  document.body.append(frame);
  // before the page's own scripts run
  const watch = () => frame.contentWindow.addEventListener("error", (event) => {
    wrong.push(`${page}: ${event.message || "cannot load " + event.target.src}`);
  }, true);
  watch();
  await loaded;
  watch();
  await rest();
  return frame;
}

function channels(color) {
  const found = color.match(/[\d.]+/g).map(Number);
  return { rgb: found.slice(0, 3), alpha: found.length > 3 ? found[3] : 1 };
}

function over(above, below) {
  return above.rgb.map((value, place) => value * above.alpha + below[place] * (1 - above.alpha));
}

function luminance(rgb) {
  const parts = rgb.map((value) => value / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
}

function behind(element, view) {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    const layer = channels(view.getComputedStyle(at).backgroundColor);
    if (layer.alpha > 0) layers.push(layer);
    if (layer.alpha === 1) break;
  }
  return layers.reduceRight((below, layer) => over(layer, below), [255, 255, 255]);
}

function contrast(page, frame) {
  const view = frame.contentWindow, faint = new Map();
  for (const element of view.document.querySelectorAll(".md-content *, .md-header *, .md-footer *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const box = element.getBoundingClientRect(), style = view.getComputedStyle(element);
    if (!own || !box.width || style.visibility === "hidden" || style.opacity === "0") continue;
    if (element.closest(".headerlink, [aria-hidden=true], .md-search, .md-header__topic + .md-header__topic")) continue;
    const below = behind(element, view), text = luminance(over(channels(style.color), below));
    const ground = luminance(below);
    const ratio = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    if (ratio < (large ? 3 : 4.5)) faint.set(`${element.className || element.tagName} ${style.color}`, `${ratio.toFixed(2)} "${element.textContent.trim().slice(0, 40)}"`);
  }
  for (const [what, told] of faint) wrong.push(`${page}: contrast of ${what}: ${told}`);
}

function cut(page, frame) {
  const root = frame.contentDocument.documentElement;
  if (root.scrollWidth > wishes.width) wrong.push(`${page}: ${root.scrollWidth} pixels wide`);
  for (const element of frame.contentDocument.querySelectorAll(".md-content p, .md-content li, .md-content img, .md-content h1, .md-content h2, .md-content h3, .md-content table")) {
    const box = element.getBoundingClientRect();
    if (box.width && box.right > wishes.width + 1 && !element.closest(".md-typeset__scrollwrap, pre"))
      wrong.push(`${page}: ends at ${Math.round(box.right)}: ${element.textContent.trim().slice(0, 60)}`);
  }
}

function collect(page, frame) {
  for (const element of frame.contentDocument.querySelectorAll("a[href], img[src]")) {
    const address = new URL(element.href || element.src);
    if (address.origin === location.origin) links.add(address.href);
    if (element.tagName === "IMG" && !element.naturalWidth) wrong.push(`${page}: no picture ${element.src}`);
  }
}

async function dead() {
  const parsed = {};
  for (const link of links) {
    const [file, anchor] = link.split("#");
    if (!(file in parsed)) {
      const answer = await fetch(file);
      if (!answer.ok) wrong.push(`dead link ${link}`);
      parsed[file] = answer.ok && file.endsWith(".html") && new DOMParser().parseFromString(await answer.text(), "text/html");
    }
    const name = anchor && decodeURIComponent(anchor);
    if (name && parsed[file] && !parsed[file].getElementById(name) && !name.startsWith("__")) wrong.push(`dead anchor ${link}`);
  }
}

async function clicked() {
  const frame = await shown("index.html"), page = frame.contentDocument;
  let clicks = 0;
  for (const value of ["DeepSpeed", "1 to 25 Gb/s", "ZeRO 2"]) {
    page.querySelector(`input[value="${value}"]`).click();
    clicks += 1;
  }
  const chosen = page.querySelector("#chooser code").textContent;
  frame.remove();
  return { chosen, clicks };
}

async function searched(words) {
  const found = {};
  const frame = await shown("index.html"), page = frame.contentDocument;
  const input = page.querySelector(".md-search__input");
  page.getElementById("__search").click();
  input.dispatchEvent(new frame.contentWindow.FocusEvent("focus"));
  for (const word of words) {
    input.value = word;
    input.dispatchEvent(new frame.contentWindow.Event("keyup", { bubbles: true }));
    for (let turn = 0; turn < 60; turn += 1) {
      await rest();
      const meta = page.querySelector(".md-search-result__meta");
      if (meta && /\d|No matching/.test(meta.textContent) && page.querySelector(".md-search-result__link")) break;
    }
    await rest();
    const pages = [...page.querySelectorAll(".md-search-result__link")].map((link) => new URL(link.href).pathname.slice(1));
    found[word] = [...new Set(pages)];
  }
  frame.remove();
  return found;
}

(async () => {
  const told = { wrong, heights };
  try {
    for (const page of wishes.pages) {
      const frame = await shown(page);
      heights[page] = frame.contentDocument.documentElement.scrollHeight;
      told.scheme = frame.contentWindow.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
      contrast(page, frame);
      cut(page, frame);
      collect(page, frame);
      frame.remove();
    }
    await dead();
    Object.assign(told, await clicked());
    told.search = await searched(["wandb", "slower", "lora", "eval"]);
  } catch (error) {
    wrong.push(`the harness: ${error.stack}`);
  }
  const output = document.createElement("output");
  output.textContent = JSON.stringify(told);
  document.body.replaceChildren(output);
})();

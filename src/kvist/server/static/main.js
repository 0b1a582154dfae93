// The page as a whole: the stream, the key, the colours, and which panel is drawn when.

import { BlockMap, MemoryPanel } from "./blocks.js";
import { BreakerPanel, CallChart, MissPanel } from "./calls.js";
import { HitChart, medians, spansOf, TtftChart } from "./charts.js";
import { element, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { bytes, count, percent, plural, seconds, short } from "./format.js";
import { PrefixTree } from "./prefixes.js";

const KEY = "kvist-key";
const THEME = "kvist-theme";
const HIDDEN_MS = 10000;
const get = (id) => document.getElementById(id);

/** Storage that may be forbidden: then what was chosen lasts as long as the page. */
const stored = {
  get: (store, name) => {
    try {
      return window[store].getItem(name);
    } catch {
      return null;
    }
  },
  set: (store, name, value) => {
    try {
      if (value === null) window[store].removeItem(name);
      else window[store].setItem(name, value);
    } catch {
      // As above.
    }
  },
};

const feed = new Feed({ onChange: schedule, onStatus: showStatus });
feed.key = stored.get("sessionStorage", KEY);

// --- panels

const panels = new Map();
const add = (id, sections, panel, update = (doc) => panel.update(doc)) => panels.set(get(id), { sections, update, panel, isDue: true, isVisible: false });
add("tiles", ["values", "spans"], null, drawTiles);
add("hits", ["spans", "values"], new HitChart(get("hits")));
add("ttft", ["spans", "values"], new TtftChart(get("ttft")));
add("prefixes", ["prefixes", "values"], new PrefixTree(get("prefixes")));
add("calls", ["calls"], new CallChart(get("calls"), feed));
add("misses", ["spans"], new MissPanel(get("misses")), (doc) => panels.get(get("misses")).panel.update(spansOf(doc)));
const blockMap = new BlockMap(get("blocks"));
add("blocks", ["cells"], blockMap);
add("memory", ["cells"], new MemoryPanel(get("memory")));
const breakers = new BreakerPanel(get("breakers"));

// Panels out of sight are not drawn; on a phone that is most of them.
const observer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) panels.get(target).isVisible = isIntersecting;
  schedule();
}, { rootMargin: "200px" });
for (const node of panels.keys()) observer.observe(node);

let isScheduled = false;
let isPaused = false;

function schedule() {
  if (feed.document.changed.size) {
    for (const panel of panels.values()) panel.isDue ||= panel.sections.some((name) => feed.document.changed.has(name));
  }
  if (isScheduled || document.hidden || !feed.document.sections.has("values")) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    draw();
  });
}

function draw() {
  const doc = feed.document;
  setText(get("model"), doc.value("model"));
  breakers.update(doc.value("breakers"));
  for (const panel of panels.values()) {
    if (!panel.isVisible || !panel.isDue) continue;
    panel.isDue = false;
    panel.update(doc);
  }
  const sums = doc.value("is_private") ? "Sums are over all keys; prefixes and requests are this key's alone." : "No API keys are set: whoever reaches this server sees all prompts here.";
  setText(get("foot"), `Kvist ${doc.value("version")}. ${sums}`);
  document.documentElement.dataset.drawn = String(doc.value("now_s"));
}

function drawTiles(doc) {
  const spans = spansOf(doc);
  const now = doc.value("now_s");
  const sum = (of) => spans.reduce((total, span) => total + of(span), 0);
  const [reused, computed] = [sum((span) => span.reused), sum((span) => span.computed)];
  const lastMinute = spans.filter((span) => now - span.at <= 60).reduce((total, span) => total + span.calls, 0);
  const { cold, warm } = medians(spans);
  const tiers = doc.value("tiers");
  const total = tiers.reduce((all, tier) => all + tier.num_bytes, 0);
  const used = tiers.reduce((all, tier) => all + tier.used_bytes, 0);
  tile("Hit share", reused + computed ? percent(reused / (reused + computed)).split(" ") : ["-"], "of 15 minutes, all keys");
  tile("Reused", [short(reused), "tokens"], `${short(computed)} computed`);
  tile("Requests", [count(lastMinute), "/ min"], `${count(sum((span) => span.calls))} in 15 min`);
  tile("First token, warm", warm === null ? ["-"] : seconds(warm).split(" "), `cold ${cold === null ? "-" : seconds(cold)}`);
  tile("Running", [count(doc.value("num_running"))], `${count(doc.value("num_waiting"))} waiting, ${count(doc.value("num_refused"))} refused`);
  tile("Cache filled", total ? percent(used / total).split(" ") : ["-"], total ? `${bytes(used)} of ${bytes(total)}` : "not looked at yet");
}

function tile(name, [value, unit = ""], more) {
  const id = `tile-${name.replace(/\W+/g, "-").toLowerCase()}`;
  let box = get(id);
  if (!box) {
    box = element("div", { class: "tile", id }, element("dt", {}, name), element("dd", { class: "value" }, element("span"), element("small")), element("dd", { class: "more" }));
    get("tiles").append(box);
  }
  const [main, small] = box.querySelector(".value").children;
  setText(main, value);
  setText(small, unit);
  setText(box.querySelector(".more"), more);
}

// --- status and key

function showStatus(kind, text) {
  const status = get("status");
  const words = { live: "Live", wait: text, bad: text, key: "A key is needed" }[kind];
  const server = feed.document.value("status");
  const isEnding = kind === "live" && server !== undefined && server !== "running";
  setText(get("status-text"), isEnding ? `The server is ${server}` : words);
  status.className = `status ${isEnding ? "bad" : kind === "key" ? "" : kind}`;
  const hasData = feed.document.sections.has("values");
  document.body.classList.toggle("waiting", kind !== "live" || !hasData);
  if (kind === "key") askForKey(text);
  if (kind === "live") {
    get("key-form").hidden = true;
    get("panels").hidden = false;
    get("forget").hidden = feed.key === null;
  }
}

function askForKey(problem) {
  get("panels").hidden = true;
  get("key-form").hidden = false;
  get("forget").hidden = true;
  setText(get("key-problem"), problem);
  get("key").focus();
}

get("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = get("key").value.trim();
  // A header carries nothing else, and fetch would refuse it with a riddle.
  if (!/^[\x21-\x7e]+$/.test(key)) {
    setText(get("key-problem"), "A key has letters, digits and signs only, and no spaces.");
    return;
  }
  feed.key = key;
  stored.set("sessionStorage", KEY, key);
  get("key").value = "";
  feed.start();
});

get("forget").addEventListener("click", () => {
  stored.set("sessionStorage", KEY, null);
  // With the page everything goes that it showed of the key's prompts.
  location.reload();
});

// --- pause, and rest while nobody looks

function run() {
  if (isPaused || document.hidden) return;
  feed.start();
}

get("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  get("pause").setAttribute("aria-pressed", String(isPaused));
  if (isPaused) {
    feed.stop();
    showStatus("wait", "Paused");
    document.body.classList.remove("waiting");
  } else run();
});

let hiding;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => feed.stop(), HIDDEN_MS);
  else {
    run();
    schedule();
  }
});

// --- colours

function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  blockMap.redraw();
}

get("theme").addEventListener("change", (event) => {
  stored.set("localStorage", THEME, event.target.value);
  applyTheme(event.target.value);
});
const theme = stored.get("localStorage", THEME);
const choice = document.querySelector(`#theme input[value="${["light", "dark"].includes(theme) ? theme : "auto"}"]`);
choice.checked = true;
applyTheme(choice.value);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => blockMap.redraw());

run();

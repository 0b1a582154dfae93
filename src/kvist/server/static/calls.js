// The last requests, reused and computed parts; and why a chosen one was not all hits.

import { element, facts, onResize, setAttribute, setText, shape, table, tableWhenOpen } from "./dom.js";
import { ago, count, percent, plural, seconds, short, timeOfDay } from "./format.js";

const LEFT = 44;
const RIGHT = 4;
const TOP = 8;
const BOTTOM = 20;
const MIN_PITCH = 6;
const MAX_PITCH = 22;

/** Reasons in words, with what they mean; docs/explain.md has more. */
export const REASONS = new Map([
  ["new_prompt", ["new prompt", "Nothing earlier goes on past this point."]],
  ["tokens_differ", ["tokens differ", "An earlier prompt is the same up to here and another from here on."]],
  ["evicted", ["evicted", "It was cached and went, because memory was needed."]],
  ["expired", ["expired", "It was cached, and the time it was to be kept for was over."]],
  ["namespace_differs", ["other namespace", "The first prompt of this key, or of another layout."]],
  ["model_changed", ["model changed", "The same prompt is cached for other weights."]],
  ["below_block_size", ["below block size", "Less than a block matched, and no block was free for a copy, or its codec allows none."]],
  ["verification_failed", ["verification failed", "A block did not hold what it should, and was not used."]],
  ["not_yet_computed", ["not yet computed", "A request that was running had the same tokens and had not computed them yet."]],
  ["cache_off", ["cache off", "The server runs without its prefix cache."]],
]);
const reasonText = (reason) => REASONS.get(reason)?.[0] ?? reason;

/** A round number, about a quarter of `most`, for the lines of the axis. */
function roundStep(most) {
  const raw = most / 4;
  const power = 10 ** Math.floor(Math.log10(Math.max(1, raw)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= raw);
}

export class CallChart {
  constructor(panel, feed) {
    this.feed = feed;
    this.place = panel.querySelector(".chart");
    this.chosenPlace = panel.querySelector(".chosen");
    this.calls = [];
    this.chosen = null;
    this.svg = shape("svg", { role: "img", tabindex: "0" });
    this.grid = shape("path", { class: "grid" });
    this.labels = shape("g", { "aria-hidden": "true" });
    this.picked = shape("rect", { class: "picked", rx: "3" });
    this.computed = shape("path", { class: "computed" });
    this.reused = shape("path", { class: "reused" });
    this.svg.append(this.grid, this.labels, this.picked, this.computed, this.reused);
    this.empty = element("p", { class: "empty" }, "No requests of this key yet. Each one becomes a column here.");
    this.place.append(this.svg, this.empty);
    this.fillTable = tableWhenOpen(panel, () => this.table());
    onResize(this.place, () => this.draw());
    this.svg.addEventListener("click", (event) => this.choose(this.at(event.offsetX)));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  update(document) {
    this.now = document.value("now_s");
    if (document.changed.has("calls") || !this.calls.length) {
      this.calls = [...document.section("calls")].map(([id, call]) => ({ id, ...call })).sort((a, b) => a.at_s - b.at_s);
      if (!this.calls.some(({ id }) => id === this.chosen)) this.choose(null);
      this.fillTable();
    }
    this.draw();
  }

  draw() {
    const [width, height] = [this.place.clientWidth, this.place.clientHeight];
    if (!width) return;
    const room = width - LEFT - RIGHT;
    this.shown = this.calls.slice(-Math.floor(room / MIN_PITCH));
    this.empty.hidden = this.shown.length > 0;
    const pitch = Math.min(MAX_PITCH, room / Math.max(1, this.shown.length));
    const most = Math.max(1, ...this.shown.map((call) => call.reused + call.computed));
    const step = roundStep(most);
    const top = Math.ceil(most / step) * step;
    const y = (tokens) => TOP + (1 - tokens / top) * (height - TOP - BOTTOM);
    this.first = width - RIGHT - pitch * this.shown.length;
    this.pitch = pitch;
    const inner = Math.max(2, pitch - (pitch > 8 ? 3 : 1.5));
    const columns = (from, to) => this.shown.map((call, index) => {
      const [low, high] = [y(from(call)), y(to(call))];
      return high < low ? `M${(this.first + index * pitch).toFixed(1)} ${low.toFixed(1)}v${(high - low).toFixed(1)}h${inner.toFixed(1)}V${low.toFixed(1)}z` : "";
    }).join("");
    setAttribute(this.reused, "d", columns(() => 0, (call) => call.reused));
    setAttribute(this.computed, "d", columns((call) => call.reused, (call) => call.reused + call.computed));
    this.drawAxes(width, height, y, step, top);
    this.drawPicked(inner, height);
    this.describe();
  }

  drawAxes(width, height, y, step, top) {
    const texts = [];
    const lines = [];
    for (let tokens = 0; tokens <= top && this.shown.length; tokens += step) {
      lines.push(`M${LEFT} ${Math.round(y(tokens))}H${width - RIGHT}`);
      texts.push([short(tokens), LEFT - 7, Math.round(y(tokens)) + 4, "end"]);
    }
    if (this.shown.length) {
      texts.push([timeOfDay(this.now - this.shown.at(-1).at_s), width - RIGHT, height - 4, "end"]);
      const first = Math.max(LEFT, this.first);
      if (this.shown.length > 1 && width - RIGHT - first > 150) texts.push([timeOfDay(this.now - this.shown[0].at_s), first, height - 4, "start"]);
    }
    setAttribute(this.grid, "d", lines.join(""));
    while (this.labels.childNodes.length > texts.length) this.labels.lastChild.remove();
    while (this.labels.childNodes.length < texts.length) this.labels.append(shape("text"));
    texts.forEach(([text, x, at, anchor], index) => {
      const label = this.labels.childNodes[index];
      setText(label, text);
      for (const [name, value] of [["x", x], ["y", at], ["text-anchor", anchor]]) setAttribute(label, name, String(value));
    });
  }

  drawPicked(inner, height) {
    const index = this.shown.findIndex(({ id }) => id === this.chosen);
    this.picked.style.display = index < 0 ? "none" : "";
    const box = { x: this.first + index * this.pitch - 2, y: TOP - 5, width: inner + 4, height: height - TOP - BOTTOM + 8 };
    for (const [name, value] of Object.entries(box)) this.picked.setAttribute(name, value);
  }

  describe() {
    const reused = this.shown.reduce((sum, call) => sum + call.reused, 0);
    const all = this.shown.reduce((sum, call) => sum + call.reused + call.computed, 0);
    const text = all ? `${plural(this.shown.length, "request")}, ${percent(reused / all)} of their prompt tokens reused` : "None yet";
    const chosen = this.shown.find(({ id }) => id === this.chosen);
    setAttribute(this.svg, "aria-label", `The last requests. ${text}. ${chosen ? this.line(chosen) : "Arrow keys choose one."}`);
  }

  at(x) {
    return this.shown[Math.floor((x - this.first) / this.pitch)]?.id ?? null;
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (!this.shown?.length || (step === undefined && event.key !== "Home" && event.key !== "End")) return;
    event.preventDefault();
    const index = this.shown.findIndex(({ id }) => id === this.chosen);
    const last = this.shown.length - 1;
    const next = event.key === "Home" ? 0 : event.key === "End" || index < 0 ? last : Math.min(last, Math.max(0, index + step));
    this.choose(this.shown[next].id);
  }

  line(call) {
    return `${plural(call.reused, "token")} reused, ${count(call.computed)} computed, first token after ${call.ttft_s === null ? "-" : seconds(call.ttft_s)}`;
  }

  choose(id) {
    this.chosen = id;
    const call = this.calls.find((other) => other.id === id);
    if (!call) {
      this.chosenPlace.replaceChildren();
      if (this.place.clientWidth && this.shown) this.draw();
      return;
    }
    const list = facts([
      ["finished", timeOfDay(this.now - call.at_s)],
      ["prompt", plural(call.reused + call.computed, "token")],
      ["reused", percent(call.reused / Math.max(1, call.reused + call.computed))],
      ["computed", plural(call.computed, "token")],
      ...(call.recomputed ? [["computed twice", plural(call.recomputed, "token")]] : []),
      ["output", plural(call.output, "token")],
      ["first token after", call.ttft_s === null ? "-" : seconds(call.ttft_s)],
      ["in all", seconds(call.elapsed_s)],
    ]);
    const parts = [list];
    if (call.miss) parts.push(this.missLine(call.miss));
    this.chosenPlace.replaceChildren(...parts);
    if (call.miss) this.explain(call);
    this.draw();
  }

  missLine(miss) {
    const [name, meaning] = REASONS.get(miss.reason) ?? [miss.reason, ""];
    const where = miss.part ? ` in ${miss.part}` : "";
    return element("p", {}, `Not reused: ${plural(miss.tokens_lost, "token")} from position ${count(miss.position)}${where}: ${name}. `, element("span", { class: "note" }, meaning));
  }

  /** Show the texts on both sides of a difference; asked for one call at a time, with the key that owns it. */
  async explain(call) {
    let told;
    try {
      const url = new URL(`v1/cache/explain/${encodeURIComponent(call.id)}`, document.baseURI);
      const response = await fetch(url, { headers: this.feed.headers(), credentials: "omit", cache: "no-store" });
      if (!response.ok) return;
      told = (await response.json()).miss;
    } catch {
      return;
    }
    if (this.chosen !== call.id || told?.received == null) return;
    const side = (name, text) => element("div", {}, element("b", {}, name), element("span", { class: "mono" }, told.before ?? "", element("mark", {}, text ?? "")));
    this.chosenPlace.append(element("div", { class: "sides" }, side("expected", told.expected), side("received", told.received)));
  }

  table() {
    const rows = this.calls.slice(-50).reverse().map((call) => [
      timeOfDay(this.now - call.at_s), count(call.reused + call.computed), percent(call.reused / Math.max(1, call.reused + call.computed)),
      count(call.output), call.ttft_s === null ? "-" : seconds(call.ttft_s), seconds(call.elapsed_s),
      call.miss ? `${reasonText(call.miss.reason)}${call.miss.part ? `, ${call.miss.part}` : ""}` : "none", call.id,
    ]);
    const numbers = ["prompt tokens", "reused", "output tokens", "first token", "in all"].map((name) => ({ name, isNumber: true }));
    return table("The last requests", [{ name: "finished" }, ...numbers, { name: "miss" }, { name: "id" }], rows);
  }
}

export class MissPanel {
  constructor(panel) {
    this.body = panel.querySelector(".body");
    this.told = "";
  }

  update(spans) {
    const sums = new Map();
    for (const { missed } of spans) for (const [reason, tokens] of Object.entries(missed)) sums.set(reason, (sums.get(reason) ?? 0) + tokens);
    const rows = [...sums].filter(([, tokens]) => tokens > 0).sort((a, b) => b[1] - a[1]);
    const told = JSON.stringify(rows);
    if (told === this.told) return;
    this.told = told;
    if (!rows.length) {
      this.body.replaceChildren(element("p", { class: "empty" }, spans.length ? "Nothing was missed." : "No requests in the last 15 minutes."));
      return;
    }
    const sum = rows.reduce((total, [, tokens]) => total + tokens, 0);
    this.body.replaceChildren(element("ul", { class: "bars" }, ...rows.map(([reason, tokens]) => {
      const [name, meaning] = REASONS.get(reason) ?? [reason, ""];
      const fill = element("div", { class: "fill" });
      fill.style.width = `${Math.max(0.6, (tokens / rows[0][1]) * 100)}%`;
      return element("li", {},
        element("div", { class: "what" }, element("span", {}, name), element("span", { class: "number" }, `${short(tokens)} tokens, ${percent(tokens / sum)}`)),
        element("div", { class: "track", "aria-hidden": "true" }, fill),
        element("div", { class: "why" }, meaning));
    })));
  }
}

export class BreakerPanel {
  constructor(panel) {
    this.panel = panel;
    this.body = panel.querySelector(".body");
  }

  update(breakers) {
    this.panel.hidden = breakers === undefined;
    if (breakers === undefined) return;
    const told = JSON.stringify(breakers);
    if (told === this.told) return;
    this.told = told;
    if (!breakers.length) {
      this.body.replaceChildren(element("p", { class: "empty" }, "None found."));
      return;
    }
    const columns = [{ name: "part" }, { name: "kind" }, { name: "example", isText: true }, { name: "cost", isNumber: true }];
    const rows = breakers.map(({ part, kind, example, tokens_per_hour }) => [part, kind, example, `${short(tokens_per_hour)} tokens/h`]);
    this.body.replaceChildren(element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Top prefix breakers" }, table("Top prefix breakers", columns, rows)));
  }
}

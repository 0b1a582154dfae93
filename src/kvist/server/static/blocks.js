// The block map and the memory it stands for.

import { element, onResize, setAttribute, setText, table } from "./dom.js";
import { bytes, count, percent, plural } from "./format.js";

/** What the server calls a state, in words; in the order in which a cell is filled from the bottom. */
const WORDS = new Map([
  ["pinned", "pinned"],
  ["held", "in use by requests"],
  ["reused", "cached, reused before"],
  ["cached", "cached, not reused yet"],
  ["free", "free"],
]);
const MAX_HEIGHT = 280;

export class BlockMap {
  constructor(panel) {
    this.panel = panel;
    this.note = panel.querySelector("#blocks-note");
    this.legend = panel.querySelector(".legend");
    this.canvas = panel.querySelector("canvas");
    this.readout = panel.querySelector(".readout");
    this.place = panel.querySelector(".map");
    this.cells = new Map();
    this.drawn = new Map();
    this.by = "state";
    this.chosen = null;
    this.width = 0;
    onResize(this.place, (width) => {
      // Painting sets the height, which is no news.
      if (width === this.width) return;
      this.width = width;
      this.redraw();
    });
    panel.querySelector("#blocks-by").addEventListener("change", (event) => {
      this.by = event.target.value;
      this.redraw();
    });
    this.canvas.addEventListener("pointermove", (event) => this.choose(this.at(event.offsetX, event.offsetY)));
    this.canvas.addEventListener("pointerleave", () => this.choose(null));
    this.canvas.addEventListener("blur", () => this.choose(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  update(document) {
    this.cells = document.section("cells");
    this.states = document.value("block_states");
    this.tiers = document.value("tiers") ?? [];
    this.numBlocks = this.tiers.reduce((sum, tier) => sum + tier.num_blocks, 0);
    const perCell = this.cells.size ? this.numBlocks / this.cells.size : 0;
    const each = perCell <= 1 ? "A cell is one block" : `A cell is ${perCell % 1 ? `about ${Math.round(perCell)}` : count(perCell)} blocks, filled by what they are`;
    setText(this.note, this.cells.size ? `${count(this.numBlocks)} blocks of ${plural(document.value("block_size"), "token")}. ${each}.` : "Waiting for the first look at the cache.");
    if (this.width) this.paint();
    this.tell();
  }

  redraw() {
    this.drawn.clear();
    this.colours = null;
    if (this.states && this.width) this.paint();
  }

  /** Names and classes of what is told apart, in the order in which a cell is filled. */
  kinds() {
    if (this.by === "state") return [...WORDS].map(([name, text]) => ({ text, style: name }));
    const names = [...new Set(this.tiers.map((tier) => (this.by === "codec" ? tier.codec : tier.name)))];
    return [...names.map((text, index) => ({ text, style: `kind${index % 4}` })), { text: "free", style: "free" }];
  }

  /** The parts of a cell, in the order of kinds(). */
  parts(index, counts) {
    if (this.by === "state") return [...WORDS.keys()].map((name) => counts[this.states.indexOf(name)]);
    const free = counts[this.states.indexOf("free")];
    const used = counts.reduce((sum, value) => sum + value, 0) - free;
    const names = [...new Set(this.tiers.map((tier) => (this.by === "codec" ? tier.codec : tier.name)))];
    const tier = this.tierOf(index);
    const own = this.by === "codec" ? tier.codec : tier.name;
    return [...names.map((name) => (name === own ? used : 0)), free];
  }

  /** The arena that a cell belongs to: they follow one another in the order of block ids. */
  tierOf(index) {
    let first = 0;
    for (const tier of this.tiers) {
      first += (tier.num_blocks / this.numBlocks) * this.cells.size;
      if (index < first) return tier;
    }
    return this.tiers.at(-1);
  }

  layout() {
    const number = Math.max(1, this.cells.size);
    let size = Math.floor(Math.sqrt((this.width * MAX_HEIGHT) / number));
    size = Math.max(4, Math.min(18, size));
    const columns = Math.max(1, Math.floor(this.width / size));
    return { size, columns, rows: Math.ceil(number / columns) };
  }

  paint() {
    const { size, columns, rows } = this.layout();
    const scale = window.devicePixelRatio || 1;
    const [wide, high] = [Math.round(this.width * scale), Math.round(rows * size * scale)];
    if (this.canvas.width !== wide || this.canvas.height !== high || this.columns !== columns) {
      Object.assign(this.canvas, { width: wide, height: high });
      this.canvas.style.height = `${rows * size}px`;
      this.drawn.clear();
      this.columns = columns;
    }
    if (!this.colours) this.colours = this.drawLegend();
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    for (const [key, counts] of this.cells) {
      // Changed cells arrive as new lists, so that those which are the same need not be compared.
      if (this.drawn.get(key) === counts) continue;
      this.drawn.set(key, counts);
      this.paintCell(context, Number(key), counts, size);
    }
  }

  paintCell(context, index, counts, size) {
    const inner = size - (size > 5 ? 2 : 1);
    const x = (index % this.columns) * size;
    const top = Math.floor(index / this.columns) * size;
    const parts = this.parts(index, counts);
    const sum = parts.reduce((total, value) => total + value, 0) || 1;
    let y = top + inner;
    context.clearRect(x, top, size, size);
    parts.forEach((value, kind) => {
      const tall = (value / sum) * inner;
      context.fillStyle = this.colours[kind];
      context.fillRect(x, y - tall, inner, tall);
      y -= tall;
    });
  }

  drawLegend() {
    const entries = this.kinds().map(({ text, style }) => element("li", {}, element("i", { class: style }), text));
    this.legend.replaceChildren(...entries);
    return entries.map((entry) => getComputedStyle(entry.firstChild).color);
  }

  at(x, y) {
    const { size, columns } = this.layout();
    const column = Math.floor(x / size);
    const index = Math.floor(y / size) * columns + column;
    return column < columns && this.cells.has(String(index)) ? index : null;
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (step === undefined || !this.cells.size) return;
    event.preventDefault();
    const next = this.chosen === null ? 0 : this.chosen + step;
    if (this.cells.has(String(next))) this.choose(next);
  }

  choose(index) {
    this.chosen = index;
    this.tell();
  }

  tell() {
    const counts = this.chosen === null ? undefined : this.cells.get(String(this.chosen));
    setText(this.readout, counts ? this.tellCell(this.chosen, counts) : this.cells.size ? "Point at a cell, or use the arrow keys." : "");
    const all = [...WORDS].map(([name, text]) => `${text}: ${count(this.totals()[this.states.indexOf(name)])}`);
    setAttribute(this.canvas, "aria-label", `Block map. ${counts ? this.readout.textContent : `Blocks ${all.join(", ")}`}. The table under Memory by tier has the same in numbers.`);
  }

  tellCell(index, counts) {
    const first = Math.ceil((index * this.numBlocks) / this.cells.size);
    const last = Math.ceil(((index + 1) * this.numBlocks) / this.cells.size) - 1;
    const parts = [...WORDS].filter(([name]) => counts[this.states.indexOf(name)]).map(([name, text]) => (first === last ? text : `${counts[this.states.indexOf(name)]} ${text}`));
    const tier = this.tierOf(index);
    return `${first === last ? `Block ${count(first)}` : `Blocks ${count(first)} to ${count(last)}`}: ${parts.join(", ")} (${tier.codec}, ${tier.name})`;
  }

  totals() {
    const sums = this.states.map(() => 0);
    for (const counts of this.cells.values()) counts.forEach((value, index) => (sums[index] += value));
    return sums;
  }
}

export class MemoryPanel {
  constructor(panel) {
    this.body = panel.querySelector(".body");
  }

  update(document) {
    const blocks = document.value("blocks");
    if (!blocks) {
      this.body.replaceChildren(element("p", { class: "empty" }, "Waiting for the first look at the cache."));
      return;
    }
    const states = document.value("block_states");
    const tiers = document.value("tiers");
    // One arena today: the counts of all blocks are its own.
    this.body.replaceChildren(...tiers.map((tier) => this.tier(tier, states, blocks)));
  }

  tier(tier, states, blocks) {
    const isMixed = Object.keys(tier.codecs).length > 1;
    const head = element("h3", {}, `${tier.name}, ${tier.codec}`, element("span", {}, `${bytes(tier.used_bytes)} of ${bytes(tier.num_bytes)} used${isMixed ? `, ${tier.compression} times what 16 bits would hold` : ""}`));
    return element("div", { class: "tier" }, head, ...(isMixed ? [...this.byCodec(tier), this.numbers(tier, states, blocks)] : this.byState(tier, states, blocks)));
  }

  /** Where blocks have several codecs, their number says little of the memory that they take. */
  byCodec(tier) {
    const bar = element("div", { class: "stack", "aria-hidden": "true" });
    const rows = Object.entries(tier.codecs).map(([codec, [number, size]], index) => {
      const part = element("i", { class: `kind${index % 4}` });
      part.style.width = `${(size / tier.num_bytes) * 100}%`;
      bar.append(part);
      const cell = document.createDocumentFragment();
      cell.append(element("span", { class: `swatch kind${index % 4}` }), element("span", {}, codec));
      return [cell, count(number), bytes(size), percent(size / tier.num_bytes)];
    });
    const columns = [{ name: "codec" }, ...["number", "memory", "share"].map((name) => ({ name, isNumber: true }))];
    return [bar, table(`Codecs in ${tier.name}`, columns, rows)];
  }

  numbers(tier, states, blocks) {
    const rows = [...WORDS].filter(([name]) => name !== "free").map(([name, text]) => [text, count(blocks[states.indexOf(name)])]);
    return table(`Blocks in ${tier.name}`, [{ name: "state" }, { name: "number", isNumber: true }], rows);
  }

  byState(tier, states, blocks) {
    const bar = element("div", { class: "stack", "aria-hidden": "true" });
    const rows = [];
    for (const [name, text] of WORDS) {
      const number = blocks[states.indexOf(name)];
      if (name !== "free" && number) {
        const part = element("i", { class: name });
        part.style.width = `${(number / tier.num_blocks) * 100}%`;
        bar.append(part);
      }
      const label = element("span", {}, text);
      const cell = document.createDocumentFragment();
      cell.append(element("span", { class: `swatch ${name}` }), label);
      rows.push([cell, count(number), bytes(number * tier.block_bytes), percent(number / tier.num_blocks)]);
    }
    const columns = [{ name: "state" }, ...["number", "memory", "share"].map((name) => ({ name, isNumber: true }))];
    return [bar, table(`Blocks in ${tier.name}`, columns, rows)];
  }
}

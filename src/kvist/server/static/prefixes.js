// The prefix tree as an icicle: what follows a prefix stands below it, as wide as the tokens cached from there on.

import { element, facts, onResize, setAttribute, setText, table, tableWhenOpen } from "./dom.js";
import { ago, count, percent, plural, short } from "./format.js";

const MAX_ROWS = 9;
const MIN_WIDTH = 6;
const ALL = "all";

export class PrefixTree {
  constructor(panel) {
    this.panel = panel;
    this.place = panel.querySelector(".icicle");
    this.chosenPlace = panel.querySelector(".chosen");
    this.crumbs = panel.querySelector(".crumbs");
    this.empty = element("p", { class: "empty" });
    this.place.append(this.empty);
    this.nodes = new Map();
    this.children = new Map();
    this.bars = new Map();
    this.root = ALL;
    this.chosen = null;
    this.focused = ALL;
    this.fillTable = tableWhenOpen(panel, () => this.table());
    let last = 0;
    onResize(this.place, (width) => {
      // Drawing sets the height, which is no news.
      if (width !== last) this.draw();
      last = width;
    });
    this.place.addEventListener("click", (event) => this.click(event));
    this.place.addEventListener("keydown", (event) => this.key(event));
    this.crumbs.querySelector("button").addEventListener("click", () => this.zoom(ALL));
  }

  update(document) {
    this.now = document.value("now_s");
    this.isPrivate = document.value("is_private");
    this.blockSize = document.value("block_size");
    this.total = document.value("num_cached_tokens") ?? 0;
    this.others = document.value("num_others_tokens") ?? 0;
    this.numPrefixes = document.value("num_prefixes") ?? 0;
    if (document.changed.has("prefixes") || !this.nodes.size) {
      this.nodes = document.section("prefixes");
      this.children = new Map();
      // By number, which is the order in which they came: bars keep their places while their sizes change.
      for (const key of [...this.nodes.keys()].sort((a, b) => a - b)) {
        const parent = this.nodes.get(key).parent ?? ALL;
        if (!this.children.has(parent)) this.children.set(parent, []);
        this.children.get(parent).push(key);
      }
      if (!this.nodes.has(this.root)) this.root = ALL;
      if (!this.nodes.has(this.chosen)) this.chosen = null;
      this.draw();
    }
    setText(this.empty, document.value("blocks") ? "Nothing of this key is cached yet." : "Waiting for the first look at the cache.");
    this.tellChosen();
    this.fillTable();
  }

  below(key) {
    if (key !== ALL) return this.nodes.get(key).below;
    return this.total;
  }

  draw() {
    const width = this.place.clientWidth;
    if (!width) return;
    this.rowHeight = matchMedia("(max-width: 620px)").matches ? 33 : 29;
    this.empty.hidden = this.nodes.size > 0;
    this.crumbs.hidden = this.root === ALL;
    const wanted = new Map();
    if (this.nodes.size) this.lay(this.root, 0, width, 0, wanted);
    for (const [key, bar] of this.bars) {
      if (wanted.has(key)) continue;
      if (bar === document.activeElement) this.place.querySelector("[role=treeitem]")?.focus();
      bar.remove();
      this.bars.delete(key);
    }
    for (const [key, box] of wanted) this.bar(key, box);
    const rows = Math.max(0, ...[...wanted.values()].map((box) => box.row)) + 1;
    this.place.style.height = this.nodes.size ? `${rows * this.rowHeight}px` : "";
    this.setTabStop();
  }

  /** Note the boxes of a prefix and of what follows it. */
  lay(key, left, width, row, wanted) {
    wanted.set(key, { left, width, row });
    const children = this.children.get(key) ?? [];
    if (row + 1 >= MAX_ROWS || !children.length) return;
    const scale = width / this.below(key);
    let x = left;
    let hidden = key === ALL ? 0 : this.nodes.get(key).rest;
    for (const child of children) {
      const wide = this.below(child) * scale;
      if (wide < MIN_WIDTH) {
        hidden += this.below(child);
        continue;
      }
      this.lay(child, x, wide, row + 1, wanted);
      x += wide;
    }
    if (key === ALL) hidden = this.total - children.filter((child) => wanted.has(child)).reduce((sum, child) => sum + this.below(child), 0);
    if (hidden * scale >= MIN_WIDTH) wanted.set(`${key} rest`, { left: x, width: hidden * scale, row: row + 1, hidden });
  }

  bar(key, { left, width, row, hidden }) {
    let bar = this.bars.get(key);
    if (!bar) {
      bar = element("div", hidden === undefined ? { role: "treeitem", tabindex: "-1" } : { "aria-hidden": "true" });
      bar.dataset.key = key;
      this.bars.set(key, bar);
      this.place.append(bar);
    }
    bar.style.transform = `translate(${left.toFixed(1)}px, ${row * this.rowHeight}px)`;
    bar.style.width = `${Math.max(1, width - 1.5).toFixed(1)}px`;
    const thin = width < 44 ? " thin" : "";
    if (hidden !== undefined) {
      setAttribute(bar, "class", `node rest${thin}`);
      setText(bar, width < 90 ? "" : `smaller: ${short(hidden)}`);
      setAttribute(bar, "title", `Smaller prefixes: ${plural(hidden, "token")}`);
      return;
    }
    if (key === ALL) {
      setAttribute(bar, "class", "node all");
      const others = this.isPrivate && this.others ? `; other keys have ${short(this.others)}` : "";
      setText(bar, `All prompts of this ${this.isPrivate ? "key" : "server"}: ${short(this.total)} tokens${others}`);
    } else {
      const node = this.nodes.get(key);
      setAttribute(bar, "class", `node h${heat(node.hits)}${thin}`);
      setText(bar, thin ? "" : oneLine(node));
      setAttribute(bar, "aria-label", `${oneLine(node)}: ${plural(node.below, "token")}, reused ${plural(node.hits, "time")}`);
    }
    setAttribute(bar, "aria-level", String(row + 1));
    setAttribute(bar, "aria-selected", String(key === this.chosen));
  }

  setTabStop() {
    if (!this.bars.has(this.focused)) this.focused = this.root;
    for (const [key, bar] of this.bars) {
      if (bar.getAttribute("role") === "treeitem") setAttribute(bar, "tabindex", key === this.focused ? "0" : "-1");
    }
  }

  focus(key) {
    if (key === undefined || !this.bars.has(key)) return;
    this.focused = key;
    this.setTabStop();
    this.bars.get(key).focus({ preventScroll: true });
    this.bars.get(key).scrollIntoView({ block: "nearest" });
    this.choose(key);
  }

  choose(key) {
    this.chosen = key === ALL ? null : key;
    for (const [other, bar] of this.bars) {
      if (bar.getAttribute("role") === "treeitem") setAttribute(bar, "aria-selected", String(other === this.chosen));
    }
    this.tellChosen();
  }

  zoom(key) {
    this.root = key;
    this.focused = key;
    this.draw();
    this.focus(key);
  }

  zoomOut() {
    if (this.root !== ALL) this.zoom(this.nodes.get(this.root).parent ?? ALL);
  }

  click(event) {
    const key = event.target.closest("[role=treeitem]")?.dataset.key;
    if (key === undefined) return;
    this.focus(key);
    if (key === ALL) this.zoom(ALL);
  }

  key(event) {
    const key = event.target.dataset.key;
    if (key === undefined) return;
    const parent = key === ALL ? undefined : this.nodes.get(key).parent ?? ALL;
    const shown = (list) => (list ?? []).filter((other) => this.bars.has(other));
    const siblings = parent === undefined ? [key] : shown(this.children.get(parent));
    const index = siblings.indexOf(key);
    const moves = {
      ArrowLeft: () => this.focus(siblings[index - 1]),
      ArrowRight: () => this.focus(siblings[index + 1]),
      ArrowDown: () => this.focus(shown(this.children.get(key))[0]),
      ArrowUp: () => key !== this.root && this.focus(parent),
      Home: () => this.focus(siblings[0]),
      End: () => this.focus(siblings.at(-1)),
      Enter: () => this.zoom(key),
      " ": () => this.choose(key),
      Escape: () => this.zoomOut(),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  tellChosen() {
    if (this.chosen === null) {
      if (this.chosenPlace.hasChildNodes()) this.chosenPlace.replaceChildren();
      this.told = null;
      return;
    }
    const node = this.nodes.get(this.chosen);
    // Read aloud when it changes, so only when it says something new.
    const told = JSON.stringify([this.chosen, node, Math.floor(this.now / 10)]);
    if (told === this.told) return;
    this.told = told;
    const held = node.holders ? plural(node.holders, "request") + " or pin" + (node.holders === 1 ? "" : "s") : "nobody";
    const list = facts([
      ["its own", `${plural(node.tokens, "token")} in ${plural(node.blocks, "block")}`],
      ["with all that follows", plural(node.below, "token")],
      ["reused", plural(node.hits, "time")],
      ["held by", held],
      ["owner", this.isPrivate ? "this API key" : "everybody (no keys)"],
      ["computed", ago(this.now - node.computed_s)],
      ["last used", ago(this.now - node.used_s)],
    ]);
    const parts = [element("blockquote", { class: "mono" }, (node.is_cut ? "…" : "") + (node.text || "(no text)") + "…"), list];
    if (this.children.has(this.chosen) && this.chosen !== this.root) {
      const button = element("button", { type: "button" }, "Show only what follows");
      const key = this.chosen;
      button.addEventListener("click", () => this.zoom(key));
      parts.push(button);
    }
    this.chosenPlace.replaceChildren(...parts);
  }

  table() {
    const depth = (key) => (this.nodes.get(key)?.parent ? 1 + depth(this.nodes.get(key).parent) : 0);
    const keys = [...this.nodes.keys()].sort((a, b) => this.nodes.get(b).below - this.nodes.get(a).below).slice(0, 100);
    const rows = keys.map((key) => {
      const node = this.nodes.get(key);
      return [String(depth(key) + 1), oneLine(node), count(node.below), percent(node.below / Math.max(1, this.total)), count(node.hits), ago(this.now - node.used_s)];
    });
    const columns = [{ name: "level" }, { name: "begins with", isText: true }, ...["tokens", "share", "reused", "last used"].map((name) => ({ name, isNumber: true }))];
    return table(`The largest ${rows.length} of ${this.numPrefixes} prefixes`, columns, rows);
  }
}

const heat = (hits) => (hits === 0 ? 0 : hits < 3 ? 1 : hits < 30 ? 2 : hits < 300 ? 3 : 4);
const oneLine = (node) => (node.is_cut ? "…" : "") + (node.text.replace(/\s+/g, " ").trim() || "(no text)");

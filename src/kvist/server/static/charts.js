// Curves over the last quarter of an hour: hit share, and times to first token.

import { element, onResize, setAttribute, setText, shape, table, tableWhenOpen } from "./dom.js";
import { ago, count, percent, seconds, timeOfDay } from "./format.js";

const WINDOWS_S = [180, 300, 600, 900];
const SMOOTH_S = 60;
const LEFT = 54;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;
const NO_CALLS = "No requests yet. They appear here within a second.";

/** The spans of the window, oldest first: {at, calls, reused, ...}. */
export function spansOf(document) {
  return [...document.section("spans")].map(([second, row]) => ({ at: Number(second), ...row })).sort((a, b) => a.at - b.at);
}

/** Sum of the spans that end after `from` and begin before `until`. */
function total(spans, from, until, of) {
  let sum = 0;
  for (const span of spans) if (span.at > from && span.at <= until) sum += of(span);
  return sum;
}

/** What both charts have: axes, a cursor that pointer and arrow keys move, an empty state, a table. */
class TimeChart {
  constructor(panel, describe) {
    this.panel = panel;
    this.describe = describe;
    this.spans = [];
    this.now = 0;
    this.window = WINDOWS_S[0];
    this.width = 0;
    this.cursorAt = null;
    this.place = panel.querySelector(".chart");
    this.readout = panel.querySelector(".readout");
    this.svg = shape("svg", { role: "img", tabindex: "0" });
    this.grid = shape("path", { class: "grid" });
    this.labels = shape("g", { "aria-hidden": "true" });
    this.marks = shape("g");
    this.cursor = shape("line", { class: "cursor" });
    this.svg.append(this.grid, this.labels, this.marks, this.cursor);
    this.empty = element("p", { class: "empty" }, NO_CALLS);
    this.place.append(this.svg, this.empty);
    this.fillTable = tableWhenOpen(panel, () => this.table());
    onResize(this.place, () => this.draw());
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.moveTo(null));
    this.svg.addEventListener("blur", () => this.moveTo(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  update(document) {
    this.now = document.value("now_s");
    this.length = document.value("span_s");
    this.spans = spansOf(document);
    // As little of the quarter of an hour as has anything in it.
    const age = this.spans.length ? this.now - this.spans[0].at : 0;
    this.window = WINDOWS_S.find((window) => age <= window) ?? WINDOWS_S.at(-1);
    this.draw();
    this.fillTable();
  }

  x(at) {
    return LEFT + (1 - (this.now - at) / this.window) * (this.width - LEFT - RIGHT);
  }

  y(fraction) {
    return TOP + (1 - fraction) * (this.height - TOP - BOTTOM);
  }

  point(x) {
    const at = this.now - (1 - (x - LEFT) / (this.width - LEFT - RIGHT)) * this.window;
    const near = this.shown().reduce((best, span) => (best === null || Math.abs(span.at - at) < Math.abs(best - at) ? span.at : best), null);
    this.moveTo(near);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const shown = this.shown();
    if (!shown.length || (step === undefined && event.key !== "Home" && event.key !== "End")) return;
    event.preventDefault();
    const index = shown.findIndex((span) => span.at === this.cursorAt);
    const last = shown.length - 1;
    const next = event.key === "Home" ? 0 : event.key === "End" || index < 0 ? last : Math.min(last, Math.max(0, index + step));
    this.moveTo(shown[next].at);
  }

  moveTo(at) {
    this.cursorAt = at;
    this.drawCursor();
  }

  /** The spans that a cursor may stand on. */
  shown() {
    return this.spans.filter((span) => this.now - span.at < this.window);
  }

  drawCursor() {
    const span = this.shown().find(({ at }) => at === this.cursorAt);
    this.cursor.style.display = span ? "" : "none";
    if (span) {
      const x = Math.round(this.x(span.at));
      for (const [name, value] of [["x1", x], ["x2", x], ["y1", TOP], ["y2", this.height - BOTTOM]]) this.cursor.setAttribute(name, value);
    }
    setText(this.readout, span ? `${timeOfDay(this.now - span.at)}: ${this.tell(span)}` : this.summary());
    setAttribute(this.svg, "aria-label", `${this.describe}. ${this.readout.textContent}`);
  }

  draw() {
    this.width = this.place.clientWidth;
    this.height = this.place.clientHeight;
    if (!this.width) return;
    this.empty.hidden = this.shown().length > 0;
    this.drawMarks();
    this.drawAxes();
    this.drawCursor();
  }

  drawAxes() {
    const lines = [];
    const texts = [];
    for (const { at, text } of this.ticks()) {
      const y = Math.round(this.y(at));
      lines.push(`M${LEFT} ${y}H${this.width - RIGHT}`);
      texts.push([text, LEFT - 7, y + 4, "end"]);
    }
    const oldest = this.window / 60;
    for (let minutes = 0; minutes <= oldest; minutes += oldest > 5 ? 5 : 1) {
      const x = Math.round(this.x(this.now - minutes * 60));
      texts.push([minutes ? `\u2212${minutes} min` : "now", x, this.height - 4, minutes === oldest ? "start" : minutes ? "middle" : "end"]);
    }
    setAttribute(this.grid, "d", lines.join(""));
    while (this.labels.childNodes.length > texts.length) this.labels.lastChild.remove();
    while (this.labels.childNodes.length < texts.length) this.labels.append(shape("text"));
    texts.forEach(([text, x, y, anchor], index) => {
      const label = this.labels.childNodes[index];
      setText(label, text);
      for (const [name, value] of [["x", x], ["y", y], ["text-anchor", anchor]]) setAttribute(label, name, String(value));
    });
  }

  /** A line through [x, y] points, broken where there is null. */
  line(points) {
    let command = "M";
    return points.map((point) => {
      if (point === null) {
        command = "M";
        return "";
      }
      const text = `${command}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
      command = "L";
      return text;
    }).join("");
  }
}

export class HitChart extends TimeChart {
  constructor(panel) {
    super(panel, "Hit share");
    this.volume = shape("path", { class: "volume" });
    this.area = shape("path", { class: "area" });
    this.curve = shape("path", { class: "line" });
    this.marks.append(this.volume, this.area, this.curve);
  }

  ticks() {
    return [0, 0.25, 0.5, 0.75, 1].map((at) => ({ at, text: `${at * 100} %` }));
  }

  share(at) {
    const reused = total(this.spans, at - SMOOTH_S, at, (span) => span.reused);
    const all = total(this.spans, at - SMOOTH_S, at, (span) => span.reused + span.computed);
    return all ? reused / all : null;
  }

  drawMarks() {
    const end = Math.floor(this.now / this.length) * this.length;
    const points = [];
    for (let at = end - this.window + this.length; at <= end; at += this.length) {
      const share = this.share(at);
      points.push(share === null ? null : [this.x(at), this.y(share)]);
    }
    setAttribute(this.curve, "d", this.line(points));
    const areas = [];
    let run = [];
    for (const point of [...points, null]) {
      if (point !== null) run.push(point);
      else if (run.length) {
        areas.push(`M${run[0][0].toFixed(1)} ${this.y(0)}` + this.line(run).replace("M", "L") + `L${run.at(-1)[0].toFixed(1)} ${this.y(0)}Z`);
        run = [];
      }
    }
    setAttribute(this.area, "d", areas.join(""));
    const most = Math.max(1, ...this.shown().map((span) => span.reused + span.computed));
    const wide = Math.max(1, ((this.width - LEFT - RIGHT) / this.window) * this.length - 1);
    setAttribute(this.volume, "d", this.shown().map((span) => {
      const tall = ((span.reused + span.computed) / most) * 0.3 * (this.height - TOP - BOTTOM);
      return `M${(this.x(span.at) - wide).toFixed(1)} ${this.y(0).toFixed(1)}v${-tall.toFixed(1)}h${wide.toFixed(1)}v${tall.toFixed(1)}z`;
    }).join(""));
  }

  tell(span) {
    const share = this.share(span.at);
    return `${share === null ? "-" : percent(share)} reused; ${count(span.reused + span.computed)} prompt tokens in ${this.length} s`;
  }

  summary() {
    const share = this.share(Math.floor(this.now / this.length) * this.length);
    return share === null ? "No request has finished in the last minute." : `${percent(share)} in the last minute`;
  }

  table() {
    const minutes = [];
    for (let age = 0; age < this.window; age += 60) {
      const until = this.now - age;
      const reused = total(this.spans, until - 60, until, (span) => span.reused);
      const computed = total(this.spans, until - 60, until, (span) => span.computed);
      const calls = total(this.spans, until - 60, until, (span) => span.calls);
      minutes.push([timeOfDay(age), count(calls), count(reused), count(computed), reused + computed ? percent(reused / (reused + computed)) : "-"]);
    }
    const columns = [{ name: "minute until" }, ...["requests", "reused tokens", "computed tokens", "hit share"].map((name) => ({ name, isNumber: true }))];
    return table("Hit share by minute", columns, minutes);
  }
}

export class TtftChart extends TimeChart {
  constructor(panel) {
    super(panel, "Time to first token");
    this.dots = {};
    this.curves = {};
    for (const kind of ["cold", "warm"]) {
      this.dots[kind] = shape("path", { class: `dots ${kind}` });
      this.curves[kind] = shape("path", { class: `line ${kind}` });
      this.marks.append(this.dots[kind], this.curves[kind]);
    }
  }

  drawMarks() {
    const values = this.shown().flatMap(({ cold, warm }) => [cold, warm].filter(Boolean).map(({ p50 }) => p50));
    const low = Math.max(1e-4, Math.min(...values, 0.1));
    const high = Math.max(...values, 0.2);
    // Whole decades, so that the scale rests while values move.
    this.low = Math.floor(Math.log10(low));
    this.high = Math.max(this.low + 1, Math.ceil(Math.log10(high)));
    for (const kind of ["cold", "warm"]) {
      const spans = this.shown().filter((span) => span[kind]);
      setAttribute(this.dots[kind], "d", spans.map((span) => {
        const [x, y] = [this.x(span.at).toFixed(1), this.level(span[kind].p50).toFixed(1)];
        return kind === "cold" ? `M${x - 2} ${y - 2}h4v4h-4z` : `M${x - 2.2} ${y}a2.2 2.2 0 1 0 4.4 0a2.2 2.2 0 1 0-4.4 0`;
      }).join(""));
      setAttribute(this.curves[kind], "d", this.line(this.smooth(kind)));
    }
  }

  /** Geometric means of the medians of a minute. */
  smooth(kind) {
    const end = Math.floor(this.now / this.length) * this.length;
    const points = [];
    for (let at = end - this.window + this.length; at <= end; at += this.length) {
      const weight = total(this.spans, at - SMOOTH_S, at, (span) => span[kind]?.n ?? 0);
      const sum = total(this.spans, at - SMOOTH_S, at, (span) => (span[kind] ? span[kind].n * Math.log(Math.max(1e-4, span[kind].p50)) : 0));
      points.push(weight ? [this.x(at), this.level(Math.exp(sum / weight))] : null);
    }
    return points;
  }

  level(value) {
    return this.y((Math.log10(Math.max(1e-4, value)) - this.low) / (this.high - this.low));
  }

  ticks() {
    const ticks = [];
    for (let power = this.low; power <= this.high; power++) {
      const text = power < 0 ? `${10 ** (power + 3)} ms` : `${10 ** power} s`;
      ticks.push({ at: (power - this.low) / (this.high - this.low), text });
    }
    return ticks;
  }

  tell(span) {
    const part = (kind) => (span[kind] ? `${kind} ${seconds(span[kind].p50)} (${count(span[kind].n)})` : `${kind} -`);
    return `${part("cold")}, ${part("warm")}`;
  }

  summary() {
    const { cold, warm } = medians(this.shown());
    if (cold === null && warm === null) return "";
    const ratio = cold !== null && warm !== null ? `; warm is ${(cold / warm).toFixed(cold / warm < 9.95 ? 1 : 0)} times as fast` : "";
    return `Cold ${cold === null ? "-" : seconds(cold)}, warm ${warm === null ? "-" : seconds(warm)}${ratio}`;
  }

  table() {
    const rows = this.shown().reverse().map((span) => {
      const cells = (spread) => (spread ? [count(spread.n), seconds(spread.p50), seconds(spread.p90)] : ["-", "-", "-"]);
      return [ago(this.now - span.at), ...cells(span.cold), ...cells(span.warm)];
    });
    const columns = [{ name: "when" }, ...["cold", "median", "90 % below", "warm", "median", "90 % below"].map((name) => ({ name, isNumber: true }))];
    return table("Time to first token in spans of five seconds", columns, rows);
  }
}

/** Weighted medians of the spans' medians, in seconds; null where there is none. */
export function medians(spans) {
  const median = (kind) => {
    const all = spans.filter((span) => span[kind]).map((span) => span[kind]).sort((a, b) => a.p50 - b.p50);
    let left = all.reduce((sum, { n }) => sum + n, 0) / 2;
    for (const { n, p50 } of all) if ((left -= n) <= 0) return p50;
    return null;
  };
  return { cold: median("cold"), warm: median("warm") };
}

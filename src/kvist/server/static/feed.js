// The stream of /v1/cache/watch, and the document it keeps up to date.
//
// fetch and not EventSource: that cannot send a key, other than in the address, where logs would keep it.

const WATCH = new URL("v1/cache/watch", document.baseURI);
const RETRY_MS = [500, 1000, 2000, 5000, 10000];
const SILENCE_MS = 5000;
const MAX_EVENT = 32 * 2 ** 20;

/** A document: a Map of entries for each section. */
export class Document {
  constructor() {
    this.sections = new Map();
    /** The sections that the last event changed. */
    this.changed = new Set();
  }

  section(name) {
    if (!this.sections.has(name)) this.sections.set(name, new Map());
    return this.sections.get(name);
  }

  value(name) {
    return this.section("values").get(name);
  }

  apply(kind, data) {
    if (kind === "full") {
      this.changed = new Set([...this.sections.keys(), ...Object.keys(data)]);
      this.sections = new Map(Object.entries(data).map(([name, entries]) => [name, new Map(Object.entries(entries))]));
      return;
    }
    this.changed = new Set(Object.keys(data));
    for (const [name, { set, drop }] of Object.entries(data)) {
      const section = this.section(name);
      for (const key of drop) section.delete(key);
      for (const [key, value] of Object.entries(set)) section.set(key, value);
    }
  }
}

/** Split what arrives into events: {kind, data}. */
export class EventParser {
  constructor() {
    this.rest = "";
  }

  push(text) {
    const parts = (this.rest + text).split("\n\n");
    this.rest = parts.pop();
    if (this.rest.length > MAX_EVENT) throw new Error("an event is too long");
    return parts.map((part) => {
      const event = { kind: "message", data: null };
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) event.kind = line.slice(7);
        if (line.startsWith("data: ")) event.data = JSON.parse(line.slice(6));
      }
      return event;
    });
  }
}

/** Keeps a document up to date until it is stopped; reconnects by itself. */
export class Feed {
  /** `onChange(document)` after each event, `onStatus(kind, text)` with kind live, wait, bad or key. */
  constructor({ onChange, onStatus }) {
    this.document = new Document();
    this.onChange = onChange;
    this.onStatus = onStatus;
    this.key = null;
    this.controller = null;
    this.numFailures = 0;
  }

  start() {
    if (this.controller === null) this.#run((this.controller = new AbortController()));
  }

  stop() {
    this.controller?.abort();
    this.controller = null;
  }

  headers() {
    return this.key === null ? {} : { Authorization: `Bearer ${this.key}` };
  }

  async #run(controller) {
    const { signal } = controller;
    while (!signal.aborted) {
      let problem;
      try {
        problem = await this.#read(signal);
      } catch {
        problem = "The server cannot be reached";
      }
      if (signal.aborted) return;
      if (problem === null) {
        this.controller = null;
        return;
      }
      const delay = RETRY_MS[Math.min(this.numFailures++, RETRY_MS.length - 1)];
      this.onStatus("bad", `${problem}; trying again`);
      await new Promise((resolve) => setTimeout(resolve, delay));
    }
  }

  /** Return what ended the stream; null: a key is needed, so there is no use in trying again. */
  async #read(signal) {
    // A connection that is silent has failed; aborting it is the only way to find out.
    const silence = new AbortController();
    let timer = setTimeout(() => silence.abort(), 2 * SILENCE_MS);
    try {
      const both = AbortSignal.any([signal, silence.signal]);
      const response = await fetch(WATCH, { headers: this.headers(), signal: both, cache: "no-store", credentials: "omit" });
      if (response.status === 401) {
        this.onStatus("key", this.key === null ? "" : "This server does not accept that key.");
        return null;
      }
      if (!response.ok) return `The server answers ${response.status}`;
      const parser = new EventParser();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return "The connection has ended";
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENCE_MS);
        for (const { kind, data } of parser.push(value)) {
          if (kind === "end") return data.error?.message ?? "The server has stopped";
          if (kind !== "full" && kind !== "delta") continue;
          this.numFailures = 0;
          this.document.apply(kind, data);
          this.onStatus("live", "");
          this.onChange(this.document);
        }
      }
    } finally {
      clearTimeout(timer);
    }
  }
}

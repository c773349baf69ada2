// Lanes: one per process, what it does over time; arrows along a version's way; below, one life line per group.

import { ask } from "./api.js";
import { css, el, fill, number } from "./dom.js";

const ROW = 26, GAP = 6, LEFT = 128, AXIS = 22;
const KINDS = [
  ["computes", "train", ["step", "forward_backward", "optimizer", "canary"]],
  ["generates", "generate", ["generate"]],
  ["waits", "wait", ["wait", "batch", "fetch", "withhold"]],
  ["moves weights", "weights", ["copy_aside", "publish", "fetch_weights", "stage_weights", "pause", "read_back", "announce"]],
  ["environment", "environment", ["environment"]],
  ["other", "other", []],
];
const colorOf = (span) => (KINDS.find(([, , names]) => names.includes(span.name)) || KINDS[5])[1];
const isWait = (span) => span.name === "wait" || span.name === "batch";
const GROUP_EVENTS = { admitted: "other", stored: "wait", batch_taken: "train", trained: "train", filtered: "limit" };

export class Timeline {
  constructor(root) {
    this.root = root;
    this.seconds = null; // until chosen: ten steps
    this.to = null;
    this.selected = null;
    this.asked = 0;
    new ResizeObserver(() => this.found && this.draw()).observe(root);
  }

  recolor() {
    if (this.found) this.draw();
  }

  async show(selection, force) {
    const one = selection[0];
    if (!one) return;
    const key = `${one.run.run}/${one.stage.name}`;
    if (key !== this.key) Object.assign(this, { key, to: null, selected: null, found: null });
    this.one = one;
    const said = one.stage.wait;
    if (this.asked_for && said) this.moment = said.waiter === "generators" ? "generator" : "driver";
    if (this.asked_for) Object.assign(this, { asked_for: false, to: null });
    if (!one.stage.spans) {
      this.found = null;
      fill(this.root, el("h2", {}, "Timeline"), el("p", { class: "quiet" }, "This stage wrote no spans, so there are no lanes (they are written with log.spans=true). The sentence on top comes from its metrics."));
      return;
    }
    const isNew = this.revision !== one.stage.revision;
    if (!force && this.found && (this.to !== null || !isNew || document.hidden)) return;
    const wait = 2000 - (Date.now() - this.asked);
    if (!force && this.found && wait > 0) { // soon: another span may never come
      clearTimeout(this.later);
      this.later = setTimeout(() => this.show(selection, false), wait + 10);
      return;
    }
    this.revision = one.stage.revision;
    await this.load();
  }

  async load() {
    this.asked = Date.now();
    const { run, stage } = this.one;
    const question = this.question = {}; // an answer that comes after that to a later question is not shown
    const found = await ask("lanes", { run: run.run, stage: stage.name, seconds: this.seconds, to: this.to });
    if (question !== this.question) return;
    found.lanes.sort((a, b) => order(a.part) - order(b.part) || a.part.localeCompare(b.part, "en", { numeric: true }));
    this.found = found;
    this.seconds = found.stop - found.start;
    this.build();
    if (this.moment) this.showMoment(this.moment);
  }

  build() {
    if (!this.canvas || !this.root.contains(this.canvas)) {
      const button = (label, text, act) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
      this.canvas = el("canvas", { tabindex: "0", role: "img", onclick: (e) => this.click(e), onkeydown: (e) => this.key_(e), onmousemove: (e) => this.hover(e) });
      this.groupsCanvas = el("canvas", { role: "img" });
      this.detail = el("div", { class: "detail", role: "status" }, "Choose a span, or follow a wait below.");
      this.waits = el("div", { class: "waits" });
      this.note = el("p", { class: "quiet" });
      this.when = el("span", { class: "quiet" });
      fill(this.root, el("h2", {}, "Who does what, over time"),
        el("div", { class: "tools", role: "group", "aria-label": "Window of time" },
          button("Earlier", "◀", () => this.pan(-0.5)), button("Later", "▶", () => this.pan(0.5)),
          button("Zoom in", "+", () => this.zoom(0.5)), button("Zoom out", "−", () => this.zoom(2)),
          button("Follow the newest", "Newest", () => { this.to = null; this.load(); }), this.when),
        el("ul", { class: "legend" }, KINDS.map(([label, color]) => {
          const dot = el("span", { class: "dot", "aria-hidden": "true" });
          dot.classList.add(`fill-${color}`);
          return el("li", {}, dot, label);
        })),
        el("div", { class: "lanes" }, this.canvas), this.note, this.detail,
        el("div", { class: "two" },
          el("section", { "aria-label": "Longest waits" }, el("h3", {}, "Longest waits in this window"), this.waits),
          el("section", { "aria-label": "Groups" }, el("h3", {}, "Groups in this window"), el("p", { class: "quiet" }, "Admitted, generating, stored, taken, trained: a line each."), this.groupsCanvas)));
    }
    this.draw();
    this.drawWaits();
  }

  // The longest wait of the part that the sentence on top is about.
  showMoment(part) {
    this.moment = null;
    const waits = this.found.lanes.filter((lane) => lane.part.startsWith(part)).flatMap((lane) => lane.spans.filter(isWait).map((span) => ({ part: lane.part, span })));
    const longest = waits.sort((a, b) => b.span.end - b.span.start - (a.span.end - a.span.start))[0];
    if (longest) this.choose(longest.part, longest.span);
  }

  pan(share) {
    this.to = (this.to ?? this.found.stop) + share * this.seconds;
    if (this.to >= this.found.extent[1]) this.to = null;
    else this.to = Math.max(this.to, this.found.extent[0] + this.seconds / 2);
    this.load();
  }

  zoom(factor) {
    const middle = this.found.stop - this.seconds / 2;
    this.seconds = Math.min(7200, Math.max(0.05, this.seconds * factor));
    if (this.to !== null) this.to = middle + this.seconds / 2;
    this.load();
  }

  key_(event) {
    const act = { ArrowLeft: () => this.pan(-0.25), ArrowRight: () => this.pan(0.25), "+": () => this.zoom(0.5), "-": () => this.zoom(2) }[event.key];
    if (act) { event.preventDefault(); act(); }
  }

  x(time) {
    return LEFT + ((time - this.found.start) / (this.found.stop - this.found.start)) * (this.width - LEFT - 8);
  }

  draw() {
    const { lanes, start, stop, extent } = this.found;
    this.when.textContent = `${number(stop - start)} s, ${number(stop - extent[0], 4)} s after the first span`;
    // Spans within spans of one part lie in rows of their own.
    this.boxes = [];
    let y = AXIS;
    const rows = [];
    for (const lane of lanes) {
      const place = lane.part.startsWith("generator") ? byKind() : packed();
      let count = 1;
      for (const span of lane.spans.filter((s) => s.end > s.start || lane.part === "param_server")) {
        const row = place(span);
        count = Math.max(count, row + 1);
        this.boxes.push({ lane: lane.part, span, y: y + row * 14, h: 13 });
      }
      const height = Math.max(ROW, count * 14 + GAP);
      rows.push({ part: lane.part, y, height });
      y += height;
    }
    const g = this.prepare(this.canvas, y + 4);
    this.canvas.setAttribute("aria-label", `Lanes of ${lanes.length} processes over ${number(stop - start)} seconds. Arrow keys move, plus and minus zoom. The waits are listed below.`);
    this.axis(g, y);
    g.textBaseline = "middle";
    for (const row of rows) {
      g.fillStyle = css("--text");
      g.fillText(short(row.part, 16), 4, row.y + Math.min(row.height, ROW) / 2 - 2);
      g.strokeStyle = css("--grid");
      line(g, 0, row.y + row.height - GAP / 2, this.width, row.y + row.height - GAP / 2);
    }
    for (const box of this.boxes) {
      const left = Math.max(LEFT, this.x(box.span.start)), right = Math.min(this.width - 8, this.x(box.span.end));
      box.left = left; box.right = Math.max(left + 1, right);
      g.fillStyle = css(`--${colorOf(box.span)}`);
      g.globalAlpha = box.span.name === "generate" ? 0.55 : 1; // groups overlap: the fuller, the more at once
      g.fillRect(left, box.y, box.right - left, box.h);
      g.globalAlpha = 1;
      if (box.right - left > 60 && box.span.name !== "generate") {
        g.fillStyle = css("--on-color");
        g.fillText(short(isWait(box.span) ? `waits: ${box.span.attrs.for ?? "batch"}` : box.span.name, Math.floor((box.right - left) / 7)), left + 4, box.y + 7);
      }
      if (this.selected && box.span.id === this.selected) {
        g.strokeStyle = css("--text"); g.lineWidth = 2; g.strokeRect(left, box.y, box.right - left, box.h); g.lineWidth = 1;
      }
    }
    this.arrows(g);
    const left_out = lanes.reduce((a, lane) => a + lane.left_out, 0);
    this.note.textContent = left_out ? `${number(left_out)} short spans are left out: zoom in to see them.` : "";
    this.drawGroups();
  }

  // publish -> fetch_weights -> first generate of that version -> step that trained on it.
  arrows(g) {
    const by = (name, key = "version") => this.boxes.filter((b) => b.span.name === name && b.span.attrs[key] !== undefined);
    g.strokeStyle = css("--weights"); g.fillStyle = css("--weights");
    for (const publish of by("publish").slice(-20)) {
      const version = publish.span.attrs.version;
      for (const pull of by("fetch_weights").filter((b) => b.span.attrs.version === version)) {
        arrow(g, publish.right, publish.y + 6, pull.left, pull.y + 6);
        const first = by("generate").find((b) => b.lane === pull.lane && b.span.attrs.version === version && b.span.start >= pull.span.start);
        if (first) arrow(g, pull.right, pull.y + 6, first.left, first.y + 6);
      }
    }
    const selected = this.boxes.find((b) => b.span.id === this.selected);
    if (selected?.span.name === "generate") {
      const step = this.boxes.find((b) => b.span.attrs.groups?.includes?.(selected.span.attrs.group));
      if (step) arrow(g, selected.right, selected.y + 6, step.left, step.y + 6);
    }
  }

  drawGroups() {
    const groups = new Map();
    const of = (id) => groups.get(id) || groups.set(id, []).get(id);
    for (const lane of this.found.lanes) {
      for (const span of lane.spans) {
        const ids = span.attrs.group !== undefined ? [span.attrs.group] : Array.isArray(span.attrs.groups) ? span.attrs.groups : [];
        for (const id of ids) of(id).push(span);
      }
    }
    const whole = [...groups].filter(([, spans]) => spans.some((s) => s.name === "generate"));
    const shown = whole.sort(([, a], [, b]) => last(a) - last(b)).slice(-28);
    const g = this.prepare(this.groupsCanvas, AXIS + shown.length * 14 + 4);
    this.groupsCanvas.setAttribute("aria-label", `Life lines of ${shown.length} of ${groups.size} groups`);
    this.axis(g, AXIS + shown.length * 14);
    g.textBaseline = "middle";
    shown.forEach(([id, spans], i) => {
      const y = AXIS + i * 14 + 7;
      g.fillStyle = css("--text");
      g.fillText(short(`group ${id}`, 16), 4, y);
      spans.sort((a, b) => a.start - b.start);
      g.strokeStyle = css("--wait"); g.lineWidth = 2;
      line(g, this.xg(spans[0].start), y, this.xg(spans[spans.length - 1].end), y);
      g.lineWidth = 1;
      for (const span of spans) {
        g.fillStyle = css(`--${GROUP_EVENTS[span.name] || colorOf(span)}`);
        const left = this.xg(span.start);
        if (span.end > span.start) g.fillRect(left, y - 4, Math.max(1, this.xg(span.end) - left), 8);
        else { g.beginPath(); g.arc(left, y, 4, 0, 7); g.fill(); }
      }
    });
  }

  xg(time) {
    const at = LEFT + ((time - this.found.start) / (this.found.stop - this.found.start)) * (this.groupsCanvas.clientWidth - LEFT - 8);
    return Math.min(this.groupsCanvas.clientWidth - 8, Math.max(LEFT, at));
  }

  prepare(canvas, height) {
    const ratio = devicePixelRatio || 1, width = Math.max(300, canvas.parentElement.clientWidth);
    canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
    canvas.width = width * ratio; canvas.height = height * ratio;
    if (canvas === this.canvas) this.width = width;
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.font = "12px system-ui, sans-serif";
    g.clearRect(0, 0, width, height);
    return g;
  }

  axis(g, bottom) {
    const width = g.canvas.clientWidth, span = this.found.stop - this.found.start;
    const step = nice(span / 6);
    g.fillStyle = css("--muted"); g.strokeStyle = css("--grid"); g.textBaseline = "top";
    const from = Math.ceil((this.found.start - this.found.extent[0]) / step) * step;
    for (let t = from; t <= this.found.stop - this.found.extent[0]; t += step) {
      const x = LEFT + ((t + this.found.extent[0] - this.found.start) / span) * (width - LEFT - 8);
      line(g, x, AXIS - 4, x, bottom);
      g.fillText(`${number(t, 6)} s`, Math.min(x + 2, width - 44), 3);
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    return this.boxes?.filter((b) => x >= b.left - 2 && x <= b.right + 2 && y >= b.y && y <= b.y + b.h).pop();
  }

  hover(event) {
    const found = this.at(event);
    this.canvas.title = found ? `${found.lane}: ${found.span.name}, ${number(found.span.end - found.span.start)} s` : "";
  }

  click(event) {
    const found = this.at(event);
    if (found) this.choose(found.lane, found.span);
  }

  // A span, with what it waited for: the span of that part that ended last within the wait.
  choose(part, span) {
    this.selected = span.id;
    const facts = Object.entries(span.attrs).map(([k, v]) => `${k} ${typeof v === "object" ? JSON.stringify(v) : v}`).join(", ");
    const cause = isWait(span) ? this.cause(part, span) : null;
    fill(this.detail, el("strong", {}, part), ` ${isWait(span) ? `waits for ${span.attrs.for ?? "a batch"}` : span.name}, ${number(span.end - span.start)} s${facts ? `: ${facts}. ` : ". "}`,
      cause ? el("button", { type: "button", class: "follow", onclick: () => this.choose(cause.part, cause.span) }, `Follow: ${cause.part}, ${cause.span.name}`) : null);
    this.draw();
  }

  cause(part, wait) {
    const wanted = String(wait.attrs.for ?? "generator");
    const lanes = this.found.lanes.filter((lane) => lane.part !== part && (lane.part === wanted || lane.part.startsWith(wanted)));
    const others = lanes.length ? lanes : this.found.lanes.filter((lane) => lane.part !== part && (wanted === "buffer" || wanted === "generator") && lane.part.startsWith("generator"));
    let best = null;
    for (const lane of others) {
      for (const span of lane.spans) {
        const overlap = Math.min(span.end, wait.end) - Math.max(span.start, wait.start);
        if (overlap > 0 && (!best || overlap > best.overlap + 1e-9)) best = { part: lane.part, span, overlap };
      }
    }
    return best;
  }

  drawWaits() {
    const all = this.found.lanes.flatMap((lane) => lane.spans.filter(isWait).map((span) => ({ part: lane.part, span })));
    const of = {};
    const longest = all.sort((a, b) => b.span.end - b.span.start - (a.span.end - a.span.start))
      .filter(({ part }) => (of[part] = (of[part] ?? 0) + 1) <= 3).slice(0, 12);
    fill(this.waits, longest.length ? el("ol", {}, longest.map(({ part, span }) => el("li", {},
      el("button", { type: "button", class: "wait-row", onclick: () => this.choose(part, span) }, `${part} waits ${number(span.end - span.start)} s for ${span.attrs.for ?? "a batch"}${span.attrs.why ? ` (${span.attrs.why})` : ""}`))))
      : el("p", { class: "quiet" }, "None."));
  }
}

const order = (part) => ["driver", "trainer", "generator", "replay", "param_server"].findIndex((p) => part.startsWith(p)) + 9 * !/^(driver|trainer|generator|replay|param)/.test(part);
const last = (spans) => Math.max(...spans.map((span) => span.end));

// Rows of a lane: spans that overlap lie below each other, in at most four.
function packed() {
  const ends = [];
  return (span) => {
    let row = ends.findIndex((end) => end <= span.start + 1e-6);
    if (row < 0 && ends.length < 4) row = ends.length;
    if (row < 0) row = 3;
    ends[row] = Math.max(ends[row] ?? 0, span.end);
    return row;
  };
}

// Of a generator: groups and idling in the first row, the environment in the second, weights in the third.
function byKind() {
  return (span) => (span.name === "environment" ? 1 : ["generate", "wait"].includes(span.name) ? 0 : 2);
}

function short(text, max) {
  return text.length > max ? `${text.slice(0, Math.max(1, max - 1))}…` : text;
}

function nice(step) {
  const base = 10 ** Math.floor(Math.log10(step));
  return [1, 2, 5, 10].map((m) => m * base).find((m) => m >= step);
}

function line(g, x1, y1, x2, y2) {
  g.beginPath(); g.moveTo(x1, y1); g.lineTo(x2, y2); g.stroke();
}

function arrow(g, x1, y1, x2, y2) {
  const bend = Math.max(12, Math.abs(x2 - x1) / 3);
  g.beginPath(); g.moveTo(x1, y1); g.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2); g.stroke();
  g.beginPath(); g.moveTo(x2, y2); g.lineTo(x2 - 6, y2 - 3); g.lineTo(x2 - 6, y2 + 3); g.fill();
}

// The overview: advisories, then curves. Colours mean the same everywhere: blue trains, green generates or is held out,
// orange waits or is the oldest, purple moves weights, red is a bound or a limit.

import { ask } from "./api.js";
import { css, el, fill, number } from "./dom.js";

const EVERY_MS = 3000;
const s = (name, label, color, more = {}) => ({ name, label, color, ...more });
const SECTIONS = [
  { title: "Does it learn?", charts: [
    { title: "Reward", wide: true, unit: "", series: [s("train/reward/mean", "training reward", "train")], evals: true },
    { title: "Supervised loss", unit: "nats per token", series: [s("train/loss/sft", "training loss", "train")] },
    { title: "Preference loss", unit: "nats per pair", series: [s("train/loss/dpo", "loss", "train"), s("train/preference/margin", "margin", "weights")] },
    { title: "Entropy", unit: "nats per token", series: [s("train/entropy/mean", "policy entropy", "train")] },
    { title: "Groups without advantage", unit: "share", share: true, series: [s("train/zero_advantage_frac", "all rewards equal", "wait")] },
    { title: "Response length", unit: "tokens", series: [s("train/response_tokens/mean", "mean", "generate"), s("train/response_tokens/max", "longest", "wait")], bound: "rollout.max_response_tokens" },
  ] },
  { title: "How fresh is what it learns from?", charts: [
    { title: "Policy lag", unit: "optimizer steps", series: [s("train/policy_lag/mean", "mean", "train"), s("train/policy_lag/max", "oldest token", "wait")], bound: "staleness.max_policy_lag", zero: true },
    { title: "Lag of recent rollouts", histogram: true, unit: "rollouts", bound: "staleness.max_policy_lag" },
    { title: "Probability ratio", unit: "ratio", series: [s("train/ratio/mean", "mean", "train"), s("train/off_policy_ratio/p_01", "1 % below", "other"), s("train/off_policy_ratio/p_99", "1 % above", "wait")] },
    { title: "Clipped tokens", unit: "share", share: true, series: [s("train/ratio/clipped_frac", "clipped", "wait"), s("train/ess_frac", "effective sample size", "train")] },
    { title: "Trainer against engine", unit: "nats", log: true, series: [s("param_server/served_gap/max", "served gap, largest", "weights"), s("train/logprob_gap/mean", "logprob gap, mean", "train"), s("param_server/served_tolerance/max", "held to", "limit")] },
  ] },
  { title: "How fast is it, and who waits?", charts: [
    { title: "Time per step", unit: "s", series: [s("step/total_s", "step", "train"), s("step/wait_for_batch_s", "of it, waits for a batch", "wait"), s("limit/step_s", "limit", "limit")], zero: true },
    { title: "Efficiency", unit: "share of the limit's speed", share: true, series: [s("limit/efficiency", "reached", "train")] },
    { title: "Generators", unit: "share of time", share: true, series: [s("collector/generate_frac", "generate", "generate"), s("collector/environment_frac", "environment", "other"), s("collector/wait_for_slot_frac", "wait for a slot", "wait"), s("collector/pause_frac", "pause for weights", "weights")] },
    { title: "Throughput", unit: "tokens per second", series: [s("collector/tokens_per_s", "generated", "generate"), s("train/tokens_per_s", "trained", "train")], zero: true },
    { title: "Gradient norm", unit: "", series: [s("train/grad_norm", "before clipping", "train")] },
    { title: "Memory", unit: "GiB", memory: true, series: [], zero: true },
  ] },
];
const PART_COLORS = ["train", "generate", "weights", "wait", "other", "limit"];

export class Charts {
  constructor(root) {
    this.root = root;
    this.cards = [];
    this.key = "";
    this.asked = 0;
    this.data = new Map();
    this.words = {}; // what each metric means, once the server has said it
    new ResizeObserver(() => this.resize()).observe(root);
  }

  recolor() {
    if (this.cards.length) this.drawAll();
  }

  async show(selection, force) {
    this.selection = selection;
    this.drawAdvisories();
    const revisions = JSON.stringify(selection.map((one) => [one.run.run, one.stage.name, one.stage.revision]));
    const now = Date.now();
    if (!force && (revisions === this.revisions || document.hidden)) return;
    clearTimeout(this.later);
    if (!force && now - this.asked < EVERY_MS) { // soon: another line may never come
      this.later = setTimeout(() => this.show(this.selection, false), EVERY_MS - (now - this.asked) + 10);
      return;
    }
    this.revisions = revisions;
    this.asked = now;
    await Promise.all(selection.map((one) => this.load(one)));
    this.drawAll();
  }

  async load({ run, stage }) {
    const at = { run: run.run, stage: stage.name };
    const names = await ask("names", at);
    const wanted = new Set(SECTIONS.flatMap((section) => section.charts.flatMap((c) => c.series?.map((one) => one.name) || [])));
    const own = names.filter((name) => wanted.has(name) || name.startsWith("eval/") || /^memory\/[^/]+\/gib$/.test(name));
    const [series, lags] = await Promise.all([ask("series", { ...at, name: own.slice(0, 60), points: 500 }), ask("lags", at)]);
    this.data.set(`${run.run}/${stage.name}`, { names: own, series, lags });
  }

  dataOf({ run, stage }) {
    return this.data.get(`${run.run}/${stage.name}`) || { names: [], series: {}, lags: [] };
  }

  drawAdvisories() {
    const all = this.selection.flatMap(({ run, stage }) => stage.advisories.map((a) => ({ ...a, run: run.name })));
    const warnings = this.selection.flatMap(({ run }) => run.warnings.map((text) => ({ text, run: run.name })));
    const key = JSON.stringify([all, warnings, this.selection.length]);
    if (key === this.advisoryKey) return;
    this.advisoryKey = key;
    const many = this.selection.length > 1;
    const cards = all.map((a) => el("li", { class: `advisory ${a.level}` },
      el("h3", {}, el("span", { class: "level" }, a.level === "bad" ? "Act" : "Look"), " ", a.title, many ? ` (${a.run})` : ""),
      el("p", {}, a.text), el("p", { class: "do" }, a.do)));
    this.advisories = el("section", { class: "advisories", "aria-label": "Advisories" },
      el("h2", {}, "What deserves a look"),
      cards.length ? el("ul", {}, cards) : el("p", { class: "quiet" }, "Nothing stands out."),
      warnings.length ? el("details", {}, el("summary", {}, `${warnings.length} warnings that the run itself gave`),
        el("ul", { class: "plain-list" }, warnings.map((w) => el("li", {}, many ? `${w.run}: ${w.text}` : w.text)))) : null);
    const old = this.root.querySelector(".advisories");
    if (old) old.replaceWith(this.advisories);
    else this.root.prepend(this.advisories);
  }

  drawAll() {
    const before = new Map(this.cards.map((card) => [card.title, card]));
    for (const card of this.cards) card.plot?.destroy();
    this.cards = [];
    const focused = document.activeElement; // which leaves the page with the old cards
    const sections = [];
    for (const section of SECTIONS) {
      const cards = section.charts.map((chart) => this.card(chart)).filter(Boolean);
      if (!cards.length) continue;
      sections.push(el("section", { class: "charts" }, el("h2", {}, section.title), el("div", { class: "grid" }, cards.map((c) => c.node))));
      this.cards.push(...cards);
    }
    fill(this.root, this.advisories, sections.length ? sections : el("p", { class: "quiet" }, "No metrics were written yet."));
    for (const card of this.cards) {
      card.draw();
      keepReading(before.get(card.title), card, focused);
    }
  }

  resize() {
    for (const card of this.cards) if (card.plot) card.plot.setSize({ width: widthOf(card.box), height: 190 });
  }

  card(chart) {
    const lines = chart.histogram ? [] : this.lines(chart);
    const lags = chart.histogram ? this.selection.map((one) => ({ one, lags: this.dataOf(one).lags })).filter((o) => o.lags.length) : [];
    if (!lines.length && !lags.length) return null;
    const box = el("div", { class: "plot", role: "img", "aria-label": describe(chart, lines) });
    const node = el("article", { class: chart.wide ? "card wide" : "card" },
      el("h3", {}, chart.title, chart.unit ? el("span", { class: "unit" }, ` ${chart.unit}`) : null), box, legend(lines, lags), this.words_of(chart, lines));
    const card = { title: chart.title, node, box, plot: null, draw: () => {} };
    card.draw = () => {
      if (chart.histogram) drawHistogram(box, lags, boundOf(chart, this.selection));
      else card.plot = plot(box, chart, lines, boundOf(chart, this.selection));
    };
    return card;
  }

  // What to draw, with the colour of its meaning; of several runs the first curve only, each in its run's colour.
  lines(chart) {
    const many = this.selection.length > 1;
    const found = [];
    for (const one of this.selection) {
      const data = this.dataOf(one);
      const wanted = [...chart.series];
      if (chart.memory) {
        data.names.filter((n) => n.startsWith("memory/")).slice(0, 6).forEach((n, i) => wanted.push(s(n, n.split("/")[1], PART_COLORS[i])));
      }
      if (chart.evals) {
        for (const name of data.names.filter((n) => /^eval\/[^/]+\/(exact_match|reward|mean_at_\d+)$/.test(n))) {
          const [, taskset, measure] = name.split("/");
          if (measure === "reward" && data.names.includes(`eval/${taskset}/exact_match`)) continue;
          wanted.push(s(name, `${taskset}, ${measure.replaceAll("_", " ")}`, "generate", { marks: true, interval: interval(data.series, taskset, name) }));
        }
      }
      const present = wanted.filter((line) => data.series[line.name]?.steps.length);
      for (const [i, line] of present.entries()) {
        if (many && i > 0 && !line.marks) continue;
        found.push({ ...line, data: data.series[line.name], label: many ? `${one.run.name}: ${line.label}` : line.label,
          stroke: many ? css(`--run-${one.run.run % 6}`) : css(`--${line.color}`) });
      }
    }
    return found;
  }

  words_of(chart, lines) {
    const names = [...new Set(lines.map((line) => line.name))];
    const rows = names.map((name) => [name, meaning(this.words, name)]).filter(([, w]) => w);
    if (!rows.length) return null;
    return el("details", { class: "words" }, el("summary", {}, "How to read it", el("span", { class: "visually-hidden" }, `: ${chart.title}`)), el("dl", {}, rows.flatMap(([name, w]) => [
      el("dt", {}, el("code", {}, name)),
      el("dd", {}, sentence(w.meaning), w.look ? el("span", { class: "look" }, ` Look closer: ${plain(w.look)}`) : null)])));
  }
}

// Words that were open stay open when the curves are drawn anew, and keep the focus.
function keepReading(before, card, focused) {
  const words = card.node.querySelector(".words"), old = before?.node.querySelector(".words");
  if (!words || !old) return;
  words.open = old.open;
  if (old.contains(focused)) words.querySelector("summary").focus({ preventScroll: true });
}

function plain(text) {
  return text.replaceAll("`", "").replace(/\[([^\]]*)\]\([^)]*\)/g, "$1");
}

function sentence(text) {
  const clean = plain(text);
  return `${clean.charAt(0).toUpperCase()}${clean.slice(1)}.`;
}

export function meaning(words, name) {
  if (words[name]) return words[name];
  const parts = name.split("/");
  return Object.entries(words).find(([pattern]) => {
    const own = pattern.split("/");
    return own.length === parts.length && own.every((p, i) => p === parts[i] || new RegExp(`^${p.replace(/<[^>]*>/g, ".+")}$`).test(parts[i]));
  })?.[1];
}

// 95 %: of a share over n tasks by its standard error, of others as the run measured it.
function interval(series, taskset, name) {
  const low = series[`${name}_low`], high = series[`${name}_high`], num = series[`eval/${taskset}/num_tasks`];
  const own = series[name];
  if (low && high && low.steps.length === own.steps.length) return { low: low.values, high: high.values };
  if (!name.endsWith("exact_match") || !num || num.steps.length !== own.steps.length) return null;
  const half = own.values.map((p, i) => 1.96 * Math.sqrt(Math.max(0, p * (1 - p)) / Math.max(1, num.values[i])));
  return { low: own.values.map((p, i) => Math.max(0, p - half[i])), high: own.values.map((p, i) => Math.min(1, p + half[i])) };
}

function boundOf(chart, selection) {
  const value = chart.bound ? selection[0]?.stage.settings[chart.bound] : null;
  return typeof value === "number" ? value : null;
}

function describe(chart, lines) {
  const last = lines.map((line) => `${line.label} ${number(line.data.values[line.data.values.length - 1])}`);
  return `${chart.title}${last.length ? `: now ${last.join(", ")}` : ""}`;
}

function legend(lines, lags) {
  const entries = lines.map((line) => [line.stroke, line.label, number(line.data.values[line.data.values.length - 1]), line.marks]);
  for (const { one, lags: own } of lags.length > 1 ? lags : []) entries.push([css(`--run-${one.run.run % 6}`), one.run.name, `${own.reduce((a, l) => a + l.count, 0)} rollouts`]);
  return el("ul", { class: "legend" }, entries.map(([color, label, value, marks]) => {
    const dot = el("span", { class: marks ? "dot marks" : "dot", "aria-hidden": "true" });
    dot.style.background = color;
    return el("li", {}, dot, label, " ", el("b", {}, value));
  }));
}

function widthOf(box) {
  return Math.max(220, Math.floor(box.clientWidth));
}

function plot(box, chart, lines, bound) {
  const steps = [...new Set(lines.flatMap((line) => line.data.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, i) => [step, i]));
  const column = (from, values) => {
    const own = new Array(steps.length).fill(undefined);
    from.forEach((step, i) => { own[place.get(step)] = values[i]; });
    return own;
  };
  const data = [steps], series = [{}], bands = [];
  for (const line of lines) {
    const faint = line.interval || (line.data.low && { low: line.data.low, high: line.data.high });
    if (faint) {
      data.push(column(line.data.steps, faint.high), column(line.data.steps, faint.low));
      const edge = { stroke: "transparent", points: { show: false }, spanGaps: true };
      series.push(edge, edge);
      bands.push({ series: [series.length - 2, series.length - 1], fill: alpha(line.stroke, 0.16) });
    }
    data.push(column(line.data.steps, line.data.values));
    const few = line.data.steps.length < 40;
    series.push({ stroke: line.stroke, width: 2, spanGaps: true, dash: line.marks ? [4, 4] : undefined,
      points: { show: Boolean(line.marks) || few, size: line.marks ? 8 : 5, fill: line.stroke } });
  }
  if (bound !== null) {
    data.push(steps.map(() => bound));
    series.push({ stroke: css("--limit"), width: 1.5, dash: [6, 4], points: { show: false } });
  }
  const text = css("--muted"), grid = { stroke: css("--grid"), width: 1 };
  const axis = { stroke: text, grid, ticks: grid, font: "12px system-ui, sans-serif" };
  const range = (u, low, high) => {
    if (low === null || high === null) return [0, 1];
    if (chart.share) return [0, Math.max(1, high)];
    const from = chart.zero ? 0 : low, span = high - from || Math.abs(high) || 1;
    return [chart.zero ? 0 : from - 0.08 * span, high + 0.08 * span];
  };
  const only = steps.length === 1;
  return new uPlot({
    width: widthOf(box), height: 190, series, bands, legend: { show: false }, cursor: { sync: { key: "steps" }, y: false, points: { size: 6 } },
    scales: { x: { time: false, range: only ? [steps[0] - 1, steps[0] + 1] : undefined }, y: chart.log ? { distr: 3 } : { range } },
    axes: [{ ...axis, size: 32 }, { ...axis, size: 56, values: (u, ticks) => ticks.map((v) => (v === null ? "" : chart.log ? powerOfTen(v) : number(v))) }],
    padding: [8, 12, 0, 0], hooks: { setCursor: [(u) => tell(u, box, lines, steps)] },
  }, data, box);
}

function powerOfTen(value) {
  const exponent = Math.log10(value);
  return Math.abs(exponent - Math.round(exponent)) < 1e-6 ? `1e${Math.round(exponent)}` : "";
}

function tell(u, box, lines, steps) {
  let note = box.querySelector(".at");
  const i = u.cursor.idx;
  if (i === null || i === undefined) { note?.remove(); return; }
  if (!note) box.append(note = el("div", { class: "at", "aria-hidden": "true" }));
  const step = steps[i];
  const rows = lines.map((line) => [line, line.data.values[line.data.steps.indexOf(step)]]).filter(([, v]) => v !== undefined);
  note.textContent = `step ${number(step)}: ${rows.map(([line, v]) => `${line.label} ${number(v)}`).join(", ")}`;
}

function alpha(color, a) {
  const [r, g, b] = color.startsWith("#") ? [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16)) : [128, 128, 128];
  return `rgba(${r}, ${g}, ${b}, ${a})`;
}

function drawHistogram(box, all, bound) {
  const many = all.length > 1;
  const lags = [...new Set(all.flatMap((o) => o.lags.map((l) => l.lag)))];
  const most = Math.max(...lags, bound ?? 0), least = Math.min(0, ...lags);
  const largest = Math.max(...all.flatMap((o) => o.lags.map((l) => l.count)));
  const bars = [];
  for (let lag = least; lag <= most && bars.length < 60; lag++) {
    const stack = all.map(({ one, lags: own }) => {
      const count = own.find((l) => l.lag === lag)?.count || 0;
      const bar = el("span", { class: "column" });
      bar.style.height = `${(100 * count) / largest}%`;
      bar.style.background = many ? css(`--run-${one.run.run % 6}`) : css(lag > (bound ?? Infinity) ? "--limit" : "--train");
      bar.title = `lag ${lag}: ${count} rollouts`;
      return bar;
    });
    bars.push(el("div", { class: lag === bound ? "bin bound" : "bin" }, el("div", { class: "stack" }, stack), el("span", { class: "tick" }, lag === bound ? `${lag} bound` : lag)));
  }
  box.setAttribute("aria-label", `Lag of recent rollouts: ${all.map((o) => o.lags.map((l) => `lag ${l.lag}: ${l.count}`).join(", ")).join("; ")}`);
  fill(box, el("div", { class: "histogram" }, bars));
}

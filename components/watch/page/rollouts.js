// Rollouts: filter, read, a group side by side, one task at two steps; each token coloured by what is known of it.

import { ask } from "./api.js";
import { el, fill, number } from "./dom.js";

const PAGE = 50;
const RANGES = [["reward", "Reward"], ["lag", "Lag"], ["tokens", "Tokens"], ["step", "Step"]];
const COLORINGS = [["version", "policy version"], ["logprob", "logprob"], ["difference", "trainer minus engine"], ["advantage", "advantage"], ["none", "nothing"]];

export class Rollouts {
  constructor(root) {
    this.root = root;
    this.offset = 0;
    this.asked = 0;
    this.open = [];
    this.coloring = "version";
    this.ids = false;
    this.form = this.makeForm();
    this.list = el("div", { class: "list" });
    this.detail = el("div", { class: "reading-pane" });
    fill(root, el("h2", {}, "What the policy writes"), this.form, this.list, this.detail);
  }

  recolor() {}

  makeForm() {
    const range = ([name, label]) => el("fieldset", {}, el("legend", {}, label),
      el("input", { name: `${name}_min`, "aria-label": `${label} at least`, placeholder: "min", inputmode: "decimal", size: 6, autocomplete: "off" }),
      el("input", { name: `${name}_max`, "aria-label": `${label} at most`, placeholder: "max", inputmode: "decimal", size: 6, autocomplete: "off" }));
    this.reason = el("select", { name: "reason" }, el("option", { value: "" }, "any"));
    this.sign = el("select", { name: "sign" }, el("option", { value: "" }, "any"));
    return el("form", { class: "filters", "aria-label": "Filter rollouts", onsubmit: (e) => { e.preventDefault(); this.offset = 0; this.load(); },
      onchange: () => { this.offset = 0; this.load(); }, onreset: () => setTimeout(() => { this.offset = 0; this.load(); }) },
      RANGES.map(range),
      el("label", {}, "Task", el("input", { name: "task", size: 12, autocomplete: "off" })),
      el("label", {}, "Group", el("input", { name: "group", size: 8, inputmode: "numeric", autocomplete: "off" })),
      el("label", {}, "Ended by", this.reason), el("label", {}, "Sign of hacking", this.sign),
      el("label", {}, "Order", el("select", { name: "sort" }, ["newest", "oldest", "best", "worst", "longest", "stalest"].map((o) => el("option", { value: o }, o)))),
      el("button", { type: "submit" }, "Filter"), el("button", { type: "reset", class: "plain" }, "Clear"));
  }

  async show(selection, force) {
    this.selection = selection;
    const one = selection[0];
    if (!one) return;
    const key = selection.map((o) => `${o.run.run}/${o.stage.name}`).join(",");
    if (key !== this.key) { this.key = key; this.offset = 0; this.open = []; fill(this.detail); force = true; }
    // A list that changes while it is read is no use: new rollouts come when asked for.
    if (force || !this.loaded || (!this.total && one.stage.progress.num_rollouts)) await this.load();
    else this.drawNew();
  }

  at() {
    const { run, stage } = this.selection[0];
    return { run: run.run, stage: stage.name };
  }

  async load() {
    this.loaded = true;
    const asked = this.asked += 1; // an answer that comes after that to a later question is not shown
    const given = Object.fromEntries(new FormData(this.form));
    try {
      const found = await ask("rollouts", { ...this.at(), ...given, limit: PAGE, offset: this.offset });
      if (asked !== this.asked) return;
      this.total = found.total;
      this.seen = this.selection[0].stage.progress.num_rollouts;
      this.choices(this.reason, found.choices.reasons);
      this.choices(this.sign, found.choices.signs);
      this.drawList(found);
    } catch (error) {
      if (asked === this.asked) fill(this.list, el("p", { class: "quiet", role: "alert" }, error.message));
    }
  }

  choices(select, values) {
    const now = select.value;
    fill(select, el("option", { value: "" }, "any"), values.map((v) => el("option", { value: v }, v)));
    select.value = values.includes(now) ? now : "";
  }

  drawNew() {
    const more = this.selection[0].stage.progress.num_rollouts - this.seen;
    const note = this.list.querySelector(".new");
    if (note) note.textContent = more > 0 ? `${number(more)} new: show them` : "";
    if (note) note.hidden = more <= 0;
  }

  drawList(found) {
    const cell = (value) => el("td", {}, value);
    const rows = found.rows.map((row) => el("tr", {},
      el("td", {}, el("button", { type: "button", class: "link", onclick: () => this.show_([row.rowid]) }, `step ${row.step}`)),
      cell(number(row.group_id)), el("td", { class: "mono" }, row.task), cell(number(row.reward)), cell(number(row.advantage)), cell(number(row.lag)), cell(number(row.tokens)),
      cell(row.turns), el("td", {}, row.reason), el("td", {}, row.signs.map((s) => el("span", { class: "sign" }, s))),
      el("td", {}, el("button", { type: "button", class: "link", onclick: () => this.group(row) }, "group"), " ", el("button", { type: "button", class: "link", onclick: () => this.sameTask(row) }, "same task"))));
    const heads = ["Rollout", "Group", "Task", "Reward", "Advantage", "Lag", "Tokens", "Turns", "Ended by", "Signs", "Side by side"];
    const last = Math.min(found.total, this.offset + PAGE);
    fill(this.list,
      el("div", { class: "tools" }, el("span", { role: "status" }, found.total ? `${number(this.offset + 1)} to ${number(last)} of ${number(found.total)}` : "No rollout matches."),
        el("button", { type: "button", disabled: this.offset === 0, onclick: () => { this.offset -= PAGE; this.load(); } }, "Previous"),
        el("button", { type: "button", disabled: last >= found.total, onclick: () => { this.offset += PAGE; this.load(); } }, "Next"),
        el("button", { type: "button", class: "new", hidden: true, onclick: () => { this.offset = 0; this.load(); } })),
      rows.length ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of rollouts" }, el("table", {}, el("thead", {}, el("tr", {}, heads.map((h) => el("th", { scope: "col" }, h)))), el("tbody", {}, rows))) : null);
  }

  async group(row) {
    const found = await ask("rollouts", { ...this.at(), group: row.group_id, sort: "best", limit: 16 });
    await this.show_(found.rows.filter((r) => r.step === row.step).map((r) => r.rowid), `Group ${row.group_id}: ${found.total} of its rollouts were kept`);
  }

  // In every run shown: the task at its first and at its last step.
  async sameTask(row) {
    const ids = [];
    for (const one of this.selection) {
      const at = { run: one.run.run, stage: one.stage.name };
      for (const sort of ["oldest", "newest"]) {
        const found = await ask("rollouts", { ...at, same_task: row.task, sort, limit: 1 });
        for (const r of found.rows) if (!ids.some((i) => i.id === r.rowid && i.run === at.run)) ids.push({ id: r.rowid, ...at });
      }
    }
    await this.show_(ids, `Task ${row.task}: at its first and its last step${ids.length < 2 ? " (it was kept at one step only)" : ""}`);
  }

  async show_(ids, title = "") {
    this.title = title;
    this.open = await Promise.all(ids.map((id) => ask("rollout", typeof id === "object" ? id : { ...this.at(), id })));
    this.drawDetail();
    this.detail.querySelector("h3")?.focus();
  }

  drawDetail() {
    if (!this.open.length) return;
    const choice = el("fieldset", { class: "coloring" }, el("legend", {}, "Colour tokens by"), COLORINGS.map(([value, label]) => {
      const radio = el("input", { type: "radio", name: "coloring", value, id: `by-${value}`, onchange: () => { this.coloring = value; this.drawTexts(); } });
      radio.checked = value === this.coloring;
      return el("label", { for: `by-${value}` }, radio, label);
    }), el("label", {}, (() => { const box = el("input", { type: "checkbox", onchange: () => { this.ids = box.checked; this.drawTexts(); } }); box.checked = this.ids; return box; })(), "token ids"));
    this.under = el("p", { class: "under", "aria-live": "polite" }, "Point at a token to see its numbers.");
    this.columns = el("div", { class: this.open.length > 1 ? "columns many" : "columns" });
    fill(this.detail, el("h3", { tabindex: "-1" }, this.title || `Rollout at step ${this.open[0].step}`), choice, this.legend = el("p", { class: "scale" }), this.under, this.columns);
    this.drawTexts();
  }

  drawTexts() {
    const versions = this.open.flatMap((r) => r.response.policy_versions || []).filter((v) => v !== null);
    const newest = Math.max(...versions);
    fill(this.legend, scaleWords(this.coloring, newest));
    fill(this.columns, this.open.map((r) => this.text(r, newest)));
  }

  text(r, newest) {
    const facts = [["reward", number(r.reward)], ["advantage", number(r.advantage)], ["lag", number(r.lag)], ["tokens", number(r.tokens)], ["ended by", r.reason],
      ...Object.entries(r.metrics).slice(0, 6).map(([k, v]) => [k, typeof v === "number" ? number(v) : String(v)])];
    const notes = [];
    if (r.cut.prompt) notes.push(`The first ${number(r.cut.prompt)} tokens of the prompt are not shown.`);
    if (r.cut.response) notes.push(`The last ${number(r.cut.response)} tokens of the answer are not shown.`);
    const known = r.response.pieces.some((p) => p !== null);
    return el("article", { class: "rollout" },
      el("h4", {}, `Step ${r.step}, group ${r.group_id ?? "–"}, no. ${r.sequence ?? "–"}`),
      el("dl", { class: "facts" }, facts.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])),
      r.signs.length ? el("p", {}, "Signs: ", r.signs.map((s) => el("span", { class: "sign" }, s))) : null,
      el("section", { class: "turn given" }, el("h5", {}, "Prompt"), el("p", { class: "text" }, this.plain(r.prompt))),
      known || this.ids ? this.turns(r, newest) : [el("section", { class: "turn sampled" }, el("h5", {}, "Answer"), el("p", { class: "text" }, r.text)),
        el("p", { class: "quiet" }, "No tokenizer of this run's model was found here, so tokens are not told apart; their ids can be shown.")],
      differenceInWords(r),
      notes.map((n) => el("p", { class: "quiet" }, n)));
  }

  plain(part) {
    if (this.ids || part.pieces.every((p) => p === null)) return part.ids.length ? part.ids.join(" ") : "(empty)";
    return part.pieces.map((p, i) => p ?? `[${part.ids[i]}]`).join("");
  }

  turns(r, newest) {
    const { ids, pieces, loss_mask: mask } = r.response;
    const blocks = [];
    ids.forEach((id, i) => {
      const sampled = mask ? Boolean(mask[i]) : true;
      if (!blocks.length || blocks[blocks.length - 1].sampled !== sampled) blocks.push({ sampled, tokens: [] });
      blocks[blocks.length - 1].tokens.push(i);
    });
    return blocks.map((block, n) => {
      const calls = block.sampled && /tool_call|<function|```python/.test(block.tokens.map((i) => pieces[i] ?? "").join(""));
      const text = el("p", { class: "text tokens", onmouseover: (e) => this.tell(r, e.target), onfocusin: (e) => this.tell(r, e.target), onkeydown: walk });
      for (const i of block.tokens) text.append(this.token(r, i, newest, block.sampled));
      if (text.firstChild) text.firstChild.tabIndex = 0; // one stop of the Tab key; arrow keys go from token to token
      return el("section", { class: block.sampled ? "turn sampled" : "turn given" }, el("h5", {}, block.sampled ? (calls ? "Model, with a tool call" : n ? "Model, next turn" : "Model") : "Environment (masked: not trained on)"), text);
    });
  }

  token(r, i, newest, sampled) {
    const piece = r.response.pieces[i];
    const node = el("span", { class: "token", "data-i": i }, this.ids || piece === null ? `${r.response.ids[i]} ` : piece.replace(/\n/g, "↵\n"));
    if (sampled) {
      const [level, side] = levelOf(this.coloring, r, i, newest);
      if (level > 0) node.classList.add(`${side}-${level}`);
    }
    return node;
  }

  tell(r, node) {
    if (!node.dataset?.i) return;
    const i = Number(node.dataset.i), t = r.response;
    const parts = [`token ${i}`, `id ${t.ids[i]}`];
    if (t.policy_versions) parts.push(`version ${t.policy_versions[i]} (lag ${number(r.step - 1 - t.policy_versions[i])})`);
    if (t.behavior_logprobs) parts.push(`logprob ${number(t.behavior_logprobs[i])}`);
    const off = differenceOf(t, i);
    if (off !== null) parts.push(`trainer minus engine ${signed(off)} nats`);
    parts.push(`advantage ${number(t.advantages ? t.advantages[i] : r.advantage)}`);
    this.under.textContent = parts.join(", ");
    node.title = this.under.textContent;
  }
}

// The arrow keys move from token to token, as in a grid.
function walk(event) {
  const now = event.target;
  const next = { ArrowRight: now.nextElementSibling, ArrowLeft: now.previousElementSibling }[event.key];
  if (!next || !now.dataset?.i) return;
  event.preventDefault();
  now.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// What the trainer's forward pass of the step says of a sampled token, minus what the engine said when it sampled it, in
// nats; null where one of them is not known.
function differenceOf(t, i) {
  const theirs = t.behavior_logprobs?.[i], own = t.trainer_logprobs?.[i];
  if (theirs === null || theirs === undefined || own === null || own === undefined || (t.loss_mask && !t.loss_mask[i])) return null;
  return own - theirs;
}

const signed = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${number(Math.abs(value))}`;

function differenceInWords(r) {
  const all = r.response.ids.map((_, i) => ({ i, off: differenceOf(r.response, i) })).filter((one) => one.off !== null);
  if (!all.length) return null;
  const mean = all.reduce((sum, one) => sum + Math.abs(one.off), 0) / all.length;
  const most = all.sort((a, b) => Math.abs(b.off) - Math.abs(a.off)).slice(0, 3)
    .map(({ i, off }) => `${signed(off)} at token ${i} (${r.response.pieces[i] === null ? `id ${r.response.ids[i]}` : `“${r.response.pieces[i].replace(/\n/g, "↵").trim()}”`})`);
  return el("p", { class: "quiet difference" }, `Trainer minus engine: ${number(mean)} nats on average, without sign; most ${most.join(", ")}.`);
}

// From which difference, in nats, each colour begins: tenths of a permille are rounding, a third of a nat is drift.
const DIFFERENCES = [0.001, 0.01, 0.03, 0.1, 0.3];

// 0 to 5, and which scale: "cool" is fresh, or made likelier; "warm" is old, unlikely, or made less likely.
function levelOf(coloring, r, i, newest) {
  const t = r.response;
  const step = (share) => Math.min(5, Math.max(0, Math.ceil(5 * share)));
  if (coloring === "version" && t.policy_versions) {
    const behind = newest - t.policy_versions[i];
    return behind === 0 ? [1, "cool"] : [Math.min(5, behind), "warm"];
  }
  if (coloring === "logprob" && t.behavior_logprobs) return [step(-t.behavior_logprobs[i] / 5), "warm"];
  if (coloring === "advantage") {
    const a = t.advantages ? t.advantages[i] : r.advantage;
    return a ? [step(Math.abs(a) / 2), a > 0 ? "cool" : "warm"] : [0, "cool"];
  }
  if (coloring === "difference") {
    const off = differenceOf(t, i);
    return off ? [DIFFERENCES.filter((least) => Math.abs(off) >= least).length, off > 0 ? "cool" : "warm"] : [0, "cool"];
  }
  return [0, "cool"];
}

function scaleWords(coloring, newest) {
  const mark = (name, words) => [el("span", { class: `token ${name}` }, " a "), ` ${words} `];
  if (coloring === "version") return [mark("cool-1", `version ${newest}, the newest here`), mark("warm-1", "1 step older"), mark("warm-3", "3 steps older"), mark("warm-5", "5 and more")];
  if (coloring === "logprob") return [mark("warm-1", "likely (above -1 nat)"), mark("warm-3", "-2 to -3"), mark("warm-5", "unlikely (below -4): the policy was surprised to say it")];
  if (coloring === "difference") return [mark("warm-5", "the trainer finds it less likely by 0.3 nats and more"), mark("warm-3", "by 0.03"), mark("warm-1", "by 0.001"), mark("cool-1", "more likely by 0.001"), mark("cool-3", "by 0.03"), mark("cool-5", "by 0.3 and more."),
    "The logprob in the step that trained on it, minus the engine's: at lag 0 that is rounding, at a lag also what was learned since. Uncoloured: less, or not known."];
  if (coloring === "advantage") return [mark("cool-3", "made likelier"), mark("warm-3", "made less likely; full colour from 2 on")];
  return [""];
}

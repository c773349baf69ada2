// The frame of the page: which runs and stage are shown, the sentence, the cause of a death, and the three views.

import { ask, listen } from "./api.js";
import { ago, byId, el, fill, number, percent } from "./dom.js";
import { Charts } from "./charts.js";
import { Timeline } from "./timeline.js";
import { Rollouts } from "./rollouts.js";

const LAST = [["train/reward/mean", "reward", ""], ["train/loss/sft", "loss", ""], ["train/entropy/mean", "entropy", ""], ["train/policy_lag/mean", "lag", ""], ["step/total_s", "step", " s"]];
const VIEWS = ["overview", "timeline", "rollouts"];
const state = { runs: [], shown: new Set([0]), stage: null };

const charts = new Charts(byId("overview"));
const timeline = new Timeline(byId("timeline"));
const rollouts = new Rollouts(byId("rollouts"));
const viewOf = { overview: charts, timeline, rollouts };

function first() {
  return state.runs[Math.min(...state.shown)];
}

function stageOf(run) {
  return run?.stages.find((s) => s.name === state.stage) || run?.stages[run.stages.length - 1];
}

function selection() {
  return [...state.shown].sort((a, b) => a - b)
    .map((i) => state.runs[i])
    .map((run) => ({ run, stage: stageOf(run) }))
    .filter((one) => one.stage);
}

function currentView() {
  const name = location.hash.slice(2);
  return VIEWS.includes(name) ? name : "overview";
}

function drawRuns() {
  const many = state.runs.length > 1;
  fill(byId("runs"), state.runs.map((run) => {
    const badge = el("span", { class: `badge ${run.state}` }, run.state_text);
    if (!many) return el("span", { class: "run" }, el("strong", {}, run.name));
    const box = el("input", { type: "checkbox", id: `run-${run.run}`, onchange: () => toggle(run.run, box) });
    box.checked = state.shown.has(run.run);
    return el("label", { class: "run", for: `run-${run.run}` }, box,
      el("span", { class: `dot run-color-${run.run % 6}`, "aria-hidden": "true" }), el("strong", {}, run.name), badge);
  }));
}

function toggle(run, box) {
  if (box.checked) state.shown.add(run);
  else if (state.shown.size > 1) state.shown.delete(run);
  else box.checked = true;
  draw(true);
}

function drawStages() {
  const choice = byId("stage");
  const names = [...new Set(state.runs.flatMap((run) => run.stages.map((s) => s.name)))];
  if (!names.includes(state.stage)) {
    const last = first()?.stages;
    state.stage = last?.length ? last[last.length - 1].name : null;
  }
  choice.closest("label").hidden = names.length < 2;
  if (JSON.stringify([...choice.options].map((o) => o.value)) !== JSON.stringify(names)) {
    fill(choice, names.map((name) => el("option", { value: name }, name)));
  }
  if (state.stage) choice.value = state.stage;
}

function drawTop() {
  const run = first();
  const stage = stageOf(run);
  const top = byId("top");
  top.className = `top ${run.state}`;
  const since = stage?.time ? `, last line ${ago(Date.now() / 1000 - stage.time)}` : "";
  const of = stage?.settings["train.steps"];
  const step = stage && stage.step >= 0 ? `${stage.name}, step ${stage.step.toLocaleString("en")}${of ? ` of ${of.toLocaleString("en")}` : ""}${since}` : run.path;
  fill(byId("state"), el("span", { class: `badge ${run.state}` }, run.state_text), " ", step);
  const wait = stage?.wait;
  const live = run.state === "live" || run.state === "waiting";
  let words = wait?.sentence || (run.state === "waiting" ? "Waiting for the run to begin." : "No step was measured yet.");
  if (run.state === "dead") words = headline(run.cause) || "The run died.";
  setText(byId("sentence"), words);
  const advice = byId("advice");
  if (run.state === "dead") fill(advice, wait ? `In its last steps: ${wait.sentence}` : "");
  else if (wait?.advice) {
    const [setting, ...rest] = wait.advice.split(": ");
    fill(advice, live ? "To change it: " : "To change it in a next run: ", el("code", {}, setting), rest.length ? ` – ${rest.join(": ")}. ` : ". ",
      stage.spans ? el("a", { href: "#/timeline", onclick: () => { timeline.asked_for = true; if (currentView() === "timeline") draw(true); } }, "Show the moment") : null);
  } else fill(advice);
  const last = LAST.filter(([name]) => typeof stage?.last[name] === "number");
  fill(byId("last"), last.flatMap(([name, label, unit]) => [el("dt", {}, label), el("dd", {}, `${number(stage.last[name])}${unit}`)]));
  const reading = byId("reading");
  const progress = stage?.progress;
  const done = !progress || (progress.metrics >= 0.95 && progress.rollouts >= 0.95); // a run that lives is always ahead
  reading.hidden = done && !progress?.skipped_lines && !progress?.refused_names && !run.failure;
  if (!reading.hidden) {
    const parts = [];
    if (run.failure) parts.push(`Something could not be read, and is tried again: ${run.failure}.`);
    if (!done) parts.push(`Reading the files: metrics ${percent(progress.metrics)}, rollouts ${percent(progress.rollouts)}.`);
    if (progress.skipped_lines) parts.push(`${progress.skipped_lines} lines are too long and were left out.`);
    if (progress.refused_names) parts.push(`${progress.refused_names} values have names beyond those that are kept, and were left out.`);
    setText(reading, parts.join(" "));
  }
}

// The cause without what it says in brackets; the whole stands below.
function headline(cause) {
  const end = cause.indexOf(" (");
  return cause.length > 120 ? `${cause.slice(0, end > 0 && end < 120 ? end : 120)} …` : cause;
}

function drawDeath() {
  const run = first();
  const box = byId("death");
  const death = run.death;
  box.hidden = !death || currentView() !== "overview";
  if (!death) return;
  const key = JSON.stringify([run.run, death]);
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  const facts = [];
  if (headline(death.cause) !== death.cause) facts.push(el("dt", {}, "In full"), el("dd", {}, death.cause));
  if (death.part) facts.push(el("dt", {}, "Part"), el("dd", {}, el("code", {}, death.part)));
  if (death.waited) facts.push(el("dt", {}, "Waiting for it"), el("dd", {}, `${death.waited}.`));
  if (death.did.length) facts.push(el("dt", {}, "It did last"), el("dd", {}, death.did.map((span) => {
    const of = Object.entries(span.attrs).filter(([, v]) => typeof v !== "object").map(([k, v]) => ` ${k} ${v}`).join(",");
    return el("div", {}, `${new Date(1000 * span.end).toLocaleTimeString("en-GB")} ${span.name}${of}`);
  })));
  for (const wait of death.waits) facts.push(el("dt", {}, wait.part), el("dd", {}, `its last wait was for ${wait.for}`));
  if (death.advice) facts.push(el("dt", {}, "To go on"), el("dd", {}, el("code", {}, death.advice)));
  fill(box, el("h2", { id: "death-title" }, "What it died of"), el("dl", {}, facts),
    death.log.length ? [el("h3", {}, `Last lines of ${death.log_file}`),
      el("pre", { tabindex: "0", "aria-label": `Last lines of ${death.log_file}` }, death.log.join("\n"))]
      : el("p", {}, death.log_file ? `${death.log_file} is empty: it was killed from outside, or died before it could say why.` : "No log of this part was found."));
  const log = box.querySelector("pre");
  if (log) log.scrollTop = log.scrollHeight;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function draw(force) {
  if (!state.runs.length) return;
  drawRuns();
  drawStages();
  drawTop();
  drawDeath();
  const name = currentView();
  for (const view of VIEWS) {
    byId(view).hidden = view !== name;
    const link = document.querySelector(`.tabs a[href="#/${view}"]`);
    if (view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  viewOf[name].show(selection(), Boolean(force));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const button = byId("theme");
  button.setAttribute("aria-pressed", String(theme === "dark"));
  button.textContent = theme === "dark" ? "Light" : "Dark";
  button.setAttribute("aria-label", theme === "dark" ? "Switch to light colours" : "Switch to dark colours");
  for (const view of Object.values(viewOf)) view.recolor();
}

byId("stage").addEventListener("change", (event) => { state.stage = event.target.value; draw(true); });
byId("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("leeway-theme", theme);
  setTheme(theme);
});
window.addEventListener("hashchange", () => draw(true));
document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(true); });

const preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
setTheme(localStorage.getItem("leeway-theme") || preferred);
ask("words").then((words) => { charts.words = words; draw(true); });
listen((runs) => {
  const isFirst = !state.runs.length;
  state.runs = runs;
  if (isFirst && runs.length > 1) state.shown = new Set(runs.slice(0, 6).map((run) => run.run));
  document.title = `${first().name}: ${first().state_text} – leeway watch`;
  draw(isFirst);
}, () => {
  if (state.runs.length) fill(byId("state"), el("span", { class: "badge dead" }, "not connected"), " the server does not answer; the page shows what it last said");
});

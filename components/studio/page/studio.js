// The form of a config: what the schema says, what the validator answers. All text is data, set as text.
import { byId, el, fill } from "./dom.js";

const CHECK_AFTER_MS = 400;
const LOOK_EVERY_MS = 2000;
const state = { form: null, config: "", changed: new Map(), settings: {}, asked: 0, recipe: null };

async function ask(path, content) {
  const options = { credentials: "same-origin" };
  if (content !== undefined) {
    Object.assign(options, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) });
  }
  const answer = await fetch(`/api/${path}`, options);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || `the server answered ${answer.status}`);
  return found;
}

const overrides = () => [...state.changed].map(([key, value]) => `${key}=${value}`);

function written(value) {
  if (value === undefined) return "";
  if (typeof value === "string") return value;
  return value === null ? "null" : JSON.stringify(value);
}

function input(setting, id) {
  const now = written(state.settings[setting.key]);
  const own = state.changed.get(setting.key);
  const choices = setting.kind === "switch" ? ["true", "false"] : setting.choices.map(written);
  if (!choices.length) {
    return el("input", { id, value: own ?? "", placeholder: now, inputmode: setting.kind === "number" ? "decimal" : null,
      "aria-describedby": `${id}-says`, oninput: (event) => change(setting.key, event.target.value) });
  }
  if (setting.may_be_null) choices.push("null");
  const options = choices.map((choice) => el("option", { value: choice, selected: choice === own }, choice));
  return el("select", { id, "aria-describedby": `${id}-says`, onchange: (event) => change(setting.key, event.target.value) },
    el("option", { value: "" }, now === "" ? "as it is" : `as it is: ${now}`), options);
}

function drawForm() {
  const words = byId("find").value.trim().toLowerCase();
  const all = byId("expert").checked;
  const sections = state.form.sections.map((section) => {
    const shown = section.settings.filter((s) =>
      (words ? `${s.key} ${s.says}`.toLowerCase().includes(words) : all || s.is_first || state.changed.has(s.key)));
    if (!shown.length) return null;
    return el("fieldset", {}, el("legend", {}, section.name || "the run"), el("p", { class: "section-says" }, section.says),
      shown.map((setting) => {
        const id = `set-${setting.key}`;
        return el("div", { class: `setting${state.changed.has(setting.key) ? " changed" : ""}`, "data-key": setting.key },
          el("label", { for: id }, setting.key), input(setting, id), el("p", { id: `${id}-says` }, setting.says));
      }));
  });
  fill(byId("form"), sections);
  if (!byId("form").childElementCount) fill(byId("form"), el("p", {}, "No setting has these words."));
}

function change(key, value) {
  if (value === "") state.changed.delete(key);
  else state.changed.set(key, value);
  document.querySelector(`[data-key="${CSS.escape(key)}"]`)?.classList.toggle("changed", state.changed.has(key));
  clearTimeout(state.timer);
  byId("run").disabled = true;
  byId("says").textContent = "Checking …";
  byId("says").className = "";
  state.timer = setTimeout(() => check(false), CHECK_AFTER_MS);
}

async function check(whole) {
  const number = ++state.asked;
  let found;
  try {
    found = await ask("check", { config: state.config, overrides: overrides(), whole });
  } catch (error) {
    found = { ok: false, refused: [error.message], key: null };
  }
  if (number === state.asked) verdict(found, whole);
}

function verdict(found, whole) {
  document.querySelectorAll(".setting.refused").forEach((node) => node.classList.remove("refused"));
  byId("says").className = found.ok ? "good" : "bad";
  byId("run").disabled = !found.ok || found.lacks.length > 0;
  if (!found.ok) {
    byId("says").textContent = found.refused.join("\n");
    fill(byId("numbers"));
    const key = (found.key || "").replace(/^stages\.[^.]+\./, "");
    document.querySelector(`[data-key="${CSS.escape(key)}"]`)?.classList.add("refused");
    return;
  }
  state.recipe = found.recipe;
  const lacks = found.lacks.length ? ` This machine cannot run it: ${found.lacks.join("; ")}` : "";
  byId("says").textContent = `The settings are right${whole ? ", data and models too" : ""}.${lacks}`;
  byId("command").textContent = found.command;
  const notes = [...found.notes, ...found.code].map((note) => el("li", {}, note));
  fill(byId("numbers"), notes.length ? el("ul", {}, notes) : null, found.stages.map((stage) =>
    el("table", {}, el("caption", {}, `${stage.name} (${stage.recipe})`),
      el("tbody", {}, stage.rows.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)))))));
  fill(byId("diff"), found.diff.length ? found.diff.map((line) =>
    el("span", { class: line[0] === "+" ? "added" : line[0] === "-" ? "removed" : "" }, `${line}\n`)) : "Nothing yet.");
  byId("yaml").textContent = found.yaml;
  URL.revokeObjectURL(byId("save").href);
  byId("save").href = URL.createObjectURL(new Blob([found.yaml], { type: "text/yaml" }));
  if (!state.changed.size && Object.keys(state.settings).length === 0) {
    state.settings = found.settings;
    drawForm();
  }
}

async function start() {
  byId("run").disabled = true;
  try {
    await ask("run", { config: state.config, recipe: state.recipe, overrides: overrides() });
    await look();
  } catch (error) {
    byId("says").className = "bad";
    byId("says").textContent = error.message;
  }
}

async function look() {
  const runs = await ask("runs");
  byId("started").hidden = !runs.length;
  fill(byId("runs"), runs.map((run) => el("article", {}, el("p", {}, el("strong", {}, run.status), ` ${run.path}`),
    el("pre", { tabindex: "0", "aria-label": `Last lines of ${run.path}` }, run.last.join("\n")))));
  clearTimeout(state.looking);
  if (runs.some((run) => run.status === "running")) state.looking = setTimeout(look, LOOK_EVERY_MS);
}

function begin(config) {
  Object.assign(state, { config, changed: new Map(), settings: {} });
  drawForm();
  check(false);
}

async function main() {
  state.form = await ask("form");
  const names = state.form.presets.map((preset) => preset.name);
  if (!names.includes(state.form.config)) names.unshift(state.form.config);
  fill(byId("preset"), names.map((name) => el("option", { value: name, selected: name === state.form.config }, name)));
  byId("preset").addEventListener("change", (event) => begin(event.target.value));
  byId("find").addEventListener("input", drawForm);
  byId("expert").addEventListener("change", drawForm);
  byId("form").addEventListener("submit", (event) => event.preventDefault());
  byId("whole").addEventListener("click", () => { byId("says").textContent = "Checking …"; check(true); });
  byId("run").addEventListener("click", start);
  begin(state.form.config);
  await look();
}

main().catch((error) => { byId("says").textContent = error.message; });

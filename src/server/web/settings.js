// settings.js - what a person chooses for requests. An empty field leaves the choice to the server.

import { $ } from "./dom.js";
import { readSettings, writeSettings } from "./store.js";

const form = () => $("settings-form");
const DEFAULTS = { think: "on" };
let settings = {};

const number = (name) => (settings[name] === undefined ? undefined : Number(settings[name]));

/** Fields of a request body, and the system prompt. */
export function requestSettings() {
  const { think, effort, system } = settings;
  return {
    system: system?.trim(),
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    // The server repeats itself without a seed; here it should not.
    seed: number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0],
    draft_tokens: number("draft_tokens"),
    thinking: think && { type: think === "on" ? "enabled" : "disabled" },
    reasoning_effort: think === "off" ? undefined : effort,
  };
}

/** The two switches beside the box: "think" and "tools". */
export const toggled = (name) => settings[name] === "on";

export function toggle(name, on) {
  if (on) settings[name] = "on";
  else if (name === "think") settings.think = "off";
  else delete settings[name];
  keep();
}

function keep() {
  writeSettings(settings);
  for (const name of ["think", "tools"]) {
    $(name).setAttribute("aria-pressed", String(toggled(name)));
  }
  for (const field of form().elements) {
    if (field.name) field.value = settings[field.name] ?? "";
  }
}

function changed({ target }) {
  if (!target.name || !target.checkValidity()) return;
  if (target.value === "") delete settings[target.name];
  else settings[target.name] = target.value;
  writeSettings(settings);
  $("think").setAttribute("aria-pressed", String(toggled("think")));
}

export function startSettings() {
  settings = readSettings() ?? { ...DEFAULTS };
  keep();
  form().addEventListener("input", changed);
  for (const name of ["think", "tools"]) {
    $(name).addEventListener("click", () => toggle(name, !toggled(name)));
  }
  $("settings-reset").addEventListener("click", () => {
    settings = { ...DEFAULTS };
    keep();
  });
  $("settings-open").addEventListener("click", () => $("settings").showModal());
}

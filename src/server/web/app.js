// app.js - the frame around the two views: which is shown, theme, dialogs, keys that work anywhere.

import { cancelEdit, startChat, stop } from "./chat.js";
import { $ } from "./dom.js";
import { showEngine } from "./engine.js";
import { request, setKey } from "./net.js";
import { startSettings } from "./settings.js";

const VIEWS = ["chat", "engine", "both"];

function showView() {
  const wanted = location.hash.slice(1);
  const view = VIEWS.includes(wanted) ? wanted : "chat";
  document.body.dataset.view = view;
  document.title = view === "engine" ? "Engine – hadal" : "hadal";
  for (const name of VIEWS) {
    const tab = $(`tab-${name}`);
    if (name === view) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  showSide(false);
  watch();
}

/** The engine is watched only while somebody can see it. */
function watch() {
  showEngine(document.body.dataset.view !== "chat" && document.visibilityState === "visible");
}

async function showModel() {
  try {
    const list = await (await request("v1/models")).json();
    const name = list.data?.[0]?.id ?? "";
    $("model").textContent = name;
    $("model").title = name;
    $("greeting-model").textContent = name || "the model";
  } catch (error) {
    const refused = error.status === 401;
    $("model").textContent = !refused ? "not connected" : error.keyed ? "wrong API key" : "API key needed";
    if (refused || (error.status === 429 && error.keyed)) askForKey(error);
  }
}

/** refusal: why the key that is there will not do. */
function askForKey(refusal) {
  const wrong = Boolean(refusal?.keyed);
  $("key-said").textContent = !wrong ? "" : refusal.status === 401 ? "The server does not accept this key." : refusal.message;
  $("key").setAttribute("aria-invalid", String(wrong));
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

function startKey() {
  $("key-form").addEventListener("submit", () => {
    setKey($("key").value);
    $("key").value = "";
    showModel();
    showEngine(false);
    watch();
  });
  $("key-open").addEventListener("click", () => {
    $("settings").close();
    askForKey();
  });
}

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function startTheme() {
  const button = $("theme");
  const describe = () => button.setAttribute("aria-pressed", String(isDark()));
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("hadal.theme", theme);
    } catch {
      // Chosen for this page only.
    }
    describe();
    document.dispatchEvent(new Event("hadal-theme"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    describe();
    document.dispatchEvent(new Event("hadal-theme"));
  });
  describe();
}

function showSide(open) {
  document.body.classList.toggle("side-open", open);
  $("menu").setAttribute("aria-expanded", String(open));
  $("main").inert = open;
  if (open) $("new").focus();
}

function startSide() {
  $("menu").addEventListener("click", () => showSide(!document.body.classList.contains("side-open")));
  $("shade").addEventListener("click", () => showSide(false));
}

/** Esc closes what is on top, else it leaves the edit, else it stops the answer. */
function escape(event) {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("side-open")) {
    showSide(false);
    $("menu").focus();
  } else if (!cancelEdit()) {
    stop();
  }
}

for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog || event.target.closest("[data-close]")) dialog.close();
  });
}
addEventListener("hashchange", showView);
addEventListener("keydown", escape);
document.addEventListener("visibilitychange", watch);
startTheme();
startSide();
startKey();
startSettings();
startChat(askForKey, () => showSide(false));
showView();
showModel();

// files.js - text files that go with a question: dropped, pasted or chosen.

import { $, bytes, el } from "./dom.js";

const MOST_FILES = 10;
const MOST_BYTES = 256 * 1024; // of all files of a question

let files = []; // {name, text} of the question that is being written

export const attached = () => files;

/** The content of a message: the words, and each file in a fence that its text cannot end. */
export function withFiles(text, list = []) {
  const parts = list.map(({ name, text: inside }) => {
    const longest = (inside.match(/`{3,}/g) ?? []).reduce((most, { length }) => Math.max(most, length), 2);
    const fence = "`".repeat(longest + 1);
    return `File ${JSON.stringify(name)}:\n${fence}\n${inside.replace(/\n?$/, "\n")}${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

const sizeOf = ({ text }) => new Blob([text]).size;
const size = (file) => bytes(sizeOf(file));

/** The files of a question that was sent, each folded. */
export function filesView(list) {
  return list.map((file) =>
    el("details", { class: "file" }, el("summary", null, file.name, " ", el("span", { class: "muted small" }, size(file))), el("pre", { tabindex: 0 }, file.text)),
  );
}

function draw() {
  const chips = files.map((file) => {
    const remove = el("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}` }, "×");
    remove.addEventListener("click", () => {
      attach(files.filter((other) => other !== file));
      $("prompt").focus();
    });
    return el("li", null, file.name, " ", el("span", { class: "muted small" }, size(file)), remove);
  });
  $("files").replaceChildren(...chips);
  $("files").hidden = !files.length;
}

export function attach(list) {
  files = list;
  $("files-said").textContent = "";
  draw();
}

/** The text of a file; throws a sentence. */
async function read(file, room) {
  if (file.size > room) throw new Error(`${file.name} is too large: all files of a question have ${bytes(MOST_BYTES)}.`);
  let text = "\0";
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    // Not UTF-8, or it cannot be read.
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text file.`);
  return { name: file.name || "pasted.txt", text };
}

async function add(list) {
  const said = [];
  const taken = [...files];
  for (const file of list) {
    try {
      if (taken.length >= MOST_FILES) throw new Error(`A question takes ${MOST_FILES} files.`);
      taken.push(await read(file, MOST_BYTES - taken.reduce((sum, one) => sum + sizeOf(one), 0)));
    } catch (error) {
      said.push(error.message);
    }
  }
  attach(taken);
  $("files-said").textContent = said.join(" ");
  $("prompt").focus();
}

export function startFiles() {
  const view = $("view-chat");
  const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
  const mark = (on) => view.classList.toggle("dropping", on);
  view.addEventListener("dragover", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    mark(true);
  });
  view.addEventListener("dragleave", (event) => {
    if (!view.contains(event.relatedTarget)) mark(false);
  });
  view.addEventListener("drop", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    mark(false);
    add([...event.dataTransfer.files]);
  });
  $("prompt").addEventListener("paste", (event) => {
    const { clipboardData: pasted } = event;
    if (!pasted?.files.length || pasted.types.includes("text/plain")) return;
    event.preventDefault();
    add([...pasted.files]);
  });
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => {
    add([...$("file").files]);
    $("file").value = "";
  });
}

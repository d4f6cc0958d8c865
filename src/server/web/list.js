// list.js - the conversations at the side: finding, choosing, renaming, saving to files, deleting.

import { download, fileName, fromJson, toJson, toMarkdown } from "./archive.js";
import { $, el } from "./dom.js";
import { deleteChat, listChats, loadChat, renameChat, saveChat } from "./store.js";

const LARGEST = 1 << 20; // bytes of a file that is read in; the storage has about five times that

let current = ""; // the id of the open one
let shown = ""; // the id of the one in the dialog
let on = { open() {}, renamed() {}, deleted() {} };

/** Whether a conversation has the words, in its title or in what was said. */
function has({ id, title }, words) {
  if (!words || title.toLowerCase().includes(words)) return true;
  const said = ({ content, files = [] }) => [content, ...files.map(({ name }) => name)].join("\n");
  return Boolean(loadChat(id)?.messages.some((message) => said(message).toLowerCase().includes(words)));
}

function item({ id, title }) {
  const remove = el("button", { type: "button", class: "quiet", "aria-label": `Delete ${title}` }, "×");
  let asked = false;
  remove.addEventListener("blur", () => {
    asked = false;
    remove.textContent = "×";
  });
  remove.addEventListener("click", () => {
    if (!asked) {
      asked = true;
      remove.textContent = "Delete?";
      return;
    }
    deleteChat(id);
    on.deleted(id);
    drawList();
    $("new").focus();
  });
  const more = el("button", { type: "button", class: "quiet", "aria-label": `Rename or save ${title}` }, "⋯");
  more.addEventListener("click", () => showDialog(id, title));
  const choose = el("button", { type: "button", class: "choose", "aria-current": id === current ? "true" : null }, title);
  choose.addEventListener("click", () => on.open(id));
  return el("li", null, choose, more, remove);
}

export function drawList(open = current) {
  current = open;
  const words = $("search").value.trim().toLowerCase();
  const all = listChats();
  const found = all.filter((chat) => has(chat, words));
  $("chats").replaceChildren(...found.map(item));
  $("search").hidden = all.length < 2 && !words;
  $("found").textContent = words && !found.length ? "Nothing found." : "";
}

// ---- one conversation ----

function showDialog(id, title) {
  shown = id;
  $("chat-title").value = title;
  $("chat-dialog").showModal();
}

function save(ending, type, write) {
  const chat = loadChat(shown);
  if (chat) download(fileName(chat.title, ending), type, write(chat));
}

function rename() {
  const title = $("chat-title").value.trim();
  if (!title) return;
  renameChat(shown, title);
  on.renamed(shown, title);
  drawList();
}

async function readIn(file) {
  let said = "";
  try {
    if (file.size > LARGEST) throw new Error("The file is too large.");
    const chat = fromJson(await file.text());
    saveChat(chat);
    on.open(chat.id);
  } catch (error) {
    said = `${file.name}: ${error.message}`;
  }
  $("import-said").textContent = said;
}

export function startList(callbacks) {
  on = callbacks;
  $("search").addEventListener("input", () => drawList());
  $("chat-form").addEventListener("submit", rename);
  $("save-markdown").addEventListener("click", () => save("md", "text/markdown", toMarkdown));
  $("save-json").addEventListener("click", () => save("json", "application/json", toJson));
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", () => {
    if ($("import-file").files.length) readIn($("import-file").files[0]);
    $("import-file").value = "";
  });
  addEventListener("storage", () => drawList());
}

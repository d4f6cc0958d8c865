// archive.js - conversations as files: Markdown to read, JSON to read back in.

import { withFiles } from "./files.js";
import { newChat } from "./store.js";

const FORMAT = "hadal conversation";
const ROLES = new Set(["user", "assistant", "tool"]);

const quoted = (text) => text.replace(/^/gm, "> ");

export function toMarkdown({ title, messages }) {
  const parts = [`# ${title || "Conversation"}`];
  for (const { role, content, reasoning, calls, files } of messages) {
    if (role === "user") parts.push("## Question", withFiles(content, files));
    else if (role === "tool") parts.push(`Tool result: \`${content}\``);
    else {
      parts.push("## Answer");
      if (reasoning) parts.push(quoted(reasoning));
      if (content) parts.push(content);
      for (const call of calls ?? []) parts.push(`Tool call: \`${call.name} ${call.arguments}\``);
    }
  }
  return parts.join("\n\n") + "\n";
}

export const toJson = ({ title, messages }) => JSON.stringify({ format: FORMAT, version: 1, title, messages }, null, 2) + "\n";

const text = (value) => (typeof value === "string" ? value : "");

/** A message with known fields only: the file may come from anywhere. */
function message(given) {
  if (!ROLES.has(given?.role)) throw new Error("It has a message without a known role.");
  const { role, content, id, reasoning, calls, files, usage, finish, ttft, took, thought } = given;
  const kept = { role, content: text(content) };
  if (role === "tool") return { ...kept, id: text(id) };
  if (role === "user") {
    const list = (Array.isArray(files) ? files : []).map((file) => ({ name: text(file?.name), text: text(file?.text) }));
    return list.length ? { ...kept, files: list } : kept;
  }
  kept.reasoning = text(reasoning);
  kept.calls = (Array.isArray(calls) ? calls : []).map((call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) }));
  for (const [name, value] of Object.entries({ ttft, took, thought })) if (Number.isFinite(value)) kept[name] = value;
  if (usage && typeof usage === "object") kept.usage = usage;
  kept.finish = text(finish);
  return kept;
}

/** A new conversation from a file that toJson wrote; throws a sentence. */
export function fromJson(source) {
  let given;
  try {
    given = JSON.parse(source);
  } catch {
    throw new Error("This is not JSON.");
  }
  if (given?.format !== FORMAT || !Array.isArray(given.messages)) throw new Error("This is not a conversation that was saved here.");
  return { ...newChat(), title: text(given.title).slice(0, 200) || "Imported", messages: given.messages.map(message) };
}

/** Hands a text to the browser as a file. */
export function download(name, type, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

export const fileName = (title, ending) => `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation"}.${ending}`;

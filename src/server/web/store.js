// store.js - what the browser remembers: settings, and conversations, each under its own key.

const SETTINGS = "hadal.settings";
const INDEX = "hadal.chats";
const chatKey = (id) => `hadal.chat.${id}`;
const MOST_CHATS = 100;

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false; // full or forbidden
  }
}

function forget(key) {
  try {
    localStorage.removeItem(key);
  } catch {
    // Nothing was stored then.
  }
}

export const readSettings = () => read(SETTINGS, null);
export const writeSettings = (settings) => write(SETTINGS, settings);

/** [{id, title, at}], the newest first. */
export function listChats() {
  const list = read(INDEX, []);
  return Array.isArray(list) ? list.filter((chat) => typeof chat?.id === "string") : [];
}

/** {id, title, messages}; the messages are those of the API with what the page shows beside. */
export function newChat() {
  const id = Array.from(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36));
  return { id: id.join(""), title: "", messages: [] };
}

export function loadChat(id) {
  const chat = read(chatKey(id), null);
  return Array.isArray(chat?.messages) ? { ...newChat(), ...chat, id } : null;
}

/** Saves; where room is short, the oldest other conversations go. */
export function saveChat(chat) {
  const list = listChats().filter((other) => other.id !== chat.id);
  list.unshift({ id: chat.id, title: chat.title, at: Date.now() });
  while (list.length > MOST_CHATS) forget(chatKey(list.pop().id));
  while (!write(chatKey(chat.id), chat)) {
    if (list.length <= 1) return;
    forget(chatKey(list.pop().id));
  }
  write(INDEX, list);
}

/** A new title; the place among the others stays. */
export function renameChat(id, title) {
  const chat = loadChat(id);
  if (!chat || !write(chatKey(id), { ...chat, title })) return;
  write(INDEX, listChats().map((other) => (other.id === id ? { ...other, title } : other)));
}

export function deleteChat(id) {
  forget(chatKey(id));
  write(INDEX, listChats().filter((chat) => chat.id !== id));
}

/** The conversation of this tab, so that a reload comes back to it and a new tab starts afresh. */
export function remember(id) {
  try {
    sessionStorage.setItem(INDEX, id);
  } catch {
    // A reload starts afresh then.
  }
}

export function remembered() {
  try {
    return sessionStorage.getItem(INDEX);
  } catch {
    return null;
  }
}

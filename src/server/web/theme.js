// theme.js - sets the chosen theme before anything is drawn; runs in the head, not as a module.
"use strict";
try {
  const theme = localStorage.getItem("hadal.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden; then the system's theme stands.
}

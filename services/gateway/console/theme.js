// Light, dark, or as the system has it. Loaded before the first paint, so that the page does not flash.

const KEY = "millrace.theme";
const NEXT = { system: "light", light: "dark", dark: "system" };

const chosen = () => (localStorage.getItem(KEY) in NEXT ? localStorage.getItem(KEY) : "system");

const apply = (theme) => (document.documentElement.dataset.theme = theme);

apply(chosen());

/** Makes a button that goes through the themes. */
export function bindTheme(button) {
  const label = () => (button.textContent = `Theme: ${chosen()}`);
  button.addEventListener("click", () => {
    localStorage.setItem(KEY, NEXT[chosen()]);
    apply(chosen());
    label();
  });
  label();
}

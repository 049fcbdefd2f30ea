// The page's start: a login while there is no token, else the view that the address names.
//
//   #/jobs · #/jobs/<id> · #/jobs/<id>/samples|events|spec · #/compare/<id>,<id> · #/chat/<id> · #/workers · #/submit
//
// A view is a function (place, signal, ...parts of the address): it fills the place, and stops when the signal is aborted.

import { address } from "./address.js";
import { showChat } from "./chat.js";
import { showCompare } from "./compare.js";
import { say } from "./dom.js";
import { showJob } from "./job.js";
import { showJobs } from "./jobs.js";
import { showLogin } from "./login.js";
import { session } from "./session.js";
import { showSubmit } from "./submit.js";
import { bindTheme } from "./theme.js";
import { showWorkers } from "./workers.js";

const VIEWS = { jobs: showJobs, compare: showCompare, chat: showChat, workers: showWorkers, submit: showSubmit };
const BELOW = { compare: "jobs" }; // views that belong to another one of the menu
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const signOut = document.getElementById("sign-out");
let leaving = new AbortController();

/** Shows what the address names; with `moved`, the reader's focus goes there too. */
function show(moved = true) {
  leaving.abort();
  leaving = new AbortController();
  const open = session.token !== null;
  nav.hidden = signOut.hidden = !open;
  const { parts } = address();
  const [view, ...rest] = open && VIEWS[parts[0]] ? parts : ["jobs"];
  for (const link of nav.children) {
    if (link.hash === `#/${BELOW[view] ?? view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.replaceChildren();
  main.removeAttribute("class");
  if (!open) showLogin(main, leaving.signal);
  else if (view === "jobs" && rest.length) showJob(main, leaving.signal, ...rest);
  else VIEWS[view](main, leaving.signal, ...rest);
  document.title = `${main.querySelector("h1")?.textContent ?? "Console"} · Millrace`;
  if (moved && open) main.querySelector("h1")?.focus();
  scrollTo(0, 0);
}

bindTheme(document.getElementById("theme"));
signOut.addEventListener("click", () => session.end("You have signed out."));
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
session.addEventListener("begun", () => show());
session.addEventListener("ended", ({ detail }) => {
  show();
  say(document.getElementById("login-message"), detail);
});
addEventListener("hashchange", () => show());
show(false);

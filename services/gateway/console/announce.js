// What screen readers are told of changes, in one polite live region.

import { say } from "./dom.js";

export const announce = (text) => say(document.getElementById("announcer"), text);

// Whether the gateway answers: one banner for the whole page.

import { say } from "./dom.js";

const banner = document.getElementById("banner");

export const connection = {
  lost(message) {
    banner.hidden = false;
    say(banner, message);
  },
  found() {
    banner.hidden = true;
  },
};

// A job's step records and evaluations: read once, then kept up with from its events.

import { jobPath, request } from "./api.js";
import { poll } from "./poll.js";
import { events } from "./stream.js";

const MOST = 10_000;
const OVERLAP_MS = 600_000; // events are counted by Redis's clock, and the time comes from the gateway's

/** Steps and evaluations in order; a record that comes twice counts once. */
export class History {
  #steps = new Map();
  #evals = new Map();

  /** Reads what there is, calls `changed`, and then calls it for each event that adds something, until the job ends. */
  async follow(id, signal, changed) {
    let after;
    await poll(signal, 2, async () => {
      const response = await request(jobPath(id, `/metrics?limit=${MOST}`), { signal });
      const { steps, evals } = await response.json();
      this.#add(steps, evals);
      after = `${(Date.parse(response.headers.get("Date")) || OVERLAP_MS) - OVERLAP_MS}-0`;
      return true;
    });
    if (signal.aborted) return;
    changed();
    for await (const { kind, data } of events(jobPath(id, "/events"), { after, signal })) {
      if (kind === "step") this.#add([data], []);
      else if (kind === "eval") this.#add([], [data]);
      else continue;
      changed();
    }
  }

  get steps() {
    return inOrder(this.#steps);
  }

  get evals() {
    return inOrder(this.#evals);
  }

  #add(steps, evals) {
    for (const record of steps) this.#steps.set(record.step, record);
    for (const record of evals) this.#evals.set(record.step, record);
  }
}

const inOrder = (records) => [...records.values()].sort((a, b) => a.step - b.step);

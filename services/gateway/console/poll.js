// Asking again and again, as long as a view is shown and somebody can see it.

/** A pause that an abort ends early. */
export const sleep = (seconds, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });

/** Runs `action` now and every so many seconds, until it returns true or the view goes; a failure is tried again. */
export async function poll(signal, seconds, action) {
  while (!signal.aborted) {
    try {
      if (!document.hidden && (await action())) return;
    } catch (error) {
      if (signal.aborted || error.status === 401) return; // the login is shown by now
      if (error.status && !error.passing) throw error;
    }
    await sleep(seconds, signal);
  }
}

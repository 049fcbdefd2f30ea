// The token that was typed in: kept for this tab only, and forgotten when the gateway refuses it.

const KEY = "millrace.token";

class Session extends EventTarget {
  get token() {
    return sessionStorage.getItem(KEY);
  }

  begin(token) {
    sessionStorage.setItem(KEY, token);
    this.dispatchEvent(new Event("begun"));
  }

  /** Forgets the token; `reason` is shown at the login. */
  end(reason = "") {
    if (this.token === null) return;
    sessionStorage.removeItem(KEY);
    this.dispatchEvent(new CustomEvent("ended", { detail: reason }));
  }
}

export const session = new Session();

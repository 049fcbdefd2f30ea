// The address of a view: #/view/part/part?name=value

/** What stands behind the `#`: the parts of the path, and the query. */
export function address() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query) };
}

/** Writes the query of the view that is shown, without leaving it. */
export function remember(query) {
  const [path] = (location.hash || "#/jobs").split("?");
  history.replaceState(null, "", query.size ? `${path}?${query}` : path);
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

// Where a setting stands in a text: JSON laid out over lines, or YAML in block style.

/** The line (from 0) of a dotted path, or of the deepest part of it that is there; null when none is. */
export function lineOf(text, path) {
  const lines = text.split("\n");
  let [from, indent, found] = [0, -1, null];
  for (const part of path.split(".")) {
    const line = child(lines, from, indent, part);
    if (line === null) return found;
    [found, from, indent] = [line, line + 1, indentOf(lines[line])];
  }
  return found;
}

/** The line that an error message of a parser names. */
export function lineIn(message) {
  const named = /\bline (\d+)/.exec(message);
  return named ? Number(named[1]) - 1 : null;
}

/** The line of a key among the children of what is indented by `indent` and ends before line `from`. */
function child(lines, from, indent, key) {
  const wanted = new RegExp(`^\\s*["']?${key.replace(/[^\w-]/g, "\\$&")}["']?\\s*:`);
  let depth = null;
  for (let n = from; n < lines.length; n++) {
    if (!/[^\s{}[\],]/.test(lines[n])) continue;
    const here = indentOf(lines[n]);
    if (here <= indent) return null;
    depth ??= here;
    if (here === depth && wanted.test(lines[n])) return n;
  }
  return null;
}

const indentOf = (line) => line.length - line.trimStart().length;

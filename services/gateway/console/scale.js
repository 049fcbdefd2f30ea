// From values to places on a chart's axes.

/** Round values that cover a range, about `wanted` of them: 0, 0.2, 0.4, … */
export function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
  return found;
}

/** A line through two pairs: value → place. */
export const linear = ([low, high], [from, to]) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);

/** The range of some values with a little air; with `zero`, from 0; with `most`, up to that. Flat data get a range of their own size. */
export function extent(values, { zero = false, most = null } = {}) {
  let [low, high] = values.length ? [least(values), -least(values.map((value) => -value))] : [0, 1];
  if (zero) low = Math.min(0, low);
  const air = (high - low || Math.abs(high) || 1) * 0.06;
  return [zero && low === 0 ? 0 : low - air, most === null ? high + air : Math.min(Math.max(most, high), high + air)];
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);

/** The values between the lowest and the highest `share` of them; all, where they are few. */
export function middle(values, share = 0.01) {
  if (values.length < 50) return values;
  const sorted = [...values].sort((a, b) => a - b);
  const cut = Math.ceil(values.length * share);
  return sorted.slice(cut, -cut);
}

/** Exponential moving average over about `span` points, unbiased at the beginning. */
export function smooth(points, span) {
  const keep = 1 - 2 / (span + 1);
  let [sum, weight] = [0, 0];
  return points.map(([x, y]) => {
    [sum, weight] = [sum * keep + y, weight * keep + 1];
    return [x, sum / weight];
  });
}

/** At most two points for each of `columns` places, the lowest and the highest there, so that no peak is lost. */
export function thin(points, columns) {
  if (points.length <= 2 * columns) return points;
  const kept = [];
  for (let column = 0; column < columns; column++) {
    const part = points.slice(Math.floor((column * points.length) / columns), Math.floor(((column + 1) * points.length) / columns));
    const low = part.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = part.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

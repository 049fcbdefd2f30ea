// Figures and times as people read them.

const NONE = "–";

/** A figure with about three significant digits: 0.0123, 4.56, 1,234, 12.3k. */
export function figure(value) {
  if (!Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size >= 100 || (Number.isInteger(value) && size < 1e4)) return Math.round(value).toLocaleString("en");
  if (size >= 10) return value.toFixed(1);
  if (size >= 0.1) return value.toFixed(size >= 1 ? 2 : 3);
  return size >= 1e-4 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

/** A round number as it is written on an axis: 0.25, 50, 12k. */
export const round = (value) => (Math.abs(value) >= 1e4 ? `${Number((value / 1e3).toPrecision(4))}k` : String(value).replace("-", "−"));

/** A whole number with thousands separated. */
export const count = (value) => (Number.isFinite(value) ? Math.round(value).toLocaleString("en") : NONE);

/** A share as per cent: 12.3 %. */
export const percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %` : NONE);

/** Seconds as two units: 42 s, 5 min 54 s, 3 h 07 min, 2 d 4 h. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return NONE;
  const whole = Math.max(0, Math.round(seconds));
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  return minutes ? `${minutes} min ${String(whole % 60).padStart(2, "0")} s` : `${whole} s`;
}

/** Unix seconds as local date and time: 2026-11-21 13:42:05. */
export function moment(at) {
  if (!Number.isFinite(at)) return NONE;
  const date = new Date(at * 1000);
  const two = (number) => String(number).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** Unix seconds as the time that has passed since: 12 s ago. */
export const ago = (at) => (Number.isFinite(at) ? `${duration(Date.now() / 1000 - at)} ago` : NONE);

/** Policy versions of a rollout: v17, or v16–17 when it was sampled over a change of weights. */
export const versions = (oldest, newest) => (oldest === newest ? `v${newest}` : `v${oldest}–${newest}`);

/** A score with its standard error, where it has one: 0.412 ± 0.021. */
export const score = (value, error) =>
  Number.isFinite(value) ? `${value.toFixed(3)}${Number.isFinite(error) ? ` ± ${error.toFixed(3)}` : ""}` : NONE;

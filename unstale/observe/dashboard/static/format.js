// Numbers as text, as on the report (report/words.py).

export const NONE = "—";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function amount(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size && size < 1e-4) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

export const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-US") : NONE);

export function percent(share, digits = 0) {
  if (!isNumber(share)) return NONE;
  if (!digits && ((share > 0 && share < 0.01) || (share > 0.99 && share < 1))) digits = 1;
  return `${(100 * share).toFixed(digits)}%`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const total = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function ago(seconds) {
  if (!isNumber(seconds)) return "";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

export const shown = (value, unit) => (unit === "share" ? percent(value, 1) : amount(value));

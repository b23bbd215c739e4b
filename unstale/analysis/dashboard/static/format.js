// Numbers as text, as on the report (report/words.py).

export const NONE = "—";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function amount(value, digits = 3) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: digits - 3 });
  if (size && size < 1e-4) return value.toExponential(digits - 2);
  return String(Number(value.toPrecision(digits)));
}

// The texts of rising numbers, rounded by at most a tenth of the smallest distance between two.
export function amounts(values) {
  const allowed = 0.1 * Math.min(...values.slice(1).map((value, index) => value - values[index]));
  const rounded = (value, digits) => Number(amount(value, digits).replaceAll(",", ""));
  let digits = 3;
  while (digits < 15 && values.some((value) => Math.abs(value - rounded(value, digits)) > allowed)) digits += 1;
  return values.map((value) => amount(value, digits));
}

export const whole = (value) => (isNumber(value) ? (Math.round(value) || 0).toLocaleString("en-US") : NONE);

export function percent(share, digits = 0) {
  if (!isNumber(share)) return NONE;
  if (!digits && ((share > 0 && share < 0.01) || (share > 0.99 && share < 1))) digits = 1;
  return `${Number((100 * share).toFixed(digits)).toFixed(digits)}%`; // twice: never -0
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

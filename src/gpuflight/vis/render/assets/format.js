/* Numbers with the unit that their name ends with; the same rules as gpuflight.vis.text. */
const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const DECIMAL = ["", "k", "M", "G", "T", "P", "E"];
const UNITS = [["_bits_per_s", "bit/s"], ["_bytes_per_s", "B/s"], ["_gt_per_s", "GT/s"], ["_per_s", "/s"], ["_hz", "Hz"], ["_watts", "W"]];

function short(size) {
  if (size >= 99.95 || Number.isInteger(size)) return size.toFixed(0);
  return size >= 9.995 ? size.toFixed(1) : String(+size.toFixed(2));
}

function scaled(value, base, names) {
  let size = Math.abs(value), step = 0;
  while (size >= base - 0.5 && step < names.length - 1) { size /= base; step++; }
  return [(value < 0 ? "-" : "") + short(size), names[step]];
}

function human(name, value) {
  if (typeof value !== "number") return plain(value);
  name = `_${name}`; // the whole name may be a unit: bytes_per_s
  if (name.endsWith("_bytes")) return scaled(value, 1024, BINARY).join(" ");
  if (name.endsWith("_pct")) return `${signed(value)} %`;
  if (name.endsWith("_celsius")) return `${signed(value)} °C`;
  if (name.endsWith("_ms")) return `${signed(value)} ms`;
  for (const [ending, unit] of UNITS) {
    if (name.endsWith(ending)) { const [size, prefix] = scaled(value, 1000, DECIMAL); return `${size} ${prefix}${unit}`; }
  }
  if (name.endsWith("_s")) return `${signed(value)} s`;
  return value.toLocaleString("en", { maximumFractionDigits: 3 }).replaceAll(",", "\u202f");
}

function signed(value) { return (value < 0 ? "-" : "") + short(Math.abs(value)); }

function plain(value) {
  if (value === null || value === undefined) return "none";
  if (Array.isArray(value)) return value.length ? value.map(plain).join(", ") : "none";
  if (typeof value === "object") return Object.entries(value).map(([key, inner]) => `${key}: ${plain(inner)}`).join(", ");
  return String(value);
}

/* "memory_used_bytes" reads "memory used": the unit stands at the number. */
const SUFFIX = /_(bits_per_s|bytes_per_s|gt_per_s|per_s|bytes|pct|celsius|ms|hz|watts|count)$/;
function nameOf(metric) { return (metric.replace(SUFFIX, "") || metric).replaceAll("_", " "); }

function counted(count, noun) {
  const text = count.toLocaleString("en").replaceAll(",", "\u202f");
  if (count === 1) return `1 ${noun}`;
  if (/(s|x|ch|sh)$/.test(noun)) return `${text} ${noun}es`;
  return `${text} ${/[^aeiou]y$/.test(noun) ? noun.slice(0, -1) + "ies" : noun + "s"}`;
}

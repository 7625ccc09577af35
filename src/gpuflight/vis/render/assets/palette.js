/* Colours of the theme in use, as the canvas needs them. */
function mix(front, back, share) {
  const parse = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const f = parse(front), b = parse(back);
  return "#" + f.map((value, at) => Math.round(value * share + b[at] * (1 - share)).toString(16).padStart(2, "0")).join("");
}

function makePalette(style, dark) {
  const read = getComputedStyle(document.documentElement);
  const css = (name) => read.getPropertyValue(name).trim();
  const palette = {
    dark, ground: css("--ground"), surface: css("--surface"), ink: css("--ink"), soft: css("--soft"), line: css("--line"),
    accent: css("--accent"), critical: css("--critical"), warn: css("--warn"), mark: css("--mark"),
    change: { added: css("--added"), removed: css("--removed"), changed: css("--changed") }, category: {}, frame: {}, edge: {}, track: {}, speck: {},
  };
  const at = dark ? 2 : 1;
  for (const [key, entry] of Object.entries(style.categories)) {
    const colour = entry[at];
    palette.category[key] = colour;
    palette.frame[key] = [mix(colour, palette.surface, 0.05), mix(colour, palette.surface, dark ? 0.5 : 0.42)];
    palette.speck[key] = mix(colour, palette.surface, 0.42);
    palette.track[key] = mix(colour, palette.surface, 0.16);
  }
  for (const [key, entry] of Object.entries(style.media)) palette.edge[key] = { colour: entry[at], dash: entry[3] ? entry[3].split(" ").map(Number) : [] };
  return palette;
}

const glyphPaths = new Map();
function glyphOf(style, kind) {
  let path = glyphPaths.get(kind);
  if (!path) glyphPaths.set(kind, path = new Path2D(style.glyphs[kind] || style.glyphs["?"]));
  return path;
}

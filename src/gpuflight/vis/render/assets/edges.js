/* Which lines are drawn now: the routes as laid out, and those that folding or a question to a box brings together. */

/* For each box the box that stands for it: the outermost folded one around it, or itself. */
function shownBoxes(boxes) {
  const shown = new Int32Array(boxes.length);
  for (let i = 0; i < boxes.length; i++) {
    const parent = boxes[i].parent;
    shown[i] = parent < 0 ? i : shown[parent] !== parent || boxes[parent].folded ? shown[parent] : i;
  }
  return shown;
}

function shownLines(model, shown, media) {
  const { boxes, links, routes } = model, lines = [], bundles = new Map();
  const bundle = (a, b, source) => {
    if (a === b || inside(boxes, a, b) || inside(boxes, b, a)) return;
    const swap = a > b, key = `${swap ? b : a} ${swap ? a : b} ${source.medium}`;
    let line = bundles.get(key);
    if (!line) {
      line = { a: swap ? b : a, b: swap ? a : b, medium: source.medium, label: "", links: [], weight: 0.3, forward: false, backward: false, severity: "", change: source.change };
      bundles.set(key, line);
      lines.push(line);
    }
    line.links.push(...source.links);
    line.weight = Math.max(line.weight, source.weight);
    worsen(line, source.severity);
    if (line.change !== source.change) line.change = "changed";
    line.forward ||= swap ? source.backward : source.forward;
    line.backward ||= swap ? source.forward : source.backward;
  };
  for (const route of routes) {
    if (!media[route.medium]) continue;
    const a = shown[route.a], b = shown[route.b];
    if (a === route.a && b === route.b) lines.push(route);
    else bundle(a, b, route);
  }
  const asked = new Set(model.data.media.filter(([key, , , usual]) => !usual && media[key]).map(([key]) => key));
  if (asked.size) {
    for (const link of links) {
      if (link.route < 0 && asked.has(link.medium)) bundle(shown[outer(boxes, link.a)], shown[outer(boxes, link.b)], asLine(link));
    }
  }
  for (const line of bundles.values()) {
    line.label = line.links.length > 1 ? `×${line.links.length}` : "";
    line.curve = curveBetween(boxes[line.a], boxes[line.b]);
  }
  return lines;
}

function outer(boxes, i) { return boxes[i].group >= 0 ? boxes[i].group : i; }

function asLine(link) {
  return { medium: link.medium, links: [link.i], weight: 0.3, forward: link.directed, backward: false, severity: link.severity, change: link.change };
}

/* Lines of one box and what it holds that are not among those drawn: shown while the box is looked at. */
function extraLines(model, shown, focus, media) {
  const { boxes, links } = model, lines = [], seen = new Map();
  const end = Math.min(boxes[focus].end, focus + 2000);
  for (let i = focus; i < end && lines.length < 400; i++) {
    for (const at of boxes[i].links) {
      const link = links[at];
      const mine = link.a === i ? link.a : link.b, other = link.a === i ? link.b : link.a;
      const from = shown[focus], to = shown[mine === i && boxes[other].group >= 0 && !openGroup(boxes, other, focus) ? boxes[other].group : other];
      if (link.route >= 0 && boxes[focus].group < 0 && media[link.medium]) continue;
      if (from === to || inside(boxes, from, to) || inside(boxes, to, from)) continue;
      const key = `${to} ${link.medium}`;
      let line = seen.get(key);
      if (!line) {
        line = { ...asLine(link), a: from, b: to, label: link.kind, extra: true };
        line.forward = link.directed && link.a === i;
        line.backward = link.directed && link.b === i;
        line.links = [];
        line.curve = curveBetween(boxes[from], boxes[to]);
        seen.set(key, line);
        lines.push(line);
      }
      line.links.push(at);
      worsen(line, link.severity);
    }
  }
  for (const line of lines) line.label = line.links.length > 1 ? `${line.label} ×${line.links.length}` : linkWords(links[line.links[0]]);
  return lines;
}

/* The one thing to say about a link: how near, how much, or its kind. */
function linkWords(link) {
  const [attributes = {}, metrics = {}] = link.facts;
  if (attributes.distance) return plain(attributes.distance);
  const amount = Object.keys(metrics).find((name) => /bytes|pct|rtt/.test(name)) || Object.keys(metrics)[0];
  return amount ? `${nameOf(amount)} ${human(amount, metrics[amount])}` : link.kind;
}

function openGroup(boxes, i, focus) { return boxes[i].group === boxes[focus].group; }

function curveBetween(a, b) {
  const ax = a.x + a.w / 2, ay = a.y + a.h / 2, bx = b.x + b.w / 2, by = b.y + b.h / 2;
  const dx = bx - ax, dy = by - ay;
  const gapX = Math.abs(dx) - (a.w + b.w) / 2, gapY = Math.abs(dy) - (a.h + b.h) / 2;
  if (gapY >= gapX) {
    const down = dy >= 0 ? 1 : -1, y0 = ay + down * a.h / 2, y1 = by - down * b.h / 2, bend = Math.max(16, Math.abs(y1 - y0) / 2) * down;
    return [ax, y0, ax, y0 + bend, bx, y1 - bend, bx, y1];
  }
  if (gapX > 60 && Math.abs(dy) < (a.h + b.h) / 2) { // over what stands between
    const top = Math.min(a.y, b.y), rise = 18 + 0.07 * Math.abs(dx);
    return [ax, a.y, ax, top - rise, bx, top - rise, bx, b.y];
  }
  const right = dx >= 0 ? 1 : -1, x0 = ax + right * a.w / 2, x1 = bx - right * b.w / 2, bend = Math.max(16, Math.abs(x1 - x0) / 2) * right;
  return [x0, ay, x0 + bend, ay, x1 - bend, by, x1, by];
}

/* A line as a list of points, for hitting and labelling. */
function pointsOf(line) {
  if (!line.curve) return line.points;
  if (!line.sampled) {
    const [x0, y0, x1, y1, x2, y2, x3, y3] = line.curve;
    line.sampled = [];
    for (let step = 0; step <= 12; step++) {
      const t = step / 12, u = 1 - t;
      line.sampled.push([u * u * u * x0 + 3 * u * u * t * x1 + 3 * u * t * t * x2 + t * t * t * x3, u * u * u * y0 + 3 * u * u * t * y1 + 3 * u * t * t * y2 + t * t * t * y3]);
    }
  }
  return line.sampled;
}

/* What a line covers, measured once. */
function boundsOf(line) {
  if (!line.bounds) {
    let x0 = Infinity, y0 = Infinity, x1 = -Infinity, y1 = -Infinity;
    for (const [x, y] of pointsOf(line)) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
    line.bounds = { x0, y0, x1, y1 };
  }
  return line.bounds;
}

function distanceTo(points, x, y) {
  let best = Infinity;
  for (let at = 1; at < points.length; at++) {
    const [x0, y0] = points[at - 1], [x1, y1] = points[at], dx = x1 - x0, dy = y1 - y0;
    const along = Math.max(0, Math.min(1, ((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy || 1)));
    best = Math.min(best, Math.hypot(x - x0 - along * dx, y - y0 - along * dy));
  }
  return best;
}

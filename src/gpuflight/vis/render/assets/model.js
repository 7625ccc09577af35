/* The picture's data, unpacked from its columns into boxes, links and routes. */
const ROLES = ["frame", "card", "chip", "group"];
const RANK = { "": 0, info: 1, warn: 2, critical: 3 };

async function readData() {
  const block = document.getElementById("data");
  if (block.dataset.encoding === "json") return JSON.parse(block.textContent);
  const bytes = Uint8Array.from(atob(block.textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function unpack(data) {
  data.nouns = Object.assign(Object.create(null), data.nouns); // kinds are names that others choose
  data.style.glyphs = Object.assign(Object.create(null), data.style.glyphs);
  const c = data.boxes, words = data.words, count = c.id.length;
  const boxes = new Array(count);
  for (let i = 0; i < count; i++) {
    const parent = c.parent[i], above = parent >= 0 ? boxes[parent] : null;
    const facts = c.facts[i] || [];
    const box = boxes[i] = {
      i, parent, id: c.id[i], kind: words[c.kind[i]], category: words[c.category[i]], role: ROLES[c.role[i]],
      x: c.place[4 * i], y: c.place[4 * i + 1], w: c.place[4 * i + 2], h: c.place[4 * i + 3],
      scale: c.scale[i], header: c.header[i], label: c.label[i], lines: c.lines[i], bars: c.bars[i], count: c.count[i],
      rule: words[c.rule[i]], synthetic: !!(c.flags[i] & 1), missing: !!(c.flags[i] & 2),
      attributes: facts[0] || {}, metrics: facts[1] || {}, unknown: facts[2] || {}, ns: facts[3] || "",
      children: [], links: [], end: i + 1, depth: above ? above.depth + 1 : 0, group: -1, folded: false, severity: "", change: data.changes[c.change[i]], fits: null,
    };
    if (above) {
      above.children.push(i);
      box.group = above.group >= 0 ? above.group : above.role === "group" ? parent : -1;
    }
  }
  for (let i = count - 1; i >= 0; i--) {
    const parent = boxes[i].parent;
    if (parent >= 0 && boxes[i].end > boxes[parent].end) boxes[parent].end = boxes[i].end;
  }
  const l = data.links, links = new Array(l.kind.length);
  for (let i = 0; i < links.length; i++) {
    links[i] = {
      i, a: l.ends[2 * i], b: l.ends[2 * i + 1], kind: words[l.kind[i]], medium: words[l.medium[i]],
      directed: !!l.directed[i], route: l.route[i], facts: l.facts[i] || [], severity: "", change: data.changes[l.change[i]],
    };
    boxes[links[i].a].links.push(i);
    if (links[i].b !== links[i].a) boxes[links[i].b].links.push(i);
  }
  const routes = data.routes.map(([a, b, medium, label, flat, arrows, weight, members, change]) => {
    const points = [];
    for (let at = 0; at < flat.length; at += 2) points.push([flat[at], flat[at + 1]]);
    return { a, b, medium, label, points, forward: !!(arrows & 1), backward: !!(arrows & 2), weight, links: members, severity: "", change: data.changes[change] };
  });
  for (const finding of data.findings) {
    for (const start of finding.boxes) {
      for (let i = start; i >= 0; i = boxes[i].role === "group" ? -1 : boxes[i].group) {
        worsen(boxes[i], finding.severity);
      }
    }
    for (const at of finding.links) {
      worsen(links[at], finding.severity);
      if (links[at].route >= 0) worsen(routes[links[at].route], finding.severity);
    }
  }
  return { data, boxes, links, routes };
}

function worsen(thing, severity) { if (RANK[severity] > RANK[thing.severity]) thing.severity = severity; }

function inside(boxes, inner, outer) { return inner > outer && inner < boxes[outer].end; }

function pathOf(boxes, i) {
  const path = [];
  for (let at = boxes[i].parent; at >= 0; at = boxes[at].parent) path.unshift(at);
  return path;
}

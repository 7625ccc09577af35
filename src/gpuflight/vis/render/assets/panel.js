/* The side panel: legend and filters, details of one box or line, findings, coverage. Names reach it as text only. */
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

class Panel {
  constructor(model, viewer) {
    this.model = model;
    this.viewer = viewer;
    this.tabs = ["legend", "details", "findings", "coverage"];
    for (const name of this.tabs) document.getElementById(`tab-${name}`).addEventListener("click", () => this.open(name));
    document.querySelector(".tabs").addEventListener("keydown", (event) => this.walkTabs(event));
    this.section = Object.fromEntries(this.tabs.map((name) => [name, document.getElementById(name)]));
    this.findings();
    this.coverage();
    this.details();
  }

  /* Everything again, after the picture changed. */
  renew() {
    this.findings();
    this.coverage();
    this.legend(this.viewer.palette);
    if (this.viewer.line) this.lineDetails(this.viewer.line); else this.details(this.viewer.selected);
    this.pins();
  }

  /* How many there are of something, at the tab. */
  count(tab, count, className = "") {
    const at = document.getElementById(`tab-${tab}`);
    at.querySelector("em")?.remove();
    if (count) at.append(element("em", { className, textContent: String(count) }));
  }

  /* The pinned boxes and their numbers side by side, above the tabs' content. */
  pins() {
    const into = document.getElementById("pins"), { boxes } = this.model, pinned = this.viewer.pinned.map((i) => boxes[i]);
    into.hidden = !pinned.length;
    if (!pinned.length) return;
    const names = [...new Set(pinned.flatMap((box) => Object.keys(box.metrics)))].sort();
    const drop = (box) => { const button = element("button", { type: "button", className: "link", textContent: "×", title: `Unpin ${box.label}` }); button.setAttribute("aria-label", `Unpin ${box.label}`); button.addEventListener("click", () => this.viewer.pin(box.i)); return button; };
    const cell = (box, name) => (name in box.metrics ? element("td", { textContent: human(name, box.metrics[name]) }) : element("td", { textContent: name in box.unknown ? "unknown" : "–", title: box.unknown[name] || "" }));
    const head = element("tr", {}, element("th", { textContent: "pinned" }), ...pinned.map((box) => element("th", {}, this.link(box.i), " ", drop(box))));
    into.replaceChildren(element("table", {}, head, ...names.map((name) => element("tr", {}, element("th", { textContent: nameOf(name), title: name }), ...pinned.map((box) => cell(box, name))))));
  }

  open(name) {
    for (const tab of this.tabs) {
      document.getElementById(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
      this.section[tab].hidden = tab !== name;
    }
  }

  walkTabs(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const at = this.tabs.findIndex((name) => !this.section[name].hidden);
    const name = this.tabs[(at + step + this.tabs.length) % this.tabs.length];
    this.open(name);
    document.getElementById(`tab-${name}`).focus();
  }

  swatch(kind, colour) {
    const ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg"), path = document.createElementNS(ns, "path");
    for (const [name, value] of [["viewBox", "0 0 16 16"], ["width", "15"], ["height", "15"], ["fill", "none"], ["stroke", colour], ["stroke-width", "1.4"], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
    const glyphs = this.model.data.style.glyphs;
    path.setAttribute("d", glyphs[kind] || glyphs["?"]);
    svg.append(path);
    return svg;
  }

  stroke({ colour, dash }) {
    const ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg"), path = document.createElementNS(ns, "path");
    for (const [name, value] of [["viewBox", "0 0 26 10"], ["width", "26"], ["height", "10"], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
    for (const [name, value] of [["d", "M1 5h24"], ["stroke", colour], ["stroke-width", "2.2"], ["stroke-dasharray", dash.map((part) => part * 2).join(" ") || "none"]]) path.setAttribute(name, value);
    svg.append(path);
    return svg;
  }

  /* Legend with filters; made again when the theme changes. */
  legend(palette) {
    const { data } = this.model, { viewer } = this, into = this.section.legend;
    const row = (mark, label, count, checked, change) => {
      const box = element("input", { type: "checkbox", checked });
      box.addEventListener("change", () => change(box.checked));
      return element("div", { className: "row" }, element("label", {}, box, mark, element("span", { textContent: label }), element("span", { className: "count", textContent: count.toLocaleString("en").replaceAll(",", "\u202f") })));
    };
    into.replaceChildren(element("h3", { textContent: "Lines" }));
    for (const [key, label, count] of data.media) into.append(row(this.stroke(palette.edge[key]), label, count, viewer.media[key], (on) => viewer.filterMedium(key, on)));
    if (!data.media.length) into.append(element("p", { className: "hint", textContent: "none" }));
    if (data.media.some(([, , , usual]) => !usual)) into.append(element("p", { className: "hint", textContent: "Dashed placement lines also show while a box is looked at." }));
    into.append(...this.changes(palette));
    let category = "";
    for (const [kind, noun, of, count] of data.kinds) {
      if (of !== category) into.append(element("h3", { textContent: data.style.categories[category = of][0] }));
      into.append(row(this.swatch(kind, palette.category[of]), noun, count, !viewer.hiddenKinds.has(kind), (on) => viewer.filterKind(kind, on)));
    }
    if (data.notes.length) into.append(element("h3", { textContent: "Notes" }), ...data.notes.map((note) => element("p", { className: "hint", textContent: note })));
    const keys = [["/", "search; n and N walk the matches"], ["drag, arrows", "pan"], ["wheel, + −", "zoom"], ["0", "fit all"], ["Shift+arrows", "walk between boxes"], ["Enter", "zoom to the selected box"], ["x", "fold or unfold it"], ["k", "pin it, or let it go"], ["Esc", "let go"], ["t  p", "theme, panel"]];
    into.append(element("div", { className: "keys-block" }, element("h3", { textContent: "Keys" }), element("dl", { className: "keys" }, ...keys.flatMap(([key, words]) => [element("dt", {}, element("kbd", { textContent: key })), element("dd", { textContent: words })]))));
  }

  /* What a comparison found, each with how many; a click marks them. */
  changes(palette) {
    const { boxes } = this.model, { viewer } = this, found = ["added", "removed", "changed"].map((change) => [change, boxes.filter((box) => box.change === change && !box.synthetic).map((box) => box.i)]).filter(([, some]) => some.length);
    if (!found.length) return [];
    return [element("h3", { textContent: "Changes" }), ...found.map(([change, some]) => {
      const button = element("button", { type: "button", className: "link", textContent: `${CHANGE_SIGNS[change]} ${change}` });
      button.style.color = palette.change[change];
      button.addEventListener("click", () => viewer.mark(viewer.marked.length === some.length && viewer.marked[0] === some[0] ? [] : some));
      return element("div", { className: "row" }, button, element("span", { className: "count", textContent: String(some.length) }));
    })];
  }

  link(i) {
    const box = this.model.boxes[i];
    const button = element("button", { type: "button", className: "link", textContent: box.label });
    button.addEventListener("click", () => this.viewer.select(i, true));
    return button;
  }

  facts(title, values, unit) {
    const names = Object.keys(values).sort();
    if (!names.length) return [];
    return [element("h3", { textContent: title }), element("dl", {}, ...names.flatMap((name) => [
      element("dt", { textContent: unit ? nameOf(name) : name.replaceAll("_", " "), title: name }),
      element("dd", { textContent: unit ? human(name, values[name]) : name === "cmdline" && Array.isArray(values[name]) ? values[name].join(" ") : plain(values[name]), className: name === "cmdline" || name === "exe" ? "mono" : "" }),
    ]))];
  }

  unknown(values) {
    const names = Object.keys(values).sort();
    if (!names.length) return [];
    return [element("h3", { textContent: "Unknown, because" }), element("dl", {}, ...names.flatMap((name) => [
      element("dt", { textContent: nameOf(name), title: name }), element("dd", { className: "unknown", textContent: plain(values[name]) }),
    ]))];
  }

  details(i = -1) {
    const into = this.section.details, { boxes, data } = this.model, { viewer } = this;
    if (i < 0) {
      into.replaceChildren(element("p", { className: "hint", textContent: "Select a box or a line in the picture to read all that is known about it." }));
      return;
    }
    const box = boxes[i], crumbs = element("p", { className: "crumbs" });
    for (const at of pathOf(boxes, i)) crumbs.append(this.link(at), " › ");
    const kind = box.role === "group" ? `folded: ${counted(box.count, "entity")}` : box.missing ? "named by an edge, not in the graph" : box.synthetic ? counted(box.count, "entity") : data.nouns[box.kind] || box.kind;
    crumbs.append(kind);
    const action = (label, act) => { const button = element("button", { type: "button", textContent: label }); button.addEventListener("click", act); return button; };
    const parts = [element("h2", { textContent: box.label }), crumbs];
    if (box.rule) parts.push(element("p", { className: "hint", textContent: `Rule: ${box.rule}` }));
    parts.push(element("div", { className: "actions" }, action("Zoom to", () => viewer.zoomTo(i)), box.children.length ? action(box.folded ? "Unfold" : "Fold", () => viewer.fold(i)) : null, action(viewer.pinned.includes(i) ? "Unpin" : "Pin", () => viewer.pin(i))));
    if (box.change) parts.push(element("p", { className: "note" }, element("b", { className: box.change, textContent: `${CHANGE_SIGNS[box.change]} ${box.change}` }), " since the graph that this one is compared with"));
    parts.push(...this.findingsOf(i));
    if (!box.synthetic) parts.push(element("h3", { textContent: "Identity" }), element("dl", {}, element("dt", { textContent: "id" }), element("dd", { className: "mono", textContent: box.id }), ...(box.ns ? [element("dt", { textContent: "namespace" }), element("dd", { textContent: box.ns })] : [])));
    parts.push(...this.facts("Metrics", box.metrics, true), ...this.unknown(box.unknown), ...this.facts("Attributes", box.attributes, false), ...this.edgesOf(i), ...this.insideOf(box));
    into.replaceChildren(...parts);
    into.scrollTop = 0;
  }

  findingsOf(i) { return this.noted(this.model.data.findings.filter((finding) => finding.boxes.includes(i))); }

  noted(findings) {
    return findings.map((finding) => element("p", { className: "note" }, element("b", { className: finding.severity, textContent: `${finding.severity} ` }), finding.message));
  }

  edgesOf(i) {
    const { boxes, links, data } = this.model, parts = [];
    const ranks = new Map(data.media.map(([key], rank) => [key, rank])); // what flows, before what only stands
    const own = boxes[i].links.map((at) => links[at]).sort((one, two) => ranks.get(one.medium) - ranks.get(two.medium) || one.i - two.i);
    for (const [title, some] of [["Out", own.filter((link) => link.directed && link.a === i)], ["In", own.filter((link) => link.directed && link.b === i && link.a !== i)], ["Between", own.filter((link) => !link.directed)]]) {
      if (some.length) parts.push(element("h3", { textContent: `${title} (${some.length})` }), ...this.edgeList(some, i));
    }
    const within = [];
    for (let at = i + 1; at < boxes[i].end && within.length < 500; at++) {
      for (const number of boxes[at].links) {
        const link = links[number], other = link.a === at ? link.b : link.a;
        if (other !== i && !inside(boxes, other, i) && !["Own", "Host", "Belong"].includes(link.kind)) within.push(link);
      }
    }
    if (within.length) parts.push(element("h3", { textContent: `Of what is inside (${within.length}${within.length === 500 ? "+" : ""})` }), ...this.edgeList(within, i));
    return parts;
  }

  edgeList(some, i) {
    const shown = some.slice(0, 60).map((link) => this.edge(link, i));
    if (some.length > 60) shown.push(element("p", { className: "hint", textContent: `and ${some.length - 60} more` }));
    return shown;
  }

  edge(link, i = -1) {
    const { boxes } = this.model, dot = element("span", { className: "dot" });
    dot.style.background = this.viewer.palette.edge[link.medium].colour;
    const ends = [];
    if (link.a !== i) ends.push(this.link(link.a));
    ends.push(link.directed ? " → " : " — ");
    if (link.b !== i || link.a === i && link.b === i) ends.push(this.link(link.b));
    const [attributes = {}, metrics = {}, unknown = {}] = link.facts;
    const words = [...Object.entries(metrics).map(([name, value]) => `${nameOf(name)} ${human(name, value)}`), ...Object.entries(attributes).map(([name, value]) => `${name.replaceAll("_", " ")}: ${plain(value)}`), ...Object.entries(unknown).map(([name, why]) => `${nameOf(name)} unknown: ${plain(why)}`)];
    return element("div", { className: "edge" }, element("div", {}, dot, element("b", { textContent: `${link.kind} ` }), ...ends), words.length ? element("div", { className: "what", textContent: words.join(" · ") }) : null);
  }

  insideOf(box) {
    if (!box.children.length) return [];
    const shown = box.children.slice(0, 200).map((at) => element("div", { className: "row" }, this.swatch(this.model.boxes[at].kind, this.viewer.palette.category[this.model.boxes[at].category]), this.link(at)));
    if (box.children.length > 200) shown.push(element("p", { className: "hint", textContent: `and ${box.children.length - 200} more: search finds them` }));
    return [element("h3", { textContent: `Inside (${box.children.length})` }), ...shown];
  }

  lineDetails(line) {
    const { boxes, links, data } = this.model;
    const parts = [element("h2", { textContent: `${boxes[line.a].label} ${line.forward && line.backward ? "⇄" : line.backward ? "←" : line.forward ? "→" : "—"} ${boxes[line.b].label}` }),
      element("p", { className: "crumbs", textContent: `${data.style.media[line.medium][0]}${line.label ? " · " + line.label : ""}` }),
      element("p", {}, this.link(line.a), " and ", this.link(line.b)),
      ...this.noted(data.findings.filter((finding) => finding.links.some((at) => line.links.includes(at)))),
      element("h3", { textContent: counted(line.links.length, "edge") }), ...this.edgeList(line.links.map((at) => links[at]), -1)];
    this.section.details.replaceChildren(...parts);
  }

  findings() {
    const into = this.section.findings, { findings } = this.model.data;
    if (!findings.length) { this.count("findings", 0); into.replaceChildren(element("h3", { textContent: "Findings" }), element("p", { className: "hint", textContent: "No findings in this round." })); return; }
    const worst = findings.some((f) => f.severity === "critical") ? "critical" : findings.some((f) => f.severity === "warn") ? "warn" : "";
    this.count("findings", findings.length, worst);
    const explained = new Set(findings.flatMap((finding) => finding.explains || []));
    into.replaceChildren(element("h3", { textContent: "Findings" }));
    const byId = new Map(findings.map((finding) => [finding.id, finding]));
    const seen = new Set();
    const add = (finding, under) => {
      if (seen.has(finding.id)) return;
      seen.add(finding.id);
      into.append(this.finding(finding, under));
      for (const id of finding.explains || []) if (byId.has(id)) add(byId.get(id), true);
    };
    for (const severity of ["critical", "warn", "info"]) for (const finding of findings) if (finding.severity === severity && !explained.has(finding.id)) add(finding, false);
    for (const finding of findings) add(finding, false);
  }

  finding(finding, under) {
    const evidence = (finding.evidence || []).map((seen) => `${nameOf(seen.metric)} ${typeof seen.value === "number" ? human(seen.metric, seen.value) : seen.value}`).join(" · ");
    const where = element("p");
    for (const i of finding.boxes) where.append(this.link(i), " ");
    for (const at of finding.links.slice(0, 20)) where.append(this.edgeLink(this.model.links[at]), " ");
    if (finding.elsewhere.length) where.append(finding.elsewhere.join(" "));
    return element("div", { className: under ? "note under" : "note" }, element("p", {}, element("b", { className: finding.severity, textContent: `${under ? "symptom: " : ""}${finding.severity} ` }), finding.message), where, evidence ? element("p", { textContent: evidence }) : null, finding.cost ? element("p", { textContent: `Cost: ${finding.cost}` }) : null, finding.advice ? element("p", { className: "hint", textContent: finding.advice }) : null);
  }

  /* To the line that draws an edge, else to the box it begins at. */
  edgeLink(link) {
    const { boxes } = this.model, button = element("button", { type: "button", className: "link", textContent: `${boxes[link.a].label} ${link.directed ? "→" : "—"} ${boxes[link.b].label}` });
    button.addEventListener("click", () => {
      const line = this.viewer.lines.find((some) => some.links.includes(link.i));
      if (line) this.viewer.pick(line); else this.viewer.select(link.a, true);
    });
    return button;
  }

  coverage() {
    const into = this.section.coverage, { coverage } = this.model.data;
    const limits = coverage.filter((line) => line.status !== "ok" || (line.notes || []).length || Object.keys(line.losses || {}).length);
    this.count("coverage", limits.length);
    into.replaceChildren(element("h3", { textContent: "What could not be seen" }));
    if (!coverage.length) into.append(element("p", { className: "hint", textContent: "The file does not say what its collectors could see." }));
    else if (!limits.length) into.append(element("p", { textContent: "Every collector answered in full." }));
    for (const line of limits) into.append(this.cover(line));
    const full = coverage.filter((line) => !limits.includes(line));
    if (full.length) into.append(element("h3", { textContent: "Seen in full" }), ...full.map((line) => this.cover(line)));
  }

  cover(line) {
    const cost = [line.nodes_count ? counted(line.nodes_count, "entity") : "", line.edges_count ? counted(line.edges_count, "edge") : "", line.wall_ms ? `${short(line.wall_ms)} ms` : "", line.age_rounds ? `${counted(line.age_rounds, "round")} old` : ""].filter(Boolean).join(" · ");
    return element("div", { className: "note" }, element("p", {}, element("b", { className: line.status, textContent: line.status }), ` ${line.collector}`, cost ? element("span", { className: "hint", textContent: "" }) : null, cost ? `  ${cost}` : ""), line.reason ? element("p", { textContent: line.reason }) : null, line.hint ? element("p", { className: "hint", textContent: line.hint }) : null,
      ...(line.notes || []).flatMap((note) => [element("p", { textContent: note.reason + (note.count > 1 ? ` (×${note.count})` : "") }), note.hint ? element("p", { className: "hint", textContent: note.hint }) : null]),
      ...Object.entries(line.losses || {}).map(([what, count]) => element("p", { textContent: `lost: ${count} ${what}` })));
  }
}

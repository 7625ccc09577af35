/* What is in sight: view, selection, folding, filters and pins; everything the reader does ends in one repaint. */
class View {
  constructor(model) {
    this.model = model;
    this.canvas = document.getElementById("canvas");
    this.stage = document.getElementById("stage");
    this.painter = new Painter(model, this.canvas.getContext("2d"));
    this.media = Object.fromEntries(model.data.media.map(([key, , , usual]) => [key, usual]));
    this.hiddenKinds = new Set();
    this.view = { x: 0, y: 0, k: 1 };
    this.selected = -1;
    this.hovered = -1;
    this.line = null;
    this.marked = [];
    this.pinned = [];
    this.fitted = true;
    this.smallest = model.boxes.reduce((least, box) => Math.min(least, box.scale), 1);
    const asked = new URLSearchParams(location.hash.slice(1));
    this.setTheme(asked.get("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"), true);
    this.refreshLines();
    this.panel = new Panel(model, this);
    this.panel.legend(this.palette);
    this.search = new Search(model, this);
    this.heading();
    this.listen();
    this.resize();
    this.obey(asked);
    if (!model.boxes.length) {
      const message = document.getElementById("message");
      message.textContent = "This graph is empty: it holds no entities. The Coverage panel says what could not be seen.";
      message.hidden = false;
    }
  }

  /* What the address asks for: #q=term, #id=Process(…), #tab=coverage, #theme=dark, #panel=0. */
  obey(asked) {
    if (asked.get("panel") === "0") this.togglePanel(false);
    if (asked.get("q")) { this.search.input.value = asked.get("q"); this.search.run(asked.get("q")); this.search.list.hidden = asked.has("id"); }
    if (asked.get("id")) { const i = this.model.boxes.findIndex((box) => box.id === asked.get("id")); if (i >= 0) this.select(i, true); }
    for (const id of asked.getAll("pin")) { const i = this.model.boxes.findIndex((box) => box.id === id); if (i >= 0 && !this.pinned.includes(i)) this.pin(i); }
    if (asked.get("fold")) { const i = this.model.boxes.findIndex((box) => box.id === asked.get("fold")); if (i >= 0) this.fold(i); }
    if (this.panel.tabs.includes(asked.get("tab"))) this.panel.open(asked.get("tab"));
  }

  heading() {
    const { data } = this.model, env = data.environment;
    document.getElementById("title").textContent = data.title;
    const words = [counted(data.nodes, "entity"), counted(data.edges, "edge"), data.time ? data.time.replace("T", " ").replace("Z", " UTC") : "", data.round ? `round ${data.round}` : "", env.hostname && env.hostname !== data.title ? env.hostname : "", env.kernel ? `Linux ${env.kernel}` : "", env.version ? `gpuflight ${env.version}` : ""];
    document.getElementById("subtitle").textContent = words.filter(Boolean).join("  ·  ");
  }

  setTheme(theme, first = false) {
    document.documentElement.dataset.theme = theme === "dark" ? "dark" : "light";
    this.palette = makePalette(this.model.data.style, theme === "dark");
    if (!first) { this.panel.legend(this.palette); this.panel.details(this.selected); this.repaint(); }
  }

  refreshLines() {
    this.shown = shownBoxes(this.model.boxes);
    this.lines = shownLines(this.model, this.shown, this.media);
    if (this.hiddenKinds.size) {
      const { boxes, links } = this.model;
      this.lines = this.lines.filter((line) => !line.links.every((at) => this.hiddenKinds.has(boxes[links[at].a].kind) || this.hiddenKinds.has(boxes[links[at].b].kind)));
    }
  }

  filterMedium(key, on) { this.media[key] = on; this.refreshLines(); this.repaint(); }

  filterKind(kind, on) {
    if (on) this.hiddenKinds.delete(kind); else this.hiddenKinds.add(kind);
    this.refreshLines();
    this.repaint();
  }

  fold(i) {
    const box = this.model.boxes[i];
    if (!box.children.length) return;
    box.folded = !box.folded;
    this.refreshLines();
    this.panel.details(i);
    this.repaint();
  }

  mark(matches) { this.marked = matches; this.repaint(); }

  select(i, move = false) {
    this.selected = i;
    this.line = null;
    this.panel.details(i);
    if (i >= 0) {
      this.panel.open("details");
      this.unfoldAround(i);
      if (move) this.reveal(i);
      const box = this.model.boxes[i];
      document.getElementById("announce").textContent = `${box.label}, ${box.kind}, ${box.lines.join(", ")}`;
    }
    this.repaint();
  }

  unfoldAround(i) {
    let changed = false;
    for (const at of pathOf(this.model.boxes, i)) if (this.model.boxes[at].folded) { this.model.boxes[at].folded = false; changed = true; }
    if (changed) this.refreshLines();
  }

  pick(line) {
    this.line = line;
    this.selected = -1;
    this.panel.lineDetails(line);
    this.panel.open("details");
    this.repaint();
  }

  /* Bring a box into sight, large enough to be read. */
  reveal(i) {
    const box = this.model.boxes[i], { width, height } = this.size, v = this.view;
    const least = 9 / (11 * box.scale), most = Math.min(width * 0.9 / box.w, height * 0.9 / box.h);
    const x = box.x * v.k + v.x, y = box.y * v.k + v.y;
    const seen = x >= 0 && y >= 0 && x + box.w * v.k <= width && y + box.h * v.k <= height;
    if (seen && v.k >= least) return;
    this.look(box, Math.max(Math.min(Math.max(v.k, least), most), Math.min(least, most)));
  }

  zoomTo(i) {
    const box = this.model.boxes[i], { width, height } = this.size;
    this.look(box, Math.min(width * 0.92 / box.w, height * 0.92 / box.h, 2.2 / (box.scale * (box.role === "group" && box.children.length ? this.model.boxes[box.children[0]].scale / box.scale : 1))));
    this.canvas.focus({ preventScroll: true });
  }

  look(box, k) {
    const { width, height } = this.size, { data } = this.model;
    const within = (wanted, room, all) => (all * k <= room ? (room - all * k) / 2 : Math.max(room - all * k, Math.min(0, wanted)));
    this.view = { k, x: within(width / 2 - (box.x + box.w / 2) * k, width, data.width), y: within(height / 2 - (box.y + box.h / 2) * k, height, data.height) };
    this.fitted = false;
    this.repaint();
  }

  fit() {
    const { width, height } = this.size, { data, boxes } = this.model;
    let right = 1, bottom = 1;
    for (let i = 0; i < boxes.length; i = boxes[i].end) { right = Math.max(right, boxes[i].x + boxes[i].w + 24); bottom = Math.max(bottom, boxes[i].y + boxes[i].h + 24); }
    const k = Math.min(width / right, height / bottom, boxes.length < 8 ? 1.5 : 1.25);
    this.view = { k, x: (width - right * k) / 2, y: (height - bottom * k) / 2 };
    this.least = Math.min(k * 0.5, 0.5);
    this.fitted = true;
    this.repaint();
  }

  zoom(factor, x = this.size.width / 2, y = this.size.height / 2) {
    const v = this.view, k = Math.min(Math.max(v.k * factor, this.least), 4 / this.smallest);
    this.view = { k, x: x - (x - v.x) * (k / v.k), y: y - (y - v.y) * (k / v.k) };
    this.fitted = false;
    this.repaint();
  }

  pan(dx, dy) { this.view.x += dx; this.view.y += dy; this.fitted = false; this.repaint(false); }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.stage, ratio = Math.min(devicePixelRatio || 1, 3);
    this.size = { width: width || 800, height: height || 600, ratio };
    this.canvas.width = Math.round(this.size.width * ratio);
    this.canvas.height = Math.round(this.size.height * ratio);
    if (this.fitted) this.fit();
    if (this.search) this.paint(); // at once: the canvas was emptied
  }

  togglePanel(on = document.getElementById("panel").hidden) {
    document.getElementById("panel").hidden = !on;
    document.getElementById("panel-toggle").setAttribute("aria-expanded", String(on));
    if (this.size) this.resize();
  }

  /* At the next frame; `whole` unless the picture was only moved. */
  repaint(whole = true) {
    this.whole ||= whole;
    if (this.waiting || !this.size) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      if (this.whole || !this.moved()) this.paint();
    });
  }

  /* Draw only what panning brought into sight; false if that is not enough. The whole follows when it rests. */
  moved() {
    const { view, painted, size } = this;
    if (!painted || painted.k !== view.k) return false;
    const dx = Math.round((view.x - painted.x) * size.ratio), dy = Math.round((view.y - painted.y) * size.ratio);
    if (Math.abs(dx) > size.width * size.ratio / 2 || Math.abs(dy) > size.height * size.ratio / 2) return false;
    if (dx || dy) {
      this.painter.shift(dx, dy);
      view.x = painted.x += dx / size.ratio;
      view.y = painted.y += dy / size.ratio;
    }
    clearTimeout(this.resting);
    this.resting = setTimeout(() => this.repaint(), 140);
    return true;
  }

  /* Keep a box in sight of mind: ringed and never in the background, its numbers side by side with those of the others. */
  pin(i) {
    this.pinned = this.pinned.includes(i) ? this.pinned.filter((at) => at !== i) : [...this.pinned, i].slice(-8);
    this.panel.pins();
    this.panel.details(this.selected);
    this.repaint();
  }

  /* The same picture later: what the reader did stays. */
  replace(data) {
    const before = this.model, model = unpack(data), now = new Map(model.boxes.map((box) => [box.id, box.i]));
    const same = (i) => (i >= 0 ? now.get(before.boxes[i].id) ?? -1 : -1);
    for (const box of before.boxes) if (box.folded && now.has(box.id)) model.boxes[now.get(box.id)].folded = true;
    const at = this.selected, next = same(at);
    if (next >= 0) { // what is looked at stays where it was
      const was = before.boxes[at], is = model.boxes[next];
      this.view = { k: this.view.k, x: this.view.x + (was.x - is.x) * this.view.k, y: this.view.y + (was.y - is.y) * this.view.k };
    }
    for (const [key, , , usual] of data.media) this.media[key] ??= usual;
    this.selected = next;
    this.pinned = this.pinned.map(same).filter((i) => i >= 0);
    this.hovered = -1;
    const line = this.line && [same(this.line.a), same(this.line.b), this.line.medium];
    this.model = this.painter.model = this.panel.model = this.search.model = model;
    this.smallest = model.boxes.reduce((least, box) => Math.min(least, box.scale), 1);
    document.getElementById("message").hidden = model.boxes.length > 0;
    this.refreshLines();
    this.line = line ? this.lines.find((other) => other.a === line[0] && other.b === line[1] && other.medium === line[2]) || null : null;
    this.search.again();
    this.panel.renew();
    this.heading();
    if (this.fitted) this.fit(); else this.repaint();
  }

  paint() {
    clearTimeout(this.resting);
    this.whole = false;
    this.painted = { ...this.view };
    const { boxes } = this.model, focus = this.hovered >= 0 ? this.hovered : this.selected;
    let dim = null, extra = [];
    if (focus >= 0 && this.attended(focus)) {
      extra = extraLines(this.model, this.shown, focus, this.media);
      dim = this.around(focus, extra);
    } else if (this.line) dim = new Set([...this.chain(this.line.a), ...this.chain(this.line.b)]);
    else if (this.marked.length && this.selected < 0) dim = new Set(this.marked.flatMap((i) => this.chain(i)));
    if (dim) for (const i of this.pinned) for (const at of this.chain(i)) dim.add(at);
    if (!dim && this.hiddenKinds.size) dim = new Set(boxes.filter((box) => !this.hiddenKinds.has(box.kind)).map((box) => box.i));
    this.painter.paint(this.view, this.size, this.palette, {
      shown: this.shown, selected: this.selected, pinned: this.pinned, marked: this.marked.length > 400 ? this.marked.slice(0, 400) : this.marked, line: this.line, lines: this.lines, extra, dim,
      focus: this.line ? this.line.a : focus,
    });
    document.getElementById("zoom-level").textContent = `${this.view.k >= 0.1 ? Math.round(this.view.k * 100) : (this.view.k * 100).toFixed(1)} %`;
    this.canvas.dataset.painted = String(1 + Number(this.canvas.dataset.painted || 0));
  }

  /* Whether looking at a box puts the rest into the background: not for what holds nearly everything. */
  attended(i) { const box = this.model.boxes[i]; return box.kind !== "Host" && box.kind !== "Hardware" && box.kind !== "Elsewhere" && box.end - i < this.model.boxes.length * 0.7; }

  chain(i) { return [...pathOf(this.model.boxes, i), i]; }

  /* The focus, what it holds, what it is joined to, and the boxes around these. */
  around(focus, extra) {
    const { boxes } = this.model, seen = new Set(this.chain(focus));
    for (let i = focus; i < boxes[focus].end; i++) seen.add(i);
    const add = (i) => { for (const at of this.chain(i)) seen.add(at); if (boxes[i].role !== "frame" || boxes[i].end - i < 60) for (let at = i; at < boxes[i].end; at++) seen.add(at); };
    const mine = (i) => i === focus || inside(boxes, i, focus) || (boxes[focus].group >= 0 && i === boxes[focus].group);
    for (const line of [...this.lines, ...extra]) {
      if (mine(line.a)) add(line.b);
      if (mine(line.b)) add(line.a);
    }
    return seen;
  }

  save() {
    this.canvas.toBlob((blob) => {
      const link = element("a", { href: URL.createObjectURL(blob), download: `${this.model.data.title.replace(/[^\w.-]+/g, "-") || "gpuflight"}.png` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  }

  /* On paper: all of it, light, sharp. */
  print(on) {
    if (on) {
      this.before = { view: this.view, fitted: this.fitted, dark: this.palette.dark };
      this.setTheme("light");
      this.size = { width: 1400, height: 870, ratio: 2 };
      this.canvas.width = 2800;
      this.canvas.height = 1740;
      this.fit();
      this.paint();
    } else {
      this.setTheme(this.before.dark ? "dark" : "light");
      this.fitted = this.before.fitted;
      this.view = this.before.view;
      this.resize();
    }
  }
}

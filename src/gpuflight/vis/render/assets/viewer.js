/* The viewer: what mouse, fingers and keys do to the view, and how a page begins. */
class Viewer extends View {
  at(event) {
    const bounds = this.canvas.getBoundingClientRect();
    return [event.clientX - bounds.left, event.clientY - bounds.top];
  }

  world(x, y) { return [(x - this.view.x) / this.view.k, (y - this.view.y) / this.view.k]; }

  /* What is under the pointer: a card, else a line, else the frame. */
  target(x, y) {
    const { boxes } = this.model, [wx, wy] = this.world(x, y), box = boxAt(boxes, wx, wy, 5 / this.view.k);
    if (box >= 0 && (boxes[box].role !== "frame" || boxes[box].folded)) return { box };
    let best = 6 / this.view.k, line = null;
    for (const candidate of this.lines) {
      const distance = distanceTo(pointsOf(candidate), wx, wy);
      if (distance < best) { best = distance; line = candidate; }
    }
    return line ? { box: -1, line } : { box };
  }

  listen() {
    const { canvas } = this, pointers = new Map();
    let moved = 0, spread = 0;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, this.at(event));
      moved = 0; spread = 0;
      this.tip();
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = this.at(event), before = pointers.get(event.pointerId);
      if (!before) { this.hover(x, y); return; }
      pointers.set(event.pointerId, [x, y]);
      if (pointers.size === 2) {
        const [[ax, ay], [bx, by]] = [...pointers.values()], now = Math.hypot(ax - bx, ay - by);
        if (spread) this.zoom(now / spread, (ax + bx) / 2, (ay + by) / 2);
        spread = now; moved = 10;
        return;
      }
      moved += Math.abs(x - before[0]) + Math.abs(y - before[1]);
      if (moved > 4) { canvas.classList.add("busy"); this.pan(x - before[0], y - before[1]); }
    });
    const release = (event) => {
      if (!pointers.delete(event.pointerId)) return;
      canvas.classList.remove("busy");
      if (event.type === "pointerup" && moved <= 4) this.click(...this.at(event));
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => { this.hovered = -1; this.tip(); this.repaint(); });
    canvas.addEventListener("dblclick", (event) => {
      const { box } = this.target(...this.at(event));
      if (box < 0) return;
      if (this.model.boxes[box].role === "group") this.zoomTo(box); else if (this.model.boxes[box].children.length) this.fold(box); else this.zoomTo(box);
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const [x, y] = this.at(event), unit = event.deltaMode === 1 ? 18 : 1;
      if (event.shiftKey) this.pan(-(event.deltaX + event.deltaY) * unit, 0);
      else this.zoom(Math.exp(-Math.max(-240, Math.min(240, event.deltaY * unit)) * (event.ctrlKey ? 0.008 : 0.0022)), x, y);
    }, { passive: false });
    document.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resize()).observe(this.stage);
    const press = (id, act) => document.getElementById(id).addEventListener("click", act);
    press("zoom-in", () => this.zoom(1.3)); press("zoom-out", () => this.zoom(1 / 1.3)); press("fit", () => this.fit());
    press("theme", () => this.setTheme(this.palette.dark ? "light" : "dark")); press("panel-toggle", () => this.togglePanel()); press("save", () => this.save());
    addEventListener("beforeprint", () => this.print(true));
    addEventListener("afterprint", () => this.print(false));
    addEventListener("hashchange", () => this.obey(new URLSearchParams(location.hash.slice(1))));
  }

  hover(x, y) {
    const { box, line } = this.target(x, y), { boxes } = this.model;
    this.canvas.classList.toggle("over", !!line || box >= 0);
    if (box !== this.hovered || line !== this.hoveredLine) {
      this.hovered = box >= 0 && (boxes[box].role !== "frame" || boxes[box].folded || ["GPU", "NPU", "Process"].includes(boxes[box].kind)) ? box : -1;
      this.hoveredLine = line;
      this.repaint();
    }
    this.tip(x, y, box, line);
  }

  tip(x, y, box = -1, line = null) {
    const tip = document.getElementById("tip"), { boxes, data } = this.model;
    tip.hidden = box < 0 && !line;
    if (tip.hidden) return;
    if (line) tip.replaceChildren(element("b", { textContent: `${boxes[line.a].label} — ${boxes[line.b].label}` }), element("i", { textContent: [data.style.media[line.medium][0], line.label, counted(line.links.length, "edge")].filter(Boolean).join(" · ") }));
    else {
      const it = boxes[box], top = Object.entries(it.metrics).slice(0, 6).map(([name, value]) => `${nameOf(name)} ${human(name, value)}`).join(" · ");
      const command = it.attributes.cmdline ? plain(Array.isArray(it.attributes.cmdline) ? it.attributes.cmdline.join(" ") : it.attributes.cmdline) : "";
      tip.replaceChildren(element("b", { textContent: it.label }), element("i", { textContent: [it.synthetic ? "" : data.nouns[it.kind] || it.kind, it.role === "group" ? `${counted(it.count, "entity")} folded: ${it.rule}` : it.children.length ? `${counted(it.count, "entity")}` : "", it.lines[0]].filter(Boolean).join(" · ") }), top ? element("div", { textContent: top }) : null, command ? element("div", { textContent: command.length > 160 ? command.slice(0, 160) + "…" : command }) : null);
    }
    const { offsetWidth: w, offsetHeight: h } = tip;
    tip.style.left = `${Math.max(4, Math.min(x + 14, this.size.width - w - 6))}px`;
    tip.style.top = `${y + 18 + h > this.size.height ? Math.max(4, y - h - 12) : y + 18}px`;
  }

  click(x, y) {
    const { box, line } = this.target(x, y);
    this.canvas.focus({ preventScroll: true });
    if (line) this.pick(line); else this.select(box);
  }

  key(event) {
    if (event.target.closest?.("input, textarea, [role=tab]") || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = 80, arrows = { ArrowLeft: [step, 0], ArrowRight: [-step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] };
    const onCanvas = event.target === this.canvas || event.target === document.body;
    if (arrows[event.key] && onCanvas) { if (event.shiftKey) this.walk(event.key); else this.pan(...arrows[event.key]); }
    else if (event.key === "+" || event.key === "=") this.zoom(1.25);
    else if (event.key === "-" || event.key === "_") this.zoom(0.8);
    else if (event.key === "0" || event.key === "f") this.fit();
    else if (event.key === "/") { this.search.input.focus(); this.search.input.select(); }
    else if (event.key === "n") this.search.go(this.search.at + 1);
    else if (event.key === "N") this.search.go(this.search.at - 1);
    else if (event.key === "x" && this.selected >= 0) this.fold(this.selected);
    else if (event.key === "k" && this.selected >= 0) this.pin(this.selected);
    else if (event.key === "t") this.setTheme(this.palette.dark ? "light" : "dark");
    else if (event.key === "p") this.togglePanel();
    else if (event.key === "Enter" && onCanvas && this.selected >= 0) this.zoomTo(this.selected);
    else if (event.key === "Escape") { this.hovered = -1; this.line = null; this.search.clear(); this.select(-1); }
    else return;
    event.preventDefault();
  }

  /* From the selected box to the one around it, the first in it, or its neighbours. */
  walk(key) {
    const { boxes } = this.model;
    if (!boxes.length) return;
    if (this.selected < 0) { this.select(0, true); return; }
    const box = boxes[this.selected], siblings = box.parent >= 0 ? boxes[box.parent].children : boxes.filter((b) => b.parent < 0).map((b) => b.i);
    const at = siblings.indexOf(box.i);
    const next = { ArrowUp: box.parent, ArrowDown: box.children[0], ArrowLeft: siblings[at - 1], ArrowRight: siblings[at + 1] }[key];
    if (next !== undefined && next >= 0) this.select(next, true);
  }
}

/* `gpuflightViewer` in the page is for whoever drives it: the live page, tests, a console. */
function begin(data) {
  const viewer = globalThis.gpuflightViewer = new Viewer(unpack(data));
  viewer.paint();
  performance.mark("gpuflight-painted");
  document.documentElement.dataset.ready = "yes";
  return viewer;
}

function failed(error) {
  const message = document.getElementById("message");
  message.textContent = `The picture could not be shown: ${error.message}`;
  message.hidden = false;
  document.documentElement.dataset.ready = "failed";
  console.error(error);
}

/* Search over names, ids, kinds, attributes; every word of the query must occur. */
const RESULTS_MAX = 60;

class Search {
  constructor(model, viewer) {
    this.model = model;
    this.viewer = viewer;
    this.texts = null;
    this.matches = [];
    this.at = -1;
    this.input = document.getElementById("search");
    this.list = document.getElementById("results");
    this.count = document.getElementById("search-count");
    this.input.addEventListener("input", () => this.run(this.input.value));
    this.input.addEventListener("keydown", (event) => this.key(event));
    this.input.addEventListener("focus", () => { if (this.matches.length) this.list.hidden = false; });
    document.addEventListener("pointerdown", (event) => { if (!event.target.closest?.(".search")) this.list.hidden = true; });
  }

  run(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    this.at = -1;
    this.matches = [];
    if (words.length) {
      const { boxes } = this.model;
      this.texts ||= boxes.map((box) => `${box.label} ${box.kind} ${box.id} ${plain(box.attributes)}`.toLowerCase());
      for (let i = 0; i < boxes.length; i++) if (!boxes[i].synthetic && words.every((word) => this.texts[i].includes(word))) this.matches.push(i);
      const rank = (i) => (boxes[i].label.toLowerCase().startsWith(words[0]) ? 0 : boxes[i].label.toLowerCase().includes(words[0]) ? 1 : 2);
      const ranks = new Map(this.matches.map((i) => [i, rank(i)]));
      this.matches.sort((one, two) => ranks.get(one) - ranks.get(two) || one - two);
    }
    this.count.textContent = words.length ? (this.matches.length ? `${this.matches.length} found` : "nothing") : "";
    this.fill();
    this.viewer.mark(this.matches);
  }

  /* After the picture changed: the same question, the list as it was. */
  again() {
    this.texts = null;
    if (!this.input.value) { this.matches = []; this.viewer.marked = []; return; }
    const { hidden } = this.list, { at } = this;
    this.run(this.input.value);
    this.list.hidden = hidden;
    if (at >= 0 && this.matches.length) this.at = Math.min(at, this.matches.length - 1);
  }

  fill() {
    const { boxes, data } = this.model;
    this.list.replaceChildren(...this.matches.slice(0, RESULTS_MAX).map((i, at) => {
      const box = boxes[i], path = pathOf(boxes, i).map((parent) => boxes[parent].label);
      const item = element("li", { role: "option", title: path.join(" › ") }, element("b", { textContent: box.label }), element("small", { textContent: [box.lines[0] || data.nouns[box.kind] || box.kind, path[path.length - 1]].filter(Boolean).join(" · in ") }));
      item.setAttribute("aria-selected", "false");
      item.addEventListener("click", () => this.go(at));
      return item;
    }));
    if (this.matches.length > RESULTS_MAX) this.list.append(element("li", { className: "hint", textContent: `and ${this.matches.length - RESULTS_MAX} more` }));
    this.list.hidden = !this.matches.length;
  }

  go(at) {
    if (!this.matches.length) return;
    this.at = (at + this.matches.length) % this.matches.length;
    [...this.list.children].forEach((item, number) => item.setAttribute("aria-selected", String(number === this.at)));
    this.list.children[this.at]?.scrollIntoView({ block: "nearest" });
    this.viewer.select(this.matches[this.at], true);
    this.count.textContent = `${this.at + 1} of ${this.matches.length}`;
  }

  key(event) {
    if (event.key === "Enter") { this.go(this.at + (event.shiftKey ? -1 : 1)); event.preventDefault(); }
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") { this.go(this.at + (event.key === "ArrowDown" ? 1 : -1)); event.preventDefault(); }
    else if (event.key === "Escape") {
      if (!this.list.hidden) this.list.hidden = true; else this.clear();
      if (!this.input.value) this.viewer.canvas.focus();
    }
    event.stopPropagation();
  }

  clear() { this.input.value = ""; this.run(""); }
}

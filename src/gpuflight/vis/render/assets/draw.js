/* Drawing: frames, then lines, then cards and words, so that no line ever crosses a word. */
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif';
const READABLE = 4.6; // px: smaller text is not drawn
const CHANGE_SIGNS = { added: "+", removed: "−", changed: "~" };
const SPECK = 1.1; // px: smaller boxes are not drawn

class Painter {
  constructor(model, context) {
    this.model = model;
    this.context = context;
    this.widths = new Map();
    this.glyphs = glyphOf;
  }

  /* `view` {x, y, k}: screen = world * k + (x, y). `scene`: what is selected, matched, dimmed. */
  paint(view, size, palette, scene) {
    this.view = { ...view }; this.palette = palette; this.scene = scene; this.size = size;
    this.part({ x: 0, y: 0, w: size.width, h: size.height }, false);
  }

  /* The picture as painted last, moved by whole pixels of the canvas; only what comes into sight is drawn. Words at
     lines and from afar depend on all that is in sight: they wait for the next whole paint. */
  shift(dx, dy) {
    const g = this.context, { width, height, ratio } = this.size, x = dx / ratio, y = dy / ratio;
    this.view = { k: this.view.k, x: this.view.x + x, y: this.view.y + y };
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.globalCompositeOperation = "copy";
    g.drawImage(g.canvas, dx, dy);
    g.globalCompositeOperation = "source-over";
    const w = Math.abs(x) + 1, h = Math.abs(y) + 1;
    if (dx) this.part({ x: x > 0 ? 0 : width - w, y: 0, w, h: height }, true);
    if (dy) this.part({ x: 0, y: y > 0 ? 0 : height - h, w: width, h }, true);
  }

  part(screen, moving) {
    const g = this.context, { view, size, palette, scene } = this, r = size.ratio, around = moving ? 12 : 0;
    g.save();
    g.setTransform(r, 0, 0, r, 0, 0);
    if (moving) { g.beginPath(); g.rect(screen.x, screen.y, screen.w, screen.h); g.clip(); }
    g.fillStyle = palette.ground;
    g.fillRect(screen.x, screen.y, screen.w, screen.h);
    g.setTransform(r * view.k, 0, 0, r * view.k, r * view.x, r * view.y);
    this.seen = {
      x0: (screen.x - around - view.x) / view.k, y0: (screen.y - around - view.y) / view.k,
      x1: (screen.x + screen.w + around - view.x) / view.k, y1: (screen.y + screen.h + around - view.y) / view.k,
    };
    this.far = []; // large frames whose own words are too small to read
    const cards = this.frames();
    this.lines(scene.lines.filter((line) => !this.faded(line)), false);
    if (scene.dim) this.lines(scene.lines.filter((line) => this.faded(line)), true);
    for (const box of cards) this.card(box);
    if (!moving) this.farLabels();
    this.lines(scene.extra, false);
    if (!moving) this.lineLabels([...scene.extra, ...scene.lines]);
    for (const line of scene.lines) if (line.severity && this.sees(line)) this.lineBadge(line);
    for (const i of scene.marked) this.ring(this.model.boxes[scene.shown[i]], palette.mark, 3);
    for (const i of scene.pinned) this.ring(this.model.boxes[scene.shown[i]], palette.accent, 2, [6, 3]);
    if (scene.selected >= 0) this.ring(this.model.boxes[scene.shown[scene.selected]], palette.accent, 2.5);
    g.restore();
  }

  sees(line) {
    const bounds = boundsOf(line), s = this.seen;
    return bounds.x0 <= s.x1 && bounds.x1 >= s.x0 && bounds.y0 <= s.y1 && bounds.y1 >= s.y0;
  }

  /* Whether what the reader looks at leaves this line or box in the background. */
  faded(line) {
    const { dim, focus } = this.scene, { boxes } = this.model;
    if (!dim) return false;
    if (this.scene.line) return line !== this.scene.line;
    if (!dim.has(line.a) || !dim.has(line.b)) return true;
    return focus >= 0 && ![line.a, line.b].some((end) => end === focus || inside(boxes, end, focus) || boxes[focus].group === end);
  }

  alphaOf(box) { return this.scene.dim && !this.scene.dim.has(box.i) ? 0.32 : 1; }

  /* Draws frames, returns the cards that are to come on top of the lines. */
  frames() {
    const { boxes } = this.model, { k } = this.view, s = this.seen, cards = [];
    let i = 0;
    while (i < boxes.length) {
      const box = boxes[i];
      if (box.x > s.x1 || box.y > s.y1 || box.x + box.w < s.x0 || box.y + box.h < s.y0 || box.h * k < SPECK) { i = box.end; continue; }
      if (box.role === "frame" && !box.folded) {
        if (box.group < 0) this.frame(box); // else on top of its group, with the cards
        cards.push(box);
        i = box.w * k < 6 ? box.end : i + 1;
      } else {
        cards.push(box);
        i = box.folded ? box.end : i + 1;
      }
    }
    return cards;
  }

  shape(box, radius) {
    const g = this.context;
    g.beginPath();
    g.roundRect(box.x, box.y, box.w, box.h, Math.min(radius * box.scale, box.w / 2, box.h / 2));
  }

  frame(box) {
    const g = this.context, [fill, line] = this.palette.frame[box.category];
    g.globalAlpha = this.alphaOf(box);
    this.shape(box, 9);
    g.fillStyle = fill;
    g.fill();
    g.lineWidth = 1.1 * box.scale;
    g.strokeStyle = line;
    g.setLineDash(box.synthetic || box.missing ? [5 * box.scale, 4 * box.scale] : []);
    g.stroke();
    g.setLineDash([]);
    g.globalAlpha = 1;
  }

  card(box) {
    const g = this.context, p = this.palette, k = this.view.k, colour = p.category[box.category], s = box.scale;
    g.globalAlpha = this.alphaOf(box);
    if (box.role === "frame" && !box.folded) {
      if (box.group >= 0) { this.frame(box); g.globalAlpha = this.alphaOf(box); }
      this.words(box, 9 * s, true);
    } else if (box.synthetic && box.kind.endsWith("Slice")) {
      this.slice(box);
    } else if ((box.h / s < 22 ? 10.5 : 12) * s * k < READABLE) { // one of many in a group, or all is far away
      this.shape(box, 5);
      g.fillStyle = box.group >= 0 || box.h * k > 14 ? p.speck[box.category] : p.track[box.category];
      g.fill();
      if (box.role === "group" && box.group < 0 && box.w * k > 70 && box.h * k > 24) this.far.push(box);
    } else {
      const chip = box.h / s < 22, group = box.role === "group";
      if (group && box.h * k > 12) { // a second sheet behind
        g.beginPath();
        g.roundRect(box.x + 3 * s, box.y + 3 * s, box.w, box.h, 6 * s);
        g.fillStyle = p.surface; g.fill();
        g.lineWidth = s; g.strokeStyle = p.frame[box.category][1]; g.stroke();
      }
      this.shape(box, chip && !group ? 10 : 6);
      g.fillStyle = p.surface;
      g.fill();
      g.lineWidth = (chip ? 0.9 : 1.2) * s;
      g.strokeStyle = p.frame[box.category][1];
      if (box.missing || box.synthetic && !group) g.setLineDash([4 * s, 3 * s]);
      g.stroke();
      g.setLineDash([]);
      if (!chip) {
        g.save(); this.shape(box, 6); g.clip();
        g.fillStyle = colour; g.fillRect(box.x, box.y, 3.5 * s, box.h);
        g.restore();
      }
      this.words(box, (chip ? 7 : 10) * s, false);
      if (box.folded) this.foldedNote(box);
    }
    if (box.change && box.h * k > 3) this.changed(box);
    if (box.severity && box.h * k > 4) this.badge(box);
    g.globalAlpha = 1;
  }

  /* A bar of a timeline; one that stands for many is filled as far as they were busy. */
  slice(box) {
    const g = this.context, p = this.palette, k = this.view.k, { busy_ms: busy, duration_ms: taken } = box.metrics;
    const part = busy === undefined || !taken || box.w * k < 6 ? 1 : Math.min(1, Math.max(0.1, busy / taken));
    g.fillStyle = p.track[box.category];
    g.fillRect(box.x, box.y, box.w, box.h);
    g.fillStyle = box.w * k < 6 ? p.category[box.category] : p.speck[box.category];
    g.fillRect(box.x, box.y + box.h * (1 - part), Math.max(box.w, 0.7 / k), box.h * part);
    if (10 * k < READABLE || box.w * k < 24) return;
    g.textBaseline = "middle"; g.textAlign = "left"; g.fillStyle = p.ink;
    this.text(box, "label", box.label, box.x + 3, box.y + box.h / 2 + 0.5, box.w - 6, 10, 400);
  }

  /* Glyph, label, lines and bars of a box. */
  words(box, left, framed) {
    const g = this.context, p = this.palette, s = box.scale, k = this.view.k * s;
    const chip = box.h / s < 22 && !framed, title = chip ? 10.5 : 12;
    if (title * k < READABLE) {
      if (framed && box.w * this.view.k > 80 && box.h * this.view.k > 36) this.far.push(box);
      return;
    }
    const middle = box.y + (chip ? box.h / 2 : 13 * s), size = chip ? 11 : 14;
    this.glyph(this.kindOf(box), box.x + left, middle - size * s / 2, size * s, p.category[box.category]);
    const textX = box.x + left + (size + 5) * s;
    let room = box.x + box.w - textX - (box.severity ? 20 : 6) * s;
    if (chip && box.role === "group") room -= 48 * s;
    g.textBaseline = "middle"; g.textAlign = "left";
    g.fillStyle = p.ink;
    this.text(box, "label", box.label, textX, middle + 0.5 * s, room, title * s, chip ? 400 : framed && box.depth < 3 ? 650 : 600);
    if (chip) return;
    let y = box.y + 31 * s;
    g.fillStyle = p.soft;
    for (let at = 0; at < box.lines.length; at++, y += 15 * s) this.text(box, at, box.lines[at], box.x + left, y, box.w - left - 8 * s, 10.5 * s, 400);
    for (let at = 0; at < box.bars.length; at++, y += 15 * s) this.bar(box, box.bars[at], box.x + left, y, box.w - left - 9 * s);
  }

  /* From afar a large frame still says what it is, in letters of the screen's size; the outer one where two would meet. */
  farLabels() {
    const g = this.context, size = 10.5 / this.view.k, taken = [];
    for (const box of this.far) {
      g.textBaseline = "middle"; g.textAlign = "left"; g.fillStyle = this.palette.ink;
      g.globalAlpha = this.alphaOf(box);
      const width = Math.min(box.w, size * (1 + 0.62 * box.label.length)), x = box.x + size * 0.5, y = box.y + size * 0.85;
      if (taken.some((other) => Math.abs(other.y - y) < size * 1.2 && x < other.x + other.width && other.x < x + width)) continue;
      taken.push({ x, y, width });
      const saved = box.fits;
      box.fits = null; // another size: the cut for reading up close stays
      this.text(box, "label", box.label, x, y, box.w - size, size, 600);
      box.fits = saved;
    }
    g.globalAlpha = 1;
  }

  kindOf(box) { return box.role === "group" ? (box.children.length ? this.model.boxes[box.children[0]].kind : "Group") : box.kind; }

  glyph(kind, x, y, size, colour) {
    const g = this.context;
    g.save();
    g.translate(x, y); g.scale(size / 16, size / 16);
    g.lineWidth = 1.4; g.lineCap = g.lineJoin = "round"; g.strokeStyle = colour;
    g.stroke(this.glyphs(this.model.data.style, kind));
    g.restore();
  }

  bar(box, [label, fraction, words], x, y, width) {
    const g = this.context, p = this.palette, s = box.scale, h = 6 * s;
    g.font = `400 ${9.5 * s}px ${FONT}`; g.textAlign = "left"; g.fillStyle = p.soft;
    this.put(box, ["", label, 20 * s], x, y, 9.5 * s);
    const trackX = x + 29 * s, textW = Math.min(width - 60 * s, words.length * 5.4 * s + 4 * s), trackW = Math.min(box.w, 260 * s) - (trackX - box.x) - textW - 12 * s;
    g.fillStyle = p.track[box.category];
    g.beginPath(); g.roundRect(trackX, y - h / 2, trackW, h, h / 2); g.fill();
    if (fraction > 0) {
      g.fillStyle = p.category[box.category];
      g.beginPath(); g.roundRect(trackX, y - h / 2, Math.max(h, trackW * fraction), h, h / 2); g.fill();
    }
    g.fillStyle = p.ink;
    this.put(box, ["", words, g.measureText(words).width], trackX + trackW + 5 * s, y, 9.5 * s);
  }

  foldedNote(box) {
    if (box.count < 2 || box.h < box.header + 24 * box.scale) return;
    const g = this.context, s = box.scale;
    g.textAlign = "center"; g.fillStyle = this.palette.soft; g.font = `400 ${12 * s}px ${FONT}`;
    g.fillText(`folded: ${counted(box.count - (box.synthetic ? 0 : 1), "entity")} inside`, box.x + box.w / 2, box.y + (box.header + box.h) / 2, box.w - 20 * s);
  }

  badge(box) {
    const g = this.context, s = box.scale, colour = box.severity === "critical" ? this.palette.critical : this.palette.warn;
    this.ring(box, colour, 1.6);
    this.triangle(box.x + box.w - 11 * s, box.y + 12 * s, s, box.severity);
  }

  /* What a comparison found: a ring, and + − ~ at the corner. */
  changed(box) {
    const g = this.context, s = box.scale, colour = this.palette.change[box.change];
    this.ring(box, colour, 2, box.change === "removed" ? [5, 3] : []);
    if (9 * s * this.view.k < READABLE) return;
    const x = box.x + 1 * s, y = box.y + 1 * s;
    g.fillStyle = colour;
    g.beginPath(); g.arc(x, y, 6.5 * s, 0, 7); g.fill();
    g.fillStyle = this.palette.surface; g.font = `700 ${11 * s}px ${FONT}`; g.textAlign = "center"; g.textBaseline = "middle";
    g.fillText(CHANGE_SIGNS[box.change], x, y + 0.5 * s);
  }

  /* A finding about a line: the triangle of boxes, at its middle. */
  lineBadge(line) {
    const g = this.context, points = pointsOf(line), k = this.view.k, s = Math.min(1, Math.max(0.55, k)) / k;
    if (!points.length) return;
    let best = 1;
    const length = (at) => Math.hypot(points[at][0] - points[at - 1][0], points[at][1] - points[at - 1][1]);
    for (let at = 2; at < points.length; at++) if (length(at) > length(best)) best = at;
    const [x0, y0] = points[line.curve ? points.length >> 1 : best - 1], [x1, y1] = points[line.curve ? points.length >> 1 : best];
    this.triangle(x0 + (x1 - x0) * 0.36, y0 + (y1 - y0) * 0.36, s, line.severity);
  }

  triangle(x, y, s, severity) {
    const g = this.context;
    g.fillStyle = severity === "critical" ? this.palette.critical : this.palette.warn;
    g.beginPath(); g.moveTo(x, y - 7 * s); g.lineTo(x + 8 * s, y + 6 * s); g.lineTo(x - 8 * s, y + 6 * s); g.closePath(); g.fill();
    g.lineWidth = 1.2 * s; g.strokeStyle = this.palette.surface; g.stroke();
    g.fillStyle = this.palette.surface; g.font = `700 ${9 * s}px ${FONT}`; g.textAlign = "center"; g.textBaseline = "middle";
    g.fillText("!", x, y + 1.5 * s);
  }

  ring(box, colour, width, dash = []) {
    const g = this.context, out = 2 / this.view.k;
    g.setLineDash(dash.map((part) => part / this.view.k));
    g.beginPath();
    g.roundRect(box.x - out, box.y - out, box.w + 2 * out, box.h + 2 * out, 8 * box.scale);
    g.lineWidth = Math.min(width, Math.max(1, box.h * this.view.k / 4)) / this.view.k; g.strokeStyle = colour; g.stroke();
    g.setLineDash([]);
  }

  /* Text cut to its room with an ellipsis; the cut is measured once per box, since all of it scales. */
  text(box, key, words, x, y, room, size, weight) {
    const g = this.context;
    g.font = `${weight} ${size}px ${FONT}`;
    const fits = box.fits ||= {}, known = fits[key];
    if (known && Math.abs(known[0] - room) < 0.01 * room) { this.put(box, known, x, y, size); return; }
    let cut = words;
    if (g.measureText(cut).width > room) {
      let low = 0, high = cut.length;
      while (low < high) {
        const half = (low + high + 1) >> 1;
        if (g.measureText(words.slice(0, half) + "…").width <= room) low = half; else high = half - 1;
      }
      if (low > 0 && /[\ud800-\udbff]/.test(words[low - 1])) low--;
      cut = low ? words.slice(0, low) + "…" : "";
    }
    fits[key] = [room, cut, g.measureText(cut).width];
    this.put(box, fits[key], x, y, size);
  }

  /* Words of a frame stand on its ground, so that lines pass behind them. */
  put(box, [, words, width], x, y, size) {
    const g = this.context;
    if (box.role === "frame" && !box.folded) {
      const ink = g.fillStyle;
      g.fillStyle = this.palette.frame[box.category][0];
      g.fillRect(x - 2 * box.scale, y - size * 0.62, width + 4 * box.scale, size * 1.22);
      g.fillStyle = ink;
    }
    g.fillText(words, x, y);
  }

  lines(lines, faded) {
    const g = this.context, p = this.palette, k = this.view.k;
    g.lineJoin = g.lineCap = "round";
    const usual = this.scene.dim || k > 0.6 ? 0.8 : Math.max(0.22, 0.8 * Math.min(1, Math.sqrt(100 / lines.length))); // many lines from afar: lighter
    for (const line of lines) {
      const points = pointsOf(line);
      if (!points.length) continue;
      if (!this.sees(line)) continue;
      const edge = p.edge[line.medium], hot = line === this.scene.line;
      const colour = line.change ? p.change[line.change] : edge.colour, dash = line.change === "removed" ? [3, 3] : edge.dash;
      g.globalAlpha = faded ? 0.12 : hot || line.extra ? 1 : usual;
      g.strokeStyle = g.fillStyle = colour;
      const width = Math.max((1.2 + 2.2 * line.weight + (hot ? 1.5 : 0)), 0.7 / k);
      g.lineWidth = width;
      g.setLineDash(dash.map((part) => part * width));
      g.beginPath();
      g.moveTo(...points[0]);
      if (line.curve) g.bezierCurveTo(...line.curve.slice(2));
      else {
        for (let at = 1; at < points.length - 1; at++) {
          const [px, py] = points[at - 1], [x, y] = points[at], [nx, ny] = points[at + 1];
          g.arcTo(x, y, nx, ny, Math.min(7, Math.hypot(x - px, y - py) / 2, Math.hypot(nx - x, ny - y) / 2));
        }
        g.lineTo(...points[points.length - 1]);
      }
      if (line.severity) { // a band of the finding's colour under the line
        const usualAlpha = g.globalAlpha;
        g.setLineDash([]); g.globalAlpha = faded ? 0.08 : 0.45; g.lineWidth = width + Math.max(6, 4 / k); g.strokeStyle = line.severity === "critical" ? p.critical : p.warn;
        g.stroke();
        g.globalAlpha = usualAlpha; g.lineWidth = width; g.strokeStyle = colour; g.setLineDash(dash.map((part) => part * width));
      }
      g.stroke();
      g.setLineDash([]);
      if (k > 0.22 && !faded) {
        if (line.forward) this.arrow(points[points.length - 2], points[points.length - 1], width);
        else this.dot(points[points.length - 1], width);
        if (line.backward) this.arrow(points[1], points[0], width);
        else this.dot(points[0], width);
      }
    }
    g.globalAlpha = 1;
  }

  arrow([x0, y0], [x1, y1], width) {
    const g = this.context, angle = Math.atan2(y1 - y0, x1 - x0), size = 5 + width;
    g.beginPath();
    g.moveTo(x1, y1);
    g.lineTo(x1 - size * Math.cos(angle - 0.42), y1 - size * Math.sin(angle - 0.42));
    g.lineTo(x1 - size * Math.cos(angle + 0.42), y1 - size * Math.sin(angle + 0.42));
    g.closePath(); g.fill();
  }

  dot([x, y], width) {
    const g = this.context;
    g.beginPath(); g.arc(x, y, 1.2 + width * 0.7, 0, 7); g.fill();
  }

  /* Words at lines: in the longest level stretch that has room, never over a card or another word. */
  lineLabels(lines) {
    const g = this.context, p = this.palette, k = this.view.k, taken = [], size = 9.5;
    if (size * k < READABLE + 0.8) return;
    g.font = `500 ${size}px ${FONT}`; g.textBaseline = "middle"; g.textAlign = "center";
    let drawn = 0;
    for (const line of lines) {
      const words = line.change ? `${CHANGE_SIGNS[line.change]} ${line.label}`.trim() : line.label;
      if (!words || drawn > 300 || (this.scene.dim && this.faded(line) && !line.extra)) continue;
      let width = this.widths.get(words);
      if (width === undefined) this.widths.set(words, width = g.measureText(words).width + 8);
      const spot = this.labelSpot(line, width, taken);
      if (!spot) continue;
      taken.push(spot);
      drawn++;
      const colour = line.change ? p.change[line.change] : p.edge[line.medium].colour;
      g.beginPath(); g.roundRect(spot.x - width / 2, spot.y - 6.5, width, 13, 4);
      g.fillStyle = p.surface; g.globalAlpha = 0.94; g.fill(); g.globalAlpha = 1;
      g.lineWidth = 0.7; g.strokeStyle = colour; g.stroke();
      g.fillStyle = colour;
      g.fillText(words, spot.x, spot.y + 0.5);
    }
  }

  labelSpot(line, width, taken) {
    const points = pointsOf(line), s = this.seen, stretches = [];
    for (let at = 1; at < points.length; at++) {
      const [x0, y0] = points[at - 1], [x1, y1] = points[at], level = Math.abs(y1 - y0) < 1;
      const length = Math.hypot(x1 - x0, y1 - y0);
      if (!line.curve && !(level ? length > width + 6 : length > 20)) continue;
      for (const share of line.curve ? [0.5] : [0.5, 0.25, 0.75]) stretches.push([(level ? 2 * length : length) - (share === 0.5 ? 0 : 0.1), x0 + (x1 - x0) * share, y0 + (y1 - y0) * share]);
    }
    stretches.sort((one, two) => two[0] - one[0]);
    for (const [, x, y] of stretches) {
      if (x < s.x0 || x > s.x1 || y < s.y0 || y > s.y1) continue;
      const spot = { x, y, w: width };
      if (taken.some((other) => Math.abs(other.x - x) < (other.w + width) / 2 + 2 && Math.abs(other.y - y) < 15)) continue;
      if (line.extra || [-1, 0, 1].every((across) => [-1, 1].every((down) => this.free(x + across * width / 2, y + down * 7)))) return spot;
    }
    return null;
  }

  /* Nothing but the ground of frames at a point. */
  free(x, y) {
    const box = boxAt(this.model.boxes, x, y);
    return box < 0 || (this.model.boxes[box].role === "frame" && !this.model.boxes[box].folded && y > this.model.boxes[box].y + this.model.boxes[box].header + 2);
  }
}

/* The innermost box at a point, -1 if none; what is inside a folded box counts as that box. */
function boxAt(boxes, x, y, least = 0) {
  let found = -1, i = 0, end = boxes.length;
  while (i < end) {
    const box = boxes[i];
    if (x >= box.x && x <= box.x + box.w && y >= box.y && y <= box.y + box.h && box.h >= least) {
      found = i;
      if (box.folded) return found;
      end = box.end;
      i++;
    } else i = box.end;
  }
  return found;
}

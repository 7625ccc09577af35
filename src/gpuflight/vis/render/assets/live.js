/* The live page: the viewer over the newest round of the server that it came from, following the stream of rounds.
   Numbers of a difference are shown at once; the picture itself is asked for again, as often as that is cheap. */
const TOKEN_KEY = "gpuflight-token";

class Live {
  constructor() {
    this.viewer = null;
    this.token = sessionStorage.getItem(TOKEN_KEY) || "";
    this.lastEvent = "";
    this.round = 0;
    this.stale = false;
    this.stopped = false;
    this.cost = 0; // ms that the last picture took
    this.query = new URLSearchParams(location.search); // focus, depth, kinds, min_metric, layout as of the export
    document.getElementById("token-use").addEventListener("click", () => this.useToken());
    document.getElementById("token").addEventListener("keydown", (event) => { event.stopPropagation(); if (event.key === "Enter") this.useToken(); });
  }

  useToken() {
    this.token = document.getElementById("token").value.trim();
    sessionStorage.setItem(TOKEN_KEY, this.token);
    document.getElementById("login").hidden = true;
    this.answered?.();
  }

  say(text) {
    document.documentElement.dataset.live = text ? "waiting" : "following";
    const subtitle = document.getElementById("subtitle");
    if (text) subtitle.textContent = text; else if (this.viewer) this.viewer.heading();
  }

  /* An answer of the server; asks for a token until one is taken. */
  async ask(path, headers = {}) {
    for (;;) {
      const answer = await fetch(path, { cache: "no-cache", credentials: "omit", headers: { ...headers, ...(this.token ? { Authorization: `Bearer ${this.token}` } : {}) } });
      if (answer.status !== 401 && answer.status !== 403) return answer;
      const said = await answer.json().catch(() => null);
      document.documentElement.dataset.live = "login";
      document.getElementById("token-said").textContent = this.token ? said?.error?.message || "this token is not taken" : "";
      document.getElementById("login").hidden = false;
      document.getElementById("token").focus();
      await new Promise((done) => { this.answered = done; });
    }
  }

  async picture() {
    const began = performance.now();
    this.stale = false;
    const answer = await this.ask(`api/v1/graph/view?${this.query}`, { Accept: "application/json" });
    const data = await answer.json();
    if (!answer.ok) throw new Error(data.error?.message || `status ${answer.status}`);
    if (this.viewer) this.viewer.replace(data); else this.viewer = begin(data);
    this.round = data.round;
    this.cost = performance.now() - began;
    document.documentElement.dataset.round = String(data.round);
    this.say("");
  }

  /* A tenth of the time goes into asking again: never more than one picture in a second, and one in ten at least. */
  refresh() {
    this.stale = true;
    if (this.timer) return;
    this.timer = setTimeout(async () => {
      this.timer = 0;
      if (document.hidden) return; // asked again when somebody looks
      try { await this.picture(); } catch (error) { this.say(`The picture could not be renewed: ${error.message}`); }
    }, Math.min(10000, Math.max(1000, this.cost * 9)));
  }

  event(name, data) {
    if (name === "end") { this.say(`The stream ended: ${data.reason}; asking again …`); return; }
    this.say("");
    if (data.round <= this.round) return;
    document.documentElement.dataset.event = String(data.round);
    if (name === "diff" && this.viewer) this.numbers(data);
    this.refresh();
  }

  /* What only moved is shown in the details, the tips and the pinned numbers without waiting for the picture. */
  numbers(diff) {
    const { model, panel, selected, line } = this.viewer;
    this.index = this.index?.model === model ? this.index : { model, boxes: new Map(model.boxes.map((box) => [box.id, box])) };
    for (const step of diff.nodes_changed || []) {
      const box = this.index.boxes.get(step.id);
      if (!box) continue;
      for (const group of ["attributes", "metrics", "unknown"]) {
        Object.assign(box[group], step[group] || {});
        for (const gone of step.gone?.[group] || []) delete box[group][gone];
      }
    }
    const section = panel.section.details, at = section.scrollTop;
    if (!line && selected >= 0 && !section.contains(document.activeElement)) { panel.details(selected); section.scrollTop = at; }
    panel.pins();
  }

  /* Server-Sent Events by fetch, since EventSource cannot send a token. Ends when the stream does. */
  async follow() {
    const answer = await this.ask("api/v1/stream", this.lastEvent ? { "Last-Event-ID": this.lastEvent } : {});
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const messages = text.split("\n\n");
      text = messages.pop();
      for (const message of messages) this.message(message);
    }
  }

  message(text) {
    let name = "message", id = "";
    const data = [];
    for (const row of text.split("\n")) {
      if (row.startsWith("event:")) name = row.slice(6).trim();
      else if (row.startsWith("id:")) id = row.slice(3).trim();
      else if (row.startsWith("data:")) data.push(row.slice(5).trimStart());
    }
    if (!data.length) return; // a sign of life, or how soon to come again
    this.event(name, JSON.parse(data.join("\n")));
    if (id) this.lastEvent = id;
  }

  async run() {
    document.addEventListener("visibilitychange", () => { if (!document.hidden && this.stale) this.refresh(); });
    for (let wait = 1000; ; wait = Math.min(wait * 2, 30000)) {
      try {
        if (!this.viewer) await this.picture();
        const began = performance.now();
        await this.follow();
        if (performance.now() - began > 10000) wait = 500;
      } catch (error) {
        this.say(`No answer from the server (${error.message}); asking again …`);
      }
      await new Promise((done) => setTimeout(done, wait));
    }
  }
}

new Live().run();

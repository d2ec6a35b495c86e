
"use strict";
(() => {
  const EVERY_MS = 2000;      // between two looks
  const ANSWER_MAX_MS = 20000;
  const SAMPLES_MAX = 150;    // of a plot
  const SVG = "http://www.w3.org/2000/svg";
  const TIERS = ["memory", "peer", "nvme", "remote"];
  const $ = (id) => document.getElementById(id);

  // Texts go in as texts: what a name holds is never read as markup.
  const add = (parent, tag, text, classes) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (classes) node.className = classes;
    parent.appendChild(node);
    return node;
  };
  const draw = (parent, tag, attributes, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const name of Object.keys(attributes)) node.setAttribute(name, String(attributes[name]));
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  };
  const title = (node, text) => { draw(node, "title", {}, text); };

  const bytes = (n) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let at = 0;
    while (n >= 1024 && at < units.length - 1) { n /= 1024; ++at; }
    return (at === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)) + " " + units[at];
  };
  const rate = (n) => {
    const units = ["B/s", "kB/s", "MB/s", "GB/s"];
    let at = 0;
    while (n >= 1000 && at < units.length - 1) { n /= 1000; ++at; }
    return (at === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)) + " " + units[at];
  };
  const age = (ms) => {
    const s = Math.max(0, Math.floor(ms / 1000));
    if (s < 60) return s + " s";
    if (s < 3600) return Math.floor(s / 60) + " min " + s % 60 + " s";
    if (s < 86400) return Math.floor(s / 3600) + " h " + Math.floor(s % 3600 / 60) + " min";
    return Math.floor(s / 86400) + " d " + Math.floor(s % 86400 / 3600) + " h";
  };

  const heads = (table, names) => {
    table.replaceChildren();
    const row = add(add(table, "thead"), "tr");
    for (const name of names) add(row, "th", name.replace(/^#/, ""), name.startsWith("#") ? "n" : "");
    return add(table, "tbody");
  };
  const rowOf = (body, cells) => {
    const row = add(body, "tr");
    for (const cell of cells) {
      if (cell instanceof Node) add(row, "td").appendChild(cell);
      else if (Array.isArray(cell)) add(row, "td", cell[0], cell[1]);
      else add(row, "td", cell);
    }
    return row;
  };
  const meter = (used, max) => {
    const node = document.createElement("meter");
    node.max = max;
    node.value = used;
    return node;
  };

  // ---- This node ----

  const showDaemon = (now) => {
    $("daemon").textContent = "ckptd " + now.version + " on " + now.node + ", pid " + now.pid + ", up " +
      age(now.uptime_ms) + ", " + now.connections + " connections";
    const list = $("problems");
    list.replaceChildren();
    if (now.membership_problem) add(list, "li", "membership: " + now.membership_problem);
    for (const problem of now.problems) add(list, "li", problem);
    if (now.problems_left_out > 0) add(list, "li", now.problems_left_out + " older ones: ckptctl status");
  };

  const showTiers = (now) => {
    const body = heads($("tiers"), ["tier", "", "#used", "#of", "#left in the file system", "#under way", "state"]);
    for (const tier of now.tiers) {
      const row = rowOf(body, [
        tier.tier, tier.max > 0 ? meter(tier.used, tier.max) : "", [bytes(tier.used), "n"],
        [tier.max > 0 ? bytes(tier.max) : "no limit", "n"], [tier.free > 0 ? bytes(tier.free) : "", "n"],
        [String(tier.flushes), "n"],
        [tier.stalled > 0 ? tier.stalled + " stalled: " + tier.state : tier.state,
         tier.healthy && tier.stalled === 0 ? "" : "ill"]]);
      row.dataset.tier = tier.tier;
    }
  };

  const held = (of, tier) => {
    const one = of[tier];
    return [one ? one.shards + " (" + bytes(one.bytes) + ")" : "", "n"];
  };
  const showNodes = (now) => {
    const body = heads($("nodes"), ["node", "state", "labels", "#memory", "#hosts", "#memory holds", "#peer", "#nvme", "#remote"]);
    for (const node of now.nodes) {
      const row = rowOf(body, [
        node.name,
        node.here ? ["this one", "well"] : node.reachable ? ["up", "well"] : ["out of reach: " + node.unreachable, "ill"],
        node.labels, [node.memory > 0 ? bytes(node.memory) : "?", "n"], [node.jobs + (node.jobs === 1 ? " job" : " jobs"), "n"],
        ...TIERS.map((tier) => held(node.held, tier))]);
      row.dataset.node = node.name;
    }
    if (Object.keys(now.held_by_all).length > 0) {
      rowOf(body, [["every node reaches", "dim"], "", "", "", "", ...TIERS.map((tier) => held(now.held_by_all, tier))]);
    }
    $("nodes-note").textContent = "Shards (and bytes) of the steps whose map is shown." +
      (now.nodes_left_out > 0 ? " " + now.nodes_left_out + " more nodes: ckptctl nodes." : "");
  };

  // ---- Jobs ----

  const protection = (parent, job) => {
    const table = add(parent, "table");
    table.className = "protection";
    const body = heads(table, ["if this dies now", "you are back at", "#old", "from"]);
    for (const line of job.protection) {
      rowOf(body, line.any
        ? [line.kind, "step " + line.step + " (attempt " + line.attempt + ")", [age(line.age_ms), "n"], line.from]
        : [line.kind, ["nothing would survive", "ill"], "", ""]);
    }
  };

  const lags = (parent, job) => {
    const table = add(parent, "table");
    const body = heads(table, ["tier", "#newest step", "#old", "#holds", "on the way"]);
    for (const tier of job.tiers) {
      const way = tier.flushing.map((f) => "step " + f.step + ": " + f.ranks_done + " of " + f.world_size +
        (f.stalled ? " STALLED" : ""));
      if (tier.waiting) way.push("one waits");
      if (tier.problem) way.push(tier.problem);
      rowOf(body, [tier.tier, [tier.any ? String(tier.step) : "none", "n"], [tier.any ? age(tier.age_ms) : "", "n"],
                   [tier.checkpoints + " (" + bytes(tier.bytes) + ")", "n"],
                   [way.join("; "), tier.problem || tier.flushing.some((f) => f.stalled) ? "ill" : ""]]);
    }
  };

  const NAMES = { ".": "none", g: "good", p: "some of them good", w: "being written", a: "out of reach", b: "bad" };
  const cellsOf = (step, tier) => {
    const one = step.map && step.map[tier];
    const width = 192;
    const cells = one ? one.cells : ".".repeat(Math.min(step.world_size, 64));
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("width", String(width));
    svg.setAttribute("height", "14");
    svg.setAttribute("class", "map");
    svg.dataset.cells = cells;
    const each = width / Math.max(1, cells.length);
    // Runs of the same kind are one box.
    for (let begin = 0; begin < cells.length;) {
      let end = begin + 1;
      if (cells.length > 32) while (end < cells.length && cells[end] === cells[begin]) ++end;
      const box = draw(svg, "rect", {
        x: (begin * each).toFixed(2), y: 1, height: 12, width: Math.max(0.5, (end - begin) * each - (each > 3 ? 1 : 0)).toFixed(2),
        class: cells[begin] === "." ? "c-none" : "c-" + cells[begin],
      });
      const first = Math.floor(begin * step.world_size / cells.length);
      const last = Math.max(first, Math.ceil(end * step.world_size / cells.length) - 1);
      title(box, (first === last ? "rank " + first : "ranks " + first + " to " + last) + ": " + NAMES[cells[begin]]);
      begin = end;
    }
    return svg;
  };
  const steps = (parent, job) => {
    const tiers = TIERS.filter((tier) => job.steps.some((step) => step.tiers.includes(tier) || (step.map && step.map[tier])));
    const table = add(parent, "table");
    table.className = "steps";
    const body = heads(table, ["#step", "#attempt", "state", "#size", ...tiers]);
    for (const step of job.steps) {
      const row = rowOf(body, [[String(step.step), "n"], [String(step.attempt), step.on_line ? "n" : "n dim"],
        [step.state + (step.pinned ? ", pinned" : "") + (step.on_line ? "" : ", another branch"),
         step.state === "bad" ? "ill" : ""],
        [bytes(step.bytes), "n"],
        ...tiers.map((tier) => step.map ? cellsOf(step, tier) : step.tiers.includes(tier) ? "some" : "")]);
      row.dataset.step = String(step.step);
    }
    if (job.steps_left_out > 0) add(parent, "p", job.steps_left_out + " more: ckptctl list", "note");
    if (job.steps.some((step) => !step.map)) {
      add(parent, "p", "Steps of many ranks are shown without a map: ckptctl where", "note");
    }
  };

  const timeline = (parent, job) => {
    const saves = job.saves.filter((save) => save.stages.length > 0).reverse();
    if (saves.length === 0) {
      add(parent, "p", "no saves are remembered", "note");
      return;
    }
    const width = 560, left = 84, line = 20;
    const classOf = (stage) => "s-" + (/^[a-z]+$/.test(stage) ? stage : "other");
    const legend = add(parent, "p", undefined, "legend");
    for (const stage of new Set(saves.flatMap((save) => save.stages.map((s) => s.stage)))) {
      const mark = draw(legend, "svg", { width: 10, height: 10 });
      draw(mark, "rect", { width: 10, height: 10, class: classOf(stage) });
      add(legend, "span", stage);
    }
    // Each save from its own begin: what differs is how long they took.
    const ends = saves.map((save) => Math.max(...save.stages.map((s) => (s.end_us === null ? s.begin_us : s.end_us))) -
      Math.min(...save.stages.map((s) => s.begin_us)));
    const most = Math.max(1, ...ends);
    const svg = draw(parent, "svg", { width: width + left + 60, height: saves.length * line + 18, class: "timeline" });
    saves.forEach((save, i) => {
      const zero = Math.min(...save.stages.map((s) => s.begin_us));
      draw(svg, "text", { x: 0, y: i * line + 14 }, "step " + save.step);
      const high = Math.max(2, (line - 3) / save.stages.length);
      save.stages.forEach((stage, k) => {
        const from = (stage.begin_us - zero) / most * width;
        const to = stage.end_us === null ? width : (stage.end_us - zero) / most * width;
        const box = draw(svg, "rect", { x: (left + from).toFixed(1), y: (i * line + 2 + k * high).toFixed(1),
          width: Math.max(2, to - from).toFixed(1), height: high.toFixed(1),
          class: stage.failed ? "s-failed" : classOf(stage.stage) });
        title(box, "step " + save.step + " " + stage.stage + ": " +
          (stage.end_us === null ? "under way" : ((stage.end_us - stage.begin_us) / 1000).toFixed(1) + " ms") +
          (stage.failed ? ", failed" : "") + "; " + save.fate);
      });
    });
    draw(svg, "text", { x: left, y: saves.length * line + 14 }, "0");
    draw(svg, "text", { x: left + width - 20, y: saves.length * line + 14 }, (most / 1000).toFixed(most < 1e5 ? 1 : 0) + " ms");
  };

  const showJobs = (now) => {
    const all = $("jobs");
    all.replaceChildren();
    if (now.jobs.length === 0) add(all, "p", "none has joined since their copies were last removed", "note");
    for (const job of now.jobs) {
      const box = add(all, "div", undefined, "job");
      box.dataset.job = job.name;
      add(box, "h3", job.name);
      const gone = job.phase === "running" && job.ranks_alive < job.world_size;
      add(box, "div", "attempt " + job.attempt + ", " + job.phase + "; " + job.ranks_alive + " of " + job.world_size +
        " ranks alive on " + job.nodes + (job.nodes === 1 ? " node" : " nodes") + "; uid " + job.uid + "; host " + job.host,
        gone ? "ill" : "dim");
      if (job.problem) add(box, "div", job.problem, "ill");
      if (job.restore_point) add(box, "div", "next restore: " + job.restore_point + " (set by hand)");
      if (job.restore) add(box, "div", "restores: " + job.restore);
      for (const step of job.in_flight) {
        add(box, "div", "being saved: step " + step.step + ": " + step.ranks_done + " of " + step.world_size + " ranks");
      }
      const parts = add(box, "div", undefined, "parts");
      const part = (name, fill) => {
        const one = add(parts, "div");
        add(one, "h4", name);
        fill(one, job);
      };
      part("Protection", protection);
      part("Tiers", lags);
      part("Steps and ranks", steps);
      part("Recent saves", timeline);
    }
    if (now.jobs_left_out > 0) add(all, "p", now.jobs_left_out + " more jobs: ckptctl jobs", "note");
  };

  // ---- Throughput, out of successive samples ----

  const history = new Map();  // by tier
  let before = null;
  const remember = (now) => {
    const seconds = before && before.pid === now.pid ? (now.uptime_ms - before.uptime_ms) / 1000 : 0;
    for (const tier of now.tiers) {
      if (tier.written === null) continue;
      if (!history.has(tier.tier)) history.set(tier.tier, []);
      const was = before && before.tiers.find((one) => one.tier === tier.tier);
      if (seconds <= 0 || !was || tier.written < was.written || tier.read < was.read) continue;
      const samples = history.get(tier.tier);
      samples.push({ written: (tier.written - was.written) / seconds, read: (tier.read - was.read) / seconds });
      if (samples.length > SAMPLES_MAX) samples.shift();
    }
    if (!before || before.uptime_ms !== now.uptime_ms || before.pid !== now.pid) before = now;
  };
  const showPlots = () => {
    const all = $("plots");
    all.replaceChildren();
    const width = 440, high = 60, left = 84;
    if (history.size > 0) {
      const legend = add(all, "p", undefined, "legend");
      for (const what of ["written", "read"]) {
        const mark = draw(legend, "svg", { width: 16, height: 10 });
        draw(mark, "line", { x1: 0, y1: 5, x2: 16, y2: 5, class: "plot plot-" + what });
        add(legend, "span", what);
      }
    }
    for (const [tier, samples] of history) {
      const svg = draw(all, "svg", { width: width + left, height: high + 20, class: "throughput" });
      svg.dataset.tier = tier;
      svg.dataset.samples = String(samples.length);
      const top = Math.max(0, ...samples.map((s) => Math.max(s.written, s.read)));
      const most = top > 0 ? top : 1;
      draw(svg, "text", { x: 0, y: 12 }, tier);
      draw(svg, "text", { x: 0, y: 28 }, top > 0 ? rate(top) : "");
      draw(svg, "line", { x1: left, y1: high, x2: left + width, y2: high, class: "axis" });
      for (const what of ["written", "read"]) {
        const points = samples.map((s, i) => (left + i * width / (SAMPLES_MAX - 1)).toFixed(1) + "," +
          (high - s[what] / most * (high - 6)).toFixed(1)).join(" ");
        draw(svg, "polyline", { points, class: "plot plot-" + what });
      }
      const last = samples[samples.length - 1];
      draw(svg, "text", { x: left, y: high + 15 },
        last ? "written " + rate(last.written) + ", read " + rate(last.read) : "a second sample is awaited");
    }
    if (history.size === 0) add(all, "p", "there are no tiers but memory", "note");
  };

  // ---- Again and again ----

  const state = (text, well) => {
    $("state").textContent = text;
    $("state").className = well ? "well" : "ill";
  };
  let answered = null;
  const look = async () => {
    try {
      const reply = await fetch("/status.json", { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MAX_MS) });
      if (!reply.ok) throw new Error((await reply.text()).trim());
      const now = await reply.json();
      answered = Date.now();
      showDaemon(now);
      showJobs(now);
      remember(now);
      showPlots();
      showTiers(now);
      showNodes(now);
      state("as of " + new Date(now.unix_ms).toISOString().replace("T", " ").slice(0, 19) + " UTC", true);
      document.body.dataset.looks = String(Number(document.body.dataset.looks || 0) + 1);
    } catch (error) {
      state("ckptd is away" + (answered === null ? "" : " for " + age(Date.now() - answered)) + ": " + error.message, false);
    }
    // Nobody looks at a page that is hidden: it asks again when it is shown.
    if (document.hidden) {
      await new Promise((shown) => document.addEventListener("visibilitychange", shown, { once: true }));
    }
    setTimeout(look, EVERY_MS);
  };
  look();
})();

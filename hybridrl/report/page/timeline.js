"use strict";
// The timeline: devices and their roles from top to bottom, time from left to right.
(function () {
  const { h, s, replace, number, seconds, share, key, table, linear, ticks } = Report;

  const LANE = 16, GAP = 12, TOP = 24, LEFT = 128, RIGHT = 10, LEAST_PIXELS = 0.4;
  const FIRST_STEPS = 5; // that are shown before anybody zooms
  const CAUSES = ["#a9abb4", "#c4b59a", "#9fb4c4", "#b7a3b9", "#a8b8a0", "#c2a5a0", "#8f939c"];
  let view = null, data = null, parts = null, picked = -1, frame = 0;

  function whole() {
    const last = data.steps[data.steps.length - 1];
    return [0, last[2]];
  }

  function newest() {
    const steps = data.steps.slice(-FIRST_STEPS);
    return [steps[0][1], steps[steps.length - 1][2]];
  }

  // Where each device begins, and how tall everything is.
  function layout() {
    let y = TOP;
    const tops = data.devices.map((device) => {
      const top = y;
      y += Math.max(1, device.roles.length) * LANE + GAP;
      return top;
    });
    return { tops, height: y - GAP + 8 };
  }

  const phaseOf = (span) => data.phases[span[2]];

  function draw() {
    const width = parts.svg.clientWidth;
    if (!width || !data) return;
    const left = width < 520 ? 92 : LEFT;
    const { tops, height } = layout();
    const x = linear(view[0], view[1], left, width - RIGHT);
    Object.assign(parts, { x, left, tops, width });
    parts.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    parts.svg.style.height = `${height}px`;
    const span = view[1] - view[0];
    const fits = (moment) => x(moment) > left + 14 && x(moment) < width - 24;
    const grid = ticks(view[0], view[1], Math.max(2, (width - left) / 110)).map((moment) => [
      s("line", { class: "grid", x1: x(moment), x2: x(moment), y1: TOP - 6, y2: height }),
      !fits(moment) ? null : s("text", { x: x(moment), y: 13, "text-anchor": "middle" },
        span < 0.5 ? `${(moment * 1e3).toFixed(span < 0.02 ? 1 : 0)} ms` : `${+moment.toFixed(2)} s`)]);
    const labels = data.devices.map((device, index) => [
      s("text", { x: 0, y: tops[index] + 12, "font-weight": "600" },
        `${width < 520 ? "" : "device "}${device.device}`),
      device.roles.map((role, lane) => s("text",
        { x: left - 8, y: tops[index] + lane * LANE + 12, "text-anchor": "end" },
        role.length > 11 && width < 520 ? `${role.slice(0, 9)}…` : role))]);
    const clip = s("clipPath", { id: "lanes" },
      s("rect", { x: left, y: 0, width: Math.max(0, width - RIGHT - left), height }));
    replace(parts.svg, clip, s("g", { "clip-path": "url(#lanes)" }, backgrounds(), grid, bars(),
      boundaries(height)), labels, frameOf(picked));
  }

  // A device's own ground: what shows of it while no span covers it is nothing recorded.
  function backgrounds() {
    return data.devices.map((device, index) => s("rect", { x: parts.left, y: parts.tops[index] - 2,
      width: parts.width, height: Math.max(1, device.roles.length) * LANE + 2, fill: "var(--idle)",
      opacity: 0.55 }));
  }

  function boundaries(height) {
    return data.steps.map(([step, start]) => [
      s("line", { x1: parts.x(start), x2: parts.x(start), y1: TOP - 6, y2: height,
        stroke: "var(--faint)", "stroke-dasharray": "2 3" }),
      s("text", { x: parts.x(start) + 3, y: TOP - 1, "font-size": "10" }, `${step}`)]);
  }

  // Of spans that are narrower than a pixel, neighbours in a lane become one.
  function bars() {
    const made = [], until = new Map();
    data.spans.forEach((span, index) => {
      const [device, lane, , , start, length] = span;
      if (start + length < view[0] || start > view[1]) return;
      const from = parts.x(start), wide = parts.x(start + length) - from;
      const row = `${device}/${lane}`;
      if (wide < LEAST_PIXELS && from - (until.get(row) || -9) < 1) return;
      until.set(row, from + wide);
      made.push(bar(span, index, from, wide));
    });
    return made;
  }

  function bar(span, index, from, wide) {
    const [name, colour] = phaseOf(span);
    const [device, lane] = span;
    const idle = name === "idle";
    const lanes = Math.max(1, data.devices[device].roles.length);
    const y = parts.tops[device] + (lane < 0 ? 0 : lane * LANE);
    const tall = lane < 0 ? lanes * LANE - 2 : LANE - 2;
    const rect = s("rect", { x: from.toFixed(2), y, width: Math.max(wide, 0.8).toFixed(2),
      height: tall, fill: idle ? causeColour(data.names[span[3]]) : colour,
      opacity: idle ? 0.34 : 1, "data-span": index });
    if (idle || wide < 60) return rect;
    const label = data.names[span[3]];
    if (label.length * 6 > wide - 8) return rect;
    return [rect, s("text", { x: from + 5, y: y + 11, "pointer-events": "none",
      style: { fill: "#fff", fontSize: "10.5px" } }, label)];
  }

  function frameOf(index) {
    const span = data.spans[index];
    if (!span) return null;
    const lanes = Math.max(1, data.devices[span[0]].roles.length);
    const tall = span[1] < 0 ? lanes * LANE - 2 : LANE - 2;
    const from = Math.max(parts.left, parts.x(span[4]));
    return s("rect", { x: from, y: parts.tops[span[0]] + Math.max(0, span[1]) * LANE,
      width: Math.max(2, parts.x(span[4] + span[5]) - from), height: tall, fill: "none",
      stroke: "var(--ink)", "stroke-width": 1.6, "pointer-events": "none" });
  }

  function causeColour(cause) {
    const all = [...new Set(data.devices.flatMap((device) => Object.keys(device.idle)))];
    return CAUSES[Math.max(0, all.indexOf(cause)) % CAUSES.length];
  }

  function tell(index) {
    picked = index;
    const span = data.spans[index];
    if (!span) {
      replace(parts.tip, "Drag to move, Ctrl and the wheel to zoom; or the keys + − ← → and 0, and "
        + "↑ ↓ from span to span.");
      return;
    }
    const [device, lane, , name, start, length, rank, tokens] = span;
    const where = data.devices[device];
    const step = data.steps.find((one) => start < one[2]) || data.steps[data.steps.length - 1];
    const who = lane < 0 ? "idle, " : `${where.roles[lane]}${rank >= 0 ? ` rank ${rank}` : ""} · `;
    replace(parts.tip, h("b", {}, who, data.names[name]), ` · ${phaseOf(span)[0]} · `,
      h("b", {}, seconds(length)), ` on device ${where.device}, from ${seconds(start)}, step ${step[0]}`,
      tokens ? ` · ${number(tokens)} tokens` : "");
  }

  function zoom(times, around) {
    const [low, high] = whole();
    const middle = around === undefined ? (view[0] + view[1]) / 2 : around;
    const span = Math.min(high - low, Math.max((high - low) / 5000, (view[1] - view[0]) * times));
    const part = (middle - view[0]) / (view[1] - view[0] || 1);
    move(middle - part * span, span);
  }

  function move(start, span = view[1] - view[0]) {
    const [low, high] = whole();
    const first = Math.max(low, Math.min(high - span, start));
    view = [first, first + span];
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(draw);
  }

  function wheel(event) {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== parts.svg) return;
    event.preventDefault();
    const inside = event.clientX - parts.svg.getBoundingClientRect().left;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      move(view[0] + (event.deltaX / parts.width) * (view[1] - view[0]));
    } else zoom(event.deltaY > 0 ? 1.25 : 0.8, parts.x.invert(inside));
  }

  function keys(event) {
    const by = (view[1] - view[0]) / 8;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "+" || event.key === "=") zoom(0.7);
    else if (event.key === "-") zoom(1.4);
    else if (event.key === "0" || event.key === "Home") reset();
    else if (event.key === "ArrowLeft") move(view[0] - by);
    else if (event.key === "ArrowRight") move(view[0] + by);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      tell(Math.max(0, Math.min(data.spans.length - 1,
        picked + (event.key === "ArrowDown" ? 1 : -1))));
      const [, , , , start, length] = data.spans[picked];
      if (start + length < view[0] || start > view[1]) move(start - by);
      else draw();
    } else return;
    event.preventDefault();
  }

  function reset() {
    view = whole();
    draw();
  }

  function drag(event) {
    if (event.buttons === 1 && parts.grip !== null) {
      const by = (parts.grip - event.clientX) / (parts.width - parts.left) * (view[1] - view[0]);
      parts.grip = event.clientX;
      move(view[0] + by);
      return;
    }
    const at = event.target.dataset ? event.target.dataset.span : undefined;
    if (at === undefined || Number(at) === picked) return;
    tell(Number(at));
    const old = parts.svg.lastChild;
    if (old.getAttribute("stroke-width") === "1.6") old.remove();
    parts.svg.append(frameOf(picked));
  }

  function build(root) {
    parts = { grip: null, tip: h("div", { class: "tip", "aria-live": "polite" }),
      note: h("p", { class: "note" }), idle: h("div", {}), legend: h("div", { class: "legend" }),
      choose: h("select", { onchange: () => {
        const step = data.steps[Number(parts.choose.value)];
        if (step) move(step[1], step[2] - step[1]); else reset();
      } }) };
    parts.svg = s("svg", { tabindex: "0", role: "application", onkeydown: keys, onpointermove: drag,
      "aria-label": "Timeline of devices: plus and minus zoom, arrows move",
      onpointerdown: (event) => { parts.grip = event.clientX; },
      onpointerup: () => { parts.grip = null; }, onpointerleave: () => { parts.grip = null; } });
    parts.svg.addEventListener("wheel", wheel, { passive: false });
    const button = (label, words, act) =>
      h("button", { type: "button", "aria-label": words, title: words, onclick: act }, label);
    replace(root, h("div", { class: "bar" }, parts.legend, h("span", { class: "end bar", style:
      { marginBottom: "0" } }, h("label", {}, "Step", parts.choose),
    button("+", "Zoom in", () => zoom(0.6)), button("−", "Zoom out", () => zoom(1 / 0.6)),
    button("←", "Earlier", () => move(view[0] - (view[1] - view[0]) / 4)),
    button("→", "Later", () => move(view[0] + (view[1] - view[0]) / 4)),
    button("all", "Show everything", reset))),
    h("div", { class: "lanes" }, parts.svg), parts.tip, parts.idle, parts.note);
    new ResizeObserver(draw).observe(parts.svg);
  }

  function idleTable() {
    return [h("h3", {}, "Idle time of devices, by cause"),
      h("div", { class: "idle" },
        table([["device"], ["idle", true], [""], ["causes"]], data.devices.map((device) => {
        const causes = Object.entries(device.idle);
        const all = causes.reduce((sum, [, value]) => sum + value, 0);
        return [String(device.device), share(all),
          h("span", { class: "stack", role: "img", "aria-label": `${share(all)} idle` },
            causes.map(([cause, value]) => h("i", { title: `${cause}: ${share(value)}`,
              style: { width: `${100 * value}%`, background: causeColour(cause) } }))),
          h("span", { class: "legend" }, causes.filter(([, value]) => value >= 0.005)
            .map(([cause, value]) => key(causeColour(cause), cause, " ", h("b", {}, share(value)))))];
      })))];
  }

  Report.sections.timeline = {
    title: "Timeline",
    needs: ["timeline"],
    render(root, { timeline }) {
      const before = data;
      data = timeline;
      if (!data.steps.length) {
        parts = null;
        replace(root, h("p", { class: "soft" }, data.note || "No step has been recorded yet."));
        return;
      }
      if (!parts) build(root);
      const saw = before && before.steps.length && view;
      const wasAll = saw && view[0] === 0 && view[1] === before.steps.at(-1)[2];
      const wasNewest = !saw || (view[1] >= before.steps.at(-1)[2] - 1e-9 && !wasAll);
      if (wasAll) view = whole();
      else if (wasNewest || view[1] > whole()[1]) view = newest();
      const used = new Set(data.spans.map((span) => span[2]));
      replace(parts.legend, data.phases.filter(([name], index) => used.has(index) && name !== "idle")
        .map(([name, colour]) => key(colour, name)), key("var(--idle)", "idle"));
      replace(parts.choose, h("option", { value: "-1" }, "all shown"),
        data.steps.map(([step], index) => h("option", { value: index }, String(step))));
      parts.note.textContent = data.note;
      replace(parts.idle, idleTable());
      tell(-1);
      draw();
    },
  };
})();

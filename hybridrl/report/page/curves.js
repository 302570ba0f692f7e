"use strict";
// Curves over the steps, raw and smoothed, of one run or of several; one cross hair for all.
(function () {
  const { h, s, replace, known, number, seconds, share, key, colour, linear, extent, axes } = Report;

  const HEIGHT = 150, LEFT = 48, RIGHT = 8, TOP = 8, BOTTOM = 20;
  const SMOOTH_FROM = 30; // with fewer points the raw line is readable by itself
  const MOST_REWARDS = 6;
  const charts = new Map(); // by title: kept when new data comes, so that focus stays
  let smoothing = null, step = null, frame = 0;

  // A running mean, centred so that it does not lag; one-sided at the ends.
  function smoothed(values, reach) {
    const sums = [0];
    for (const value of values) sums.push(sums[sums.length - 1] + value);
    return values.map((_, index) => {
      const first = Math.max(0, index - reach), end = Math.min(values.length, index + reach + 1);
      return (sums[end] - sums[first]) / (end - first);
    });
  }

  function reachOf(count) {
    if (smoothing === 0) return 0;
    if (smoothing === null) return count >= SMOOTH_FROM ? Math.max(2, Math.floor(count / 24)) : 0;
    return Math.max(1, Math.floor((count * smoothing) / 200));
  }

  // The points at or before a step.
  function at(x, wanted) {
    let low = 0, high = x.length - 1;
    if (!x.length || x[0] > wanted) return -1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (x[middle] <= wanted) low = middle; else high = middle - 1;
    }
    return low;
  }

  function path(x, y, xs, ys) {
    return xs.map((one, index) =>
      `${index ? "L" : "M"}${x(one).toFixed(1)} ${y(ys[index]).toFixed(1)}`).join("");
  }

  class Chart {
    constructor(title, unit) {
      this.svg = s("svg", { role: "img", tabindex: "0", "aria-label": title,
        onpointermove: (event) => this.point(event), onpointerleave: () => cross(null),
        onkeydown: (event) => this.move(event) });
      this.now = h("div", { class: "now" });
      this.root = h("div", { class: "chart" },
        h("h3", {}, title, unit ? h("small", {}, unit) : null), this.now, this.svg);
      this.unit = unit;
      new ResizeObserver(() => this.draw()).observe(this.svg);
    }

    // `lines`: {label, colour, x, y, dash?, interval?: [[low, high], ...], dots?}; `stack`: areas.
    update(lines, range, stack) {
      Object.assign(this, { lines, range, stack });
      this.draw();
    }

    draw() {
      const width = this.svg.clientWidth;
      if (!width || !this.lines) return;
      const box = { left: LEFT, right: width - RIGHT, top: TOP, bottom: HEIGHT - BOTTOM };
      const [first, last] = this.range;
      const x = linear(first - (first === last ? 0.5 : 0), last + (first === last ? 0.5 : 0),
        box.left, box.right);
      const values = this.lines.flatMap((line) => [...line.y, ...(line.interval || []).flat()])
        .filter(known);
      const found = extent(this.stack ? [0, ...values] : values);
      const [low, high] = this.stack ? [0, found[1]] : found;
      const y = linear(low, high, box.bottom, box.top);
      this.box = box; this.x = x; this.y = y;
      this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      this.cross = s("g", {});
      replace(this.svg, axes(x, y, [low, high], [first, last], box),
        this.stack ? this.areas() : this.lines.map((line) => this.line(line)), this.cross);
      this.show();
    }

    areas() {
      let below = null;
      return this.lines.map((line) => {
        const base = below || line.y.map(() => 0);
        const back = line.x.map((one, index) => [one, base[index]]).reverse();
        below = line.y;
        const area = path(this.x, this.y, line.x, line.y) + back.map(([one, value]) =>
          `L${this.x(one).toFixed(1)} ${this.y(value).toFixed(1)}`).join("") + "Z";
        return s("path", { d: area, fill: line.colour, stroke: line.colour, "stroke-width": 0.6 });
      });
    }

    line({ x: xs, y: ys, colour: stroke, dash, interval, dots }) {
      const reach = dots ? 0 : reachOf(ys.length);
      const common = { fill: "none", stroke, "stroke-linejoin": "round", "stroke-dasharray": dash };
      const whiskers = (interval || []).map(([low, high], index) => known(low) && known(high)
        ? s("line", { stroke, "stroke-width": 5, opacity: 0.22, x1: this.x(xs[index]),
          x2: this.x(xs[index]), y1: this.y(low), y2: this.y(high) })
        : null);
      const marks = dots || ys.length === 1
        ? ys.map((value, index) => s("circle",
          { cx: this.x(xs[index]), cy: this.y(value), r: ys.length > 40 ? 1.6 : 3, fill: stroke }))
        : null;
      return [
        whiskers,
        s("path", { ...common, d: path(this.x, this.y, xs, ys), "stroke-width": reach ? 1 : 1.7,
          opacity: reach ? 0.32 : 1 }),
        reach ? s("path", { ...common, d: path(this.x, this.y, xs, smoothed(ys, reach)),
          "stroke-width": 1.9 }) : null,
        marks,
      ];
    }

    point(event) {
      const inside = event.clientX - this.svg.getBoundingClientRect().left;
      const [first, last] = this.range;
      cross(Math.max(first, Math.min(last, Math.round(this.x.invert(inside)))));
    }

    move(event) {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      const [first, last] = this.range;
      if (event.key === "Escape") cross(null);
      else if (event.key === "Home") cross(first);
      else if (event.key === "End") cross(last);
      else if (by) cross(Math.max(first, Math.min(last, (step === null ? last : step) + by)));
      else return;
      event.preventDefault();
    }

    // The values at the cross hair, or the last ones.
    show() {
      if (!this.cross) return;
      const wanted = step === null ? this.range[1] : step;
      const format = this.unit === "s" ? seconds : this.unit === "share" ? share : number;
      const drawn = [];
      let below = 0;
      const total = this.stack ? this.lines[this.lines.length - 1] : null;
      const last = total ? at(total.x, wanted) : -1;
      const shown = this.lines.map((line) => {
        const index = at(line.x, wanted);
        if (index < 0) return null;
        const value = this.stack ? line.y[index] - below : line.y[index];
        if (this.stack) below = line.y[index];
        if (step !== null && !this.stack) {
          drawn.push(s("circle", { cx: this.x(line.x[index]), cy: this.y(line.y[index]), r: 3.2,
            fill: line.colour }));
        }
        const bounds = line.interval && line.interval[index];
        const sure = bounds && known(bounds[0])
          ? ` (${number(bounds[0])} to ${number(bounds[1])})` : "";
        return key(line.colour, line.label ? `${line.label} ` : "", h("b", {}, format(value)), sure);
      });
      replace(this.now, step === null ? null : h("span", {}, `step ${step}`),
        last < 0 ? null : h("b", { class: "total" }, format(total.y[last])), shown);
      replace(this.cross, step === null ? null : [
        s("line", { class: "cross", x1: this.x(step), x2: this.x(step), y1: this.box.top,
          y2: this.box.bottom }), drawn]);
    }
  }

  function cross(wanted) {
    step = wanted;
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => charts.forEach((chart) => chart.show()));
  }

  // Lines of a panel: of one run a colour for each metric, of several one for each run.
  function linesOf(runs, shown) {
    const many = runs.length > 1;
    const there = shown.filter(([name]) => runs.some((run) => run.series[name]));
    return runs.flatMap((run, number) => there.map(([name, label], which) => {
      const found = run.series[name];
      if (!found) return null;
      return { label: there.length > 1 ? label : "", run: run.name, colour: colour(many ? number : which), x: found.x,
        y: found.y, dash: many && which ? "5 4" : null };
    })).filter(Boolean);
  }

  function evaluationLines(runs) {
    const titles = new Map();
    runs.forEach((run, number) => run.evaluations.forEach(({ set, metric, points }) => {
      const title = `${set}: ${metric}`;
      if (!titles.has(title)) titles.set(title, []);
      titles.get(title).push({ label: "", run: run.name, dots: true,
        colour: colour(runs.length > 1 ? number : 1), x: points.map((one) => one[0]),
        y: points.map((one) => one[1]), interval: points.map((one) => [one[2], one[3]]) });
    }));
    return [...titles].map(([title, lines]) => ({ title, unit: "with intervals of 95%", lines }));
  }

  // Seconds of a step by phase, one upon the other; of several runs their whole steps.
  function timePanel(runs, phases) {
    if (runs.length > 1) {
      return { title: "Time of a step", unit: "s", lines: linesOf(runs, [["time/step", ""]]) };
    }
    const there = phases.filter(([phase]) =>
      (runs[0].series[`time/${phase}`] || { y: [] }).y.some((value) => value > 1e-6));
    if (!there.length) return { title: "Time of a step", unit: "s", lines: [] };
    const xs = runs[0].series[`time/${there[0][0]}`].x;
    let below = xs.map(() => 0);
    const lines = there.map(([phase, shade]) => {
      const found = runs[0].series[`time/${phase}`];
      const values = new Map(found.x.map((one, index) => [one, found.y[index]]));
      below = xs.map((one, index) => below[index] + (values.get(one) || 0));
      return { label: phase, colour: shade, x: xs, y: below };
    });
    return { title: "Time of a step", unit: "s", lines, stack: true };
  }

  const OWN = /^(reward|cost)\/(?!(mean|std|correct|dropped|failures|timeouts)$)(?!.*\/std$)/;

  function panelsOf({ panels, phases, runs }) {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.series)))].sort();
    const functions = names.filter((name) => OWN.test(name)).slice(0, MOST_REWARDS);
    const known = new Set(panels.flatMap(([, , shown]) => shown.map(([name]) => name)));
    const first = panels.map(([title, unit, shown]) =>
      ({ title, unit, lines: linesOf(runs, shown) }));
    if (functions.length > 1) {
      first.splice(1, 0, { title: "Reward by function and source", unit: "",
        lines: linesOf(runs, functions.map((name) => [name, name.replace(/^reward\//, "")])) });
    }
    first.splice(1, 0, ...evaluationLines(runs));
    first.push(timePanel(runs, phases));
    const others = names
      .filter((name) => !known.has(name) && !functions.includes(name)
        && !/^(time|share|memory)\//.test(name))
      .map((name) => ({ title: name, unit: "", lines: linesOf(runs, [[name, ""]]) }));
    const there = first.filter((one) => one.lines.length);
    const isZero = (one) => one.lines.every((line) => line.y.every((value) => value === 0));
    return { first: there.filter((one) => !isZero(one)), others,
      zeros: there.filter(isZero).map((one) => one.title.toLowerCase()) };
  }

  function grid(panels, range) {
    return panels.map(({ title, unit, lines, stack }) => {
      if (!charts.has(title)) charts.set(title, new Chart(title, unit));
      const chart = charts.get(title);
      chart.update(lines, range, stack);
      return chart.root;
    });
  }

  let parts = null;
  Report.sections.curves = {
    title: "Curves",
    needs: ["curves"],
    render(root, { curves }) {
      const { first, others, zeros } = panelsOf(curves);
      if (!first.length) {
        replace(root, h("p", { class: "soft" }, "No step has been measured yet."));
        parts = null;
        return;
      }
      const steps = [...first, ...others].flatMap((one) =>
        one.lines.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]));
      const range = [Math.min(...steps), Math.max(...steps)];
      if (!parts) {
        parts = { first: h("div", { class: "charts" }), others: h("div", { class: "charts" }),
          folded: h("details", {}), legend: h("div", { class: "legend" }), note: h("p", { class: "note" }) };
        const choose = h("select", { onchange: () => {
          smoothing = choose.value === "auto" ? null : Number(choose.value);
          charts.forEach((chart) => chart.draw());
        } }, [["auto", "automatic"], ["0", "none"], ["5", "5% of the run"], ["10", "10%"],
          ["25", "25%"]].map(([value, label]) => h("option", { value }, label)));
        replace(parts.folded, h("summary", {}), parts.others);
        replace(root, h("div", { class: "bar" }, parts.legend,
          h("label", { class: "end" }, "Smoothing", choose)), parts.first, parts.note, parts.folded);
      }
      replace(parts.legend, curves.runs.length > 1
        ? curves.runs.map((run, number) => key(colour(number), run.name)) : null);
      sync(parts.first, grid(first, range));
      sync(parts.others, grid(others, range));
      parts.folded.classList.toggle("hidden", !others.length);
      parts.folded.firstChild.textContent = `All other figures (${others.length})`;
      parts.note.textContent = [zeros.length ? `Always 0: ${zeros.join(", ")}.` : "",
        ...new Set(curves.runs.map((run) => run.note))].join(" ");
    },
  };

  // Sets the children only where they changed: what is moved in the document loses its focus.
  function sync(parent, children) {
    if (parent.children.length === children.length
      && children.every((one, index) => parent.children[index] === one)) return;
    replace(parent, children);
  }
})();

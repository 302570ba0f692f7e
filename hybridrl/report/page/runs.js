"use strict";
// The runs of a folder: a table to sort, to search, to choose from and to compare.
(function () {
  const { h, s, replace, known, number, seconds, moment, state } = Report;

  const COLUMNS = [
    ["", false, (run) => box(run), null],
    ["run", false, (run) => h("a", { href: `runs/${encodeURIComponent(run.name)}/` }, run.name),
      (run) => run.name],
    ["state", false, (run) => state(run.status.state), (run) => run.status.state],
    ["algorithm", false, (run) => run.algorithm || "–", (run) => run.algorithm || ""],
    ["step", true, (run) => run.steps ? `${number(run.step)} of ${number(run.steps)}`
      : number(run.step), (run) => run.step],
    ["reward", true, (run) => number(run.reward), (run) => run.reward],
    ["", false, (run) => spark(run.rewards), null],
    ["evaluated", false, (run) => evaluated(run), (run) => Object.values(run.evaluations)[0]],
    ["tokens", true, (run) => number(run.length), (run) => run.length],
    ["step time", true, (run) => seconds(run.seconds), (run) => run.seconds],
    ["tokens/s", true, (run) => number(run.speed), (run) => run.speed],
    ["began", false, (run) => run.status.began ? moment(run.status.began) : "–",
      (run) => run.status.began || ""],
  ];
  const chosen = new Set();
  let table = { folder: "", runs: [], note: "" }, by = null, falling = true;

  function box(run) {
    return h("input", { type: "checkbox", checked: chosen.has(run.name),
      "aria-label": `Compare ${run.name}`, onchange: (event) => {
        if (event.target.checked) chosen.add(run.name); else chosen.delete(run.name);
        drawCompare();
      } });
  }

  function spark(values) {
    if (values.length < 2) return "";
    const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
    const points = values.map((value, index) =>
      `${(index / (values.length - 1) * 88 + 1).toFixed(1)},${(17 - (value - low) / span * 15).toFixed(1)}`);
    return s("svg", { width: 90, height: 19, role: "img", "aria-label":
      `reward from ${number(values[0])} to ${number(values[values.length - 1])}` },
    s("polyline", { points: points.join(" "), fill: "none", stroke: "var(--accent)",
      "stroke-width": 1.5 }));
  }

  function evaluated(run) {
    const found = Object.entries(run.evaluations).filter(([, value]) => known(value));
    return found.slice(0, 2).map(([name, value]) =>
      h("div", {}, `${name} `, h("b", {}, number(value))));
  }

  function order(a, b) {
    if (a === b) return 0;
    if (a === null || a === undefined) return 1;
    if (b === null || b === undefined) return -1;
    return (a < b ? -1 : 1) * (falling ? -1 : 1);
  }

  const parts = { head: h("div", {}), live: h("span", { class: "soft", role: "status" }),
    compare: h("span", {}), table: h("div", { class: "scroll runs" }), note: h("p", { class: "note" }),
    search: h("input", { type: "search", placeholder: "Search names", "aria-label": "Search names",
      oninput: () => draw() }) };

  function drawCompare() {
    const names = table.runs.map((run) => run.name).filter((name) => chosen.has(name));
    replace(parts.compare, names.length < 2
      ? h("span", { class: "soft" }, "Choose two or more to compare.")
      : h("a", { href: `runs/${names.map(encodeURIComponent).join(",")}/` },
        `Compare ${names.length} runs`));
  }

  function heading([name, isNumber, , value]) {
    const sorted = by === value && value !== null;
    return h("th", { class: isNumber ? "n" : null, scope: "col",
      "aria-sort": sorted ? (falling ? "descending" : "ascending") : null },
    value === null ? name : h("button", { type: "button", onclick: () => {
      falling = by === value ? !falling : true;
      by = value;
      draw();
    } }, name, sorted ? (falling ? " ↓" : " ↑") : ""));
  }

  function draw() {
    const words = parts.search.value.toLowerCase();
    const runs = table.runs.filter((run) => run.name.toLowerCase().includes(words));
    if (by) runs.sort((a, b) => order(by(a), by(b)));
    replace(parts.head, h("h1", {}, table.folder), h("p", { class: "soft" },
      `${number(table.runs.length)} ${table.runs.length === 1 ? "run" : "runs"}`));
    replace(parts.table, h("table", {}, h("thead", {}, h("tr", {}, COLUMNS.map(heading))),
      h("tbody", {}, runs.map((run) => h("tr", {}, COLUMNS.map(([, isNumber, cell]) =>
        h("td", { class: isNumber ? "n" : null }, cell(run))))))));
    parts.note.textContent = table.note;
    drawCompare();
  }

  document.body.append(h("header", {}, parts.head), h("main", {},
    h("section", {}, h("div", { class: "bar" }, parts.search, parts.compare, parts.live),
      parts.table, parts.note)));
  draw();
  Report.follow((_, part) => {
    table = part;
    draw();
  }, (gone) => { parts.live.textContent = gone ? "the server has ended" : ""; });
})();

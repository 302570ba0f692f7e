"use strict";
// The page: its parts in order, and, where a server gives it, what is new.
(function () {
  const { h, replace, number, seconds, moment, state } = Report;
  const ORDER = ["words", "curves", "timeline", "samples", "data", "settings", "state"];
  const data = {}, roots = {};

  function facts(head) {
    const progress = head.steps ? `${number(head.step)} of ${number(head.steps)}` : number(head.step);
    const shown = [
      ["algorithm", head.algorithm], ["steps", progress], ["time in steps", seconds(head.seconds)],
      ["tokens made", head.tokens ? number(head.tokens) : null], ["model", head.model],
      ["began", head.status.began ? moment(head.status.began) : null],
      ["against", head.against.join(", ") || null],
    ].filter(([, value]) => value !== null && value !== undefined);
    return h("dl", { class: "facts" },
      shown.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }

  function foot(head) {
    const versions = Object.entries(head.versions || {}).map(([name, one]) => `${name} ${one}`);
    return [
      head.folder, head.commit ? `commit ${head.commit.slice(0, 10)}` : null,
      head.seed !== null && head.seed !== undefined ? `seed ${head.seed}` : null,
      versions.join(", ") || null, `read ${moment(head.made)}`,
    ].filter(Boolean).join(" · ");
  }

  function drawHead() {
    const { head } = data;
    replace(roots.header,
      h("div", { class: "title" }, h("h1", {}, head.name), state(head.status.state)),
      facts(head));
    replace(roots.footer, h("div", {}, foot(head)),
      head.command ? h("div", {}, head.command.join(" ")) : null);
  }

  function draw(changed) {
    if (changed.includes("head")) drawHead();
    for (const name of ORDER) {
      const section = Report.sections[name];
      if (!section.needs.some((part) => changed.includes(part))) continue;
      if (!section.needs.every((part) => part in data)) continue;
      try {
        section.render(roots[name], data);
      } catch (error) {
        replace(roots[name], h("p", { class: "bad" }, `This part could not be drawn: ${error.message}`));
        console.error(error);
      }
    }
  }

  function build() {
    roots.header = h("div", {});
    roots.live = h("span", { class: "live", role: "status" });
    roots.footer = h("footer", {});
    const sections = ORDER.map((name) => {
      roots[name] = h("div", {});
      return h("section", { id: name, "aria-labelledby": `${name}-title` },
        h("h2", { id: `${name}-title` }, Report.sections[name].title), roots[name]);
    });
    document.body.append(
      h("header", {}, roots.header),
      h("nav", { "aria-label": "Parts of the report" }, h("div", {},
        ORDER.map((name) => h("a", { href: `#${name}` }, Report.sections[name].title)), roots.live)),
      h("main", {}, sections, roots.footer));
  }

  build();
  for (const element of document.querySelectorAll("script[type='application/json']")) {
    data[element.id.replace("data-", "")] = JSON.parse(element.textContent);
    element.remove();
  }
  draw(Object.keys(data));
  if (document.documentElement.dataset.live === "true") {
    for (const name of ORDER) replace(roots[name], h("p", { class: "soft" }, "…"));
    Report.follow((name, part) => {
      data[name] = part;
      draw([name]);
    }, (gone) => {
      const running = data.head && data.head.status.state === "running";
      roots.live.textContent = gone ? "the server has ended" : running ? "live" : "";
    });
  }
})();

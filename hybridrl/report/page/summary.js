"use strict";
// In words: what was learned, where the time went, what to try next.
(function () {
  const { h, replace, key, share, number } = Report;

  function phases(curves) {
    const run = curves.runs[0];
    const sums = curves.phases.map(([phase, colour]) => {
      const found = run.series[`time/${phase}`];
      return { phase, colour, sum: found ? found.y.slice(1).concat(found.y.length === 1 ? found.y : [])
        .reduce((a, b) => a + b, 0) : 0 };
    });
    const all = sums.reduce((total, one) => total + one.sum, 0);
    if (!all) return null;
    const shown = sums.filter((one) => one.sum / all >= 0.003);
    return [
      h("h3", {}, "Where the time of a step went", h("small", {}, "mean, by the driver's clock")),
      h("div", { class: "phasebar", role: "img",
        "aria-label": shown.map((one) => `${one.phase} ${share(one.sum / all)}`).join(", ") },
        shown.map((one) =>
          h("i", { style: { background: one.colour, width: `${100 * one.sum / all}%` } }))),
      h("div", { class: "legend", style: { marginTop: "7px" } },
        shown.map((one) => key(one.colour, one.phase, " ", h("b", {}, share(one.sum / all))))),
    ];
  }

  function advice(one) {
    return h("li", { class: `is-${one.kind}` },
      h("b", {}, one.title),
      h("p", {}, one.action),
      h("p", { class: "numbers" }, Object.entries(one.numbers).map(([name, value]) =>
        h("span", {}, `${name.replaceAll("_", " ")} `, h("b", {}, number(value))))));
  }

  Report.sections.words = {
    title: "In words",
    needs: ["words", "curves"],
    render(root, { words, curves }) {
      const learned = [words.learned].flat().filter(Boolean);
      replace(root,
        learned.map((text) => h("p", { class: "learned" }, text)),
        learned.length ? null : h("p", { class: "soft" }, "Nothing has been learned yet."),
        phases(curves),
        words.advice ? h("h3", {}, "What to try next") : null,
        words.advice === null ? null : words.advice.length
          ? h("ol", { class: "advice" }, words.advice.map(advice))
          : h("p", { class: "soft" }, "Nothing stands out."));
    },
  };
})();

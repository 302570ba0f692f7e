"use strict";
// The data: the first row as the model reads it, prompts that repeat, and rows left out.
(function () {
  const { h, replace, number, table } = Report;

  // Marks that turn the direction of writing would show a text as nobody reads it.
  const visible = (text) => text.replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd");

  function firstRow({ name, pieces }) {
    const learns = pieces.some((one) => one.is_learned);
    return [
      h("h3", {}, `First ${name} as the model reads it`,
        learns ? h("small", {}, h("mark", {}, "marked"), ": the tokens to learn") : null),
      h("pre", { class: "text first-row", tabindex: "0" },
        pieces.map((one) => one.is_learned ? h("mark", {}, visible(one.text)) : visible(one.text))),
    ];
  }

  Report.sections.data = {
    title: "Data",
    needs: ["data"],
    render(root, { data }) {
      const { first_row: rows, left_out: leftOut, ...sets } = data;
      const counts = Object.entries(sets).filter(([, one]) => one && "exact_duplicates" in Object(one));
      replace(root,
        counts.length ? table([["rows"], ["number", true],
          ["exact duplicates", true], ["near duplicates", true]],
        counts.map(([name, one]) => [name.replace("_", "-"), number(one.rows),
          number(one.exact_duplicates), number(one.near_duplicates)])) : null,
        Object.entries(leftOut || {}).map(([place, one]) => [
          h("h3", {}, `${number(one.left_out)} of ${number(one.rows)} rows of ${place} left out`),
          table([["reason"], ["rows", true], ["first"]], Object.entries(one.reasons).map(
            ([reason, { rows: count, first }]) => [reason, number(count), first])),
        ]),
        (rows || []).map(firstRow),
        counts.length || (rows || []).length ? null
          : h("p", { class: "soft" }, "The run has no data-report.json that says anything."));
    },
  };
})();
